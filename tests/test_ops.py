"""Contracts of the ops: the same bits on every path and for every dtype."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_sylvie
from lightning_sylvie import _native, ops

FLOAT_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHER_TYPES = [torch.bool, torch.int8, torch.int64, torch.complex64]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
PATHS = {
    "compiled": (ops.select_rows, ops.scatter_add_rows),
    "torch": (ops.select_rows_reference, ops.scatter_add_rows_reference),
}


def make_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(num_rows, width, dtype=torch.float64) * 10
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def make_groups(num_rows: int, counts: Sequence[int]) -> Tensor:
    """A plan's index: for each peer `counts[peer]` different rows, ascending."""
    groups = [torch.randperm(num_rows)[:count].sort().values for count in counts]
    return torch.cat(groups) if groups else torch.empty(0, dtype=torch.int64)


def row_bytes(rows: Tensor, number: int) -> bytes:
    return bytes(rows[number].contiguous().view(torch.uint8).tolist())


def pack(rows: Tensor, stride: int, offset: int) -> Tensor:
    """A message that holds row k of `rows` in message row k, made by hand."""
    message = torch.full((rows.size(0), stride), 0xAA, dtype=torch.uint8)
    for k in range(rows.size(0)):
        record = torch.tensor(list(row_bytes(rows, k)), dtype=torch.uint8)
        message[k, offset : offset + len(record)] = record
    return message


def test_compiled_kernels_are_used_where_the_package_is_installed() -> None:
    # The folder of the sources may come first on sys.path and has no module in it, yet an editable
    # install finds the compiled one.
    assert find_spec("lightning_sylvie._C") is not None
    assert "cpu" in _native.load()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("lightning_sylvie::select_rows", "CPU")


def test_cuda_module_loads_beside_a_cpu_build_of_torch() -> None:
    # It takes the stream from libtorch_cuda if that is in the process, and must not link it.
    spec = find_spec("lightning_sylvie._C_cuda")
    if spec is None or spec.origin is None:
        pytest.skip("built without nvcc")
    torch.ops.load_library(spec.origin)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("lightning_sylvie::select_rows", "CUDA")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES + OTHER_TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 16, 37])
def test_select_rows_copies_bytes(dtype: torch.dtype, width: int, path: str, device: str) -> None:
    rows = make_rows(50, width, dtype)
    index = torch.tensor([0, 7, 7, 49, 3])
    size = width * rows.element_size()
    message = torch.full((5, size + 9), 0xAA, dtype=torch.uint8, device=device)

    PATHS[path][0](rows.to(device), index.to(device), message, 5)

    for k, record in enumerate(message.tolist()):
        assert bytes(record[5 : 5 + size]) == row_bytes(rows, int(index[k]))
        assert record[:5] + record[5 + size :] == [0xAA] * 9  # what it did not own


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 4, 5])
@pytest.mark.parametrize("counts", [(4, 0, 6, 3), (10,), (0, 0, 0), ()])
def test_scatter_add_rows_sums_in_peer_order(
    dtype: torch.dtype, offset: int, counts: tuple[int, ...], path: str, device: str
) -> None:
    index = make_groups(12, counts)
    values, rows = make_rows(len(index), 19, dtype), make_rows(12, 19, dtype)
    message = pack(values, 19 * rows.element_size() + 8, offset)
    expected = rows.clone()
    for k, row in enumerate(index.tolist()):
        expected[row] += values[k]  # one at a time: 16-bit floats round after each

    result = rows.to(device)
    PATHS[path][1](message.to(device), offset, index.to(device), counts, result)

    assert torch.equal(result.cpu(), expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), width=st.integers(0, 70), num_rows=st.integers(1, 40))
def test_kernels_equal_the_reference(data: st.DataObject, width: int, num_rows: int) -> None:
    dtype = data.draw(st.sampled_from(FLOAT_TYPES))
    counts = data.draw(st.lists(st.integers(0, num_rows), max_size=5))
    offset, tail = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    index, rows = make_groups(num_rows, counts), make_rows(num_rows, width, dtype)
    shape = (len(index), offset + width * rows.element_size() + tail)
    messages = [torch.zeros(shape, dtype=torch.uint8) for _ in PATHS]
    sums = [rows.clone() for _ in PATHS]

    for (select, scatter), message, total in zip(PATHS.values(), messages, sums, strict=True):
        select(rows, index, message, offset)
        scatter(message, offset, index, counts, total)

    assert torch.equal(*messages)
    assert torch.equal(*sums)


