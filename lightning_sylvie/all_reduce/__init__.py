"""Sums over the ranks: the classic algorithms, on the transport's steps between two ranks."""

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.all_reduce.choice import ALGORITHMS, choose
from lightning_sylvie.all_reduce.compressed import Compressed

__all__ = ["AllReduce", "ALGORITHMS", "Compressed", "choose"]
