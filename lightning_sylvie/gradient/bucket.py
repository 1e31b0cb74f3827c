"""Gradients that travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sylvie.transport import Transport


class Bucket:
    """Parameters whose gradients are summed together, in one precision.

    The buffer holds the gradients, then two flags for each: a parameter that no rank used keeps
    ``grad=None``, as in one process, so that optimizers skip it there too. It is made outside
    inference mode, whose tensors could not be written in training.

    Args:
        parameters: By their number in the model.
        dtype: To sum in.

    Attributes:
        buffer: ``(size,)``: `values` and `flags` behind each other.
        values: The gradients.
        flags: For each parameter whether it is used here; then, whether it is trainable here.
    """

    def __init__(self, parameters: dict[int, Parameter], dtype: torch.dtype) -> None:
        self._numbers, self.parameters = list(parameters), list(parameters.values())
        values = [_real(parameter.detach()) for parameter in self.parameters]
        sizes = [value.numel() for value in values]
        num_flags = 2 * len(values)
        with torch.inference_mode(False):
            self.buffer = torch.zeros(sum(sizes) + num_flags, dtype=dtype, device=values[0].device)
            parts = torch.split(self.buffer, [*sizes, num_flags])
            self._grads = [
                part.view(value.shape) for part, value in zip(parts, values, strict=False)
            ]
            self.values = self.buffer[: sum(sizes)]
            self.flags = parts[-1]

    @property
    def signature(self) -> str:
        shapes = ", ".join(str(tuple(grad.shape)) for grad in self._grads)
        return f"gradients {self.buffer.dtype} {shapes}"

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the gradients into the buffer, zero where there is none."""
        targets, grads = [], []
        for target, parameter in zip(self._grads, self.parameters, strict=True):
            if not _used(parameter):
                target.zero_()
                continue
            assert parameter.grad is not None
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"expected dense gradients, got {parameter.grad.layout} for a parameter of "
                    f"shape {tuple(parameter.shape)}: build its Embedding with sparse=False"
                )
            targets.append(target)
            grads.append(_real(parameter.grad))
        if targets:
            torch._foreach_copy_(targets, grads)
        used = [_used(parameter) for parameter in self.parameters]
        trainable = [parameter.requires_grad for parameter in self.parameters]
        self.flags.copy_(torch.tensor(used + trainable))

    @torch.no_grad()
    def hand_out(self, transport: Transport, scale: float) -> None:
        """Scales the sums and copies them back, also to a parameter that only other ranks used."""
        if scale != 1.0:
            self.values.mul_(scale)
        targets, sums, unused = [], [], []
        for index, (total, parameter) in enumerate(zip(self._grads, self.parameters, strict=True)):
            if _used(parameter):
                assert parameter.grad is not None
                targets.append(_real(parameter.grad))
                sums.append(total)
            else:
                unused.append(index)
        if targets:
            torch._foreach_copy_(targets, sums)
        if unused:  # otherwise the flags need not be read, for which a GPU would have to be awaited
            self._hand_to_unused(unused, transport)

    def _hand_to_unused(self, unused: list[int], transport: Transport) -> None:
        used, trainable = self.flags.view(2, -1).round().int().tolist()
        for index in unused:
            parameter = self.parameters[index]
            if trainable[index] not in (0, transport.num_ranks):
                raise RuntimeError(
                    f"parameter {self._numbers[index]} of shape {tuple(parameter.shape)} "
                    f"requires a gradient on {trainable[index]} of {transport.num_ranks} ranks, "
                    f"and on rank {transport.rank} it is {parameter.requires_grad}: freeze it on "
                    "all ranks or none"
                )
            if parameter.requires_grad and used[index]:
                parameter.grad = torch.empty_like(parameter)
                _real(parameter.grad).copy_(self._grads[index])


def fuse(parameters: Sequence[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of about `bucket_bytes`, in the order in which backward completes them.

    That is taken to be the order of `parameters` backwards. It is the same on every rank, so that
    all reduce the same bucket next; a model that uses its layers in another order only waits more.
    """
    closed: list[tuple[int, Bucket]] = []
    filling: dict[torch.dtype, dict[int, Parameter]] = {}
    room: dict[torch.dtype, int] = {}
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        dtype = _sum_dtype(parameter)
        filling.setdefault(dtype, {})[number] = parameter
        num_bytes = _real(parameter.detach()).numel() * dtype.itemsize
        room[dtype] = room.get(dtype, bucket_bytes) - num_bytes
        if room[dtype] <= 0:
            closed.append((number, Bucket(filling.pop(dtype), dtype)))
            del room[dtype]
    closed += [(min(group), Bucket(group, dtype)) for dtype, group in filling.items()]
    return [bucket for _, bucket in sorted(closed, key=lambda pair: -pair[0])]


def _used(parameter: Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def _sum_dtype(parameter: Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
