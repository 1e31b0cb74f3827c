"""Random rotations of rows of any width, in torch; see csrc/core/rotate.h."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sylvie.ops import noise

BLOCK = 32
_MAX_ROTATION = 256
_ROUND_SIGNS = 0x20000000
_LAST_PIECE_SIGNS = 0x10000000


def rotate(values: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Rows ``(k, width)`` rotated in two rounds of pieces."""
    values = values.clone()
    for begin, size, counter, factor in _rotations(values.size(1)):
        piece = values[:, begin : begin + size] * _signs(keys, size, counter, factor)
        values[:, begin : begin + size] = _hadamard(piece)
    return values


def rotate_back(values: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """The inverse of `rotate`."""
    values = values.clone()
    for begin, size, counter, factor in reversed(_rotations(values.size(1))):
        piece = _hadamard(values[:, begin : begin + size])
        values[:, begin : begin + size] = piece * _signs(keys, size, counter, factor)
    return values


def _rotation_size(width: int) -> int:
    """Values that one transform mixes: the largest power of two that fits."""
    size = 1
    while size * 2 <= width and size < _MAX_ROTATION:
        size *= 2
    return size


def _rounds(width: int) -> list[tuple[int, int]]:
    """Size of the pieces of each round and its first counter."""
    size = _rotation_size(width)
    return [(min(size, BLOCK), 0), (size, _ROUND_SIGNS)]


def _rotations(width: int) -> list[tuple[int, int, int, float]]:
    """First column, size, first counter of the signs and factor of each transform, in order.

    The factor makes a round orthonormal, unless whole pieces cover the row: then all values grow
    alike, and the scale takes it, see `left_to_scale`.
    """
    steps = []
    for size, start in _rounds(width):
        exponent = size.bit_length() - 1
        root = 2.0 ** -(exponent // 2) * (0.70710678 if exponent % 2 else 1.0)
        factor = root if width % size else 1.0
        begins = range(0, width - size + 1, size)
        steps += [(begin, size, start + begin // BLOCK, factor) for begin in begins]
        if width % size:
            steps.append((width - size, size, start + _LAST_PIECE_SIGNS, factor))
    return steps


def left_to_scale(width: int) -> int:
    """Half of this power of two is in the scale as it is written, half where it is read."""
    return sum(size.bit_length() - 1 for size, _ in _rounds(width) if width % size == 0)


def pieces(width: int) -> list[tuple[int, int]]:
    """The columns begin..end that share a scale; the last transform takes its share first."""
    size = _rotation_size(width)
    begins = list(range(0, width - size, size))
    ends = [min(begin + size, width - size) for begin in begins]
    return [*zip(begins, ends, strict=True), (width - size, width)]


def _hadamard(values: Tensor) -> Tensor:
    """Unnormalized transform along the rows, the widest level first."""
    rows, size = values.shape
    half = size // 2
    while half > 0:
        a, b = values.reshape(rows, size // (2 * half), 2, half).unbind(2)
        values = torch.stack([a + b, a - b], 2).reshape(rows, size)
        half //= 2
    return values


def _signs(keys: tuple[Tensor, Tensor], size: int, counter: int, factor: float) -> Tensor:
    """Random signs ``(k, size)`` times a factor."""
    device = keys[0].device
    words = noise.random_bits(keys, counter + torch.arange(-(-size // BLOCK), device=device))
    bits = words[:, :, None] >> torch.arange(BLOCK, device=device) & 1
    value = torch.tensor(factor, dtype=torch.float32, device=device)
    return torch.where(bits.flatten(1)[:, :size] == 1, -value, value)
