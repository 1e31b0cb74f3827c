"""A graph whose few hubs have most edges, unequal parts, and bits shared out step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.shard import Shard, cut

CHOICES = (1, 2, 4, 8)
ERRORS = [0.25 / (2**bits - 1) ** 2 for bits in CHOICES]
NUM_NODES, WIDTH = 90, 40


def shared_out(
    weights: Sequence[float],
    average: float,
    choices: Sequence[float] = CHOICES,
    errors: Sequence[float] = ERRORS,
) -> tuple[list[int], float]:
    """The number of each row's choice, step by step; what the first step not done would gain."""
    numbers, spent = [0] * len(weights), choices[0] * len(weights)

    def gain(row: int) -> float:
        return weights[row] * (errors[numbers[row]] - errors[numbers[row] + 1])

    def cost(row: int) -> float:
        return choices[numbers[row] + 1] - choices[numbers[row]]

    while open_rows := [row for row, number in enumerate(numbers) if number + 1 < len(choices)]:
        best = max(open_rows, key=lambda row: (gain(row) / cost(row), -numbers[row], -row))
        if spent + cost(best) > average * len(weights):
            return numbers, gain(best)
        spent += cost(best)
        numbers[best] += 1
    return numbers, 0.0


def graph() -> Graph:
    """Few nodes have most edges."""
    draw = torch.Generator().manual_seed(3)
    source = (NUM_NODES * torch.rand(700, generator=draw) ** 3).long()
    target = torch.randint(NUM_NODES, (700,), generator=draw)
    return Graph(NUM_NODES, torch.stack([source, target]), {})


def shards(num_ranks: int) -> list[Shard]:
    """Parts of unequal sizes."""
    draw = torch.Generator().manual_seed(num_ranks)
    shares = torch.arange(1.0, num_ranks + 1)
    parts = shares.multinomial(NUM_NODES, replacement=True, generator=draw)
    return cut(graph(), parts, num_ranks)


def values(epoch: int, seed: int = 0) -> Tensor:
    """A row for every node, of a size of its own that changes with the epoch."""
    draw = torch.Generator().manual_seed(1000 * seed + epoch)
    sizes = torch.randn(NUM_NODES, 1, generator=draw).mul(2).exp()
    return sizes * torch.randn(NUM_NODES, WIDTH, generator=draw)
