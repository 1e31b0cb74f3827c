"""Logs what the halo exchanges cost to Weights & Biases and to a table, side by side.

python examples/weights_and_biases.py                   no account: the run stays in ./wandb
python examples/weights_and_biases.py --online
"""

from __future__ import annotations

import argparse

import quiet  # noqa: F401

# isort: split

import lightning as L
from epoch_bar import EpochBar
from graphs import community_graph
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import (
    BoundedStaleness,
    GraphDataModule,
    HaloTraffic,
    SylvieModule,
    SylvieStrategy,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--online", action="store_true", help="send the run to your account")
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    graph = community_graph()
    loggers = [
        WandbLogger(project="lightning_sylvie", offline=not options.online),
        CSVLogger("traffic", name="", version=""),
    ]
    trainer = L.Trainer(
        strategy=SylvieStrategy(bits=1, mode="async"),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        log_every_n_steps=10,
        callbacks=[HaloTraffic(1), BoundedStaleness(eps_s=10), EpochBar("1 bit, async")],
        logger=loggers,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    gnn = GraphSAGE(graph.num_features, 64, num_layers=3, out_channels=8, dropout=0.2)
    trainer.fit(SylvieModule(gnn, lr=0.01), GraphDataModule(graph))
    if trainer.is_global_zero:
        print("the last epoch:", trainer.progress_bar_metrics["halo"])


if __name__ == "__main__":
    main()
