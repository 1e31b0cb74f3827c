"""The halo exchange among real ranks: what arrives, its adjoint, and how many messages it takes."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg_nn
from catalogue import make_graph
from ranks import run_ranks
from torch import Tensor

from lightning_sylvie.attach import Attachment
from lightning_sylvie.exchange import Halo
from lightning_sylvie.partition import Random
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Loopback, connect

GRAPH = make_graph(directed=True)


def ranks_halo(*, empty: int | None = None) -> tuple[Halo, Shard]:
    """This rank's end of the exchange and its part; rank `empty` owns nothing."""
    limit = timedelta(seconds=30)
    num_ranks = dist.get_world_size()
    parts = Random(seed=1).assign(GRAPH.edge_index, GRAPH.num_nodes, num_ranks)
    if empty is not None:
        parts[parts == empty] = (empty + 1) % num_ranks
    shard = cut(GRAPH, parts, num_ranks, reverse=True)[dist.get_rank()]
    return Halo(connect(dist.new_group(timeout=limit), timeout=limit)), shard


def over_ranks(halo: Halo, value: Tensor) -> float:
    total = value.detach().clone()
    halo.transport.all_reduce(total)
    return float(total)


def rows_arrive(empty: int | None) -> None:
    halo, shard = ranks_halo(empty=empty)
    everything = torch.cat([shard.node_id, shard.halo_id])
    double, owned = GRAPH.node["hops"], shard.node_id
    values = [double, double[:, 0, 0], double.float(), everything.new_ones(72).cumsum(0) - 1]
    values += [GRAPH.node["train_mask"], double[:, :, :0]]
    with halo.using(shard):
        before = halo.transport.num_exchanges
        found = halo.append(*(value[owned] for value in values))
        assert halo.transport.num_exchanges == before + 1
    for value, extended in zip(values, found, strict=True):
        assert extended.dtype == value.dtype
        assert torch.equal(extended, value[everything])
    record = 3 * 8 * 8 + 8 + 3 * 8 * 4 + 8 + 1
    assert halo.transport.bytes_sent == [count * record for count in shard.plan.send_counts]
    assert halo.transport.bytes_received == [count * record for count in shard.plan.recv_counts]


@pytest.mark.parametrize("empty", [None, 1])
def test_every_kind_of_tensor_arrives_in_one_message(empty: int | None) -> None:
    run_ranks(rows_arrive, 3, empty)


