"""Contracts of the min/max ops: the same bytes on every path, unbiased, bounded, exact in cases."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
from lightning_sylvie.ops import minmax_reference as reference
from lightning_sylvie.ops import noise

BITS = [1, 2, 4, 8]


def quantize(
    rows: Tensor, bits: int, *, key: int = 7, index: Tensor | None = None, id: Tensor | None = None
) -> Tensor:
    """The message of `rows` alone, which must be finite."""
    id = torch.arange(len(rows if index is None else index)) if id is None else id
    message = torch.empty(len(id), ops.minmax_row_bytes(rows.size(1), bits), dtype=torch.uint8)
    bad = torch.tensor([NO_BAD_ROW])
    ops.quantize_rows(rows, index, id, key, bits, message, 0, bad)
    assert int(bad) == NO_BAD_ROW
    return message


def dequantize(
    message: Tensor, bits: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    rows = torch.empty(len(message), width, dtype=dtype)
    ops.dequantize_rows(message, 0, bits, rows)
    return rows


def decoded(rows: Tensor, bits: int, **options: int) -> Tensor:
    return dequantize(quantize(rows, bits, **options), bits, rows.size(1), rows.dtype)


@pytest.mark.parametrize(
    ("width", "bits", "expected"),
    [(256, 1, 36), (602, 1, 80), (33, 8, 37), (32, 2, 12), (31, 1, 6), (16, 1, 4), (0, 4, 0)],
)
def test_bytes_of_a_row(width: int, bits: int, expected: int) -> None:
    assert ops.minmax_row_bytes(width, bits) == expected


def test_known_bytes() -> None:
    """Read by hand from docs/message_format.md: scale 1, zero -2, every value on a level."""
    row = torch.tensor([[float(j % 4 - 2) for j in range(33)]])
    codes = bytes([0b11100100] * 8 + [0b00])
    assert bytes(quantize(row, 2)[0].tolist()) == codes + struct.pack("<HH", 0x3F80, 0xC000)
    narrow = bytes([0b11100100] * 2) + struct.pack("<Bb", 127, -8)
    assert bytes(quantize(row[:, :8].contiguous(), 2)[0].tolist()) == narrow


def test_noise_is_the_published_function() -> None:
    """splitmix64 of key 0 and id 0, then the 32-bit hash, computed here with Python's integers."""

    def mix(state: int) -> int:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    assert mix(0) == 0xE220A8397B1DCDAF  # the generator's first output for seed 0
    for key, id in [(0, 0), (-5, 3), (2**63 - 1, 2**40), (12, -1)]:
        mixed = mix((mix(key % 2**64) + id) % 2**64)
        first, second = (int(word) for word in noise.row_keys(key, torch.tensor([id])))
        assert (first, second) == (mixed % 2**32, mixed >> 32)
        bits = first ^ 9
        bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
        bits = ((bits ^ bits >> 15) + second) * 0x846CA68B % 2**32
        words = noise.random_bits(noise.row_keys(key, torch.tensor([id])), torch.tensor([9]))
        assert int(words) == bits ^ bits >> 16


@settings(deadline=None, max_examples=60)
@given(data=st.data(), width=st.integers(1, 1030) | st.integers(0, 70))
def test_kernels_equal_the_reference(data: st.DataObject, width: int) -> None:
    dtype, bits = data.draw(st.sampled_from(FLOAT_TYPES)), data.draw(st.sampled_from(BITS))
    isa, device = data.draw(st.sampled_from(INSTRUCTION_SETS)), data.draw(st.sampled_from(DEVICES))
    offset, tail = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    count = data.draw(st.integers(0, 80))
    key, num_threads = data.draw(st.integers(-(2**63), 2**63 - 1)), data.draw(st.integers(1, 2))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    rows = hard_rows(width, dtype)
    index = data.draw(st.sampled_from([None, torch.randint(0, len(rows), (count,))]))
    id = torch.randint(-(2**62), 2**62, (len(rows) if index is None else count,))
    shape = (len(id), offset + ops.minmax_row_bytes(width, bits) + tail)
    arguments = (rows, index, id)
    expected, bad = torch.full(shape, 0xAA, dtype=torch.uint8), torch.tensor([NO_BAD_ROW])
    reference.quantize_rows(*arguments, key, bits, expected, offset, bad)
    moved = [None if tensor is None else tensor.to(device) for tensor in arguments]
    message = torch.full(shape, 0xAA, dtype=torch.uint8, device=device)
    found = torch.tensor([NO_BAD_ROW], device=device)

    with running(isa=isa, num_threads=num_threads):
        ops.quantize_rows(*moved, key, bits, message, offset, found)
        restored = torch.empty(len(id), width, dtype=dtype, device=device)
        ops.dequantize_rows(message, offset, bits, restored)

    assert torch.equal(message.cpu(), expected)
    assert int(found) == int(bad)
    result = torch.empty(len(id), width, dtype=dtype)
    reference.dequantize_rows(expected, offset, bits, result)
    assert same(restored.cpu(), result)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("counts", [(40, 0, 25, 60), (60,), (0, 0), ()], ids=str)
