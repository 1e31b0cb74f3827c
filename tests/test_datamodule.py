"""GraphDataModule: one graph in any form, on the strategy and on an ordinary Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from trainers import Launched, OnRanks, Setting, alone, assert_equal_runs, small_gnn, small_graph
from trainers import weights as weights_of

from lightning_sylvie import GraphDataModule, SylvieModule

MASKS = ("train_mask", "val_mask", "test_mask")


def unmasked() -> Data:
    graph = small_graph()
    for name in MASKS:
        del graph[name]
    return graph


def only_graph(data: GraphDataModule, stage: str = "train") -> Data:
    (graph,) = getattr(data, f"{stage}_dataloader")()
    return graph


def same(first: Data, second: Data) -> bool:
    names = set(first.keys()) | set(second.keys())
    return all(torch.equal(first[name], second[name]) for name in names)


def test_every_form_of_one_graph_is_taken(tmp_path: Path) -> None:
    graph = small_graph()
    torch.save(graph, tmp_path / "graph.pt")
    for source in (graph, [graph], lambda: graph, lambda: [graph], tmp_path / "graph.pt"):
        assert same(only_graph(GraphDataModule(source)), graph)
    assert same(only_graph(GraphDataModule(str(tmp_path / "graph.pt"))), graph)


def test_a_function_runs_once_and_only_when_the_graph_is_needed() -> None:
    calls: list[int] = []

    def make() -> Data:
        calls.append(1)
        return small_graph()

    data = GraphDataModule(make)
    loaders = [data.train_dataloader(), data.val_dataloader()]
    assert not calls
    first, second = (next(iter(loader)) for loader in loaders)
    assert first is second
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            [small_graph(), small_graph()],
            r"expected a dataset of one graph, got 2: pass dataset\[i",
        ),
        ([3], r"expected a torch_geometric Data .* got int"),
        (lambda: HeteroData(), r"expected a torch_geometric Data .* got HeteroData"),
    ],
)
def test_other_sources_are_errors(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        only_graph(GraphDataModule(source))


def test_a_graph_without_masks_is_split_by_the_seed() -> None:
    first, again, other = (
        only_graph(GraphDataModule(unmasked(), split=(0.5, 0.3), seed=seed)) for seed in (0, 0, 1)
    )
    counts = [int(first[name].sum()) for name in MASKS]
    assert counts == [60, 36, 24]
    assert (first.train_mask.int() + first.val_mask.int() + first.test_mask.int() == 1).all()
    assert same(first, again)
    assert not torch.equal(first.train_mask, other.train_mask)


def test_one_of_several_splits_is_chosen() -> None:
    graph = small_graph()
    columns = {name: torch.stack([graph[name], ~graph[name]], 1) for name in MASKS}
    several = copy.copy(graph)
    several.update(columns)
    for split, expected in ((0, False), (1, True)):
        chosen = only_graph(GraphDataModule(several, split=split))
        assert torch.equal(chosen.train_mask, graph.train_mask ^ expected)
    assert torch.equal(several.train_mask, columns["train_mask"]), "the user's graph is changed"
    with pytest.raises(ValueError, match=r"expected split below 2.*got 2"):
        only_graph(GraphDataModule(several, split=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0.9, 0.2)}, r"expected a training and a validation share .*got \(0.9, 0.2\)"),
        ({"split": (0.0, 0.2)}, "expected a training and a validation share"),
        ({"partition": "best"}, "expected partition .*got 'best'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphDataModule(small_graph(), **options)


def test_split_number_needs_masks() -> None:
    with pytest.raises(ValueError, match="expected data with masks for split=1, got none"):
        only_graph(GraphDataModule(unmasked(), split=1))


def test_inductive_training_sees_training_nodes_only(tmp_path: Path) -> None:
    graph = small_graph()
    data = GraphDataModule(graph, inductive=True)
    inside = only_graph(data)
    assert inside.num_nodes == int(graph.train_mask.sum())
    assert inside.train_mask.all()
    assert same(only_graph(data, "val"), graph)
    with pytest.raises(ValueError, match="inductive=True needs the graph itself, got a folder"):
        GraphDataModule(tmp_path, inductive=True)


def test_on_one_device_the_model_gets_the_whole_graph() -> None:
    seen: list[Data] = []

    class Watch(SylvieModule):
        def training_step(self, data: Data, _: int) -> Tensor:
            seen.append(data)
            return super().training_step(data, _)

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Watch(small_gnn()), GraphDataModule(small_graph()))
    assert len(seen) == 3
    assert all(same(data, small_graph()) for data in seen)


def from_a_function(setting: Setting) -> dict[str, Tensor]:
    """Where there are ranks, only rank 0 makes the graph."""
    calls: list[int] = []

    def make() -> Data:
        calls.append(1)
        return unmasked()

    module = SylvieModule(small_gnn())
    setting.trainer().fit(module, GraphDataModule(make, seed=4))
    assert len(calls) == (1 if setting.rank == 0 else 0)
    return weights_of(module)


def other_strategy(setting: Setting) -> None:
    ddp = DDPStrategy(cluster_environment=Launched())
    module = SylvieModule(small_gnn())
    setting.trainer_of(ddp).fit(module, GraphDataModule(small_graph()))


on_ranks = OnRanks(from_a_function, other_strategy)


def test_only_rank_0_makes_the_graph() -> None:
    assert_equal_runs(on_ranks(from_a_function, 2), alone(from_a_function))


def test_another_strategy_on_several_devices_is_refused() -> None:
    for text in on_ranks.raised(other_strategy, 2):
        assert "expected SylvieStrategy for 2 devices, got DDPStrategy" in text
        assert "strategy=SylvieStrategy()" in text
