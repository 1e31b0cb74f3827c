"""Messages whose rows have different bits: both ends, in every place that a row can have."""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hubs import NUM_NODES, WIDTH, graph, shards, shared_out, values
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

from lightning_sylvie import AdaptiveBits
from lightning_sylvie.attach import Attachment
from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.history import History, Pipelined
from lightning_sylvie.lane import Beside
from lightning_sylvie.observer import Tallies
from lightning_sylvie.quantizer import MinMax, Noise, Quantizer, Rotated, choose
from lightning_sylvie.route import Route, RowIds
from lightning_sylvie.schedule import Unbounded
from lightning_sylvie.shard import cut
from lightning_sylvie.transport import Loopback, Transport, connect
from lightning_sylvie.transport.threads import run_threads


def exchanges(
    transport: Transport, code: Any, num_epochs: int, history: History | None = None
) -> list[tuple[Tensor, Tensor, int]]:
    """Extended rows, gradients of owned rows and bytes sent, of every epoch."""
    shard = shards(transport.num_ranks)[transport.rank]
    halo = Halo(transport, code, seed=5, history=history)
    everyone, found = torch.cat([shard.node_id, shard.halo_id]), []
    for epoch in range(num_epochs):
        before = sum(transport.bytes_sent)
        x = values(epoch)[shard.node_id].requires_grad_()
        halo.history.begin(epoch)
        with halo.using(shard, epoch=epoch):
            (extended,) = halo.append(x)
            (extended * values(epoch, 1 + transport.rank)[everyone]).sum().backward()
        assert x.grad is not None
        found.append((extended.detach(), x.grad, sum(transport.bytes_sent) - before))
    halo.history.close()
    return found


def over_ranks(bits: AdaptiveBits, quantizer: str, num_epochs: int) -> Any:
    transport = connect(dist.new_group(), timeout=timedelta(seconds=30))
    found = exchanges(transport, choose(bits, quantizer), num_epochs)
    transport.close()
    return found


class Reference:
    """What is exchanged, from the whole graph: each pair of parts and each row by itself."""

    def __init__(self, num_ranks: int, bits: AdaptiveBits, quantizer: str) -> None:
        self.parts, self.bits, self.sources = shards(num_ranks), bits, graph().edge_index[0]
        least = {"minmax": 0, "auto": 2, "rotated": 8}[quantizer]
        self.codes = [Rotated(b) if b <= least else MinMax(b) for b in bits.choices]
        self.errors = [code.relative_error for code in self.codes]
        self.known: dict[tuple[int, int, int], list[float]] = {}

    def moved(
        self, pair: tuple[int, int], direction: int, rows: Tensor, epoch: int
    ) -> tuple[Tensor, list[int], int]:
        """Decoded rows that rank `pair[0]` reads of rank `pair[1]`, or their gradients; the numbers
        of their codes; bytes."""
        reader, owner = pair
        shard = self.parts[reader]
        begin = sum(shard.plan.recv_counts[:owner])
        nodes = shard.halo_id[begin : begin + shard.plan.recv_counts[owner]]
        degrees = [int((self.sources[shard.edge_id] == node).sum()) for node in nodes]
        known = self.known.get((reader, owner, direction))
        weights = [
            (1.0 if direction else degree) * (1.0 if known is None else known[i])
            for i, degree in enumerate(degrees)
        ]
        numbers, _ = shared_out(weights, self.bits.average, self.bits.choices, self.errors)
        ids = nodes * len(self.parts) + reader if direction else nodes
        coded = [
            self._coded(self.codes[number], rows[i : i + 1], ids[i : i + 1], direction, epoch)
            for i, number in enumerate(numbers)
        ]
        if self.bits.refresh_every and epoch % self.bits.refresh_every == 0:
            self.known[reader, owner, direction] = [spread for _, spread, _ in coded]
        decoded = torch.cat([row for row, _, _ in coded]) if coded else rows[:0]
        return decoded, numbers, sum(size for _, _, size in coded)

    def _coded(
        self, code: Quantizer, row: Tensor, node: Tensor, direction: int, epoch: int
    ) -> tuple[Tensor, float, int]:
        shard = self.parts[0]
        route = Route(Loopback(), shard.plan, RowIds(shard), code, code, (5, epoch, 1), "")
        noise = Noise((route.back() if direction else route.out())._noise(0, 0).key, node)
        message = torch.zeros(1, code.row_bytes(row), dtype=torch.uint8)
        code.quantize(row.contiguous(), None, noise, message, 0)
        out = torch.empty_like(row)
        code.dequantize(message, 0, noise, out)
        if isinstance(code, MinMax):  # its record ends with scale and zero
            scale = float(message[0, -4:-2].clone().view(torch.bfloat16))
            spread = WIDTH / 32 * (scale * (2**code.bits - 1)) ** 2
        else:
            told = code.spread(message, 0, row)
            assert told is not None
            spread = float(told)
        return out, spread, message.numel()


