"""A model of your own in a configuration: name its class, and its arguments are read from there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MLP


class GNNWithHead(torch.nn.Module):
    """Layers over the graph, then two linear ones, with a norm, ReLU and dropout between.

    Args:
        gnn: Gives `hidden_channels` values per node; called with the features and the edges.
        hidden_channels: Width of the first linear layer.
        out_channels: Scores per node.
        dropout: In front of each linear layer.
    """

    def __init__(
        self, gnn: torch.nn.Module, hidden_channels: int, out_channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.gnn, self.dropout = gnn, dropout
        self.norm = torch.nn.LayerNorm(hidden_channels)
        self.head = MLP(
            [hidden_channels, hidden_channels, out_channels],
            norm="layer_norm",
            norm_kwargs={"mode": "node"},
            dropout=[dropout, 0.0],
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = self.norm(self.gnn(x, edge_index)).relu()
        return self.head(torch.nn.functional.dropout(rows, self.dropout, self.training))
