"""The cut against a slow, obvious reference on random graphs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.plan import check_plans
from lightning_sylvie.shard import Shard, cut


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Graph, Tensor, int]:
    """Small multigraphs with loops, isolated nodes, empty parts and parts without neighbours."""
    num_nodes = draw(st.integers(1, 12))
    num_parts = draw(st.integers(1, 4))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=40))
    parts = draw(st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes))
    return make_graph(num_nodes, edges), torch.tensor(parts), num_parts


def make_graph(num_nodes: int, edges: list[tuple[int, int]]) -> Graph:
    generator = torch.Generator().manual_seed(num_nodes + len(edges))
    return Graph(
        num_nodes,
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(),
        node={
            "x": torch.randn(num_nodes, 3, generator=generator),
            "train_mask": torch.rand(num_nodes, generator=generator) < 0.5,
            "splits": torch.rand(num_nodes, 2, generator=generator) < 0.5,
        },
        edge={
            "edge_weight": torch.rand(len(edges), generator=generator),
            "edge_attr": torch.randn(len(edges), 2, generator=generator),
        },
        rest={"name": "random"},
    )


class Reference:
    """One part of one direction of a graph, from dicts, sets and loops."""

    def __init__(self, graph: Graph, parts: list[int], rank: int, flipped: bool) -> None:
        pairs = [(int(a), int(b)) for a, b in graph.edge_index.t()]
        pairs = [(b, a) for a, b in pairs] if flipped else pairs
        self.owned = [node for node in range(graph.num_nodes) if parts[node] == rank]
        needed = {a for a, b in pairs if parts[b] == rank and parts[a] != rank}
        self.halo = sorted(needed, key=lambda node: (parts[node], node))
        row = {node: number for number, node in enumerate(self.owned + self.halo)}
        mine = [e for e, (_, b) in enumerate(pairs) if parts[b] == rank]
        self.edges = sorted(mine, key=lambda e: row[pairs[e][1]])
        self.edge_index = [
            [row[pairs[e][0]] for e in self.edges],
            [row[pairs[e][1]] for e in self.edges],
        ]
        self.recv_counts = [
            sum(parts[n] == peer for n in self.halo) for peer in range(max(parts) + 1)
        ]
        self.send = {
            peer: sorted({a for a, b in pairs if parts[a] == rank and parts[b] == peer})
            for peer in set(parts) - {rank}
        }


def check_against_reference(
    shard: Shard, graph: Graph, parts: list[int], rank: int, flipped: bool
) -> None:
    reference = Reference(graph, parts, rank, flipped)
    assert shard.node_id.tolist() == reference.owned
    assert shard.halo_id.tolist() == reference.halo
    assert shard.edge_id.tolist() == reference.edges
    assert shard.edge_index.tolist() == reference.edge_index
    for name, value in graph.node.items():
        assert torch.equal(shard.node[name], value[reference.owned])
    for name, value in graph.edge.items():
        assert torch.equal(shard.edge[name], value[reference.edges])
    counts = list(shard.plan.recv_counts)
    assert counts[: len(reference.recv_counts)] == reference.recv_counts
    assert sum(counts) == sum(reference.recv_counts)
    sent = torch.split(shard.node_id[shard.plan.send_index], list(shard.plan.send_counts))
    for peer, nodes in enumerate(sent):
        assert nodes.tolist() == reference.send.get(peer, [])


@given(cuts())
@settings(max_examples=150, deadline=None)
def test_cut_equals_reference(case: tuple[Graph, Tensor, int]) -> None:
    graph, assignment, num_parts = case
    shards = cut(graph, assignment, num_parts, reverse=True)
    for rank, shard in enumerate(shards):
        check_against_reference(shard, graph, assignment.tolist(), rank, flipped=False)
        assert shard.reverse is not None
        check_against_reference(shard.reverse, graph, assignment.tolist(), rank, flipped=True)
        assert torch.equal(shard.node_id, shard.reverse.node_id)


@given(cuts())
@settings(max_examples=100, deadline=None)
def test_shards_together_are_the_graph(case: tuple[Graph, Tensor, int]) -> None:
    graph, assignment, num_parts = case
    shards = cut(graph, assignment, num_parts)
    check_plans([(shard.plan.send_counts, shard.plan.recv_counts) for shard in shards])
    owned = torch.cat([shard.node_id for shard in shards]).sort().values
    edges = torch.cat([shard.edge_id for shard in shards]).sort().values
    assert torch.equal(owned, torch.arange(graph.num_nodes))
    assert torch.equal(edges, torch.arange(graph.num_edges))
    for shard in shards:
        received = [
            torch.split(peer.node["x"][peer.plan.send_index], list(peer.plan.send_counts))[
                shard.plan.rank
            ]
            for peer in shards
        ]
        assert torch.equal(torch.cat(received), graph.node["x"][shard.halo_id])
        rows = torch.cat([shard.node_id, shard.halo_id])
        source, target = rows[shard.edge_index[0]], rows[shard.edge_index[1]]
        assert torch.equal(torch.stack([source, target]), graph.edge_index[:, shard.edge_id])
