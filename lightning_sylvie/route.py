"""One exchange: whose rows go where, how they are coded, and what their noise is a function of."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.quantizer import Noise, NonFiniteRowError, Quantizer
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport


class RowIds:
    """Which node every row of a message belongs to, in both directions.

    A node's row goes to all its readers with the same noise; its gradients come from several
    ranks, whose noise must differ, so the rank is folded into their numbers.

    Args:
        shard: The part on this rank.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        plan, num_ranks = shard.plan, shard.plan.num_ranks
        device = plan.send_index.device
        counts = torch.tensor(plan.send_counts, device=device)
        reader = torch.arange(num_ranks, device=device).repeat_interleave(counts)
        self.sent = shard.node_id[plan.send_index]
        self.received = shard.halo_id
        self.sent_back = shard.halo_id * num_ranks + plan.rank
        self.received_back = self.sent * num_ranks + reader


@dataclass(frozen=True)
class Route:
    """One exchange, forward and backward.

    Attributes:
        transport: Moves the messages.
        plan: Who sends which rows to whom.
        ids: The nodes of the rows.
        quantizer: How rows travel.
        gradient_quantizer: How their gradients travel back.
        key: Seed, epoch and place of the exchange in the step.
        name: The layer and exchange, for messages.
    """

    transport: Transport
    plan: HaloPlan
    ids: RowIds
    quantizer: Quantizer
    gradient_quantizer: Quantizer
    key: tuple[int, ...]
    name: str

    def push(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Owned rows to the ranks that need them: each tensor with its halo rows appended."""
        plan, code, rows = self.plan, self.quantizer, [_as_rows(t) for t in tensors]
        message, offsets = _message(code, rows, plan.num_sent)
        noises = [self._noise(0, i, self.ids.sent) for i in range(len(rows))]
        for source, noise, offset in zip(rows, noises, offsets, strict=False):
            self._finite(code.quantize, source, plan.send_index, noise, message, offset)
        received = self.transport.exchange(message, plan.send_counts, plan.recv_counts)
        extended = []
        for i, (tensor, source) in enumerate(zip(tensors, rows, strict=True)):
            target = source.new_empty((plan.num_rows, source.shape[1]))
            target[: plan.num_owned] = source
            noise = self._noise(0, i, self.ids.received)
            code.dequantize(received, offsets[i], noise, target[plan.num_owned :])
            extended.append(target.view(plan.num_rows, *tensor.shape[1:]))
        return extended

    def pull(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Halo rows back to their owners, who add them: the mirror of `push`."""
        plan, code, rows = self.plan, self.gradient_quantizer, [_as_rows(t) for t in tensors]
        message, offsets = _message(code, rows, plan.num_halo)
        noises = [self._noise(1, i, self.ids.sent_back) for i in range(len(rows))]
        for source, noise, offset in zip(rows, noises, offsets, strict=False):
            self._finite(code.quantize, source[plan.num_owned :], None, noise, message, offset)
        received = self.transport.exchange(message, plan.recv_counts, plan.send_counts)
        folded = []
        for i, (tensor, source) in enumerate(zip(tensors, rows, strict=True)):
            target = source[: plan.num_owned].clone()
            noise = self._noise(1, i, self.ids.received_back)
            code.dequantize_add(
                received, offsets[i], noise, plan.send_index, plan.send_counts, target
            )
            folded.append(target.view(plan.num_owned, *tensor.shape[1:]))
        return folded

    def _noise(self, direction: int, position: int, ids: Tensor) -> Noise:
        numbers = (*self.key, direction, position)
        digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8)
        return Noise(int.from_bytes(digest.digest(), "little", signed=True), ids)

    def _finite(
        self,
        quantize: Callable[..., None],
        rows: Tensor,
        index: Tensor | None,
        noise: Noise,
        message: Tensor,
        offset: int,
    ) -> None:
        try:
            quantize(rows, index, noise, message, offset)
        except NonFiniteRowError as error:
            what = "gradient" if index is None else "row"
            ids = self.ids.received if index is None else self.ids.sent
            raise ValueError(
                f"{self.name}: the {what} of node {int(ids[error.position])} that rank "
                f"{self.plan.rank} sends holds NaN or Inf, expected finite values: lower the "
                "learning rate, clip gradients, or look at that node's features"
            ) from None


def _as_rows(tensor: Tensor) -> Tensor:
    """The tensor as contiguous ``(num_rows, width)``."""
    return tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:])).contiguous()


def _message(code: Quantizer, rows: Sequence[Tensor], num_rows: int) -> tuple[Tensor, list[int]]:
    """An empty message for `num_rows` records, and where each tensor's bytes start in a record."""
    offsets = list(accumulate((code.row_bytes(tensor) for tensor in rows), initial=0))
    return rows[0].new_empty((num_rows, offsets[-1]), dtype=torch.uint8), offsets
