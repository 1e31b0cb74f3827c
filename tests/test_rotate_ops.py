"""Contracts of the rotated ops: the same bytes on every path, unbiased, errors as in theory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import (
    DEVICES,
    FLOAT_TYPES,
    INSTRUCTION_SETS,
    NO_BAD_ROW,
    hard_rows,
    running,
    same,
    standard_errors,
)
from torch import Tensor

from lightning_sylvie import ops
from lightning_sylvie.ops import noise, rotation
from lightning_sylvie.ops import rotate_reference as reference

PI_HALF = torch.pi / 2


def decoded(
    rows: Tensor,
    *,
    key: int = 7,
    id: Tensor | None = None,
    unbiased: bool = True,
    bits: float = 1,
) -> Tensor:
    id = torch.arange(len(rows)) if id is None else id
    message = torch.empty(len(rows), ops.rotated_row_bytes(rows.size(1), bits), dtype=torch.uint8)
    bad, result = torch.tensor([NO_BAD_ROW]), torch.empty_like(rows)
    ops.rotate_quantize_rows(rows, None, id, key, bits, unbiased, message, 0, bad)
    ops.rotate_dequantize_rows(message, 0, id, key, bits, result)
    assert int(bad) == NO_BAD_ROW
    return result


def error_energy(rows: Tensor, **options: Any) -> float:
    """NMSE: the error's energy relative to the rows'."""
    return float((decoded(rows, **options) - rows).square().sum() / rows.square().sum())


BITS = ops.ROTATED_BITS


@pytest.mark.parametrize(
    ("width", "half", "one", "two"),
    [
        (256, 20, 36, 68),
        (64, 8, 12, 20),
        (602, 38 + 8, 76 + 8, 151 + 8),  # 602 = 18 * 32 + 26
        (47, 4 + 6, 6 + 6, 12 + 6),
        (16, 4, 4, 6),
        (24, 7, 7, 10),  # narrow: half a bit is one
        (1, 3, 3, 3),
        (0, 0, 0, 0),
    ],
)
def test_bytes_of_a_row(width: int, half: int, one: int, two: int) -> None:
    assert [ops.rotated_row_bytes(width, bits) for bits in BITS] == [half, one, two]


@pytest.mark.parametrize("width", [1, 2, 3, 16, 23, 32, 47, 64, 128, 129, 256, 300, 602, 1000])
def test_the_rotation_is_orthonormal(width: int) -> None:
    """For any width, without padding: lengths and angles stay, and back is the inverse."""
    keys = noise.row_keys(3, torch.arange(width))
    identity = torch.eye(width, dtype=torch.float64)
    same_keys = tuple(word[:1].expand(width) for word in keys)
    growth = 2.0 ** rotation.left_to_scale(width)  # of two rounds, there and back
    matrix = rotation.rotate(identity, same_keys)
    torch.testing.assert_close(matrix @ matrix.T / growth, identity, atol=1e-6, rtol=0)
    values = torch.randn(width, width, dtype=torch.float64)
    back = rotation.rotate_back(rotation.rotate(values, keys), keys) / growth
    torch.testing.assert_close(back, values, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), width=st.integers(1, 1030) | st.integers(0, 70))
def test_kernels_equal_the_reference(data: st.DataObject, width: int) -> None:
    dtype, unbiased = data.draw(st.sampled_from(FLOAT_TYPES)), data.draw(st.booleans())
    bits = data.draw(st.sampled_from(BITS))
    isa, device = data.draw(st.sampled_from(INSTRUCTION_SETS)), data.draw(st.sampled_from(DEVICES))
    offset, tail = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    count = data.draw(st.integers(0, 80))
    key, num_threads = data.draw(st.integers(-(2**63), 2**63 - 1)), data.draw(st.integers(1, 2))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    rows = hard_rows(width, dtype)
    index = data.draw(st.sampled_from([None, torch.randint(0, len(rows), (count,))]))
    id = torch.randint(-(2**62), 2**62, (len(rows) if index is None else count,))
    shape = (len(id), offset + ops.rotated_row_bytes(width, bits) + tail)
    expected, bad = torch.full(shape, 0xAA, dtype=torch.uint8), torch.tensor([NO_BAD_ROW])
    reference.rotate_quantize_rows(rows, index, id, key, bits, unbiased, expected, offset, bad)
    message = torch.full(shape, 0xAA, dtype=torch.uint8, device=device)
    found = torch.tensor([NO_BAD_ROW], device=device)
    moved = [None if tensor is None else tensor.to(device) for tensor in (rows, index, id)]

    with running(isa=isa, num_threads=num_threads):
        ops.rotate_quantize_rows(*moved, key, bits, unbiased, message, offset, found)
        restored = torch.empty(len(id), width, dtype=dtype, device=device)
        ops.rotate_dequantize_rows(message, offset, moved[2], key, bits, restored)

    assert torch.equal(message.cpu(), expected)
    assert int(found) == int(bad)
    result = torch.empty(len(id), width, dtype=dtype)
    reference.rotate_dequantize_rows(expected, offset, id, key, bits, result)
    assert same(restored.cpu(), result)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("counts", [(40, 0, 25, 60), (60,), ()], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [20, 64, 100, 256, 602])
def test_dequantize_add_sums_in_peer_order(
    width: int, counts: Sequence[int], dtype: torch.dtype, bits: float, isa: str, device: str
) -> None:
    groups = [torch.randperm(60)[:count].sort().values for count in counts]
    index = torch.cat([torch.empty(0, dtype=torch.int64), *groups])
    id, values = torch.randint(0, 999, (len(index),)), torch.empty(len(index), width)
    message = torch.empty(len(index), ops.rotated_row_bytes(width, bits), dtype=torch.uint8)
    rows, sent = torch.randn(60, width, dtype=dtype), torch.randn(len(index), width)
    ops.rotate_quantize_rows(sent, None, id, 5, bits, True, message, 0, torch.tensor([NO_BAD_ROW]))
    ops.rotate_dequantize_rows(message, 0, id, 5, bits, values)
    expected = rows.clone()
    for k, row in enumerate(index.tolist()):  # one at a time: 16-bit floats round after each
        expected[row] = (expected[row].float() + values[k]).to(dtype)
    for num_threads in (1, 2):
        result = rows.to(device, copy=True)
        with running(isa=isa, num_threads=num_threads):
            ops.rotate_dequantize_add_rows(
                message.to(device), 0, id.to(device), 5, bits, index.to(device), counts, result
            )
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [16, 40, 64, 256, 300])
@pytest.mark.parametrize("kind", ["normal", "rectified", "far from 0"])
def test_unbiased(kind: str, width: int, bits: float) -> None:
    torch.manual_seed(width)
    row = torch.randn(1, width)
    row = {"rectified": row.relu(), "far from 0": row + 5}.get(kind, row)
    rows = row.expand(500, -1).contiguous()
    draws = torch.cat([decoded(rows, key=key, bits=bits) for key in range(4)])
    assert standard_errors(draws.double(), row[0].double()).max() < 5


@pytest.mark.parametrize(("width", "limit"), [(64, 0.03), (256, 0.02), (602, 0.02)])
def test_bias_of_sparse_rows_is_small(width: int, limit: float) -> None:
    """After one rotation round it is 6 % at width 64 and 4 % at 256; so there are two."""
    torch.manual_seed(width)
    row = torch.randn(1, width) * (torch.arange(width) % 20 == 7)
    num_draws = 8000
    bias = decoded(row.expand(num_draws, -1).contiguous()).mean(0) - row[0]
    noise_floor = (PI_HALF - 1) / num_draws
    energy = bias.square().sum() / row.square().sum() - noise_floor
    assert float(energy) < limit**2


def test_errors_of_alike_rows_are_independent() -> None:
    """The signs are the row's own: an aggregation averages the errors of equal rows out.

    With one rotation for all rows the mean of 64 would be as wrong as one of them.
    """
    row = torch.randn(1, 256)
    rows = row.expand(64, -1).contiguous()
    error = (decoded(rows).mean(0) - row[0]).square().sum() / row.square().sum()
    assert float(error) < 2 * (PI_HALF - 1) / 64


@pytest.mark.parametrize("width", [128, 256, 602, 1000])
@pytest.mark.parametrize(
    ("bits", "least"), [(0.5, 1 - 1 / torch.pi), (1, 1 - 1 / PI_HALF), (2, 0.1175)]
)
def test_error_is_that_of_the_theory(width: int, bits: float, least: float) -> None:
    """1 bit: pi/2 - 1 for the unbiased scale and 1 - 2/pi for the least error, on any distribution.

    In general ``1 / (1 - least) - 1``, where the least error of 2 bits is Max's (1960), and half a
    bit keeps half of what 1 bit keeps.
    """
    torch.manual_seed(0)
    normal, unbiased = torch.randn(1500, width), 1 / (1 - least) - 1
    assert error_energy(normal, bits=bits) == pytest.approx(unbiased, rel=0.04)
    assert error_energy(normal, bits=bits, unbiased=False) == pytest.approx(least, rel=0.03)
    # Of rectified rows the mean, which is sent apart, holds 1/pi of the energy.
    expected = unbiased * (1 - 1 / torch.pi)
    assert error_energy(normal.relu(), bits=bits) == pytest.approx(expected, rel=0.04)
    sparse = normal * (torch.rand_like(normal) < 0.05)
    assert error_energy(sparse, bits=bits) == pytest.approx(unbiased, rel=0.07)


def test_a_decoded_row_keeps_the_projection_on_the_original() -> None:
    """What makes the scale unbiased: <decoded, row> = <row, row> around the mean."""
    rows = torch.randn(500, 256)
    rows -= rows.mean(1, keepdim=True)
    ratio = (decoded(rows) * rows).sum(1) / rows.square().sum(1)
    assert (ratio - 1).abs().max() < 2**-7  # the scale's rounding to bf16
    assert (ratio - 1).mean().abs() < 2**-10


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("width", [32, 47, 256, 602])
def test_a_constant_row_is_exact(width: int, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1 / 3, -1e-38, 3e38, -1e-45, 100.01])
    rows = values[:, None].expand(-1, width).to(dtype).contiguous()
    rows[rows.isinf()] = 1.5
    assert torch.equal(decoded(rows), rows)


def test_a_row_of_zeros_is_exact_in_any_width() -> None:
    for width in range(1, 32):
        assert torch.equal(decoded(torch.zeros(2, width)), torch.zeros(2, width))


@pytest.mark.parametrize("size", [1.2e-38, 1e-30, 1e-6, 1.0, 1e30, 3e36])
def test_every_range_keeps_its_signal(size: float) -> None:
    rows = torch.randn(200, 256).clamp(-3, 3)
    result = decoded(rows * size).double() / size
    assert float((result - rows).square().sum() / rows.square().sum()) < 0.6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("width", [5, 16, 33, 300])
def test_a_row_that_is_not_finite_is_reported(
    width: int, bad_value: float, isa: str, device: str
) -> None:
    for column in {0, width // 2, width - 1}:
        rows, id = torch.randn(400, width), torch.arange(400, device=device)
        rows[[390, 37], column] = bad_value
        message = torch.empty(400, ops.rotated_row_bytes(width), dtype=torch.uint8, device=device)
        bad, result = torch.tensor([NO_BAD_ROW], device=device), torch.empty(400, width)
        result = result.to(device)
        with running(isa=isa, num_threads=2):
            ops.rotate_quantize_rows(rows.to(device), None, id, 0, 1, True, message, 0, bad)
            ops.rotate_dequantize_rows(message, 0, id, 0, 1, result)
        assert int(bad) == 37
        assert result.isnan().all(1).nonzero()[:, 0].tolist() == [37, 390]
        assert result.isnan().any(1).sum() == 2


def test_opcheck() -> None:
    rows, index, id = torch.randn(5, 33), torch.tensor([0, 2, 3, 1]), torch.arange(4)
    message = torch.zeros(4, 20, dtype=torch.uint8)
    namespace, bad = torch.ops.lightning_sylvie, torch.tensor([NO_BAD_ROW])
    arguments = (rows, index, id, 5, 1, True, message, 4, bad)
    torch.library.opcheck(namespace.rotate_quantize_rows.default, arguments)
    ops.rotate_quantize_rows(*arguments)
    arguments = (message, 4, id, 5, 1, torch.empty(4, 33))
    torch.library.opcheck(namespace.rotate_dequantize_rows.default, arguments)
    arguments = (message, 4, id, 5, 1, index, [3, 1], rows)
    torch.library.opcheck(namespace.rotate_dequantize_add_rows.default, arguments)


def test_refuses_more_bits_and_wrong_ids() -> None:
    rows, message = torch.randn(4, 32), torch.zeros(4, 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"bits in \(0.5, 1, 2\) for rotated rows, got 4"):
        ops.rotate_dequantize_rows(message, 0, torch.arange(4), 0, 4, rows)
    with pytest.raises(ValueError, match=r"expected id \(4,\), contiguous, got shape \(3,\)"):
        ops.rotate_dequantize_rows(message, 0, torch.arange(3), 0, 1, rows)
    with pytest.raises(ValueError, match="records of 8 bytes to fit"):
        ops.rotate_dequantize_rows(message, 13, torch.arange(4), 0, 1, rows)
