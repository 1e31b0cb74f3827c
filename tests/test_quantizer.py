"""Quantizers by name, and the rows that each of them suits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_sylvie.quantizer import Full, MinMax, Noise, NonFiniteRowError, Quantizer, choose
from lightning_sylvie.quantizer.choice import BITS


def round_trip(code: Quantizer, rows: Tensor, index: Tensor | None = None, key: int = 1) -> Tensor:
    """What a receiver makes of ``rows[index]``."""
    num_rows = rows.shape[0] if index is None else index.numel()
    message = torch.zeros(num_rows, code.row_bytes(rows), dtype=torch.uint8)
    noise = Noise(key, torch.arange(num_rows))
    code.quantize(rows, index, noise, message, 0)
    out = rows.new_empty(num_rows, rows.shape[1])
    code.dequantize(message, 0, noise, out)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_keep_their_type_and_shape(bits: float, dtype: torch.dtype) -> None:
    rows = torch.randn(20, 40).to(dtype)
    out = round_trip(choose(bits), rows, torch.tensor([3, 5, 5]))
    assert out.shape == (3, 40)
    assert out.dtype == dtype
    assert bool(out.isfinite().all())


def test_more_bits_less_error() -> None:
    rows = torch.randn(50, 64)
    errors = [float((round_trip(choose(bits), rows) - rows).norm()) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0


@pytest.mark.parametrize(
    ("name", "bits"),
    [("minmax", 1), ("minmax", 2), ("rotated", 0.5), ("rotated", 1), ("rotated", 2)],
)
def test_few_bits_are_unbiased_through_the_class(name: str, bits: float) -> None:
    rows, draws = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), 4000
    code = choose(bits, name)
    decoded = torch.stack([round_trip(code, rows, key=key) for key in range(draws)])
    spread = decoded.std(0).clamp(min=0.1)  # the smallest value of a row is hardly ever rounded up
    error = (decoded.mean(0) - rows).abs() / (spread / draws**0.5)
    assert float(error.max()) < 5.0


@pytest.mark.parametrize("bits", [0.5, 1, 2, 4, 8, 16])
def test_narrow_rows_travel_in_16_bits_and_integers_as_they_are(bits: float) -> None:
    code = choose(bits)
    logits = torch.randn(10, 8)
    assert code.row_bytes(logits) == 16
    torch.testing.assert_close(round_trip(code, logits), logits, rtol=2**-8, atol=0.0)
    kinds = torch.arange(40).view(10, 4)
    assert torch.equal(round_trip(code, kinds), kinds)


@pytest.mark.parametrize("width", [16, 31, 32, 64, 100, 602])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_of_a_row(width: int, bits: int) -> None:
    side = 4 if width >= 32 else 2
    rows = torch.empty(0, width)
    assert choose(bits, "minmax").row_bytes(rows) == -(-width * bits // 8) + side
    assert choose(16).row_bytes(rows) == 2 * width
    assert choose(32).row_bytes(rows) == 4 * width


def test_added_rows_equal_decoded_rows_added() -> None:
    rows = torch.randn(6, 48)
    index, counts = torch.tensor([0, 2, 3, 1, 2, 5]), [3, 0, 3]
    for dtype in (torch.float32, torch.float64):
        for code in (*map(choose, BITS), choose(1, "centroid"), choose(2, "minmax")):
            given = rows.to(dtype)
            message = torch.zeros(6, code.row_bytes(given), dtype=torch.uint8)
            noise = Noise(9, torch.arange(6))
            code.quantize(given, None, noise, message, 0)
            decoded = torch.empty_like(given)
            code.dequantize(message, 0, noise, decoded)
            expected = torch.ones(8, 48, dtype=dtype).index_add(0, index, decoded)
            found = torch.ones(8, 48, dtype=dtype)
            code.dequantize_add(message, 0, noise, index, counts, found)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["minmax", "rotated", "centroid"])
def test_a_row_that_is_not_finite_is_named(value: float, name: str) -> None:
    rows = torch.randn(10, 32)
    rows[7, 5] = value
    with pytest.raises(NonFiniteRowError) as raised:
        round_trip(choose(1, name), rows, torch.tensor([1, 7, 9]))
    assert raised.value.position == 1


def test_the_named_bits_have_the_best_code_of_their_size() -> None:
    names = [repr(choose(bits)) for bits in (0.5, 1, 2, 4, 8)]
    assert names == ["Rotated(0.5)", "Rotated(1)", "Rotated(2)", "MinMax(4)", "MinMax(8)"]


def test_bad_choices_say_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"expected bits in \(0.5, 1, 2, 4, 8, 16, 32\), got 3"):
        choose(3)
    with pytest.raises(ValueError, match=r"expected quantizer in .* got 'best'"):
        choose(1, "best")
    with pytest.raises(ValueError, match=r"expected bits in \(0.5, 1, 2\) for Rotated, got 4"):
        choose(4, "rotated")
    with pytest.raises(ValueError, match=r"expected bits in \(1, 2, 4, 8\) for MinMax, got 0.5"):
        choose(0.5, "minmax")
    assert isinstance(choose(32), Full)
    assert repr(choose(2, MinMax(2))) == "MinMax(2)"
