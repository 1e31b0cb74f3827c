"""A sum of coded values, whose errors are fed back."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import largest
from lightning_sylvie.quantizer import Noise, Quantizer
from lightning_sylvie.transport import Transport

WIDTH = 1024
"""Values of a row: enough for its scale and mean to weigh little."""


@final
class Compressed:
    """Sums one buffer again and again, coded; what a code loses is added to the next call's values.

    The data is cut into N blocks of rows.

    1. Every rank adds what it lost last time, codes all blocks but its own, and sends block j to
       rank j: one exchange.
    2. Rank j adds the blocks it receives to its own, in float32; adds what it lost last time of
       this sum, codes it, and sends it to all: a second exchange.
    3. All ranks, j too, take the decoded sum, so they have the same bits.

    Every rank sends 2(N-1)/N of the data, at the code's bits per value. Each value is coded twice,
    whatever N. The errors of all calls add up to that of the last one alone, if a code's error is
    smaller than the row, which holds for rotated signs and for 16 bits.

    Args:
        code: How rows travel.
        size: Values of the buffer, float32.
        transport: Moves them.
    """

    def __init__(self, code: Quantizer, size: int, transport: Transport) -> None:
        self._code, self._size, self._transport = code, size, transport
        rank, num_ranks = transport.rank, transport.num_ranks
        block = largest(size, num_ranks)
        width = min(WIDTH, block)
        shape = (num_ranks, largest(block, width), width)
        with torch.inference_mode(False):
            self._parts = torch.zeros(shape, device=transport.device)
            self._lost_parts = torch.zeros_like(self._parts)
            self._lost_total = torch.zeros_like(self._parts[rank])
        self._others = [peer for peer in range(num_ranks) if peer != rank]
        self._counts = [0 if peer == rank else shape[1] for peer in range(num_ranks)]
        self._key = 0

    def __call__(self, values: Tensor) -> None:
        """Replaces `values` ``(size,)`` by their sum over the ranks, nearly.

        Raises:
            ValueError: If a value is NaN or Inf.
            PeerError: If a rank is gone.
        """
        flat = self._parts.view(-1)
        flat[: self._size], flat[self._size :] = values, 0.0
        self._parts += self._lost_parts
        self._spread(self._collect())
        values.copy_(flat[: self._size])
        self._key += 1

    def state(self) -> dict[str, Any]:
        """What `restore` needs on this rank: how many calls there were, and what they lost."""
        lost = [part.to("cpu", copy=True) for part in (self._lost_parts, self._lost_total)]
        return {"calls": self._key, "lost": lost}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave on this rank for a buffer of this size."""
        self._key = state["calls"]
        for mine, lost in zip((self._lost_parts, self._lost_total), state["lost"], strict=True):
            mine.copy_(lost)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends in a call."""
        return 2 * sum(self._counts) * self._code.row_bytes(self._parts[0])

    def _collect(self) -> Tensor:
        """The sum of this rank's block, ``(rows of a block, width)``."""
        rank = self._transport.rank
        outgoing = self._parts[self._others]
        message, decoded = self._encode(outgoing, [(rank, block) for block in self._others])
        self._lost_parts[self._others] = outgoing - decoded
        received = self._transport.exchange(message, self._counts, self._counts)
        return self._parts[rank] + self._decode(received, [(p, rank) for p in self._others]).sum(0)

    def _spread(self, total: Tensor) -> None:
        """Fills all parts with the decoded sums of the ranks they belong to."""
        rank, num_ranks = self._transport.rank, self._transport.num_ranks
        total = total + self._lost_total
        message, decoded = self._encode(total[None], [(num_ranks, rank)])
        self._lost_total = total - decoded[0]
        message = message.repeat(len(self._others), 1)
        received = self._transport.exchange(message, self._counts, self._counts)
        self._parts[rank] = decoded[0]
        self._parts[self._others] = self._decode(received, [(num_ranks, p) for p in self._others])

    def _encode(self, blocks: Tensor, places: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The records of some blocks, and what their readers will decode."""
        rows = blocks.view(-1, blocks.shape[-1])
        message = rows.new_empty(len(rows), self._code.row_bytes(rows), dtype=torch.uint8)
        self._code.quantize(rows, None, self._noise(places), message, 0)
        return message, self._decode(message, places)

    def _decode(self, message: Tensor, places: list[tuple[int, int]]) -> Tensor:
        rows = torch.empty(len(message), self._parts.shape[-1], device=message.device)
        self._code.dequantize(message, 0, self._noise(places), rows)
        return rows.view(len(places), *self._parts.shape[1:])

    def _noise(self, places: list[tuple[int, int]]) -> Noise:
        """Other noise for each sender (N: the sum's), block, row and call."""
        num_ranks, num_rows, _ = self._parts.shape
        first = [(sender * num_ranks + block) * num_rows for sender, block in places]
        starts = torch.tensor(first, device=self._parts.device)
        rows = torch.arange(num_rows, device=self._parts.device)
        return Noise(self._key, (starts[:, None] + rows).view(-1))
