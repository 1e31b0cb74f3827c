"""Min/max quantization of rows into a message and back (section 3.1 of the paper).

A row becomes one record: codes of 1, 2, 4 or 8 bits per value, then its scale and zero
(docs/message_format.md). A value h becomes ``stochastic_round((h - zero) / scale)``, so a
decoded row is unbiased, with a variance of at most ``scale**2 / 4`` per value.

Legend: n rows, k message rows, width values per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops import minmax_reference as reference
from lightning_sylvie.ops.kernels import has_kernels
from lightning_sylvie.ops.records import check_bits, check_quantize, check_records
from lightning_sylvie.ops.rows import check_counts


def minmax_row_bytes(width: int, bits: int) -> int:
    """Bytes of a row of `width` values in a message."""
    check_bits(bits)
    return (width * bits + 7) // 8 + minmax_side_bytes(width)


def minmax_side_bytes(width: int) -> int:
    """Of them, those of scale and zero."""
    return (2 if width < 32 else 4) if width > 0 else 0


def minmax_ranges(message: Tensor, offset: int, width: int, bits: int) -> Tensor:
    """What the levels of each row span, ``scale * (2**bits - 1)``: float64 ``(k,)``.

    At most some percents more than the row's own range (in a narrow row up to twice that); 0 for a
    row of one value.

    Args:
        message: uint8 ``(k, stride)``, written by `quantize_rows`.
        offset: Byte of a message row at which the record begins.
        width: Values per row.
        bits: As it was quantized.
    """
    check_bits(bits)
    if width == 0:
        return torch.zeros(message.size(0), dtype=torch.float64, device=message.device)
    scale = reference.read_grid(message, offset, bits, width).scale
    return scale.squeeze(1).double() * float(2**bits - 1)


def quantize_rows(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    key: int,
    bits: int,
    message: Tensor,
    offset: int,
    bad: Tensor,
) -> None:
    """Writes ``rows[index[k]]`` as codes to ``message[k, offset:]``.

    The noise is a function of `key`, the node's id and the column: the same call gives the same
    bytes on every device, for any number of threads and any order of rows. A row of one value is
    kept exactly (in rows under 17 values at 1 bit, or under 9 at 2 bits, to 16 or 24 bits of the
    value, rounded stochastically).

    Args:
        rows: ``(n, width)``, contiguous; float32, bfloat16 or float16.
        index: int64 ``(k,)``, values in ``0..n-1``; ascending is fastest. None takes the rows in
            order.
        id: int64 ``(k,)``, the global node id of each message row.
        key: What distinguishes this exchange from others: 64 bits.
        bits: 1, 2, 4 or 8.
        message: uint8 ``(k, stride)``, contiguous; written.
        offset: Byte of a message row at which the record begins.
        bad: int64 ``(1,)``; lowered to the first message row whose values are not finite, or
            lie too far apart for float32. Such a row decodes to NaN.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, devices, bits or the offset do not fit each other.
        RuntimeError: If an index lies outside `rows` (on CUDA it stops the program).
    """
    record_bytes = minmax_row_bytes(rows.size(-1), bits)
    check_quantize(rows, index, id, message, offset, bad, record_bytes)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.quantize_rows.default(
            rows, index, id, key, bits, message, offset, bad
        )
    else:
        reference.quantize_rows(rows, index, id, key, bits, message, offset, bad)


def dequantize_rows(message: Tensor, offset: int, bits: int, rows: Tensor) -> None:
    """Fills ``rows[k]`` with the row that stands at ``message[k, offset:]``.

    Args:
        message: uint8 ``(k, stride)``, contiguous, written by `quantize_rows`.
        offset: Byte of a message row at which the record begins.
        bits: As it was quantized.
        rows: ``(k, width)``, contiguous; float32, bfloat16 or float16; written.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, devices, bits or the offset do not fit each other.
    """
    record_bytes = minmax_row_bytes(rows.size(-1), bits)
    check_records(message, offset, rows, rows.size(0), record_bytes)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.dequantize_rows.default(message, offset, bits, rows)
    else:
        reference.dequantize_rows(message, offset, bits, rows)


def dequantize_add_rows(
    message: Tensor,
    offset: int,
    bits: int,
    index: Tensor,
    counts: Sequence[int],
    rows: Tensor,
) -> None:
    """Adds to ``rows[index[k]]`` the row that stands at ``message[k, offset:]``, in place.

    Contributions to one row are added in the order of the peers, so the result is the same for
    any number of threads and on any device. 16-bit floats are added in float32 and rounded after
    every addition.

    Args:
        message: uint8 ``(k, stride)``, contiguous, written by `quantize_rows`.
        offset: Byte of a message row at which the record begins.
        bits: As it was quantized.
        index: int64 ``(k,)``, values in ``0..n-1``, grouped by peer, ascending and unique inside
            a group.
        counts: Entries of each peer; their sum is k.
        rows: ``(n, width)``, contiguous; float32, bfloat16 or float16; written.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, counts, devices, bits or the offset do not fit each other.
        RuntimeError: If an index lies outside `rows` or a group is not ascending (`rows` is then
            partly written; on CUDA the first stops the program and the second is not seen).
    """
    record_bytes = minmax_row_bytes(rows.size(-1), bits)
    check_records(message, offset, rows, index.size(0), record_bytes, index=index)
    check_counts(counts, index)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.dequantize_add_rows.default(
            message, offset, bits, index, list(counts), rows
        )
    else:
        reference.dequantize_add_rows(message, offset, bits, index, counts, rows)
