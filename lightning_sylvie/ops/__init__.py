"""Rows into the bytes of a message and back: the two ends of every exchange.

All ops have compiled kernels for CPU and CUDA and a torch reference that gives the same bits.
"""

from lightning_sylvie.ops.centroid import centroid_quantize_rows
from lightning_sylvie.ops.minmax import (
    dequantize_add_rows,
    dequantize_rows,
    minmax_ranges,
    minmax_row_bytes,
    minmax_side_bytes,
    quantize_rows,
)
from lightning_sylvie.ops.rotate import (
    ROTATED_BITS,
    rotate_dequantize_add_rows,
    rotate_dequantize_rows,
    rotate_quantize_rows,
    rotated_energy,
    rotated_row_bytes,
    rotated_side_bytes,
)
from lightning_sylvie.ops.rows import (
    scatter_add_rows,
    scatter_add_rows_reference,
    select_rows,
    select_rows_reference,
)

__all__ = [
    "select_rows",
    "scatter_add_rows",
    "select_rows_reference",
    "scatter_add_rows_reference",
    "centroid_quantize_rows",
    "minmax_ranges",
    "minmax_row_bytes",
    "minmax_side_bytes",
    "quantize_rows",
    "dequantize_rows",
    "dequantize_add_rows",
    "ROTATED_BITS",
    "rotated_energy",
    "rotated_row_bytes",
    "rotated_side_bytes",
    "rotate_quantize_rows",
    "rotate_dequantize_rows",
    "rotate_dequantize_add_rows",
]
