"""The model and the graphs of the accuracy benchmark: a two-layer GCN on sparse features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv


class SparseGCN(L.LightningModule):
    """Two GCN layers whose first weight meets only the features that a node has.

    Thousands of 0/1 features per node, nearly all 0: `data.column` and `data.value`,
    ``(num_nodes, most per node)``, name and weigh those that are not, with weight 0 for padding.
    Equal to ``GCNConv(x)`` on the dense `x`, dropout included: what is 0 stays 0.

    Args:
        num_features: Width of the dense `x`.
        hidden: Width between the layers.
        num_classes: Classes.
        dropout: Of features and hidden rows.
    """

    def __init__(self, num_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.weight = torch.nn.Parameter(torch.empty(num_features, hidden))
        torch.nn.init.xavier_uniform_(self.weight)
        self.conv1 = GCNConv(hidden, hidden)
        self.conv1.lin = torch.nn.Identity()  # `weight` has done it
        self.conv2 = GCNConv(hidden, num_classes)
        self._features: SparseRows | None = None

    def forward(self, data: Any) -> Tensor:
        if self._features is None:
            self._features = SparseRows(data.column, data.value, len(self.weight))
        value = F.dropout(self._features.value, self.dropout, self.training)
        x = self._features.times(value, self.weight)
        x = F.dropout(self.conv1(x, data.edge_index).relu(), self.dropout, self.training)
        return self.conv2(x, data.edge_index)

    def training_step(self, data: Any, _: int) -> Tensor:
        return F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])

    def validation_step(self, data: Any, _: int) -> None:
        right = (self(data).argmax(-1) == data.y).float()
        for split in ("val", "test"):
            self.log(f"{split}_acc", right[data[f"{split}_mask"]].mean(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first = {"params": [self.weight, *self.conv1.parameters()], "weight_decay": 5e-4}
        return torch.optim.Adam([first, {"params": self.conv2.parameters()}], lr=0.01)


class SparseRows:
    """A sparse matrix of features and its transpose, for products with changing values.

    Args:
        column: int, ``(num_rows, most per row)``.
        value: Of the same shape; 0 is padding.
        num_columns: Columns.
    """

    def __init__(self, column: Tensor, value: Tensor, num_columns: int) -> None:
        present = value != 0
        self.value, self.column = value[present], column[present].int()
        self.shape = len(value), num_columns
        row = torch.arange(len(value)).repeat_interleave(present.sum(1))
        self.order = self.column.argsort(stable=True)  # of the transpose
        self.row, self.start = row[self.order].int(), _starts(present.sum(1))
        self.start_of_column = _starts(torch.bincount(self.column, minlength=num_columns))

    def times(self, value: Tensor, dense: Tensor) -> Tensor:
        """This matrix with `value` in place of its values, times `dense`."""
        product: Tensor = _Product.apply(self, value, dense)
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: SparseRows, value: Tensor, dense: Tensor) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(value)
        return torch.sparse_csr_tensor(rows.start, rows.column, value, rows.shape) @ dense

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        rows, (value,) = ctx.rows, ctx.saved_tensors
        turned = torch.sparse_csr_tensor(
            rows.start_of_column, rows.row, value[rows.order], rows.shape[::-1]
        )
        return None, None, turned @ grad


def _starts(counts: Tensor) -> Tensor:
    """Where each of consecutive runs of these lengths begins, and where the last ends."""
    return F.pad(counts.cumsum(0), (1, 0)).int()


class BestEpoch(L.Callback):
    """Keeps the test accuracy at the best validation epoch, and writes it to a file.

    A file, because nothing else comes back from the processes that a fit has started.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.best = path, (-1.0, -1.0)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = trainer.callback_metrics
        found = float(values["val_acc"]), float(values["test_acc"])
        self.best = max(self.best, found, key=lambda pair: pair[0])

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps({"val": self.best[0], "test": self.best[1]}))


def packed(data: Data, *, normalize: bool) -> Data:
    """`data` with `column` and `value` in place of the dense `x`.

    Args:
        data: With `x`, ``(num_nodes, num_features)``.
        normalize: Let the values of a node sum to 1.
    """
    count = (data.x != 0).sum(1)
    row, feature = data.x.nonzero().T
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    column = torch.zeros(data.num_nodes, int(count.max()), dtype=torch.int32)
    value = torch.zeros(column.shape)
    column[row, place] = feature.int()
    value[row, place] = data.x[row, feature]
    if normalize:
        value /= value.sum(1, keepdim=True).clamp(min=1)
    masks = {name: mask for name, mask in data.to_dict().items() if name.endswith("_mask")}
    kept = Data(edge_index=data.edge_index, y=data.y, column=column, value=value, **masks)
    kept.num_nodes = data.num_nodes
    kept.num_inputs = data.x.shape[1]
    return kept


def split(data: Data, seed: int) -> Data:
    """`data` with random masks of 60 %, 20 % and 20 % of the nodes."""
    order = torch.from_numpy(numpy.random.RandomState(seed).permutation(data.num_nodes))
    ends = [int(0.6 * data.num_nodes), int(0.8 * data.num_nodes)]
    names = "train_mask", "val_mask", "test_mask"
    for name, nodes in zip(names, order.tensor_split(ends), strict=True):
        data[name] = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
    return data
