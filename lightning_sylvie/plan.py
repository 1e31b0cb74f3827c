"""The halo plan: who sends which rows to whom, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, repr=False)
class HaloPlan:
    """Which owned rows this rank sends to each rank, and how many halo rows it receives.

    A rank holds its owned rows first (``0 .. num_owned-1``) and its halo rows behind them,
    grouped by owner in rank order; inside a group they follow the owner's own row order, which is
    the order of the owner's ``send_index``. So no row number ever travels.

    Args:
        rank: This rank.
        num_owned: Rows this rank owns.
        send_index: int64 ``(sum(send_counts),)``, owned rows to send, grouped by receiving rank
            and strictly ascending inside each group. A row sent to k ranks stands there k times.
        send_counts: Rows sent to each rank; 0 for this rank.
        recv_counts: Rows received from each rank; 0 for this rank.

    Raises:
        ValueError: If the parts contradict each other.
    """

    rank: int
    num_owned: int
    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.send_counts) != len(self.recv_counts):
            raise ValueError(
                f"expected one send and one receive count per rank, got {len(self.send_counts)} "
                f"and {len(self.recv_counts)}"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"expected a rank in 0..{self.num_ranks - 1}, got {self.rank}")
        if self.send_counts[self.rank] or self.recv_counts[self.rank]:
            raise ValueError(f"rank {self.rank} must not exchange rows with itself")
        if self.send_index.dtype != torch.int64 or self.send_index.shape != (self.num_sent,):
            raise ValueError(
                f"expected send_index int64 of shape ({self.num_sent},), got "
                f"{self.send_index.dtype} of shape {tuple(self.send_index.shape)}"
            )
        for peer, rows in enumerate(self.send_index.split(list(self.send_counts))):
            if rows.numel() and not (0 <= int(rows[0]) and int(rows[-1]) < self.num_owned):
                raise ValueError(f"rows sent to rank {peer} lie outside 0..{self.num_owned - 1}")
            if bool((rows[1:] <= rows[:-1]).any()):
                raise ValueError(f"rows sent to rank {peer} are not strictly ascending")

    def __repr__(self) -> str:
        return (
            f"HaloPlan(rank {self.rank} of {self.num_ranks}: {self.num_owned} owned rows, sends "
            f"{list(self.send_counts)}, receives {list(self.recv_counts)})"
        )

    @property
    def num_ranks(self) -> int:
        return len(self.send_counts)

    @property
    def num_sent(self) -> int:
        """Boundary entries: a row sent to k ranks counts k times."""
        return sum(self.send_counts)

    @property
    def num_halo(self) -> int:
        return sum(self.recv_counts)

    @property
    def num_rows(self) -> int:
        """Owned and halo rows."""
        return self.num_owned + self.num_halo

    def to(self, device: torch.device) -> HaloPlan:
        """The same plan with its index on `device`."""
        if self.send_index.device == device:
            return self
        return HaloPlan(
            self.rank,
            self.num_owned,
            self.send_index.to(device),
            self.send_counts,
            self.recv_counts,
        )

    @classmethod
    def alone(cls, num_owned: int) -> HaloPlan:
        """The plan of the only rank: nothing to send."""
        return cls(0, num_owned, torch.empty(0, dtype=torch.int64), (0,), (0,))


def check_plans(counts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises unless every rank expects what its peers send.

    Args:
        counts: ``(send_counts, recv_counts)`` of every rank, in rank order.

    Raises:
        ValueError: Naming the two ranks that disagree.
    """
    for sender, (send_counts, _) in enumerate(counts):
        for receiver, (_, recv_counts) in enumerate(counts):
            if send_counts[receiver] != recv_counts[sender]:
                raise ValueError(
                    f"rank {sender} sends {send_counts[receiver]} rows to rank {receiver}, which "
                    f"expects {recv_counts[sender]}: the ranks hold parts of different cuts; "
                    "delete the parts folder or give every rank the same one"
                )
