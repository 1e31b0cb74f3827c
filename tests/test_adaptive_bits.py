"""Bits that differ from row to row: how they are shared out, what they cost, and what they save."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hubs import CHOICES, ERRORS, NUM_NODES, shards, shared_out
from torch import Tensor
from torch_geometric.nn import GraphSAGE
from trainers import (
    NUM_CLASSES,
    NUM_FEATURES,
    OnRanks,
    Setting,
    UserModule,
    loader,
    small_graph,
)

from lightning_sylvie import AdaptiveBits, SylvieStrategy
from lightning_sylvie.describe import row_bytes
from lightning_sylvie.exchange import Halo
from lightning_sylvie.quantizer import MinMax, Noise, Rotated, allocate, choose
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads

# How bits are shared out


def loss(weights: Sequence[float], bits: Sequence[float]) -> float:
    return math.fsum(w * 0.25 / (2**b - 1) ** 2 for w, b in zip(weights, bits, strict=True))


@pytest.mark.parametrize("average", [1, 1.5, 2, 2.6, 4, 7.9, 8])
def test_no_allocation_loses_less_by_more_than_one_step(average: float) -> None:
    """Against all 4**6 allocations: none of as many bits, and hardly one within the average."""
    draw, num_rows = torch.Generator().manual_seed(int(average * 10)), 6
    everything = list(itertools.product(CHOICES, repeat=num_rows))
    for sharpness in (0.5, 2.0, 5.0):
        noise = torch.randn(num_rows, dtype=torch.float64, generator=draw)
        weights = (sharpness * noise).exp()
        numbers, next_gain = shared_out(weights.tolist(), average)
        assert allocate(weights, ERRORS, CHOICES, average).tolist() == numbers
        found = [CHOICES[number] for number in numbers]
        assert sum(found) <= average * num_rows
        within = [each for each in everything if sum(each) <= average * num_rows]
        of_as_many = [each for each in within if sum(each) <= sum(found)]
        lost = loss(weights.tolist(), found)
        assert lost <= (1 + 1e-12) * min(loss(weights.tolist(), each) for each in of_as_many)
        best = min(loss(weights.tolist(), each) for each in within)
        assert lost - best <= next_gain * (1 + 1e-12)


@pytest.mark.parametrize("average", [1, 1.25, 2, 3.3, 5, 8])
def test_the_average_is_kept_and_used_up(average: float) -> None:
    draw = torch.Generator().manual_seed(0)
    for num_rows in (0, 1, 2, 7, 1000):
        for weights in (
            torch.rand(num_rows, dtype=torch.float64, generator=draw),
            torch.rand(num_rows, dtype=torch.float64, generator=draw).mul(100).exp(),
            torch.full((num_rows,), 1e-300, dtype=torch.float64),
            torch.zeros(num_rows, dtype=torch.float64),
        ):
            numbers = allocate(weights, ERRORS, CHOICES, average)
            assert numbers.shape == (num_rows,)
            bits = torch.tensor(CHOICES)[numbers].sum()
            assert average * num_rows - 4 < bits <= average * num_rows + 1e-9 or num_rows == 0


def test_bits_follow_the_logarithm_of_the_weight() -> None:
    """The staircase of reverse water-filling: half a bit for each factor of 2, within a step."""
    weights = torch.logspace(-3, 3, 3001, dtype=torch.float64)
    bits = torch.tensor(CHOICES)[allocate(weights, ERRORS, CHOICES, 4)].double()
    assert bool((bits.diff() >= 0).all())
    smooth = (4 + 0.5 * (weights / weights.log().mean().exp()).log2()).clamp(1, 8)
    assert float((bits - smooth).abs().max()) < 4.0
    assert float((bits - smooth).mean()) == pytest.approx(0.0, abs=0.3)


def test_equal_rows_are_told_apart_by_their_order() -> None:
    numbers = allocate(torch.ones(8, dtype=torch.float64), ERRORS, CHOICES, 1.5)
    assert numbers.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


# What it is worth


def sized_rows(seed: int, spread: float) -> Tensor:
    """A row for every node, whose logarithmic size has this spread."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randn(NUM_NODES, 1, generator=draw).mul(spread).exp()
    return sizes * torch.randn(NUM_NODES, 64, generator=draw)


