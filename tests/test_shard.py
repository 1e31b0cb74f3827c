"""The cut against a slow, obvious reference on random graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.plan import HaloPlan, check_plans
from lightning_sylvie.shard import Shard, cut, cut_each


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


@pytest.mark.parametrize("reverse", [False, True])
def test_one_part_is_the_graph_sorted_by_destination(reverse: bool) -> None:
    graph = make_graph(4, [(3, 1), (0, 0), (3, 1), (2, 0)])
    (shard,) = cut(graph, torch.zeros(4, dtype=torch.int64), 1, reverse=reverse)
    assert shard.edge_id.tolist() == [1, 3, 0, 2]
    assert shard.edge_index.tolist() == [[0, 2, 3, 3], [0, 0, 1, 1]]
    assert shard.plan.num_halo == 0
    assert (shard.reverse is not None) == reverse


def test_a_row_needed_by_two_parts_is_sent_to_both() -> None:
    graph = make_graph(3, [(0, 1), (0, 2), (0, 2)])
    one, two, three = cut(graph, torch.tensor([0, 1, 2]), 3)
    assert one.plan.send_counts == (0, 1, 1)
    assert one.plan.send_index.tolist() == [0, 0]
    assert two.plan.recv_counts == three.plan.recv_counts == (1, 0, 0)
    assert two.plan.send_counts == (0, 0, 0)
    assert three.edge_index.tolist() == [[1, 1], [0, 0]]


def test_parts_without_nodes_edges_or_neighbours() -> None:
    graph = make_graph(5, [(0, 1), (1, 0), (4, 4)])
    shards = cut(graph, torch.tensor([0, 0, 2, 3, 3]), 5)
    assert [shard.plan.num_owned for shard in shards] == [2, 0, 1, 2, 0]
    assert [shard.edge_index.size(1) for shard in shards] == [2, 0, 0, 1, 0]
    assert all(shard.plan.num_sent == shard.plan.num_halo == 0 for shard in shards)
    assert shards[1].node["x"].shape == (0, 3)
    assert shards[1].edge["edge_attr"].shape == (0, 2)


def test_masks_are_counted_in_the_whole_graph() -> None:
    graph = make_graph(9, [(0, 1)])
    for shard in cut(graph, torch.arange(9) % 3, 3):
        assert dict(shard.mask_counts) == {
            "train_mask": sum(graph.node["train_mask"].tolist()),
            "splits[0]": sum(graph.node["splits"][:, 0].tolist()),
            "splits[1]": sum(graph.node["splits"][:, 1].tolist()),
        }
        assert (shard.num_nodes, shard.num_edges) == (9, 1)
        assert shard.rest == {"name": "random"}


def test_fingerprint_names_the_cut() -> None:
    graph, assignment = make_graph(6, [(0, 1), (4, 2)]), torch.tensor([0, 1, 0, 1, 0, 1])
    prints = {shard.fingerprint for shard in cut(graph, assignment, 2)}
    assert len(prints) == 1
    others = [
        cut(graph, 1 - assignment, 2),
        cut(graph, assignment, 3),
        cut(make_graph(6, [(0, 1), (4, 3)]), assignment, 2),
    ]
    assert prints.isdisjoint({shards[0].fingerprint for shards in others})


@given(cuts())
@settings(max_examples=50, deadline=None)
def test_training_subgraph_relates_to_the_whole_graph(case: tuple[Graph, Tensor, int]) -> None:
    graph, assignment, num_parts = case
    mask = graph.node["train_mask"]
    if not mask.any():
        return
    subgraph = graph.subgraph(mask)
    assert subgraph.node_id is not None
    whole = cut(graph, assignment, num_parts)
    inner = cut(subgraph, assignment[subgraph.node_id], num_parts)
    kept = [e for e, (a, b) in enumerate(graph.edge_index.t().tolist()) if mask[a] and mask[b]]
    assert sorted(torch.cat([shard.edge_id for shard in inner]).tolist()) == kept
    for rank in range(num_parts):
        shard, rows = inner[rank], inner[rank].rows_in(whole[rank])
        assert shard.plan.num_owned == int(whole[rank].node["train_mask"].sum())
        assert torch.equal(shard.node["x"], whole[rank].node["x"][rows])
        assert torch.equal(shard.edge["edge_attr"], graph.edge["edge_attr"][shard.edge_id])
        ids = torch.cat([shard.node_id, shard.halo_id])
        ends = torch.stack([ids[shard.edge_index[0]], ids[shard.edge_index[1]]])
        assert torch.equal(ends, graph.edge_index[:, shard.edge_id])


def test_subgraph_of_a_subgraph_keeps_the_first_numbers() -> None:
    graph = make_graph(6, [(0, 1), (1, 4), (4, 5), (5, 1)])
    first = graph.subgraph(torch.tensor([False, True, True, False, True, True]))
    second = first.subgraph(torch.tensor([True, False, True, True]))
    assert second.node_id is not None
    assert second.node_id.tolist() == [1, 4, 5]
    assert second.edge_id is not None
    assert second.edge_id.tolist() == [1, 2, 3]
    assert second.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]


def test_rows_in_refuses_another_cut() -> None:
    graph = make_graph(4, [(0, 1)])
    here, there = cut(graph, torch.tensor([0, 0, 1, 1]), 2)
    with pytest.raises(ValueError, match="does not own the same nodes"):
        here.rows_in(there)
    with pytest.raises(ValueError, match="does not own the same nodes"):
        there.rows_in(here)


def test_shards_are_built_one_at_a_time() -> None:
    graph = make_graph(6, [(0, 1), (2, 3)])
    shards = cut_each(graph, torch.tensor([0, 1, 2, 0, 1, 2]), 3)
    first = next(shards)
    assert first.plan.rank == 0
    assert first.node["x"].untyped_storage().nbytes() == first.node["x"].nbytes
    assert [shard.plan.rank for shard in shards] == [1, 2]


def test_assignment_must_fit_the_graph() -> None:
    graph = make_graph(4, [])
    with pytest.raises(ValueError, match=r"expected part numbers 0\.\.1, got 0\.\.2"):
        cut(graph, torch.tensor([0, 1, 2, 0]), 2)
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(3,\)"):
        cut(graph, torch.tensor([0, 1, 0]), 2)


def test_shard_refuses_parts_that_contradict_each_other() -> None:
    shard = cut(make_graph(4, [(0, 1), (2, 1)]), torch.tensor([0, 0, 1, 1]), 2)[0]
    with pytest.raises(ValueError, match=r"rows 0\.\.2 to rows 0\.\.1 on rank 0"):
        replace(shard, edge_index=shard.edge_index + 2)
    with pytest.raises(ValueError, match="expected 2 rows in node tensor 'x'"):
        replace(shard, node={"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="expected 1 rows in halo_id"):
        replace(shard, halo_id=torch.zeros(0))


EDGES = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_nodes": 0}, ValueError, "at least one node, got 0"),
        ({"num_nodes": 2}, ValueError, r"0\.\.1 in edge_index, got 0\.\.2"),
        ({"edge_index": EDGES - 1}, ValueError, r"got -1\.\.1"),
        ({"edge_index": EDGES.int()}, ValueError, "got torch.int32"),
        (
            {"edge_index": torch.zeros(3, 2).long()},
            ValueError,
            r"got torch.int64 of shape \(3, 2\)",
        ),
        ({"edge_index": EDGES[0]}, ValueError, r"\(2, num_edges\)"),
        ({"node": {"x": torch.zeros(4, 2)}}, ValueError, r"per node \(3\) in node tensor 'x'"),
        ({"node": {"x": torch.tensor(1)}}, ValueError, r"got shape \(\)"),
        ({"edge": {"w": torch.zeros(3)}}, ValueError, r"per edge \(2\) in edge tensor 'w'"),
        ({"node": {"x": torch.eye(3).to_sparse()}}, ValueError, r"dense tensor .*\.to_dense"),
        ({"rest": {"f": print}}, TypeError, r"rest\['f'\], got builtin_function"),
        ({"rest": {"f": [1, {"a": {2}}]}}, TypeError, r"rest\['f'\]\[1\]\['a'\], got set"),
        ({"node_id": torch.tensor([0, 2, 1])}, ValueError, "node_id .* strictly ascending"),
        ({"edge_id": torch.tensor([0])}, ValueError, r"edge_id int64 of shape \(2,\)"),
    ],
)
def test_graphs_that_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"num_nodes": 3, "edge_index": EDGES}
    with pytest.raises(error, match=message):
        Graph(**arguments | fields)


def test_graph_fingerprint_depends_on_content_only() -> None:
    node = {"x": torch.arange(6.0).reshape(3, 2), "y": torch.tensor([1, 0, 1])}
    graph = Graph(3, EDGES, node, rest={"a": 1, "b": [2]})
    same = Graph(
        3, EDGES.t().contiguous().t(), dict(reversed(node.items())), rest={"b": [2], "a": 1}
    )
    assert graph.fingerprint() == same.fingerprint()
    assert len(graph.fingerprint()) == 32
    others = [
        Graph(4, EDGES),
        Graph(3, EDGES.flip(1), node, rest={"a": 1, "b": [2]}),
        Graph(3, EDGES, {**node, "x": node["x"].reshape(3, 1, 2)}, rest={"a": 1, "b": [2]}),
        Graph(3, EDGES, {**node, "x": node["x"].int()}, rest={"a": 1, "b": [2]}),
        Graph(3, EDGES, {**node, "x": node["x"].bfloat16()}, rest={"a": 1, "b": [2]}),
        Graph(3, EDGES, {"z": node["x"], "y": node["y"]}, rest={"a": 1, "b": [2]}),
        Graph(3, EDGES, node, rest={"a": 1, "b": (2,)}),
        Graph(3, EDGES, node, rest={"a": "1", "b": [2]}),
        Graph(3, EDGES, node, rest={"a": True, "b": [2]}),
    ]
    prints = {graph.fingerprint(), *(other.fingerprint() for other in others)}
    assert len(prints) == 1 + len(others)


def test_a_plan_reads_well() -> None:
    plan = HaloPlan(1, 3, torch.tensor([0, 2]), (2, 0), (1, 0))
    assert repr(plan) == "HaloPlan(rank 1 of 2: 3 owned rows, sends [2, 0], receives [1, 0])"
