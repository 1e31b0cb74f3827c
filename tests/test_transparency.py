"""Transparency: N ranks with attached layers compute what one process computes without them.

Every layer of the catalogue is trained for some Adam steps in float64, plain in this process and
attached in real gloo ranks. Outputs, loss, gradients of all parameters and of the input, buffers,
weights afterwards and outputs in evaluation mode agree to 1e-10 relative. One start of the ranks
runs the whole catalogue in one configuration.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from catalogue import Entry, entries, make_graph
from ranks import run_ranks
from torch import Tensor

from lightning_sylvie.attach import Attachment, Exchange, RefusedLayerError
from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Metis, Random
from lightning_sylvie.shard import Shard, cut_each
from lightning_sylvie.transport import Transport, connect

TOLERANCE = 1e-10
INPUTS = ("x", "x_0", "hops")
Record = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Config:
    """One start of the ranks.

    Args:
        num_ranks: Ranks.
        partition: "metis", "random", "bands" (no edge between parts 0 and 2), "untrained" (no
            training node on rank 1) or "empty" (no node at all on rank 1).
        directed: Which of the two graphs.
        exchange: Where the halo rows come in.
        steps: Adam steps.
    """

    num_ranks: int
    partition: str
    directed: bool
    exchange: Exchange
    steps: int

    def assignment(self, graph: Graph) -> Tensor:
        """The part of each node, int64 ``(num_nodes,)``."""
        if self.num_ranks == 1:
            return torch.zeros(graph.num_nodes, dtype=torch.int64)
        if self.partition == "metis":
            return Metis().assign(graph.edge_index, graph.num_nodes, self.num_ranks)
        if self.partition == "bands":
            return torch.arange(graph.num_nodes) * self.num_ranks // graph.num_nodes
        parts = Random(seed=3).assign(graph.edge_index, graph.num_nodes, self.num_ranks)
        if self.partition == "untrained":
            parts[graph.node["train_mask"] & (parts == 1)] = 0
        if self.partition == "empty":
            parts[parts == 1] = 0
        return parts


def part_of(config: Config, graph: Graph, rank: int) -> Shard:
    """The shard of `rank`, with the out-edges for the layers that read them."""
    shards = cut_each(graph, config.assignment(graph), config.num_ranks, reverse=True)
    return next(shard for number, shard in enumerate(shards) if number == rank)


def reference(entry: Entry, graph: Graph, steps: int) -> Record:
    """The layer in one process, as PyG runs it."""
    given = {**graph.node, **graph.edge, "edge_index": graph.edge_index}
    num_train = int(graph.node["train_mask"].sum())
    return train(entry, entry.build(), given, num_train, steps, None)


def run_entry(entry: Entry, shard: Shard, transport: Transport, config: Config) -> Record:
    """The layer attached on one rank. Row-wise results are of the owned rows."""
    module, halo = entry.build(), Halo(transport)
    attachment = Attachment(module, halo, exchange=config.exchange)
    attachment.keep(shard)
    given = {**shard.node, **shard.edge, "edge_index": shard.edge_index}
    with halo.using(shard, checking=False):
        record = train(
            entry, module, given, shard.mask_counts["train_mask"], config.steps, transport
        )
    attachment.detach()
    return record | {"node_id": {"": shard.node_id}}


def train(
    entry: Entry,
    module: torch.nn.Module,
    given: dict[str, Any],
    num_train: int,
    steps: int,
    transport: Transport | None,
) -> Record:
    """What is compared: see the keys."""
    leaves = {name: given[name].clone().requires_grad_() for name in INPUTS}
    parameters = dict(module.named_parameters())
    # A bias in front of a norm has a gradient of zero, and Adam would make steps of its rounding.
    optimizer = torch.optim.Adam(parameters.values(), lr=0.01, eps=1e-4) if parameters else None
    record: Record = {}
    for step in range(steps):
        out = entry(module, given | copies(leaves))
        record.setdefault("outputs", {"": out.detach().clone()})
        loss = masked_mean(out, given["target"], given["train_mask"], num_train)
        module.zero_grad()
        loss.backward()
        if transport is not None:
            reduce(parameters.values(), transport)
        if step == 0:
            record["loss"] = {"": loss}
            record["gradient of"] = {
                n: p.grad.clone() for n, p in parameters.items() if p.grad is not None
            }
            record["input gradient of"] = {
                n: leaf.grad.clone() for n, leaf in leaves.items() if leaf.grad is not None
            }
        if optimizer is not None:
            optimizer.step()
    record["trained"] = {n: p for n, p in module.named_parameters()}
    record["buffer"] = {n: b.clone() for n, b in module.named_buffers()}
    with torch.no_grad():
        record["evaluation outputs"] = {"": entry(module.eval(), given | copies(leaves))}
    return {kind: {n: t.detach() for n, t in values.items()} for kind, values in record.items()}


def copies(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in storage of their own, because GroupAddRev frees its input."""
    return {name: leaf.clone() for name, leaf in leaves.items()}


def masked_mean(out: Tensor, target: Tensor, mask: Tensor, num_train: int) -> Tensor:
    """This rank's share of the mean over all training nodes, as a user's mean and its weight."""
    out = out.flatten(1)
    rows = (out - target[:, : out.shape[1]]).square().mean(1)[mask]
    return rows.mean() * (len(rows) / num_train) if len(rows) else rows.sum()


def reduce(parameters: Any, transport: Transport) -> None:
    """Sums every gradient that some rank has over the ranks."""
    parameters = list(parameters)
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    transport.all_reduce(used)
    for parameter, some in zip(parameters, used.tolist(), strict=True):
        if some:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            transport.all_reduce(grad)
            parameter.grad = grad


def compare(parts: Sequence[Record], expected: Record) -> str:
    """What differs from the reference, worst first; empty if nothing does."""
    order = torch.cat([part["node_id"][""] for part in parts]).argsort()
    found: Record = dict(parts[0])
    for kind in ("outputs", "evaluation outputs", "input gradient of"):
        for name in {name for part in parts for name in part[kind]}:
            rows = torch.cat([part[kind][name] for part in parts])[order]
            found[kind] = found[kind] | {name: rows}
    found["loss"] = {"": torch.stack([part["loss"][""] for part in parts]).sum()}
    wrong = list(differences(found, expected))
    for rank, part in enumerate(parts[1:], 1):
        same = {kind: part[kind] for kind in ("trained", "buffer")}
        wrong += [(value, f"{what} on rank {rank}") for value, what in differences(same, expected)]
    return "; ".join(f"{what}: {value:.1e}" for value, what in sorted(wrong, reverse=True)[:4])


def differences(found: Record, expected: Record) -> Iterator[tuple[float, str]]:
    """``(relative difference, what)`` of everything outside the tolerance."""
    for kind, values in found.items():
        if kind == "node_id":
            continue
        if values.keys() != expected[kind].keys():
            yield float("inf"), f"{kind} {sorted(values.keys() ^ expected[kind].keys())}"
            continue
        sizes = [float(t.abs().max()) for t in expected[kind].values() if t.numel()]
        for name, value in values.items():
            other = expected[kind][name]
            if value.shape != other.shape:
                yield float("inf"), f"{kind} {name} {tuple(value.shape)}, {tuple(other.shape)}"
            elif value.numel():
                scale = max(float(other.abs().max()), 1e-3 * max(sizes), 1e-12)
                error = float((value.double() - other.double()).abs().max()) / scale
                if not error <= TOLERANCE:
                    yield error, f"{kind} {name}".strip()
