"""What all ranks' exchanges of one epoch cost and lost, from what each rank has heard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.observer import WORK, Record, Tallies
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.stopwatch import Span, covered
from lightning_sylvie.transport import Transport

SPLIT = ("compute", "quantize", "move", "wait", "dequantize", "all_reduce")
"""What the seconds of a step are split into."""

_NUMBERS = ("num_bytes", "side_bytes", "age", "error", "energy", "stall")
_BY_PLACE = (
    "bytes", "side_bytes", "stall_s", "quantize_s", "move_s", "wait_s", "dequantize_s",
)  # fmt: skip
_HEAD = ("step", "all_reduce", "halo", "nodes", "cost")


@final
@dataclass(frozen=True)
class Traffic:
    """One training step on all ranks.

    Attributes:
        places: Layer's name and direction of each exchange, in the order of the step.
        head: float64 ``(num_ranks, 5)``: seconds of the step, seconds in which it waited for sums
            over the ranks, halo rows, owned nodes, seconds that it costs to know all this.
        numbers: float64 ``(num_ranks, num_exchanges, 6)``: bytes, bytes of side information, age,
            squared error and squared norm of the sampled rows, seconds that the step stalled.
        spans: float64 ``(num_ranks, num_exchanges, 3, 2)``: beginning and end of `WORK`, as
            `time.time` counts.
    """

    places: tuple[tuple[str, str], ...]
    head: Tensor
    numbers: Tensor
    spans: Tensor

    @classmethod
    def gather(
        cls, tallies: Tallies, plan: HaloPlan, transport: Transport, cost: float = 0.0
    ) -> Traffic:
        """What all ranks have heard in one step, by one all-reduce that each takes part in.

        Args:
            tallies: Of this rank; its timer has measured ``"step"``.
            plan: Of this rank.
            transport: Nobody else may use it meanwhile.
            cost: Seconds that it took this rank to know and tell all this before.
        """
        seconds = tallies.timer.seconds
        mine = [seconds("step"), seconds("all_reduce"), plan.num_halo, plan.num_owned, cost]
        for record in tallies.records:
            mine += _row(record)
        table = torch.zeros(transport.num_ranks, len(mine), dtype=torch.float64)
        table[transport.rank] = torch.tensor(mine, dtype=torch.float64)
        table = table.to(transport.device)
        transport.all_reduce(table)
        head, rows = table.cpu().split([len(_HEAD), len(mine) - len(_HEAD)], 1)
        widths = [len(_NUMBERS), 2 * len(WORK)]
        rows = rows.reshape(len(table), len(tallies.records), sum(widths))
        numbers, spans = rows.split(widths, 2)
        places = tuple((_layer(record.name), record.direction) for record in tallies.records)
        return cls(places, head, numbers, spans.reshape(*spans.shape[:2], len(WORK), 2))

    @property
    def num_bytes(self) -> int:
        """What all ranks together sent."""
        return int(self.numbers[..., 0].sum())

    @property
    def halo_ratio(self) -> float:
        """Halo rows of all parts / nodes."""
        return float(self.head[:, 2].sum() / self.head[:, 3].sum())

    @property
    def hidden(self) -> float | None:
        """Share of the time of exchanges, coding included, in which no step waited for them.

        None if nothing was exchanged, as before a synchronous epoch of the pipelined mode.
        """
        work = sum(covered(_spans(self.spans[rank])) for rank in range(len(self.head)))
        stalls = float(self.numbers[..., 5].sum())
        return max(0.0, 1.0 - stalls / work) if work else None

    def interval(self, share: float) -> int:
        """Steps of which one may be measured, so that it costs at most `share` of their time."""
        return max(1, math.ceil(float(self.head[:, 4].max() / (share * self.head[:, 0].max()))))

    @property
    def waits(self) -> Tensor:
        """``(num_ranks, num_exchanges)``: seconds of each before the slowest rank began it.

        The rest of an exchange moves bytes. Beginnings are compared by the clocks of the ranks'
        machines, and a wait is cut to its exchange.
        """
        exchange = self.spans[..., WORK.index("exchange"), :]
        waits = exchange[..., 0].amax(0) - exchange[..., 0]
        return torch.minimum(waits, _lengths(exchange)).clamp(min=0.0)

    def split(self) -> dict[str, float]:
        """Seconds of the rank that computes longest, which add up to its step; by `SPLIT`.

        An exchange counts as far as the step stalls for it; what it hides behind the computation
        is its beginning. A stall for rows of the last epoch is one of moving them. What is nothing
        else is computing.
        """
        quantize, exchange, dequantize = _lengths(self.spans).unbind(-1)
        age, stall = self.numbers[..., 2], self.numbers[..., 5]
        shown = torch.minimum(exchange, stall - quantize - dequantize).clamp(min=0.0)
        wait = (self.waits - (exchange - shown)).clamp(min=0.0)
        stale = age > 0
        found = {
            "quantize": quantize.masked_fill(stale, 0.0).sum(1),
            "move": torch.where(stale, stall, shown - wait).sum(1),
            "wait": wait.masked_fill(stale, 0.0).sum(1),
            "dequantize": dequantize.masked_fill(stale, 0.0).sum(1),
            "all_reduce": self.head[:, 1],
        }
        found["compute"] = self.head[:, 0] - torch.stack(list(found.values())).sum(0)
        longest = int(found["compute"].argmax())
        return {what: float(found[what][longest]) for what in SPLIT}

    def metrics(self) -> dict[str, float]:
        """All numbers under the names of `HaloTraffic`."""
        found = {"halo/bytes": float(self.num_bytes), "halo/ratio": self.halo_ratio}
        if (hidden := self.hidden) is not None:
            found["halo/hidden"] = hidden
        found |= {f"time/{what}": seconds for what, seconds in self.split().items()}
        places = list(dict.fromkeys(self.places))
        for place, values in zip(places, self._by_place(places), strict=True):
            found |= {f"halo/{'/'.join(place)}/{what}": value for what, value in values.items()}
        return found

    def _by_place(self, places: list[tuple[str, str]]) -> list[dict[str, float]]:
        """The sums of each place's exchanges, maxima over the ranks; their mean age and error."""
        quantize, exchange, dequantize = _lengths(self.spans).unbind(-1)
        waits = self.waits
        seconds = torch.stack([quantize, exchange - waits, waits, dequantize], -1)
        values = torch.cat([self.numbers, seconds], -1)
        index = torch.tensor([places.index(place) for place in self.places], dtype=torch.int64)
        sums = values.new_zeros(len(values), len(places), values.shape[-1])
        sums.index_add_(1, index, values)
        found, totals = sums.amax(0).tolist(), sums[..., 3:5].sum(0).tolist()
        uses = torch.bincount(index, minlength=len(places)).tolist()
        return [
            {
                **dict(zip(_BY_PLACE, [*row[:2], *row[5:]], strict=True)),
                "age": row[2] / count,
                "nmse": error / energy if energy else 0.0,
            }
            for row, count, (error, energy) in zip(found, uses, totals, strict=True)
        ]


def _row(record: Record) -> list[float]:
    """Of one exchange: numbers, then spans."""
    row = [record.num_bytes, record.side_bytes, record.age, *record.losses, record.stall]
    for what in WORK:
        row += record.span(what)
    return row


def _layer(name: str) -> str:
    """The layer's name in its model, of one that may end with its class: "convs.0 (SAGEConv)"."""
    return name.partition(" (")[0].replace(" ", "_")


def _lengths(spans: Tensor) -> Tensor:
    return spans[..., 1] - spans[..., 0]


def _spans(spans: Tensor) -> list[Span]:
    return [(begin, end) for begin, end in spans.reshape(-1, 2).tolist()]
