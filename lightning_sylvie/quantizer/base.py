"""What every quantizer does: rows into payload bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sylvie.ops import scatter_add_rows


class NonFiniteRowError(ValueError):
    """A row holds NaN or Inf, which no code can carry.

    Attributes:
        position: Its place in the message.
    """

    def __init__(self, position: int) -> None:
        super().__init__(f"row {position} of the message is not finite")
        self.position = position


@dataclass(frozen=True)
class Noise:
    """What the randomness of a message's rows is a function of (spec: Low-bit module).

    Attributes:
        key: One number for seed, epoch, layer, direction and tensor.
        id: int64 ``(rows of the message,)``: the node that each row belongs to.
    """

    key: int
    id: Tensor


class Quantizer(ABC):
    """Turns rows into payload bytes and back.

    A message is uint8 ``(num_rows, stride)``: one record per row. A quantizer writes and reads the
    `row_bytes` of a record that start at `offset`, so several tensors share one message. Rows are
    ``(n, width)``, contiguous; those that come out have the type of those that went in.
    """

    @abstractmethod
    def row_bytes(self, rows: Tensor) -> int:
        """Bytes of one row of `rows` in a message."""

    def side_bytes(self, rows: Tensor) -> int:
        """Of them, those that are no codes (scales and the like); none, unless a code has some."""
        return 0

    @abstractmethod
    def quantize(
        self, rows: Tensor, index: Tensor | None, noise: Noise, message: Tensor, offset: int
    ) -> None:
        """Writes ``rows[index]``, or all of `rows` in order, into `message`.

        Raises:
            NonFiniteRowError: If one of them holds NaN or Inf (quantizers below 16 bits).
        """

    @abstractmethod
    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        """Fills `rows` ``(num_rows, width)`` with the rows of `message`."""

    def spread(self, message: Tensor, offset: int, like: Tensor) -> Tensor | None:
        """What the squared errors of the rows in `message` are relative to, as both ends read it.

        float64 ``(num_rows,)``, not negative, each from its row alone, to the bit; None: records
        of this code do not tell.
        """
        return None

    def dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        """Adds the rows of `message` to ``rows[index]``; see `ops.scatter_add_rows`.

        Here they are dequantized first; a code that has an op for both overrides it.
        """
        decoded = rows.new_empty((message.shape[0], rows.shape[1]))
        self.dequantize(message, offset, noise, decoded)
        scatter_add_rows(decoded.view(torch.uint8), 0, index, counts, rows)
