"""Attention layers on a graph whose nodes have several labels each.

python examples/multi_label.py
"""

from __future__ import annotations

import argparse

import quiet  # noqa: F401

# isort: split

import lightning as L
import torch
from epoch_bar import EpochBar
from graphs import community_graph
from torch_geometric.nn import GAT

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=50)
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    graph = community_graph()
    graph.y = ((graph.y[:, None] >> torch.arange(3)) & 1).float()  # three yes/no labels per node
    trainer = L.Trainer(
        strategy=SylvieStrategy(),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        callbacks=[EpochBar("multi-label")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    # Labels of shape (num_nodes, num_labels) mean binary cross-entropy and micro-F1.
    gnn = GAT(graph.num_features, 64, num_layers=2, out_channels=3, heads=2, v2=True, dropout=0.2)
    model, data = SylvieModule(gnn, lr=0.01), GraphDataModule(graph)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test micro-F1: {100 * result['test_f1']:.2f} %")


if __name__ == "__main__":
    main()
