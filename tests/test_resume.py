"""A run that is stopped and goes on equals one that was not stopped, to the bit."""

from __future__ import annotations

import logging
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core import rank_zero
from ranks import rank_outcomes, run_ranks
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from trainers import (
    NUM_CLASSES,
    NUM_FEATURES,
    OnRanks,
    Setting,
    UserModule,
    largest_difference,
    loader,
    small_graph,
    weights,
)

from lightning_sylvie import AdaptiveBits, BoundedStaleness, GradientSum

EPOCHS = 6


class Random(UserModule):
    """Draws from every generator there is: dropout, numpy, Python."""

    validation_step = None  # type: ignore[assignment]

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(GraphSAGE(NUM_FEATURES, 32, 3, NUM_CLASSES, dropout=0.3))

    def training_step(self, data: Data, _: int) -> Tensor:
        noise = 0.1 * (np.random.rand() + random.random())  # noqa: NPY002
        out = self.gnn(data.x * (1 + noise), data.edge_index)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def fit(
    setting: Setting,
    num_epochs: int,
    *callbacks: Any,
    seed: int = 0,
    path: Any = None,
    bound: Any = None,
    precision: str = "64-true",
    **strategy: Any,
) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(seed)
    np.random.seed(seed + setting.rank)  # noqa: NPY002
    random.seed(seed + setting.rank)
    bounds = [] if bound is None else [BoundedStaleness(bound, maximum=4, threshold=0.29)]
    trainer = setting.trainer(
        strategy=strategy,
        max_epochs=num_epochs,
        precision=precision,
        callbacks=[*bounds, *callbacks],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    )
    dtype = torch.float64 if precision == "64-true" else torch.float32
    module = Random().to(dtype)
    data = loader(small_graph(dtype))
    with warnings.catch_warnings():  # a run that goes on may keep no checkpoints of its own
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        trainer.fit(module, data, ckpt_path=path, weights_only=True if path else None)
    return trainer, weights(module)


