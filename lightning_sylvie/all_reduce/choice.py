"""Which algorithm a name means."""

from __future__ import annotations

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.all_reduce.backend import Backend
from lightning_sylvie.all_reduce.doubling import RecursiveDoubling
from lightning_sylvie.all_reduce.linear import Linear
from lightning_sylvie.all_reduce.nonoverlapping import Nonoverlapping
from lightning_sylvie.all_reduce.rabenseifner import Rabenseifner
from lightning_sylvie.all_reduce.ring import Ring

SEGMENT = 2**18
"""Values of a segment of the segmented ring: 1 MiB of float32."""

ALGORITHMS: dict[str, AllReduce] = {
    "auto": Backend(),
    "ring": Ring(),
    "segmented_ring": Ring(SEGMENT),
    "recursive_doubling": RecursiveDoubling(),
    "rabenseifner": Rabenseifner(),
    "linear": Linear(),
    "nonoverlapping": Nonoverlapping(),
}


def choose(name: str) -> AllReduce:
    """The algorithm of this name.

    Raises:
        ValueError: For an unknown name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"expected all_reduce in {tuple(ALGORITHMS)}, got {name!r}")
    return ALGORITHMS[name]
