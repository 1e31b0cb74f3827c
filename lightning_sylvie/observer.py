"""What exchanges cost and lose: told to whoever listens, and nothing is measured for nobody."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.stopwatch import Span, Stopwatch, Timer, clock_of

DIRECTIONS = ("forward", "backward")
WORK = ("quantize", "exchange", "dequantize")
"""What an exchange does, in its order, on whatever thread it runs."""


class Trace:
    """Is told of one exchange. This one does not listen.

    Attributes:
        sample: Rows of the message that are decoded where they were coded, to see what they lost.
        timer: Measures `WORK`; ``"stall"``: how long the step waits for halo rows; and
            ``"sample"``: how long it takes to see what rows lost.
    """

    sample = 0
    timer = Timer()

    def sent(self, num_bytes: int, side_bytes: int, losses: Tensor) -> None:
        """Hears of the message to all peers together, when it is coded.

        Args:
            num_bytes: Of the message.
            side_bytes: Of them, those of scales and the like.
            losses: Squared error of the sampled rows, as their readers decode them, and their
                squared norm.
        """

    def used(self, age: int) -> None:
        """Hears how many epochs old the rows are that the step takes here; else they are 0."""


class Observer:
    """Hears of every exchange and sum that this rank takes part in. This one does not listen.

    Attributes:
        timer: Measures ``"all_reduce"``: how long the step waits for sums over the ranks.
    """

    timer = Timer()

    def exchange(self, name: str, direction: int) -> Trace:
        """What is told of an exchange that begins; called in the order of the step.

        Args:
            name: The layer.
            direction: 0: forward, 1: backward.
        """
        return _UNHEARD


@final
class Record(Trace):
    """Keeps what it is told of one exchange.

    Attributes:
        name: The layer.
        direction: ``"forward"`` or ``"backward"``.
        num_bytes: Of the message; 0 before it is coded.
        side_bytes: Of them, those of scales and the like.
        age: Epochs since the rows that the step took were sent.
    """

    def __init__(self, name: str, direction: int, sample: int, timer: Stopwatch) -> None:
        self.name, self.direction, self.sample = name, DIRECTIONS[direction], sample
        self.timer: Stopwatch = timer
        self.num_bytes = self.side_bytes = self.age = 0
        self._losses: Tensor | None = None

    def sent(self, num_bytes: int, side_bytes: int, losses: Tensor) -> None:
        self.num_bytes, self.side_bytes, self._losses = num_bytes, side_bytes, losses

    def used(self, age: int) -> None:
        self.age = age

    @property
    def losses(self) -> tuple[float, float]:
        """Squared error of the sampled rows, and their squared norm."""
        error, energy = (0.0, 0.0) if self._losses is None else self._losses.tolist()
        return error, energy

    @property
    def stall(self) -> float:
        """Seconds in which the step waited for it; where it measured itself is not counted."""
        measuring = 0.0 if self.age else self.timer.seconds("sample")  # old rows wait for no sample
        return max(0.0, self.timer.seconds("stall") - measuring)

    def span(self, what: str) -> Span:
        """When a part of it ran; zeros if it did not, or is not over."""
        return next(iter(self.timer.spans(what)), (0.0, 0.0))


@dataclass
class Tally:
    """What one rank has seen of one layer's exchanges in one direction.

    `seconds` are those of `WORK`, wherever it ran, and of ``"stall"``, in which the step waited
    for it; a pipelined exchange goes on beside the computation.
    """

    num_messages: int = 0
    num_bytes: int = 0
    side_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nmse(self) -> float:
        """Squared error of the sampled rows relative to their squared norm."""
        return self.error / self.energy if self.energy else 0.0

    def add(self, record: Record) -> None:
        """Adds an exchange."""
        self.num_messages += 1
        self.num_bytes += record.num_bytes
        self.side_bytes += record.side_bytes
        error, energy = record.losses
        self.error, self.energy = self.error + error, self.energy + energy
        for what in (*WORK, "stall"):
            if what in record.timer:
                self.seconds[what] = self.seconds.get(what, 0.0) + record.timer.seconds(what)


@final
class Tallies(Observer):
    """Keeps what it hears, an exchange at a time.

    Args:
        sample: Rows per message whose error is measured.
        device: Where the exchanges work; on a GPU events tell the times, and nothing waits for it.

    Attributes:
        records: One per exchange, in the order of the step.
    """

    def __init__(self, sample: int = 64, device: torch.device | None = None) -> None:
        self._sample, self._clock = sample, clock_of(device or torch.device("cpu"))
        self.timer: Stopwatch = Stopwatch(self._clock)
        self.records: list[Record] = []

    def exchange(self, name: str, direction: int) -> Record:
        record = Record(name, direction, self._sample, Stopwatch(self._clock))
        self.records.append(record)
        return record

    def clear(self) -> None:
        """Forgets everything, as at the start of an epoch."""
        self.records, self.timer = [], Stopwatch(self._clock)

    @property
    def by_layer(self) -> dict[tuple[str, str], Tally]:
        """``(layer, "forward" or "backward")`` -> the sum of its exchanges, in the step's order."""
        found: dict[tuple[str, str], Tally] = {}
        for record in self.records:
            found.setdefault((record.name, record.direction), Tally()).add(record)
        return found


_UNHEARD = Trace()
