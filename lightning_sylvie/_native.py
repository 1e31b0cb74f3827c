"""Loads the compiled modules; loading registers their ops with torch."""

from __future__ import annotations

from importlib.util import find_spec

import torch

HOW_TO_BUILD = (
    "install a C++ compiler (and put nvcc on PATH for CUDA), then run `pip install "
    "torch scikit-build-core cmake ninja && pip install --no-build-isolation .` in the source tree"
)


def load() -> frozenset[str]:
    """The device types that have compiled kernels, once those are loaded.

    ``_C`` holds the schemas and the CPU kernels, ``_C_cuda`` the CUDA kernels. They are plain
    shared libraries without a Python module inside: torch opens them, Python never imports them.
    `find_spec` finds them in a normal and in an editable install alike.

    Raises:
        ImportError: If a module was built but this torch cannot load it.
    """
    if not _load("_C"):
        return frozenset()
    # A CPU build of torch has no CUDA tensors to serve, whatever was compiled beside it.
    if torch.version.cuda is not None and _load("_C_cuda"):
        return frozenset({"cpu", "cuda"})
    return frozenset({"cpu"})


def _load(name: str) -> bool:
    spec = find_spec(f"lightning_sylvie.{name}")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise ImportError(
            f"{spec.origin} was built, but torch {torch.__version__} cannot load it ({error}). "
            f"Expected torch >= 2.10. To rebuild it, {HOW_TO_BUILD}"
        ) from error
    return True
