"""Rotated quantization of rows at 1, 2 and half a bit into a message and back.

A row becomes one record: a sign per value, a scale per 256 values, its mean
(docs/message_format.md). The row less its mean is rotated by Hadamard transforms with random
signs of the row's own, and only the signs of the result are kept (DRIVE, Vargaftik et al. 2021).
Its error is that of pi/2 - 1 = 0.57 of the energy around the mean, whatever the distribution,
where min/max at 1 bit makes errors of 1.2 (rectified rows) to 40 (sparse gradients) times the
energy; rows of alike neighbours get independent errors, which an aggregation averages out.

At 2 bits a value has one of two sizes (EDEN, Vargaftik et al. 2022; error 0.13). At half a bit
half of the rotated values have a sign and the others are 0 (error 2.14). Which half it is does not
matter: the random signs make all halves alike.

Legend: n rows, k message rows, width values per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops import rotate_reference as reference
from lightning_sylvie.ops.kernels import has_kernels
from lightning_sylvie.ops.records import check_quantize, check_records
from lightning_sylvie.ops.rotation import left_to_scale, pieces
from lightning_sylvie.ops.rows import check_counts

ROTATED_BITS = (0.5, 1, 2)


def rotated_row_bytes(width: int, bits: float = 1) -> int:
    """Bytes of a row of `width` values in a message."""
    if bits not in ROTATED_BITS:
        raise ValueError(f"expected bits in {ROTATED_BITS} for rotated rows, got {bits}")
    return reference.row_bytes(width, bits)


def rotated_side_bytes(width: int) -> int:
    """Of them, those of scales and mean."""
    return reference.side_bytes(width)


def rotated_energy(message: Tensor, offset: int, width: int, bits: float) -> Tensor:
    """The energy of each row if every code was 1: float64 ``(k,)``, 0 for a row of one value.

    Added piece by piece, so that it has the same bits whatever other rows are asked for.

    Args:
        message: uint8 ``(k, stride)``, written by `rotate_quantize_rows`.
        offset: Byte of a message row at which the record begins.
        width: Values per row.
        bits: As it was quantized.
    """
    energy = torch.zeros(message.size(0), dtype=torch.float64, device=message.device)
    if width > 0:
        scales = reference.read_scales(message, offset, bits, width).double()
        exponent = left_to_scale(width)  # the rounds without a factor make values grow
        factor: float = 2.0 ** (exponent - 2 * (exponent // 2))
        for (begin, end), scale in zip(pieces(width), scales.unbind(1), strict=True):
            energy += scale.square() * ((end - begin) * factor)
    return energy


def rotate_quantize_rows(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    key: int,
    bits: float,
    unbiased: bool,
    message: Tensor,
    offset: int,
    bad: Tensor,
) -> None:
    """Writes ``rows[index[k]]`` as rotated signs to ``message[k, offset:]``.

    Signs and noise are functions of `key` and the node's id: the same call gives the same bytes
    on every device, for any number of threads and any order of rows. A row of one value is kept
    exactly (from 32 values on).

    Args:
        rows: ``(n, width)``, contiguous; float32, bfloat16 or float16.
        index: int64 ``(k,)``, values in ``0..n-1``; ascending is fastest. None takes the rows in
            order.
        id: int64 ``(k,)``, the global node id of each message row.
        key: What distinguishes this exchange from others: 64 bits.
        bits: 1, 2, or 0.5: half of the rotated values have a sign (of rows under 32 values all).
        unbiased: Scale so that the decoded row is the row on average. Otherwise it is the
            closest to the row: its error is 0.36 of the energy, but it shrinks the row, so it is
            for delta coding only.
        message: uint8 ``(k, stride)``, contiguous; written.
        offset: Byte of a message row at which the record begins.
        bad: int64 ``(1,)``; lowered to the first message row whose values are not finite, or
            lie too far apart for float32. Such a row decodes to NaN.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, devices, bits or the offset do not fit each other.
        RuntimeError: If an index lies outside `rows` (on CUDA it stops the program).
    """
    record_bytes = rotated_row_bytes(rows.size(-1), bits)
    check_quantize(rows, index, id, message, offset, bad, record_bytes)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.rotate_quantize_rows.default(
            rows, index, id, key, bits, unbiased, message, offset, bad
        )
    else:
        reference.rotate_quantize_rows(rows, index, id, key, bits, unbiased, message, offset, bad)


def rotate_dequantize_rows(
    message: Tensor, offset: int, id: Tensor, key: int, bits: float, rows: Tensor
) -> None:
    """Fills ``rows[k]`` with the row that stands at ``message[k, offset:]``.

    Args:
        message: uint8 ``(k, stride)``, contiguous, written by `rotate_quantize_rows`.
        offset: Byte of a message row at which the record begins.
        id: int64 ``(k,)``, as it was quantized.
        key: As it was quantized.
        bits: As it was quantized.
        rows: ``(k, width)``, contiguous; float32, bfloat16 or float16; written.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes, devices, bits or the offset do not fit each other.
    """
    record_bytes = rotated_row_bytes(rows.size(-1), bits)
    check_records(message, offset, rows, rows.size(0), record_bytes, id=id)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.rotate_dequantize_rows.default(
            message, offset, id, key, bits, rows
        )
    else:
        reference.rotate_dequantize_rows(message, offset, id, key, bits, rows)


def rotate_dequantize_add_rows(
    message: Tensor,
    offset: int,
    id: Tensor,
    key: int,
    bits: float,
    index: Tensor,
    counts: Sequence[int],
    rows: Tensor,
) -> None:
    """Adds to ``rows[index[k]]`` the row that stands at ``message[k, offset:]``, in place.

    As `dequantize_add_rows`: deterministic, in the order of the peers.

    Args:
        message: uint8 ``(k, stride)``, contiguous, written by `rotate_quantize_rows`.
        offset: Byte of a message row at which the record begins.
        id: int64 ``(k,)``, as it was quantized.
        key: As it was quantized.
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
    record_bytes = rotated_row_bytes(rows.size(-1), bits)
    check_records(message, offset, rows, index.size(0), record_bytes, id=id, index=index)
    check_counts(counts, index)
    if has_kernels(rows.device.type):
        torch.ops.lightning_sylvie.rotate_dequantize_add_rows.default(
            message, offset, id, key, bits, index, list(counts), rows
        )
    else:
        reference.rotate_dequantize_add_rows(message, offset, id, key, bits, index, counts, rows)
