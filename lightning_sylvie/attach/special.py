"""Layers that read more than their neighbours' rows, one by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
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
        forward = inspect.signature(self.original.forward)  # type: ignore[attr-defined]
        bound = forward.bind(self, *args, **kwargs)
        with self.attachment.reversed(self) as turn:
            bound.arguments.update({name: turn(name, v) for name, v in bound.arguments.items()})
            return super().forward(*bound.args[1:], **bound.kwargs)  # type: ignore[misc]


class HaloDirGNN(Attached):
    """DirGNNConv: one layer over in-edges and one over out-edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        layer: Any = self
        if not self.attachment.halo.active:
            return super().forward(x, edge_index)  # type: ignore[misc, no-any-return]
        inward = layer.conv_in(x, edge_index)
        with self.attachment.reversed(self) as turn:
            turn("edge_index", edge_index)
            outward = layer.conv_out(x, self.attachment.halo.shard.edge_index)
        out: Tensor = layer.alpha * outward + (1 - layer.alpha) * inward
        if layer.lin is not None:
            out = out + layer.lin(x)
        return out


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


class HaloFastRGCN(Attached):
    """FastRGCNConv: with node numbers as input it looks weights up by the edges' sources."""

    def forward(self, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        features = x[0] if isinstance(x, (tuple, list)) else x
        if self.attachment.halo.active and not (
            isinstance(features, Tensor) and features.is_floating_point()
        ):
            raise TypeError(
                f"{self.attachment.path(self)}: expected node features, got node numbers, which "
                "are not the same on a part; use RGCNConv, which looks weights up by value"
            )
        return super().forward(x, edge_index, edge_type)  # type: ignore[misc]


class HaloAggregation(Attached):
    """Aggregations over sequences: padded to the longest one of all ranks.

    LSTMAggregation and its like return what they see after the padding.
    """

    def to_dense_batch(
        self, x: Tensor, index: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        halo = self.attachment.halo
        if halo.active and index is not None and kwargs.get("max_num_elements") is None:
            longest = index.bincount(minlength=1).max()
            kwargs["max_num_elements"] = int(halo.max(longest))
        return super().to_dense_batch(x, index, *args, **kwargs)  # type: ignore[misc]


class HaloQuantile(Attached):
    """QuantileAggregation: a part may have no edges, or none at its first node.

    PyG's code looks for the quantile of an empty set in the set before it, which there is none of;
    a set of one row in front changes nothing else.
    """

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        plain = super().forward  # type: ignore[misc]
        if not self.attachment.halo.active or index is None or dim_size is None:
            return plain(x, index, ptr, dim_size, dim)  # type: ignore[no-any-return]
        shape = list(x.shape)
        shape[dim] = 1
        x = torch.cat([x.new_zeros(shape), x], dim)
        index = torch.cat([index.new_zeros(1), index + 1])
        return plain(x, index, None, dim_size + 1, dim).narrow(dim, 1, dim_size)  # type: ignore[no-any-return]


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
    pyg_nn.FastRGCNConv: HaloFastRGCN,
    pyg_nn.SuperGATConv: HaloSuperGAT,
    pyg_nn.aggr.QuantileAggregation: HaloQuantile,
    pyg_nn.Aggregation: HaloAggregation,
}
