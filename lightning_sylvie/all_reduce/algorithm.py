"""What every all-reduce does: a sum over the ranks, with the same bits on all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.transport import Transport


class AllReduce(ABC):
    """An all-reduce algorithm: every rank calls it with a tensor of the same shape and type.

    Half precision is summed (and travels) in float32 and rounded once at the end.
    """

    @final
    def __call__(self, tensor: Tensor, transport: Transport) -> None:
        """Replaces `tensor`, of any size, strides and type but bool, by its sum over the ranks.

        Raises:
            TypeError: For bool, which has no sum.
            PeerError: If a rank is gone, or does not answer within the transport's timeout.
        """
        if tensor.dtype == torch.bool:
            raise TypeError(
                "expected numbers to sum, got torch.bool: convert it to an integer type"
            )
        if transport.num_ranks == 1 or not tensor.numel():
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        half = real.dtype in (torch.float16, torch.bfloat16)
        values = (real.float() if half else real).contiguous()
        self._sum(values.view(-1), transport)
        if values is not real:
            real.copy_(values)

    @abstractmethod
    def _sum(self, values: Tensor, transport: Transport) -> None:
        """Sums `values` ``(size,)``, contiguous and not empty, over two ranks or more."""

    @abstractmethod
    def path(self, size: int, num_ranks: int) -> list[int]:
        """Values that the busiest rank moves in each step; what the cost model adds up."""

    @abstractmethod
    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        """Values that a rank sends in the sum of `size` values: the textbook cost."""


def bounds(size: int, num_blocks: int) -> list[int]:
    """Where the blocks of `size` values begin and end: as equal as can be, some perhaps empty."""
    return [index * size // num_blocks for index in range(num_blocks + 1)]


def largest(size: int, num_blocks: int) -> int:
    """Values of the largest of these blocks."""
    return -(-size // num_blocks)
