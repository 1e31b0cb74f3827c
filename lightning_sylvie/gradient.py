"""Sums parameter gradients over the ranks after backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sylvie.transport import Transport


class GradientReducer:
    """Replaces every gradient by its sum over the ranks, in one all-reduce per precision.

    Each rank's loss holds its own nodes' share of the global loss, so the sum is the gradient of
    the global loss, and it has the same bits on every rank. One all-reduce after backward keeps it
    out of the order of the halo exchanges. Flags travel in the same buffer: a parameter that no
    rank used keeps ``grad=None``, as in one process, so that optimizers skip it there too.

    float64 is summed in float64, everything else in float32.

    Args:
        parameters: The same on every rank, in the same order. Those that do not require a
            gradient when `reduce` is called are left alone.
        transport: Sums over the ranks.

    Raises:
        ValueError: If the parameters are on several devices.
    """

    def __init__(self, parameters: Iterable[Parameter], transport: Transport) -> None:
        unique = list(dict.fromkeys(parameters))
        if len(devices := {parameter.device for parameter in unique}) > 1:
            raise ValueError(
                f"expected all parameters on one device, got {sorted(map(str, devices))}"
            )
        by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for parameter in unique:
            by_dtype.setdefault(_sum_dtype(parameter), []).append(parameter)
        self._buckets = [_Bucket(group, dtype) for dtype, group in by_dtype.items()]
        self._transport = transport

    @property
    def signature(self) -> str:
        """What must agree among the ranks, for `check_signature`."""
        return "; ".join(bucket.signature for bucket in self._buckets)

    @torch.no_grad()
    def reduce(self, *, scale: float = 1.0) -> None:
        """Sums the gradients; call it on every rank after backward.

        Args:
            scale: Multiplies the sums. With losses multiplied by the number of ranks and 1 / that
                number here, gradients that are reduced already count once in a second call.

        Raises:
            ValueError: If a gradient is sparse.
            RuntimeError: If a parameter requires a gradient on some ranks only.
            PeerError: If a rank is gone.
        """
        if self._transport.num_ranks == 1 and scale == 1.0:
            return
        for bucket in self._buckets:
            bucket.fill()
            self._transport.all_reduce(bucket.buffer)
            bucket.hand_out(self._transport, scale)


class _Bucket:
    """Parameters that are summed in one precision: their gradients, then two flags for each.

    The buffer is made outside inference mode, whose tensors could not be written in training.
    """

    def __init__(self, parameters: list[Parameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        sizes = [_real(parameter.detach()).numel() for parameter in parameters]
        total, num = sum(sizes), len(parameters)
        with torch.inference_mode(False):
            self.buffer = torch.zeros(total + 2 * num, dtype=dtype, device=parameters[0].device)
            self._grads = [
                part.view(_real(parameter.detach()).shape)
                for part, parameter in zip(
                    torch.split(self.buffer[:total], sizes), parameters, strict=True
                )
            ]
            self._flags = self.buffer[total:]  # used here, for each; then trainable here, for each

    @property
    def signature(self) -> str:
        shapes = ", ".join(str(tuple(grad.shape)) for grad in self._grads)
        return f"gradients {self.buffer.dtype} {shapes}"

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
        self._flags.copy_(torch.tensor(used + trainable))

    def hand_out(self, transport: Transport, scale: float) -> None:
        """Scales the sums and copies them back, also to a parameter that only other ranks used."""
        if scale != 1.0:
            self.buffer[: -len(self._flags)].mul_(scale)
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
        used, trainable = self._flags.view(2, -1).round().int().tolist()
        for index in unused:
            parameter = self.parameters[index]
            if trainable[index] not in (0, transport.num_ranks):
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(parameter.shape)} requires a gradient on "
                    f"{trainable[index]} of {transport.num_ranks} ranks, and on rank "
                    f"{transport.rank} it is {parameter.requires_grad}: freeze it on "
                    "all ranks or none"
                )
            if parameter.requires_grad and used[index]:
                parameter.grad = torch.empty_like(parameter)
                _real(parameter.grad).copy_(self._grads[index])


def _used(parameter: Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is not None


def _sum_dtype(parameter: Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
