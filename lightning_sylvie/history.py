"""What a training step leaves for the next one: rows of age 1, and exchanges under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lightning_sylvie.lane import Beside, Inline, Lane
from lightning_sylvie.observer import Trace
from lightning_sylvie.ops import scatter_add_rows
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.route import Leg, Route, shaped
from lightning_sylvie.schedule import Schedule
from lightning_sylvie.slot import Slot

_SAMPLE = 1024
"""Boundary rows, and at most twice as many, whose sum's drift is measured in each exchange. Layers
read sums of neighbours, in which a row's own noise (its dropout) averages out."""

Place = tuple[int, int, int]
"""Number of an exchange in the step, its direction, and how many times it has run before."""


class History(ABC):
    """Decides how old the halo rows of a step are.

    Attributes:
        lane: Where messages of this step are moved.
        drift: Squared change since the last step of a sum of this rank's boundary rows, and its
            squared norm, over all exchanges. Zero unless somebody asks for it.
    """

    lane: Lane
    drift: tuple[float, float] = (0.0, 0.0)

    @abstractmethod
    def push(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor with halo rows appended; see `Route.push`."""

    @abstractmethod
    def pull(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's owned rows with the other ranks' gradients added; see `Route.pull`."""

    @abstractmethod
    def begin(self, epoch: int) -> None:
        """Begins a training step."""

    @abstractmethod
    def agree(self, change: float, norm: float) -> None:
        """Takes note of the sum of `drift` over the ranks, which each step ends with."""

    @abstractmethod
    def forget(self) -> None:
        """Keeps no rows of earlier steps, after what is under way."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a run that goes on from here needs: plain values and tensors on the CPU."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave on this rank."""

    def close(self) -> None:
        """Ends the lane, after what is under way."""
        self.lane.close()


@final
class Fresh(History):
    """Age 0: every exchange is waited for where it starts.

    Args:
        lane: Where messages are moved.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self.lane = lane or Inline()

    def push(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        return route.push(tensors)

    def pull(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        return route.pull(tensors)

    def begin(self, epoch: int) -> None:
        pass

    def agree(self, change: float, norm: float) -> None:
        pass

    def forget(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@final
class Pipelined(History):
    """Age 1: a layer gets what the exchange of the last step brought, and starts its own.

    The same backward: gradients that arrived since the last step are added, this step's are sent
    (Sylvie-A, Figure 4 c). An exchange whose predecessor was not in the last step, or had other
    rows, waits for its own, as all do in synchronous steps; what it brings serves the next step
    too. So does what has no predecessor yet: the first step is synchronous.

    Args:
        lane: Runs the exchanges.
        schedule: Which epochs are synchronous.
        smoothing: What old rows, and old gradients, keep of their last smoothed value; 0: nothing.
    """

    def __init__(
        self, lane: Beside, schedule: Schedule, smoothing: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.lane: Beside = lane
        self.schedule, self._smoothing = schedule, smoothing
        self._slots: dict[Place, Slot] = {}
        self._restored: dict[Place, dict[str, Any]] = {}
        self._seen: Counter[tuple[int, int]] = Counter()
        self._boundaries: dict[int, _Boundary] = {}
        self._step = 0
        self._synchronous, self._needed = True, False

    def begin(self, epoch: int) -> None:
        self.lane.check()
        self._step += 1
        self.drift = 0.0, 0.0
        self._seen.clear()
        for place, slot in list(self._slots.items()):
            if slot.last_use < self._step - 1:
                slot.wait()  # a place's next exchange begins when its last one is over
                del self._slots[place]
        self._synchronous = self.schedule.is_synchronous(epoch)
        self.schedule.began(epoch, synchronous=self._synchronous)
        unused = self.schedule.will_be_synchronous(epoch + 1)
        self._needed = not unused or any(self._smoothing)  # which goes on with every epoch's rows

    def push(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{route.name} runs again in backward (activation checkpointing): rows of age 1 "
                'are gone by then; use mode="sync"'
            )
        if not self._works:
            return route.push(tensors)
        leg, (targets, halos) = route.out(), route.extend(tensors)
        slot = self._slot(leg, halos, route.plan.num_halo)
        if self.schedule.measures:
            sample = self._boundary(route.plan).sample
            change, norm = slot.change([target[sample].double().sum(0) for target in targets])
            self.drift = self.drift[0] + change, self.drift[1] + norm

        def use(rows: Sequence[Tensor]) -> None:
            for halo, arrived in zip(halos, rows, strict=True):
                halo.copy_(arrived)

        start = partial(slot.start, self.lane, leg, targets, leg.decode)
        self._exchange(slot, leg.trace, start, use)
        return shaped(targets, tensors)

    def pull(self, route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._works:
            return route.pull(tensors)
        leg, (targets, halos) = route.back(), route.split(tensors)
        boundary = self._boundary(route.plan)
        slot = self._slot(leg, targets, boundary.index.numel())

        def use(rows: Sequence[Tensor]) -> None:
            for target, arrived in zip(targets, rows, strict=True):
                boundary.add(arrived, target)

        def decode(received: Tensor, rows: Sequence[Tensor]) -> None:
            for total in rows:
                total.zero_()
            leg.decode_add(received, boundary.position, rows)

        self._exchange(slot, leg.trace, partial(slot.start, self.lane, leg, halos, decode), use)
        return shaped(targets, tensors)

    def agree(self, change: float, norm: float) -> None:
        self.schedule.measured(change, norm)

    def forget(self) -> None:
        for slot in self._slots.values():
            slot.wait()
        self._slots.clear()

    def state(self) -> dict[str, Any]:
        saved = dict(self._restored)
        for place, slot in self._slots.items():
            slot.wait()
            saved[place] = slot.state()
        return {
            "step": self._step,
            "schedule": self.schedule.state(),
            "slots": [{"place": list(place), **state} for place, state in saved.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if not state:  # of a synchronous run
            return
        self._step = state["step"]
        self.schedule.restore(state["schedule"])
        self._restored = {tuple(saved["place"]): saved for saved in state["slots"]}

    @property
    def _works(self) -> bool:
        """Whether rows of age 1 are used in this step, or made for the next."""
        return self._needed or not self._synchronous

    def _exchange(
        self,
        slot: Slot,
        trace: Trace,
        start: Callable[[], None],
        use: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Rows of age 1 are used before the next exchange overwrites them, of age 0 after it."""
        stale = not self._synchronous and slot.step == self._step - 1
        starts = self._needed or not stale
        if stale:
            trace.used(age=1)
            with trace.timer.timing("stall"):
                rows = slot.arrived(smoothed=True)
            use(rows)
            if starts:
                start()
        else:
            with trace.timer.timing("stall"):
                start()
                rows = slot.arrived()
            use(rows)
        slot.step = self._step if starts else slot.step
        slot.last_use = self._step

    def _slot(self, leg: Leg, rows: Sequence[Tensor], num_rows: int) -> Slot:
        """The slot of an exchange; an empty one if its rows are not those of the last step."""
        number = leg.route.key[-1], leg.direction
        place = (*number, self._seen[number])
        self._seen[number] += 1
        fresh = Slot(leg, rows, num_rows, self._smoothing[leg.direction])
        known = self._slots.get(place)
        if known is not None:
            if known.layout == fresh.layout:
                return known
            known.wait()
        if (saved := self._restored.pop(place, None)) is not None:
            fresh.restore(saved)
        self._slots[place] = fresh
        return fresh

    def _boundary(self, plan: HaloPlan) -> _Boundary:
        if id(plan) not in self._boundaries:
            self._boundaries[id(plan)] = _Boundary(plan)
        return self._boundaries[id(plan)]


def history_of(
    mode: str, device: torch.device, schedule: Schedule, smoothing: tuple[float, float]
) -> History:
    """The history of ``SylvieStrategy(mode=...)``."""
    return Pipelined(Beside(device), schedule, smoothing) if mode == "async" else Fresh()


class _Boundary:
    """The boundary rows of a plan, each once: where gradients of several ranks add up.

    Attributes:
        index: int64, ascending: their numbers among the owned rows.
        position: For each boundary entry, its row's place in `index`.
        sample: Some of the rows in `index`, spread evenly.
    """

    def __init__(self, plan: HaloPlan) -> None:
        self._plan = plan  # known by its identity, so it must live
        self.index, self.position = torch.unique(plan.send_index, return_inverse=True)
        self.sample = self.index[:: max(1, self.index.numel() // _SAMPLE)]

    def add(self, rows: Tensor, target: Tensor) -> None:
        """Adds `rows`, one for each boundary row, to the owned rows in `target`."""
        scatter_add_rows(rows.view(torch.uint8), 0, self.index, [self.index.numel()], target)
