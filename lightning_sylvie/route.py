"""One exchange: whose rows go where, how they are coded, and what their noise is a function of."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from lightning_sylvie.lane import Inline, Lane
from lightning_sylvie.observer import Observer, Trace
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.quantizer import Noise, NonFiniteRowError, Quantizer
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Pending, Transport


class RowIds:
    """Which node every row of a message belongs to, in both directions.

    A node's row goes to all its readers with the same noise; its gradients come from several
    ranks, whose noise must differ, so the rank is folded into their numbers.

    Args:
        shard: The part on this rank.
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
    """

    transport: Transport
    plan: HaloPlan
    ids: RowIds
    quantizer: Quantizer
    gradient_quantizer: Quantizer
    key: tuple[int, ...]
    name: str
    lane: Lane = field(default_factory=Inline)
    observer: Observer = field(default_factory=Observer)

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
    code: Quantizer
    index: Tensor | None
    ids: tuple[Tensor, Tensor]
    counts: tuple[Sequence[int], Sequence[int]]
    trace: Trace

    def begin(self, sources: Sequence[Tensor]) -> Pending:
        """Starts an exchange that `finish` or `finish_add` ends; `sources` may change meanwhile."""
        message = self.message(sources, sum(self.counts[0]))
        with self.trace.timer.timing("stall"):
            self.encode(sources, message)
        return self.start(message)

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

    def message(self, sources: Sequence[Tensor], num_rows: int) -> Tensor:
        """An empty message for `num_rows` records with a row of each source."""
        stride = self._offsets(sources)[-1]
        return sources[0].new_empty((num_rows, stride), dtype=torch.uint8)

    def encode(self, sources: Sequence[Tensor], message: Tensor) -> None:
        """Quantizes the rows of `sources` that are sent into `message`.

        Raises:
            ValueError: If one holds NaN or Inf, with layer, rank and node.
        """
        try:
            with self.trace.timer.timing("quantize"):
                for i, offset in enumerate(self._offsets(sources)[:-1]):
                    self.code.quantize(sources[i], self.index, self._noise(i, 0), message, offset)
        except NonFiniteRowError as error:
            nodes, what = self.route.ids, "gradient" if self.direction else "row"
            ids = nodes.received if self.direction else nodes.sent
            raise ValueError(
                f"{self.route.name}: the {what} of node {int(ids[error.position])} that rank "
                f"{self.route.plan.rank} sends holds NaN or Inf, expected finite values: lower the "
                "learning rate, clip gradients, or look at that node's features"
            ) from None
        if self.trace.sample:
            side_bytes = sum(self.code.side_bytes(rows) for rows in sources) * len(message)
            with self.trace.timer.timing("sample"):
                losses = self._losses(sources, message)
            self.trace.sent(message.numel(), side_bytes, losses)

    def start(self, message: Tensor, received: Tensor | None = None) -> Pending:
        """Starts to move a message, into `received` if that is given."""
        arrived = self.trace.timer.start("exchange")
        return _Noticed(self.route.transport.start(message, *self.counts, rows=received), arrived)

    def decode(self, received: Tensor, rows: Sequence[Tensor]) -> None:
        """Fills `rows`."""
        with self.trace.timer.timing("dequantize"):
            for i, offset in enumerate(self._offsets(rows)[:-1]):
                self.code.dequantize(received, offset, self._noise(i, 1), rows[i])

    def decode_add(self, received: Tensor, index: Tensor, rows: Sequence[Tensor]) -> None:
        """Adds to ``rows[index]``; the index ascends within the rows of each rank."""
        with self.trace.timer.timing("dequantize"):
            for i, offset in enumerate(self._offsets(rows)[:-1]):
                noise = self._noise(i, 1)
                self.code.dequantize_add(received, offset, noise, index, self.counts[1], rows[i])

    def _moved(self, sources: Sequence[Tensor], lane: Lane) -> Tensor:
        message = self.message(sources, sum(self.counts[0]))
        self.encode(sources, message)
        return lane.run(lambda: self.start(message).wait(), message)

    def _losses(self, sources: Sequence[Tensor], message: Tensor) -> Tensor:
        """Squared error and squared norm of some of the floating-point rows in `message`."""
        some = slice(None, None, max(1, len(message) // self.trace.sample))
        coded, ids = message[some].contiguous(), self.ids[0][some].contiguous()
        losses = torch.zeros(2, dtype=torch.float64, device=message.device)
        for i, offset in enumerate(self._offsets(sources)[:-1]):
            if sources[i].is_floating_point():
                given = sources[i][some if self.index is None else self.index[some]]
                decoded = torch.empty(given.shape, dtype=given.dtype, device=given.device)
                self.code.dequantize(coded, offset, Noise(self._noise(i, 0).key, ids), decoded)
                pair = torch.stack([decoded.sub_(given), given]).flatten(1)
                losses += torch.linalg.vector_norm(pair, dim=1, dtype=torch.float64).square_()
        return losses

    def _offsets(self, rows: Sequence[Tensor]) -> list[int]:
        """Where each tensor's bytes start in a record, and where they end."""
        return list(accumulate((self.code.row_bytes(tensor) for tensor in rows), initial=0))

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
