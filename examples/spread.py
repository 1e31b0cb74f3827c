"""How far the results of several seeds lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev


def spread(values: Sequence[float]) -> float:
    """The standard deviation of a sample; of a single value there is none."""
    return stdev(values) if len(values) > 1 else 0.0
