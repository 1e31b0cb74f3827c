"""How rows lie in messages: as records of one length, or in classes of equal bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, final

import torch
from torch import Tensor

from lightning_sylvie.quantizer import Noise, NonFiniteRowError, Quantizer

Counts: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Sent to and received from each rank."""


class Layout(ABC):
    """How rows become a message, one block of bytes for each peer, and are read from one.

    A row is one of each tensor of the exchange. Arguments of the methods: `like` and `sources` are
    tensors ``(n, width)``; `index` says which of their rows are sent, None: all, in order; `noises`
    has one for each tensor; a message is uint8 and two-dimensional.
    """

    @abstractmethod
    def counts(self, like: Sequence[Tensor]) -> Counts:
        """Rows of the messages sent to and received from each rank."""

    @abstractmethod
    def shape(self, like: Sequence[Tensor], end: int) -> tuple[int, int]:
        """Of the message to all peers together (`end` 0), or from all of them (1)."""

    @abstractmethod
    def encode(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
    ) -> None:
        """Writes the rows that are sent.

        Raises:
            NonFiniteRowError: If one of them holds NaN or Inf (quantizers below 16 bits).
        """

    @abstractmethod
    def decode(self, message: Tensor, noises: Sequence[Noise], rows: Sequence[Tensor]) -> None:
        """Fills `rows`."""

    @abstractmethod
    def decode_add(
        self, message: Tensor, noises: Sequence[Noise], index: Tensor, rows: Sequence[Tensor]
    ) -> None:
        """Adds to ``rows[index]``; the index ascends within the rows of each rank."""

    @abstractmethod
    def losses(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
        step: int,
    ) -> Tensor:
        """float64 ``(2,)``: squared error and squared norm of one in `step` of the rows sent."""

    @abstractmethod
    def side_bytes(self, like: Sequence[Tensor]) -> int:
        """Bytes of scales and the like in the message to all peers together."""


@final
@dataclass(frozen=True)
class Records(Layout):
    """A record for each row, all of one length.

    Attributes:
        code: How rows travel.
        rows: How many go to and come from each rank.
    """

    code: Quantizer
    rows: Counts

    def counts(self, like: Sequence[Tensor]) -> Counts:
        return self.rows

    def shape(self, like: Sequence[Tensor], end: int) -> tuple[int, int]:
        return sum(self.rows[end]), self.stride(like)

    def encode(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
    ) -> None:
        for source, noise, offset in zip(sources, noises, self._offsets(sources), strict=True):
            self.code.quantize(source, index, noise, message, offset)

    def decode(self, message: Tensor, noises: Sequence[Noise], rows: Sequence[Tensor]) -> None:
        for target, noise, offset in zip(rows, noises, self._offsets(rows), strict=True):
            self.code.dequantize(message, offset, noise, target)

    def decode_add(
        self, message: Tensor, noises: Sequence[Noise], index: Tensor, rows: Sequence[Tensor]
    ) -> None:
        for target, noise, offset in zip(rows, noises, self._offsets(rows), strict=True):
            self.code.dequantize_add(message, offset, noise, index, self.rows[1], target)

    def losses(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
        step: int,
    ) -> Tensor:
        some = slice(None, None, step)
        coded, ids = message[some].contiguous(), noises[0].id[some].contiguous()
        losses = torch.zeros(2, dtype=torch.float64, device=message.device)
        for source, noise, offset in zip(sources, noises, self._offsets(sources), strict=True):
            if source.is_floating_point():
                given = source[some if index is None else index[some]]
                decoded = torch.empty(given.shape, dtype=given.dtype, device=given.device)
                self.code.dequantize(coded, offset, Noise(noise.key, ids), decoded)
                pair = torch.stack([decoded.sub_(given), given]).flatten(1)
                losses += torch.linalg.vector_norm(pair, dim=1, dtype=torch.float64).square_()
        return losses

    def side_bytes(self, like: Sequence[Tensor]) -> int:
        return sum(map(self.code.side_bytes, like)) * sum(self.rows[0])

    def spread(self, message: Tensor, like: Sequence[Tensor]) -> Tensor:
        """float64 ``(rows of the message,)``: what the squared error of each is relative to."""
        total = torch.zeros(message.shape[0], dtype=torch.float64, device=message.device)
        for tensor, offset in zip(like, self._offsets(like), strict=True):
            if (spread := self.code.spread(message, offset, tensor)) is not None:
                total += spread
        return total

    def stride(self, like: Sequence[Tensor]) -> int:
        """Bytes of a record."""
        return sum(map(self.code.row_bytes, like))

    def _offsets(self, like: Sequence[Tensor]) -> list[int]:
        """Where each tensor's bytes start in a record."""
        return list(accumulate(map(self.code.row_bytes, like[:-1]), initial=0))


