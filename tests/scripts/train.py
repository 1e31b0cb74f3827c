"""A user's script: fit, test, predict and a second fit. Every rank prints one line of JSON.

python train.py --devices 2 [--strategy sylvie] [--fail]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

sys.path.insert(0, str(Path(__file__).parents[1]))
from trainers import UserModule, loader, small_gnn, small_graph

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


class Fails(UserModule):
    def training_step(self, data: Any, _: int) -> Any:
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 2:
            raise ArithmeticError("the third epoch is cursed")
        return super().training_step(data, _)


def train(name: str, args: argparse.Namespace) -> None:
    own = SylvieStrategy(bits=32, partition="random", cache_dir=args.folder)
    if name.startswith("sylvie"):
        StrategyRegistry[name]["init_params"]["bits"] = 32
    options = {
        "accelerator": "cpu",
        "devices": args.devices,
        "strategy": name or own,
        "precision": "64-true",
        "max_epochs": 10,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(**options)
    if args.fail:
        trainer.fit(Fails(), loader(), loader())
    data, module = GraphDataModule(small_graph()), SylvieModule(small_gnn())
    trainer.fit(module, data)
    found: dict[str, Any] = {"world": trainer.world_size, "rank": trainer.global_rank}
    found["weights"] = sum(float(p.double().abs().sum()) for p in module.parameters())
    if (
        name != "sylvie_spawn" or "TORCHELASTIC_RUN_ID" in os.environ
    ):  # whose ranks import everything at each call
        (found["test"],) = trainer.test(module, data, verbose=False)
    if not isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):  # whose ranks are gone
        (scores,) = trainer.predict(module, data)
        order = torch.arange(1, len(scores) + 1, dtype=torch.float64)
        found["scores"] = float((scores * order[:, None]).sum())
        trainer.fit_loop.max_epochs = 12
        trainer.fit(module, data)
        found["again"] = sum(float(p.double().abs().sum()) for p in module.parameters())
    os.write(1, f"RESULT {json.dumps(found)}\n".encode())  # at once: ranks share the pipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategies", default="")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.strategies.split(","):
        train(name, args)


if __name__ == "__main__":
    main()
