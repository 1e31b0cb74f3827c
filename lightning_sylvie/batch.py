"""Between PyG's `Data` and the graph engine: the whole graph in, one rank's batch out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import BaseData

from lightning_sylvie.graph import Graph
from lightning_sylvie.shard import Shard


class ShardData(Data):  # type: ignore[misc]
    """One rank's nodes and their in-edges, as the `Data` that a model's step receives.

    Every node tensor holds the owned rows only; ``edge_index[0]`` also names halo rows, which the
    layers fetch. ``n_id`` holds the owned nodes' numbers in the whole graph.
    """

    @property
    def shard(self) -> Shard:
        shard: Shard = self.__dict__["_shard"]
        return shard

    def to(self, device: Any, *args: Any, **kwargs: Any) -> ShardData:
        """Itself where it is there already, which Lightning asks for at every step."""
        if torch.device(device) == self.shard.edge_index.device:
            return self
        return super().to(device, *args, **kwargs)  # type: ignore[no-any-return]

    @classmethod
    def of(cls, shard: Shard) -> ShardData:
        data = cls(edge_index=shard.edge_index, n_id=shard.node_id)
        for name, value in {**shard.rest, **shard.edge, **shard.node}.items():
            data[name] = value
        data.num_nodes = shard.plan.num_owned
        data.__dict__["_shard"] = shard
        return data


class OneBatch:
    """A loader of exactly one batch that is always there: no workers, and tensors stay in place.

    Not a `DataLoader`, so no sampler is put around it. Each epoch gets a `Data` of its own around
    the same tensors: what a step or a hook stores in it is gone in the next epoch.
    """

    def __init__(self, batch: ShardData) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[ShardData]:
        yield copy.copy(self.batch)


def graph_of(data: Data) -> Graph:
    """The plain tensors of a `Data`; ``n_id`` holds its nodes' numbers in a larger graph.

    Raises:
        ValueError: If it has no `edge_index`, or holds what can't be cut.
    """
    if not isinstance(data, Data):
        raise ValueError(
            f"expected one homogeneous torch_geometric Data, got {type(data).__name__}: "
            "heterogeneous graphs are not cut; use Data.to_homogeneous() with edge types"
        )
    if data.get("edge_index") is None:
        raise ValueError(
            f"expected data.edge_index, got the fields {sorted(data.keys())}: keep edge_index "
            "beside adj_t; layers use the sparse product by themselves"
        )
    fields: dict[str, Any] = {"node": {}, "edge": {}, "rest": {}}
    for name, value in data.to_dict().items():
        if name in ("edge_index", "num_nodes", "adj_t", "n_id") or value is None:
            continue
        kind = "node" if data.is_node_attr(name) else "edge" if data.is_edge_attr(name) else "rest"
        fields[kind if isinstance(value, Tensor) else "rest"][name] = value
    number = data.get("n_id")
    if number is not None and not bool((number.diff() > 0).all()):
        number = None  # a sampler's, not a subgraph's
    return Graph(int(data.num_nodes or 0), data.edge_index, **fields, node_id=number)


def whole_graph(loader: Iterable[Any]) -> Data:
    """The one graph that a full-batch loader yields.

    Raises:
        ValueError: If the loader yields several batches, or something else than one graph.
    """
    batches = iter(loader)
    first = next(batches, None)
    if next(batches, None) is not None:
        raise ValueError(
            "expected a loader of one batch, the whole graph, got several batches: full-graph "
            "training needs DataLoader([data], batch_size=1); neighbour sampling is another method"
        )
    if isinstance(first, (list, tuple)) and len(first) == 1:
        first = first[0]
    if isinstance(first, Batch):
        if first.num_graphs != 1:
            raise ValueError(f"expected one graph in the batch, got {first.num_graphs}")
        first = first.get_example(0)
    if not isinstance(first, BaseData):
        raise ValueError(
            f"expected the loader to yield one torch_geometric Data, got {type(first).__name__}"
        )
    return first


def shard_in(batch: Any) -> Shard:
    """The shard of the first `ShardData` in a batch, which may be nested.

    Raises:
        RuntimeError: If there is none.
    """
    shard = _find_shard(batch)
    if shard is None:
        raise RuntimeError(
            "expected a batch with this rank's part, got none: a hook of the module or the data "
            "module replaced the batch; change its fields instead"
        )
    return shard


def _find_shard(batch: Any) -> Shard | None:
    if isinstance(batch, ShardData):
        return batch.shard
    parts = batch.values() if isinstance(batch, dict) else batch
    if isinstance(parts, (list, tuple)) or isinstance(batch, dict):
        return next((found for part in parts if (found := _find_shard(part)) is not None), None)
    return None


def map_tensors(shard: Shard, change: Callable[[Tensor], Tensor]) -> Shard:
    """The shard with `change` (a move or a cast) applied to its tensors, and its plan moved."""
    edge_index = change(shard.edge_index)
    return replace(
        shard,
        plan=shard.plan.to(edge_index.device),
        edge_index=edge_index,
        node={name: change(value) for name, value in shard.node.items()},
        edge={name: change(value) for name, value in shard.edge.items()},
        rest={k: change(v) if isinstance(v, Tensor) else v for k, v in shard.rest.items()},
        node_id=change(shard.node_id),
        halo_id=change(shard.halo_id),
        edge_id=change(shard.edge_id),
        reverse=None if shard.reverse is None else map_tensors(shard.reverse, change),
    )
