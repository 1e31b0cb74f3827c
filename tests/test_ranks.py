"""The helper that all multi-rank tests stand on."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks


def sum_of_ranks(scale: torch.Tensor) -> torch.Tensor:
    value = scale * dist.get_rank()
    dist.all_reduce(value)
    return value


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("one is odd")


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def surroundings() -> tuple[int, str | None, bool]:
    return torch.get_num_threads(), os.environ.get("SYLVIE_TEST"), dist.is_initialized()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_returns_every_ranks_value_and_copies_arguments(num_ranks: int) -> None:
    values = run_ranks(sum_of_ranks, num_ranks, torch.tensor([1.0, 2.0]))
    total = num_ranks * (num_ranks - 1) / 2
    assert [value.tolist() for value in values] == [[total, 2 * total]] * num_ranks


def test_ranks_have_one_thread_and_the_tests_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYLVIE_TEST", "seen")
    assert run_ranks(surroundings, 2) == [(1, "seen", True)] * 2


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0.*ok.*rank 1.*ValueError: one is odd"):
        run_ranks(raise_on_rank_one, 2)


def test_a_killed_rank_is_named_and_the_others_are_ended() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*killed by SIGKILL"):
        run_ranks(die_on_rank_one, 2)
    assert time.monotonic() - start < 10


def test_a_hung_rank_shows_where_it_hangs() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*no answer.*sleep_on_rank_one"):
        run_ranks(sleep_on_rank_one, 2, timeout=1.0)


def test_warnings_are_errors_as_in_the_test() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError, match="UserWarning: careful"):
            run_ranks(warn, 1)


def test_ranks_end_in_silence() -> None:
    outcomes = rank_outcomes(sum_of_ranks, 2, torch.ones(1))
    assert [(outcome.error, outcome.output) for outcome in outcomes] == [(None, "")] * 2