@pytest.mark.parametrize(("width", "bits"), [(64, 1), (37, 2), (100, 4), (20, 8), (602, 1)])
def test_dequantize_add_sums_in_peer_order(
    width: int, bits: int, counts: Sequence[int], dtype: torch.dtype, isa: str, device: str
) -> None:
    groups = [torch.randperm(60)[:count].sort().values for count in counts]
    index = torch.cat([torch.empty(0, dtype=torch.int64), *groups])
    message = quantize(torch.randn(len(index), width, dtype=dtype), bits)
    rows, values = torch.randn(60, width, dtype=dtype), dequantize(message, bits, width)
    expected = rows.clone()
    for k, row in enumerate(index.tolist()):  # one at a time: 16-bit floats round after each
        expected[row] = (expected[row].float() + values[k]).to(dtype)
    for num_threads in (1, 2):
        result = rows.to(device, copy=True)
        with running(isa=isa, num_threads=num_threads):
            ops.dequantize_add_rows(message.to(device), 0, bits, index.to(device), counts, result)
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bytes_do_not_depend_on_order_or_threads(num_threads: int, isa: str) -> None:
    rows, id = torch.randn(3000, 65), torch.randint(0, 2**40, (3000,))
    order = torch.randperm(3000)
    straight = quantize(rows, 2, id=id)
    with running(isa=isa, num_threads=num_threads):
        assert torch.equal(quantize(rows, 2, index=order, id=id[order]), straight[order])
        added = torch.zeros(3000, 65)
        ops.dequantize_add_rows(straight, 0, 2, torch.arange(3000), [3000], added)
    assert torch.equal(added, dequantize(straight, 2, 65))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("kind", ["normal", "rectified", "far from 0", "tiny"])
def test_unbiased_with_a_variance_below_its_bound(kind: str, width: int, bits: int) -> None:
    """E[decoded] = h; variance at most scale**2 / 4 (Theorem 1's condition)."""
    torch.manual_seed(bits)
    row = torch.randn(1, width)
    row = {"rectified": row.relu(), "far from 0": row + 50, "tiny": row * 1e-37}.get(kind, row)
    num_draws = 20000
    message = quantize(row.expand(num_draws, -1).contiguous(), bits)
    draws = dequantize(message, bits, width).double()
    scale, zero = read_side(message, width, bits)
    fraction = (row[0].double() - zero) / scale % 1
    deviation = scale * (fraction * (1 - fraction)).sqrt()
    error = (draws.mean(0) - row[0]).abs()
    # A value almost on a level is rounded the other way a few times or never; 16-bit dithers and
    # float32 have limits.
    few_events, resolution = 12 / num_draws, 2**-16
    assert (error <= 5 * deviation / num_draws**0.5 + scale * (few_events + resolution)).all()
    assert (draws.var(0) <= scale**2 / 4 * 1.001).all()


