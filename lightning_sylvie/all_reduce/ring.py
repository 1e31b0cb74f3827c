"""All-reduce around a ring: scatter-reduce, then all-gather; whole blocks or segments of them."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import AllReduce, bounds, largest
from lightning_sylvie.transport import Pending, Transport


@final
class Ring(AllReduce):
    """Every rank sends to its right neighbour and receives from its left one, 2(N-1) times.

    The data is cut into N blocks. In step t rank r sends block r - t and receives block r - t - 1.
    In the first N-1 steps it adds what it receives, after which block r + 1 is complete on rank r;
    in the other N-1 steps complete blocks replace what lies there. Every rank moves 2(N-1)/N of
    the data, which is the least that an all-reduce can do.

    Args:
        segment_size: Cut each block into segments of at most so many values. A segment goes on to
            the next rank as soon as it has been added, while the next one arrives.
    """

    def __init__(self, segment_size: int | None = None) -> None:
        self.segment_size = segment_size

    def _sum(self, values: Tensor, transport: Transport) -> None:
        tour = _Tour(values, transport, self._num_segments(len(values), transport.num_ranks))
        tour.run()

    def path(self, size: int, num_ranks: int) -> list[int]:
        num_segments = self._num_segments(size, num_ranks)
        segment = largest(largest(size, num_ranks), num_segments)
        return [segment] * (2 * (num_ranks - 1) * num_segments)

    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        ends = bounds(size, num_ranks)
        blocks = [(rank - step) % num_ranks for step in range(2 * (num_ranks - 1))]
        return sum(ends[block + 1] - ends[block] for block in blocks)

    def _num_segments(self, size: int, num_ranks: int) -> int:
        block = largest(size, num_ranks)
        return largest(block, self.segment_size or block)


class _Tour:
    """One sum: blocks of segments, and a transfer under way for each segment."""

    def __init__(self, values: Tensor, transport: Transport, num_segments: int) -> None:
        num_ranks = transport.num_ranks
        self._transport, self._num_segments = transport, num_segments
        self._blocks = [_cut(block, num_segments) for block in _cut(values, num_ranks)]
        most = largest(largest(len(values), num_ranks), num_segments)
        self._room = values.new_empty(num_segments, most)  # for arriving segments

    def run(self) -> None:
        num_steps = 2 * (self._transport.num_ranks - 1)
        pending = [self._start(0, segment) for segment in range(self._num_segments)]
        for step in range(num_steps):
            for segment in range(self._num_segments):
                pending[segment].wait()
                if self._adds(step):
                    target = self._target(step, segment)
                    target += self._room[segment][: len(target)]
                if step + 1 < num_steps:
                    pending[segment] = self._start(step + 1, segment)

    def _start(self, step: int, segment: int) -> Pending:
        rank, num_ranks = self._transport.rank, self._transport.num_ranks
        outgoing = self._blocks[(rank - step) % num_ranks][segment]
        incoming = self._target(step, segment)
        if self._adds(step):
            incoming = self._room[segment][: len(incoming)]
        right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        return self._transport.send_receive(outgoing, right, incoming, left)

    def _adds(self, step: int) -> bool:
        return step < self._transport.num_ranks - 1

    def _target(self, step: int, segment: int) -> Tensor:
        return self._blocks[(self._transport.rank - step - 1) % self._transport.num_ranks][segment]


def _cut(values: Tensor, num_parts: int) -> list[Tensor]:
    ends = bounds(len(values), num_parts)
    return [values[start:end] for start, end in pairwise(ends)]
