"""SylvieModule: losses, metrics over exactly the masked nodes, predictions in the graph's order."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GraphSAGE, SAGEConv
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MultilabelAUROC,
    MultilabelF1Score,
)
from trainers import (
    NUM_CLASSES,
    NUM_FEATURES,
    OnRanks,
    Setting,
    UserModule,
    alone,
    assert_equal_runs,
    loader,
    small_gnn,
    small_graph,
    weights,
)

from lightning_sylvie import GraphDataModule, SylvieModule

NUM_LABELS = 3


def labelled_graph() -> Data:
    """Several 0/1 labels per node."""
    graph = small_graph()
    draw = torch.Generator().manual_seed(3)
    noise = torch.rand(graph.num_nodes, NUM_LABELS, generator=draw)
    graph.y = (graph.x[:, :NUM_LABELS] + noise > 0.5).long()
    return graph


def unwatched(graph: Data, num_ranks: int) -> Tensor:
    """An assignment without validation and test nodes on rank 0."""
    parts = torch.arange(graph.num_nodes) % max(1, num_ranks)
    parts[~graph.train_mask & (parts == 0)] = max(0, num_ranks - 1)
    return parts


def one_process(module: SylvieModule, data: Data, metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics over the test nodes by torchmetrics itself, on the module's weights."""
    with torch.no_grad():
        scores = module.eval().double()(data)
    return {
        f"test_{name}": float(metric(scores[data.test_mask], data.y[data.test_mask]))
        for name, metric in metrics.items()
    }


def trained(setting: Setting, data: Data, **options: Any) -> tuple[SylvieModule, dict[str, float]]:
    """A module after five epochs, and what `trainer.test` says of it."""
    num_outputs = NUM_LABELS if data.y.shape[1:] == (NUM_LABELS,) else NUM_CLASSES
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GraphSAGE(NUM_FEATURES, 8, num_layers=2, out_channels=num_outputs)
    module = SylvieModule(model, **options)
    partition = unwatched(data, setting.num_ranks)
    trainer = setting.trainer(max_epochs=5, strategy={"partition": partition})
    trainer.fit(module, GraphDataModule(data))
    (results,) = trainer.test(module, GraphDataModule(data), verbose=False)
    return module, results


def multiclass(setting: Setting) -> dict[str, float]:
    module, results = trained(setting, small_graph(), metrics=("acc", "f1", "auroc"))
    if not setting.num_ranks:
        again = one_process(
            module,
            small_graph(),
            {
                "acc": MulticlassAccuracy(NUM_CLASSES, average="micro"),
                "f1": MulticlassF1Score(NUM_CLASSES, average="micro"),
                "auroc": MulticlassAUROC(NUM_CLASSES),
            },
        )
        assert {name: results[name] for name in again} == pytest.approx(again, rel=1e-6)
    return results


def multilabel(setting: Setting) -> dict[str, float]:
    module, results = trained(setting, labelled_graph(), metrics=["f1", "auroc"])
    if not setting.num_ranks:
        again = one_process(
            module,
            labelled_graph(),
            {
                "f1": MultilabelF1Score(NUM_LABELS, average="micro"),
                "auroc": MultilabelAUROC(NUM_LABELS),
            },
        )
        assert {name: results[name] for name in again} == pytest.approx(again, rel=1e-6)
    return results


def metrics_of_the_user(setting: Setting) -> dict[str, float]:
    mine = MetricCollection({"macro": MulticlassF1Score(NUM_CLASSES, average="macro")})
    single = MulticlassAccuracy(NUM_CLASSES, average="macro")
    _, collection = trained(setting, small_graph(), metrics=mine)
    _, metric = trained(setting, small_graph(), metrics=single)
    _, named = trained(setting, small_graph(), metrics="f1")
    assert named.keys() == {"test_loss", "test_f1"}
    assert collection.keys() == {"test_loss", "test_macro"}
    return {**collection, **metric}


def column_labels(setting: Setting) -> dict[str, float]:
    """Labels of shape (num_nodes, 1), as OGB has them."""
    graph = small_graph()
    graph.y = graph.y[:, None]
    return trained(setting, graph)[1]


