"""Checkpoints: written once, read anywhere, continued with any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import run_ranks
from torch import Tensor
from trainers import Setting, UserModule, alone, assert_equal_runs, loader, small_gnn, weights

SCRIPT = Path(__file__).parent / "scripts" / "plain.py"


class Scheduled(UserModule):
    def __init__(self) -> None:
        super().__init__(small_gnn(norm="batch_norm"))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)]


def straight(setting: Setting, module: type[UserModule] = Scheduled) -> dict[str, Tensor]:
    """Twelve epochs."""
    made = module()
    setting.trainer(max_epochs=12).fit(made, loader(), loader())
    return weights(made)


def save(setting: Setting, folder: str, module: type[UserModule] = Scheduled) -> list[str]:
    """Six epochs, checkpointed; the names of the files."""
    keep = ModelCheckpoint(folder, every_n_epochs=3, save_top_k=-1, filename="{epoch}")
    trainer = setting.trainer(max_epochs=6, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(module(), loader(), loader())
    trainer.strategy.barrier()
    return sorted(path.name for path in Path(folder).iterdir() if path.suffix == ".ckpt")


def resume(setting: Setting, path: str) -> dict[str, Tensor]:
    """On from a checkpoint to epoch twelve; the model starts with other weights."""
    module = Scheduled().double()  # Lightning restores weights before it casts the module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    with warnings.catch_warnings():  # this trainer keeps no checkpoints of its own
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
        setting.trainer(max_epochs=12).fit(module, loader(), loader(), ckpt_path=path)
    return weights(module)


def first_half(folder: str) -> Any:
    setting = Setting(2, Path(folder))
    names = save(setting, f"{folder}/saved")
    plain = save(setting, f"{folder}/plain", UserModule)
    half = resume(setting, f"{folder}/saved/epoch=5.ckpt")
    return names, plain, straight(setting), half


def second_half(folder: str) -> dict[str, Tensor]:
    return resume(Setting(4, Path(folder)), f"{folder}/saved/epoch=5.ckpt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two ranks: its folder, and what each rank returned."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(first_half, 2, str(folder))


def test_each_file_is_written_once(run: Any) -> None:
    for names, plain, *_ in run[1]:
        assert names == plain == ["epoch=2.ckpt", "epoch=5.ckpt"]


def test_a_resumed_run_is_bit_equal_to_a_straight_one(run: Any) -> None:
    for _, _, whole, resumed in run[1]:
        assert_equal_runs([resumed], whole, 0.0)


@pytest.mark.parametrize("num_ranks", [0, 4])
def test_another_number_of_ranks_continues(run: Any, num_ranks: int) -> None:
    folder, values = run
    if num_ranks:
        found = run_ranks(second_half, num_ranks, str(folder))
    else:
        setting = Setting(0, folder)
        found = [alone(lambda _: resume(setting, f"{folder}/saved/epoch=5.ckpt"))]
    assert_equal_runs(found, values[0][2], 1e-7)  # biases before BatchNorm, see test_strategy


def test_the_plain_model_is_restored_without_this_package(run: Any) -> None:
    path = run[0] / "plain" / "epoch=5.ckpt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    state = torch.load(path, weights_only=True)["state_dict"]
    expected = sum(float(value.abs().sum()) for value in state.values())
    assert json.loads(done.stdout.partition("RESULT ")[2]) == pytest.approx(expected)
