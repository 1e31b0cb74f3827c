"""What is refused before training, and that every refusal says what to change."""

from __future__ import annotations

import pickle
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GPSConv
from trainers import OnRanks, Setting, UserModule, loader, small_gnn, small_graph

from lightning_sylvie import SylvieStrategy
from lightning_sylvie.partition import Metis


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"expected bits in \(0\.5, 1, .*got 3"),
        ({"gradient_bits": 5}, "expected bits in .*got 5"),
        ({"quantizer": "best"}, "expected quantizer in .*got 'best'"),
        ({"mode": "late"}, "expected mode to be one of .*'async'.*, got 'late'"),
        ({"mode": "async", "smoothing": 1.0}, "expected smoothing from 0 up to below 1, .*got"),
        ({"smoothing": 0.95}, "expected smoothing with mode=\"async\", got mode='sync'"),
        ({"exchange": "row"}, "expected exchange to be one of .*'input'.*, got 'row'"),
        ({"partition": "best"}, "expected partition to be one of .*got 'best'"),
        ({"partition": torch.rand(4)}, "expected .*got"),
        ({"loss_reduction": "max"}, "expected loss_reduction .*got 'max'"),
        ({"start_method": "thread"}, "expected start_method .*got 'thread'"),
        ({"timeout": 30}, "expected timeout .*got 30"),
    ],
)
def test_constructor_says_expected_and_got(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SylvieStrategy(**options)


def test_unknown_and_positional_options_are_errors() -> None:
    with pytest.raises(TypeError):
        SylvieStrategy(bit=32)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SylvieStrategy(32)  # type: ignore[misc]


def test_repr_tells_the_options() -> None:
    assert repr(SylvieStrategy(bits=32, partition=Metis(seed=3))) == (
        "SylvieStrategy(bits=32, mode='sync', exchange='message', "
        "partition='metis seed=3 objective=volume imbalance=0.03')"
    )


def test_a_strategy_is_copied_and_pickled_before_launch() -> None:
    strategy = SylvieStrategy(partition=torch.tensor([0, 1]), loss_reduction="sum")
    for copied in (deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert repr(copied) == repr(strategy)
        assert copied.loss_reduction == "sum"


def accumulation(setting: Setting) -> None:
    setting.trainer(accumulate_grad_batches=4).fit(UserModule(), loader(), loader())


def scheduled_accumulation(setting: Setting) -> None:
    later = GradientAccumulationScheduler({0: 1, 5: 3})
    setting.trainer(callbacks=[later]).fit(UserModule(), loader(), loader())


def averaged_batch_norm(setting: Setting) -> None:
    average = StochasticWeightAveraging(0.01)
    module = UserModule(small_gnn(norm="batch_norm"))
    setting.trainer(callbacks=[average]).fit(module, loader(), loader())


def several_splits(setting: Setting) -> None:
    graph = small_graph()
    graph.train_mask = torch.stack([graph.train_mask, ~graph.train_mask], 1)
    setting.trainer(limit_val_batches=0).fit(UserModule(), loader(graph), loader(graph))


def several_graphs(setting: Setting) -> None:
    graphs = DataLoader([small_graph(), small_graph()], batch_size=1)
    setting.trainer().fit(UserModule(), graphs, loader())


def a_batch_of_graphs(setting: Setting) -> None:
    graphs = DataLoader([small_graph(), small_graph()], batch_size=2)
    setting.trainer().fit(UserModule(), graphs, loader())


def sampled_neighbours(setting: Setting) -> None:
    sampled = DataLoader([{"x": torch.ones(3)}])
    setting.trainer().fit(UserModule(), sampled, loader())


def heterogeneous(setting: Setting) -> None:
    graph = HeteroData()
    graph["paper"].x = torch.ones(3, 2)
    setting.trainer().fit(UserModule(), DataLoader([graph]), loader())


def without_edges(setting: Setting) -> None:
    setting.trainer().fit(UserModule(), loader(Data(x=torch.ones(4, 2))), loader())


def global_attention(setting: Setting) -> None:
    setting.trainer().fit(UserModule(GPSConv(6, None)), loader(), loader())


class Replaces(UserModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return small_graph()


def replaced_batch(setting: Setting) -> None:
    setting.trainer().fit(Replaces(), loader(), loader())


def too_many_parts(setting: Setting) -> None:
    parts = torch.arange(small_graph().num_nodes) % 3
    setting.trainer(strategy={"partition": parts}).fit(UserModule(), loader(), loader())


REFUSED = {
    accumulation: r"expected accumulate_grad_batches=1, got 4: .*learning rate",
    scheduled_accumulation: r"expected accumulate_grad_batches=1, got \{.*5: 3.*learning rate",
    averaged_batch_norm: "StochasticWeightAveraging with BatchNorm.*use EMAWeightAveraging",
    several_splits: r"expected data.train_mask with one value per node, got \(2,\).*keep one",
    several_graphs: "expected a loader of one batch.*got several batches.*batch_size=1",
    a_batch_of_graphs: "expected one graph in the batch, got 2",
    sampled_neighbours: "expected the loader to yield one torch_geometric Data, got dict",
    heterogeneous: "expected one homogeneous torch_geometric Data, got HeteroData.*to_homogeneous",
    without_edges: "expected data.edge_index, got the fields.*keep edge_index",
    global_attention: r"gnn.*GPSConv",
    replaced_batch: "expected a batch with this rank's part.*change its fields instead",
    too_many_parts: "expected .*got",
}
on_ranks = OnRanks(*REFUSED)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank_with_the_reason(case: Any) -> None:
    """The cause shows on every rank, also where only rank 0 reads the graph."""
    for text in on_ranks.raised(case, 2):
        message = text.rpartition("Error: ")[2].replace("\n", " ")
        assert re.search(REFUSED[case], message), text