def adjoint(empty: int | None) -> None:
    halo, shard = ranks_halo(empty=empty)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(shard.plan.num_owned, 5, dtype=torch.float64, generator=generator)
    y = torch.randn(shard.plan.num_rows, 5, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    y.requires_grad_()
    with halo.using(shard):
        (extended,) = halo.append(x)
        folded = halo.fold(y)
        left, right = (extended * y).sum(), (x * folded).sum()
        assert over_ranks(halo, left) == pytest.approx(over_ranks(halo, right), rel=1e-13)
        (gradient_of_append,) = torch.autograd.grad(extended, x, y)
        (gradient_of_fold,) = torch.autograd.grad(folded, y, x)
    torch.testing.assert_close(gradient_of_append, folded, rtol=0, atol=1e-14)
    assert torch.equal(gradient_of_fold, extended)


@pytest.mark.parametrize("empty", [None, 1])
def test_fold_is_the_adjoint_and_the_gradient_of_append(empty: int | None) -> None:
    run_ranks(adjoint, 3, empty)


def only_what_needs_it() -> None:
    halo, shard = ranks_halo()
    x = shard.node["x"].clone().requires_grad_()
    constant = shard.node["x_0"]
    with halo.using(shard):
        far_x, far_constant, far_mask = halo.append(x, constant, shard.node["train_mask"])
        assert far_x.requires_grad
        assert not far_constant.requires_grad
        assert not far_mask.requires_grad
        halo.transport.bytes_sent[:] = [0] * 3
        (far_x * far_constant).sum().backward()
    sent = [count * 8 * 8 for count in shard.plan.recv_counts]
    assert halo.transport.bytes_sent == sent  # backward: the gradient of x alone


def test_backward_sends_only_gradients_that_are_needed() -> None:
    run_ranks(only_what_needs_it, 3)


def moved_once() -> None:
    halo, shard = ranks_halo()
    x = shard.node["x"].clone().requires_grad_()
    num = lambda: halo.transport.num_exchanges  # noqa: E731
    with halo.using(shard):
        first, again = halo.append(x, x)
        assert first is again
        assert halo.append(x)[0] is first
        assert num() == 1
        other = shard.node["x_0"]
        both = halo.append(other, x)  # x rides along from the last message
        assert both[1] is first
        assert num() == 2
        first.sum().backward()
        assert num() == 3
        halo.append(x)[0].sum().backward()  # its graph was used up
        assert num() == 5
        with torch.no_grad():
            halo.append(x)
            x.mul_(2)
            assert torch.equal(halo.append(x)[0][shard.plan.num_owned :], 2 * far_rows(shard))
        assert num() == 7
        assert halo.append(x)[0].requires_grad  # what came without a gradient can't give one
        assert num() == 8
    with halo.using(shard):
        halo.append(x)
    assert num() == 9
    with torch.inference_mode(), halo.using(shard):
        assert torch.equal(halo.append(x + 0)[0][: shard.plan.num_owned], x)


def far_rows(shard: Shard) -> Tensor:
    return GRAPH.node["x"][shard.halo_id]


def test_a_tensor_is_moved_once_until_it_changes() -> None:
    run_ranks(moved_once, 2)


def sums() -> None:
    halo, _ = ranks_halo()
    rank = float(dist.get_rank())
    x = torch.tensor([rank, 1.0, -rank], dtype=torch.float64, requires_grad=True)
    total = halo.sum(x)
    assert total.tolist() == [3, 3, -3]
    assert halo.max(x).tolist() == [2, 1, 0]
    (total * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6, 6, 6]  # <sum(x), y> = <x, sum(y)> over the ranks


def test_a_sum_over_ranks_has_the_summed_gradient() -> None:
    run_ranks(sums, 3)


def messages_per_layer() -> dict[str, tuple[int, int]]:
    """Exchanges forward and backward of the second step, when degrees are known."""
    halo, shard = ranks_halo()
    node = {name: v.float() if v.is_floating_point() else v for name, v in shard.node.items()}
    x, edges, kind = node["x"], shard.edge_index, shard.edge["edge_type"]
    layers: dict[str, tuple[torch.nn.Module, tuple[Any, ...]]] = {
        "SAGEConv": (pyg_nn.SAGEConv(8, 4), (x, edges)),
        "GCNConv": (pyg_nn.GCNConv(8, 4), (x, edges)),
        "GATConv": (pyg_nn.GATConv(8, 4), (x, edges)),
        "TransformerConv": (pyg_nn.TransformerConv(8, 4), (x, edges)),
        "PointTransformerConv": (pyg_nn.PointTransformerConv(8, 4), (x, node["pos"], edges)),
        "RGCNConv": (pyg_nn.RGCNConv(8, 4, 3), (x, edges, kind)),
        "TAGConv": (pyg_nn.TAGConv(8, 4, K=3), (x, edges)),
    }
    counts = {}
    for name, (layer, given) in layers.items():
        attachment = Attachment(layer, halo)
        attachment.keep(shard)
        x.requires_grad_()
        for _ in range(2):
            with halo.using(shard):
                start = halo.transport.num_exchanges
                out = layer(*given)
                middle = halo.transport.num_exchanges
            out.sum().backward()
            counts[name] = (middle - start, halo.transport.num_exchanges - middle)
    return counts


def test_one_message_for_each_time_neighbours_are_read() -> None:
    for counts in run_ranks(messages_per_layer, 2):
        assert counts == {
            "SAGEConv": (1, 1),
            "GCNConv": (1, 1),  # the degrees came in the first step
            "GATConv": (2, 2),  # logits, then rows
            "TransformerConv": (1, 1),  # key and value side by side
            "PointTransformerConv": (1, 1),
            "RGCNConv": (1, 1),  # three relations read the same rows
            "TAGConv": (3, 3),  # one for each hop
        }


def ranks_differ() -> None:
    halo, shard = ranks_halo()
    width = 3 if dist.get_rank() == 1 else 2
    with halo.using(shard, checking=True):
        halo.append(shard.node["x"][:, :2])
        with pytest.raises(RuntimeError, match=r"rank 0, 2: exchange 2.*\n.*rank 1: exchange 2"):
            halo.append(shard.node["x"][:, :width])


def test_checking_names_the_ranks_that_differ() -> None:
    run_ranks(ranks_differ, 3)


def test_what_does_not_fit_the_part_is_refused_with_its_shape() -> None:
    halo = Halo(Loopback())
    with pytest.raises(RuntimeError, match="no shard is in force"):
        halo.append(torch.zeros(3, 2))
    shard = cut(GRAPH, torch.zeros(72, dtype=torch.int64), 1)[0]
    with halo.using(shard):
        assert halo.active
        with pytest.raises(
            ValueError, match=r"expected 72 rows .* got a tensor of shape \(71, 2\)"
        ):
            halo.append(torch.zeros(71, 2))
        model = torch.nn.Sequential(torch.nn.Identity(), pyg_nn.SAGEConv(8, 4))
        Attachment(model, halo)
        with pytest.raises(ValueError, match=r"1 \(SAGEConv\): expected 72 rows"):
            model[1](torch.zeros(71, 8), shard.edge_index)
    assert not halo.active


def test_one_rank_moves_nothing_and_copies_stay_on_it() -> None:
    halo = Halo(Loopback())
    shard = cut(GRAPH, torch.zeros(72, dtype=torch.int64), 1)[0]
    assert copy.deepcopy(halo) is halo
    x = shard.node["x"]
    with halo.using(shard):
        assert halo.append(x)[0] is x
        assert torch.equal(halo.fold(x), x)
    assert halo.transport.bytes_sent == [0]
