"""What a trainer, a module or a batch must not ask for, said before anything is trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data.lightning import LightningNodeData

from lightning_sylvie.shard import Shard


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raises for options that have no meaning when an epoch is one step over the whole graph.

    Raises:
        ValueError: With the option, the reason and what to do.
    """
    accumulates = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler)
        and any(every != 1 for every in callback.scheduling.values())
    ]
    if trainer.accumulate_grad_batches != 1 or accumulates:
        raise ValueError(
            f"expected accumulate_grad_batches=1, got {trainer.accumulate_grad_batches}: an epoch "
            "is one batch, after which Lightning steps anyway with a loss divided by that number; "
            "lower the learning rate instead"
        )
    averages = [c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging)]  # type: ignore[attr-defined]
    if averages and any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise ValueError(
            "StochasticWeightAveraging with BatchNorm layers: its extra epoch for their statistics "
            "takes one more optimizer step; use EMAWeightAveraging or a model without BatchNorm"
        )


def check_masks(shard: Shard, loss_reduction: Any) -> None:
    """Raises if the share of a part in a mean over training nodes can't be told.

    Raises:
        ValueError: If the training mask holds several splits.
    """
    mask = shard.node.get("train_mask")
    if loss_reduction == "mean" and mask is not None and mask.dim() != 1:
        raise ValueError(
            f"expected data.train_mask with one value per node, got {tuple(mask.shape)[1:]} per "
            "node (several splits): keep one, data.train_mask = data.train_mask[:, 0], or pass "
            "loss_reduction=lambda data: data.train_mask[:, 0].sum()"
        )


def allow_full_graph_loader(trainer: Trainer) -> None:
    """Lets PyG's ``LightningNodeData(loader="full")`` past its own refusal of several devices."""
    datamodule = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, LightningNodeData) and datamodule.loader == "full":
        datamodule.prepare_data = lambda: None  # type: ignore[method-assign]
