"""One rank's share of a graph, and the cut that makes all of them.

The owner of an edge is the owner of its destination: every in-edge of an owned node is local and
no edge is on two ranks, so a layer that reads owned and halo rows writes owned rows exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import check_assignment
from lightning_sylvie.plan import HaloPlan


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank holds of a graph: its owned nodes, their in-edges, and its halo plan.

    Args:
        plan: Who sends which rows to whom.
        edge_index: int64 ``(2, e)``: sources in 0..num_rows-1 (owned rows, then halo rows),
            destinations in 0..num_owned-1. Sorted by destination; edges of one destination keep
            the graph's edge order.
        node: Owned rows of the graph's node tensors.
        edge: The graph's edge tensors, row i for edge i of `edge_index`.
        rest: The graph's `rest`.
        node_id: int64 ``(num_owned,)``, ascending: global number of each owned row. For a
            subgraph these are the numbers in the graph it was taken from.
        halo_id: int64 ``(num_halo,)``: global number of each halo row.
        edge_id: int64 ``(e,)``: global number of each edge.
        num_nodes: Nodes of the whole graph.
        num_edges: Edges of the whole graph.
        mask_counts: Number of True in the whole graph for every boolean node tensor: ``name`` for
            a 1-D mask, ``name[column]`` for each column of a 2-D one.
        fingerprint: Equal on two ranks exactly if their shards come from the same cut.
        reverse: The same owned rows with every edge turned round, for layers that read their
            out-neighbours; None unless asked for.

    Raises:
        ValueError: If the parts contradict each other.
    """

    plan: HaloPlan
    edge_index: Tensor
    node: Mapping[str, Tensor]
    edge: Mapping[str, Tensor]
    rest: Mapping[str, object]
    node_id: Tensor
    halo_id: Tensor
    edge_id: Tensor
    num_nodes: int
    num_edges: int
    mask_counts: Mapping[str, int]
    fingerprint: str
    reverse: Shard | None = None

    def __post_init__(self) -> None:
        plan, num_local = self.plan, self.edge_index.size(1)
        _check_length("node_id", self.node_id, plan.num_owned)
        _check_length("halo_id", self.halo_id, plan.num_halo)
        _check_length("edge_id", self.edge_id, num_local)
        for name, value in self.node.items():
            _check_length(f"node tensor {name!r}", value, plan.num_owned)
        for name, value in self.edge.items():
            _check_length(f"edge tensor {name!r}", value, num_local)
        if num_local:
            source, target = self.edge_index.amax(dim=1).tolist()
            if source >= plan.num_rows or target >= plan.num_owned or self.edge_index.min() < 0:
                raise ValueError(
                    f"expected edges from rows 0..{plan.num_rows - 1} to rows "
                    f"0..{plan.num_owned - 1} on rank {plan.rank}, got up to {source} and {target}"
                )

    def share(self, mask: str | None) -> float:
        """This part's share of the graph's marked nodes; of all its nodes if none is marked."""
        if mask not in self._shares:
            counted = self.mask_counts.get(mask or "")
            owned = int(self.node[mask].sum()) if mask and counted else self.plan.num_owned
            self._shares[mask] = owned / (counted or self.num_nodes)
        return self._shares[mask]

    @cached_property
    def _shares(self) -> dict[str | None, float]:
        return {}  # found once: to read a mask's sum is to wait for the device

    def rows_in(self, other: Shard) -> Tensor:
        """The owned rows of `other` that hold this shard's owned nodes, int64 ``(num_owned,)``.

        Relates the shard of a training subgraph to the same rank's shard of the whole graph.

        Raises:
            ValueError: If `other` does not own one of the nodes.
        """
        rows = torch.searchsorted(other.node_id, self.node_id)
        inside = rows < other.plan.num_owned
        if not bool(inside.all()) or not torch.equal(other.node_id[rows], self.node_id):
            raise ValueError(
                f"rank {self.plan.rank} does not own the same nodes in both graphs: cut the "
                "subgraph with assignment[subgraph.node_id] of the whole graph's assignment"
            )
        return rows


def cut(graph: Graph, assignment: Tensor, num_parts: int, *, reverse: bool = False) -> list[Shard]:
    """All shards of `graph`, in rank order. See `cut_each`."""
    return list(cut_each(graph, assignment, num_parts, reverse=reverse))