def read_side(message: Tensor, width: int, bits: int) -> tuple[float, float]:
    """Scale and zero of the first row, read from its last bytes."""
    record = bytes(message[0].tolist())
    if width < 32:
        exponent, multiple = struct.unpack("<Bb", record[-2:])
        scale = 2.0 ** (exponent - 127)
        return scale, multiple * 2.0 ** (bits - 4) * scale
    words = (struct.pack("<I", word << 16) for word in struct.unpack("<HH", record[-4:]))
    scale, zero = (struct.unpack("<f", word)[0] for word in words)
    return scale, zero


def test_mean_over_keys_is_the_row() -> None:
    """As above with one id and many keys: epochs are independent."""
    row = torch.randn(1, 64)
    row[0, :2] = torch.tensor([-4.0, 4.0])  # so no other value lies near a level
    draws = torch.cat([decoded(row, 1, key=key) for key in range(3000)])
    assert standard_errors(draws.double(), row[0].double())[2:].max() < 5


def test_rows_have_noise_of_their_own() -> None:
    """Errors of alike rows are uncorrelated, so an aggregation averages them out."""
    row = torch.linspace(0.2, 0.8, 64)[None]
    row[0, :2] = torch.tensor([0.0, 1.0])
    error = (decoded(row.expand(4000, -1).contiguous(), 1) - row)[:, 2:]
    error = (error - error.mean(0)) / error.std(0)
    for lag in (1, 2, 64):
        correlation = (error[lag:] * error[:-lag]).mean(0)
        assert correlation.abs().max() * (4000 - lag) ** 0.5 < 5
    within = (error.T @ error / 4000).fill_diagonal_(0)
    assert within.abs().max() * 4000**0.5 < 5.5  # of 1891 pairs


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [17, 24, 31, 32, 100])
def test_a_constant_row_is_exact(width: int, bits: int, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1 / 3, -1e-38, 3e38, -1e-45, 100.01])
    rows = values[:, None].expand(-1, width).to(dtype).contiguous()
    rows[rows.isinf()] = 1.5
    assert torch.equal(decoded(rows, bits), rows)


def test_a_short_constant_row_is_unbiased() -> None:
    """Two codes of a byte leave 24 bits of the value, one leaves 16."""
    for width, precision in [(16, 2**-15), (8, 2**-7)]:
        rows = torch.full((20000, width), 1 / 3)
        draws = decoded(rows, 1)
        assert (draws / rows - 1).abs().max() <= precision
        assert standard_errors(draws[:, :1].double(), rows[0, :1].double()).max() < 5
        exact = torch.full((1, width), 1 / 3, dtype=torch.bfloat16)
        assert torch.equal(decoded(exact, 1), exact)


@pytest.mark.parametrize("size", [1.2e-38, 1e-30, 1e-6, 1.0, 1e30, 1e38])
@pytest.mark.parametrize("bits", BITS)
def test_every_range_keeps_its_signal(bits: int, size: float) -> None:
    """A peer's 1/range in fp16 is infinite below 1.5e-5, and the row's gradient is lost."""
    rows = torch.linspace(-0.5, 1, 64)[None].repeat(3, 1) * size
    error = (decoded(rows, bits) - rows).abs().max()
    step = 1.5 * size / (2**bits - 1)
    assert error <= max(step * 1.02, 1.2e-38)  # the smallest scale
    assert decoded(rows, bits).unique().numel() > 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [16, 64, 100])