def keeping(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")


def stopped(setting: Setting, **how: Any) -> list[dict[str, Tensor]]:
    """Weights of a straight run; of one that is checkpointed; of runs from its checkpoints; of one
    from a checkpoint that was saved after the fit."""
    _, straight = fit(setting, EPOCHS, **how)
    _, saved = fit(setting, EPOCHS, keeping(setting.folder / "kept"), **how)
    runs = [straight, saved]
    for epoch in range(EPOCHS - 1) if setting.num_ranks == 2 else (2,):
        path = setting.folder / "kept" / f"epoch={epoch}.ckpt"
        runs.append(fit(setting, EPOCHS, seed=99, path=path, **how)[1])
    if setting.num_ranks > 2:
        return runs
    path = setting.folder / "after.ckpt"
    fit(setting, 2, **how)[0].save_checkpoint(path)
    runs.append(fit(setting, EPOCHS, seed=99, path=path, **how)[1])
    return runs


def sync_1(setting: Setting) -> Any:
    return stopped(setting, bits=1)


def sync_32(setting: Setting) -> Any:
    return stopped(setting)


def async_1(setting: Setting) -> Any:
    return stopped(setting, bits=1, mode="async")


def async_32(setting: Setting) -> Any:
    return stopped(setting, mode="async")


def bounded(setting: Setting) -> Any:
    return stopped(setting, bits=1, mode="async", bound=3, smoothing=0.9)


def adaptive(setting: Setting) -> Any:
    return stopped(setting, bits=1, mode="async", bound="auto")


def gradients_1(setting: Setting) -> Any:
    """Gradients at 1 bit, in two buckets; what the code loses comes back in later steps."""
    way = GradientSum(bits=1, bucket_bytes=4096)
    return stopped(setting, bits=1, precision="32-true", all_reduce=way)


def measured_sync(setting: Setting) -> Any:
    return stopped(setting, bits=AdaptiveBits(2, refresh_every=2), gradient_bits=AdaptiveBits(3))


def measured_async(setting: Setting) -> Any:
    return stopped(setting, bits=AdaptiveBits(2, refresh_every=2), mode="async", bound=4)


RUNS = [
    sync_1,
    sync_32,
    async_1,
    async_32,
    bounded,
    adaptive,
    gradients_1,
    measured_sync,
    measured_async,
]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def elsewhere(setting: Setting, path: str, **strategy: Any) -> list[str]:
    """What is said where a checkpoint is resumed in another place."""
    messages = Messages()
    rank_zero.log.addHandler(messages)
    try:
        trainer, found = fit(setting, EPOCHS, path=path, mode="async", **strategy)
    finally:
        rank_zero.log.removeHandler(messages)
    assert trainer.current_epoch == EPOCHS
    assert all(bool(value.isfinite().all()) for value in found.values())
    return [text for text in messages.texts if "first epoch is synchronous" in text]


def other_cut(setting: Setting) -> Any:
    path = setting.folder / "cut.ckpt"
    fit(setting, 2, mode="async")[0].save_checkpoint(path)
    plain = torch.load(path, weights_only=True)
    assert len(plain["lightning_sylvie"]["ranks"]) == setting.num_ranks
    parts = torch.arange(120) % setting.num_ranks
    return elsewhere(setting, str(path), partition=parts), elsewhere(setting, str(path))


CASES = OnRanks(*RUNS, other_cut, timeout=150.0)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", RUNS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(case: Any, num_ranks: int) -> None:
    for straight, *others in CASES(case, num_ranks):
        assert [largest_difference(other, straight) for other in others] == [0.0] * len(others)


def test_another_cut_starts_with_a_synchronous_epoch_and_says_so() -> None:
    for rank, (changed, unchanged) in enumerate(CASES(other_cut, 2)):
        assert len(changed) == (rank == 0)
        assert not unchanged


class Killed(Callback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            os.kill(os.getpid(), signal.SIGKILL)


SYNC: dict[str, Any] = {"bits": 1}
ASYNC: dict[str, Any] = {"bits": 1, "mode": "async"}
BOUNDED: dict[str, Any] = {**ASYNC, "bound": 3}


def until_killed(folder: str, num_ranks: int, epoch: int, how: dict[str, Any]) -> None:
    kept = keeping(Path(folder) / "kept")
    fit(Setting(num_ranks, Path(folder)), EPOCHS, kept, Killed(epoch), **how)


def straight_and_resumed(folder: str, num_ranks: int, epoch: int, how: dict[str, Any]) -> Any:
    setting, path = Setting(num_ranks, Path(folder)), f"{folder}/kept/epoch={epoch - 1}.ckpt"
    return fit(setting, EPOCHS, seed=7, path=path, **how)[1], fit(setting, EPOCHS, **how)[1]


@pytest.mark.parametrize(
    ("num_ranks", "epoch", "how"),
    [(2, 1, ASYNC), (2, 2, SYNC), (2, 3, BOUNDED), (4, 2, BOUNDED), (4, 4, ASYNC), (4, 5, SYNC)],
)
def test_processes_that_were_killed_go_on_in_new_ones(
    tmp_path: Path, num_ranks: int, epoch: int, how: dict[str, Any]
) -> None:
    where = str(tmp_path), num_ranks, epoch, how
    outcomes = rank_outcomes(until_killed, num_ranks, *where)
    assert all("killed by SIGKILL" in str(outcome.error) for outcome in outcomes)
    for resumed, straight in run_ranks(straight_and_resumed, num_ranks, *where):
        assert largest_difference(resumed, straight) == 0.0


def on_three_ranks(folder: str) -> list[str]:
    return elsewhere(Setting(3, Path(folder)), f"{folder}/two.ckpt")


def on_two_ranks(folder: str) -> None:
    fit(Setting(2, Path(folder)), 2, **BOUNDED)[0].save_checkpoint(f"{folder}/two.ckpt")


def test_another_number_of_ranks_starts_with_a_synchronous_epoch(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, str(tmp_path))
    said = run_ranks(on_three_ranks, 3, str(tmp_path))
    assert ["The checkpoint is of 2 ranks, this run has 3" in str(text) for text in said] == [
        True,
        False,
        False,
    ]
