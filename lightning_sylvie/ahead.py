"""What can be done before training: cut the graph into a folder, and tell what a run will cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from tqdm import tqdm

from lightning_sylvie.attach import wants_out_edges
from lightning_sylvie.batch import graph_of, whole_graph
from lightning_sylvie.describe import Description, describe
from lightning_sylvie.partition import check_assignment
from lightning_sylvie.placement import build, entry_of, partition_for, training_nodes
from lightning_sylvie.shard import Shard
from lightning_sylvie.store import ShardStore
from lightning_sylvie.strategy import SylvieStrategy
from lightning_sylvie.widths import exchange_widths


def describe_run(
    trainer: Trainer, module: LightningModule, datamodule: LightningDataModule
) -> Description:
    """The parts, traffic and memory of ``trainer.fit(module, datamodule)``, which is not started.

    The parts are those of training, and stay in the cache folder for it.

    Args:
        trainer: With `SylvieStrategy`; as many parts as it has devices on all machines.
        module: What would be trained.
        datamodule: Its graph.

    Raises:
        ValueError: For another strategy.
    """
    strategy, num_parts, loader = _plan(trainer, datamodule)
    store, key = entry_of(loader, strategy.cache_dir)
    if key is None:
        reverse = wants_out_edges(module.modules())
        key = build(store, loader, strategy.partition, num_parts, reverse=reverse)
    shards = (store.read(key, rank) for rank in range(num_parts))
    sizes = describe(shards)
    largest = max(sizes.parts, key=lambda part: part.nodes).part
    forward, backward = exchange_widths(
        module,
        store.read(key, largest),
        exchange=strategy.exchange,
        keep_features=strategy.keep_features,
    )
    return Description(sizes.parts, sizes.num_nodes, tuple(forward), tuple(backward))


def partition_run(
    trainer: Trainer, module: LightningModule, datamodule: LightningDataModule, folder: Path
) -> None:
    """Cuts the graph of a run into `folder`, which `GraphDataModule` takes in place of the graph.

    Args:
        trainer: With `SylvieStrategy`; as many parts as it has devices on all machines.
        module: What will be trained: a model that reads out-edges needs them in its parts.
        datamodule: The graph.
        folder: Is made here; the parts of one cut.

    Raises:
        ValueError: For another strategy, a folder that is there, or an inductive run, which trains
            on one graph and is evaluated on another.
    """
    if folder.exists():
        raise ValueError(f"expected a folder to be made, got {folder}, which is there: remove it")
    strategy, num_parts, loader = _plan(trainer, datamodule)
    print("reading the graph", flush=True)
    graph = graph_of(whole_graph(loader))
    if graph.node_id is not None:
        raise ValueError(
            "expected one graph for training and evaluation, got inductive=True: let fit cut both"
        )
    partition = partition_for(graph, loader, strategy.partition)
    print(f"{graph.num_nodes} nodes, {graph.num_edges} edges: {partition.settings}", flush=True)
    parts = partition.assign(graph.edge_index, graph.num_nodes, num_parts, training_nodes(graph))
    ShardStore(folder.parent).build(
        folder.name,
        graph,
        check_assignment(parts, graph.num_nodes, num_parts),
        num_parts,
        reverse=wants_out_edges(module.modules()),
        progress=partial(_bar, total=num_parts),
    )
    print(f"{num_parts} parts in {folder}")


def _plan(trainer: Trainer, datamodule: LightningDataModule) -> tuple[SylvieStrategy, int, Any]:
    """The strategy, the number of parts, and the loader of the training graph."""
    strategy = trainer.strategy
    if not isinstance(strategy, SylvieStrategy):
        raise ValueError(f"expected SylvieStrategy, got {type(strategy).__name__}")
    datamodule.prepare_data()
    datamodule.setup("fit")
    return strategy, trainer.num_devices * trainer.num_nodes, datamodule.train_dataloader()


def _bar(shards: Iterator[Shard], total: int) -> Iterable[Shard]:
    bar: Iterable[Shard] = tqdm(shards, desc="writing parts", unit="part", total=total)
    return bar
