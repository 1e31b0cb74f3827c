"""What `HaloTraffic` costs an epoch: blocks of epochs with it and without it, in one run.

    python examples/benchmarks/overhead/traffic.py

Two ranks, 1 bit, every value to TensorBoard. Blocks of epochs that are all measured and of epochs
that are not take turns, so that whatever else the machine does meets both; their difference is the
cost of a measured epoch, of which the default takes one in so many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
from graphs import community_graph  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from torch_geometric.nn import GraphSAGE  # noqa: E402

from lightning_sylvie import (  # noqa: E402
    GraphDataModule,
    HaloTraffic,
    SylvieModule,
    SylvieStrategy,
)

BLOCK = 10  # epochs between two readings of the clocks
NEVER = 10**9
TARGET = 0.01  # of an epoch


class Turns(L.Callback):
    """Turns `traffic` off and on, block by block, and reads the clocks of CPU and wall."""

    def __init__(self, traffic: HaloTraffic) -> None:
        self.traffic = traffic
        self.readings: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        block, epoch = divmod(trainer.current_epoch, BLOCK)
        if epoch == 0:
            self.traffic.every_n_epochs = 1 if block % 2 else NEVER
            self.readings.append((time.process_time(), time.perf_counter()))


def measure(options: argparse.Namespace, mode: Any) -> dict[str, Any]:
    """ms per epoch on rank 0, block by block: CPU and wall, not measured and measured.

    And of how many epochs the default would measure one.
    """
    traffic = HaloTraffic()
    turns = Turns(traffic)
    graph = community_graph(num_nodes=options.nodes, num_features=64, degree=options.degree)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=SylvieStrategy(bits=1, mode=mode),
            max_epochs=BLOCK * 2 * (options.pairs + 1) + 1,
            limit_val_batches=0,
            callbacks=[turns, traffic],
            logger=TensorBoardLogger(folder),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        gnn = GraphSAGE(64, options.hidden, 3, 8)
        trainer.fit(SylvieModule(gnn), GraphDataModule(graph))
    found: dict[str, Any] = {"interval": traffic.interval}
    for number, (start, end) in enumerate(pairwise(turns.readings[2:])):
        for clock in (0, 1):
            name = f"{('cpu', 'wall')[clock]} {('off', 'on')[number % 2]}"
            found.setdefault(name, []).append(1000 * (end[clock] - start[clock]) / BLOCK)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8000)
    parser.add_argument("--degree", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20, help="blocks with it, and as many without")
    parser.add_argument("--results", type=Path, default=HERE / "traffic.json")
    options = parser.parse_args()
    modes = ("sync", "async")
    found = {mode: measure(options, mode) for mode in modes}
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    settings = {name: vars(options)[name] for name in ("nodes", "degree", "hidden")}
    options.results.write_text(json.dumps({"settings": settings, **found}, indent=2) + "\n")
    for mode, times in found.items():
        for clock in ("cpu", "wall"):
            off, on = times[f"{clock} off"], times[f"{clock} on"]
            cost = statistics.median(b - a for a, b in zip(off, on, strict=False))
            epoch, interval = statistics.median(off), times["interval"]
            share = cost / interval / epoch
            verdict = "met" if share < TARGET else "MISSED"
            print(
                f"{mode}, {clock}: a measured epoch costs {cost:.2f} ms more than its {epoch:.1f}; "
                f"one in {interval} is measured: {share:.2%}, below {TARGET:.0%} wanted: {verdict}"
            )


if __name__ == "__main__":
    main()
