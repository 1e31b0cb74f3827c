"""How rows are written into a message and read from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops import scatter_add_rows, select_rows


class Quantizer(ABC):
    """Turns rows into payload bytes and back.

    A message is uint8 ``(num_rows, stride)``: one record per row. A quantizer writes and reads the
    `row_bytes` of a record that start at `offset`, so several tensors share one message.
    """

    @abstractmethod
    def row_bytes(self, rows: Tensor) -> int:
        """Bytes of one row of `rows` in a message."""

    @abstractmethod
    def quantize(self, rows: Tensor, index: Tensor | None, message: Tensor, offset: int) -> None:
        """Writes ``rows[index]``, or all of `rows` in order, into `message`."""

    @abstractmethod
    def dequantize(self, message: Tensor, offset: int, rows: Tensor) -> None:
        """Fills `rows` ``(num_rows, width)`` with the rows of `message`."""

    @abstractmethod
    def dequantize_add(
        self, message: Tensor, offset: int, index: Tensor, counts: Sequence[int], rows: Tensor
    ) -> None:
        """Adds the rows of `message` to ``rows[index]``; see `ops.scatter_add_rows`."""


class Full(Quantizer):
    """The null quantizer: rows travel as they are, in their own type."""

    def row_bytes(self, rows: Tensor) -> int:
        return rows.shape[1] * rows.element_size()

    def quantize(self, rows: Tensor, index: Tensor | None, message: Tensor, offset: int) -> None:
        if index is not None:
            select_rows(rows, index, message, offset)
            return
        message[:, offset : offset + self.row_bytes(rows)] = rows.view(torch.uint8)

    def dequantize(self, message: Tensor, offset: int, rows: Tensor) -> None:
        rows.view(torch.uint8).copy_(message[:, offset : offset + self.row_bytes(rows)])

    def dequantize_add(
        self, message: Tensor, offset: int, index: Tensor, counts: Sequence[int], rows: Tensor
    ) -> None:
        scatter_add_rows(message, offset, index, counts, rows)
