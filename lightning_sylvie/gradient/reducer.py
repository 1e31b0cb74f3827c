"""Sums parameter gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from lightning_sylvie.all_reduce import Compressed, choose
from lightning_sylvie.gradient.bucket import Bucket, fuse
from lightning_sylvie.gradient.readiness import Readiness
from lightning_sylvie.gradient.way import GradientSum
from lightning_sylvie.lane import Beside, Ticket
from lightning_sylvie.observer import Observer
from lightning_sylvie.quantizer import Rotated
from lightning_sylvie.quantizer import choose as choose_code
from lightning_sylvie.transport import Transport


class GradientReducer:
    """Replaces every gradient by its sum over the ranks, in buckets of many gradients.

    Each rank's loss holds its own nodes' share of the global loss, so the sum is the gradient of
    the global loss, and it has the same bits on every rank. The transport must be another than that
    of halo rows: inside `overlapping` buckets travel beside the exchanges of backward, and nobody
    else may use the transport there.

    float64 is summed in float64, everything else in float32.

    Args:
        parameters: The same on every rank, in the same order. Those that do not require a
            gradient when gradients are summed are left alone.
        transport: Sums over the ranks.
        way: How.

    Attributes:
        observer: Hears how long the step waits for sums.

    Raises:
        ValueError: If the parameters are on several devices.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        transport: Transport,
        way: GradientSum = GradientSum(),  # noqa: B008 (it is frozen)
    ) -> None:
        unique = list(dict.fromkeys(parameters))
        if len(devices := {parameter.device for parameter in unique}) > 1:
            raise ValueError(
                f"expected all parameters on one device, got {sorted(map(str, devices))}"
            )
        self.observer = Observer()
        self._buckets = fuse(unique, way.bucket_bytes)
        self._transport = transport
        self._all_reduce = choose(way.all_reduce)
        self._compressed: dict[Bucket, Compressed] = {}
        if way.bits < 32 and transport.num_ranks > 1:
            self._compress(way.bits)
        self._overlap = way.overlap and transport.num_ranks > 1 and len(self._buckets) > 1
        self._readiness, self._lane = Readiness(self._buckets), Beside(transport.device)

    @property
    def signature(self) -> str:
        """What must agree among the ranks, for `check_signature`."""
        return "; ".join(bucket.signature for bucket in self._buckets)

    @contextmanager
    def overlapping(self, *, scale: float = 1.0) -> Iterator[None]:
        """Sums the gradients of the one backward inside: they are there when the context ends.

        Args and errors are those of `reduce`. If backward raises, sums under way are given up.
        """
        if not self._overlap:
            yield
            self.reduce(scale=scale)
            return
        tickets: list[Ticket] = []

        def start(bucket: Bucket) -> None:
            bucket.fill()
            tickets.append(self._lane.start(partial(self._sum, bucket)))

        try:
            with self._readiness.watching(start):
                yield
            with self._waiting():
                for ticket in tickets:
                    ticket.wait()
        except BaseException as error:
            self._lane.give_up(error)
            raise
        self._finish(self._buckets[len(tickets) :], scale)

    def reduce(self, *, scale: float = 1.0) -> None:
        """Sums the gradients; call it on every rank after backward.

        Args:
            scale: Multiplies the sums. With losses multiplied by the number of ranks and 1 / that
                number here, gradients that are reduced already count once in a second call.

        Raises:
            ValueError: If a gradient is sparse.
            RuntimeError: If a parameter requires a gradient on some ranks only.
            PeerError: If a rank is gone.
        """
        if self._transport.num_ranks == 1 and scale == 1.0:
            return
        self._finish(self._buckets, scale)

    def state(self) -> list[dict[str, Any]]:
        """What coded sums have lost on this rank so far, a state for each of their buckets."""
        return [compressed.state() for compressed in self._compressed.values()]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Goes on from what `state` gave on this rank, if the buckets are the same."""
        mine = list(self._compressed.values())
        shapes = [[tuple(t.shape) for t in each["lost"]] for each in state]
        if shapes == [[tuple(t.shape) for t in each.state()["lost"]] for each in mine]:
            for compressed, each in zip(mine, state, strict=True):
                compressed.restore(each)

    def close(self) -> None:
        """Leaves the parameters as they were found, and ends the thread."""
        self._readiness.close()
        self._lane.close()

    def _compress(self, bits: int) -> None:
        code = choose_code(bits, Rotated(unbiased=False) if bits == 1 else "auto")
        for bucket in self._buckets:
            size = len(bucket.values)
            if size and bucket.values.dtype == torch.float32:
                self._compressed[bucket] = Compressed(code, size, self._transport)

    def _sum(self, bucket: Bucket) -> None:
        if (compressed := self._compressed.get(bucket)) is None:
            self._all_reduce(bucket.buffer, self._transport)
        else:
            compressed(bucket.values)
            self._all_reduce(bucket.flags, self._transport)

    def _finish(self, rest: Sequence[Bucket], scale: float) -> None:
        """Sums the buckets that are not summed yet, and hands all sums out."""
        with self._waiting():
            for bucket in rest:
                bucket.fill()
                self._sum(bucket)
            for bucket in self._buckets:
                bucket.hand_out(self._transport, scale)

    def _waiting(self) -> AbstractContextManager[None]:
        return self.observer.timer.timing("all_reduce")