def test_no_code_exceeds_the_highest(width: int, bits: int) -> None:
    """A peer's kernel rounds the row's maximum up to 2**bits, into the neighbour's bits."""
    rows = torch.rand(5000, width) * torch.logspace(-6, 6, 5000)[:, None]
    result = decoded(rows, bits)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    span = high - low
    widening = 1.0 if width < 32 else 2.0**-7  # how far scale and zero may be rounded outward
    slack = widening * torch.maximum(span, high)
    assert (result >= low - slack).all()
    assert (result <= high + 2 * slack).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("bad_value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("width", [5, 16, 33, 70])
def test_a_row_that_is_not_finite_is_reported(
    width: int, bad_value: float, isa: str, device: str
) -> None:
    for column in {0, width // 2, width - 1}:
        rows = torch.randn(400, width)
        rows[[390, 37], column] = bad_value
        message = torch.empty(400, ops.minmax_row_bytes(width, 1), dtype=torch.uint8)
        message, bad = message.to(device), torch.tensor([NO_BAD_ROW], device=device)
        result = torch.empty(400, width, device=device)
        with running(isa=isa, num_threads=2):
            id = torch.arange(400, device=device)
            ops.quantize_rows(rows.to(device), None, id, 0, 1, message, 0, bad)
            ops.dequantize_rows(message, 0, 1, result)
        assert int(bad) == 37
        assert result.isnan().all(1).nonzero()[:, 0].tolist() == [37, 390]
        assert int(result.isnan().any(1).sum()) == 2


def test_bad_is_only_lowered() -> None:
    rows = torch.tensor([[1.0, float("nan")]])
    message, bad = torch.empty(1, 3, dtype=torch.uint8), torch.tensor([-3])
    ops.quantize_rows(rows, None, torch.tensor([0]), 0, 1, message, 0, bad)
    assert int(bad) == -3


def test_opcheck() -> None:
    rows, index, id = torch.randn(5, 33), torch.tensor([0, 2, 3, 1]), torch.arange(4)
    message = torch.zeros(4, 20, dtype=torch.uint8)
    namespace, bad = torch.ops.lightning_sylvie, torch.tensor([NO_BAD_ROW])
    arguments = (rows, index, id, 5, 1, message, 4, bad)
    torch.library.opcheck(namespace.quantize_rows.default, arguments)
    arguments = (rows[:4].clone(), None, id, 5, 1, message, 4, bad)
    torch.library.opcheck(namespace.quantize_rows.default, arguments)
    ops.quantize_rows(*arguments)
    torch.library.opcheck(namespace.dequantize_rows.default, (message, 4, 1, torch.empty(4, 33)))
    arguments = (message, 4, 1, index, [3, 1], rows)
    torch.library.opcheck(namespace.dequantize_add_rows.default, arguments)


MISTAKES = {
    "bits": (ValueError, "1, 2, 4 or 8 bits, got 3"),
    "rows": (TypeError, r"got torch.float64"),
    "index": (TypeError, "index of torch.int64, got torch.int32"),
    "id": (ValueError, r"expected message \(2, stride\)"),
    "message": (TypeError, "message of torch.uint8, got torch.int8"),
    "offset": (ValueError, "records of 8 bytes to fit a message row of 10 bytes, got offset 3"),
    "bad": (TypeError, "bad of torch.int64, got torch.float32"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_quantize_rows_refuses(mistake: str) -> None:
    wrong = {
        "bits": 3,
        "rows": torch.randn(4, 32, dtype=torch.float64),
        "index": torch.arange(4, dtype=torch.int32),
        "id": torch.arange(2),
        "message": torch.zeros(4, 10, dtype=torch.int8),
        "offset": 3,
        "bad": torch.zeros(1),
    }
    arguments = {
        "rows": torch.randn(4, 32),
        "index": torch.arange(4),
        "id": torch.arange(4),
        "key": 0,
        "bits": 1,
        "message": torch.zeros(4, 10, dtype=torch.uint8),
        "offset": 2,
        "bad": torch.tensor([0]),
    }
    error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        ops.quantize_rows(**{**arguments, mistake: wrong[mistake]})


def test_an_index_outside_the_rows_is_an_error() -> None:
    rows, id = torch.randn(6, 40), torch.arange(3)
    message = torch.zeros(3, 9, dtype=torch.uint8)
    bad = torch.tensor([0])
    with pytest.raises(RuntimeError, match=r"index\[1\]: expected 0..5, got 6"):
        ops.quantize_rows(rows, torch.tensor([0, 6, 2]), id, 0, 1, message, 0, bad)
    with pytest.raises(RuntimeError, match="ascending and unique"):
        ops.dequantize_add_rows(message, 0, 1, torch.tensor([2, 1, 3]), [3], rows)


def test_an_unknown_instruction_set_is_an_error() -> None:
    with running(isa="mmx"), pytest.raises(RuntimeError, match="scalar, avx2 or avx512, got mmx"):
        quantize(torch.randn(2, 33), 1)
