"""What exchanges cost and lose: told to whoever listens, and nothing is measured for nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch

DIRECTIONS = ("forward", "backward")


class Observer:
    """Hears of every exchange that this rank takes part in. This one does not listen.

    Attributes:
        sample: Rows per message that are decoded where they were coded, to see what they lost.
    """

    sample = 0

    def timing(self, name: str, direction: int, what: str) -> AbstractContextManager[None]:
        """Measures what runs inside.

        Args:
            name: The layer.
            direction: 0: forward, 1: backward.
            what: ``"quantize"``, ``"exchange"`` or ``"dequantize"``.
        """
        return nullcontext()

    def sent(self, name: str, direction: int, num_bytes: int, error: float, energy: float) -> None:
        """Hears of a message to all peers together, when it is coded.

        Args:
            name: The layer.
            direction: 0: forward, 1: backward.
            num_bytes: Of the message.
            error: Squared error of the sampled rows, as their readers decode them.
            energy: Their squared norm.
        """


@dataclass
class Tally:
    """What one rank has seen of one layer's exchanges in one direction.

    Seconds of ``exchange`` are those of a message's way where the step waits for it; a pipelined
    one goes on beside the computation and adds none.
    """

    num_messages: int = 0
    num_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nmse(self) -> float:
        """Squared error of the sampled rows relative to their squared norm."""
        return self.error / self.energy if self.energy else 0.0


@final
class Tallies(Observer):
    """Adds up what it hears, by layer and direction.

    On a GPU it waits for the kernels around every part of an exchange, to tell their times apart.

    Args:
        sample: Rows per message whose error is measured.

    Attributes:
        by_layer: ``(layer, "forward" or "backward")`` -> its `Tally`, in the order of the step.
    """

    def __init__(self, sample: int = 64) -> None:
        self.sample = sample
        self.by_layer: dict[tuple[str, str], Tally] = {}

    def clear(self) -> None:
        """Forgets everything, as at the start of an epoch."""
        self.by_layer = {}

    @contextmanager
    def timing(self, name: str, direction: int, what: str) -> Iterator[None]:
        seconds = self._tally(name, direction).seconds
        start = now()
        yield
        seconds[what] = seconds.get(what, 0.0) + now() - start

    def sent(self, name: str, direction: int, num_bytes: int, error: float, energy: float) -> None:
        tally = self._tally(name, direction)
        tally.num_messages += 1
        tally.num_bytes += num_bytes
        tally.error += error
        tally.energy += energy

    def _tally(self, name: str, direction: int) -> Tally:
        return self.by_layer.setdefault((name, DIRECTIONS[direction]), Tally())


def now() -> float:
    """Seconds on a clock, after the kernels that a GPU has been given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
