"""Rows into the bytes of a message, and back by addition: the two ends of every exchange.

A message is uint8 ``(k, stride)``: one row of a tensor per message row, at a byte offset, so that
several tensors travel side by side. `select_rows` fills it from the boundary rows,
`scatter_add_rows`, its adjoint, adds what came back onto them.

Both have compiled kernels for CPU and CUDA. A device without one is served by the torch code at
the end of this file, which gives the same bits, only slower.

Legend: n rows, k entries, width values per row; ``row_bytes = width * rows.element_size()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops.kernels import has_kernels

_FLOAT_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def select_rows(rows: Tensor, index: Tensor, message: Tensor, offset: int) -> None:
    """Writes the bytes of ``rows[index[k]]`` to ``message[k, offset : offset + row_bytes]``.

    Other bytes of the message stay as they are. Not differentiable: its gradient is
    `scatter_add_rows`, which the exchange calls.

    Args:
        rows: ``(n, width)``, contiguous, any dtype.
        index: int64 ``(k,)``, values in ``0..n-1``. Ascending is fastest.
        message: uint8 ``(k, stride)``, contiguous; written.
        offset: Byte of a message row at which the row begins.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, devices or the offset do not fit each other.
        RuntimeError: If an index lies outside ``rows`` (on CUDA it stops the program).
    """
    _check(rows, index, message, offset)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.select_rows.default(rows, index, message, offset)
    else:
        select_rows_reference(rows, index, message, offset)


def scatter_add_rows(
    message: Tensor, offset: int, index: Tensor, counts: Sequence[int], rows: Tensor
) -> None:
    """Adds to ``rows[index[k]]`` the row that stands at ``message[k, offset:]``, in place.

    The result is the same for any number of threads and on any device: contributions to one row
    are added in the order of the peers. 16-bit floats are added in float32 and rounded after
    every addition.

    Args:
        message: uint8 ``(k, stride)``, contiguous.
        offset: Byte of a message row at which the row begins.
        index: int64 ``(k,)``, values in ``0..n-1``, grouped by peer, ascending and unique inside
            a group.
        counts: Entries of each peer; their sum is k.
        rows: ``(n, width)``, contiguous; float32, float64, bfloat16 or float16; written.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, counts, devices or the offset do not fit each other.
        RuntimeError: If an index lies outside ``rows`` or a group is not ascending (``rows`` is
            then partly written; on CUDA the first stops the program and the second is not seen).
    """
    _check(rows, index, message, offset)
    if rows.dtype not in _FLOAT_TYPES:
        raise TypeError(f"expected rows of one of {_FLOAT_TYPES}, got {rows.dtype}")
    check_counts(counts, index)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.scatter_add_rows.default(
            message, offset, index, list(counts), rows
        )
    else:
        scatter_add_rows_reference(message, offset, index, counts, rows)


def _check(rows: Tensor, index: Tensor, message: Tensor, offset: int) -> None:
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"expected rows (n, width), contiguous, got {describe_layout(rows)}")
    if index.dtype != torch.int64:
        raise TypeError(f"expected index of torch.int64, got {index.dtype}")
    if index.dim() != 1 or not index.is_contiguous():
        raise ValueError(f"expected index (k,), contiguous, got {describe_layout(index)}")
    if message.dtype != torch.uint8:
        raise TypeError(f"expected message of torch.uint8, got {message.dtype}")
    if message.dim() != 2 or not message.is_contiguous():
        raise ValueError(
            f"expected message (k, stride), contiguous, got {describe_layout(message)}"
        )
    if message.size(0) != index.size(0):
        raise ValueError(
            f"expected one message row per index entry, {index.size(0)}, got {message.size(0)}"
        )
    row_bytes = rows.size(1) * rows.element_size()
    if not 0 <= offset <= message.size(1) - row_bytes:
        raise ValueError(
            f"expected rows of {row_bytes} bytes to fit a message row of {message.size(1)} bytes, "
            f"got offset {offset}"
        )
    if not rows.device == index.device == message.device:
        raise ValueError(
            "expected rows, index and message on one device, got "
            f"{rows.device}, {index.device} and {message.device}"
        )


def check_counts(counts: Sequence[int], index: Tensor) -> None:
    if sum(counts) != index.size(0) or min(counts, default=0) < 0:
        raise ValueError(
            f"expected counts >= 0 with a sum of {index.size(0)}, the length of index, "
            f"got {list(counts)}"
        )


def describe_layout(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def select_rows_reference(rows: Tensor, index: Tensor, message: Tensor, offset: int) -> None:
    """`select_rows` in torch: what the kernels must equal, and what serves other devices."""
    selected = rows.view(torch.uint8).index_select(0, index)
    message.narrow(1, offset, selected.size(1)).copy_(selected)


def scatter_add_rows_reference(
    message: Tensor, offset: int, index: Tensor, counts: Sequence[int], rows: Tensor
) -> None:
    """`scatter_add_rows` in torch: what the kernels must equal, and what serves other devices."""
    # A piece of the message may begin where a float may not: copy it to where one may.
    values = rows.new_empty(index.size(0), rows.size(1))
    values.view(torch.uint8).copy_(
        message.narrow(1, offset, values.size(1) * values.element_size())
    )
    sizes = list(counts)
    for group, group_index in zip(values.split(sizes), index.split(sizes), strict=True):
        rows.index_add_(0, group_index, group)
