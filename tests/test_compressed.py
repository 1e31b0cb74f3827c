"""The coded sum: the same on all ranks, its bytes known, its errors made good later."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import Parameter

from lightning_sylvie.all_reduce import Compressed
from lightning_sylvie.gradient import GradientReducer, GradientSum
from lightning_sylvie.quantizer import Rotated, choose
from lightning_sylvie.transport import Transport, connect
from lightning_sylvie.transport.threads import run_threads

LIMIT = timedelta(seconds=30)
CODES = {16: choose(16), 1: choose(1, Rotated(unbiased=False))}


def part_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def sum_repeatedly(
    bits: int, num_ranks: int, size: int, calls: int
) -> list[tuple[list[Tensor], int, int]]:
    """Of each rank: the sums of the same parts in several calls, bytes by formula, bytes sent."""

    def body(transport: Transport) -> tuple[list[Tensor], int, int]:
        compressed = Compressed(CODES[bits], size, transport)
        sums = []
        for _ in range(calls):
            sums.append(part_of(transport.rank, size))
            compressed(sums[-1])
        return sums, compressed.num_bytes, sum(transport.bytes_sent)

    return run_threads(body, num_ranks)


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 1), (3, 50), (2, 4096), (4, 10_000), (8, 999)])
@pytest.mark.parametrize("bits", [16, 1])
def test_all_ranks_get_the_same_sum_at_known_bytes(bits: int, num_ranks: int, size: int) -> None:
    results = sum_repeatedly(bits, num_ranks, size, 2)
    for sums, num_bytes, sent in results:
        assert sent == 2 * num_bytes
        assert all(
            torch.equal(found, first) for found, first in zip(sums, results[0][0], strict=True)
        )
    exact = sum(part_of(rank, size) for rank in range(num_ranks))
    tolerance = 0.01 if bits == 16 or size == 1 else 0.9
    assert (results[0][0][0] - exact).norm() <= tolerance * num_ranks**0.5 * exact.norm()


def test_a_large_sum_costs_its_bits() -> None:
    """2(N-1)/N of the data, at 1 bit, and a scale for every 256 values and a mean for every row."""
    ((_, num_bytes, _), *_) = sum_repeatedly(1, 4, 2**16, 1)
    values = 2 * 3 / 4 * 2**16
    assert values / 8 < num_bytes < 1.1 * values / 8 + values / 256 * 2
    ((_, num_bytes, _), *_) = sum_repeatedly(16, 4, 2**16, 1)
    assert num_bytes == 2 * values


def test_what_a_call_loses_comes_later() -> None:
    """The error of all sums so far does not grow: it is what the last calls have lost."""
    size, num_ranks = 5000, 3
    sums = torch.stack(sum_repeatedly(1, num_ranks, size, 60)[0][0])
    exact = sum(part_of(rank, size) for rank in range(num_ranks))
    steps = torch.arange(1, 61)[:, None]
    errors = (sums.cumsum(0) - steps * exact).norm(dim=1) / exact.norm()
    assert errors[0] > 0.3  # one call alone is coarse
    assert errors[30:].max() < 1.5 * errors[10:30].max()
    assert errors[-1] / 60 < 0.1


def descend(bits: int) -> list[Tensor]:
    """Least squares, the rows shared out: a bucket of each precision."""
    transport = connect(dist.new_group(timeout=LIMIT), timeout=LIMIT)
    weight, wide = Parameter(torch.zeros(60, 2)), Parameter(torch.zeros(3, dtype=torch.float64))
    unused = Parameter(torch.zeros(4))
    way = GradientSum(bits=bits)
    reducer = GradientReducer([weight, wide, unused], transport, way)
    x, y = part_of(transport.rank, 12_000).view(200, 60), part_of(9, 120).view(60, 2)
    for _ in range(150):
        weight.grad = wide.grad = None
        with reducer.overlapping():
            loss = (x @ weight - x @ y).pow(2).mean() / transport.num_ranks
            (loss + (wide - 1).pow(2).sum()).backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            wide -= 0.1 * wide.grad / transport.num_ranks
    assert unused.grad is None
    transport.close()
    return [weight.detach() - y, wide.detach() - 1]


@pytest.mark.parametrize("bits", [16, 1])
def test_training_reaches_the_minimum(bits: int) -> None:
    results = run_ranks(descend, 2, bits)
    for (weight, wide), (first, _) in [(result, results[0]) for result in results]:
        assert torch.equal(weight, first)
        assert weight.abs().max() < 0.02
        assert wide.abs().max() < 1e-12


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected bits of gradient sums in \(1, 16, 32\), got 8"):
        GradientSum(bits=8)
    with pytest.raises(ValueError, match="expected bucket_bytes of at least 1, got 0"):
        GradientSum(bucket_bytes=0)
