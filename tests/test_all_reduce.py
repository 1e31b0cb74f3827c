"""Every algorithm gives the sum, the same bits on all ranks, at the textbook's cost."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import rank_outcomes, run_ranks
from torch import Tensor

from lightning_sylvie.all_reduce import ALGORITHMS, AllReduce, choose
from lightning_sylvie.all_reduce.ring import Ring
from lightning_sylvie.transport import AllToAll, Loopback, PointToPoint, Transport, connect
from lightning_sylvie.transport.threads import run_threads

NAMES = sorted(ALGORITHMS)
LIMIT = timedelta(seconds=30)
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(-(2**62), 2**62, shape, generator=generator).to(dtype)


def sum_in_threads(
    algorithm: AllReduce, parts: list[Tensor]
) -> list[tuple[Tensor, int, int, list[int]]]:
    """Of each rank: the sum, its steps, the bytes it sent, the bytes that it received from each."""

    def body(transport: Transport) -> tuple[Tensor, int, int, list[int]]:
        value = parts[transport.rank].clone()
        algorithm(value, transport)
        return value, transport.num_steps, sum(transport.bytes_sent), transport.bytes_received

    return run_threads(body, len(parts))


@settings(max_examples=60)
@given(
    algorithm=st.sampled_from([*ALGORITHMS.values(), Ring(1), Ring(3)]),
    num_ranks=st.integers(1, 8),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    dtype=st.sampled_from([*INTEGERS, *FLOATS, torch.complex64]),
    seed=st.integers(0, 1000),
)
def test_all_ranks_get_the_sum(
    algorithm: AllReduce, num_ranks: int, shape: Any, dtype: torch.dtype, seed: int
) -> None:
    parts = [part_of(rank, shape, dtype, seed) for rank in range(num_ranks)]
    results = sum_in_threads(algorithm, parts)
    assert all(torch.equal(value, results[0][0]) for value, *_ in results)
    if dtype in INTEGERS:
        assert torch.equal(results[0][0], torch.stack(parts).sum(0).to(dtype))  # modulo 2^bits
        return
    expected = torch.stack(parts).to(torch.complex128 if dtype.is_complex else torch.float64).sum(0)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(
        results[0][0].to(expected.dtype), expected, rtol=tolerance, atol=tolerance
    )


def test_half_precision_is_summed_in_float32() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    for name in NAMES:
        if name != "auto":  # 256 + 1 is 256 in bfloat16
            assert sum_in_threads(choose(name), parts)[0][0].item() == 258.0


# What the algorithms cost, from the textbook: K values, N ranks, p the power of two below N.


def textbook(name: str, size: int, rank: int, num_ranks: int) -> tuple[int, float]:
    """Steps, and values that the rank sends; for a size that N and p divide."""
    power = 2 ** int(math.log2(num_ranks))
    rounds, extra = int(math.log2(power)), num_ranks - power
    outside, helps = rank < 2 * extra and rank % 2 == 0, rank < 2 * extra and rank % 2 == 1
    among = {"recursive_doubling": rounds, "rabenseifner": 2 * (power - 1) / power}
    if name == "ring":
        return 2 * (num_ranks - 1), 2 * (num_ranks - 1) / num_ranks * size
    if name == "linear":
        return 2 * (num_ranks - 1), size * (1 if rank else num_ranks - 1)
    if name == "nonoverlapping":
        levels = math.ceil(math.log2(num_ranks))
        zeros = range(levels if rank == 0 else (rank & -rank).bit_length() - 1)
        children = sum(rank + 2**level < num_ranks for level in zeros)
        return 2 * levels, size * (children + (rank > 0))
    steps = (rounds if name == "recursive_doubling" else 2 * rounds) + 2 * (extra > 0)
    return steps, size * (1 if outside else helps + among[name])


@pytest.mark.parametrize("name", sorted({*NAMES} - {"auto", "segmented_ring"}))
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_bytes_and_steps_are_the_textbooks(name: str, num_ranks: int) -> None:
    size = 840
    algorithm = choose(name)
    results = sum_in_threads(algorithm, [torch.ones(size)] * num_ranks)
    for rank, (_, steps, sent, _) in enumerate(results):
        assert (steps, sent / 4) == textbook(name, size, rank, num_ranks)
        assert sent == 4 * algorithm.values_sent(size, rank, num_ranks)
        assert steps == len(algorithm.path(size, num_ranks))


@settings(max_examples=30)
@given(
    algorithm=st.sampled_from([*(choose(name) for name in NAMES if name != "auto"), Ring(5)]),
    num_ranks=st.integers(2, 8),
    size=st.integers(1, 100),
)
def test_the_cost_is_known_to_the_byte_for_any_size(
    algorithm: AllReduce, num_ranks: int, size: int
) -> None:
    results = sum_in_threads(algorithm, [torch.ones(size, dtype=torch.int16)] * num_ranks)
    for rank, (_, steps, sent, _) in enumerate(results):
        assert sent == 2 * algorithm.values_sent(size, rank, num_ranks)
        assert steps == len(algorithm.path(size, num_ranks))
        assert sum(algorithm.path(size, num_ranks)) >= algorithm.values_sent(size, rank, num_ranks)
    received = torch.tensor([from_each for *_, from_each in results])
    assert int(received.sum()) == sum(sent for _, _, sent, _ in results)


def test_segments_move_what_a_ring_moves_in_more_steps() -> None:
    for rank in range(4):
        assert Ring(10).values_sent(840, rank, 4) == Ring().values_sent(840, rank, 4) == 1260
    assert Ring(10).path(840, 4) == [10] * (6 * 21)
    assert Ring(11).path(840, 4) == [11] * (6 * 20)


# Real processes


def sum_everything(kind: type[PointToPoint] | type[AllToAll]) -> None:
    group = dist.new_group(timeout=LIMIT)
    alone = dist.get_world_size() == 1
    transport = connect(group, timeout=LIMIT) if alone else kind(group, timeout=LIMIT)
    for algorithm in [*ALGORITHMS.values(), Ring(700)]:
        for size in (1, 3, 1000, 50_003):
            for dtype in (torch.float32, torch.float64, torch.int64):
                value = part_of(transport.rank, (size,), dtype, size)
                expected = value.clone()
                dist.all_reduce(expected)
                algorithm(value, transport)
                tolerance = 0 if dtype == torch.int64 else 1e-12 if dtype.itemsize == 8 else 1e-5
                torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
                first = value.clone()
                dist.broadcast(first, 0)
                assert torch.equal(value, first)
    strided = torch.arange(12.0).view(3, 4).t()[1:] * (transport.rank + 1)
    choose("rabenseifner")(strided, transport)
    total = sum(range(1, transport.num_ranks + 1))
    assert torch.equal(strided, torch.arange(12.0).view(3, 4).t()[1:] * total)
    transport.close()


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [(1, PointToPoint), (2, PointToPoint), (3, PointToPoint), (5, PointToPoint), (3, AllToAll)],
)
def test_real_ranks_get_what_the_backend_gives(
    num_ranks: int, kind: type[PointToPoint] | type[AllToAll]
) -> None:
    """`AllToAll` is NCCL's transport, here on gloo: steps are exchanges between two ranks."""
    run_ranks(sum_everything, num_ranks, kind)


def fail_in_a_sum(name: str) -> None:
    transport = connect(dist.new_group(timeout=LIMIT), timeout=LIMIT)
    try:
        for step in range(100):
            if step == 3 and transport.rank == 1:
                raise ValueError("no more")
            choose(name)(torch.ones(10_000), transport)
    except BaseException as error:
        transport.report_failure(error)
        raise


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_raises_ends_a_sum_on_all(name: str) -> None:
    for outcome in rank_outcomes(fail_in_a_sum, 3, name, timeout=40):
        assert outcome.seconds < 8, outcome
        expected = "ValueError: no more" if outcome.rank == 1 else "PeerError: rank 1 failed"
        assert outcome.error is not None
        assert expected in outcome.error


def test_unknown_names_and_booleans_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected all_reduce in \('auto', 'ring', .*got 'star'"):
        choose("star")
    with pytest.raises(TypeError, match=r"expected numbers to sum, got torch\.bool"):
        choose("ring")(torch.ones(2, dtype=torch.bool), Loopback())
