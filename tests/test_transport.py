"""Messages arrive whole and at the right rank, bytes are counted, and no failure hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks
from torch import Tensor

from lightning_sylvie.transport import (
    AllToAll,
    Loopback,
    PeerError,
    PointToPoint,
    Transport,
    check_signature,
    connect,
)

LIMIT = timedelta(seconds=30)
KINDS = [PointToPoint, AllToAll]


def open_transport(
    kind: type[PointToPoint] | type[AllToAll] | None = None, limit: timedelta = LIMIT
) -> Transport:
    if kind is None or dist.get_world_size() == 1:
        return connect(dist.new_group(timeout=limit), timeout=limit)
    return kind(dist.new_group(timeout=limit), timeout=limit)


# A plain model of an exchange: counts[i][j] rows go from rank i to rank j, and row k of them holds
# bytes that only this row holds.


def random_counts(num_ranks: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [0 if i == j else draw.choice([0, 0, 1, 3, 50, 1000]) for j in range(num_ranks)]
        for i in range(num_ranks)
    ]


def rows_between(sender: int, receiver: int, count: int, stride: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 10007 + sender * 101 + receiver)
    return torch.randint(256, (count, stride), generator=generator, dtype=torch.uint8)


def message_of(rank: int, counts: list[list[int]], stride: int, seed: int) -> Tensor:
    parts = [rows_between(rank, j, n, stride, seed) for j, n in enumerate(counts[rank])]
    return torch.cat(parts)


def arrival_at(rank: int, counts: list[list[int]], stride: int, seed: int) -> Tensor:
    parts = [rows_between(i, rank, row[rank], stride, seed) for i, row in enumerate(counts)]
    return torch.cat(parts)


def column(counts: list[list[int]], rank: int) -> list[int]:
    return [row[rank] for row in counts]


def exchange_randomly(kind: type[PointToPoint] | type[AllToAll]) -> None:
    transport = open_transport(kind)
    rank, num_ranks = transport.rank, transport.num_ranks
    sent, received = [0] * num_ranks, [0] * num_ranks
    for seed in range(8):
        counts, stride = random_counts(num_ranks, seed), [1, 4, 7, 33, 1028, 0, 2, 256][seed]
        arrival = transport.exchange(
            message_of(rank, counts, stride, seed), counts[rank], column(counts, rank)
        )
        assert torch.equal(arrival, arrival_at(rank, counts, stride, seed))
        for peer in range(num_ranks):
            sent[peer] += counts[rank][peer] * stride
            received[peer] += counts[peer][rank] * stride
    assert transport.num_exchanges == 8
    assert transport.bytes_sent == sent
    assert transport.bytes_received == received
    transport.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_and_their_bytes_are_counted(
    num_ranks: int, kind: type[PointToPoint] | type[AllToAll]
) -> None:
    run_ranks(exchange_randomly, num_ranks, kind)


def exchange_dtypes() -> None:
    transport = open_transport()
    other = 1 - transport.rank
    counts = [5 if peer == other else 0 for peer in range(2)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        rows = [torch.arange(15).reshape(5, 3).mul(rank + 1).to(dtype) for rank in range(2)]
        arrival = transport.exchange(rows[transport.rank].view(torch.uint8), counts, counts)
        assert torch.equal(arrival.view(dtype), rows[other])
    transport.close()


def test_rows_of_any_dtype_travel_as_bytes() -> None:
    run_ranks(exchange_dtypes, 2)


def overlap_exchanges(kind: type[PointToPoint] | type[AllToAll]) -> None:
    transport = open_transport(kind)
    rank = transport.rank
    counts = [random_counts(transport.num_ranks, seed) for seed in range(4)]
    pending = []
    for seed in range(4):
        message = message_of(rank, counts[seed], 9, seed)
        pending.append(transport.start(message, counts[seed][rank], column(counts[seed], rank)))
        del message  # the transport keeps it
    total = torch.ones(3)
    transport.all_reduce(total)
    assert total.tolist() == [transport.num_ranks] * 3
    for seed in [2, 0, 3, 1] if kind is PointToPoint else range(4):
        arrival = pending[seed].wait()
        assert torch.equal(arrival, arrival_at(rank, counts[seed], 9, seed))
        assert pending[seed].wait() is arrival
    transport.close()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_several_exchanges_may_be_under_way(
    num_ranks: int, kind: type[PointToPoint] | type[AllToAll]
) -> None:
    run_ranks(overlap_exchanges, num_ranks, kind)


def drop_pending() -> None:
    transport = open_transport()
    other = 1 - transport.rank
    counts = [100 if peer == other else 0 for peer in range(2)]
    for number in range(20):  # a dropped exchange must not receive into freed memory
        transport.start(torch.full((100, 1000), number, dtype=torch.uint8), counts, counts)
    time.sleep(0.1 * transport.rank)
    last = torch.full((100, 1000), 99, dtype=torch.uint8)
    assert torch.equal(transport.exchange(last, counts, counts), last)
    transport.close()


def test_an_exchange_that_nobody_waits_for_does_no_harm() -> None:
    run_ranks(drop_pending, 2)


def leave_early() -> None:
    transport = open_transport()
    other = 1 - transport.rank
    counts = [1000 if peer == other else 0 for peer in range(2)]
    pending = transport.start(torch.ones(1000, 1000, dtype=torch.uint8), counts, counts)
    time.sleep(0.5 * transport.rank)
    assert bool(pending.wait().eq(1).all())
    transport.close()
    transport.close()
    with pytest.raises(PeerError, match="closed transport"):
        transport.all_reduce(torch.ones(1))


def test_a_rank_may_close_while_another_is_still_reading() -> None:
    run_ranks(leave_early, 2)


def gather_objects(kind: type[PointToPoint] | type[AllToAll]) -> None:
    transport = open_transport(kind)
    rank, num_ranks = transport.rank, transport.num_ranks
    expected = [{"rank": peer, "text": "x" * 1000 * peer} for peer in range(num_ranks)]
    assert transport.all_gather_object(expected[rank]) == expected
    for root in range(num_ranks):
        assert transport.broadcast_object(f"from {rank}", root) == f"from {root}"
    assert (transport.num_exchanges, transport.num_all_reduces) == (0, 0)
    assert transport.bytes_sent == [0] * num_ranks
    transport.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_travel_uncounted(
    num_ranks: int, kind: type[PointToPoint] | type[AllToAll]
) -> None:
    run_ranks(gather_objects, num_ranks, kind)


def all_reduce_noise() -> Tensor:
    transport = open_transport()
    generator = torch.Generator().manual_seed(transport.rank)
    values = torch.randn(10_007, generator=generator)
    transport.all_reduce(values)
    assert transport.num_all_reduces == 1
    transport.close()
    return values


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_reduce_gives_every_rank_the_same_bits(num_ranks: int) -> None:
    values = run_ranks(all_reduce_noise, num_ranks)
    noise = [
        torch.randn(10_007, generator=torch.Generator().manual_seed(rank))
        for rank in range(num_ranks)
    ]
    torch.testing.assert_close(values[0], torch.stack(noise).sum(0))
    assert all(torch.equal(value, values[0]) for value in values)


def compare_signatures(equal: bool) -> str:
    transport = open_transport()
    signature = "slot 3: (5, 16) float32"
    if not equal and transport.rank == 1:
        signature = "slot 3: (5, 8) float32"
    try:
        check_signature(transport, signature)
    except RuntimeError as error:
        return str(error)
    finally:
        transport.close()
    return "equal"


def test_signatures_that_differ_are_named_with_their_ranks() -> None:
    assert run_ranks(compare_signatures, 2, True) == ["equal"] * 2
    messages = run_ranks(compare_signatures, 3, False)
    assert all("rank 0, 2: slot 3: (5, 16) float32" in message for message in messages)
    assert all("rank 1: slot 3: (5, 8) float32" in message for message in messages)


def test_one_process_talks_to_nobody() -> None:
    transport = connect(None, timeout=LIMIT)
    assert isinstance(transport, Loopback)
    arrival = transport.exchange(torch.empty(0, 12, dtype=torch.uint8), [0], [0])
    assert arrival.shape == (0, 12)
    value = torch.ones(2)
    transport.all_reduce(value)
    assert value.tolist() == [1, 1]
    assert transport.broadcast_object("x", 0) == "x"
    check_signature(transport, "alone")
    transport.report_failure(ValueError("nobody hears"))
    transport.close()


@pytest.mark.parametrize(
    ("message", "send", "recv", "error"),
    [
        (torch.zeros(2, 3, dtype=torch.uint8), [2, 0], [0, 0], "expected 1 send and receive"),
        (torch.zeros(2, 3, dtype=torch.uint8), [2], [0], "must not exchange rows with itself"),
        (torch.zeros(2, 3, dtype=torch.uint8), [0], [0], r"sum\(send_counts\) = 0 rows, got 2"),
        (torch.zeros(0, 3), [0], [0], "uint8 message .* got torch.float32"),
        (torch.zeros(0, dtype=torch.uint8), [0], [0], r"of shape \(0,\)"),
    ],
)
def test_a_message_that_contradicts_its_counts_is_refused(
    message: Tensor, send: list[int], recv: list[int], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Loopback().start(message, send, recv)


def connect_without_group() -> None:
    with pytest.raises(ValueError, match="expected a group for 2 ranks"):
        connect(None, timeout=LIMIT)


def test_several_ranks_need_a_group() -> None:
    run_ranks(connect_without_group, 2)


# Failures. Ranks exchange and reduce in a loop as training does; then the last but one rank (or
# rank 0) fails in some way. All others must end with an error that names it, long before their
# time limit except where only the limit can tell.


def fail(way: str, victim: int, seconds: float, first_call: str) -> None:
    limit = timedelta(seconds=seconds)
    transport = open_transport(limit=limit)
    rank, num_ranks = transport.rank, transport.num_ranks
    counts = [0 if peer == rank else 1000 for peer in range(num_ranks)]
    message = torch.ones(sum(counts), 100, dtype=torch.uint8)
    try:
        for step in range(1000):
            if step == 3 and rank == victim:
                held = transport.start(message, counts, counts) if way == "raise" else None
                strike(way)
                assert held is None
            if first_call == "all_reduce":
                transport.all_reduce(torch.ones(1000))
            transport.exchange(message, counts, counts)
            transport.all_reduce(torch.ones(1000))
    except BaseException as exception:
        transport.report_failure(exception)
        raise
    finally:
        transport.close()


def strike(way: str) -> None:
    if way == "raise":
        time.sleep(0.2)
        raise ValueError("the victim's own mistake\nwith a second line")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "sleep":
        time.sleep(3600)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("first_call", ["exchange", "all_reduce"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("place", ["rank 0", "last but one"])
def test_a_rank_that_raises_ends_the_others_at_once(
    num_ranks: int, place: str, first_call: str
) -> None:
    victim = 0 if place == "rank 0" else num_ranks - 1 - (num_ranks > 2)
    outcomes = rank_outcomes(fail, num_ranks, "raise", victim, 20.0, first_call, timeout=40)
    for outcome in outcomes:
        assert outcome.reported, outcome
        assert outcome.seconds < 5, outcome
        assert outcome.error is not None
        if outcome.rank == victim:
            assert outcome.error.rstrip().endswith("with a second line")
        else:
            expected = f"PeerError: rank {victim} failed: ValueError: the victim's own mistake ("
            assert expected in outcome.error


@pytest.mark.parametrize("first_call", ["exchange", "all_reduce"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("place", ["rank 0", "last but one"])
def test_a_killed_rank_ends_the_others_at_once(num_ranks: int, place: str, first_call: str) -> None:
    victim = 0 if place == "rank 0" else num_ranks - 1 - (num_ranks > 2)
    outcomes = rank_outcomes(fail, num_ranks, "kill", victim, 20.0, first_call, timeout=40)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.seconds < 8, outcome
        if outcome.rank == victim:
            assert outcome.error == "killed by SIGKILL"
        else:
            assert f"PeerError: rank {victim}" in outcome.error


@pytest.mark.parametrize("first_call", ["exchange", "all_reduce"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("place", ["rank 0", "last but one"])
def test_a_rank_that_hangs_is_named_after_the_timeout(
    num_ranks: int, place: str, first_call: str
) -> None:
    victim = 0 if place == "rank 0" else num_ranks - 1 - (num_ranks > 2)
    way = "stop" if first_call == "exchange" else "sleep"  # a stopped rank 0 serves no store
    args = (way, victim, 2.0, first_call)
    outcomes = rank_outcomes(fail, num_ranks, *args, timeout=30, num_hung=1)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert not outcome.reported
            continue
        assert outcome.reported, outcome
        assert 1.9 < outcome.seconds < 8
        assert outcome.error is not None
        assert f"PeerError: rank {victim}" in outcome.error


def come_late() -> None:
    transport = open_transport(limit=timedelta(seconds=1))
    try:
        time.sleep(2.5 * transport.rank)
        transport.all_reduce(torch.ones(1))
    except BaseException as exception:
        transport.report_failure(exception)
        raise


def test_a_rank_that_comes_too_late_learns_that_it_was_given_up() -> None:
    on_time, late = rank_outcomes(come_late, 2, timeout=20)
    assert "PeerError: rank 1 did not answer within 0:00:01" in str(on_time.error)
    assert "PeerError: the other ranks gave rank 1 up after 0:00:01" in str(late.error)


def fail_twice() -> None:
    transport = open_transport()
    if transport.rank == 2:
        transport.report_failure(KeyError("first"))
        raise KeyError("first")
    with pytest.raises(PeerError) as caught:
        transport.all_reduce(torch.ones(1))
    assert caught.value.rank == 2
    transport.report_failure(caught.value)
    raise caught.value


def test_the_first_reason_stays_and_is_read_by_all() -> None:
    outcomes = rank_outcomes(fail_twice, 3, timeout=20)
    for outcome in outcomes[:2]:
        assert "rank 2 failed: KeyError: 'first'" in str(outcome.error)


def find_echo() -> str:
    """A connection of another group breaks: that is no reason of its own."""
    transport = open_transport()
    if transport.rank == 1:
        transport.report_failure(RuntimeError("[x/pair.cc:5] Connection closed by peer [::1]:2."))
        return ""
    try:
        transport.all_reduce(torch.ones(1))
    except PeerError as error:
        return str(error)
    return "no error"


def test_an_echo_is_not_taken_for_the_reason() -> None:
    message, _ = run_ranks(find_echo, 2)
    assert message.startswith("rank 1 ended or lost its connection and left no reason")
