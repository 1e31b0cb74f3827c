"""Quantized exchanges over real ranks, against the same codes computed in one place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Random
from lightning_sylvie.quantizer import Noise, Quantizer, choose
from lightning_sylvie.route import Route, RowIds
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Loopback, connect
from lightning_sylvie.transport.threads import run_threads

WIDTH = 32


def graph() -> Graph:
    draw = torch.Generator().manual_seed(3)
    return Graph(
        60,
        torch.randint(60, (2, 300), generator=draw),
        {"x": torch.randn(60, WIDTH, generator=draw)},
    )


def shards(num_ranks: int) -> list[Shard]:
    whole = graph()
    return cut(whole, Random().assign(whole.edge_index, 60, num_ranks), num_ranks)


def exchange_and_back(
    bits: float, quantizer: str, gradient_bits: float
) -> tuple[Tensor, Tensor, int]:
    """Extended rows, the gradient of owned rows for a known cotangent, and bytes sent."""
    from datetime import timedelta

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    transport = connect(dist.new_group(), timeout=timedelta(seconds=30))
    shard = shards(num_ranks)[rank]
    halo = Halo(transport, choose(bits, quantizer), choose(gradient_bits), seed=5)
    x = shard.node["x"].clone().requires_grad_()
    with halo.using(shard, epoch=2):
        (extended,) = halo.append(x)
        (extended * cotangent(shard)).sum().backward()
    assert x.grad is not None
    sent = sum(transport.bytes_sent)
    transport.close()
    return extended.detach(), x.grad, sent


def cotangent(shard: Shard) -> Tensor:
    """A row per row of the part: different for every rank that holds the node."""
    ids = torch.cat([shard.node_id, shard.halo_id])
    draw = torch.Generator().manual_seed(11 + shard.plan.rank)
    return torch.randn(60, WIDTH, generator=draw)[ids]


def coded(code: Quantizer, rows: Tensor, ids: Tensor, direction: int, shard: Shard) -> Tensor:
    """`rows` as a receiver reads them, by the route's own noise."""
    route = Route(Loopback(), shard.plan, RowIds(shard), code, code, (5, 2, 1), "")
    noise = Noise((route.back() if direction else route.out())._noise(0, 0).key, ids)
    message = torch.zeros(rows.shape[0], code.row_bytes(rows), dtype=torch.uint8)
    code.quantize(rows.contiguous(), None, noise, message, 0)
    out = torch.empty_like(rows)
    code.dequantize(message, 0, noise, out)
    return out


@pytest.mark.parametrize(
    ("num_ranks", "bits", "quantizer", "gradient_bits"),
    [
        (2, 1, "minmax", 1),
        (4, 1, "rotated", 2),
        (3, 8, "auto", 16),
        (2, 32, "auto", 1),
        (3, 0.5, "rotated", 0.5),
        (2, 1, "centroid", 2),
    ],
)
def test_forward_and_backward_equal_the_formula(
    num_ranks: int, bits: float, quantizer: str, gradient_bits: float
) -> None:
    results = run_ranks(exchange_and_back, num_ranks, bits, quantizer, gradient_bits)
    parts, x = shards(num_ranks), graph().node["x"]
    code, gradient_code = choose(bits, quantizer), choose(gradient_bits)
    total = torch.zeros(60, WIDTH)
    for shard, (extended, _, sent) in zip(parts, results, strict=True):
        owned = shard.plan.num_owned
        assert torch.equal(extended[:owned], x[shard.node_id])
        assert torch.equal(extended[owned:], coded(code, x[shard.halo_id], shard.halo_id, 0, shard))
        rows = cotangent(shard)
        total[shard.node_id] += rows[:owned]
        ids = shard.halo_id * num_ranks + shard.plan.rank
        total[shard.halo_id] += coded(gradient_code, rows[owned:], ids, 1, shard)
        bytes_ = shard.plan.num_sent * code.row_bytes(x)
        assert sent == bytes_ + shard.plan.num_halo * gradient_code.row_bytes(x)
    for shard, (_, gradient, _) in zip(parts, results, strict=True):
        torch.testing.assert_close(gradient, total[shard.node_id], rtol=1e-6, atol=1e-6)


def test_noise_changes_with_the_epoch_and_not_with_the_reader() -> None:
    def body(transport: object) -> list[Tensor]:
        halo = Halo(transport, choose(1), seed=1)  # type: ignore[arg-type]
        shard = shards(3)[halo.transport.rank]
        found = []
        for epoch in (0, 0, 1):
            with halo.using(shard, epoch=epoch):
                found.append(halo.append(shard.node["x"])[0][shard.plan.num_owned :])
        return found

    parts, results = shards(3), run_threads(body, 3)
    seen: dict[int, Tensor] = {}
    for shard, (first, again, other) in zip(parts, results, strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        for node, row in zip(shard.halo_id.tolist(), first, strict=True):
            assert torch.equal(seen.setdefault(node, row), row)


def test_exact_exchanges_are_exact() -> None:
    def body(transport: object) -> bool:
        halo = Halo(transport, choose(1))  # type: ignore[arg-type]
        shard = shards(2)[halo.transport.rank]
        with halo.using(shard, exact=True):
            (extended,) = halo.append(shard.node["x"])
        with halo.using(shard):
            (also,) = halo.append(shard.node["x"], exact=True)
        expected = graph().node["x"][torch.cat([shard.node_id, shard.halo_id])]
        return torch.equal(extended, expected) and torch.equal(also, expected)

    assert run_threads(body, 2) == [True, True]


def test_a_row_that_is_not_finite_is_told_with_layer_rank_and_node() -> None:
    def body(transport: object) -> None:
        halo = Halo(transport, choose(1))  # type: ignore[arg-type]
        shard = shards(2)[halo.transport.rank]
        x = shard.node["x"].clone()
        if halo.transport.rank == 1:
            node = shard.plan.send_index[4]
            x[node, 3] = float("nan")
        with halo.using(shard):
            halo.append(x, name="convs.1 (GCNConv)")

    node = int(shards(2)[1].node_id[shards(2)[1].plan.send_index[4]])
    with pytest.raises(
        ValueError, match=rf"convs.1 \(GCNConv\): the row of node {node} that rank 1"
    ):
        run_threads(body, 2)


def test_rows_of_a_spent_graph_are_moved_anew() -> None:
    """Two forwards of one tensor with a backward between them, as in manual optimisation."""

    def body(transport: object) -> int:
        halo = Halo(transport)  # type: ignore[arg-type]
        shard = shards(2)[halo.transport.rank]
        x, constant = shard.node["x"].clone().requires_grad_(), shard.node["x"] + 1
        with halo.using(shard):
            for _ in range(2):
                extended, fixed = halo.append(x, constant)
                assert not fixed.requires_grad
                (extended * fixed).sum().backward()
        return halo.transport.num_exchanges

    assert run_threads(body, 2) == [4, 4]
