"""Trains GraphSAGE in one process, then in two that exchange halo rows, and compares.

    python examples/demo.py                       a community graph made here
    python examples/demo.py --dataset Computers   a dataset of PyG or OGB by name
    python examples/demo.py --dataset graph.pt    a Data that you saved

Every process computes on one thread, unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import os

import quiet  # noqa: F401

# isort: split

import lightning as L
from epoch_bar import EpochBar
from graphs import community_graph, named_graph
from lightning.pytorch.loggers import TensorBoardLogger
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


def train(graph: Data, name: str, options: argparse.Namespace, **kwargs) -> tuple[float, float]:
    """Trains a new model; `kwargs` go to the Trainer.

    Returns:
        Test accuracy (micro-F1 if a node has several labels), and seconds per epoch.
    """
    L.seed_everything(options.seed, verbose=False)
    several = graph.y.dim() == 2 and graph.y.shape[1] > 1
    num_classes = graph.y.shape[1] if several else int(graph.y.max()) + 1
    model = GraphSAGE(graph.num_features, options.hidden, 3, num_classes, dropout=0.5)
    bar = EpochBar(name)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[bar],
        **kwargs,
    )
    module, data = SylvieModule(model, lr=0.01), GraphDataModule(graph)
    trainer.fit(module, data)
    (result,) = trainer.test(module, data, verbose=False)
    return result["test_f1" if several else "test_acc"], bar.seconds / options.epochs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One process against several that share a graph.")
    parser.add_argument("--dataset", default="", help="name of a dataset, or a saved Data")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    graph = named_graph(options.dataset) if options.dataset else community_graph()

    launched = "LOCAL_RANK" in os.environ  # the strategy runs this script once more per device
    rows = {}
    if not launched:
        print(f"{graph.num_nodes} nodes, {graph.num_edges} edges, {graph.num_features} features")
        quiet = {"logger": False, "enable_checkpointing": False}
        rows["one process"] = train(graph, "one process", options, devices=1, **quiet)

    name = f"{options.devices} processes"
    logger = TensorBoardLogger("lightning_logs", name="demo")
    strategy = SylvieStrategy(bits=32, mode="sync")
    rows[name] = train(
        graph, name, options, devices=options.devices, strategy=strategy, logger=logger
    )

    if not launched:
        print(f"\n{'':<14}{'test accuracy':>14}{'seconds per epoch':>20}")
        for name, (accuracy, seconds) in rows.items():
            print(f"{name:<14}{100 * accuracy:>12.2f} %{seconds:>20.3f}")
        print(f"\ncurves: tensorboard --logdir {logger.root_dir}")


if __name__ == "__main__":
    main()
