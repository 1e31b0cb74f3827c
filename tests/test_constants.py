"""Input features are moved once, and every layer of the catalogue stays exact on them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg_nn
from catalogue import Entry, entries, make_graph
from ranks import rank_outcomes
from torch import Tensor
from torch_geometric.nn import MessagePassing
from trainers import Setting, UserModule, loader

from lightning_sylvie.attach import Attachment, RefusedLayerError
from lightning_sylvie.attach.inputs import MAPS_FIRST, maps_first
from lightning_sylvie.exchange import Halo
from lightning_sylvie.partition import Random
from lightning_sylvie.quantizer import choose
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads

GRAPH = make_graph(directed=True)
NUM_RANKS = 3
PARTS = Random(seed=3).assign(GRAPH.edge_index, GRAPH.num_nodes, NUM_RANKS)
D, H = GRAPH.node["x"].shape[1], 6


def part(rank: int) -> Shard:
    return cut(GRAPH, PARTS, NUM_RANKS, reverse=True)[rank]


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def outcome(entry: Entry, module: torch.nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """The output, and the gradient of every parameter for a known cotangent, after two steps."""
    for _ in range(2):
        module.zero_grad()
        out = entry(module, given)
        if out.requires_grad:
            (out * torch.cos(given["n_id"]).view(-1, *[1] * (out.dim() - 1))).sum().backward()
    return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def given(node: dict[str, Tensor], edge: dict[str, Tensor], **rest: Tensor) -> dict[str, Tensor]:
    return {**node, **edge, **rest}


@pytest.mark.usefixtures("_float64")
def test_layers_are_exact_on_features_that_never_change() -> None:
    """The whole catalogue, forward and backward, with no gradient asked of its inputs."""
    chosen = [e for e in entries() if e.kind == "conv" and "GroupAddRev" not in e.code]
    built = [(entry, entry.build()) for entry in chosen]

    def body(transport: Transport) -> list[list[Tensor] | None]:
        shard, found = part(transport.rank), []
        for entry, module in built:
            halo, module = Halo(transport), copy.deepcopy(module)
            try:
                attachment = Attachment(module, halo)
            except RefusedLayerError:
                found.append(None)
                continue
            attachment.keep(shard)
            inputs = given(
                dict(shard.node), dict(shard.edge), edge_index=shard.edge_index, n_id=shard.node_id
            )
            with halo.using(shard):
                found.append(outcome(entry, module, inputs))
        return found

    with mock.patch.object(MessagePassing, "_set_jittable_templates"):
        ranks = run_threads(body, NUM_RANKS)
    order = torch.cat([part(rank).node_id for rank in range(NUM_RANKS)]).argsort()
    whole = given(
        dict(GRAPH.node),
        dict(GRAPH.edge),
        edge_index=GRAPH.edge_index,
        n_id=torch.arange(GRAPH.num_nodes),
    )
    wrong = []
    for (entry, module), *parts in zip(built, *ranks, strict=True):
        if parts[0] is None:
            continue
        expected = outcome(entry, module, whole)
        rows, *gradients = zip(*parts, strict=True)
        found = [torch.cat(rows)[order], *(torch.stack(grads).sum(0) for grads in gradients)]
        same = len(found) == len(expected) and all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max() + 1))
            for a, b in zip(found, expected, strict=True)
        )
        wrong += [] if same else [entry.name]
    assert not wrong


def traffic(
    layer: torch.nn.Module, *, keep: bool = True, bits: int = 32, epochs: int = 3
) -> list[list[int]]:
    """Bytes that every rank sends in each epoch of training, features first."""

    def body(transport: Transport) -> list[int]:
        shard, module, sent = part(transport.rank), copy.deepcopy(layer).double(), [0]
        halo = Halo(transport, choose(bits), keep_features=keep)
        Attachment(module, halo).keep(shard)
        for epoch in range(epochs):
            with halo.using(shard, epoch=epoch, checking=epoch == 0):
                module(shard.node["x"], shard.edge_index).square().sum().backward()
            sent.append(sum(transport.bytes_sent))
        return [after - before for before, after in itertools.pairwise(sent)]

    return run_threads(body, NUM_RANKS)


def rows_sent() -> list[int]:
    return [part(rank).plan.num_sent for rank in range(NUM_RANKS)]


def rows_received() -> list[int]:
    return [part(rank).plan.num_halo for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("kind", [pyg_nn.SAGEConv, pyg_nn.GINConv, pyg_nn.GATConv])
def test_features_travel_in_the_first_epoch_only(kind: type) -> None:
    layer = kind(torch.nn.Linear(D, H)) if kind is pyg_nn.GINConv else kind(D, H)
    assert traffic(layer) == [[num * D * 8, 0, 0] for num in rows_sent()]
    forward_and_back = [a + b for a, b in zip(rows_sent(), rows_received(), strict=True)]
    if kind is pyg_nn.GATConv:  # mapped rows and two logits
        every = [num * (H + 1) * 8 for num in forward_and_back]
    else:  # the features ask for no gradient
        every = [num * D * 8 for num in rows_sent()]
    assert traffic(layer, keep=False) == [[num] * 3 for num in every]


def test_degrees_and_features_of_gcn_travel_once() -> None:
    both = [[num * (D + 1) * 8, 0, 0] for num in rows_sent()]
    assert traffic(pyg_nn.GCNConv(D, H)) == both


@pytest.mark.parametrize(("width", "bits", "maps"), [(80, 1, False), (64, 1, True), (80, 32, True)])
def test_features_are_mapped_here_where_that_is_cheaper(width: int, bits: int, maps: bool) -> None:
    """16 operations per value and bit against 1000 per byte; 1 bit is 1.125 with a row's scale."""
    features, built = torch.randn(GRAPH.num_nodes, width), pyg_nn.GATv2Conv(width, 32)

    def body(transport: Transport) -> int:
        shard = part(transport.rank)
        shard = replace(shard, node={"x": features[shard.node_id]})
        layer, halo = copy.deepcopy(built), Halo(transport, choose(bits))
        Attachment(layer, halo).keep(shard)
        with halo.using(shard):
            layer(shard.node["x"], shard.edge_index)
        return sum(transport.bytes_sent)

    record = 4 * width if maps else choose(bits).row_bytes(torch.empty(0, 32))
    assert run_threads(body, NUM_RANKS) == [num * record for num in rows_sent()]


