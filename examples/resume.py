"""Stops a run half way, goes on from its checkpoint, and compares with a run that never stopped.

python examples/resume.py
"""

from __future__ import annotations

import argparse

import quiet  # noqa: F401

# isort: split

import lightning as L
from graphs import community_graph
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


def train(epochs: int, devices: int, folder: str, ckpt_path: str | None = None) -> float:
    """The sum of all weights after `epochs`; the checkpoint lies in `folder` as last.ckpt."""
    L.seed_everything(0, verbose=False)
    graph = community_graph(2000)
    model = SylvieModule(GraphSAGE(graph.num_features, 32, 2, 8, dropout=0.5), lr=0.01)
    trainer = L.Trainer(
        strategy=SylvieStrategy(bits=1, mode="async"),
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_epochs=epochs)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, GraphDataModule(graph), ckpt_path=ckpt_path)
    return sum(float(weight.double().abs().sum()) for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    whole = train(options.epochs, options.devices, "checkpoints/whole")
    train(options.epochs // 2, options.devices, "checkpoints/half")
    resumed = train(
        options.epochs, options.devices, "checkpoints/resumed", "checkpoints/half/last.ckpt"
    )
    rank_zero_only(print)(
        f"never stopped {whole!r}, resumed {resumed!r}: {'equal' if whole == resumed else 'NOT'}"
    )


if __name__ == "__main__":
    main()
