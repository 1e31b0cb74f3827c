"""What an unmodified module logs is the value over the whole graph, the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch_geometric.data import Data
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from trainers import NUM_CLASSES, OnRanks, Setting, UserModule, alone, loader, small_graph


class Logging(UserModule):
    """Logs in every way that Lightning has; nothing says `sync_dist`."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.auroc = MulticlassAUROC(NUM_CLASSES)
        self.seen: list[Tensor] = []

    def training_step(self, data: Data, _: int) -> Any:
        loss = self.loss(data, data.train_mask)
        self.last = loss.detach()
        self.log("loss", loss, True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("num_train", data.train_mask.sum().double(), reduce_fx="sum")
        self.log("num_nodes", float(data.num_nodes), reduce_fx=torch.sum)
        return loss

    def validation_step(self, data: Data, _: int) -> None:
        out = self.gnn(data.x, data.edge_index)
        losses = F.cross_entropy(out, data.y, reduction="none")
        right, mask = (out.argmax(-1) == data.y).double(), data.val_mask
        self.log_dict({"val_loss": losses[mask].mean(), "val_acc": right[mask].mean()})
        self.log("mean", losses[mask].mean())
        self.log("train/acc", right[data.train_mask].mean())
        self.log("loss_of_test", losses[data.test_mask].mean())
        self.log("constant", 0.25)
        self.log("num_right", right[mask].sum(), reduce_fx="sum")
        self.log("worst", (losses * mask).max(), reduce_fx="max")
        self.log("best", (losses + 100.0 * ~mask).min(), reduce_fx=torch.min)
        if mask.any():
            self.log("val_where_any", losses[mask].mean(), prog_bar=True)
        self.accuracy(out[mask], data.y[mask])
        self.log("accuracy", self.accuracy)
        self.auroc.update(out[mask], data.y[mask])
        self.log("auroc", self.auroc)
        self.seen.append(losses[mask].mean())

    def on_validation_epoch_end(self) -> None:
        self.log("at_end", torch.stack(self.seen).mean())
        self.seen.clear()

    def on_train_epoch_end(self) -> None:
        self.log("train_at_end", self.last)
        self.log("mean_at_end", self.last)


class Watcher(L.Callback):
    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.log("of_a_callback", module.seen[-1])
        self.log_dict({"of_a_callback_too": module.seen[-1]})


def all_ways(setting: Setting) -> dict[str, float]:
    graph = small_graph()
    parts = torch.arange(graph.num_nodes) % max(1, setting.num_ranks)
    parts[graph.val_mask & (parts == 0)] = max(0, setting.num_ranks - 1)
    trainer = setting.trainer(callbacks=[Watcher()], strategy={"partition": parts}, max_epochs=4)
    trainer.fit(Logging(), loader(), loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class NoLabels(UserModule):
    def validation_step(self, data: Data, _: int) -> None:
        loss = self.loss(data, data.val_mask)
        self.log("val_loss", loss)
        self.log("val_constant", 2.0)


def no_validation_nodes_at_all(setting: Setting) -> dict[str, float]:
    graph = small_graph()
    graph.val_mask = torch.zeros_like(graph.val_mask)
    trainer = setting.trainer(max_epochs=1)
    trainer.fit(NoLabels(), loader(graph), loader(graph))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def event_files(setting: Setting) -> list[tuple[str, int, float]]:
    """What TensorBoard would show: tag, step, value."""
    logger = TensorBoardLogger(setting.folder, name="run", version="one")
    trainer = setting.trainer(logger=logger, max_epochs=4)
    trainer.fit(UserModule(), loader(), loader())
    trainer.strategy.barrier()
    events = EventAccumulator(str(setting.folder / "run" / "one"))
    events.Reload()
    files = list((setting.folder / "run" / "one").glob("events*"))
    assert len(files) == 1
    tags = [tag for tag in events.Tags()["scalars"] if tag != "epoch"]
    return [(tag, e.step, e.value) for tag in tags for e in events.Scalars(tag)]


def csv_log(setting: Setting) -> str:
    """`log_dir` is a broadcast, asked on all ranks; one rank writes."""
    logger = CSVLogger(setting.folder, name="csv")
    trainer = setting.trainer(logger=logger, max_epochs=2)
    trainer.fit(UserModule(), loader(), loader())
    assert trainer.log_dir is not None
    trainer.strategy.barrier()
    return (setting.folder / "csv" / "version_0" / "metrics.csv").read_text()


def decisions(setting: Setting) -> tuple[int, str, float]:
    """Where EarlyStopping stopped, and what ModelCheckpoint holds for the best."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.02)
    best = ModelCheckpoint(
        setting.folder / "best", monitor="val_acc", mode="max", save_top_k=1, filename="{epoch}"
    )
    trainer = setting.trainer(
        callbacks=[stop, best], max_epochs=40, enable_checkpointing=True, num_sanity_val_steps=1
    )
    trainer.fit(UserModule(lr=0.1), loader(), loader())
    assert best.best_model_score is not None
    return trainer.current_epoch, best.best_model_path[-12:], round(float(best.best_model_score), 9)


class LossOnSome(UserModule):
    def training_step(self, data: Data, _: int) -> Any:
        loss = super().training_step(data, _)
        return loss if self.trainer.global_rank == 0 else None


def loss_on_some_ranks(setting: Setting) -> None:
    setting.trainer().fit(LossOnSome(), loader(), loader())


on_ranks = OnRanks(
    all_ways,
    no_validation_nodes_at_all,
    event_files,
    csv_log,
    decisions,
    loss_on_some_ranks,
)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_way_of_logging_tells_the_value_of_the_whole_graph(num_ranks: int) -> None:
    expected = alone(all_ways)
    for found in on_ranks(all_ways, num_ranks):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_mean_over_no_node_of_the_graph_stays_no_number() -> None:
    for found in on_ranks(no_validation_nodes_at_all, 2):
        assert found["val_loss"] != found["val_loss"]
        assert found["val_constant"] == 2.0


def test_event_files_hold_every_value_once() -> None:
    expected = alone(event_files)
    for found in on_ranks(event_files, 2):
        assert [event[:2] for event in found] == [event[:2] for event in expected]
        values = [event[2] for event in found]
        assert values == pytest.approx([event[2] for event in expected], rel=1e-6)


def test_csv_log_is_written_by_one_rank() -> None:
    first, second = on_ranks(csv_log, 2)
    assert first == second
    assert _numbers(first) == pytest.approx(_numbers(alone(csv_log)), rel=1e-6)


def _numbers(text: str) -> Sequence[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_early_stopping_and_the_best_checkpoint_are_decided_alike(num_ranks: int) -> None:
    expected = alone(decisions)
    assert 2 < expected[0] < 40
    assert on_ranks(decisions, num_ranks) == [expected] * num_ranks


def test_a_loss_on_some_ranks_only_is_an_error() -> None:
    for text in on_ranks.raised(loss_on_some_ranks, 2):
        assert "returned a loss on 1 of 2 ranks: return one on every rank" in text
