"""When things begin and end on one rank, on a time line that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, final

import torch

Span: TypeAlias = tuple[float, float]
"""Beginning and end, in seconds as `time.time` counts them."""


class Timer:
    """Measures nothing: for those to whom nobody listens."""

    def start(self, what: str) -> Callable[[], None]:
        """Begins to measure; the function that it returns ends that, once, on any thread."""
        return _nothing

    def timing(self, what: str) -> AbstractContextManager[None]:
        """Measures what runs inside."""
        return nullcontext()


@final
class Stopwatch(Timer):
    """Keeps the spans that it measures, by name.

    Args:
        clock: Of the device whose work is measured.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    def start(self, what: str) -> Callable[[], None]:
        begun = self._clock.mark()

        def end() -> None:
            self._marks.setdefault(what, []).append((begun, self._clock.mark()))

        return end

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        end = self.start(what)
        yield
        end()

    def spans(self, what: str) -> list[Span]:
        """What has ended so far, in order."""
        to_time = self._clock.time
        return [(to_time(begun), to_time(end)) for begun, end in self._marks.get(what, ())]

    def seconds(self, what: str) -> float:
        """The length of all spans of a name together."""
        return sum(end - begin for begin, end in self.spans(what))

    def __contains__(self, what: str) -> bool:
        return what in self._marks


class Clock:
    """Marks moments of the host, which runs the work itself."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def time(self, mark: Any) -> float:
        """The moment of a mark, in seconds as `time.time` counts them."""
        return self._offset + float(mark)


class _CudaClock(Clock):
    """Marks moments of the current stream, without waiting for it; `time` waits for the mark."""

    def __init__(self) -> None:
        self._first = self.mark()
        self._first.synchronize()
        self._offset = time.time()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, mark: Any) -> float:
        mark.synchronize()
        return self._offset + float(self._first.elapsed_time(mark)) / 1000


def clock_of(device: torch.device) -> Clock:
    """The clock of the work on a device."""
    return _CudaClock() if device.type == "cuda" else Clock()


def now() -> float:
    """Seconds on a clock, after the kernels that a GPU has been given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def covered(spans: list[Span]) -> float:
    """Seconds in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _nothing() -> None:
    pass