def optimizer_and_scheduler(setting: Setting) -> dict[str, Tensor]:
    module, _ = trained(
        setting,
        small_graph(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
        loss=functools.partial(F.cross_entropy, label_smoothing=0.1),
    )
    return weights(module)


class EdgeModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(NUM_FEATURES, NUM_CLASSES, edge_dim=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_attr)


def edge_features(setting: Setting) -> dict[str, Tensor]:
    graph = small_graph()
    draw = torch.Generator().manual_seed(1)
    graph.edge_attr = torch.randn(graph.num_edges, 2, dtype=torch.float64, generator=draw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = SylvieModule(EdgeModel())
    setting.trainer().fit(module, GraphDataModule(graph))
    return weights(module)


class Outputs(UserModule):
    def predict_step(self, data: Data, _: int) -> Any:
        scores = self.gnn(data.x, data.edge_index)
        tested = scores[data.test_mask].argmax(-1)
        return {"scores": scores, "tested": tested, "rest": (scores[:, 0], scores > 0, "text", 7)}


def predictions(setting: Setting) -> Any:
    """A tensor from SylvieModule; a user's nested ones, one of them of the test nodes only."""
    graph = small_graph()
    partition = torch.arange(graph.num_nodes) % max(1, setting.num_ranks)
    partition[graph.val_mask] = 0
    trainer = setting.trainer(strategy={"partition": partition})
    (scores,) = trainer.predict(SylvieModule(small_gnn()), GraphDataModule(small_graph()))
    (nested,) = trainer.predict(Outputs(), loader())
    first, signs, *others = nested["rest"]
    assert others == ["text", 7]
    assert nested["tested"].shape == (int(small_graph().test_mask.sum()),)
    return {"scores": scores, "tested": nested["tested"], "first": first, "signs": signs}


def ambiguous_predictions(setting: Setting) -> None:
    """As many validation as test nodes on every rank."""
    graph = small_graph()
    graph.val_mask = graph.test_mask.roll(setting.num_ranks)
    parts = torch.arange(graph.num_nodes) % setting.num_ranks
    setting.trainer(strategy={"partition": parts}).predict(Outputs(), loader(graph))


def inductive(setting: Setting) -> dict[str, Any]:
    """Trained on the subgraph of training nodes, tested on the whole graph."""
    module = SylvieModule(small_gnn())
    data = GraphDataModule(small_graph(), inductive=True)
    trainer = setting.trainer()
    trainer.fit(module, data)
    (results,) = trainer.test(module, data, verbose=False)
    (scores,) = trainer.predict(module, data)
    return {**weights(module), "scores": scores, **{k: torch.tensor(v) for k, v in results.items()}}


def lazy_layers(setting: Setting) -> dict[str, Tensor]:
    """``in_channels=-1``; the reference is initialised by one forward before."""
    torch.manual_seed(5)
    module = SylvieModule(GraphSAGE((-1, -1), 8, num_layers=2, out_channels=NUM_CLASSES))
    if not setting.num_ranks:
        with torch.no_grad():
            module.double()(small_graph())
    start: dict[str, Tensor] = {}
    module.on_fit_start = lambda: start.update(weights(module))  # type: ignore[method-assign]
    setting.trainer().fit(module, GraphDataModule(small_graph()))
    assert all(not torch.equal(value, start[name]) for name, value in weights(module).items())
    return {f"start.{name}": value for name, value in start.items()} | weights(module)


class LazyUser(UserModule):
    def __init__(self) -> None:
        super().__init__(SAGEConv(-1, NUM_CLASSES))


def lazy_layers_of_a_user(setting: Setting) -> None:
    setting.trainer().fit(LazyUser(), loader(), loader())


class ConfiguredUser(LazyUser):
    """The remedy that the error names."""

    def configure_model(self) -> None:
        graph = small_graph()
        with torch.no_grad():
            self.gnn.double()(graph.x, graph.edge_index)


def lazy_layers_called_by_the_user(setting: Setting) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module = ConfiguredUser()
    setting.trainer().fit(module, loader(), loader())
    return weights(module)


RUNS = [optimizer_and_scheduler, edge_features, predictions, inductive, lazy_layers]
RUNS += [lazy_layers_called_by_the_user]
METRICS = [multiclass, multilabel, metrics_of_the_user, column_labels]
on_ranks = OnRanks(*RUNS, *METRICS, lazy_layers_of_a_user, ambiguous_predictions)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_that_of_one_device(case: Any, num_ranks: int) -> None:
    assert_equal_runs(on_ranks(case, num_ranks), alone(case))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", METRICS)
def test_metrics_are_torchmetrics_over_the_masked_nodes(case: Any, num_ranks: int) -> None:
    """A rank without validation and test nodes neither warns nor waits."""
    expected = alone(case)
    for found in on_ranks(case, num_ranks):
        assert found == pytest.approx(expected, rel=1e-6)


def test_lazy_layers_of_another_module_are_refused_with_the_remedy() -> None:
    for text in on_ranks.raised(lazy_layers_of_a_user, 2):
        assert "expected parameters with a size, got gnn." in text
        assert "call the model once on the graph in configure_model" in text


def test_predictions_of_nodes_that_are_not_known_are_refused() -> None:
    for text in on_ranks.raised(ambiguous_predictions, 2):
        assert "got as many rows as ['val_mask', 'test_mask'] have on every rank" in text


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r'expected metrics among "acc", "f1", "auroc", got .*mcc'):
        SylvieModule(small_gnn(), metrics=["acc", "mcc"])
