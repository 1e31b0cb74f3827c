"""Inductive training: the model meets validation and test nodes only when it is evaluated.

python examples/inductive.py
"""

from __future__ import annotations

import argparse

import quiet  # noqa: F401

# isort: split

import lightning as L
from epoch_bar import EpochBar
from graphs import community_graph
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=50)
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    graph = community_graph()
    trainer = L.Trainer(
        strategy=SylvieStrategy(bits=32, mode="sync"),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        callbacks=[EpochBar("inductive")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = SylvieModule(GraphSAGE(graph.num_features, 64, 2, 8, dropout=0.5), lr=0.01)
    # Two graphs, each cut on its own: the training nodes and the edges among them, and the whole.
    data = GraphDataModule(graph, inductive=True)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy on the whole graph: {100 * result['test_acc']:.2f} %")


if __name__ == "__main__":
    main()
