"""Training on rows that are one epoch old, in one process and in plain torch.

All parts are held at once. Part p reads the rows of other parts' nodes as they were in the last
epoch, a constant of this epoch. What its loss owes those rows reaches their owner in the next
epoch, as the gradient of a constant's product with the owner's rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data


def train_stale(
    weights: dict[str, Tensor],
    data: Data,
    parts: Tensor,
    num_epochs: int,
    is_synchronous: Callable[[int], bool] = lambda epoch: False,
    *,
    momentum: tuple[float, float] = (0.0, 0.0),
    lr: float = 0.02,
) -> dict[str, Tensor]:
    """Weights of a GraphSAGE after `num_epochs` of Adam on the mean loss over training nodes.

    Args:
        weights: Of ``torch_geometric.nn.GraphSAGE``, float64.
        data: The whole graph.
        parts: int64 ``(num_nodes,)``.
        num_epochs: Steps.
        is_synchronous: Which epochs use their own rows; the first always does.
        momentum: What the smoothed rows, and their gradients, keep of their last value.
        lr: Learning rate.
    """
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=lr)
    memory = _Memory(momentum)
    for epoch in range(num_epochs):
        optimizer.zero_grad()
        memory.step(weights, data, parts, synchronous=epoch == 0 or is_synchronous(epoch))
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


class _Memory:
    """What parts know of each other from the last epoch: for each layer, of every node."""

    def __init__(self, momentum: tuple[float, float]) -> None:
        self.momentum = momentum
        self.rows: dict[int, Tensor] = {}
        self.owed: dict[int, Tensor] = {}

    def step(
        self, weights: dict[str, Tensor], data: Data, parts: Tensor, *, synchronous: bool
    ) -> None:
        """Forward and backward of one epoch."""
        num_parts, num_layers = int(parts.max()) + 1, len(weights) // 3
        x, owed_now = data.x, torch.zeros((), dtype=data.x.dtype)
        rows, read = {}, {}
        for layer in range(num_layers):
            read[layer] = [x * 1 if synchronous else self.rows[layer] * 1 for _ in range(num_parts)]
            for copy in read[layer]:
                copy.requires_grad_() if not copy.requires_grad else copy.retain_grad()
            if not synchronous and layer in self.owed:
                owed_now = owed_now + (x * self.owed[layer]).sum()
            rows[layer] = x.detach()
            x = _layer(weights, layer, x, read[layer], data.edge_index, parts)
            x = x if layer == num_layers - 1 else x.relu()
        mask = data.train_mask
        (F.cross_entropy(x[mask], data.y[mask]) + owed_now).backward()
        for layer in range(num_layers):
            owed = torch.stack([copy.grad for copy in read[layer]]).sum(0)
            if layer:  # nobody asks for the gradient of the features
                _smooth(self.owed, layer, owed, self.momentum[1])
            _smooth(self.rows, layer, rows[layer], self.momentum[0])


def _smooth(memory: dict[int, Tensor], layer: int, new: Tensor, momentum: float) -> None:
    old = memory.get(layer, new)
    memory[layer] = (momentum * old + (1 - momentum) * new).detach()


def _layer(
    weights: dict[str, Tensor],
    layer: int,
    x: Tensor,
    read: list[Tensor],
    edge_index: Tensor,
    parts: Tensor,
) -> Tensor:
    """A GraphSAGE layer: mean over in-neighbours, which each part reads in its own copy."""
    source, destination = edge_index
    total = torch.zeros_like(x)
    for part, copy in enumerate(read):
        seen = torch.where((parts == part)[:, None], x, copy)
        edges = parts[destination] == part
        total = total.index_add(0, destination[edges], seen[source[edges]])
    degree = destination.bincount(minlength=x.shape[0]).clamp(min=1)
    name = f"convs.{layer}"
    mean = total / degree[:, None]
    bias = weights[f"{name}.lin_l.bias"]
    return F.linear(mean, weights[f"{name}.lin_l.weight"], bias) + F.linear(
        x, weights[f"{name}.lin_r.weight"]
    )
