"""Which rows of an exchange get how many bits, known at both ends without asking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sylvie.layout import Classes, Layout
from lightning_sylvie.quantizer import Mixture

if TYPE_CHECKING:
    from lightning_sylvie.route import Leg, Route, RowIds

Place = tuple[int, int]
"""Number of an exchange in the step, and its direction."""


class Allocations:
    """The layouts of adaptive bits, one for each place of a step, and what they follow from.

    A row weighs its degree in the part that reads it, times what its error is relative to (the
    width and the squared range). The reader counts degrees and tells them once; the scale stands
    in every row's record, so after an exchange both ends know it alike. In the first exchange of a
    place there are degrees only. A gradient is added to its owner's once: its degree is 1.
    """

    def __init__(self) -> None:
        self._places: dict[Place, _Known] = {}
        self._restored: dict[Place, dict[str, Any]] = {}

    def layout(self, code: Mixture, leg: Leg) -> Layout:
        """The layout of the next exchange at the place of `leg`, when the last one there is over.

        Every rank asks once for each exchange, in the same order.
        """
        known = self._at(leg)
        every = code.bits.refresh_every
        if known.layout is None:
            weights = known.weights(leg)
            sent, received = (
                code.numbers(end, counts) for end, counts in zip(weights, leg.counts, strict=True)
            )
            known.layout = Classes(code.codes, (sent, received), leg.counts)
        layout = known.layout
        if every is not None and known.num_exchanges % every == 0:
            layout, known.layout = layout.measuring(known.room(leg)), None
        known.num_exchanges += 1
        return layout

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as plain values and CPU tensors. No exchange is under way."""
        places = [
            {
                "place": list(place),
                "cut": known.ids.shard.fingerprint,
                "num_exchanges": known.num_exchanges,
                "spreads": [spread.to("cpu", copy=True) for spread in known.spreads],
            }
            for place, known in self._places.items()
            if known.spreads
        ]
        return {"places": [*places, *self._restored.values()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave on this rank; from the start if that is of another cut."""
        self._places = {}
        self._restored = {tuple(saved["place"]): saved for saved in state.get("places", [])}

    def _at(self, leg: Leg) -> _Known:
        """What is known at the place; nothing yet if it had the rows of another plan."""
        place, ids = (leg.route.key[-1], leg.direction), leg.route.ids
        if place not in self._places or self._places[place].ids is not ids:
            self._places[place] = _Known(leg.route, self._restored.pop(place, None))
        return self._places[place]


class _Known:
    """What both ends of an exchange know of its rows.

    Attributes:
        ids: Of the plan that the rows follow.
        num_exchanges: So far.
        layout: Of the next exchange; None: to be made.
        spreads: Of the rows sent and received, as last measured; empty: not yet.
    """

    def __init__(self, route: Route, saved: dict[str, Any] | None) -> None:
        self.ids: RowIds = route.ids
        self.num_exchanges = 0
        self.layout: Classes | None = None
        self.spreads: tuple[Tensor, ...] = ()
        self._degrees = route.degrees()
        if saved is not None and saved["cut"] == self.ids.shard.fingerprint:
            device = self._degrees[0].device
            self.num_exchanges = saved["num_exchanges"]
            self.spreads = tuple(spread.to(device) for spread in saved["spreads"])

    def weights(self, leg: Leg) -> tuple[Tensor, Tensor]:
        """float64 ``(rows,)`` each, of the rows sent and received."""
        sent, received = self.spreads or _filled(leg, 1.0)
        if leg.direction:
            return sent, received
        return sent * self._degrees[0], received * self._degrees[1]

    def room(self, leg: Leg) -> tuple[Tensor, Tensor]:
        """Where the spreads of the exchange that begins are to be written."""
        self.spreads = sent, received = self.spreads or _filled(leg, 0.0)
        return sent, received


def _filled(leg: Leg, value: float) -> tuple[Tensor, Tensor]:
    """A value for each row sent, and for each row received."""
    sent, received = (
        torch.full((len(ids),), value, dtype=torch.float64, device=ids.device) for ids in leg.ids
    )
    return sent, received
