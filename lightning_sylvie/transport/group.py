"""What the transports over a process group share: ownership, bounded waits, failures, objects."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    PrefixStore,
    ProcessGroup,
    Work,
)
from torch.distributed.distributed_c10d import _get_default_store

from lightning_sylvie.transport.failure import FailureLog, PeerError
from lightning_sylvie.transport.transport import Move, Pending, Transport

T = TypeVar("T")


class GroupTransport(Transport):
    """A transport that owns its process group and says which rank broke it.

    gloo closes a group's connections, which is what wakes the peers, when the last reference to
    the group or to one of its works is gone; neither abort nor shutdown does it. A traceback keeps
    the variables of its frames. So the group lives in `_group` alone and works live in the lists
    of `_under_way` alone: no local variable may hold either across a call that can raise.

    Exchanges may be started and waited for on one thread while another sums, or ends the transport
    after an error. A thread that waits then keeps the group alive until its wait is over; it is
    over soon, as the other ranks start their exchanges in the same order, or see an error too.
    """

    def __init__(self, group: ProcessGroup, *, timeout: timedelta) -> None:
        super().__init__(group.rank(), group.size(), _device(group))
        self._group: ProcessGroup | None = group
        self._timeout = timeout
        self._under_way: list[Transfer] = []
        self._num_started = 0
        self._ending = threading.Lock()
        self._ended = self._failed = False
        store = PrefixStore(f"failure/{group.group_name}", _get_default_store().clone())  # type: ignore[attr-defined]
        self._log = FailureLog(store, self.rank, self.num_ranks, timeout)

    def all_gather_object(self, value: object) -> list[Any]:
        return [pickle.loads(data) for data in self._gather(pickle.dumps(value))]

    def broadcast_object(self, value: object, root: int) -> Any:
        return pickle.loads(self._gather(pickle.dumps(value) if self.rank == root else b"")[root])

    @final
    def report_failure(self, exception: BaseException) -> None:
        if not self._ended:
            self._log.report(exception)
            self._end(failed=True)
            self._log.linger()

    @final
    def close(self) -> None:
        self._end(failed=False)

    @final
    def _start(self, move: Move) -> Pending:
        transfer = Transfer(self, move.message, move.rows, move.name)
        self._under_way.append(transfer)
        self._num_started += 1
        self._post(transfer, move.send_counts, move.recv_counts)
        return transfer

    @abstractmethod
    def _post(
        self, transfer: Transfer, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> None:
        """Starts the works that move the transfer's message, through `guard`."""

    @abstractmethod
    def _wait(self, transfer: Transfer) -> None:
        """Waits for the transfer's works, through `guard`."""

    def _release(self, *, failed: bool) -> None:
        """Gives the group up. Overridden where a failed group needs more than that."""
        with contextlib.suppress(ValueError):  # destroyed before, together with the world
            dist.destroy_process_group(self._group)

    @final
    def finish(self, transfer: Transfer) -> None:
        """Waits for a transfer and forgets it."""
        self._wait(transfer)
        self._under_way.remove(transfer)

    @final
    def guard(self, action: Callable[[ProcessGroup], T], peer: int | None, waiting: str) -> T:
        """The action's value; an error of the backend becomes one that names the rank at fault."""
        if self._ended and not self._failed:
            raise PeerError(f"rank {self.rank} waits for {waiting} on a closed transport")
        error: Exception = RuntimeError("the transport was ended by an error")
        try:
            if self._group is not None and not self._ended:
                value = action(self._group)
                if not self._ended:
                    return value
        except (RuntimeError, IndexError) as caught:
            if isinstance(caught, IndexError) and not self._ended:
                raise
            error = caught.with_traceback(None)  # its frames refer to the group
        if not self._ended:
            self._log.record(peer, error)
            self._end(failed=True)  # wakes the ranks that wait for this one, for the same reason
        raise self._log.explain(peer, waiting, error) from error

    def _all_reduce(self, tensor: Tensor) -> None:
        options = AllreduceOptions()
        options.timeout = self._timeout
        self.guard(
            lambda group: group.allreduce([tensor], options).wait(),
            None,
            f"all-reduce {self.num_all_reduces}",
        )

    def _gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes. Built on the two calls above so that it fails as they do."""
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        self._all_reduce(sizes)
        recv_counts = sizes.tolist()
        recv_counts[self.rank] = 0
        others = self.num_ranks - 1
        send_counts = [0 if peer == self.rank else len(data) for peer in range(self.num_ranks)]
        message = torch.empty(others, len(data), dtype=torch.uint8)
        if data:
            message[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        message = message.view(-1, 1).to(self.device)
        rows = message.new_empty(sum(recv_counts), 1)
        self._start(Move(message, rows, send_counts, recv_counts, "objects")).wait()
        parts = [part.cpu().numpy().tobytes() for part in torch.split(rows, recv_counts)]
        parts[self.rank] = data
        return parts

    def _end(self, *, failed: bool) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended, self._failed = True, failed
        for transfer in list(self._under_way):
            transfer.works.clear()
        self._release(failed=failed)
        self._group = None
        self._under_way.clear()  # now, as the group no longer reads or writes the buffers


def _device(group: ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@final
class Transfer(Pending):
    """Buffers and works of one exchange.

    Lifetime: the backend holds bare pointers into `message` and `rows` until the works are done, so
    the transport keeps the transfer until `wait` returns, even if the caller drops it.
    """

    def __init__(self, transport: GroupTransport, message: Tensor, rows: Tensor, name: str) -> None:
        self._transport = transport
        self._done = False
        self.message: Tensor | None = message
        self.rows = rows
        self.name = name
        self.works: list[Work] = []
        self.peers: list[int | None] = []  # of each work; None: all

    def wait(self) -> Tensor:
        if not self._done:
            self._transport.finish(self)
            self.works.clear()
            self.message = None
            self._done = True
        return self.rows


class Deadline:
    """The time left of a limit."""

    def __init__(self, limit: timedelta) -> None:
        self._end = time.monotonic() + limit.total_seconds()

    def left(self) -> timedelta:
        """At least 1 ms: to gloo zero means for ever."""
        return timedelta(seconds=max(0.001, self._end - time.monotonic()))
