"""Partitioners: valid, balanced, deterministic; and a METIS that dies leaves the caller alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sylvie import _metis
from lightning_sylvie.partition import (
    Assignment,
    Metis,
    Partitioner,
    Random,
    Streaming,
    check_assignment,
    resolve,
)

AUTOMATIC = [Metis(), Metis(objective="cut"), Random(), Streaming()]


def community_graph(
    num_nodes: int = 4000, num_communities: int = 16, skewed: bool = False
) -> tuple[Tensor, Tensor]:
    """Symmetric graph with hubs, 90 % of edges inside a community, and training nodes.

    `skewed`: a quarter of the communities holds most of the training nodes.
    """
    random = np.random.default_rng(0)
    assert num_nodes % num_communities == 0
    size = num_nodes // num_communities
    weight = random.pareto(2.0, num_nodes) + 1
    source = random.choice(num_nodes, 10 * num_nodes, p=weight / weight.sum())
    inside = random.random(len(source)) < 0.9
    target = np.where(
        inside,
        source // size * size + random.integers(0, size, len(source)),
        random.integers(0, num_nodes, len(source)),
    )
    edges = torch.from_numpy(np.stack([source, target]))
    chance = np.full(num_nodes, 0.1)
    if skewed:
        chance = np.where(np.arange(num_nodes) < num_nodes // 4, 0.4, 0.02)
    train_mask = torch.from_numpy(random.random(num_nodes) < chance)
    return torch.cat([edges, edges.flip(0)], dim=1), train_mask


def balance(weight: Tensor, parts: Tensor, num_parts: int) -> float:
    """Heaviest part over mean part."""
    loads = torch.zeros(num_parts, dtype=torch.float64).index_add_(0, parts, weight.double())
    return float(loads.max() / loads.mean())


def edge_cut(edge_index: Tensor, parts: Tensor) -> float:
    return float((parts[edge_index[0]] != parts[edge_index[1]]).double().mean())


def volume(edge_index: Tensor, parts: Tensor) -> int:
    pairs = zip(edge_index[0].tolist(), parts[edge_index[1]].tolist(), strict=True)
    return len({(node, part) for node, part in pairs if part != int(parts[node])})


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("partitioner", AUTOMATIC, ids=lambda p: p.settings)
def test_work_and_training_nodes_are_balanced(
    partitioner: Partitioner, skewed: bool, num_parts: int
) -> None:
    edge_index, train_mask = community_graph(skewed=skewed)
    parts = partitioner.assign(edge_index, 4000, num_parts, train_mask)
    work = 1 + edge_index[1].bincount(minlength=4000)
    assert parts.dtype == torch.int64
    assert parts.shape == (4000,)
    assert balance(work, parts, num_parts) <= (1.15 if isinstance(partitioner, Random) else 1.1)
    assert balance(train_mask, parts, num_parts) <= 1.15


@pytest.mark.parametrize("partitioner", [Metis(), Metis(objective="cut"), Streaming()])
def test_communities_are_kept_together(partitioner: Partitioner) -> None:
    edge_index, train_mask = community_graph()
    parts = partitioner.assign(edge_index, 4000, 4, train_mask)
    scattered = Random().assign(edge_index, 4000, 4, train_mask)
    share = 0.3 if isinstance(partitioner, Metis) else 0.75
    assert edge_cut(edge_index, parts) < share * edge_cut(edge_index, scattered)
    assert volume(edge_index, parts) < volume(edge_index, scattered)


def test_volume_objective_never_needs_more_halo_rows_than_cut() -> None:
    edge_index, train_mask = community_graph(skewed=True)
    for num_parts in (2, 8):
        by_volume = Metis().assign(edge_index, 4000, num_parts, train_mask)
        by_cut = Metis(objective="cut").assign(edge_index, 4000, num_parts, train_mask)
        assert volume(edge_index, by_volume) <= volume(edge_index, by_cut)


@pytest.mark.parametrize("partitioner", AUTOMATIC, ids=lambda p: p.settings)
@pytest.mark.parametrize(
    ("num_nodes", "num_parts", "edges"),
    [
        (1, 1, []),
        (5, 1, [(0, 1)]),
        (4, 4, [(0, 1), (1, 2), (2, 3)]),
        (7, 3, []),
        (9, 4, [(i, i) for i in range(9)]),
        (40, 8, [(0, i) for i in range(40)]),
        (40, 8, [(i, 0) for i in range(40)] * 3),
        (30, 7, [(i, i + 1) for i in range(10)]),
    ],
    ids=["one", "k1", "n=k", "no edges", "loops", "star out", "star in", "isolated"],
)
def test_odd_graphs_get_no_empty_part(
    partitioner: Partitioner, num_nodes: int, num_parts: int, edges: list[tuple[int, int]]
) -> None:
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    parts = partitioner.assign(edge_index, num_nodes, num_parts, torch.arange(num_nodes) == 0)
    assert parts.shape == (num_nodes,)
    assert sorted(set(parts.tolist())) == list(range(num_parts))


@pytest.mark.parametrize("partitioner", AUTOMATIC, ids=lambda p: p.settings)
def test_no_training_nodes(partitioner: Partitioner) -> None:
    edge_index, train_mask = community_graph(num_nodes=160)
    unknown = partitioner.assign(edge_index, 160, 4)
    none = partitioner.assign(edge_index, 160, 4, torch.zeros_like(train_mask))
    assert torch.equal(unknown, none)


@pytest.mark.parametrize("partitioner", AUTOMATIC, ids=lambda p: p.settings)
def test_same_seed_same_parts(partitioner: Partitioner) -> None:
    edge_index, train_mask = community_graph(num_nodes=800)
    torch.manual_seed(1)
    first = partitioner.assign(edge_index, 800, 4, train_mask)
    torch.manual_seed(2)
    assert torch.equal(first, partitioner.assign(edge_index, 800, 4, train_mask))


@pytest.mark.parametrize("kind", [Metis, Random, Streaming])
def test_seed_changes_parts_and_settings(kind: type[Metis | Random | Streaming]) -> None:
    edge_index, train_mask = community_graph(num_nodes=800)
    one, two = kind(seed=1), kind(seed=2)
    assert one.settings != two.settings
    first, second = (p.assign(edge_index, 800, 4, train_mask) for p in (one, two))
    assert not torch.equal(first, second)


def test_random_sizes_differ_by_at_most_one() -> None:
    train_mask = torch.rand(103, generator=torch.Generator().manual_seed(0)) < 0.3
    parts = Random().assign(torch.empty(2, 0, dtype=torch.int64), 103, 4, train_mask)
    sizes, train = parts.bincount(), parts[train_mask].bincount(minlength=4)
    assert sizes.max() - sizes.min() <= 1
    assert train.max() - train.min() <= 1


@pytest.mark.parametrize("partitioner", AUTOMATIC, ids=lambda p: p.settings)
def test_requests_that_cannot_be_met(partitioner: Partitioner) -> None:
    edge_index = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"expected 1\.\.3 parts for 3 nodes, got 4"):
        partitioner.assign(edge_index, 3, 4)
    with pytest.raises(ValueError, match="expected train_mask bool"):
        partitioner.assign(edge_index, 3, 2, torch.tensor([0, 1, 2]))


def test_assignment_is_taken_as_given() -> None:
    given = torch.tensor([2, 0, 0, 2], dtype=torch.int32)
    parts = Assignment(given).assign(torch.empty(2, 0, dtype=torch.int64), 4, 4)
    assert parts.dtype == torch.int64
    assert parts.tolist() == given.tolist()
    assert Assignment(given).settings == Assignment(given.long()).settings
    assert Assignment(given).settings != Assignment(given.flip(0) + 1).settings


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.tensor([0.0, 1.0, 1.0]), "whole part numbers, got torch.float32"),
        (torch.tensor([True, False, True]), "whole part numbers, got torch.bool"),
        (torch.tensor([0, 1]), r"shape \(3,\), got \(2,\)"),
        (torch.tensor([[0, 1, 1]]), r"shape \(3,\), got \(1, 3\)"),
        (torch.tensor([0, 1, 2]), r"0\.\.1, got 0\.\.2: .* or train on 3 ranks"),
        (torch.tensor([0, -1, 1]), r"0\.\.1, got -1\.\.1"),
    ],
)
def test_assignments_that_do_not_fit(parts: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_assignment(parts, 3, 2)


def test_resolve() -> None:
    assert isinstance(resolve("metis"), Metis)
    assert isinstance(resolve("random"), Random)
    assert isinstance(resolve("streaming"), Streaming)
    assert isinstance(resolve(torch.tensor([0, 1])), Assignment)
    mine = Metis(seed=3)
    assert resolve(mine) is mine
    with pytest.raises(ValueError, match="got 'spectral'"):
        resolve("spectral")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os; os.abort()", "METIS was ended by SIGABRT: use partition='random'"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL, most likely for lack of memory"),
        ("import pymetis_is_not_here", "exit code 1 .*pymetis_is_not_here"),
        ("raise ModuleNotFoundError(\"No module named 'pymetis'\")", "pip install pymetis"),
        ("raise MemoryError('too big')", r"exit code 1 \(MemoryError: too big\)"),
    ],
)
def test_a_dead_metis_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    script = tmp_path / "child.py"
    script.write_text(body)
    monkeypatch.setattr(_metis, "_SCRIPT", script)
    with pytest.raises(RuntimeError, match=message):
        Metis().assign(torch.tensor([[0, 1], [1, 2]]), 3, 2)


def test_child_imports_neither_torch_nor_the_package() -> None:
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]);"
        "assert not {'torch', 'lightning_sylvie'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(_metis._SCRIPT)], check=True)


def test_builds_of_pymetis_that_hide_metis_balance_work() -> None:
    edge_index, train_mask = community_graph(num_nodes=1600)
    weights = torch.stack([1 + edge_index[1].bincount(minlength=1600), train_mask.long()], dim=1)
    xadj, adjncy = _metis.undirected(edge_index.numpy(), 1600)
    problem = _metis.Problem(xadj, adjncy, weights.numpy(), 4, 0, 0.03)
    parts = torch.from_numpy(_metis._solve_first_weight(problem, "cut"))
    assert balance(weights[:, 0], parts, 4) <= 1.1
    assert problem.volume(parts.numpy()) == volume(edge_index, parts)


def test_metis_sees_an_undirected_simple_graph() -> None:
    edge_index = np.array([[0, 0, 1, 2, 2], [1, 1, 0, 2, 0]])
    xadj, adjncy = _metis.undirected(edge_index, 4)
    assert xadj.tolist() == [0, 2, 3, 4, 4]
    assert adjncy.tolist() == [1, 2, 0, 0]
