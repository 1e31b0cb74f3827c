"""Layers that read more than their neighbours' rows, one by one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric import nn as pyg_nn

from lightning_sylvie.attach.message_passing import Attached


class OutEdges(Attached):
    """A layer with ``flow="target_to_source"``: it reads its out-neighbours.

    The out-edges of owned nodes are another shard over the same owned rows; its tensors take the
    place of the batch's own, found by identity.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attachment.halo.active:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self.attachment.reversed(self) as turned:
            return super().forward(  # type: ignore[misc]
                *(turned(value) for value in args),
                **{name: turned(value) for name, value in kwargs.items()},
            )


class HaloDirGNN(Attached):
    """DirGNNConv: one layer over in-edges and one over out-edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        layer: Any = self
        if not self.attachment.halo.active:
            return super().forward(x, edge_index)  # type: ignore[misc, no-any-return]
        inward = layer.conv_in(x, edge_index)
        with self.attachment.reversed(self) as turned:
            outward = layer.conv_out(x, turned(edge_index).flip([0]))
        out = layer.alpha * outward + (1 - layer.alpha) * inward
        return out if layer.lin is None else out + layer.lin(x)


class HaloCheb(Attached):
    """ChebConv: the largest Laplacian entry is looked for on all ranks."""

    def __norm__(
        self,
        edge_index: Tensor,
        num_nodes: int | None,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: Any = None,
        dtype: Any = None,
        batch: Tensor | None = None,
    ) -> Any:
        halo = self.attachment.halo
        if halo.active and lambda_max is None:
            _, weight = self.attachment.degrees.get_laplacian(
                edge_index, edge_weight, normalization, dtype, num_nodes
            )
            largest = weight.max() if weight.numel() else weight.new_tensor(-float("inf"))
            lambda_max = 2.0 * halo.max(largest)
        return super().__norm__(  # type: ignore[misc]
            edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch
        )


class HaloSuperGAT(Attached):
    """SuperGATConv: outputs are exact; its attention loss samples pairs inside each part."""

    def positive_sampling(self, edge_index: Tensor) -> Tensor:
        return super().positive_sampling(self._inside(edge_index))  # type: ignore[misc, no-any-return]

    def negative_sampling(
        self, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None
    ) -> Tensor:
        return super().negative_sampling(self._inside(edge_index), num_nodes, batch)  # type: ignore[misc, no-any-return]

    def _inside(self, edge_index: Tensor) -> Tensor:
        halo = self.attachment.halo
        return edge_index[:, edge_index[0] < halo.plan.num_owned] if halo.active else edge_index


SPECIAL: dict[type, type[Attached]] = {
    pyg_nn.DirGNNConv: HaloDirGNN,
    pyg_nn.ChebConv: HaloCheb,
    pyg_nn.SuperGATConv: HaloSuperGAT,
}
