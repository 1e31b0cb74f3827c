"""Which epochs of the pipelined mode are synchronous."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, final


class Schedule(ABC):
    """Decides which epochs are synchronous, from numbers that are the same on every rank.

    Attributes:
        measures: Whether the decision depends on `drift`.
        drift: Relative change of boundary rows in the last epoch.
        last: The last synchronous epoch.
    """

    measures = False

    def __init__(self) -> None:
        self.drift = 0.0
        self.last: int | None = None

    @abstractmethod
    def is_synchronous(self, epoch: int) -> bool:
        """Whether the rows of this epoch, which begins now, must be its own (age 0)."""

    def will_be_synchronous(self, epoch: int) -> bool:
        """Whether that is certain before the epoch in front of it has ended."""
        return self.is_synchronous(epoch)

    def began(self, epoch: int, *, synchronous: bool) -> None:
        """Takes note of an epoch."""
        self.last = epoch if synchronous else self.last

    def measured(self, change: float, norm: float) -> None:
        """Takes note of the current epoch's drift.

        Args:
            change: Squared change of sums of boundary rows since the last epoch.
            norm: Their squared norm.
        """
        self.drift = math.sqrt(change / norm) if norm else 0.0

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on from here."""
        return {"drift": self.drift, "last": self.last}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.drift, self.last = state["drift"], state["last"]


@final
class Unbounded(Schedule):
    """No epoch has to be synchronous (Sylvie-A)."""

    def is_synchronous(self, epoch: int) -> bool:
        return False


@final
class Every(Schedule):
    """One epoch in `eps_s` (Sylvie-A with the Bounded Staleness Adaptor).

    Args:
        eps_s: 1: all epochs.
    """

    def __init__(self, eps_s: int) -> None:
        super().__init__()
        self.eps_s = eps_s

    def is_synchronous(self, epoch: int) -> bool:
        return epoch % self.eps_s == 0


@final
class Drifting(Schedule):
    """The epoch after one in which boundary rows changed too much; at the latest, one in many.

    Args:
        maximum: At least one epoch in so many.
        threshold: The relative change of boundary rows from epoch to epoch that is too much.
    """

    measures = True

    def __init__(self, maximum: int, threshold: float) -> None:
        super().__init__()
        self.maximum, self.threshold = maximum, threshold

    def is_synchronous(self, epoch: int) -> bool:
        return self.drift > self.threshold or self.will_be_synchronous(epoch)

    def will_be_synchronous(self, epoch: int) -> bool:
        return self.last is None or epoch - self.last >= self.maximum
