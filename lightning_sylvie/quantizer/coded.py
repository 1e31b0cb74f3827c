"""Quantizers of 1 to 8 bits per value, on the compiled ops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import pi
from typing import final

import torch
from torch import Tensor

from lightning_sylvie import ops
from lightning_sylvie.quantizer.base import Noise, NonFiniteRowError, Quantizer

_OF_ENERGY = {0.5: 0.5 / pi, 1: 2 / pi, 2: 0.7788}  # 1 / square of a normal row's unbiased scale
_ERRORS = {0.5: pi - 1, 1: pi / 2 - 1, 2: 0.1331}
_SPAN = 32  # squared range of a normal row, in variances
_NONE = torch.iinfo(torch.int64).max


class Coded(Quantizer):
    """What codes share: checks, float64 rows by way of float32, and non-finite rows.

    Args:
        bits: Bits per value.

    Raises:
        ValueError: For bits that the code does not have.
    """

    BITS: tuple[float, ...]

    def __init__(self, bits: float = 1) -> None:
        if bits not in self.BITS:
            raise ValueError(f"expected bits in {self.BITS} for {type(self).__name__}, got {bits}")
        self.bits = bits

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.bits})"

    def row_bytes(self, rows: Tensor) -> int:
        return self._row_bytes(rows.shape[1])

    def side_bytes(self, rows: Tensor) -> int:
        return self._side_bytes(rows.shape[1])

    @final
    def quantize(
        self, rows: Tensor, index: Tensor | None, noise: Noise, message: Tensor, offset: int
    ) -> None:
        bad = torch.full((1,), _NONE, dtype=torch.int64, device=rows.device)
        self._quantize(_single(rows), index, noise, message, offset, bad)
        if (position := int(bad)) != _NONE:
            raise NonFiniteRowError(position)

    @final
    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        decoded = _single(rows, empty=True)
        self._dequantize(message, offset, noise, decoded)
        if decoded is not rows:
            rows.copy_(decoded)

    @final
    def dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        if rows.dtype == torch.float64:
            super().dequantize_add(message, offset, noise, index, counts, rows)
        else:
            self._dequantize_add(message, offset, noise, index, counts, rows)

    @abstractmethod
    def _row_bytes(self, width: int) -> int: ...

    @abstractmethod
    def _side_bytes(self, width: int) -> int: ...

    @abstractmethod
    def _quantize(
        self,
        rows: Tensor,
        index: Tensor | None,
        noise: Noise,
        message: Tensor,
        offset: int,
        bad: Tensor,
    ) -> None: ...

    @abstractmethod
    def _dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None: ...

    @abstractmethod
    def _dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None: ...


class _Levels(Coded):
    """Codes that are read as ``code * scale + zero``."""

    def _row_bytes(self, width: int) -> int:
        return ops.minmax_row_bytes(width, int(self.bits))

    def _side_bytes(self, width: int) -> int:
        return ops.minmax_side_bytes(width)

    def _dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        ops.dequantize_rows(message, offset, int(self.bits), rows)

    def _dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        ops.dequantize_add_rows(message, offset, int(self.bits), index, counts, rows)


@final
class MinMax(_Levels):
    """The paper's code: levels between a row's minimum and maximum, rounded stochastically.

    Unbiased; per value variance at most scale^2 / 4, where scale = range / (2^bits - 1)
    (Quantizer and Dequantizer sections, Equations 3 to 5 of the paper).
    """

    BITS = (1, 2, 4, 8)

    @property
    def relative_error(self) -> float:
        """A bound on a row's squared error relative to its spread.

        That is width * scale^2 / 4, and the spread as if the row was normal: width * range^2 / 32,
        as 256 normal values span 5.6 standard deviations. So it compares to that of `Rotated`.
        """
        top = (1 << int(self.bits)) - 1
        return _SPAN / 4 / top**2

    def spread(self, message: Tensor, offset: int, like: Tensor) -> Tensor:
        width = like.shape[1]
        ranges = ops.minmax_ranges(message, offset, width, int(self.bits))
        return width / _SPAN * ranges.square()

    def _quantize(
        self,
        rows: Tensor,
        index: Tensor | None,
        noise: Noise,
        message: Tensor,
        offset: int,
        bad: Tensor,
    ) -> None:
        ops.quantize_rows(rows, index, noise.id, noise.key, int(self.bits), message, offset, bad)


@final
class Centroid(_Levels):
    """Two levels per row, the means of its lower and its upper values: small error, but biased.

    For comparison: what a row loses in every epoch alike, training does not average out.
    """

    BITS = (1,)

    def _quantize(
        self,
        rows: Tensor,
        index: Tensor | None,
        noise: Noise,
        message: Tensor,
        offset: int,
        bad: Tensor,
    ) -> None:
        ops.centroid_quantize_rows(rows, index, noise.id, noise.key, message, offset, bad)


@final
class Rotated(Coded):
    """Signs of the centred row after a random rotation of its own (DRIVE), or two bits (EDEN).

    A row's error neither depends on its few largest values nor resembles that of other rows, so it
    averages out where rows are aggregated.

    Args:
        bits: Bits per value; 0.5 sends signs of half of the rotated values.
        unbiased: False: the scale of the least error, which shrinks rows.
    """

    BITS = ops.ROTATED_BITS

    def __init__(self, bits: float = 1, *, unbiased: bool = True) -> None:
        super().__init__(bits)
        self.unbiased = unbiased

    @property
    def relative_error(self) -> float:
        """A row's squared error relative to its spread, its energy without the mean.

        Rotated values are nearly normal. Of these, with variance 1, signs have the unbiased scale
        sqrt(pi/2), or twice that if half of them are left out, and lose the square's excess over 1;
        the two sizes of 2 bits are those of the best quantizer, with 1 / 0.8825 (Max 1960).
        """
        return _ERRORS[self.bits]

    def spread(self, message: Tensor, offset: int, like: Tensor) -> Tensor:
        width = like.shape[1]
        bits = self.bits if width >= 32 else max(self.bits, 1)  # narrow rows have all signs
        return ops.rotated_energy(message, offset, width, self.bits) * _OF_ENERGY[bits]

    def _row_bytes(self, width: int) -> int:
        return ops.rotated_row_bytes(width, self.bits)

    def _side_bytes(self, width: int) -> int:
        return ops.rotated_side_bytes(width)

    def _quantize(
        self,
        rows: Tensor,
        index: Tensor | None,
        noise: Noise,
        message: Tensor,
        offset: int,
        bad: Tensor,
    ) -> None:
        ops.rotate_quantize_rows(
            rows, index, noise.id, noise.key, self.bits, self.unbiased, message, offset, bad
        )

    def _dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        ops.rotate_dequantize_rows(message, offset, noise.id, noise.key, self.bits, rows)

    def _dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        ops.rotate_dequantize_add_rows(
            message, offset, noise.id, noise.key, self.bits, index, counts, rows
        )


def _single(rows: Tensor, *, empty: bool = False) -> Tensor:
    """The rows in a type that the ops read: float64 goes through float32."""
    if rows.dtype != torch.float64:
        return rows
    return torch.empty_like(rows, dtype=torch.float32) if empty else rows.float()
