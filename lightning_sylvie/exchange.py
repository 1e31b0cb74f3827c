"""The halo exchange: select, quantize, move, dequantize, append; backward in reverse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.quantizer import Full, Quantizer
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport, check_signature


class Halo:
    """What the layers of a model see of the other ranks.

    It is in force only inside `using`; outside, attached layers behave as unmodified ones. Every
    rank must make the same calls in the same order.

    Args:
        transport: Moves messages between ranks; owned by the caller.
        quantizer: How rows travel.
    """

    def __init__(self, transport: Transport, quantizer: Quantizer | None = None) -> None:
        self.transport = transport
        self.quantizer = quantizer or Full()
        self.checking = False
        self._shard: Shard | None = None
        self._slot = 0
        self._recent: list[tuple[Tensor, int, bool, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Halo:
        return self  # copies of a module stay on the ranks and the groups of the original

    @property
    def active(self) -> bool:
        return self._shard is not None

    @property
    def shard(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("no shard is in force: call inside `Halo.using`")
        return self._shard

    @property
    def plan(self) -> HaloPlan:
        return self.shard.plan

    @contextmanager
    def using(self, shard: Shard, *, checking: bool = False) -> Iterator[None]:
        """Puts the plan of `shard` in force.

        Args:
            shard: The part whose rows the layers hold.
            checking: Compare slot, shapes and types of every exchange over the ranks first.
        """
        outer = self._shard, self.checking
        self._shard, self.checking = shard, checking
        if outer[0] is None:
            self._slot = 0
        self._recent = []
        try:
            yield
        finally:
            self._shard, self.checking = outer
            self._recent = []

    def append(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors with the halo rows behind their owned rows, moved in one message per peer.

        Backward adds the gradients of the halo rows to their owners' rows (spec: One epoch;
        Algorithms 1 and 2 of the paper, lines 10-13). Rows that the last call moved are not moved
        again.

        Args:
            tensors: Each ``(num_owned, ...)``, of any type.

        Returns:
            Each ``(num_rows, ...)``: owned rows, then halo rows in plan order.
        """
        known = {id(t): extended for t in tensors if (extended := self._moved(t)) is not None}
        fresh = [t for t in tensors if id(t) not in known]
        if fresh:
            appended = self._append(fresh)
            known.update((id(t), extended) for t, extended in zip(fresh, appended))
            self._recent = [(t, t._version, t.requires_grad, known[id(t)]) for t in tensors]
        return tuple(known[id(t)] for t in tensors)

    def fold(self, tensor: Tensor) -> Tensor:
        """The owned rows with what other ranks hold for them added: the adjoint of `append`.

        Args:
            tensor: ``(num_rows, ...)``, floating point.

        Returns:
            ``(num_owned, ...)``.
        """
        self._check(tensor, self.plan.num_rows)
        (folded,) = _Fold.apply(self, self.plan, tensor)
        return folded

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the ranks; its gradient is summed too."""
        summed: Tensor = _Sum.apply(self.transport, tensor)
        return summed

    def max(self, tensor: Tensor) -> Tensor:
        """The largest `tensor` over the ranks, without a gradient."""
        values = tensor.new_zeros((self.transport.num_ranks, *tensor.shape))
        values[self.transport.rank] = tensor.detach()
        self.transport.all_reduce(values)
        return values.amax(0)

    @torch.compiler.disable
    def _append(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        for tensor in tensors:
            self._check(tensor, self.plan.num_owned)
        self._slot += 1
        if self.checking:
            layout = [(tuple(t.shape[1:]), str(t.dtype), t.requires_grad) for t in tensors]
            check_signature(self.transport, f"exchange {self._slot}: {layout}")
        if self.plan.num_ranks == 1:
            return tuple(tensors)
        appended: tuple[Tensor, ...] = _Append.apply(self, self.plan, *tensors)
        return appended

    def _moved(self, tensor: Tensor) -> Tensor | None:
        """The extended rows of a tensor that the last call moved, if nothing changed it since."""
        for known, version, requires_grad, extended in self._recent:
            if known is tensor and not tensor.is_inference() and version == tensor._version:
                if requires_grad == tensor.requires_grad and (
                    extended.requires_grad or not (requires_grad and torch.is_grad_enabled())
                ):
                    return extended
        return None

    @staticmethod
    def _check(tensor: Tensor, expected: int) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != expected:
            raise ValueError(
                f"expected {expected} rows (the nodes this rank holds), got a tensor of shape "
                f"{tuple(tensor.shape)}: the model changes the number of rows between its layers"
            )


def _as_rows(tensor: Tensor) -> Tensor:
    """The tensor as contiguous ``(num_rows, width)``."""
    return tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:])).contiguous()


def _offsets(quantizer: Quantizer, rows: Sequence[Tensor]) -> list[int]:
    """Where each tensor's bytes start in a record, and the record's length."""
    offsets = [0]
    for tensor in rows:
        offsets.append(offsets[-1] + quantizer.row_bytes(tensor))
    return offsets


def _push(halo: Halo, plan: HaloPlan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Owned rows to the ranks that need them: each tensor with its halo rows appended."""
    quantizer, rows = halo.quantizer, [_as_rows(t) for t in tensors]
    offsets = _offsets(quantizer, rows)
    message = rows[0].new_empty((plan.num_sent, offsets[-1]), dtype=torch.uint8)
    for source, offset in zip(rows, offsets):
        quantizer.quantize(source, plan.send_index, message, offset)
    received = halo.transport.exchange(message, plan.send_counts, plan.recv_counts)
    extended = []
    for tensor, source, offset in zip(tensors, rows, offsets):
        target = source.new_empty((plan.num_rows, source.shape[1]))
        target[: plan.num_owned] = source
        quantizer.dequantize(received, offset, target[plan.num_owned :])
        extended.append(target.view(plan.num_rows, *tensor.shape[1:]))
    return extended


