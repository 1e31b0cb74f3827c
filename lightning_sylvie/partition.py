"""Which part each node belongs to."""

from __future__ import annotations

import torch
from torch import Tensor


def check_assignment(parts: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Returns `parts` as int64 if it names one of `num_parts` parts for every node.

    Raises:
        ValueError: Saying what was expected, what was given, and what to change.
    """
    if parts.is_floating_point() or parts.is_complex() or parts.dtype == torch.bool:
        raise ValueError(f"expected whole part numbers, got {parts.dtype}: convert with .long()")
    if parts.shape != (num_nodes,):
        raise ValueError(
            f"expected one part per node, shape ({num_nodes},), got {tuple(parts.shape)}"
        )
    low, high = (int(value) for value in parts.aminmax())
    if low < 0 or high >= num_parts:
        raise ValueError(
            f"expected part numbers 0..{num_parts - 1}, got {low}..{high}: assign each node to one "
            f"of the {num_parts} ranks, or train on {high + 1} ranks"
        )
    return parts.long()
