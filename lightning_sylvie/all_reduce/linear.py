"""All-reduce through one rank: the parameter server."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.transport import Transport

_ROOT = 0


@final
class Linear(AllReduce):
    """Rank 0 receives from each rank in turn, adds, and sends the sum to each in turn.

    2(N-1) steps, in all of which rank 0 moves the whole data.
    """

    def _sum(self, values: Tensor, transport: Transport) -> None:
        incoming = torch.empty_like(values) if transport.rank == _ROOT else values
        for peer in range(1, transport.num_ranks):
            _move(transport, peer, _ROOT, values, incoming)
            if transport.rank == _ROOT:
                values += incoming
        for peer in range(1, transport.num_ranks):
            _move(transport, _ROOT, peer, values, values)

    def path(self, size: int, num_ranks: int) -> list[int]:
        return [size] * (2 * (num_ranks - 1))

    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        return size * (num_ranks - 1) if rank == _ROOT else size


def _move(
    transport: Transport, source: int, target: int, outgoing: Tensor, incoming: Tensor
) -> None:
    """One step in which one rank sends to another, and the others do nothing."""
    outgoing = outgoing if transport.rank == source else outgoing[:0]
    incoming = incoming if transport.rank == target else incoming[:0]
    transport.send_receive(outgoing, target, incoming, source).wait()