@final
class Classes(Layout):
    """The block of a peer holds the records of its rows of the first code, then of the next one.

    Within a class rows keep their order. A message is bytes ``(number, 1)``, as records of
    different classes have different lengths.

    Args:
        codes: Of each class.
        numbers: int64 ``(rows,)``, the class of each row sent, and of each row received.
        rows: How many go to and come from each rank.
    """

    def __init__(
        self, codes: Sequence[Quantizer], numbers: tuple[Tensor, Tensor], rows: Counts
    ) -> None:
        self._spreads: tuple[Tensor, Tensor] | None = None
        self._entries = [
            [(end == c).nonzero().squeeze(1) for c in range(len(codes))] for end in numbers
        ]
        tables = [_table(*end, len(codes)) for end in zip(numbers, rows, strict=True)]
        self._classes = [
            Records(code, (tables[0][c], tables[1][c])) for c, code in enumerate(codes)
        ]

    def measuring(self, spreads: tuple[Tensor, Tensor]) -> Classes:
        """This layout, for an exchange that fills `spreads` with what `Records.spread` says.

        Args:
            spreads: float64 ``(rows,)`` each, of the rows sent, known when they are coded, and of
                those received, known when they are decoded.
        """
        other = copy(self)
        other._spreads = spreads
        return other

    def counts(self, like: Sequence[Tensor]) -> Counts:
        sent, received = (
            [sum(sizes) for sizes in zip(*self._sizes(like, end), strict=True)] for end in (0, 1)
        )
        return sent, received

    def shape(self, like: Sequence[Tensor], end: int) -> tuple[int, int]:
        return sum(map(sum, self._sizes(like, end))), 1

    def encode(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
    ) -> None:
        parts = []
        for records, entries in zip(self._classes, self._entries[0], strict=True):
            part = sources[0].new_empty(records.shape(sources, 0), dtype=torch.uint8)
            try:
                chosen = entries if index is None else index[entries]
                records.encode(sources, chosen, _of(noises, entries), part)
            except NonFiniteRowError as error:
                raise NonFiniteRowError(int(entries[error.position])) from None
            self._measure(0, records, entries, part, sources)
            parts.append(part.view(-1))
        sizes = self._sizes(sources, 0)
        pieces = [part.split(list(each)) for part, each in zip(parts, sizes, strict=True)]
        torch.cat(
            [piece for block in zip(*pieces, strict=True) for piece in block], out=message.view(-1)
        )

    def decode(self, message: Tensor, noises: Sequence[Noise], rows: Sequence[Tensor]) -> None:
        for records, entries, part in self._parts(message, rows, 1):
            found = [target.new_empty((len(entries), target.shape[1])) for target in rows]
            records.decode(part, _of(noises, entries), found)
            self._measure(1, records, entries, part, rows)
            for target, some in zip(rows, found, strict=True):
                target.index_copy_(0, entries, some)

    def decode_add(
        self, message: Tensor, noises: Sequence[Noise], index: Tensor, rows: Sequence[Tensor]
    ) -> None:
        for records, entries, part in self._parts(message, rows, 1):
            records.decode_add(part, _of(noises, entries), index[entries], rows)
            self._measure(1, records, entries, part, rows)

    def losses(
        self,
        sources: Sequence[Tensor],
        index: Tensor | None,
        noises: Sequence[Noise],
        message: Tensor,
        step: int,
    ) -> Tensor:
        losses = torch.zeros(2, dtype=torch.float64, device=message.device)
        for records, entries, part in self._parts(message, sources, 0):
            chosen = entries if index is None else index[entries]
            losses += records.losses(sources, chosen, _of(noises, entries), part, step)
        return losses

    def side_bytes(self, like: Sequence[Tensor]) -> int:
        return sum(records.side_bytes(like) for records in self._classes)

    def _parts(
        self, message: Tensor, like: Sequence[Tensor], end: int
    ) -> Iterator[tuple[Records, Tensor, Tensor]]:
        """Each class, its rows, and its records ``(rows, stride)`` from all peers' blocks."""
        sizes = self._sizes(like, end)
        blocks = message.view(-1).split(
            [size for peer in zip(*sizes, strict=True) for size in peer]
        )
        for c, (records, entries) in enumerate(zip(self._classes, self._entries[end], strict=True)):
            part = torch.cat(blocks[c :: len(sizes)]).view(len(entries), records.stride(like))
            yield records, entries, part

    def _sizes(self, like: Sequence[Tensor], end: int) -> list[list[int]]:
        """Bytes of each class for each peer."""
        return [
            [count * records.stride(like) for count in records.rows[end]]
            for records in self._classes
        ]

    def _measure(
        self, end: int, records: Records, entries: Tensor, part: Tensor, like: Sequence[Tensor]
    ) -> None:
        if self._spreads is not None:
            self._spreads[end].index_copy_(0, entries, records.spread(part, like))


def _of(noises: Sequence[Noise], entries: Tensor) -> list[Noise]:
    """The noise of some rows."""
    return [Noise(noise.key, noise.id[entries]) for noise in noises]


def _table(numbers: Tensor, counts: Sequence[int], num_classes: int) -> list[list[int]]:
    """Rows of each class for each peer."""
    peers = [peer.bincount(minlength=num_classes) for peer in numbers.split(list(counts))]
    table: list[list[int]] = torch.stack(peers, 1).tolist()
    return table
