"""The transport of a single process."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from lightning_sylvie.transport.transport import Move, Pending, Transport


@final
class Loopback(Transport):
    """The transport of the only rank: nobody to talk to."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_gather_object(self, value: object) -> list[Any]:
        return [value]

    def broadcast_object(self, value: object, root: int) -> Any:
        return value

    def report_failure(self, exception: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def _start(self, move: Move) -> Pending:
        return _Arrived(move.rows)

    def _all_reduce(self, tensor: Tensor) -> None:
        pass


@final
class _Arrived(Pending):
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows
