"""Sums over the ranks: the classic algorithms, on the transport's steps between two ranks."""

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.all_reduce.choice import ALGORITHMS, choose

__all__ = ["AllReduce", "ALGORITHMS", "choose"]
