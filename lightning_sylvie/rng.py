"""This process's random numbers as plain values, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of torch, numpy and Python, in types that ``torch.load(weights_only=True)`` reads.

    Args:
        device: Its generator is included if it is a GPU.
    """
    version, numbers, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Goes on from what `rng_state` gave."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        {
            "bit_generator": "MT19937",
            "state": {"key": key, "pos": numpy["pos"]},
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        }
    )
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
