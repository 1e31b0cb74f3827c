"""A rank that raises or dies ends the others within seconds, with an error that names it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from ranks import Outcome, rank_outcomes
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from trainers import NUM_CLASSES, NUM_FEATURES, Launched, UserModule, loader, small_graph

from lightning_sylvie import SylvieStrategy
from lightning_sylvie.partition import Partitioner

CULPRIT = 1
SECONDS = 30.0  # far below the strategy's timeout of half an hour; a loaded machine is slow


def train(module: L.LightningModule, folder: str, **options: Any) -> None:
    given = {name: options.pop(name) for name in ("partition", "mode", "bits") if name in options}
    strategy = SylvieStrategy(
        cluster_environment=Launched(),
        cache_dir=f"{folder}/parts",
        **{"partition": "random", "bits": 32, **given},
    )
    defaults = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size(),
        "strategy": strategy,
        "max_epochs": 50,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    data = loader(small_graph(torch.float32))
    L.Trainer(**{**defaults, **options}).fit(module, data, data)


def fail(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("the third epoch is cursed")
    os.kill(os.getpid(), signal.SIGKILL)


class FailsInStep(UserModule):
    """The others wait in a halo exchange of the same epoch."""

    how = "raise"

    def training_step(self, data: Data, _: int) -> Any:
        if self.trainer.global_rank == CULPRIT and self.trainer.current_epoch == 2:
            fail(self.how)
        return super().training_step(data, _)


class DiesInStep(FailsInStep):
    how = "die"


class FailsInHook(UserModule):
    """The others wait in Lightning's own broadcast after the batch."""

    how = "raise"

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == CULPRIT and self.trainer.current_epoch == 2:
            time.sleep(0.5)  # until the others are there
            fail(self.how)


class DiesInHook(FailsInHook):
    how = "die"


class FailsInLoss(UserModule):
    """An error inside backward."""

    def training_step(self, data: Data, _: int) -> Any:
        loss = super().training_step(data, _)
        if self.trainer.global_rank == CULPRIT and self.trainer.current_epoch == 2:
            loss = _Broken.apply(loss)
        return loss


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        fail("raise")
        return grad


MODULES = [FailsInStep, DiesInStep, FailsInHook, DiesInHook, FailsInLoss]


def fit(module: type[L.LightningModule], folder: str, mode: str = "sync") -> None:
    train(module(), folder, mode=mode)


def others_name_the_culprit(outcomes: list[Outcome], culprit: int, reason: str) -> None:
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.seconds < SECONDS
        if outcome.rank != culprit:
            last = outcome.error.rpartition("PeerError: ")[2] or outcome.error
            assert f"rank {culprit}" in outcome.error, outcome.error
            assert reason in outcome.error, (outcome.rank, last, outcome.error)


@pytest.mark.parametrize(("num_ranks", "mode"), [(2, "sync"), (4, "sync"), (4, "async")])
@pytest.mark.parametrize("module", MODULES)
def test_a_failing_rank_is_named_on_all_others(
    module: Any, num_ranks: int, mode: str, tmp_path: Any
) -> None:
    outcomes = rank_outcomes(fit, num_ranks, module, str(tmp_path), mode, timeout=60.0)
    dies = module in (DiesInStep, DiesInHook)
    reason = "ended or lost its connection" if dies else "ArithmeticError: the third epoch"
    others_name_the_culprit(outcomes, CULPRIT, reason)
    expected = "killed by SIGKILL" if dies else "ArithmeticError"
    assert expected in str(outcomes[CULPRIT].error)


class SendsNotANumber(UserModule):
    """Found by the thread that codes rows beside the computation."""

    def training_step(self, data: Data, _: int) -> Any:
        rank, epoch = self.trainer.global_rank, self.trainer.current_epoch
        self.gnn.convs[0].lin_r.register_forward_hook(
            lambda layer, args, out: out * float("nan") if rank and epoch == 2 else out
        )
        return super().training_step(data, _)


def fit_not_a_number(folder: str) -> None:
    train(SendsNotANumber(wide_gnn()), folder, mode="async", bits=1)


def wide_gnn() -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(NUM_FEATURES, 32, num_layers=3, out_channels=NUM_CLASSES)


def test_a_row_that_is_not_finite_is_told_from_beside_the_computation(tmp_path: Any) -> None:
    outcomes = rank_outcomes(fit_not_a_number, 2, str(tmp_path), timeout=60.0)
    others_name_the_culprit(outcomes, CULPRIT, "convs.1 (SAGEConv): the row of node")
    assert "that rank 1 sends holds NaN or Inf" in str(outcomes[CULPRIT].error)


class Crashes(Partitioner):
    """METIS, or the code of a user, that fails while rank 0 cuts the graph."""

    @property
    def settings(self) -> str:
        return "crashes"

    def assign(self, *args: Any, **options: Any) -> Tensor:
        raise MemoryError("too large to be cut")


def cut_with_a_crash(folder: str) -> None:
    train(UserModule(), folder, partition=Crashes())


def fit_bad_data(folder: str) -> None:
    strategy = SylvieStrategy(bits=32, cluster_environment=Launched(), cache_dir=folder)
    graph = small_graph()
    graph.edge_index[0, 3] = 1000
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(UserModule(), loader(graph), loader(graph))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (cut_with_a_crash, "rank 0 failed: MemoryError: too large to be cut"),
        (fit_bad_data, "rank 0 failed: ValueError: expected node numbers 0..119 in edge_index"),
    ],
)
def test_a_failure_while_the_graph_is_cut_is_told_to_all(
    body: Any, reason: str, tmp_path: Any
) -> None:
    outcomes = rank_outcomes(body, 2, str(tmp_path), timeout=60.0)
    others_name_the_culprit(outcomes, 0, reason)


def fit_with_a_last_checkpoint(module: Any, mode: str, folder: str) -> None:
    warnings.simplefilter("ignore")  # Lightning's, of what it restores; they would raise on rank 0
    callbacks = [OnExceptionCheckpoint(folder)]
    train(module(), folder, mode=mode, callbacks=callbacks, enable_checkpointing=True)


@pytest.mark.parametrize(
    ("module", "mode"), [(FailsInStep, "sync"), (FailsInStep, "async"), (FailsInHook, "async")]
)
def test_a_callback_that_waits_for_all_on_an_error_does_not_hang(
    module: Any, mode: str, tmp_path: Any
) -> None:
    """OnExceptionCheckpoint meets the others in a barrier, which they never reach."""
    outcomes = rank_outcomes(
        fit_with_a_last_checkpoint, 2, module, mode, str(tmp_path), timeout=60.0
    )
    others_name_the_culprit(outcomes, CULPRIT, "ArithmeticError: the third epoch")


class FailsInValidation(UserModule):
    def validation_step(self, data: Data, _: int) -> None:
        super().validation_step(data, _)
        if self.trainer.global_rank == 0 and self.trainer.current_epoch == 2:
            raise KeyError("of rank 0")


def test_rank_0_which_serves_the_store_is_named_too(tmp_path: Any) -> None:
    outcomes = rank_outcomes(fit, 2, FailsInValidation, str(tmp_path), timeout=60.0)
    others_name_the_culprit(outcomes, 0, "rank 0 failed: KeyError: 'of rank 0'")