@pytest.mark.parametrize(
    ("num_ranks", "quantizer", "bits"),
    [
        (2, "minmax", AdaptiveBits(2)),
        (4, "auto", AdaptiveBits(2.5, refresh_every=1)),
        (2, "minmax", AdaptiveBits(3, refresh_every=2, choices=(1, 4, 8))),
        (4, "rotated", AdaptiveBits(1.2, refresh_every=1, choices=(0.5, 1, 2))),
    ],
)
def test_both_ends_derive_one_layout_and_its_bytes(
    num_ranks: int, quantizer: str, bits: AdaptiveBits
) -> None:
    """Rows, gradients and bytes of four epochs are those of each row by itself, to the bit."""
    num_epochs = 4
    results = run_ranks(over_ranks, num_ranks, bits, quantizer, num_epochs)
    reference, layouts = Reference(num_ranks, bits, quantizer), []
    average_bytes = choose(bits, quantizer).row_bytes(torch.empty(0, WIDTH))
    for epoch in range(num_epochs):
        sent, summed = [0] * num_ranks, torch.zeros(NUM_NODES, WIDTH)
        for reader, shard in enumerate(reference.parts):
            owned, counts = shard.plan.num_owned, shard.plan.recv_counts
            extended = results[reader][epoch][0]
            assert torch.equal(extended[:owned], values(epoch)[shard.node_id])
            cotangent = values(epoch, 1 + reader)
            summed[shard.node_id] += cotangent[shard.node_id]
            sent[reader] += 4 * sum(counts) if epoch == 0 else 0  # the degrees
            for owner, nodes in enumerate(shard.halo_id.split(list(counts))):
                arrived = extended[owned:].split(list(counts))[owner]
                pair = reader, owner
                decoded, numbers, size = reference.moved(pair, 0, values(epoch)[nodes], epoch)
                assert torch.equal(arrived, decoded)
                layouts.append(numbers)
                assert quantizer != "minmax" or size <= len(nodes) * average_bytes
                sent[owner] += size
                back, _, size = reference.moved(pair, 1, cotangent[nodes], epoch)
                summed[nodes] += back
                sent[reader] += size
        for shard, result in zip(reference.parts, results, strict=True):
            torch.testing.assert_close(
                result[epoch][1], summed[shard.node_id], rtol=1e-5, atol=1e-5
            )
            assert result[epoch][2] == sent[shard.plan.rank]
    assert len({number for numbers in layouts for number in numbers}) >= 3
    per_epoch = num_ranks**2
    changed = layouts[:per_epoch] != layouts[-per_epoch:]
    assert changed == (bits.refresh_every is not None)


def test_rows_of_age_1_are_those_of_the_synchronous_mode_an_epoch_before() -> None:
    """So both ends agree beside the computation too, where an exchange ends in the next epoch."""
    code, num_epochs = choose(AdaptiveBits(2, refresh_every=1)), 6

    def body(transport: Transport) -> Any:
        pipelined = Pipelined(Beside(transport.device), Unbounded())
        return exchanges(transport, code, num_epochs), exchanges(
            transport, code, num_epochs, pipelined
        )

    for shard, (fresh, stale) in zip(shards(3), run_threads(body, 3), strict=True):
        owned, ids = shard.plan.num_owned, torch.cat([shard.node_id, shard.halo_id])
        for epoch in range(num_epochs):
            then = max(epoch - 1, 0)
            assert torch.equal(stale[epoch][0][owned:], fresh[then][0][owned:])
            own = [values(e, 1 + shard.plan.rank)[ids][:owned] for e in (epoch, then)]
            torch.testing.assert_close(
                stale[epoch][1] - own[0], fresh[then][1] - own[1], rtol=1e-4, atol=1e-4
            )


def test_one_message_takes_rows_of_every_kind_both_ways() -> None:
    """Integers as they are, narrow rows in 16 bits, float64 by way of float32, side by side."""

    def body(transport: Transport) -> None:
        shard = shards(3)[transport.rank]
        halo = Halo(transport, choose(AdaptiveBits(4, refresh_every=1)))
        everyone, kinds = torch.cat([shard.node_id, shard.halo_id]), torch.arange(NUM_NODES)
        wide, narrow = values(0).double(), values(1)[:, :3]
        for epoch in range(3):
            given = [t[shard.node_id].clone().requires_grad_() for t in (wide, narrow)]
            with halo.using(shard, epoch=epoch):
                found = halo.append(*given, kinds[shard.node_id])
                sum(extended.sum() for extended in found[:2]).backward()  # type: ignore[union-attr]
            assert torch.equal(found[2], kinds[everyone])
            torch.testing.assert_close(found[1], narrow[everyone], rtol=2**-8, atol=0.0)
            error = (found[0] - wide[everyone]).abs().amax(1)
            spans = wide[everyone].amax(1) - wide[everyone].amin(1)
            assert bool((error <= 1.02 * spans).all())
            readers = torch.zeros(NUM_NODES)
            for part in shards(3):
                readers[part.node_id] += 1
                readers[part.halo_id] += 1
            for tensor in given:
                assert tensor.grad is not None
                counts = readers[shard.node_id].to(tensor.dtype)[:, None].expand_as(tensor)
                torch.testing.assert_close(tensor.grad, counts)  # constant rows decode exactly

    run_threads(body, 3)


