"""One exchange of a step as it lives on from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_sylvie.lane import Beside, Ticket
from lightning_sylvie.route import Leg
from lightning_sylvie.transport import Pending


class Slot:
    """The rows that an exchange has brought, and the next one under way.

    Rows and messages are made once and used in every step. One buffer of each is enough: rows are
    used before their next exchange starts, and its messages are free when the last has arrived.

    Args:
        leg: The exchange.
        like: A tensor ``(n, width)`` for each that is moved.
        num_rows: Rows that arrive.
        momentum: What the smoothed rows keep of their last value.

    Attributes:
        layout: What must be equal from step to step.
        step: The step whose exchange it holds or has under way; -1: none.
        last_use: The last step in which it was used.
    """

    def __init__(
        self, leg: Leg, like: Sequence[Tensor], num_rows: int, momentum: float = 0.0
    ) -> None:
        widths = [(tensor.shape[1], str(tensor.dtype)) for tensor in like]
        cut = leg.route.ids.shard.fingerprint
        self.layout = f"{leg.route.name}: {num_rows} rows of {widths}, cut {cut}"
        self.step = self.last_use = -1
        self._like = [tensor.new_empty(0, tensor.shape[1]) for tensor in like]
        self._num_rows, self._momentum = num_rows, momentum
        self._rows: list[Tensor] = []
        self._smoothed: list[Tensor] = []
        self._messages: tuple[Tensor, Tensor] | None = None
        self._ticket: Ticket | None = None
        self._sample: list[Tensor] = []

    def start(
        self,
        lane: Beside,
        leg: Leg,
        sources: Sequence[Tensor],
        decode: Callable[[Tensor, Sequence[Tensor]], None],
    ) -> None:
        """Starts the exchange of this step.

        Args:
            lane: Where it runs.
            leg: The exchange, with this step's noise.
            sources: The rows it sends some of; they must stay as they are until it is over.
            decode: Takes the received message apart, into rows.
        """
        self.wait()
        if not self._rows:
            self._rows = [t.new_empty((self._num_rows, t.shape[1])) for t in self._like]
        sent, received = self._messages = self._fitting(leg, sources)

        def begin() -> Pending:
            leg.encode(sources, sent)
            return leg.start(self._like, sent, received)

        def finish(message: Tensor) -> None:
            decode(message, self._rows)
            self._smooth()

        self._ticket = lane.submit(begin, finish, *sources, *self._rows, sent, received)

    def wait(self) -> None:
        """Returns when nothing is under way."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.wait()

    def arrived(self, *, smoothed: bool = False) -> Sequence[Tensor]:
        """The rows of the last exchange, waited for; or the smoothed rows, if there are any."""
        self.wait()
        return self._smoothed if smoothed and self._momentum else self._rows

    def change(self, sample: list[Tensor]) -> tuple[float, float]:
        """Squared change of `sample` since the last call, and its squared norm."""
        before, self._sample = self._sample, sample
        pairs = list(zip(self._sample, before, strict=False))
        change = sum(float((new - old).square().sum()) for new, old in pairs)
        return change, sum(float(new.square().sum()) for new, _ in pairs)

    def state(self) -> dict[str, Any]:
        """What `restore` needs: rows on the CPU."""
        self.wait()
        state: dict[str, Any] = {"layout": self.layout, "step": self.step}
        for name, tensors in self._kept.items():
            state[name] = [tensor.to("cpu", copy=True) for tensor in tensors]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the rows of `state` if it is of the same layout."""
        if state["layout"] == self.layout and state["rows"]:
            self.step = state["step"]
            for name, tensors in self._kept.items():
                tensors[:] = [tensor.to(self._like[0].device) for tensor in state[name]]

    @property
    def _kept(self) -> dict[str, list[Tensor]]:
        """What lasts from step to step."""
        return {"rows": self._rows, "smoothed": self._smoothed, "sample": self._sample}

    def _fitting(self, leg: Leg, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Messages for this step's exchange: those of the last one, if they have its size."""
        shapes = [leg.layout.shape(sources, end) for end in (0, 1)]
        if self._messages is None or [tuple(m.shape) for m in self._messages] != shapes:
            return leg.message(sources, 0), leg.message(sources, 1)
        return self._messages

    def _smooth(self) -> None:
        """PipeGCN's rule (its section 3.4): momentum * smoothed + (1 - momentum) * rows.

        The first rows are taken as they are, where PipeGCN's code starts from zeros.
        """
        if self._momentum and not self._smoothed:
            self._smoothed = [rows.clone() for rows in self._rows]
        elif self._momentum:
            for smoothed, rows in zip(self._smoothed, self._rows, strict=True):
                smoothed.lerp_(rows, 1.0 - self._momentum)
