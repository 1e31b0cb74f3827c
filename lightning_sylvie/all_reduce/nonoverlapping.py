"""All-reduce as a reduction to one rank and a broadcast from it."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.transport import Transport


@final
class Nonoverlapping(AllReduce):
    """Up a binomial tree to rank 0, then down again: 2 ceil(log2 N) steps of the whole data.

    Ranks that differ by `distance` meet: those at odd multiples of it are below the others.
    """

    def _sum(self, values: Tensor, transport: Transport) -> None:
        rank, num_ranks = transport.rank, transport.num_ranks
        incoming = torch.empty_like(values)
        for distance in _distances(num_ranks):
            child, parent = _place(rank, num_ranks, distance)
            outgoing = values if child else values[:0]
            arriving = incoming if parent else incoming[:0]
            _meet(transport, distance, outgoing, arriving)
            if parent:
                values += incoming
        for distance in reversed(_distances(num_ranks)):
            child, parent = _place(rank, num_ranks, distance)
            _meet(
                transport,
                distance,
                values if parent else values[:0],
                values if child else values[:0],
            )

    def path(self, size: int, num_ranks: int) -> list[int]:
        return [size] * (2 * len(_distances(num_ranks)))

    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        places = [_place(rank, num_ranks, distance) for distance in _distances(num_ranks)]
        return size * sum(child + parent for child, parent in places)


def _distances(num_ranks: int) -> list[int]:
    """1, 2, 4, … below the number of ranks."""
    return [1 << level for level in range((num_ranks - 1).bit_length())]


def _place(rank: int, num_ranks: int, distance: int) -> tuple[bool, bool]:
    """Whether the rank has a parent at this distance, and whether it has a child there."""
    offset = rank % (2 * distance)
    return offset == distance, offset == 0 and rank + distance < num_ranks


def _meet(transport: Transport, distance: int, outgoing: Tensor, incoming: Tensor) -> None:
    """One step of the tree; a rank sends or receives or, with empty tensors, does nothing."""
    rank = transport.rank
    child = rank % (2 * distance) == distance
    peer = rank - distance if child else min(rank + distance, transport.num_ranks - 1)
    transport.send_receive(outgoing, peer, incoming, peer).wait()