def errors(
    bits: Any, seed: int, num_epochs: int, *, quantizer: str = "auto", spread: float = 0.0
) -> tuple[float, Tensor, int]:
    """Mean squared error of the sums over in-edges on two ranks, the halo rows of all epochs on
    rank 0, and the bytes sent in the last one."""
    x = sized_rows(seed, spread)

    def body(transport: Transport) -> Any:
        shard = shards(2)[transport.rank]
        halo, total, rows = Halo(transport, choose(bits, quantizer), seed=seed), 0.0, []
        exact = x[torch.cat([shard.node_id, shard.halo_id])]
        source, target = shard.edge_index
        for epoch in range(num_epochs):
            before = sum(transport.bytes_sent)
            with halo.using(shard, epoch=epoch):
                (extended,) = halo.append(x[shard.node_id])
            lost = torch.zeros(shard.plan.num_owned, x.shape[1])
            lost.index_add_(0, target, (extended - exact)[source])
            total += float(lost.square().mean()) / num_epochs
            rows.append(extended[shard.plan.num_owned :])
        return total, torch.stack(rows), sum(transport.bytes_sent) - before

    (first, rows, sent), (second, _, also_sent) = run_threads(body, 2)
    return first + second, rows, sent + also_sent


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("spread", "refresh_every", "quantizer", "choices", "average"),
    [
        (0.0, None, "minmax", CHOICES, 2),  # degrees alone: 0.49 to 0.59 of the error
        (1.0, 4, "minmax", CHOICES, 2),
        (1.0, 4, "minmax", CHOICES, 4),
        (1.0, 4, "rotated", (0.5, 1, 2), 1),
        (0.0, None, "auto", CHOICES, 2),
        (1.0, 4, "auto", CHOICES, 2),
    ],
)
def test_sums_lose_less_than_with_equal_bits_and_no_more_bytes(
    spread: float,
    refresh_every: int | None,
    quantizer: str,
    choices: tuple[float, ...],
    average: float,
    seed: int,
) -> None:
    bits = AdaptiveBits(average, refresh_every, choices)
    adaptive, _, sent = errors(bits, seed, 40, quantizer=quantizer, spread=spread)
    equal, _, also_sent = errors(average, seed, 40, quantizer=quantizer, spread=spread)
    assert adaptive < 0.7 * equal
    assert sent <= also_sent


@pytest.mark.parametrize("width", [16, 31, 40, 64, 256, 300, 512])
@pytest.mark.parametrize(
    ("kind", "bits"),
    [(Rotated, 0.5), (Rotated, 1), (Rotated, 2), (MinMax, 1), (MinMax, 4), (MinMax, 8)],
)
def test_a_record_tells_what_its_rows_error_is_relative_to(
    kind: type[Rotated | MinMax], bits: float, width: int
) -> None:
    """In one unit for all codes: the energy of a normal row around its mean."""
    draw, num_rows = torch.Generator().manual_seed(0), 400
    sizes = torch.logspace(-3, 3, num_rows)[:, None]
    rows = 5 + sizes * torch.randn(num_rows, width, generator=draw)
    code, noise = kind(bits), Noise(7, torch.arange(num_rows))
    message = torch.zeros(num_rows, 3 + code.row_bytes(rows), dtype=torch.uint8)
    code.quantize(rows, None, noise, message, 3)
    decoded = torch.empty_like(rows)
    code.dequantize(message, 3, noise, decoded)
    spread = code.spread(message, 3, rows)
    assert spread is not None
    lost = (decoded - rows).double().square().sum(1)
    if kind is MinMax:
        assert bool((lost <= 4 * code.relative_error * spread * (1 + 1e-5)).all())
        ranges = rows.amax(1) - rows.amin(1)
        low, high = (1.0, 1.05) if width >= 32 else (1.0, 4.0)
        told = (spread * 32 / width).sqrt() / ranges
        far = sizes[:, 0] > 1  # where 5 itself needs no room
        assert low - 1e-5 <= float(told[far].min()) <= float(told[far].max()) <= high
    elif width >= 32:
        energy = (rows - rows.mean(1, keepdim=True)).double().square().sum(1)
        assert float((spread / energy).mean()) == pytest.approx(1.0, abs=0.15)
        assert float((lost / energy).mean()) == pytest.approx(code.relative_error, rel=0.15)


