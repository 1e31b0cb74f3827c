"""More bits for the rows whose errors weigh more, at a given average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.quantizer.base import Quantizer

CHOICES = (0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class AdaptiveBits:
    """Bits for each boundary row by itself, so that the receiver's sums lose least.

    A row of b bits has an error of at most ``range**2 / 4 / (2**b - 1)**2`` per value, and reaches
    as many sums as it has edges into the receiving part. Least in total, at a given average, is
    reverse water-filling: ``b = average + log2(degree * range**2 / its geometric mean) / 2``,
    rounded to `choices` by `allocate`.

    Attributes:
        average: Bits per value that the rows of a message to one peer take at most, on average.
        refresh_every: Measure the ranges in every so many epochs, from the first one on, and let
            the next ones go by them; None: degrees alone decide, once and for all.
        choices: What a row may get, ascending.

    Raises:
        ValueError: For a value outside of the above.
    """

    average: float = 2
    refresh_every: int | None = None
    choices: tuple[float, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        ascending = all(less < more for less, more in pairwise(self.choices))
        if len(self.choices) < 2 or not ascending or not set(self.choices) <= set(CHOICES):
            raise ValueError(
                f"expected two or more choices of {CHOICES}, ascending, got {self.choices}"
            )
        if not self.choices[0] <= self.average <= self.choices[-1]:
            raise ValueError(
                f"expected an average from {self.choices[0]} to {self.choices[-1]} bits, the least "
                f"and the most of choices, got {self.average}"
            )
        every = self.refresh_every
        if every is not None and (isinstance(every, bool) or every != int(every) or every < 1):
            raise ValueError(f"expected refresh_every of 1 or more epochs, or None, got {every}")


@final
class Mixture:
    """The codes of `AdaptiveBits`, one for each choice.

    Args:
        bits: How rows get theirs.
        codes: For each choice, safe for rows of any type and width.
        errors: The squared error of each code relative to a row's `Quantizer.spread`.
    """

    def __init__(
        self, bits: AdaptiveBits, codes: Sequence[Quantizer], errors: Sequence[float]
    ) -> None:
        self.bits, self.codes, self._errors = bits, tuple(codes), tuple(errors)

    def __repr__(self) -> str:
        return repr(self.bits)

    def row_bytes(self, rows: Tensor) -> int:
        """Bytes of a row of average bits, rounded up."""
        choices, sizes = self.bits.choices, [code.row_bytes(rows) for code in self.codes]
        for i, (less, more) in enumerate(pairwise(choices)):
            if self.bits.average <= more:
                share = (self.bits.average - less) / (more - less)
                return ceil(sizes[i] + share * (sizes[i + 1] - sizes[i]))
        return sizes[-1]

    def numbers(self, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """The number of each row's code, int64 ``(n,)``; the rows of each peer by themselves.

        Args:
            weights: float64 ``(n,)``, of the rows of all peers.
            counts: Rows of each peer.
        """
        peers = weights.split(list(counts))
        return torch.cat(
            [allocate(peer, self._errors, self.bits.choices, self.bits.average) for peer in peers]
        )


def allocate(
    weights: Tensor, errors: Sequence[float], choices: Sequence[float], average: float
) -> Tensor:
    """The number of the choice that each row gets, int64 ``(n,)``.

    All rows begin with the least bits. A step from one choice to the next one takes a row's loss
    from ``weight * errors[j]`` to ``weight * errors[j + 1]``; steps are done in the order of what
    they gain per bit (where that is equal, of the lower choice, then of the earlier row), until
    one would exceed the average. So a row does step j exactly if ``weight * gain_j`` is above a
    level that all rows share: the staircase whose smooth form is reverse water-filling.

    As gains per bit fall from step to step (errors are convex in bits), no allocation of as many
    bits loses less, and none within the average loses less by more than what the first step that
    was left out would have gained. At most one step's bits are left over.

    Args:
        weights: float64 ``(n,)``, not negative; only their ratios count. Both ends must have the
            same, to the bit.
        errors: Of a row of weight 1 with each choice, falling and convex in bits.
        choices: Bits, ascending.
        average: Of all rows, at most.
    """
    num_rows = len(weights)
    bits, losses = torch.tensor([list(choices), list(errors)], dtype=torch.float64)
    costs = bits.diff()
    gains = (-losses.diff() / costs).to(weights.device)[:, None] * weights
    order = gains.flatten().argsort(descending=True, stable=True)
    spent = costs.to(weights.device).repeat_interleave(num_rows)[order].cumsum(0)
    done = order[spent <= average * num_rows - choices[0] * num_rows]
    numbers: Tensor = (done % max(num_rows, 1)).bincount(minlength=num_rows)
    return numbers