def test_a_tensor_that_changes_is_no_constant() -> None:
    """Its rows arrive as they are now, for all ranks and epochs; so do those of other tensors."""

    def body(transport: Transport) -> None:
        shard = part(transport.rank)
        halo, x = Halo(transport), shard.node["x"]
        halo.keep(shard)
        everything = torch.cat([shard.node_id, shard.halo_id])
        with torch.inference_mode(), halo.using(shard, exact=True):
            halo.append(x)  # a validation before training
        with halo.using(shard):
            (first,) = halo.append(x)
            assert halo.append(x)[0] is first
            assert not first.is_inference()
            assert torch.equal(first, GRAPH.node["x"][everything])
            assert halo.append(x + 0)[0] is not first
            assert transport.num_exchanges == 2
            x.mul_(2)
            assert torch.equal(halo.append(x)[0], 2 * GRAPH.node["x"][everything])
        with halo.using(shard, epoch=1):
            x.requires_grad_()
            (extended,) = halo.append(x)
            extended.sum().backward()
            assert x.grad is not None
        assert transport.num_exchanges == 5

    run_threads(body, NUM_RANKS)


def test_a_tensor_that_asks_for_a_gradient_gets_it() -> None:
    def body(transport: Transport) -> None:
        shard, halo = part(transport.rank), Halo(transport)
        halo.keep(shard)
        x = shard.node["x"].requires_grad_()
        with halo.using(shard):
            halo.append(x)[0].sum().backward()
        readers = shard.plan.send_index.bincount(minlength=shard.plan.num_owned)
        assert torch.equal(x.grad, (1 + readers)[:, None].expand_as(x).double())

    run_threads(body, NUM_RANKS)


def test_each_graph_has_its_own_rows() -> None:
    """An inductive run trains on one graph and validates on another."""

    def body(transport: Transport) -> None:
        halo, shards = Halo(transport), []
        for scale in (1, 3):
            shard = part(transport.rank)
            shards.append(replace(shard, node={"x": shard.node["x"] * scale}))
            halo.keep(shards[-1])
        for shard, scale in zip(shards, (1, 3), strict=True):
            with halo.using(shard):
                found = halo.append(shard.node["x"])[0][shard.plan.num_owned :]
            assert torch.equal(found, GRAPH.node["x"][shard.halo_id] * scale)

    run_threads(body, NUM_RANKS)


def test_constants_leave_the_noise_of_other_rows_as_it_is() -> None:
    """Whether the features move in an epoch or not, a resumed run codes its rows alike."""

    def body(transport: Transport) -> None:
        halo, found = Halo(transport, choose(1, "minmax")), []
        shard = part(transport.rank)
        rows = torch.randn(shard.plan.num_owned, 32)
        halo.keep(shard)
        for _ in range(2):
            with halo.using(shard, epoch=4):
                halo.append(shard.node["x"])
                found.append(halo.append(rows)[0])
        assert torch.equal(*found)

    run_threads(body, NUM_RANKS)


def test_layers_with_parts_of_their_own_do_not_map_twice() -> None:
    """A Dropout inside a layer would draw other masks here than at the rows' owner."""
    layer = pyg_nn.GCNConv(D, H)
    assert maps_first(layer)
    layer.lin = torch.nn.Sequential(torch.nn.Dropout(), layer.lin)
    assert not maps_first(layer)
    assert not maps_first(type("Own", (pyg_nn.GCNConv,), {})(D, H))
    assert pyg_nn.GATConv in MAPS_FIRST


def reads_features(folder: str) -> None:
    Setting(2, Path(folder)).trainer(max_epochs=3).fit(UserModule(), loader(), loader())


def test_a_script_says_once_that_features_move_once(tmp_path: Path) -> None:
    """On the screen of rank 0, without any set-up of logging."""
    first, second = rank_outcomes(reads_features, 2, str(tmp_path))
    assert first.error is second.error is None
    said = "gnn.convs.0 (SAGEConv) reads features that never change: their halo rows move once"
    assert first.output.count(said) == first.output.count("move once") == 1
    assert "move once" not in second.output
