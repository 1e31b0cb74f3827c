"""Which quantizer a number of bits means, and which rows it suits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final, overload

from torch import Tensor

from lightning_sylvie.quantizer.adaptive import AdaptiveBits, Mixture
from lightning_sylvie.quantizer.base import Noise, Quantizer
from lightning_sylvie.quantizer.coded import Centroid, Coded, MinMax, Rotated
from lightning_sylvie.quantizer.plain import Full, Half

NARROW = 16
"""Rows of fewer values (attention logits, degrees) travel in 16 bits: codes would ruin them."""

BITS = (0.5, 1, 2, 4, 8, 16, 32)
Code: TypeAlias = Quantizer | Mixture
CODES: dict[str, type[Coded]] = {"minmax": MinMax, "rotated": Rotated, "centroid": Centroid}


@overload
def choose(bits: float, quantizer: str | Quantizer = ...) -> Quantizer: ...
@overload
def choose(bits: float | AdaptiveBits, quantizer: str | Quantizer = ...) -> Code: ...


def choose(bits: float | AdaptiveBits, quantizer: str | Quantizer = "auto") -> Code:
    """The quantizer for `bits` per value, safe for rows of any type and width.

    Args:
        bits: 0.5, 1, 2, 4, 8, 16 (a cast), 32 (as they are), or `AdaptiveBits`.
        quantizer: ``"minmax"`` (1 to 8 bits), ``"rotated"`` (up to 2), ``"centroid"`` (1),
            ``"auto"`` (rotated where it can, else minmax), or an instance, whose own bits count.

    Raises:
        ValueError: For unknown bits or names, or bits that the quantizer does not have.
    """
    if isinstance(bits, AdaptiveBits):
        return _mixture(bits, quantizer)
    if isinstance(quantizer, Quantizer):
        return Fitted(quantizer)
    if bits not in BITS:
        raise ValueError(f"expected bits in {BITS}, got {bits}")
    if quantizer not in ("auto", *CODES):
        raise ValueError(
            f"expected quantizer in {('auto', *CODES)} or an object, got {quantizer!r}"
        )
    if bits == 32:
        return Full()
    if bits == 16:
        return Fitted(Half())
    name = quantizer if quantizer != "auto" else "rotated" if bits in Rotated.BITS else "minmax"
    return Fitted(CODES[name](bits))


def _mixture(bits: AdaptiveBits, quantizer: str | Quantizer) -> Mixture:
    """The codes of adaptive bits."""
    known: dict[str, dict[float, type[MinMax | Rotated]]] = {
        "minmax": dict.fromkeys(MinMax.BITS, MinMax),
        "rotated": dict.fromkeys(Rotated.BITS, Rotated),
    }
    known["auto"] = known["minmax"] | known["rotated"]
    if not isinstance(quantizer, str) or quantizer not in known:
        raise ValueError(
            f"expected quantizer in {tuple(known)} with AdaptiveBits, got {quantizer!r}: other "
            "codes have one number of bits"
        )
    kinds = known[quantizer]
    if not set(bits.choices) <= kinds.keys():
        raise ValueError(
            f"expected choices of {tuple(kinds)} with quantizer {quantizer!r}, got {bits.choices}"
        )
    codes = [kinds[each](each) for each in bits.choices]
    return Mixture(bits, [Fitted(code) for code in codes], [code.relative_error for code in codes])


@final
class Fitted(Quantizer):
    """A code where it suits; 16 bits for narrow rows, integers as they are.

    Args:
        code: For floating-point rows of `NARROW` values and more.
    """

    def __init__(self, code: Quantizer) -> None:
        self.code = code
        self._half, self._full = Half(), Full()

    def __repr__(self) -> str:
        return repr(self.code)

    def row_bytes(self, rows: Tensor) -> int:
        return self._for(rows).row_bytes(rows)

    def side_bytes(self, rows: Tensor) -> int:
        return self._for(rows).side_bytes(rows)

    def quantize(
        self, rows: Tensor, index: Tensor | None, noise: Noise, message: Tensor, offset: int
    ) -> None:
        self._for(rows).quantize(rows, index, noise, message, offset)

    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        self._for(rows).dequantize(message, offset, noise, rows)

    def dequantize_add(
        self,
        message: Tensor,
        offset: int,
        noise: Noise,
        index: Tensor,
        counts: Sequence[int],
        rows: Tensor,
    ) -> None:
        self._for(rows).dequantize_add(message, offset, noise, index, counts, rows)

    def spread(self, message: Tensor, offset: int, like: Tensor) -> Tensor | None:
        return self._for(like).spread(message, offset, like)

    def _for(self, rows: Tensor) -> Quantizer:
        if not rows.is_floating_point():
            return self._full
        return self.code if rows.shape[1] >= NARROW else self._half
