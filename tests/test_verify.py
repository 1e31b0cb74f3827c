"""verify: a model's own proof, N parts against one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GIN, GPSConv, GraphSAGE, SAGEConv
from torchmetrics.classification import MulticlassAccuracy
from trainers import NUM_CLASSES, NUM_FEATURES, UserModule, small_gnn, small_graph, weights

from lightning_sylvie import RefusedLayerError, SylvieModule, SylvieStrategy


@pytest.mark.parametrize("exchange", ["message", "input"])
@pytest.mark.parametrize("kind", [GraphSAGE, GAT, GIN])
def test_models_of_pyg_are_exact(kind: Any, exchange: Any) -> None:
    model = kind(NUM_FEATURES, 8, num_layers=2, out_channels=NUM_CLASSES, norm="batch_norm")
    result = SylvieStrategy(exchange=exchange).verify(model, small_graph(), num_parts=3)
    assert result
    assert result.exact
    assert result.num_parts == 3
    assert "output" in result.differences
    assert "gradient of model.convs.0" in str(result)
    assert "3 parts against one process: exact to rounding" in str(result)


class Cheat(torch.nn.Module):
    """Reads the mean over all nodes, which no layer exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index) - x.mean()


def test_a_model_that_reads_all_nodes_is_found_out() -> None:
    result = SylvieStrategy(partition="random").verify(Cheat(), small_graph())
    assert not result
    assert result.differences["output"] > 1e-3
    assert re.search(r"NOT EXACT.*output +\d\.\de-0\d  differs", str(result), re.S)


def test_the_model_and_the_graph_stay_as_they_are() -> None:
    model, graph = small_gnn(dropout=0.5), small_graph(torch.float32)
    before, kept = weights(model), graph.clone()
    assert SylvieStrategy().verify(model, graph)
    assert model.dropout.p == 0.5
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert all(torch.equal(value, kept[name]) for name, value in graph.to_dict().items())
    assert graph.x.dtype == torch.float32
    assert all(parameter.grad is None for parameter in model.parameters())


class Measured(UserModule):
    """Measures the training nodes, too: a part may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES)

    def training_step(self, data: Data, _: int) -> Any:
        out = self.gnn(data.x, data.edge_index)
        self.accuracy(out[data.train_mask], data.y[data.train_mask])
        self.log("train_acc", self.accuracy)
        losses = F.cross_entropy(out, data.y, reduction="none")
        return {"loss": (losses * data.train_mask).sum() / data.train_mask.sum()}


def test_a_lightning_module_is_verified_by_its_training_step() -> None:
    graph = small_graph()
    parts = torch.arange(graph.num_nodes) % 3
    parts[graph.train_mask & (parts == 1)] = 0
    result = SylvieStrategy(partition=parts).verify(Measured(), graph, num_parts=3)
    assert result, str(result)
    assert "loss" in result.differences


class Summed(UserModule):
    def loss(self, data: Data, mask: Tensor) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        return F.cross_entropy(out[mask], data.y[mask], reduction="sum")


def test_a_sum_is_exact_when_the_strategy_is_told_so() -> None:
    assert SylvieStrategy(loss_reduction="sum").verify(Summed(), small_graph())
    assert not SylvieStrategy().verify(Summed(), small_graph())


class Noisy(Cheat):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index) + torch.rand(x.shape[0], NUM_CLASSES)


def test_random_numbers_are_remarked() -> None:
    result = SylvieStrategy().verify(Noisy(), small_graph())
    assert "note: two runs in one process differ: the model draws random numbers" in str(result)


class Attentive(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GPSConv(NUM_FEATURES, None)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.first(x, edge_index)


def test_what_cannot_be_right_is_refused_as_in_training() -> None:
    with pytest.raises(RefusedLayerError, match=r"model\.first.*GPSConv"):
        SylvieStrategy().verify(Attentive(), small_graph())


def test_an_error_in_a_part_is_raised_and_not_its_echo() -> None:
    class Fails(Cheat):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if x.shape[0] < 100:
                raise ZeroDivisionError("in a part")
            return self.conv(x, edge_index)

    with pytest.raises(ZeroDivisionError, match="in a part"):
        SylvieStrategy().verify(SylvieModule(Fails()), small_graph(), num_parts=3)
