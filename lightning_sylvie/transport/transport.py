"""The abstract transport: messages between ranks, and sums over them.

Every rank makes the same calls in the same order, with nothing to send too. A message is one
uint8 tensor of rows grouped by receiving rank; what its bytes mean is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


class Pending(ABC):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> Tensor:
        """uint8 ``(sum(recv_counts), stride)``, grouped by sending rank; again if called again.

        Raises:
            PeerError: If a rank is gone, or does not answer within the transport's timeout.
        """


@dataclass(frozen=True)
class Move:
    """What one call moves.

    Attributes:
        message: uint8 ``(sum(send_counts), stride)``, grouped by receiving rank.
        rows: uint8 ``(sum(recv_counts), stride)``, to be filled, grouped by sending rank.
        send_counts: Rows for each rank.
        recv_counts: Rows from each rank.
        name: For messages.
    """

    message: Tensor
    rows: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    name: str


class Transport(ABC):
    """Exchanges and sums among the ranks of one group, with bytes counted per peer.

    Attributes:
        rank: This rank.
        num_ranks: Ranks of the group.
        device: Where messages live.
        bytes_sent: Payload bytes sent to each rank by `start` and `send_receive` so far.
        bytes_received: Payload bytes from each rank, likewise.
        num_exchanges: Calls of `start` so far.
        num_steps: Calls of `send_receive` so far.
        num_all_reduces: Calls of `all_reduce` so far.
    """

    def __init__(self, rank: int, num_ranks: int, device: torch.device | None = None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = torch.device("cpu") if device is None else device
        self.bytes_sent = [0] * num_ranks
        self.bytes_received = [0] * num_ranks
        self.num_exchanges = 0
        self.num_steps = 0
        self.num_all_reduces = 0

    @final
    def start(
        self,
        message: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        rows: Tensor | None = None,
    ) -> Pending:
        """Starts to send the rows of `message`; several exchanges may be under way at once.

        Args:
            message: uint8 ``(sum(send_counts), stride)``, contiguous, grouped by receiving rank.
                It must not be changed until `Pending.wait` has returned.
            send_counts: Rows for each rank; 0 for this rank.
            recv_counts: Rows from each rank, of the same stride; 0 for this rank. It must be what
                the peers send: a longer message than expected ends the process inside gloo.
            rows: Where to receive, uint8 ``(sum(recv_counts), stride)``; None: in new memory.

        Raises:
            ValueError: If message and counts contradict each other.
            PeerError: If a rank is gone.
        """
        self._check(message, send_counts, recv_counts)
        if rows is None:
            rows = message.new_empty(sum(recv_counts), message.shape[1])
        elif rows.shape != (sum(recv_counts), message.shape[1]) or not rows.is_contiguous():
            raise ValueError(
                f"expected contiguous rows of shape {(sum(recv_counts), message.shape[1])}, got "
                f"shape {tuple(rows.shape)}"
            )
        self.num_exchanges += 1
        name = f"halo rows in exchange {self.num_exchanges}"
        return self._counted(Move(message, rows, send_counts, recv_counts, name))

    @final
    def exchange(
        self, message: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """`start` and `Pending.wait` in one."""
        return self.start(message, send_counts, recv_counts).wait()

    @final
    def send_receive(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Starts to send one tensor to a rank and to receive one from a rank, which may differ.

        Every rank calls it in every step of a collective, with empty tensors (and any ranks) where
        it has nothing to send or to receive.

        Args:
            outgoing: Contiguous; not changed until `Pending.wait` has returned.
            to: Who receives it.
            incoming: Contiguous; filled when `Pending.wait` has returned.
            source: Who sends it. Its tensor must have as many bytes.

        Raises:
            PeerError: If a rank is gone.
        """
        self.num_steps += 1
        message, rows = (
            part.view(-1).view(torch.uint8).view(-1, 1) for part in (outgoing, incoming)
        )
        send_counts, recv_counts = [0] * self.num_ranks, [0] * self.num_ranks
        send_counts[to], recv_counts[source] = len(message), len(rows)
        name = f"part of a sum in step {self.num_steps}"
        return self._counted(Move(message, rows, send_counts, recv_counts, name))

    @final
    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over the ranks, with the same bits on every rank.

        Raises:
            PeerError: If a rank is gone, or does not answer within the timeout.
        """
        self.num_all_reduces += 1
        self._all_reduce(tensor)

    @abstractmethod
    def all_gather_object(self, value: object) -> list[Any]:
        """Every rank's picklable `value`, in rank order. For set-up: it is slow and not counted."""

    @abstractmethod
    def broadcast_object(self, value: object, root: int) -> Any:
        """The value of rank `root`, on every rank. For set-up."""

    @abstractmethod
    def report_failure(self, exception: BaseException) -> None:
        """Tells the other ranks why this one fails, and ends their waits at once. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; an exchange under way is given up. Safe to call twice."""

    @abstractmethod
    def _start(self, move: Move) -> Pending:
        """Starts to move the message out and to fill the rows."""

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> None: ...

    def _counted(self, move: Move) -> Pending:
        stride = move.message.shape[1]
        for peer in range(self.num_ranks):
            self.bytes_sent[peer] += move.send_counts[peer] * stride
            self.bytes_received[peer] += move.recv_counts[peer] * stride
        return self._start(move)

    def _check(
        self, message: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> None:
        if not len(send_counts) == len(recv_counts) == self.num_ranks:
            raise ValueError(
                f"expected {self.num_ranks} send and receive counts, one per rank, got "
                f"{len(send_counts)} and {len(recv_counts)}"
            )
        if send_counts[self.rank] or recv_counts[self.rank]:
            raise ValueError(f"rank {self.rank} must not exchange rows with itself")
        if message.dtype != torch.uint8 or message.ndim != 2 or not message.is_contiguous():
            raise ValueError(
                "expected a contiguous uint8 message of shape (rows, stride), got "
                f"{message.dtype} of shape {tuple(message.shape)}, strides {message.stride()}"
            )
        if message.shape[0] != sum(send_counts):
            raise ValueError(
                f"expected a message of sum(send_counts) = {sum(send_counts)} rows, got "
                f"{message.shape[0]} on rank {self.rank}"
            )
