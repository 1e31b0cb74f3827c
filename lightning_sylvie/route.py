"""One exchange: whose rows go where, how they are coded, and what their noise is a function of."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.allocation import Allocations
from lightning_sylvie.lane import Inline, Lane
from lightning_sylvie.layout import Layout, Records
from lightning_sylvie.observer import Observer, Trace
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.quantizer import Code, Mixture, Noise, NonFiniteRowError
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Pending, Transport


class RowIds:
    """Which node every row of a message belongs to, in both directions.

    A node's row goes to all its readers with the same noise; its gradients come from several
    ranks, whose noise must differ, so the rank is folded into their numbers.

    Args:
        shard: The part on this rank.

    Attributes:
        degrees: See `Route.degrees`; None: not told yet.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        plan, num_ranks = shard.plan, shard.plan.num_ranks
        device = plan.send_index.device
        counts = torch.tensor(plan.send_counts, device=device)
        reader = torch.arange(num_ranks, device=device).repeat_interleave(counts)
        self.sent = shard.node_id[plan.send_index]
        self.received = shard.halo_id
        self.sent_back = shard.halo_id * num_ranks + plan.rank
        self.received_back = self.sent * num_ranks + reader
        self.degrees: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Route:
    """One exchange, forward and backward.

    Attributes:
        transport: Moves the messages.
        plan: Who sends which rows to whom.
        ids: The nodes of the rows.
        quantizer: How rows travel.
        gradient_quantizer: How their gradients travel back.
        key: Seed, epoch and place of the exchange in the step.
        name: The layer and exchange, for messages.
        lane: Where messages are moved.
        observer: Hears of it.
        allocations: How many bits each row gets, if they differ.
    """

    transport: Transport
    plan: HaloPlan
    ids: RowIds
    quantizer: Code
    gradient_quantizer: Code
    key: tuple[int, ...]
    name: str
    lane: Lane = field(default_factory=Inline)
    observer: Observer = field(default_factory=Observer)
    allocations: Allocations = field(default_factory=Allocations)

    def push(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Owned rows to the ranks that need them: each tensor with its halo rows appended."""
        targets, halos = self.extend(tensors)
        self.out().exchange(targets, halos, self.lane)
        return shaped(targets, tensors)

    def pull(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Halo rows back to their owners, who add them: the mirror of `push`."""
        targets, halos = self.split(tensors)
        self.back().exchange_add(halos, self.plan.send_index, targets, self.lane)
        return shaped(targets, tensors)

    def extend(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Each tensor as ``(num_rows, width)`` with halo rows to be filled; those rows."""
        plan, targets = self.plan, []
        for source in map(_as_rows, tensors):
            target = source.new_empty((plan.num_rows, source.shape[1]))
            target[: plan.num_owned] = source
            targets.append(target)
        return targets, [target[plan.num_owned :] for target in targets]

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Each tensor's owned rows, copied, and its halo rows, as ``(rows, width)``."""
        rows, num_owned = [_as_rows(tensor) for tensor in tensors], self.plan.num_owned
        return [t[:num_owned].clone() for t in rows], [t[num_owned:] for t in rows]

    def degrees(self) -> tuple[Tensor, Tensor]:
        """Edges from each boundary entry's row, and from each halo row, in the part that reads it.

        int64 ``(num_sent,)`` and ``(num_halo,)``. Readers tell owners, once, in 4 bytes per row.
        """
        if self.ids.degrees is None:
            plan, sources = self.plan, self.ids.shard.edge_index[0]
            here = sources.bincount(minlength=plan.num_rows)[plan.num_owned :]
            message = here.int().unsqueeze(1).view(torch.uint8)
            counts = plan.recv_counts, plan.send_counts
            told = self.lane.run(partial(self.transport.exchange, message, *counts), message)
            self.ids.degrees = told.view(torch.int32).squeeze(1).long(), here
        return self.ids.degrees

    def out(self) -> Leg:
        """Boundary rows to the ranks that read them: an exchange that begins."""
        plan, ids = self.plan, (self.ids.sent, self.ids.received)
        counts = plan.send_counts, plan.recv_counts
        trace = self.observer.exchange(self.name, 0)
        return Leg(self, 0, self.quantizer, plan.send_index, ids, counts, trace)

    def back(self) -> Leg:
        """Gradients of halo rows to the ranks that own them: an exchange that begins."""
        plan, ids = self.plan, (self.ids.sent_back, self.ids.received_back)
        counts = plan.recv_counts, plan.send_counts
        trace = self.observer.exchange(self.name, 1)
        return Leg(self, 1, self.gradient_quantizer, None, ids, counts, trace)


@dataclass(frozen=True)
class Leg:
    """One direction of a route: `encode`, `start` and `decode` are an exchange in three parts.

    Attributes:
        route: Of both directions.
        direction: 0: out, 1: back.
        code: How rows travel.
        index: Which of the source's rows are sent; None: all, in order.
        ids: The nodes of the rows sent and received.
        counts: Rows sent to and received from each rank.
        trace: Is told of it.
    """

    route: Route
    direction: int
    code: Code
    index: Tensor | None
    ids: tuple[Tensor, Tensor]
    counts: tuple[Sequence[int], Sequence[int]]
    trace: Trace
    _made: list[Layout] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """How rows lie in the messages; asked for when the place's last exchange is over.

        Made once; not by `cached_property`, whose lock (up to Python 3.11) all legs share: this
        may wait for other ranks.
        """
        if not self._made:
            if isinstance(self.code, Mixture):
                self._made.append(self.route.allocations.layout(self.code, self))
            else:
                self._made.append(Records(self.code, self.counts))
        return self._made[0]

    def begin(self, sources: Sequence[Tensor]) -> Pending:
        """Starts an exchange that `finish` or `finish_add` ends; `sources` may change meanwhile."""
        with self.trace.timer.timing("stall"):
            message = self.message(sources, 0)
            self.encode(sources, message)
        return self.start(sources, message)

    def wait(self, pending: Pending) -> Tensor:
        """What the other ranks send, as soon as it is there."""
        with self.trace.timer.timing("stall"):
            return pending.wait()

    def finish(self, pending: Pending, rows: Sequence[Tensor]) -> None:
        """Fills `rows` with what the other ranks send."""
        with self.trace.timer.timing("stall"):
            self.decode(pending.wait(), rows)

    def finish_add(self, pending: Pending, index: Tensor, rows: Sequence[Tensor]) -> None:
        """Adds what the other ranks send to ``rows[index]``."""
        with self.trace.timer.timing("stall"):
            self.decode_add(pending.wait(), index, rows)

    def exchange(self, sources: Sequence[Tensor], rows: Sequence[Tensor], lane: Lane) -> None:
        """Fills `rows` with what the other ranks send of their `sources`."""
        with self.trace.timer.timing("stall"):
            self.decode(self._moved(sources, lane), rows)

    def exchange_add(
        self, sources: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], lane: Lane
    ) -> None:
        """Adds what the other ranks send to ``rows[index]``."""
        with self.trace.timer.timing("stall"):
            self.decode_add(self._moved(sources, lane), index, rows)

    def message(self, like: Sequence[Tensor], end: int) -> Tensor:
        """An empty message with a row of each tensor: that is sent (0), or received (1)."""
        return like[0].new_empty(self.layout.shape(like, end), dtype=torch.uint8)

    def encode(self, sources: Sequence[Tensor], message: Tensor) -> None:
        """Quantizes the rows of `sources` that are sent into `message`.

        Raises:
            ValueError: If one holds NaN or Inf, with layer, rank and node.
        """
        noises = self._noises(sources, 0)
        try:
            with self.trace.timer.timing("quantize"):
                self.layout.encode(sources, self.index, noises, message)
        except NonFiniteRowError as error:
            nodes, what = self.route.ids, "gradient" if self.direction else "row"
            ids = nodes.received if self.direction else nodes.sent
            raise ValueError(
                f"{self.route.name}: the {what} of node {int(ids[error.position])} that rank "
                f"{self.route.plan.rank} sends holds NaN or Inf, expected finite values: lower the "
                "learning rate, clip gradients, or look at that node's features"
            ) from None
        if self.trace.sample:
            step = max(1, sum(self.counts[0]) // self.trace.sample)
            with self.trace.timer.timing("sample"):
                losses = self.layout.losses(sources, self.index, noises, message, step)
            self.trace.sent(message.numel(), self.layout.side_bytes(sources), losses)

    def start(
        self, like: Sequence[Tensor], message: Tensor, received: Tensor | None = None
    ) -> Pending:
        """Starts to move a message of such tensors, into `received` if that is given."""
        arrived = self.trace.timer.start("exchange")
        counts = self.layout.counts(like)
        return _Noticed(self.route.transport.start(message, *counts, rows=received), arrived)

    def decode(self, received: Tensor, rows: Sequence[Tensor]) -> None:
        """Fills `rows`."""
        with self.trace.timer.timing("dequantize"):
            self.layout.decode(received, self._noises(rows, 1), rows)

    def decode_add(self, received: Tensor, index: Tensor, rows: Sequence[Tensor]) -> None:
        """Adds to ``rows[index]``; the index ascends within the rows of each rank."""
        with self.trace.timer.timing("dequantize"):
            self.layout.decode_add(received, self._noises(rows, 1), index, rows)

    def _moved(self, sources: Sequence[Tensor], lane: Lane) -> Tensor:
        message = self.message(sources, 0)
        self.encode(sources, message)
        return lane.run(lambda: self.start(sources, message).wait(), message)

    def _noises(self, rows: Sequence[Tensor], end: int) -> list[Noise]:
        return [self._noise(position, end) for position in range(len(rows))]

    def _noise(self, position: int, end: int) -> Noise:
        numbers = (*self.route.key, self.direction, position)
        digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8)
        return Noise(int.from_bytes(digest.digest(), "little", signed=True), self.ids[end])


@final
class _Noticed(Pending):
    """An exchange under way whose arrival is told."""

    def __init__(self, pending: Pending, arrived: Callable[[], None]) -> None:
        self._pending, self._arrived = pending, arrived
        self._received: Tensor | None = None

    def wait(self) -> Tensor:
        if self._received is None:
            self._received = self._pending.wait()
            self._arrived()
        return self._received


def shaped(rows: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Rows ``(n, width)`` in the shapes of rows that they stand for, ``(n, ...)``."""
    return [t.view(t.shape[0], *other.shape[1:]) for t, other in zip(rows, like, strict=True)]


def _as_rows(tensor: Tensor) -> Tensor:
    """The tensor as contiguous ``(num_rows, width)``."""
    return tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:])).contiguous()
