"""What Lightning and SylvieStrategy cost per epoch over a bare loop, when an epoch is one step.

    python examples/benchmarks/overhead/main.py

A tiny model on a tiny graph, one rank, so that nothing else takes time. Training metrics go to
TensorBoard every 10 steps, validation runs every 10 epochs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from graphs import community_graph  # noqa: E402
from lightning.pytorch.loggers import TensorBoardLogger  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_geometric.nn import GraphSAGE  # noqa: E402

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy  # noqa: E402

BLOCK = 50  # epochs between two readings of the clock: a multiple of the period of logs
TARGET = 1.2  # ms of CPU per epoch over the bare loop, where Lightning with everything off
TARGET_OFF = 0.56  # takes this much over it: the pair was measured on one machine
BARE, OFF = "bare loop", "Lightning, everything off"
SYLVIE = "SylvieStrategy with logs and validation"


class Linear(torch.nn.Module):
    """A model that costs next to nothing: what remains is the loop."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x)


class Plain(L.LightningModule):
    """A training step and nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, data: Any, _: int) -> Tensor:
        return step(self.model, data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def step(model: torch.nn.Module, data: Any) -> Tensor:
    """The loss of a plain training step."""
    scores = model(data.x, data.edge_index)
    return F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])


class Clock(L.Callback):
    """CPU seconds of every block of epochs."""

    def __init__(self) -> None:
        self.readings: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch % BLOCK == 0:
            self.readings.append(time.process_time())


def bare(model: torch.nn.Module, epochs: int, graph: Any) -> list[float]:
    """The readings of a plain loop of training steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    (batch,) = GraphDataModule(graph).train_dataloader()
    readings = []
    for epoch in range(epochs):
        if epoch % BLOCK == 0:
            readings.append(time.process_time())
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()
    return readings


def lightning(
    module: L.LightningModule, epochs: int, graph: Any, strategy: Any = "auto", **kwargs: Any
) -> list[float]:
    """The readings of the same steps under a Trainer, to which `kwargs` go."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "logger": TensorBoardLogger(folder),
            "log_every_n_steps": 10,
            "check_val_every_n_epoch": 10,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        }
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=epochs,
            callbacks=[clock],
            **settings,
        )
        trainer.fit(module, GraphDataModule(graph))
    return clock.readings


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """ms of CPU per epoch, block by block, of every variant on every model.

    Variants take turns, so that whatever else the machine does meets all of them.
    """
    graph = community_graph(num_nodes=200, num_classes=4, num_features=16)
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "linear": lambda: Linear(16, 4),
        "GraphSAGE": lambda: GraphSAGE(16, 16, 2, 4),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, make in models.items():
            readings = {
                BARE: bare(make(), options.epochs, graph),
                OFF: lightning(
                    Plain(make()), options.epochs, graph, logger=False, limit_val_batches=0
                ),
                "Lightning with logs and validation": lightning(
                    SylvieModule(make()), options.epochs, graph
                ),
                SYLVIE: lightning(
                    SylvieModule(make()), options.epochs, graph, SylvieStrategy(bits=32)
                ),
            }
            for variant, times in readings.items():
                blocks = [1000 * (end - start) / BLOCK for start, end in pairwise(times[1:])]
                found.setdefault(name, {}).setdefault(variant, []).extend(blocks)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| model | loop | ms of CPU per epoch | over the bare loop | against everything off |"]
    lines.append("|---|---|---|---|---|")
    for name, variants in found.items():
        for variant, blocks in variants.items():
            least, over = min(blocks), min(blocks) - min(variants[BARE])
            ratio = f"{over / (min(variants[OFF]) - min(variants[BARE])):.2f}"
            cells = [f"{least:.2f}", *(("", "") if variant == BARE else (f"+{over:.2f}", ratio))]
            lines.append(f"| {name} | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    found = measure(options)
    options.results.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    for name, variants in found.items():
        least = {variant: min(blocks) for variant, blocks in variants.items()}
        ratio = (least[SYLVIE] - least[BARE]) / (least[OFF] - least[BARE])
        allowed = TARGET / TARGET_OFF
        verdict = "met" if ratio <= allowed else "MISSED"
        print(f"{name}: {ratio:.2f} times everything off, at most {allowed:.2f} wanted: {verdict}")


if __name__ == "__main__":
    main()