def test_scatter_is_the_adjoint_of_select() -> None:
    """<select(x), y> = <x, scatter(y)>."""
    counts, width = (9, 0, 17), 6
    index, x = make_groups(20, counts), make_rows(20, width, torch.float64)
    y = make_rows(len(index), width, torch.float64)
    message = torch.empty(len(index), width * 8, dtype=torch.uint8)
    ops.select_rows(x, index, message, 0)
    back = torch.zeros_like(x)
    ops.scatter_add_rows(y.view(torch.uint8), 0, index, counts, back)

    torch.testing.assert_close((message.view(torch.float64) * y).sum(), (x * back).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_arithmetic_is_torchs(dtype: torch.dtype) -> None:
    """Every 16-bit pattern plus every kind of other: infinities, NaN, subnormals, ties."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    for other in [0.0, -0.0, 1.0, -1.0, 3e-5, 6e-8, 1e-40, 60000.0, float("inf"), float("nan")]:
        rows = torch.full_like(every, other)
        expected = rows + every
        index = torch.arange(len(every))
        ops.scatter_add_rows(every.view(torch.uint8), 0, index, [len(every)], rows)
        assert torch.equal(rows.isnan(), expected.isnan())
        kept = ~expected.isnan()
        assert torch.equal(rows[kept].view(torch.int16), expected[kept].view(torch.int16))


@pytest.mark.parametrize("order", ["spread", "crowded"])
def test_result_does_not_depend_on_the_number_of_threads(order: str) -> None:
    counts = (4000, 0, 2500, 3999)
    index = make_groups(5000, counts)
    if order == "crowded":  # all boundary rows at one end: equal row ranges would not be equal work
        index = make_groups(4000, counts) + 70_000
    rows = make_rows(75_000 if order == "crowded" else 5000, 33, torch.float32)
    message = make_rows(len(index), 33, torch.float32).view(torch.uint8)
    expected = rows.clone()
    ops.scatter_add_rows_reference(message, 0, index, counts, expected)

    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            total = rows.clone()
            ops.scatter_add_rows(message, 0, index, counts, total)
            assert torch.equal(total, expected)
            packed = torch.empty_like(message)
            ops.select_rows(rows, index, packed, 0)
            assert torch.equal(packed.view(torch.float32), rows[index])
    finally:
        torch.set_num_threads(threads)


SELECT_MISTAKES = {
    "rows": (ValueError, r"rows \(n, width\), contiguous, got shape \(6,\)"),
    "transposed": (ValueError, r"rows \(n, width\), contiguous, got shape \(4, 4\) with strides"),
    "index dtype": (TypeError, r"index of torch.int64, got torch.int32"),
    "index shape": (ValueError, r"index \(k,\), contiguous, got shape \(3, 1\)"),
    "message dtype": (TypeError, r"message of torch.uint8, got torch.float32"),
    "message rows": (ValueError, r"one message row per index entry, 3, got 2"),
    "message stride": (
        ValueError,
        r"rows of 16 bytes to fit a message row of 19 bytes, got offset 4",
    ),
    "offset": (ValueError, r"got offset -1"),
    "device": (ValueError, r"on one device, got cpu, cpu and meta"),
}


@pytest.mark.parametrize("mistake", SELECT_MISTAKES)
def test_select_rows_refuses(mistake: str) -> None:
    rows, index = torch.zeros(4, 4), torch.tensor([0, 1, 2])
    message, offset = torch.zeros(3, 24, dtype=torch.uint8), 4
    if mistake == "rows":
        rows = torch.zeros(6)
    elif mistake == "transposed":
        rows = rows.t()
    elif mistake == "index dtype":
        index = index.int()
    elif mistake == "index shape":
        index = index[:, None]
    elif mistake == "message dtype":
        message = message.float()
    elif mistake == "message rows":
        message = message[:2]
    elif mistake == "message stride":
        message = torch.zeros(3, 19, dtype=torch.uint8)
    elif mistake == "offset":
        offset = -1
    elif mistake == "device":
        message = message.to("meta")
    error, text = SELECT_MISTAKES[mistake]
    with pytest.raises(error, match=text):
        ops.select_rows(rows, index, message, offset)


def test_scatter_add_rows_refuses() -> None:
    message, index = torch.zeros(3, 16, dtype=torch.uint8), torch.tensor([0, 1, 2])
    with pytest.raises(TypeError, match=r"float16\), got torch.int32"):
        ops.scatter_add_rows(message, 0, index, [3], torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"a sum of 3, the length of index, got \[2\]"):
        ops.scatter_add_rows(message, 0, index, [2], torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"counts >= 0 .* got \[4, -1\]"):
        ops.scatter_add_rows(message, 0, index, [4, -1], torch.zeros(4, 4))


@pytest.mark.parametrize("bad", [-1, 6, 2**62])
def test_an_index_outside_the_rows_is_an_error(bad: int) -> None:
    rows, message = torch.ones(6, 2), torch.zeros(3, 8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=rf"index\[1\]: expected 0..5, got {bad}"):
        ops.select_rows(rows, torch.tensor([0, bad, 2]), message, 0)
    index = torch.tensor([bad, 1, 2] if bad < 0 else [0, 1, bad])
    with pytest.raises(RuntimeError, match=r"rows 0..5, ascending and unique"):
        ops.scatter_add_rows(message, 0, index, [3], rows)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_group_out_of_order_is_an_error(num_threads: int) -> None:
    """The kernel looks for its rows by bisection: an unsorted group must not lose contributions."""
    rows, message = torch.zeros(6000, 8), torch.zeros(6000, 32, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for first, second in [(0, 1), (2999, 3000), (10, 5990), (5998, 5999)]:
            index = torch.arange(6000)
            index[first], index[second] = second, first
            with pytest.raises(RuntimeError, match="ascending and unique"):
                ops.scatter_add_rows(message, 0, index, [6000], rows)
            index = torch.arange(6000)
            index[second] = first
            with pytest.raises(RuntimeError, match="ascending and unique"):
                ops.scatter_add_rows(message, 0, index, [6000], rows)
            ops.scatter_add_rows(message[:2], 0, torch.tensor([second, first]), [1, 1], rows)
        for place in (0, 1500, 3000, 4500, 5999):
            for bad in (-1, -(2**40), 6000, 2**40):
                index = torch.arange(6000)
                index[place] = bad
                with pytest.raises(RuntimeError, match="ascending and unique"):
                    ops.scatter_add_rows(message, 0, index, [6000], rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    """Schema, fake kernel and torch.compile's view of both ops, by torch's own checks."""
    index, rows = torch.tensor([0, 2, 3, 1]), make_rows(5, 3, dtype)
    message = torch.zeros(4, 3 * rows.element_size() + 4, dtype=torch.uint8)
    namespace = torch.ops.lightning_sylvie
    torch.library.opcheck(namespace.select_rows.default, (rows, index, message, 4))
    torch.library.opcheck(namespace.scatter_add_rows.default, (message, 4, index, [3, 1], rows))


def test_meta_tensors_pass() -> None:
    rows, index = torch.zeros(5, 3, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    message = torch.zeros(4, 12, dtype=torch.uint8, device="meta")
    ops.select_rows(rows, index, message, 0)
    ops.scatter_add_rows(message, 0, index, [4], rows)


UNBUILT = """
import struct, sys, warnings
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, sys.argv[1])
import torch
from lightning_sylvie import ops
assert ops.__file__.startswith(sys.argv[1]), ops.__file__
rows, index = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])
message = torch.zeros(2, 4, dtype=torch.uint8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        ops.select_rows(rows, index, message, 0)
        ops.scatter_add_rows(message, 0, index, [1, 1], rows)
print(bytes(message.flatten().tolist()).hex(), rows.flatten().tolist(), len(caught))
print(caught[0].filename, caught[0].message)
"""


def test_without_compiled_modules_torch_serves_and_says_once_how_to_build(tmp_path: Path) -> None:
    source = Path(lightning_sylvie.__file__).parent
    target = tmp_path / "lightning_sylvie"
    target.mkdir()
    (target / "__init__.py").touch()
    shutil.copy(source / "_native.py", target)
    shutil.copytree(source / "ops", target / "ops")
    result = subprocess.run(
        [sys.executable, "-c", UNBUILT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    values, warning = result.stdout.splitlines()
    assert values == f"{struct.pack('<2f', 12.0, 4.0).hex()} [8.0, 2.0, 24.0] 1"
    assert warning.startswith("<string>")  # blamed on the caller
    assert "no compiled kernels for cpu" in warning
    assert "pip install --no-build-isolation ." in warning
