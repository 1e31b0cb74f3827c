"""The exchange as autograd sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_sylvie.history import History
from lightning_sylvie.route import Route


class Exchanged(torch.autograd.Function):
    """What sends and receives in backward too: gradients that go in come out on other ranks."""


class Append(Exchanged):
    """Halo rows appended; backward adds their gradients to their owners' rows."""

    @staticmethod
    def forward(
        ctx: Any, route: Route, history: History, forget: Callable[[], None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, ctx.history, ctx.forget = route, history, forget
        extended = history.push(route, tensors)
        wanted = zip(extended, ctx.needs_input_grad[3:], strict=True)
        ctx.mark_non_differentiable(*(rows for rows, needed in wanted if not needed))
        return tuple(extended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.forget()  # rows whose graph is spent must not serve another forward
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        folded = iter(ctx.history.pull(ctx.route, [grads[i] for i in wanted]))
        return None, None, None, *(next(folded) if i in wanted else None for i in range(len(grads)))


class Fold(Exchanged):
    """What other ranks hold for the owned rows, added to them: the adjoint of `Append`."""

    @staticmethod
    def forward(ctx: Any, route: Route, tensor: Tensor) -> Tensor:
        ctx.route = route
        return route.pull([tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, ctx.route.push([grad])[0]


class Sum(Exchanged):
    """The sum over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, add_up: Callable[[Tensor], None], tensor: Tensor) -> Tensor:
        ctx.add_up = add_up
        summed = tensor.detach().clone(memory_format=torch.contiguous_format)
        add_up(summed)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        summed = grad.clone(memory_format=torch.contiguous_format)
        ctx.add_up(summed)
        return None, summed
