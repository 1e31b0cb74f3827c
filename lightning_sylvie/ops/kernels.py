"""Which devices have compiled kernels, and a word to those that have none."""

from __future__ import annotations

import functools
import warnings

import torch

from lightning_sylvie import _native

_NAMES = (
    "select_rows",
    "scatter_add_rows",
    "quantize_rows",
    "dequantize_rows",
    "dequantize_add_rows",
    "rotate_quantize_rows",
    "rotate_dequantize_rows",
    "rotate_dequantize_add_rows",
)


def has_kernels(device_type: str) -> bool:
    """Whether tensors of this device are served by compiled kernels; if not, says so once."""
    if device_type in _DEVICE_TYPES:
        return True
    if not torch.compiler.is_compiling():
        _warn_of_reference(device_type)
    return False


@functools.cache  # once per process
def _warn_of_reference(device_type: str) -> None:
    warnings.warn(
        f"lightning_sylvie has no compiled kernels for {device_type} tensors and uses slower torch "
        f"code. To build them, {_native.HOW_TO_BUILD}.",
        RuntimeWarning,
        stacklevel=4,  # the caller of the op
    )


def _register_fakes() -> None:
    """Says what the ops return without data: nothing. torch.compile and meta tensors need it."""
    for name in _NAMES:
        torch.library.register_fake(f"lightning_sylvie::{name}", lambda *arguments: None)


_DEVICE_TYPES = _native.load()
if _DEVICE_TYPES:
    _register_fakes()
    _DEVICE_TYPES |= {"meta"}
