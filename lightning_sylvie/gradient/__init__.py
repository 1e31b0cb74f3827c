"""Sums parameter gradients over the ranks, most of them while backward still runs."""

from lightning_sylvie.gradient.reducer import GradientReducer
from lightning_sylvie.gradient.way import GradientSum

__all__ = ["GradientReducer", "GradientSum"]
