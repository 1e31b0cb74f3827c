"""Where sums run beside backward: a thread, or a stream of the GPU."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch


class Lane(ABC):
    """Runs calls one after the other, for one backward."""

    @abstractmethod
    def run(self, call: Callable[[], None]) -> None:
        """Runs a call after the earlier ones, and after what the caller has computed so far."""

    @abstractmethod
    def join(self) -> None:
        """Waits for all calls.

        Raises:
            Exception: What the first call that failed has raised.
        """

    @abstractmethod
    def leave(self) -> None:
        """Ends the lane after its present call, without waiting: the step has failed."""


@final
class ThreadLane(Lane):
    """A thread from the first call on, for transports whose waits block."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._left = False

    def run(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gradient-sum", daemon=True)
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        self._left = True
        self._calls.put(None)

    def _serve(self) -> None:
        try:
            while (call := self._calls.get()) is not None and not self._left:
                call()
        except Exception as error:  # raised where the caller joins
            self._error = error


@final
class StreamLane(Lane):
    """A stream of its own, for transports whose waits only hold up the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, call: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            call()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def leave(self) -> None:
        pass


def lane_on(device: torch.device) -> Lane:
    """The lane for sums of tensors on this device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