def cut_each(
    graph: Graph, assignment: Tensor, num_parts: int, *, reverse: bool = False
) -> Iterator[Shard]:
    """Yields the shards of `graph` in rank order, building each only when it is asked for.

    Beside the graph and the shard being built, only a part number per edge end is held (8 bytes
    per edge), so one process can cut a graph that it can't hold twice.

    Args:
        graph: The whole graph.
        assignment: int64 ``(num_nodes,)``, the part of each node. Parts may be empty.
        num_parts: Number of parts.
        reverse: Also cut the graph with every edge turned round.

    Raises:
        ValueError: If the assignment does not fit the graph.
    """
    cutter = _Cutter(graph, check_assignment(assignment, graph.num_nodes, num_parts), num_parts)
    for rank in range(num_parts):
        node = {name: value[cutter.owned(rank)] for name, value in graph.node.items()}
        turned = cutter.shard(rank, node, None, flipped=True) if reverse else None
        yield cutter.shard(rank, node, turned, flipped=False)


class _Cutter:
    """Where every node and edge of one cut lives.

    Nodes are ordered by part, then by number; `place[i]` is node i's position in that order. So
    ascending places are ascending (owner, owner's row), which is the order of halo rows.
    """

    def __init__(self, graph: Graph, assignment: Tensor, num_parts: int) -> None:
        self.graph, self.num_parts = graph, num_parts
        self.mask_counts = _mask_counts(graph.node)
        self.part = assignment.int()
        self.order = assignment.argsort(stable=True)
        self.place = torch.empty_like(self.order)
        self.place[self.order] = torch.arange(graph.num_nodes)
        self.start = [0, *assignment.bincount(minlength=num_parts).cumsum(0).tolist()]
        self.ends = [(nodes, self.part[nodes]) for nodes in graph.edge_index.unbind()]
        digest = hashlib.blake2b(graph.fingerprint().encode(), digest_size=16)
        digest.update(f"{num_parts} parts".encode() + self.part.numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def owned(self, rank: int) -> Tensor:
        return self.order[self.start[rank] : self.start[rank + 1]]

    def shard(
        self, rank: int, node: Mapping[str, Tensor], reverse: Shard | None, *, flipped: bool
    ) -> Shard:
        graph = self.graph
        edges, edge_index, halo = self._edges(rank, flipped)
        return Shard(
            self._plan(rank, halo, flipped),
            edge_index,
            node,
            {name: value[edges] for name, value in graph.edge.items()},
            graph.rest,
            _numbers(graph.node_id, self.owned(rank)),
            _numbers(graph.node_id, halo),
            _numbers(graph.edge_id, edges),
            graph.num_nodes,
            graph.num_edges,
            self.mask_counts,
            self.fingerprint,
            reverse,
        )

    def _edges(self, rank: int, flipped: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Edge numbers, local edge_index and halo nodes of one rank."""
        (source, source_part), (target, target_part) = self.ends[:: -1 if flipped else 1]
        start, num_owned = self.start[rank], self.start[rank + 1] - self.start[rank]
        edges = (target_part == rank).nonzero().squeeze(1)
        target_row, order = (self.place[target[edges]] - start).sort(stable=True)
        edges = edges[order]
        source_place, foreign = self.place[source[edges]], source_part[edges] != rank
        halo_place = torch.unique(source_place[foreign])
        source_row = source_place - start
        source_row[foreign] = num_owned + torch.searchsorted(halo_place, source_place[foreign])
        return edges, torch.stack([source_row, target_row]), self.order[halo_place]

    def _plan(self, rank: int, halo: Tensor, flipped: bool) -> HaloPlan:
        (source, source_part), (_, target_part) = self.ends[:: -1 if flipped else 1]
        leaving = ((source_part == rank) & (target_part != rank)).nonzero().squeeze(1)
        num_nodes = self.graph.num_nodes
        entry = torch.unique(target_part[leaving].long() * num_nodes + source[leaving])
        return HaloPlan(
            rank,
            self.start[rank + 1] - self.start[rank],
            self.place[entry % num_nodes] - self.start[rank],
            self._counts(entry // num_nodes),
            self._counts(self.part[halo]),
        )

    def _counts(self, parts: Tensor) -> tuple[int, ...]:
        return tuple(parts.bincount(minlength=self.num_parts).tolist())


def _numbers(ids: Tensor | None, rows: Tensor) -> Tensor:
    """The numbers of `rows` in the graph that this one was taken from."""
    return rows.clone() if ids is None else ids[rows]


def _mask_counts(node: Mapping[str, Tensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, value in node.items():
        if value.dtype == torch.bool and value.dim() == 1:
            counts[name] = int(value.sum())
        elif value.dtype == torch.bool and value.dim() == 2:
            columns = value.sum(dim=0).tolist()
            counts.update({f"{name}[{column}]": count for column, count in enumerate(columns)})
    return counts


def _check_length(what: str, value: Tensor, length: int) -> None:
    if value.dim() == 0 or value.size(0) != length:
        raise ValueError(f"expected {length} rows in {what}, got shape {tuple(value.shape)}")
