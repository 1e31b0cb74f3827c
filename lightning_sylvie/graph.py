"""The whole graph as plain tensors: what is partitioned, cut and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, eq=False)
class Graph:
    """One graph with N nodes and E edges, checked once.

    Edges point from ``edge_index[0]`` (source) to ``edge_index[1]`` (destination). Self loops,
    isolated nodes, duplicate edges and one-way edges are allowed. The tensors are the graph's own
    from here on: writing into them afterwards makes `fingerprint` wrong.

    Args:
        num_nodes: N, at least 1.
        edge_index: int64 ``(2, E)`` with values in 0..N-1.
        node: Tensors with first dimension N (features, labels, masks).
        edge: Tensors with first dimension E (weights, features).
        rest: Everything else: tensors, text, numbers, None, and lists, tuples and dicts of them.
            Every rank gets all of it.
        node_id: int64 ``(N,)``, strictly ascending: the nodes' numbers in the graph that this one
            is a subgraph of. None: 0..N-1.
        edge_id: int64 ``(E,)``, likewise for edges. None: 0..E-1.

    Raises:
        ValueError: A tensor has a wrong shape, dtype, device or value.
        TypeError: A value of `rest` can't be written to a file of plain tensors.
    """

    num_nodes: int
    edge_index: Tensor
    node: Mapping[str, Tensor] = field(default_factory=dict)
    edge: Mapping[str, Tensor] = field(default_factory=dict)
    rest: Mapping[str, object] = field(default_factory=dict)
    node_id: Tensor | None = None
    edge_id: Tensor | None = None

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"expected a graph with at least one node, got {self.num_nodes}")
        _check_edges(self.edge_index, self.num_nodes)
        object.__setattr__(self, "edge_index", self.edge_index.contiguous())
        for kind, length in (("node", self.num_nodes), ("edge", self.num_edges)):
            for name, value in getattr(self, kind).items():
                _check_rows(f"{kind} tensor {name!r}", value, length, kind)
            ids = getattr(self, f"{kind}_id")
            if ids is not None:
                _check_ids(f"{kind}_id", ids, length)
        for name, value in self.rest.items():
            _check_plain(f"rest[{name!r}]", value)

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    def fingerprint(self) -> str:
        """32 hexadecimal digits that depend on every name, dtype, shape and byte.

        The order of the dicts does not matter. Computed once per graph.
        """
        known: str | None = self.__dict__.get("_fingerprint")
        if known is None:
            digest = hashlib.blake2b(digest_size=16)
            for name in ("num_nodes", "edge_index", "node", "edge", "rest", "node_id", "edge_id"):
                _absorb(digest, name)
                _absorb(digest, getattr(self, name))
            known = digest.hexdigest()
            object.__setattr__(self, "_fingerprint", known)
        return known

    def subgraph(self, node_mask: Tensor) -> Graph:
        """The graph of the nodes in `node_mask` and of the edges between them, in their order.

        Inductive training runs on ``graph.subgraph(train_mask)``; the part of each of its nodes is
        ``assignment[subgraph.node_id]``.

        Args:
            node_mask: bool ``(N,)``.

        Returns:
            A graph with fewer nodes, whose `node_id` and `edge_id` are this graph's numbers.
        """
        if node_mask.dtype != torch.bool or node_mask.shape != (self.num_nodes,):
            raise ValueError(
                f"expected a bool mask of shape ({self.num_nodes},), got {node_mask.dtype} of "
                f"shape {tuple(node_mask.shape)}"
            )
        nodes = node_mask.nonzero().squeeze(1)
        edges = (node_mask[self.edge_index[0]] & node_mask[self.edge_index[1]]).nonzero().squeeze(1)
        row = torch.full((self.num_nodes,), -1, dtype=torch.int64)
        row[nodes] = torch.arange(nodes.numel())
        return Graph(
            nodes.numel(),
            row[self.edge_index[:, edges]],
            {name: value[nodes] for name, value in self.node.items()},
            {name: value[edges] for name, value in self.edge.items()},
            self.rest,
            nodes if self.node_id is None else self.node_id[nodes],
            edges if self.edge_id is None else self.edge_id[edges],
        )


def _check_edges(edge_index: Tensor, num_nodes: int) -> None:
    _check_dense("edge_index", edge_index)
    if edge_index.dtype != torch.int64 or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"expected edge_index int64 of shape (2, num_edges), got {edge_index.dtype} of shape "
            f"{tuple(edge_index.shape)}"
        )
    if edge_index.numel():
        low, high = (int(value) for value in edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"expected node numbers 0..{num_nodes - 1} in edge_index, got {low}..{high}: "
                "set num_nodes to the graph's number of nodes or renumber the edges"
            )


def _check_rows(what: str, value: Tensor, length: int, kind: str) -> None:
    _check_dense(what, value)
    if value.dim() == 0 or value.size(0) != length:
        raise ValueError(
            f"expected one row per {kind} ({length}) in {what}, got shape {tuple(value.shape)}: "
            "put values that are not per node or per edge into `rest`"
        )


def _check_ids(what: str, ids: Tensor, length: int) -> None:
    _check_dense(what, ids)
    if ids.dtype != torch.int64 or ids.shape != (length,) or bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError(
            f"expected {what} int64 of shape ({length},), strictly ascending, got {ids.dtype} of "
            f"shape {tuple(ids.shape)}"
        )


def _check_dense(what: str, value: Tensor) -> None:
    if value.layout != torch.strided or value.device.type != "cpu":
        raise ValueError(
            f"expected {what} to be a dense tensor on the CPU, got layout {value.layout} on "
            f"{value.device}: convert it with .to_dense() or .cpu()"
        )


def _check_plain(what: str, value: object) -> None:
    """Raises unless `value` survives ``torch.load(weights_only=True)``."""
    if isinstance(value, Tensor):
        _check_dense(what, value)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _check_plain(f"{what}[{position}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(f"a key of {what}", key)
            _check_plain(f"{what}[{key!r}]", item)
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"expected a tensor, text, number or None in {what}, got {type(value).__name__}: "
            "remove it from the graph or turn it into tensors"
        )


def _absorb(digest: Any, value: object) -> None:
    """Feeds `value` to `digest` so that different values give different byte streams."""
    if isinstance(value, Tensor):
        rows = value.detach().contiguous().reshape(-1)
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(rows.view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            _absorb(digest, key)
            _absorb(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _absorb(digest, item)
    else:
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
