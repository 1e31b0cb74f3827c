"""Trains GraphSAGE on one process, then on two that exchange halo rows, and compares.

    python examples/demo.py                       a community graph made here
    python examples/demo.py --dataset Computers   a dataset of PyG or OGB, or a saved Data
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import lightning as L
from graphs import community_graph, named_graph
from lightning.pytorch.loggers import TensorBoardLogger
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy


def train(data: GraphDataModule, width: int, num_classes: int, args: argparse.Namespace, **kwargs):
    """Test accuracy of a new model after training it with the given Trainer options."""
    L.seed_everything(args.seed, verbose=False)
    model = GraphSAGE(width, args.hidden, num_layers=3, out_channels=num_classes, dropout=0.5)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        check_val_every_n_epoch=10,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        **kwargs,
    )
    module = SylvieModule(model, lr=0.01)
    trainer.fit(module, data)
    (result,) = trainer.test(module, data, verbose=False)
    return result["test_acc"], trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    graph = named_graph(args.dataset) if args.dataset else community_graph()
    data = GraphDataModule(graph)
    shape = graph.num_features, int(graph.y.max()) + 1, args

    launched = "LOCAL_RANK" in os.environ  # the strategy runs this script again for each device
    alone = None if launched else train(data, *shape, devices=1, logger=False, enable_checkpointing=False)[0]
    logger = TensorBoardLogger("lightning_logs", name="demo")
    strategy = SylvieStrategy(bits=32, mode="sync")
    parts, trainer = train(data, *shape, devices=args.devices, strategy=strategy, logger=logger)

    if trainer.is_global_zero:
        print(f"graph: {graph.num_nodes} nodes, {graph.num_edges} edges")
        print(f"test accuracy, one process:   {alone:.4f}")
        print(f"test accuracy, {args.devices} processes:   {parts:.4f}")
        print(f"log: tensorboard --logdir {logger.log_dir}")


if __name__ == "__main__":
    main()
