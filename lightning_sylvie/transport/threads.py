"""Ranks that are threads of one process: to prove a model, not to train it fast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from lightning_sylvie.transport.failure import PeerError, one_line
from lightning_sylvie.transport.transport import Move, Pending, Transport

T = TypeVar("T")


class Meeting:
    """Where the threads of one run swap values.

    Args:
        num_ranks: Threads that meet.
        timeout: Seconds a thread waits for the others.
    """

    def __init__(self, num_ranks: int, timeout: float = 600.0) -> None:
        self.num_ranks = num_ranks
        self.reason = "a rank did not come in time"
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=timeout)

    def swap(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        try:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError(f"{self.reason} (while rank {rank} waited)") from None
        return values

    def leave(self, rank: int, exception: BaseException) -> None:
        """Ends the waits of all ranks."""
        if not self._barrier.broken:
            self.reason = f"rank {rank} failed: {one_line(exception)}"
        self._barrier.abort()


@final
class Threads(Transport):
    """The transport of one thread; all threads of a run share a `Meeting`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.num_ranks)
        self._meeting = meeting

    def all_gather_object(self, value: object) -> list[Any]:
        return self._meeting.swap(self.rank, value)

    def broadcast_object(self, value: object, root: int) -> Any:
        return self._meeting.swap(self.rank, value)[root]

    def report_failure(self, exception: BaseException) -> None:
        self._meeting.leave(self.rank, exception)

    def close(self) -> None:
        pass

    def _start(self, move: Move) -> Pending:
        outgoing = move.message.clone().split(list(move.send_counts))
        blocks = self._meeting.swap(self.rank, outgoing)
        return _Swapped(move.rows.copy_(torch.cat([block[self.rank] for block in blocks])))

    def _all_reduce(self, tensor: Tensor) -> None:
        values = self._meeting.swap(self.rank, tensor.clone())
        tensor.copy_(torch.stack(values).sum(0))


@final
class _Swapped(Pending):
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


def run_threads(body: Callable[[Transport], T], num_ranks: int) -> list[T]:
    """The value that ``body(transport)`` returns on every rank, in rank order.

    Raises:
        Exception: The first error that is not the echo of another rank's.
    """
    meeting = Meeting(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = Threads(rank, meeting)
        try:
            results[rank] = body(transport)
        except BaseException as error:
            errors.append(error)
            transport.report_failure(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
        raise error
    return results
