"""Brings every rank its part of a graph, and every rank's rows back into one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_sylvie.batch import graph_of, map_tensors, whole_graph
from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Assignment, Partitioner
from lightning_sylvie.plan import check_plans
from lightning_sylvie.shard import Shard
from lightning_sylvie.store import ShardStore
from lightning_sylvie.transport import Transport


class Placement:
    """Part p on rank p, from a folder that rank 0 writes once.

    Args:
        transport: Tells the other ranks where the parts are, and carries a part to a host that
            does not share the folder.
        cache_dir: The folder; None: the user's cache folder.
    """

    def __init__(self, transport: Transport, cache_dir: str | Path | None) -> None:
        self._transport = transport
        self._cache_dir = cache_dir
        self._placed: dict[str, Shard] = {}

    def shard(
        self,
        loader: Any,
        partition: Partitioner,
        *,
        reverse: bool,
        change: Callable[[Tensor], Tensor],
    ) -> Shard:
        """This rank's part of the graph that `loader` yields.

        Args:
            loader: Yields one whole graph; only rank 0's is read.
            partition: Assigns nodes to parts.
            reverse: Hold out-edges too.
            change: Moves and casts each tensor once.

        Raises:
            ValueError: If the graph can't be cut, or the ranks hold different cuts.
        """
        store, key = entry_of(loader, self._cache_dir)
        if self._transport.rank == 0 and key is None:
            key = build(store, loader, partition, self._transport.num_ranks, reverse=reverse)
        key = str(self._transport.broadcast_object(key, 0))
        if key not in self._placed:
            shard = self._read(store, key, change(torch.empty(0)).device)
            self._agree(shard)
            self._placed[key] = map_tensors(shard, change)
        return self._placed[key]

    def gather(self, output: Any, shard: Shard) -> Any:
        """`output` with every tensor of rows of this part's nodes replaced by the whole graph's.

        A tensor has a row per owned node, or per owned node of one of the graph's masks, if its
        length says so on every rank. Rows stand in the order of the graph's nodes. Every rank gets
        them.

        Raises:
            ValueError: If the length fits several masks.
        """
        nodes = {"all nodes": shard.node_id}
        for name, mask in shard.node.items():
            if mask.dtype == torch.bool and mask.dim() == 1:
                nodes[name] = shard.node_id[mask]
        leaves, tree = tree_flatten(output)
        fits = [
            [n for n, ids in nodes.items() if isinstance(x, Tensor) and x.shape[:1] == ids.shape]
            for x in leaves
        ]
        by_rank = self._transport.all_gather_object(fits)  # a small part can match by chance
        for index, leaf in enumerate(leaves):
            agreed = [name for name in nodes if all(name in found[index] for found in by_rank)]
            if len(agreed) > 1 and agreed[0] != "all nodes" and self._transport.num_ranks > 1:
                raise ValueError(
                    f"expected predictions whose nodes are known, got as many rows as {agreed} "
                    "have on every rank: return a row for each node, and select afterwards"
                )
            if agreed:
                order = self._all_rows(nodes[agreed[0]]).argsort()
                leaves[index] = self._all_rows(leaf)[order]
        return tree_unflatten(leaves, tree)

    def _all_rows(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in rank order."""
        transport, rows = self._transport, rows.detach().contiguous()
        counts = transport.all_gather_object(rows.shape[0])
        to_others = [0 if peer == transport.rank else rows.shape[0] for peer in range(len(counts))]
        from_others = [0 if peer == transport.rank else n for peer, n in enumerate(counts)]
        payload = rows.reshape(rows.shape[0], math.prod(rows.shape[1:])).view(torch.uint8)
        others = transport.exchange(payload.repeat(len(counts) - 1, 1), to_others, from_others)
        blocks = list(others.split(from_others))
        blocks[transport.rank] = payload
        return torch.cat(blocks).view(rows.dtype).view(-1, *rows.shape[1:])

    def _read(self, store: ShardStore, key: str, device: torch.device) -> Shard:
        """This rank's part; sent by rank 0 to ranks whose host does not have the folder."""
        transport = self._transport
        held = transport.all_gather_object(store.holds(key, transport.rank))
        if not held[0]:
            store.verify(key)  # raises: rank 0 has just written it, or was given it
        lacking = [rank for rank, holds in enumerate(held) if not holds]
        if lacking:
            sending = transport.rank == 0
            files = [store.shard_bytes(key, rank) for rank in lacking] if sending else []
            manifest, sizes = transport.broadcast_object(
                (store.manifest(key), [len(file) for file in files]) if sending else None, 0
            )
            counts = [0] * transport.num_ranks
            for rank, size in zip(lacking, sizes, strict=True):
                counts[rank] = size
            mine = [0 if sending else counts[transport.rank], *[0] * (transport.num_ranks - 1)]
            message = torch.cat(files) if sending else torch.empty(0, dtype=torch.uint8)
            outgoing = counts if sending else [0] * transport.num_ranks
            received = transport.exchange(message.to(device).unsqueeze(1), outgoing, mine)
            if not held[transport.rank]:
                store.adopt(key, transport.rank, manifest, received.squeeze(1).cpu())
        return store.read(key, transport.rank)

    def _agree(self, shard: Shard) -> None:
        """Raises unless all ranks hold parts of one cut."""
        plan, num_ranks = shard.plan, self._transport.num_ranks
        views = self._transport.all_gather_object(
            (shard.fingerprint, (plan.send_counts, plan.recv_counts))
        )
        if (num_parts := len(views[0][1][0])) != num_ranks:
            raise ValueError(
                f"expected parts for {num_ranks} ranks, got {num_parts}: cut them again"
            )
        prints = [view[0] for view in views]
        if len(set(prints)) > 1:
            raise ValueError(f"the ranks hold parts of different cuts: {prints}; delete the folder")
        check_plans([view[1] for view in views])


def entry_of(loader: Any, cache_dir: str | Path | None) -> tuple[ShardStore, str | None]:
    """This host's store for what `loader` yields, and the key of parts made ahead."""
    if (parts := getattr(loader, "folder", None)) is not None:
        return ShardStore(parts.parent), parts.name
    return ShardStore(getattr(loader, "cache_dir", None) or cache_dir), None


def build(
    store: ShardStore, loader: Any, partition: Partitioner, num_parts: int, *, reverse: bool
) -> str:
    """The key of a complete entry with the parts of the graph that `loader` yields."""
    graph = graph_of(whole_graph(loader))
    return store.open_or_build(
        graph,
        partition_for(graph, loader, partition),
        num_parts,
        training_nodes(graph),
        reverse=reverse,
    )


def partition_for(graph: Graph, loader: Any, partition: Partitioner) -> Partitioner:
    """The loader's partition, else `partition`."""
    partition = getattr(loader, "partition", None) or partition
    if isinstance(partition, Assignment) and graph.node_id is not None:
        return Assignment(partition.parts[graph.node_id])  # given for the larger graph
    return partition


def training_nodes(graph: Graph) -> Tensor | None:
    """The mask of the nodes that are spread evenly over the parts."""
    mask = graph.node.get("train_mask")
    return mask if mask is not None and mask.dim() == 1 else None