def test_decoded_rows_are_right_on_average_and_each_within_its_bound() -> None:
    num_epochs = 600
    bits = AdaptiveBits(2, refresh_every=3)
    _, rows, _ = errors(bits, 0, num_epochs, quantizer="minmax", spread=1.0)
    shard, x = shards(2)[0], sized_rows(0, 1.0)
    exact = x[shard.halo_id]
    ranges = (exact.amax(1) - exact.amin(1))[:, None]
    spread = rows.std(0).maximum(0.05 * ranges)  # a row's least value is hardly ever rounded up
    assert float(((rows.mean(0) - exact).abs() / spread).max()) < 5.0 / num_epochs**0.5
    halo = torch.arange(shard.plan.num_owned, shard.plan.num_rows)
    degrees = (shard.edge_index[0] == halo[:, None]).sum(1)
    numbers, _ = shared_out((degrees * ranges[:, 0].double() ** 2).tolist(), 2)
    assert len(set(numbers)) >= 3
    scales = ranges / (2 ** torch.tensor(CHOICES)[numbers] - 1)[:, None]
    worst = ((rows[1:] - exact).abs() / scales).amax((0, 2))
    # A scale may tell a range some percents too large, and so move a row or two of equal weight.
    assert int((worst > 1.05).sum()) <= 2


# Training


class Wide(UserModule):
    def __init__(self) -> None:
        super().__init__(small_gnn_of(32))


def small_gnn_of(hidden: int) -> GraphSAGE:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GraphSAGE(NUM_FEATURES, hidden, num_layers=3, out_channels=NUM_CLASSES)


def accuracies(setting: Setting) -> list[tuple[float, float]]:
    """Of validation, at full precision and at 1.5 bits on average, in each mode."""
    bits, data = AdaptiveBits(1.5, refresh_every=5), small_graph(num_nodes=600)
    draw = torch.Generator().manual_seed(0)
    data.x += 4 * torch.randn(data.x.shape, generator=draw, dtype=torch.float64)

    def accuracy(**strategy: Any) -> float:
        trainer = setting.trainer(strategy=strategy, max_epochs=20)
        trainer.fit(Wide(), loader(data), loader(data))
        return float(trainer.callback_metrics["val_acc"])

    return [(accuracy(bits=32, mode=m), accuracy(bits=bits, mode=m)) for m in ("sync", "async")]


def test_training_reaches_the_accuracy_of_full_precision() -> None:
    for pairs in OnRanks(accuracies)(accuracies, 2):
        for full, adaptive in pairs:
            assert 0.8 < full < 1.0
            assert adaptive > full - 0.04


# What is refused, and said


def test_bad_options_say_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"expected an average from 1 to 8 bits.*got 0.5"):
        AdaptiveBits(0.5)
    with pytest.raises(ValueError, match=r"expected an average from 2 to 4 bits.*got 5"):
        AdaptiveBits(5, choices=(2, 4))
    for choices in ((), (2,), (4, 2), (1, 1, 2), (1, 3), (1, 16)):
        with pytest.raises(ValueError, match=r"expected two or more choices of \(0.5, 1, .*8\)"):
            AdaptiveBits(1, choices=choices)
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="expected refresh_every of 1 or more epochs"):
            AdaptiveBits(refresh_every=every)  # type: ignore[arg-type]
    for quantizer in ("centroid", "best", MinMax(2)):
        with pytest.raises(ValueError, match=r"expected quantizer in \('minmax', .* with Adapt"):
            SylvieStrategy(bits=AdaptiveBits(), quantizer=quantizer)
    with pytest.raises(ValueError, match=r"expected choices of \(0.5, 1, 2\) with .*'rotated'"):
        SylvieStrategy(bits=AdaptiveBits(), quantizer="rotated")
    bits = AdaptiveBits(1, choices=(0.5, 1, 2))
    with pytest.raises(ValueError, match=r"expected choices of \(1, 2, 4, 8\) with .*'minmax'"):
        SylvieStrategy(bits=1, quantizer="minmax", gradient_bits=bits)


def test_the_strategy_tells_its_bits() -> None:
    strategy = SylvieStrategy(bits=AdaptiveBits(3, 10))
    assert "bits=AdaptiveBits(average=3, refresh_every=10, choices=(1, 2, 4, 8))" in repr(strategy)
    assert repr(strategy.gradient_quantizer) == repr(strategy.quantizer)


@pytest.mark.parametrize(("average", "expected"), [(1, 8), (1.5, 12), (2, 16), (3, 24), (8, 64)])
def test_the_bytes_of_a_row_are_those_of_average_bits(average: float, expected: int) -> None:
    assert row_bytes(64, AdaptiveBits(average)) == expected + 4
    assert row_bytes(8, AdaptiveBits(average)) == 16  # narrow rows: 16 bits a value
