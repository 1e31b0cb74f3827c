"""The reducer's sums against sums of the ranks' own gradients, taken in one process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks
from torch import Tensor
from torch.nn import Parameter

from lightning_sylvie.gradient import GradientReducer
from lightning_sylvie.transport import Loopback, Transport, check_signature, connect

LIMIT = timedelta(seconds=30)
SHAPES = [(3, 4), (4,), (), (1, 2, 5), (0, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def open_transport() -> Transport:
    return connect(dist.new_group(timeout=LIMIT), timeout=LIMIT)


def parameters() -> list[Parameter]:
    return [Parameter(torch.zeros(shape, dtype=dtype)) for dtype in DTYPES for shape in SHAPES]


def grads_of(rank: int) -> list[Tensor | None]:
    """Rank's gradients. Parameter 5k+0 is used by all, 5k+1 by rank 0 only, 5k+3 by none."""
    generator = torch.Generator().manual_seed(rank)
    grads: list[Tensor | None] = []
    for index, parameter in enumerate(parameters()):
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        used = [True, rank == 0, rank != 1, False, True][index % 5]
        grads.append(grad.to(parameter.dtype) if used else None)
    return grads


def expected_sums(num_ranks: int) -> list[Tensor | None]:
    sums: list[Tensor | None] = []
    for grads in zip(*[grads_of(rank) for rank in range(num_ranks)], strict=True):
        used = [grad for grad in grads if grad is not None]
        wide = [grad.to(torch.complex128 if grad.is_complex() else torch.float64) for grad in used]
        sums.append(torch.stack(wide).sum(0).to(used[0].dtype) if used else None)
    return sums


def reduce_grads(steps: int) -> list[Tensor | None]:
    transport = open_transport()
    params = parameters()
    reducer = GradientReducer(params, transport)
    check_signature(transport, reducer.signature)
    before = transport.num_all_reduces
    for _ in range(steps):
        for parameter, grad in zip(params, grads_of(transport.rank), strict=True):
            parameter.grad = None if grad is None else grad.clone()
        reducer.reduce()
    assert transport.num_all_reduces - before == (2 * steps if transport.num_ranks > 1 else 0)
    transport.close()
    return [parameter.grad for parameter in params]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sums_over_ranks_and_keeps_none_where_nobody_used_the_parameter(num_ranks: int) -> None:
    results = run_ranks(reduce_grads, num_ranks, 2)
    for index, expected in enumerate(expected_sums(num_ranks)):
        for grads in results:
            if expected is None:
                assert grads[index] is None
                continue
            assert torch.equal(grads[index], results[0][index])  # the same bits on every rank
            torch.testing.assert_close(grads[index], expected)


def reduce_alone() -> None:
    transport = open_transport()
    weight = Parameter(torch.tensor([1e8], dtype=torch.float64))
    weight.grad = torch.tensor([1.0 + 1e-12 * transport.rank], dtype=torch.float64)
    GradientReducer([weight, weight], transport).reduce()
    assert weight.grad.item() == 1.0 + (1.0 + 1e-12)
    half = Parameter(torch.zeros(1, dtype=torch.bfloat16))
    half.grad = torch.tensor([256.0 if transport.rank == 0 else 1.0], dtype=torch.bfloat16)
    GradientReducer([half], transport).reduce()
    assert half.grad.item() == 256.0  # 257 in float32, rounded once
    transport.close()


def test_each_precision_is_summed_in_a_sufficient_one_and_shared_weights_once() -> None:
    run_ranks(reduce_alone, 2)


def reduce_strided() -> None:
    transport = open_transport()
    weight = Parameter(torch.zeros(4, 6))
    weight.grad = torch.arange(24.0).reshape(6, 4).t() * (transport.rank + 1)
    grad = weight.grad
    GradientReducer([weight], transport).reduce()
    assert weight.grad is grad  # in place, for whoever else holds it
    assert torch.equal(grad, torch.arange(24.0).reshape(6, 4).t() * 3)
    transport.close()


def test_gradients_of_any_stride_are_replaced_in_place() -> None:
    run_ranks(reduce_strided, 2)


def freeze_in_turn() -> None:
    transport = open_transport()
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(3))
    reducer = GradientReducer([first, second], transport)
    for frozen, trained in [(first, second), (second, first), (first, second)]:
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        frozen.grad = None
        trained.grad = torch.ones_like(trained)
        reducer.reduce()
        assert frozen.grad is None
        assert trained.grad.tolist() == [2.0] * len(trained)
    transport.close()


def test_parameters_may_be_frozen_and_thawed() -> None:
    run_ranks(freeze_in_turn, 2)


def freeze_on_one_rank() -> None:
    transport = open_transport()
    weight = Parameter(torch.zeros(2, 7), requires_grad=transport.rank != 1)
    weight.grad = torch.ones(2, 7)
    try:
        GradientReducer([weight], transport).reduce()
        transport.all_reduce(torch.ones(1))
    except BaseException as exception:
        transport.report_failure(exception)
        raise


def test_a_parameter_frozen_on_some_ranks_is_refused() -> None:
    outcomes = rank_outcomes(freeze_on_one_rank, 2)
    assert "requires a gradient on 1 of 2 ranks" in str(outcomes[1].error)
    assert "PeerError: rank 1 failed: RuntimeError: parameter 0" in str(outcomes[0].error)


def reduce_sparse() -> None:
    transport = open_transport()
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError, match=r"dense gradients, got torch.sparse_coo .* \(5, 2\)"):
        GradientReducer(embedding.parameters(), transport).reduce()
    transport.close()


def test_sparse_gradients_are_refused() -> None:
    run_ranks(reduce_sparse, 2)


def backward_twice() -> None:
    """Losses scaled up and sums scaled down: the second call leaves the first one's share alone."""
    transport = open_transport()
    num_ranks = transport.num_ranks
    weight = Parameter(torch.ones(3))
    reducer = GradientReducer([weight], transport)
    for factor in (1.0, 10.0):
        loss = weight.sum() * factor * (transport.rank + 1) * num_ranks
        torch.autograd.backward(loss)
        reducer.reduce(scale=1.0 / num_ranks)
    total = num_ranks * (num_ranks + 1) / 2
    torch.testing.assert_close(weight.grad, torch.full((3,), 11.0 * total))
    transport.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_scaled_reduction_may_be_repeated_within_a_step(num_ranks: int) -> None:
    run_ranks(backward_twice, num_ranks)


def reduce_after_inference() -> None:
    """Validation may come before training: a buffer made there must stay writable."""
    transport = open_transport()
    weight = Parameter(torch.zeros(2))
    with torch.inference_mode():
        reducer = GradientReducer([weight], transport)
    torch.autograd.backward(weight.sum())
    reducer.reduce()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
    transport.close()


def test_a_reducer_made_in_inference_mode_works_in_training() -> None:
    run_ranks(reduce_after_inference, 2)


def test_one_process_keeps_its_gradients() -> None:
    weight = Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    GradientReducer([weight], Loopback()).reduce()
    assert weight.grad.tolist() == [1.0, 1.0]
    GradientReducer([weight], Loopback()).reduce(scale=0.5)
    assert weight.grad.tolist() == [0.5, 0.5]
    GradientReducer([], Loopback()).reduce()


def test_parameters_on_two_devices_are_refused() -> None:
    two = [Parameter(torch.zeros(1)), Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(ValueError, match=r"on one device, got .*cpu.*meta"):
        GradientReducer(two, Loopback())
