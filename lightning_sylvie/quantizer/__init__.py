"""How rows are written into a message and read from it."""

from lightning_sylvie.quantizer.base import Noise, NonFiniteRowError, Quantizer
from lightning_sylvie.quantizer.choice import choose
from lightning_sylvie.quantizer.coded import Centroid, MinMax, Rotated
from lightning_sylvie.quantizer.plain import Full, Half

__all__ = [
    "Centroid",
    "Full",
    "Half",
    "MinMax",
    "Noise",
    "NonFiniteRowError",
    "Quantizer",
    "Rotated",
    "choose",
]
