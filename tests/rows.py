"""Rows that quantizers find hard, and runs of one op on every path it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

FLOAT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
NO_BAD_ROW = 2**63 - 1


def _instruction_sets() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    has = {"avx2": "avx2" in flags, "avx512": "avx512bw" in flags and "avx512vl" in flags}
    return ["scalar", *(name for name, present in has.items() if present)]


INSTRUCTION_SETS = _instruction_sets()


@contextmanager
def running(*, isa: str | None = None, num_threads: int = 1) -> Iterator[None]:
    """Kernels of one instruction set, on a number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    if isa is not None:
        os.environ["SYLVIE_ISA"] = isa
    try:
        yield
    finally:
        os.environ.pop("SYLVIE_ISA", None)
        torch.set_num_threads(threads)


def hard_rows(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of every size that float32 has, constant, sparse, far from 0, not finite."""
    sizes = torch.logspace(-38, 38, 20)[:, None]
    far = 100 + torch.rand(3, width) * torch.tensor([[1e-2], [1e-5], [1e3]])
    special = torch.tensor(
        [0.0, -0.0, 1 / 3, -2e-38, 3.3e38, float("nan"), float("inf"), -float("inf")]
    )
    rows = [
        torch.randn(20, width) * sizes,
        torch.randn(4, width).relu(),
        torch.randn(4, width) * (torch.rand(4, width) < 0.05),
        far,
        torch.rand(1, width) * 1.2e-38,  # around the smallest normal value
        torch.rand(1, width) * 1e-42,
        torch.where(torch.arange(width) % 2 == 0, 3e38, -3e38)[None],  # a range beyond float32
        special[:, None].expand(-1, width),
        torch.where(torch.arange(width) == width - 1, special[:, None], torch.randn(8, width)),
    ]
    return torch.cat(rows).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values; any NaN equals any other, whose bits torch does not fix."""
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(
        torch.where(is_nan, 0, a), torch.where(is_nan, 0, b)
    )


def standard_errors(draws: Tensor, expected: Tensor) -> Tensor:
    """How many standard errors the mean of ``(draws, ...)`` lies from what is expected."""
    error = draws.std(0) / draws.size(0) ** 0.5
    return (draws.mean(0) - expected).abs() / error.clamp(min=1e-12)
