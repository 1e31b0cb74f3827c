"""What the loss of one part counts in the loss of the whole graph (spec: Loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_sylvie.functions import Exchanged
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport

LossReduction: TypeAlias = Literal["mean", "sum"] | Callable[[Any], float | Tensor]


def loss_share(reduction: LossReduction, batch: Any, shard: Shard, transport: Transport) -> float:
    """What a rank's loss counts in the sum over ranks.

    Args:
        reduction: As in `SylvieStrategy`.
        batch: What the step received.
        shard: The part in it.
        transport: Sums the weights, if they are the user's own.
    """
    if reduction == "sum":
        return 1.0
    if reduction == "mean":
        return shard.share("train_mask")
    assert callable(reduction)
    local = torch.as_tensor(reduction(batch), dtype=torch.float64)
    total = local.to(transport.device, copy=True)
    transport.all_reduce(total)
    return float(local) / float(total) if local else 0.0


def as_global(loss: Tensor, value: Tensor) -> Tensor:
    """The value of the whole graph with the gradient of this rank's own loss.

    LBFGS's line search, checks for NaN and progress bars see one number on all ranks.
    """
    told: Tensor = _Told.apply(loss, value)
    return told


def silence(loss: Tensor) -> None:
    """Makes the gradient of a loss that counts nothing zero, where it could be 0 / 0.

    ``(losses * mask).sum() / mask.sum()`` on a part without training nodes has the gradient
    0 * inf. It would reach the other ranks through the halo exchanges, which must take place.
    Nodes of the autograd graph that no exchange leads to hold this loss's gradient alone: zero.
    """
    nodes, reached = _graph(loss.grad_fn)
    for node in nodes - reached:
        node.register_hook(_zero)


def _graph(root: Node | None) -> tuple[set[Node], set[Node]]:
    """All nodes below the root, and those of them that lie below an exchange."""
    seen: set[Node] = set()
    stack = [] if root is None else [root]
    exchanges = []
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            exchanges += [node] if _is_exchange(node) else []
            stack += [after for after, _ in node.next_functions if after is not None]
    reached: set[Node] = set()
    while exchanges:
        node = exchanges.pop()
        if node not in reached:
            reached.add(node)
            exchanges += [after for after, _ in node.next_functions if after is not None]
    return seen, reached


def _is_exchange(node: Node) -> bool:
    function = getattr(node, "_forward_cls", None)
    return function is not None and issubclass(function, Exchanged)


def _zero(grad_inputs: Any, grad_outputs: Any) -> Any:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grad_inputs)


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor) -> Tensor:
        return value.clone().view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
