"""Aggregation as one sparse product, where a layer has it, with both directions ready."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.utils import spmm as pyg_spmm

from lightning_sylvie.plan import HaloPlan

_FUSED = {"sum", "add", "mean"}

Reader = Callable[["Adjacency", Tensor], Tensor]


class Adjacency:
    """A part's edges as a rectangular CSR matrix, targets by all rows, and its transpose.

    Args:
        edge_index: int64 ``(2, num_edges)``, sources over destinations.
        weight: ``(num_edges,)`` or None for ones.
        num_targets: Rows of the matrix (destinations).
        num_rows: Columns of the matrix (sources).
        dtype: Type of the values.
    """

    def __init__(
        self, edge_index: Tensor, weight: Tensor | None, num_targets: int, num_rows: int, dtype: Any
    ) -> None:
        source, destination = edge_index
        if weight is None:
            weight = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
        self.matrix = _csr(destination, source, weight.to(dtype), (num_targets, num_rows))
        self.transposed = _csr(source, destination, weight.to(dtype), (num_rows, num_targets))
        degree = self.matrix.crow_indices().diff().clamp(min=1)
        self.inverse_degree = degree.to(dtype).reciprocal().unsqueeze(1)

    def whole(self, rows: Tensor) -> Tensor:
        """Sum over each owned node's in-edges of ``weight * rows[source]``."""
        out: Tensor = _Product.apply(rows, self.matrix, self.transposed)
        return out

    def interior(self, owned: Tensor) -> Tensor:
        return _product(self._split.interior, owned)

    def frontier(self, rows: Tensor, out: Tensor) -> None:
        out[self._split.frontier_nodes] = _product(self._split.frontier, rows)

    def halo_gradient(self, grad: Tensor) -> Tensor:
        return _product(self._split.to_halo, grad)

    def owned_gradient(self, grad: Tensor) -> Tensor:
        return _product(self._split.to_owned, grad)

    @functools.cached_property
    def _split(self) -> _Split:
        with torch.inference_mode(False), torch.no_grad():
            return _Split(self.matrix, self.transposed)


class _Split:
    """The rows of an adjacency and of its transpose, those that concern the halo apart.

    Attributes:
        interior: ``(num_owned, num_owned)``, without the rows of `frontier_nodes`.
        frontier: ``(len(frontier_nodes), num_rows)``.
        frontier_nodes: int64: nodes with a halo source.
        to_owned: ``(num_owned, num_owned)``: the first rows of the transpose.
        to_halo: ``(num_halo, num_owned)``: the others.
    """

    def __init__(self, matrix: Tensor, transposed: Tensor) -> None:
        (num_owned, num_rows), column = matrix.shape, matrix.col_indices()
        degree = matrix.crow_indices().diff()
        row = torch.arange(num_owned, device=column.device).repeat_interleave(degree)
        needs_halo = torch.zeros(num_owned, dtype=torch.bool, device=column.device)
        needs_halo[row[column >= num_owned]] = True
        self.frontier_nodes = needs_halo.nonzero().squeeze(1)
        inside, value = ~needs_halo[row], matrix.values()
        self.interior = _compressed(
            degree * ~needs_halo, column[inside], value[inside], (num_owned, num_owned)
        )
        size = len(self.frontier_nodes), num_rows
        self.frontier = _compressed(degree[needs_halo], column[~inside], value[~inside], size)
        degree, column, value = (
            transposed.crow_indices().diff(),
            transposed.col_indices(),
            transposed.values(),
        )
        end = int(transposed.crow_indices()[num_owned])
        self.to_owned = _compressed(
            degree[:num_owned], column[:end], value[:end], (num_owned, num_owned)
        )
        size = num_rows - num_owned, num_owned
        self.to_halo = _compressed(degree[num_owned:], column[end:], value[end:], size)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return _product(matrix, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _product(ctx.transposed, grad.contiguous()), None, None


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    product: Tensor = torch.sparse.mm(matrix, rows)
    return product


def _csr(row: Tensor, column: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    order = torch.argsort(row, stable=True)
    return _compressed(torch.bincount(row, minlength=size[0]), column[order], value[order], size)


def _compressed(degree: Tensor, column: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    """The CSR matrix with `degree` entries in each row."""
    start = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(start, column, value, size=size, check_invariants=False)


class AdjacencyCache:
    """The adjacencies of edge sets that stay the same from step to step.

    Only edge sets that were `keep`-ed are served: building a matrix for edges that are used once
    would cost more than the layer's own gather and scatter.

    Attributes:
        reader: Aggregates owned rows and their neighbours', which it gets itself; None: `spmm` is
            given both.
    """

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self._kept: dict[int, Tensor] = {}
        self._built: dict[tuple[Any, ...], Adjacency] = {}
        self._by_matrix: dict[int, Adjacency] = {}

    def keep(self, *tensors: Tensor) -> None:
        """Declares that the tensors live, unchanged, as long as this cache."""
        self._kept.update((id(t), t) for t in tensors)

    def keeps(self, tensor: Tensor) -> bool:
        return id(tensor) in self._kept

    def matrix(
        self, conv: Any, edge_index: Any, plan: HaloPlan, inputs: dict[str, Any], *, wide: bool
    ) -> Any:
        """The CSR matrix with which `conv` can aggregate at once, or None.

        With `wide` it has rows for halo nodes too, without edges.
        """
        if not conv.fuse or conv.explain or conv.aggr not in _FUSED or not self._fits(conv, inputs):
            return None
        weight, source = inputs.get("edge_weight"), _source(inputs["x"])
        if source is None or not isinstance(edge_index, Tensor) or not self.keeps(edge_index):
            return None
        if weight is not None and (weight.requires_grad or not self.keeps(weight)):
            return None
        if source.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(
            source.device.type
        ):
            return None
        key = (id(edge_index), id(weight), source.dtype, wide)
        if key not in self._built:
            size = plan.num_rows if wide else plan.num_owned, plan.num_rows
            with torch.inference_mode(False), torch.no_grad():
                built = Adjacency(edge_index, weight, *size, source.dtype)
            self._built[key] = self._by_matrix[id(built.matrix)] = built
        return self._built[key].matrix

    def spmm(self, src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
        """Takes the place of `torch_geometric.utils.spmm` inside attached layers."""
        known = self._by_matrix.get(id(src))
        if known is None:
            product: Tensor = pyg_spmm(src, other, reduce)
            return product
        out = known.whole(other) if self.reader is None else self.reader(known, other)
        return out * known.inverse_degree if reduce == "mean" else out

    @staticmethod
    def _fits(conv: Any, inputs: dict[str, Any]) -> bool:
        """Whether the layer's fused product is the weighted sum of `x` over edges."""
        fused = set(conv._fused_user_args)
        return (
            "x" in fused
            and fused <= {"x", "edge_weight"}
            and set(inputs) <= {"x", "edge_weight"}
            and conv.flow == "source_to_target"
        )


def _source(x: Any) -> Tensor | None:
    source = x[0] if isinstance(x, (tuple, list)) else x
    return source if isinstance(source, Tensor) and source.dim() == 2 else None