def test_a_row_that_is_not_finite_is_named_from_any_class() -> None:
    def body(transport: Transport) -> None:
        shard = shards(3)[transport.rank]
        halo = Halo(transport, choose(AdaptiveBits(2)))
        x = values(0)[shard.node_id]
        if transport.rank == 1:
            x[shard.plan.send_index[entry], 3] = float("nan")
        with halo.using(shard):
            halo.append(x, name="convs.1")

    for entry in (0, 3, 9):
        node = int(shards(3)[1].node_id[shards(3)[1].plan.send_index[entry]])
        with pytest.raises(ValueError, match=rf"convs.1: the row of node {node} that rank 1"):
            run_threads(body, 3)


def test_parts_without_nodes_or_neighbours_take_part() -> None:
    whole = Graph(6, torch.tensor([[0, 1, 2, 4], [1, 0, 3, 5]]), {})
    parts = cut(whole, torch.tensor([0, 1, 2, 2, 2, 2]), 4)

    def body(transport: Transport) -> float:
        shard = parts[transport.rank]
        halo = Halo(transport, choose(AdaptiveBits(4, refresh_every=1)))
        everyone = torch.cat([shard.node_id, shard.halo_id])
        for epoch in range(3):
            x = values(epoch)[shard.node_id].requires_grad_()
            with halo.using(shard, epoch=epoch):
                (extended,) = halo.append(x)
                extended.sum().backward()
        return float((extended.detach() - values(2)[everyone]).abs().sum())

    lost = run_threads(body, 4)
    assert min(lost[:2]) > 0
    assert lost[2:] == [0.0, 0.0]


def test_an_observer_hears_of_bytes_and_of_the_error_of_all_classes() -> None:
    def body(transport: Transport) -> Any:
        shard = shards(2)[transport.rank]
        halo = Halo(transport, choose(AdaptiveBits(2, refresh_every=1), "minmax"))
        halo.observer = tallies = Tallies(sample=10**6)
        for epoch in range(2):
            with halo.using(shard, epoch=epoch):
                tallies.clear()
                (extended,) = halo.append(values(epoch)[shard.node_id], name="layer")
                before = sum(transport.bytes_sent)
        tally = tallies.by_layer["layer", "forward"]
        lost = extended - values(1)[torch.cat([shard.node_id, shard.halo_id])]
        assert tally.side_bytes == 4 * shard.plan.num_sent
        return tally.error, tally.num_bytes, float(lost.square().sum()), before

    for one, other in itertools.permutations(run_threads(body, 2)):
        assert one[0] == pytest.approx(other[2], rel=1e-5)  # what one sends, the other reads
        assert 0 < one[1] < one[3]


class Layers(torch.nn.Module):
    """In-edges, out-edges, and a layer that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = SAGEConv(WIDTH, WIDTH), SAGEConv(WIDTH, 3)
        self.turned = SAGEConv(WIDTH, WIDTH, flow="target_to_source")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.turned(self.first(x, edge_index).tanh(), edge_index).tanh()
        again: Tensor = checkpoint(self.last, x, edge_index, use_reentrant=False)
        return again


def test_out_edges_and_layers_that_run_again_in_backward() -> None:
    """Beside one process: 8 bits for nearly all rows are nearly exact, other rows would not be."""
    bits = AdaptiveBits(7.5, refresh_every=1)
    parts, whole = cut(graph(), torch.arange(NUM_NODES) % 3, 3, reverse=True), Layers()

    def body(transport: Transport) -> list[Tensor]:
        shard, model = parts[transport.rank], copy.deepcopy(whole)
        halo = Halo(transport, choose(bits, "minmax"))
        Attachment(model, halo).keep(shard)
        for epoch in range(3):
            model.zero_grad()
            with halo.using(shard, epoch=epoch):
                out = model(values(0).tanh()[shard.node_id], shard.edge_index)
                out.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            transport.all_reduce(gradient)
        return gradients

    whole(values(0).tanh(), graph().edge_index).square().sum().backward()
    for found in run_threads(body, 3):
        for gradient, parameter in zip(found, whole.parameters(), strict=True):
            assert parameter.grad is not None
            assert float((gradient - parameter.grad).norm() / parameter.grad.norm()) < 0.05
