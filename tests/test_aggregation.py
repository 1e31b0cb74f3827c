"""Aggregation while halo rows travel: the same values, earlier; and only where it pays."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg_nn
from ranks import run_ranks
from test_exchange import ranks_halo
from torch import Tensor

from lightning_sylvie.attach import Attachment
from lightning_sylvie.attach.sparse import Adjacency
from lightning_sylvie.exchange import Halo
from lightning_sylvie.overlap import Pace
from lightning_sylvie.quantizer import choose
from lightning_sylvie.shard import Shard


def adjacency_of(shard: Shard, dtype: torch.dtype) -> Adjacency:
    plan = shard.plan
    weight = torch.arange(1.0, shard.edge_index.shape[1] + 1)
    return Adjacency(shard.edge_index, weight, plan.num_owned, plan.num_rows, dtype)


def same_bits(bits: float, empty: int | None) -> None:
    halo, shard = ranks_halo(empty=empty)
    halo = Halo(halo.transport, choose(bits, "auto"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    dtype = torch.float64 if bits == 32 else torch.float32
    x, grad = torch.randn(2, shard.plan.num_owned, 40, dtype=dtype, generator=generator)
    x.requires_grad_()
    adjacency = adjacency_of(shard, dtype)
    found: list[tuple[Tensor, Tensor, list[int]]] = []
    for _ in range(8):  # rows appended; then both ways in turn; then the faster one
        halo.transport.bytes_sent[:] = [0] * dist.get_world_size()
        with halo.using(shard):
            out = halo.aggregate(adjacency, x)
        found.append((out, *torch.autograd.grad(out, x, grad), list(halo.transport.bytes_sent)))
    for out, gradient, sent in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(gradient, found[0][1])
        assert sent == found[0][2]
    assert (sum(found[0][2]) == 0) == (dist.get_rank() == empty)


@pytest.mark.parametrize("empty", [None, 1])
@pytest.mark.parametrize("bits", [1, 32])
def test_results_and_bytes_are_the_same_to_the_bit(bits: float, empty: int | None) -> None:
    run_ranks(same_bits, 3, bits, empty)


class Clocked:
    """An aggregation that notes when its parts are done, and forces the way it is computed."""

    def __init__(self, adjacency: Adjacency) -> None:
        self._adjacency = adjacency
        self.done: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        def clocked(*rows: Tensor) -> Any:
            value = getattr(self._adjacency, name)(*rows)
            self.done[name] = time.monotonic()
            return value

        return clocked


def beside_the_bytes() -> tuple[dict[str, float], dict[str, float], float]:
    """When the parts were done in forward and in backward; when the other rank's rows had left."""
    halo, shard = ranks_halo()
    x = torch.randn(shard.plan.num_owned, 8, requires_grad=True)
    clocked = Clocked(adjacency_of(shard, torch.float32))
    with halo.using(shard):
        halo.aggregate(clocked, x)  # the first step learns who else reads the rows
    with halo.using(shard):
        if late := dist.get_rank() == 1:
            time.sleep(0.5)
        left = time.monotonic()
        out = halo.aggregate(clocked, x)
    forward = dict(clocked.done)
    if late:
        time.sleep(0.5)
    out.sum().backward()
    return forward, clocked.done, left


def test_what_needs_no_halo_row_is_done_before_the_halo_rows_are_there() -> None:
    (forward, backward, _), (_, late, left) = run_ranks(beside_the_bytes, 2)
    assert forward["interior"] < left < forward["frontier"]
    assert backward["owned_gradient"] < late["halo_gradient"]


def test_the_faster_way_is_kept() -> None:
    for slow in (True, False):
        pace, ways = Pace(), []
        for _ in range(8):
            with pace.timed() as overlaps:
                ways.append(overlaps)
                time.sleep(0.01 if overlaps is slow else 0.0)
        assert ways == [True, False] * 3 + [not slow] * 2


class OwnProduct(pyg_nn.SAGEConv):  # type: ignore[misc]
    def message_and_aggregate(self, adj_t: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return (adj_t @ x[0]) / x[0].shape[0]


def exchanges_per_step(kind: str) -> tuple[list[int], bool]:
    """Exchanges of each step after the first, and whether all steps had the same output."""
    halo, shard = ranks_halo()
    layers: dict[str, list[Any]] = {
        "one reader": [pyg_nn.GraphConv(8, 4)],
        "two readers": [pyg_nn.GraphConv(8, 4), pyg_nn.SAGEConv(8, 4)],
        "a reader that is not fused": [pyg_nn.GraphConv(8, 4), pyg_nn.SAGEConv(8, 4, aggr="max")],
        "several products": [
            pyg_nn.EGConv(8, 4, num_heads=2, aggregators=["sum", "mean", "symnorm"])
        ],
        "a product of the user's": [OwnProduct(8, 4)],
    }
    torch.manual_seed(0)
    model = torch.nn.ModuleList(layers[kind]).double()
    Attachment(model, halo).keep(shard)
    x = shard.node["x"].clone().requires_grad_()
    counts, outputs = [], []
    for _ in range(4):
        with halo.using(shard):
            start = halo.transport.num_exchanges
            outputs.append(torch.cat([layer(x, shard.edge_index) for layer in model]))
            outputs[-1].sum().backward()
            counts.append(halo.transport.num_exchanges - start)
    return counts[1:], all(torch.equal(out, outputs[0]) for out in outputs)


@pytest.mark.parametrize(
    "kind",
    [
        "one reader",
        "two readers",
        "a reader that is not fused",
        "several products",
        "a product of the user's",
    ],
)
def test_rows_travel_once_whoever_reads_them(kind: str) -> None:
    for counts, equal in run_ranks(exchanges_per_step, 2, kind):
        assert counts == [2, 2, 2]
        assert equal
