"""The wrapper's steps are those of one process that has the losses of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_sylvie import DistributedOptimizer
from lightning_sylvie.gradient import GradientSum


def build(kind: Callable[..., Optimizer], **options: Any) -> tuple[Module, Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Sequential(Linear(3, 5), Tanh(), Linear(5, 1)).double()
    return model, kind(model.parameters(), **options)


def loss_of(model: Module, ranks: list[int], step: int) -> Tensor:
    """The sum of the losses of some ranks."""
    losses = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        losses.append((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
    return torch.stack(losses).sum()


def train(
    model: Module, optimizer: Optimizer, ranks: list[int], closure: bool = False, clip: float = 0.0
) -> list[Tensor]:
    """Five steps and a scheduler; the parameters after them."""
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, ranks, step)
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            if clip:
                if isinstance(optimizer, DistributedOptimizer):
                    optimizer.sum_gradients()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


WAYS = {
    "adam": (Adam, {"lr": 0.1}, {}),
    "clipped": (SGD, {"lr": 0.5, "momentum": 0.9}, {"clip": 0.1}),
    "lbfgs": (LBFGS, {"line_search_fn": "strong_wolfe", "max_iter": 4}, {"closure": True}),
}


def train_on_ranks() -> dict[str, list[Tensor]]:
    found = {}
    for name, (kind, options, how) in WAYS.items():
        model, optimizer = build(kind, **options)
        optimizer = DistributedOptimizer(optimizer)
        found[name] = train(model, optimizer, [dist.get_rank()], **how)
        optimizer.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_are_those_of_one_process(num_ranks: int) -> None:
    results = run_ranks(train_on_ranks, num_ranks)
    for name, (kind, options, how) in WAYS.items():
        expected = train(*build(kind, **options), list(range(num_ranks)), **how)
        for result in results:
            for found, first, value in zip(result[name], results[0][name], expected, strict=True):
                assert torch.equal(found, first)
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


def use_the_rest() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    _, inner = build(Adam, lr=0.1)
    if rank == 2:
        return
    optimizer = DistributedOptimizer(inner, pair, GradientSum("linear"), average=True)
    assert "all_reduce='linear'" in repr(optimizer)
    assert optimizer.param_groups is inner.param_groups
    extra = torch.nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    extra.grad = torch.tensor([2.0 * rank])
    optimizer.sum_gradients()
    assert extra.grad.item() == 1.0  # the mean of 0 and 2
    optimizer.step()
    assert extra.grad.item() == 1.0
    assert steps == [1]
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"].keys() == {4}
    extra.grad = torch.tensor([float(rank)])
    optimizer.sum_gradients()
    optimizer.zero_grad()  # the sums are gone: the next step makes its own
    extra.grad = torch.tensor([2.0 * rank])
    optimizer.step()
    assert extra.grad.item() == 1.0
    optimizer.load_state_dict(saved)
    assert inner.state[extra]["step"] == 1
    ReduceLROnPlateau(optimizer, patience=0).step(1.0)
    optimizer.close()


def test_everything_else_is_the_other_optimizers() -> None:
    run_ranks(use_the_rest, 3)


def test_without_other_processes_it_is_the_optimizer() -> None:
    model, inner = build(SGD, lr=0.1)
    optimizer = DistributedOptimizer(inner)
    expected = train(*build(SGD, lr=0.1), [0])
    for found, value in zip(train(model, optimizer, [0]), expected, strict=True):
        assert torch.equal(found, value)
    with pytest.raises(ValueError, match=r"expected all_reduce in .*got 'star'"):
        DistributedOptimizer(inner, all_reduce="star")
