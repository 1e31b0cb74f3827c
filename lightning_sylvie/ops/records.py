"""Records of quantized rows in a message: argument checks, and bytes in torch terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sylvie.ops.rows import describe_layout

NARROW_WIDTH = 32  # rows of fewer values carry smaller side information
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_bits(bits: int) -> None:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"expected 1, 2, 4 or 8 bits, got {bits}")


def check_quantize(
    rows: Tensor,
    index: Tensor | None,
    id: Tensor,
    message: Tensor,
    offset: int,
    bad: Tensor,
    record_bytes: int,
) -> None:
    """Raises TypeError or ValueError if the arguments of a quantize op do not fit each other."""
    check_records(message, offset, rows, id.size(0), record_bytes, id=id)
    if index is not None:
        check_records(message, offset, rows, id.size(0), record_bytes, index=index)
    elif rows.size(0) != id.size(0):
        raise ValueError(f"expected {id.size(0)} rows, one per id, got {rows.size(0)}")
    if bad.dtype != torch.int64:
        raise TypeError(f"expected bad of torch.int64, got {bad.dtype}")
    if tuple(bad.shape) != (1,) or bad.device != rows.device:
        raise ValueError(f"expected bad (1,) on {rows.device}, got {describe_layout(bad)}")


def check_records(
    message: Tensor,
    offset: int,
    rows: Tensor,
    num_records: int,
    record_bytes: int,
    **entries: Tensor,
) -> None:
    """Raises TypeError or ValueError unless the message holds `num_records` records at `offset`.

    `entries` are int64 tensors with a value per record.
    """
    if rows.dtype not in _TYPES:
        raise TypeError(f"expected rows of one of {_TYPES}, got {rows.dtype}")
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"expected rows (n, width), contiguous, got {describe_layout(rows)}")
    if message.dtype != torch.uint8:
        raise TypeError(f"expected message of torch.uint8, got {message.dtype}")
    if message.dim() != 2 or not message.is_contiguous() or message.size(0) != num_records:
        raise ValueError(
            f"expected message ({num_records}, stride), contiguous, got {describe_layout(message)}"
        )
    if not 0 <= offset <= message.size(1) - record_bytes:
        raise ValueError(
            f"expected records of {record_bytes} bytes to fit a message row of "
            f"{message.size(1)} bytes, got offset {offset}"
        )
    if message.device != rows.device:
        raise ValueError(
            f"expected rows and message on one device, got {rows.device} and {message.device}"
        )
    for name, tensor in entries.items():
        _check_entries(name, tensor, num_records, rows.device)


def _check_entries(name: str, tensor: Tensor, num_records: int, device: torch.device) -> None:
    if tensor.dtype != torch.int64:
        raise TypeError(f"expected {name} of torch.int64, got {tensor.dtype}")
    if tensor.shape != (num_records,) or not tensor.is_contiguous():
        raise ValueError(
            f"expected {name} ({num_records},), contiguous, got {describe_layout(tensor)}"
        )
    if tensor.device != device:
        raise ValueError(f"expected {name} on {device}, got {tensor.device}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``(k, width)`` below ``2**bits`` as bytes, the first code in the lowest bits."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.size(1) % per_byte))
    shift = torch.arange(per_byte, device=codes.device) * bits
    return (padded.view(codes.size(0), -1, per_byte) << shift).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, width: int, bits: int) -> Tensor:
    """The codes of `pack`: int64 ``(k, width)``."""
    shift = torch.arange(8 // bits, device=packed.device) * bits
    codes = packed.to(torch.int64)[:, :, None] >> shift & ((1 << bits) - 1)
    return codes.flatten(1)[:, :width]


def float_bits(values: Tensor) -> Tensor:
    """The bits of float32 values, in int64 so that sums do not lose their sign."""
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def float_from_bits(words: Tensor) -> Tensor:
    return words.to(torch.int32).view(torch.float32)


def bf16_below(values: Tensor) -> Tensor:
    """The values rounded to bf16 toward minus infinity."""
    words = float_bits(values)
    return float_from_bits(torch.where(values < 0, words + 0xFFFF, words) & 0xFFFF0000)


def bf16_above(values: Tensor) -> Tensor:
    """Values that are not negative, rounded to bf16 toward infinity."""
    return float_from_bits((float_bits(values) + 0xFFFF) & 0xFFFF0000)


def bf16_bytes(values: Tensor) -> Tensor:
    """Float32 ``(k, m)`` that bf16 holds exactly, as bytes ``(k, 2 * m)``."""
    upper = float_bits(values) >> 16
    return upper.to(torch.int16).view(torch.uint8)


def from_bf16_bytes(packed: Tensor) -> Tensor:
    return packed.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def add_groups(values: Tensor, index: Tensor, counts: Sequence[int], rows: Tensor) -> None:
    """Adds float32 ``(k, width)`` to ``rows[index]``, peer by peer, each sum rounded once."""
    sizes = list(counts)
    for group, rows_of_group in zip(values.split(sizes), index.split(sizes), strict=True):
        rows[rows_of_group] = (rows[rows_of_group].float() + group).to(rows.dtype)


def report_bad(is_bad: Tensor, bad: Tensor) -> None:
    """Lowers `bad` to the first True of ``(k,)``."""
    if is_bad.any():
        bad.clamp_(max=int(is_bad.nonzero()[0]))
