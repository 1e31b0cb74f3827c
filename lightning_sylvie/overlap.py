"""Aggregation in sync mode: what needs no halo row is computed while halo rows travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_sylvie.functions import Exchanged
from lightning_sylvie.route import Route
from lightning_sylvie.stopwatch import now

_TRIES = 3


class Aggregation(Protocol):
    """A linear aggregation whose rows can be computed apart, so that each is the same either way.

    Owned and halo rows go in, ``(num_rows, width)``; a row per owned node comes out.
    """

    def whole(self, rows: Tensor) -> Tensor:
        """All at once."""

    def interior(self, owned: Tensor) -> Tensor:
        """The result for nodes without a halo source; what it holds for the others is not valid."""

    def frontier(self, rows: Tensor, out: Tensor) -> None:
        """Puts the result for nodes with a halo source into `out`."""

    def halo_gradient(self, grad: Tensor) -> Tensor:
        """``(num_halo, width)``: the gradient of the halo rows."""

    def owned_gradient(self, grad: Tensor) -> Tensor:
        """``(num_owned, width)``: what this rank knows of the gradient of the owned rows."""


class Pace:
    """Whether a direction of a layer computes while its rows travel.

    Both ways are tried in turn, and the faster one stays: computation and a message's copies share
    the cores of a CPU. Results are the same, so every rank decides by its own clock.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def overlaps(self) -> bool:
        """The way of the next call."""
        with_it, without = self._seconds[True], self._seconds[False]
        if len(without) < _TRIES:
            return len(with_it) == len(without)
        return min(with_it) <= min(without)

    @contextmanager
    def timed(self) -> Iterator[bool]:
        """Measures what runs inside, until both ways are known; yields the way to go."""
        overlaps, start = self.overlaps, now()
        yield overlaps
        if len(self._seconds[False]) < _TRIES:
            self._seconds[overlaps].append(now() - start)


class ExchangedAggregation(Exchanged):
    """`Aggregation.whole` of a tensor with its halo rows appended.

    Backward computes the halo rows' gradients first, and the owned rows' while those travel.
    """

    @staticmethod
    def forward(
        ctx: Any, route: Route, aggregation: Aggregation, paces: tuple[Pace, Pace], tensor: Tensor
    ) -> Tensor:
        ctx.route, ctx.aggregation, ctx.paces = route, aggregation, paces
        with paces[0].timed() as overlaps:
            rows, leg = tensor.detach().contiguous(), route.out()
            pending = leg.begin([rows])
            if not overlaps:
                leg.wait(pending)
            out = aggregation.interior(rows)
            (extended,), halo = route.extend([rows])
            leg.finish(pending, halo)
            aggregation.frontier(extended, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        route, aggregation, grad = ctx.route, ctx.aggregation, grad.contiguous()
        leg = route.back()
        with ctx.paces[1].timed() as overlaps:
            pending = leg.begin([aggregation.halo_gradient(grad)])
            if not overlaps:
                leg.wait(pending)
            owned = aggregation.owned_gradient(grad)
            leg.finish_add(pending, route.plan.send_index, [owned])
        return None, None, None, owned
