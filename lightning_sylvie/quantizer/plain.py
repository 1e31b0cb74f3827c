"""Quantizers without codes: rows as they are, or cast to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.ops import scatter_add_rows, select_rows
from lightning_sylvie.quantizer.base import Noise, Quantizer


@final
class Full(Quantizer):
    """The null quantizer: rows travel as they are, in their own type."""

    def row_bytes(self, rows: Tensor) -> int:
        return rows.shape[1] * rows.element_size()

    def quantize(
        self, rows: Tensor, index: Tensor | None, noise: Noise, message: Tensor, offset: int
    ) -> None:
        if index is not None:
            select_rows(rows, index, message, offset)
            return
        message[:, offset : offset + self.row_bytes(rows)] = rows.view(torch.uint8)

    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        rows.view(torch.uint8).copy_(message[:, offset : offset + self.row_bytes(rows)])

    def dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        scatter_add_rows(message, offset, index, counts, rows)


@final
class Half(Quantizer):
    """16 bits: a cast to bfloat16, whose range is that of float32, so small gradients survive."""

    def row_bytes(self, rows: Tensor) -> int:
        return 2 * rows.shape[1]

    def quantize(
        self, rows: Tensor, index: Tensor | None, noise: Noise, message: Tensor, offset: int
    ) -> None:
        Full().quantize(rows.to(torch.bfloat16), index, noise, message, offset)

    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        cast = rows.new_empty(rows.shape, dtype=torch.bfloat16)
        Full().dequantize(message, offset, noise, cast)
        rows.copy_(cast)
