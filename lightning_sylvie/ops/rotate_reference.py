"""The rotated ops in torch: what the kernels must equal, and what serves other devices.

Every step mirrors csrc/core/rotate.h, in float32 and in the same order, so the bytes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops import noise
from lightning_sylvie.ops.records import (
    NARROW_WIDTH,
    add_groups,
    bf16_bytes,
    float_bits,
    float_from_bits,
    from_bf16_bytes,
    pack,
    report_bad,
    unpack,
)
from lightning_sylvie.ops.rotation import BLOCK, left_to_scale, pieces, rotate, rotate_back

_SCALE_NOISE = 0x40000000
_SIZE_MIDDLE, _SIZE_HALF, _SIZE_LIMIT = 0.9814, 0.5286, 0.9816
_NAN = float("nan")


def row_bytes(width: int, bits: float) -> int:
    """Codes, a scale per piece and, unless the row is narrow, a mean."""
    return _code_bytes(width, bits) + side_bytes(width) if width > 0 else 0


def side_bytes(width: int) -> int:
    """What a row takes beside its codes."""
    mean_bytes = 2 if width >= NARROW_WIDTH else 0
    return 2 * len(pieces(width)) + mean_bytes if width > 0 else 0


def rotate_quantize_rows(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    key: int,
    bits: float,
    unbiased: bool,
    message: Tensor,
    offset: int,
    bad: Tensor,
) -> None:
    """See `ops.rotate_quantize_rows`."""
    values = (rows if index is None else rows[index]).float()
    width, keys = values.size(1), noise.row_keys(key, id)
    if values.numel() == 0:
        return
    has_mean = width >= NARROW_WIDTH
    is_bad = ~values.isfinite().all(1, keepdim=True)
    is_constant = (values == values[:, :1]).all(1, keepdim=True) & ~is_bad & has_mean
    normal = _normalizer(values)
    mean = _sent_mean(values) if has_mean else torch.zeros_like(normal)
    rotated = rotate((values - mean) * normal, keys)
    codes, shapes = _codes(rotated, bits)
    scales = _sent_scales(rotated, shapes, normal, keys, unbiased)
    is_bad |= ~(scales.isfinite().all(1, keepdim=True) | is_constant)
    side = bf16_bytes(torch.cat([scales, mean], 1) if has_mean else scales)
    record = torch.cat([codes, side], 1)
    num_codes = codes.size(1)
    if has_mean:
        record = torch.where(is_constant, _constant_record(values, num_codes, record), record)
    record = torch.where(is_bad, _bad_record(num_codes, record), record)
    message[:, offset : offset + record.size(1)] = record
    report_bad(is_bad[:, 0], bad)


def rotate_dequantize_rows(
    message: Tensor, offset: int, id: Tensor, key: int, bits: float, rows: Tensor
) -> None:
    """See `ops.rotate_dequantize_rows`."""
    rows.copy_(_decode(message, offset, noise.row_keys(key, id), bits, rows.size(1)))


def rotate_dequantize_add_rows(
    message: Tensor,
    offset: int,
    id: Tensor,
    key: int,
    bits: float,
    index: Tensor,
    counts: Sequence[int],
    rows: Tensor,
) -> None:
    """See `ops.rotate_dequantize_add_rows`."""
    values = _decode(message, offset, noise.row_keys(key, id), bits, rows.size(1))
    add_groups(values, index, counts, rows)


def _normalizer(values: Tensor) -> Tensor:
    """A power of two that brings the largest absolute value to 1..4."""
    exponent = (float_bits(values) & 0x7FFFFFFF).amax(1, keepdim=True) >> 23
    return float_from_bits((254 - exponent.clamp(1, 253)) << 23)


def _sent_mean(values: Tensor) -> Tensor:
    total = _lane_sum(values)
    mean = (total / values.size(1)).bfloat16().float()
    return torch.where(total.isfinite(), mean, 0.0)


def _sent(width: int, bits: float, device: torch.device) -> Tensor:
    """Which columns have a code: bool ``(width,)``."""
    is_sent = torch.ones(width, dtype=torch.bool, device=device)
    if bits < 1 and width >= NARROW_WIDTH:
        is_sent = torch.arange(width, device=device) % BLOCK < BLOCK // 2
    return is_sent


def _code_bytes(width: int, bits: float) -> int:
    num_sent = int(_sent(width, bits, torch.device("cpu")).sum())
    return (num_sent * (2 if bits == 2 else 1) + 7) // 8


def _codes(rotated: Tensor, bits: float) -> tuple[Tensor, Tensor]:
    """Code bytes ``(k, n)`` of the values, and the absolute values ``(k, width)`` they stand for,
    in units of their scale.
    """
    width, signs = rotated.size(1), rotated.signbit().long()
    is_sent = _sent(width, bits, rotated.device)
    if bits < 2:
        return pack(signs[:, is_sent], 1), is_sent.float().expand_as(rotated)
    is_large = torch.cat(
        [_normal_sizes(rotated[:, begin:end]) >= 1 for begin, end in pieces(width)], 1
    )
    blocks = zip(signs.split(BLOCK, 1), is_large.long().split(BLOCK, 1), strict=True)
    return pack(torch.cat([part for pair in blocks for part in pair], 1), 1), _sizes(is_large)


def _normal_sizes(piece: Tensor) -> Tensor:
    """Absolute values, with the limit between the sizes of 2-bit codes at 1."""
    squares = _lane_sum(piece * piece)
    factor = 1 / (_SIZE_LIMIT * (squares / piece.size(1)).sqrt())
    return (piece * torch.where(squares > 0, factor, 0.0)).abs()


def _sizes(is_large: Tensor) -> Tensor:
    half = torch.tensor(_SIZE_HALF, device=is_large.device)
    return torch.where(is_large, half, -half) + _SIZE_MIDDLE


def _sent_scales(
    rotated: Tensor, shapes: Tensor, normal: Tensor, keys: tuple[Tensor, Tensor], unbiased: bool
) -> Tensor:
    """What multiplies the codes of each piece, rounded to bf16 stochastically."""
    scales, width = [], rotated.size(1)
    shrink = 2.0 ** -((left_to_scale(width) + 1) // 2)
    for begin, end in pieces(width):
        piece, shape = rotated[:, begin:end], shapes[:, begin:end]
        products = _lane_sum(piece.abs() * shape)
        if unbiased:
            best = _lane_sum(piece * piece) / products
        else:
            best = products / _lane_sum(shape * shape)
        scales.append(torch.where(products == 0, 0.0, best * shrink / normal))
    scale = torch.cat(scales, 1)
    counters = _SCALE_NOISE + torch.arange(scale.size(1), device=scale.device)
    words = float_bits(scale) + (noise.random_bits(keys, counters) >> 16)
    is_rounded = scale.isfinite() & (scale > 0)
    return torch.where(is_rounded, float_from_bits(words & 0xFFFF0000), scale)


def _lane_sum(values: Tensor) -> Tensor:
    """Sums of rows ``(k, 1)`` in an order all kernels share: 32 lanes, then halves of them."""
    blocks = torch.nn.functional.pad(values, (0, -values.size(1) % BLOCK)).split(BLOCK, dim=1)
    lanes = torch.zeros_like(blocks[0])
    for block in blocks:
        lanes = lanes + block
    while lanes.size(1) > 1:
        a, b = lanes.chunk(2, dim=1)
        lanes = a + b
    return lanes


def _constant_record(values: Tensor, num_codes: int, record: Tensor) -> Tensor:
    """Lower half of the value in the first codes, a mark in the first scale, upper half last."""
    value_bytes = values[:, :1].contiguous().view(torch.uint8)
    constant = torch.zeros_like(record)
    constant[:, :2] = value_bytes[:, :2]
    constant[:, num_codes + 1] = 0x80
    constant[:, -2:] = value_bytes[:, 2:]
    return constant


def _bad_record(num_codes: int, record: Tensor) -> Tensor:
    """Codes of 0, scales and mean of NaN."""
    side = torch.full((1, (record.size(1) - num_codes) // 2), _NAN, device=record.device)
    codes = record.new_zeros(1, num_codes)
    return torch.cat([codes, bf16_bytes(side)], 1)


def read_scales(message: Tensor, offset: int, bits: float, width: int) -> Tensor:
    """Scales of the pieces of each row: float32 ``(k, pieces)``, the first -0.0 if constant."""
    begin = offset + _code_bytes(width, bits)
    return from_bf16_bytes(message[:, begin : begin + 2 * len(pieces(width))])


def _decode(
    message: Tensor, offset: int, keys: tuple[Tensor, Tensor], bits: float, width: int
) -> Tensor:
    if width == 0:
        return torch.zeros(message.size(0), 0, device=message.device)
    record = message[:, offset : offset + row_bytes(width, bits)]
    num_codes, shares = _code_bytes(width, bits), pieces(width)
    side = from_bf16_bytes(record[:, num_codes:])
    sizes = [end - begin for begin, end in shares]
    size = side[:, : len(shares)] * 2.0 ** -(left_to_scale(width) // 2)
    scale = size.repeat_interleave(
        torch.tensor(sizes, device=side.device), dim=1, output_size=width
    )
    is_minus, shape = _shapes(record[:, :num_codes], bits, width)
    scale = scale * shape
    values = rotate_back(torch.where(is_minus, -scale, scale), keys)
    if width < NARROW_WIDTH:
        return values + 0.0
    constant = torch.cat([record[:, :2], record[:, -2:]], 1).view(torch.float32)
    is_constant = float_bits(side[:, :1]) == 0x80000000
    return torch.where(is_constant, constant, values + side[:, -1:])


def _shapes(codes: Tensor, bits: float, width: int) -> tuple[Tensor, Tensor]:
    """Signs (True is minus) and absolute values ``(k, width)`` of codes; see `_codes`."""
    if bits < 2:
        is_sent = _sent(width, bits, codes.device)
        is_minus = is_sent.expand(codes.size(0), -1).clone()
        is_minus[:, is_sent] = unpack(codes, int(is_sent.sum()), 1) == 1
        return is_minus, is_sent.float()
    counts = [min(BLOCK, width - begin) for begin in range(0, width, BLOCK)]
    parts = unpack(codes, 2 * width, 1).split([n for count in counts for n in (count, count)], 1)
    is_minus, is_large = torch.cat(parts[::2], 1) == 1, torch.cat(parts[1::2], 1) == 1
    return is_minus, _sizes(is_large)
