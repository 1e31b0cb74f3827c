"""What a trainer, a module or a batch must not ask for, said before anything is trained."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data.lightning import LightningNodeData

from lightning_sylvie.shard import Shard

KNOWN = {
    "mode": ("sync", "async"),
    "exchange": ("message", "input"),
    "_start_method": ("popen", "spawn", "fork", "forkserver"),
}


def check_strategy(strategy: Any) -> None:
    """Raises for options of `SylvieStrategy` outside of what it takes.

    Raises:
        ValueError: With what is expected and what was given.
        TypeError: If the timeout is a number, whose unit is not known.
    """
    for name, known in KNOWN.items():
        given = getattr(strategy, name)
        if given not in known:
            name = name.removeprefix("_")
            raise ValueError(f"expected {name} to be one of {known}, got {given!r}")
    if strategy.loss_reduction not in ("mean", "sum") and not callable(strategy.loss_reduction):
        raise ValueError(
            'expected loss_reduction "mean", "sum", or a function that gives the sum of the '
            f"weights in a batch's weighted mean, got {strategy.loss_reduction!r}"
        )
    momenta, stale = strategy.smoothing, strategy.mode == "async"
    if len(momenta) != 2 or not all(0 <= momentum < 1 for momentum in momenta):
        raise ValueError(f"expected smoothing from 0 up to below 1, or two of it, got {momenta}")
    if any(momenta) and not stale:
        raise ValueError(f'expected smoothing with mode="async", got mode={strategy.mode!r}')
    if not isinstance(strategy._timeout, timedelta):
        raise TypeError(f"expected timeout as a datetime.timedelta, got {strategy._timeout!r}")


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raises for options that have no meaning when an epoch is one step over the whole graph.

    Raises:
        ValueError: With the option, the reason and what to do.
    """
    given: list[Any] = [trainer.accumulate_grad_batches]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    given += [c.scheduling for c in callbacks if isinstance(c, GradientAccumulationScheduler)]
    for every in given:
        if set(every.values() if isinstance(every, dict) else [every]) != {1}:
            raise ValueError(
                f"expected accumulate_grad_batches=1, got {every}: an epoch is one batch, after "
                "which Lightning steps anyway, with a loss divided by that number; lower the "
                "learning rate instead"
            )
    averages = [c for c in callbacks if isinstance(c, StochasticWeightAveraging)]
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
        datamodule.prepare_data = lambda: None
