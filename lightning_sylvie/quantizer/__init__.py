"""How rows are written into a message and read from it."""

from lightning_sylvie.quantizer.adaptive import AdaptiveBits, Mixture, allocate
from lightning_sylvie.quantizer.base import Noise, NonFiniteRowError, Quantizer
from lightning_sylvie.quantizer.choice import Code, choose
from lightning_sylvie.quantizer.coded import Centroid, MinMax, Rotated
from lightning_sylvie.quantizer.plain import Full, Half

__all__ = [
    "AdaptiveBits",
    "Centroid",
    "Code",
    "Full",
    "Half",
    "MinMax",
    "Mixture",
    "Noise",
    "NonFiniteRowError",
    "Quantizer",
    "Rotated",
    "allocate",
    "choose",
]
