"""The min/max ops in torch: what the kernels must equal, and what serves other devices.

Every step mirrors csrc/core/minmax.h, in float32 and in the same order, so the bytes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sylvie.ops import noise
from lightning_sylvie.ops.records import (
    NARROW_WIDTH,
    add_groups,
    bf16_above,
    bf16_below,
    bf16_bytes,
    float_bits,
    float_from_bits,
    from_bf16_bytes,
    pack,
    report_bad,
    unpack,
)

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NAN = float("nan")


class Grid(NamedTuple):
    """The levels zero, zero + scale, ... of each row: float32 ``(k, 1)`` each.

    A scale of 0 marks a row of one value, NaN a row that has no finite levels.
    """

    scale: Tensor
    zero: Tensor


def quantize_rows(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    key: int,
    bits: int,
    message: Tensor,
    offset: int,
    bad: Tensor,
) -> None:
    """See `ops.quantize_rows`."""
    values = (rows if index is None else rows[index]).float()
    width, keys = values.size(1), noise.row_keys(key, id)
    if values.numel() == 0:
        return
    grid = _make_grid(values, bits)
    is_bad = grid.scale.isnan()
    constant = torch.where(is_bad, _NAN, values[:, :1])
    offsets = (values - grid.zero) * (1 / grid.scale) + noise.dithers(keys, width)
    codes = (offsets.nan_to_num(1).long() - 1).clamp(max=2**bits - 1)
    record = torch.cat([pack(codes, bits), _grid_bytes(grid, width, bits)], dim=1)
    has_levels = grid.scale > 0
    record = torch.where(has_levels, record, constant_record(constant, keys, width, bits))
    message[:, offset : offset + record.size(1)] = record
    report_bad(is_bad[:, 0], bad)


def dequantize_rows(message: Tensor, offset: int, bits: int, rows: Tensor) -> None:
    """See `ops.dequantize_rows`."""
    rows.copy_(_decode(message, offset, bits, rows.size(1)))


def dequantize_add_rows(
    message: Tensor,
    offset: int,
    bits: int,
    index: Tensor,
    counts: Sequence[int],
    rows: Tensor,
) -> None:
    """See `ops.dequantize_add_rows`."""
    add_groups(_decode(message, offset, bits, rows.size(1)), index, counts, rows)


def _make_grid(values: Tensor, bits: int) -> Grid:
    is_finite = values.isfinite().all(1, keepdim=True)
    values = torch.where(is_finite, values, 0.0)
    low, high = values.amin(1, keepdim=True) + 0.0, values.amax(1, keepdim=True)
    is_narrow = values.size(1) < NARROW_WIDTH
    scale, zero = (_narrow_grid if is_narrow else _wide_grid)(low, high, bits)
    top = 2**bits - 1
    has_levels = zero.isfinite() & (top * scale + zero).isfinite() & is_finite
    scale = torch.where(has_levels, scale, _NAN)
    return Grid(torch.where((low == high) & is_finite, 0.0, scale), zero)


def _wide_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    top = 2**bits - 1
    zero = bf16_below(low)
    scale = bf16_above((high - zero) / top).clamp(min=_SMALLEST_SCALE)
    too_small = top * scale + zero < high
    return torch.where(too_small, float_from_bits(float_bits(scale) + 0x10000), scale), zero


def _narrow_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    top, step = 2**bits - 1, _zero_step(bits)
    scale = torch.maximum((high - low) / top, low.abs() / (128 * step)).clamp(min=_SMALLEST_SCALE)
    scale = float_from_bits((float_bits(scale) + 0x7FFFFF) & 0x7F800000)
    while True:
        multiple = (low / scale / step).floor()
        too_small = (multiple < -128) | (multiple > 127) | (high / scale > multiple * step + top)
        too_small &= scale.isfinite()
        if not too_small.any():
            return scale, multiple * step * scale
        scale = torch.where(too_small, scale * 2, scale)


def _zero_step(bits: int) -> float:
    """The step of a narrow row's zero, in units of its scale."""
    return 2.0 ** (bits - 4)


def _grid_bytes(grid: Grid, width: int, bits: int) -> Tensor:
    if width >= NARROW_WIDTH:
        return bf16_bytes(torch.cat([grid.scale, grid.zero], 1))
    exponent = (float_bits(grid.scale) >> 23).to(torch.uint8)
    multiple = (
        (grid.zero / grid.scale / _zero_step(bits)).nan_to_num(0).clamp(-128, 127).to(torch.int8)
    )
    return torch.cat([exponent, multiple.view(torch.uint8)], 1)


def constant_record(value: Tensor, keys: tuple[Tensor, Tensor], width: int, bits: int) -> Tensor:
    """Records of rows of one value ``(k, 1)``, or of NaN: its bytes in place of zero and codes."""
    num_codes = (width * bits + 7) // 8
    side = 4 if width >= NARROW_WIDTH else 2
    record = torch.zeros(value.size(0), num_codes + side, dtype=torch.uint8, device=value.device)
    words = float_bits(value)
    kept = min(num_codes, 2 if width >= NARROW_WIDTH else 3)
    if width < NARROW_WIDTH:
        dropped = (1 << 8 * (3 - kept)) - 1
        rounded = words + (noise.random_bits(keys, words.new_zeros(1)) & dropped)
        words = torch.where(float_from_bits(rounded).isfinite(), rounded, words)
    value_bytes = words.to(torch.int32).view(torch.uint8)  # (k, 4), lowest first
    in_side = 2 if width >= NARROW_WIDTH else 1
    record[:, :kept] = value_bytes[:, 4 - in_side - kept : 4 - in_side]
    record[:, -in_side:] = value_bytes[:, -in_side:]
    return record


def _constant_of(record: Tensor, width: int, bits: int) -> Tensor:
    num_codes = (width * bits + 7) // 8
    in_side = 2 if width >= NARROW_WIDTH else 1
    kept = min(num_codes, 4 - in_side)
    value_bytes = record.new_zeros(record.size(0), 4)
    value_bytes[:, 4 - in_side - kept : 4 - in_side] = record[:, :kept]
    value_bytes[:, -in_side:] = record[:, -in_side:]
    return value_bytes.view(torch.float32)


def read_grid(message: Tensor, offset: int, bits: int, width: int) -> Grid:
    """The levels of the rows, at least one value wide, that stand at ``message[:, offset:]``."""
    begin = offset + (width * bits + 7) // 8
    if width >= NARROW_WIDTH:
        scale, zero = from_bf16_bytes(message[:, begin : begin + 4]).split(1, dim=1)
    else:
        side = message[:, begin : begin + 2]
        scale = float_from_bits(side[:, :1].long() << 23)
        zero = side[:, 1:].contiguous().view(torch.int8).float() * _zero_step(bits) * scale
    return Grid(scale, zero)


def _decode(message: Tensor, offset: int, bits: int, width: int) -> Tensor:
    num_codes = (width * bits + 7) // 8
    if width == 0:
        return torch.zeros(message.size(0), 0, device=message.device)
    record = message[:, offset : offset + num_codes + (4 if width >= NARROW_WIDTH else 2)]
    scale, zero = read_grid(message, offset, bits, width)
    levels = unpack(record[:, :num_codes], width, bits).float() * scale + zero
    return torch.where(scale == 0, _constant_of(record, width, bits), levels)
