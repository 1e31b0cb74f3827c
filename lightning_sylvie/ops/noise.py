"""Noise as a pure function of key, node id and column, in torch; see csrc/core/noise.h.

Words of 32 bits are held in int64, so that products do not lose their sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def row_keys(key: int, id: Tensor) -> tuple[Tensor, Tensor]:
    """The two words that distinguish the noise of each row: ``(k,)`` each."""
    start = _mix(torch.tensor(_signed(key), dtype=torch.int64, device=id.device))
    mixed = _mix(start + id)
    return mixed & _WORD, (mixed >> 32) & _WORD


def random_bits(keys: tuple[Tensor, Tensor], counter: Tensor) -> Tensor:
    """32 random bits for each row and counter: ``(k, counters)``."""
    first, second = (word[:, None] for word in keys)
    bits = first ^ counter
    bits = _multiply(bits ^ (bits >> 16), 0x7FEB352D)
    bits = _multiply(((bits ^ (bits >> 15)) + second) & _WORD, 0x846CA68B)
    return bits ^ (bits >> 16)


def dithers(keys: tuple[Tensor, Tensor], width: int) -> Tensor:
    """``1 + u`` with u uniform in (0, 1): float32 ``(k, width)``."""
    column = torch.arange(width, device=keys[0].device)
    bits = random_bits(keys, column // 32 * 16 + column % 16)
    halves = torch.where(column % 32 < 16, bits & 0xFFFF, bits >> 16)
    return (halves << 7 | 0x3F800040).to(torch.int32).view(torch.float32)


def _mix(state: Tensor) -> Tensor:
    """One step of splitmix64; int64 sums and products wrap as unsigned ones do."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, places: int) -> Tensor:
    return (state >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return (word + 2**63) % 2**64 - 2**63


def _multiply(word: Tensor, factor: int) -> Tensor:
    """The lower 32 bits of a product; the upper ones would overflow int64."""
    upper = (word * (factor >> 16)) & 0xFFFF
    return ((upper << 16) + word * (factor & 0xFFFF)) & _WORD
