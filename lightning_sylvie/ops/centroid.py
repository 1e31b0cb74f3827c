"""Quantization of rows at 1 bit to two centroids: a code to compare others with.

Each value becomes the mean of its half of the row, so the error is small, but it is the same
whenever the row is: the code is biased and knows no noise. Written in torch alone; the records are
those of min/max at 1 bit, and read as such.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sylvie.ops import noise
from lightning_sylvie.ops.minmax import minmax_row_bytes, quantize_rows
from lightning_sylvie.ops.minmax_reference import constant_record
from lightning_sylvie.ops.records import (
    NARROW_WIDTH,
    bf16_above,
    bf16_below,
    bf16_bytes,
    check_quantize,
    pack,
    report_bad,
)

_ROWS_AT_ONCE = 4096
_ROUNDS = 6
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def centroid_quantize_rows(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    key: int,
    message: Tensor,
    offset: int,
    bad: Tensor,
) -> None:
    """Writes ``rows[index[k]]`` to ``message[k, offset:]``, for `dequantize_rows` at 1 bit.

    Rows under 32 values, whose records hold no free levels, are written as min/max rows. Arguments
    and errors are those of `quantize_rows`.
    """
    width = rows.size(-1)
    check_quantize(rows, index, id, message, offset, bad, minmax_row_bytes(width, 1))
    if width < NARROW_WIDTH:
        quantize_rows(rows, index, id, key, 1, message, offset, bad)
        return
    places = torch.arange(len(id), device=rows.device) if index is None else index
    is_bad = torch.zeros(len(id), dtype=torch.bool, device=rows.device)
    for begin in range(0, len(id), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        values = rows[places[part]].float()
        record, is_bad[part] = _record(values, noise.row_keys(key, id[part]))
        message[part, offset : offset + record.size(1)] = record
    report_bad(is_bad, bad)


def _record(values: Tensor, keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Records of wide rows, and which of them no finite levels fit: bool ``(k,)``."""
    low, high = _centroids(values.double())
    zero = bf16_below(low.float())
    scale = bf16_above((high - zero).float()).clamp(min=_SMALLEST_SCALE)
    codes = (values > zero + scale / 2).long()
    record = torch.cat([pack(codes, 1), bf16_bytes(torch.cat([scale, zero], 1))], 1)
    is_constant = (values == values[:, :1]).all(1, keepdim=True)
    is_good = values.isfinite().all(1, keepdim=True)
    is_good &= is_constant | (zero.isfinite() & (scale + zero).isfinite())
    value = torch.where(is_good, values[:, :1], float("nan"))
    constant = constant_record(value, keys, values.size(1), 1)
    return torch.where(is_constant | ~is_good, constant, record), ~is_good[:, 0]


def _centroids(values: Tensor) -> tuple[Tensor, Tensor]:
    """The means of the lower and the upper values of each row, by Lloyd's rounds."""
    middle = values.mean(1, keepdim=True)
    for _ in range(_ROUNDS):
        is_high = values > middle
        num_high = is_high.sum(1, keepdim=True)
        high = (values * is_high).sum(1, keepdim=True) / num_high.clamp(min=1)
        low = (values * ~is_high).sum(1, keepdim=True) / (values.size(1) - num_high).clamp(min=1)
        middle = (low + high) / 2
    return low, high