def _pull(halo: Halo, plan: HaloPlan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Halo rows back to their owners, who add them: the mirror of `_push`."""
    quantizer, rows = halo.quantizer, [_as_rows(t) for t in tensors]
    offsets = _offsets(quantizer, rows)
    message = rows[0].new_empty((plan.num_halo, offsets[-1]), dtype=torch.uint8)
    for source, offset in zip(rows, offsets):
        quantizer.quantize(source[plan.num_owned :], None, message, offset)
    received = halo.transport.exchange(message, plan.recv_counts, plan.send_counts)
    folded = []
    for tensor, source, offset in zip(tensors, rows, offsets):
        target = source[: plan.num_owned].clone()
        quantizer.dequantize_add(received, offset, plan.send_index, plan.send_counts, target)
        folded.append(target.view(plan.num_owned, *tensor.shape[1:]))
    return folded


class _Append(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, halo: Halo, plan: HaloPlan, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.halo, ctx.plan = halo, plan
        extended = _push(halo, plan, tensors)
        needed = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(t for t, need in zip(extended, needed) if not need))
        return tuple(extended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.halo._recent = []  # their graph is used up
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        folded = iter(_pull(ctx.halo, ctx.plan, [grads[i] for i in wanted]))
        return None, None, *(next(folded) if i in wanted else None for i in range(len(grads)))


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, halo: Halo, plan: HaloPlan, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.halo, ctx.plan = halo, plan
        return tuple(_pull(halo, plan, [tensor]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_push(ctx.halo, ctx.plan, [grad])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Transport, tensor: Tensor) -> Tensor:  # type: ignore[override]
        ctx.transport = transport
        summed = tensor.detach().clone(memory_format=torch.contiguous_format)
        transport.all_reduce(summed)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        summed = grad.clone(memory_format=torch.contiguous_format)
        ctx.transport.all_reduce(summed)
        return None, summed
