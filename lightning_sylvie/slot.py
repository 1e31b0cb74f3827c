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

    Attributes:
        layout: What must be equal from step to step.
        step: The step whose exchange it holds or has under way; -1: none.
        last_use: The last step in which it was used.
    """

    def __init__(self, leg: Leg, like: Sequence[Tensor], num_rows: int) -> None:
        widths = [(tensor.shape[1], str(tensor.dtype)) for tensor in like]
        cut = leg.route.ids.shard.fingerprint
        self.layout = f"{leg.route.name}: {num_rows} rows of {widths}, cut {cut}"
        self.step = self.last_use = -1
        self._like, self._num_rows = [tensor[:0] for tensor in like], num_rows
        self._rows: list[Tensor] = []
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
        if self._messages is None:
            sent, received = (leg.message(sources, sum(counts)) for counts in leg.counts)
            self._messages = sent, received
        sent, received = self._messages
        rows = self._rows

        def begin() -> Pending:
            leg.encode(sources, sent)
            return leg.start(sent, received)

        self._ticket = lane.submit(begin, lambda message: decode(message, rows), *sources)

    def wait(self) -> None:
        """Returns when nothing is under way."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.wait()

    def arrived(self) -> Sequence[Tensor]:
        """The rows of the last exchange, waited for."""
        self.wait()
        return self._rows

    def change(self, sample: list[Tensor]) -> tuple[float, float]:
        """Squared change of `sample` since the last call, and its squared norm."""
        before, self._sample = self._sample, sample
        pairs = list(zip(self._sample, before, strict=False))
        change = sum(float((new - old).square().sum()) for new, old in pairs)
        return change, sum(float(new.square().sum()) for new, _ in pairs)

    def state(self) -> dict[str, Any]:
        """What `restore` needs: rows on the CPU."""
        rows = [tensor.detach().to("cpu", copy=True) for tensor in self.arrived()]
        sample = [tensor.cpu() for tensor in self._sample]
        return {"layout": self.layout, "step": self.step, "rows": rows, "sample": sample}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes the rows of `state` if it is of the same layout."""
        if state["layout"] == self.layout and state["rows"]:
            self.step = state["step"]
            device = self._like[0].device
            self._rows = [tensor.to(device) for tensor in state["rows"]]
            self._sample = [tensor.to(device) for tensor in state["sample"]]
