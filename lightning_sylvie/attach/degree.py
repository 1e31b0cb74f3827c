"""Degrees and normalisations over the whole graph, from what one rank holds.

Each function takes the place of the `torch_geometric` function of the same name inside attached
layers. All in-edges of an owned node are on its rank, so in-degrees of owned nodes are exact; those
of halo nodes come from their owners, and out-degrees are folded back to the owners.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from lightning_sylvie.attach.sparse import AdjacencyCache
from lightning_sylvie.attach.wide import Wide
from lightning_sylvie.exchange import Halo

Edges = tuple[Tensor, Tensor]


class Degrees:
    """The partition-aware functions of one attachment.

    Args:
        halo: The exchange that is in force.
        cache: Keeps the normalised edges of edge sets that stay the same.
        wide: Tells whether the layer that calls holds halo rows.
    """

    def __init__(self, halo: Halo, cache: AdjacencyCache, wide: Wide) -> None:
        self._halo = halo
        self._cache = cache
        self._wide = wide
        self._normalised: dict[tuple[Any, ...], Edges] = {}

    def gcn_norm(
        self,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Symmetric normalisation by global degrees; see `torch_geometric`'s `gcn_norm`."""
        if not self._halo.active or not isinstance(edge_index, Tensor):
            return pyg_gcn_norm(
                edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype
            )
        key = (id(edge_index), id(edge_weight), improved, add_self_loops, flow, dtype)
        if key in self._normalised:
            return self._normalised[key]
        known = self._cache.keeps(edge_index) and (
            edge_weight is None or self._cache.keeps(edge_weight)
        )
        fill = 2.0 if improved else 1.0
        if not known:
            return self._normalise(edge_index, edge_weight, fill, add_self_loops, flow, dtype)
        with torch.inference_mode(False), torch.no_grad():
            edges = self._normalise(edge_index, edge_weight, fill, add_self_loops, flow, dtype)
        self._cache.keep(*edges)
        self._normalised[key] = edges
        return edges

    def get_laplacian(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        normalization: str | None = None,
        dtype: torch.dtype | None = None,
        num_nodes: int | None = None,
    ) -> Edges:
        """The Laplacian by global out-degrees; see `torch_geometric`'s `get_laplacian`."""
        if not self._halo.active:
            edges: Edges = utils.get_laplacian(
                edge_index, edge_weight, normalization, dtype, num_nodes
            )
            return edges
        owned = self._halo.plan.num_owned
        edge_index, edge_weight = utils.remove_self_loops(edge_index, edge_weight)
        if edge_weight is None:
            edge_weight = _ones(edge_index, dtype)
        row, column = edge_index
        sums = utils.scatter(edge_weight, row, 0, self._halo.plan.num_rows, reduce="sum")
        (degree,) = self._halo.append(self._halo.fold(sums), exact=True)
        loop_index, _ = utils.add_self_loops(edge_index[:, :0], num_nodes=owned)
        loops = torch.ones_like(degree[:owned])
        if normalization is None:
            weight, loops = -edge_weight, degree[:owned]
        elif normalization == "sym":
            scale = _zero_where_infinite(degree.pow(-0.5))
            weight = -scale[row] * edge_weight * scale[column]
        else:
            weight = -_zero_where_infinite(degree.reciprocal())[row] * edge_weight
        return torch.cat([edge_index, loop_index], dim=1), torch.cat([weight, loops])

    def degree(
        self, index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Degrees of owned rows; of halo rows too where the layer holds them."""
        counts: Tensor = utils.degree(index, num_nodes, dtype)
        if not self._wide.active or num_nodes != self._halo.plan.num_rows:
            return counts
        (everywhere,) = self._halo.append(self._halo.fold(counts.double()), exact=True)
        return everywhere.to(counts.dtype)

    def add_self_loops(
        self,
        edge_index: Any,
        edge_attr: Any = None,
        fill_value: Any = None,
        num_nodes: Any = None,
    ) -> Any:
        """Loops at owned nodes only: those of halo nodes are on their owners' ranks."""
        return utils.add_self_loops(edge_index, edge_attr, fill_value, self._owned(num_nodes))

    def add_remaining_self_loops(
        self,
        edge_index: Any,
        edge_attr: Any = None,
        fill_value: Any = None,
        num_nodes: Any = None,
    ) -> Any:
        """See `add_self_loops`."""
        return utils.add_remaining_self_loops(
            edge_index, edge_attr, fill_value, self._owned(num_nodes)
        )

    def _owned(self, num_nodes: Any) -> Any:
        if not self._halo.active or (num_nodes is not None and not self._wide.active):
            return num_nodes
        return self._halo.plan.num_owned

    def _normalise(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        fill: float,
        add_self_loops: bool,
        flow: str,
        dtype: torch.dtype | None,
    ) -> Edges:
        plan = self._halo.plan
        if add_self_loops:
            edge_index, edge_weight = utils.add_remaining_self_loops(
                edge_index, edge_weight, fill, plan.num_owned
            )
        if edge_weight is None:
            edge_weight = _ones(edge_index, dtype)
        row, column = edge_index
        centre = column if flow == "source_to_target" else row
        sums = utils.scatter(edge_weight, centre, 0, plan.num_rows, reduce="sum")
        scale = _zero_where_infinite(sums[: plan.num_owned].pow(-0.5))
        (scale,) = self._halo.append(scale, exact=True)
        return edge_index, scale[row] * edge_weight * scale[column]


def _ones(edge_index: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)


def _zero_where_infinite(values: Tensor) -> Tensor:
    return values.masked_fill(values == float("inf"), 0.0)
