"""Gradients summed while backward runs are those summed after it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import rank_outcomes, run_ranks
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.utils.checkpoint import checkpoint

from lightning_sylvie.gradient import GradientReducer, GradientSum
from lightning_sylvie.transport import Transport, connect

LIMIT = timedelta(seconds=30)
WAYS = [GradientSum(name, bucket_bytes=1) for name in ("auto", "ring", "rabenseifner")]


def open_transport() -> Transport:
    return connect(dist.new_group(timeout=LIMIT), timeout=LIMIT)


class Model(Module):
    """Layers of several types; one weight twice, one layer that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = Linear(5, 6), Linear(6, 6)
        self.some, self.last = Linear(6, 6), Linear(6, 3).double()
        self.nobody = Linear(2, 2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.twice(self.twice(self.first(x)).relu()).relu()
        return self.last((self.some(x) if rank == 0 else x).double())


def loss_of(model: Model, rank: int, step: int) -> Tensor:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, rank).pow(2).sum()


def grads(model: Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(way: GradientSum, num_steps: int) -> list[list[Tensor | None]]:
    """Gradients of each step; in the third, `first` is frozen; in the last, two backwards."""
    transport, model = open_transport(), Model()
    reducer = GradientReducer(model.parameters(), transport, way)
    scale, found = 1.0 / transport.num_ranks, []
    for step in range(num_steps):
        model.zero_grad()
        model.first.requires_grad_(step != 2)
        for part in range(2 if step == num_steps - 1 else 1):
            with reducer.overlapping(scale=scale):
                loss = loss_of(model, transport.rank, step + 100 * part) / scale
                torch.autograd.backward(loss)
        found.append(grads(model))
    reducer.close()
    transport.close()
    return found


def expected_grads(num_ranks: int, num_steps: int) -> list[list[Tensor | None]]:
    """The same, of the losses of all ranks in one process."""
    model, found = Model(), []
    for step in range(num_steps):
        model.zero_grad()
        model.first.requires_grad_(step != 2)
        for part in range(2 if step == num_steps - 1 else 1):
            for rank in range(num_ranks):
                loss_of(model, rank, step + 100 * part).backward()
        found.append(grads(model))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", [*WAYS, GradientSum("ring", bucket_bytes=100, overlap=False)])
def test_the_sums_are_the_gradients_of_the_whole(way: GradientSum, num_ranks: int) -> None:
    results = run_ranks(train, num_ranks, way, 6)
    for step, expected in enumerate(expected_grads(num_ranks, 6)):
        for result in results:
            for found, first, value in zip(result[step], results[0][step], expected, strict=True):
                if value is None:
                    assert found is None
                else:
                    assert torch.equal(found, first)
                    torch.testing.assert_close(found, value)


def watch_progress() -> list[int]:
    """All-reduces made before the gradient of the first layer exists, in each step."""
    transport = open_transport()
    model = Sequential(*(Linear(4, 4, bias=False) for _ in range(4)))
    reducer = GradientReducer(model.parameters(), transport, GradientSum(bucket_bytes=1))
    early: list[int] = []

    def wait(_: Tensor) -> None:
        deadline = time.monotonic() + (1 if len(early) else 0.1)
        while transport.num_all_reduces - before < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        early.append(transport.num_all_reduces - before)

    model[0].weight.register_hook(wait)
    for _ in range(3):
        before = transport.num_all_reduces
        with reducer.overlapping():
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
        assert transport.num_all_reduces - before == 4
    reducer.close()
    transport.close()
    return early


def test_buckets_are_summed_while_backward_runs() -> None:
    """From the second step on: in the first one it is learnt what a step uses."""
    assert run_ranks(watch_progress, 2) == [[0, 3, 3]] * 2


def checkpoint_twice(way: GradientSum) -> None:
    """Reentrant checkpoints of one layer: its gradient comes in two pieces."""
    transport = open_transport()
    layer, last = Linear(3, 3), Linear(3, 3)
    for parameter in (*layer.parameters(), *last.parameters()):
        torch.nn.init.constant_(parameter, 0.5)
    reducer = GradientReducer([*layer.parameters(), *last.parameters()], transport, way)
    expected = None
    for _ in range(3):
        x = torch.full((2, 3), transport.rank + 1.0, requires_grad=True)
        layer.zero_grad()
        with reducer.overlapping():
            hidden = checkpoint(layer, last(x), use_reentrant=True)
            checkpoint(layer, hidden, use_reentrant=True).sum().backward()
        if expected is None:  # of the step that did not overlap
            expected = layer.weight.grad.clone()
        assert torch.equal(layer.weight.grad, expected)
    reducer.close()
    transport.close()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_may_come_in_pieces(way: GradientSum) -> None:
    run_ranks(checkpoint_twice, 2, way)


def more_pieces() -> None:
    transport = open_transport()
    first, second = Linear(3, 3), Linear(3, 3)
    parameters = [*first.parameters(), *second.parameters()]
    reducer = GradientReducer(parameters, transport, GradientSum(bucket_bytes=1))
    for step in range(3):
        x = torch.ones(2, 3, requires_grad=True)
        with reducer.overlapping():
            hidden = checkpoint(second, first(x), use_reentrant=True)
            if step == 2:
                hidden = checkpoint(second, hidden, use_reentrant=True)
            hidden.sum().backward()
    transport.close()


def test_a_gradient_that_comes_after_its_sum_is_an_error() -> None:
    for outcome in rank_outcomes(more_pieces, 2):
        assert outcome.error is not None
        assert "received another gradient after its sum over the ranks had started" in outcome.error


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ValueError("no gradient here")


def raise_in_backward(name: str, where: int) -> None:
    transport = open_transport()
    layers = [Linear(40, 40) for _ in range(4)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    reducer = GradientReducer(parameters, transport, GradientSum(name, bucket_bytes=1))
    try:
        for step in range(4):
            x = torch.ones(2, 40)
            with reducer.overlapping():
                for number, layer in enumerate(layers):
                    x = layer(x)
                    if transport.rank == 1 and step == 3 and number == where:
                        x = Fails.apply(x)
                x.sum().backward()
    except BaseException as error:
        transport.report_failure(error)
        raise
    finally:
        transport.close()


@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("name", ["auto", "ring"])
def test_an_error_in_backward_ends_all_ranks(name: str, where: int) -> None:
    for outcome in rank_outcomes(raise_in_backward, 3, name, where, timeout=40):
        assert outcome.seconds < 8, outcome
        assert outcome.error is not None
        mine = outcome.rank == 1
        expected = (
            "ValueError: no gradient here" if mine else "PeerError: rank 1 failed: ValueError"
        )
        assert expected in outcome.error


def leave_parameters_alone() -> None:
    transport, model = open_transport(), Model()
    reducer = GradientReducer(model.parameters(), transport, WAYS[0])
    with reducer.overlapping():
        loss_of(model, transport.rank, 0).backward()
    assert any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    before = transport.num_all_reduces
    loss_of(model, transport.rank, 0).backward()  # another backward, which nobody sums
    assert transport.num_all_reduces == before
    reducer.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    transport.close()


def test_only_the_backward_inside_is_summed_and_hooks_are_taken_off() -> None:
    run_ranks(leave_parameters_alone, 2)
