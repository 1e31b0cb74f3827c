"""A LightningModule around any PyG model for node-level tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Adam, Optimizer
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelF1Score,
)

from lightning_sylvie.rowless import taking_no_rows

EXTRAS = ("edge_weight", "edge_attr", "edge_type", "pos", "normal")
STAGES = {"val": "val_mask", "test": "test_mask"}

Loss = Callable[[Tensor, Tensor], Tensor]


class SylvieModule(LightningModule):
    """Trains a PyG model on the nodes of a mask; nothing in it knows about parts.

    The model is called as ``model(x, edge_index)``, with those of `edge_weight`, `edge_attr`,
    `edge_type`, `pos` and `normal` that its `forward` takes and the graph has. The loss is a mean
    over the training nodes; metrics cover exactly the masked nodes of all ranks.

    Args:
        model: Gives one row of scores (logits) per node.
        lr: Learning rate of the default optimizer, Adam.
        optimizer: Parameters -> optimizer, in place of Adam.
        scheduler: Optimizer -> scheduler, or the dict that Lightning takes for one.
        loss: (scores, labels) -> mean loss. None: cross-entropy for one class per node, binary
            cross-entropy for 0/1 labels of shape ``(num_nodes, num_labels)``.
        metrics: Names among "acc", "f1" (micro) and "auroc", or a torchmetrics object. None: "acc"
            for one class per node, "f1" for several labels.

    Raises:
        ValueError: For an unknown metric.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: float = 0.01,
        optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        loss: Loss | None = None,
        metrics: Iterable[str] | Metric | MetricCollection | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": lr})
        self.model = model
        self._optimizer, self._scheduler, self._loss = optimizer, scheduler, loss
        self._wanted = metrics if isinstance(metrics, (Metric, MetricCollection)) else None
        self._names: tuple[str, ...] = ()  # of our own metrics
        if isinstance(metrics, str):
            self._names = (metrics,)
        elif metrics is not None and not isinstance(metrics, (Metric, MetricCollection)):
            self._names = tuple(metrics)
        if unknown := set(self._names) - {"acc", "f1", "auroc"}:
            raise ValueError(f'expected metrics among "acc", "f1", "auroc", got {unknown}')
        self._log_every = 1
        self.metrics = torch.nn.ModuleDict()
        takes = inspect.signature(model.forward).parameters
        self._extras = [name for name in EXTRAS if name in takes]

    def on_train_start(self) -> None:
        """Finds out who reads the training metrics: telling them to nobody costs as much as a step.

        A progress bar and a monitor read them at every step, loggers every `log_every_n_steps`.
        """
        monitors = [getattr(callback, "monitor", None) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        monitors += [config.monitor for config in self.trainer.lr_scheduler_configs]
        read = self.trainer.progress_bar_callback or {"train_loss", "train_acc"} & set(monitors)
        self._log_every = 1 if read else max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes the hook it is in some sixty times per epoch, which torch would search
        for parameters each time."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, data: Any) -> Tensor:
        """Scores of every node of `data`, ``(num_nodes, num_classes)``."""
        extras = {name: data[name] for name in self._extras if data.get(name) is not None}
        scores: Tensor = self.model(data.x, data.edge_index, **extras)
        return scores

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        scores, labels = self._masked(self(data), data, "train_mask")
        loss = self._loss_of(scores, labels)
        if (self.global_step + 1) % self._log_every == 0:
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
            if labels.dim() == 1:
                correct = (scores.detach().argmax(-1) == labels).float()
                self.log("train_acc", correct.mean(), on_step=True, on_epoch=False, batch_size=1)
        return loss

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self._evaluate(data, "val")

    def test_step(self, data: Any, batch_idx: int) -> None:
        self._evaluate(data, "test")

    def predict_step(self, data: Any, batch_idx: int) -> Tensor:
        """Scores; of all nodes, in the graph's order, on every rank."""
        scores: Tensor = self(data)
        return scores

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        make = self._optimizer or (lambda given: Adam(given, lr=self.hparams["lr"]))
        optimizer = make(parameters)
        if self._scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._scheduler(optimizer)}

    def _evaluate(self, data: Any, stage: str) -> None:
        scores, labels = self._masked(self(data), data, STAGES[stage])
        self.log(f"{stage}_loss", self._loss_of(scores, labels), batch_size=1)
        metrics = self._metrics(stage, scores, labels)
        if self._names:  # ours: torchmetrics would guess from the values whether these are logits
            scores = scores.softmax(-1) if labels.dim() == 1 else scores.sigmoid()
        with taking_no_rows(metrics):
            metrics.update(scores, labels.int() if labels.dim() == 2 else labels)
        self.log_dict(metrics, prog_bar=True, batch_size=1)

    def _masked(self, scores: Tensor, data: Any, name: str) -> tuple[Tensor, Tensor]:
        mask = data.get(name)
        labels = data.y.squeeze(-1) if data.y.dim() == 2 and data.y.shape[1] == 1 else data.y
        return (scores, labels) if mask is None else (scores[mask], labels[mask])

    def _loss_of(self, scores: Tensor, labels: Tensor) -> Tensor:
        if self._loss is not None:
            return self._loss(scores, labels)
        if labels.dim() == 1:
            return F.cross_entropy(scores, labels)
        return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))

    def _metrics(self, stage: str, scores: Tensor, labels: Tensor) -> MetricCollection:
        """The stage's own metrics, made when the number of classes is known."""
        if stage not in self.metrics:
            made: Any = self._wanted
            if made is None:
                names = self._names or (("acc",) if labels.dim() == 1 else ("f1",))
                self._names = names
                made = {name: _metric(name, scores.shape[1], labels.dim() == 2) for name in names}
            collection = MetricCollection(made).clone(prefix=f"{stage}_").to(scores.device)
            self.metrics[stage] = collection
        metrics: MetricCollection = self.metrics[stage]  # type: ignore[assignment]
        return metrics


def _metric(name: str, num_classes: int, multilabel: bool) -> Metric:
    if multilabel:
        kind: Any = {"acc": MultilabelAccuracy, "f1": MultilabelF1Score, "auroc": MultilabelAUROC}
        average = "macro" if name == "auroc" else "micro"
        metric: Metric = kind[name](num_classes, average=average)
        return metric
    kind = {"acc": MulticlassAccuracy, "f1": MulticlassF1Score, "auroc": MulticlassAUROC}
    average = "macro" if name == "auroc" else "micro"
    metric = kind[name](num_classes, average=average)
    return metric
