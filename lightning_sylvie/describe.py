"""What a cut will cost, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sylvie.quantizer import AdaptiveBits, choose
from lightning_sylvie.shard import Shard

BITS = (1, 2, 4, 8, 16, 32)


def row_bytes(width: int, bits: float | AdaptiveBits) -> int:
    """Bytes of one exchanged row of `width` values, coded as `bits` alone say, on average."""
    return choose(bits).row_bytes(torch.empty(0, width))


@dataclass(frozen=True)
class PartSize:
    """Counts of one part.

    `cut_edges` come from another part's node; `halo` rows are received and `boundary` entries sent
    in one exchange (a row sent to k parts counts k times), `sent` of them to each part;
    `data_bytes` are the part's tensors.
    """

    part: int
    nodes: int
    edges: int
    cut_edges: int
    halo: int
    boundary: int
    train_nodes: int
    data_bytes: int
    sent: tuple[int, ...]

    @classmethod
    def of(cls, shard: Shard, train_mask: str = "train_mask") -> PartSize:
        plan, mask = shard.plan, shard.node.get(train_mask)
        return cls(
            plan.rank,
            plan.num_owned,
            shard.edge_index.size(1),
            int((shard.edge_index[0] >= plan.num_owned).sum()),
            plan.num_halo,
            plan.num_sent,
            0 if mask is None else int(mask.sum()),
            sum(tensor.nbytes for tensor in _tensors(shard)),
            plan.send_counts,
        )


@dataclass(frozen=True)
class Description:
    """The sizes of all parts, and what follows from them for given layer widths.

    Args:
        parts: One per part, in part order.
        num_nodes: Nodes of the whole graph.
        widths: Values per row of each exchange of one forward pass.
        gradient_widths: Likewise of one backward pass.
    """

    parts: tuple[PartSize, ...]
    num_nodes: int
    widths: tuple[int, ...]
    gradient_widths: tuple[int, ...]

    @property
    def edge_cut(self) -> float:
        """Edges between parts / edges."""
        return self._total("cut_edges") / max(self._total("edges"), 1)

    @property
    def halo_ratio(self) -> float:
        """Halo rows of all parts / nodes."""
        return self._total("halo") / self.num_nodes

    def balance(self, what: str) -> float:
        """Largest part / mean part of a field of `PartSize`, or of "work" (nodes + edges)."""
        values = [
            part.nodes + part.edges if what == "work" else int(getattr(part, what))
            for part in self.parts
        ]
        return max(values) * len(values) / sum(values) if any(values) else 1.0

    def bytes_per_epoch(self, part: int, bits: float | AdaptiveBits) -> int:
        """Bytes that a part sends in one training epoch with all exchanges done.

        Forward it sends its boundary entries, backward the gradients of its halo rows:
        sum over widths of boundary * row_bytes + sum over gradient_widths of halo * row_bytes.
        With `AdaptiveBits` every row counts as one of average bits, which is nearly right.
        """
        size = self.parts[part]
        forward = sum(row_bytes(width, bits) for width in self.widths)
        backward = sum(row_bytes(width, bits) for width in self.gradient_widths)
        return size.boundary * forward + size.halo * backward

    def memory(self, part: int) -> int:
        """Bytes that a part will take at the least, parameters and optimizer state left out.

        data_bytes + 4 bytes * 2 * (nodes + halo) * sum(widths): the part's tensors, and in float32
        the rows that each layer reads and their gradients. A layer that makes a message per edge
        adds 4 bytes * edges * width.
        """
        size = self.parts[part]
        return size.data_bytes + 8 * (size.nodes + size.halo) * sum(self.widths)

    def __str__(self) -> str:
        head = ("part", "nodes", "edges", "halo", "boundary", "train", "memory")
        rows = [
            (size.part, size.nodes, size.edges, size.halo, size.boundary, size.train_nodes)
            for size in self.parts
        ]
        lines = [_line(*head)]
        lines += [_line(*row, human(self.memory(row[0]))) for row in rows]
        fields = ("nodes", "edges", "halo", "boundary", "train_nodes")
        lines.append(_line("max/mean", *(f"{self.balance(field):.2f}" for field in fields), ""))
        lines.append(f"edge cut {self.edge_cut:.1%}, halo ratio {self.halo_ratio:.2f}")
        if self.widths:
            lines += ["", _line("bits", *BITS), _line("sent", *map(self._sent, BITS))]
            lines.append(f"bytes per epoch, all parts together, widths {list(self.widths)}")
            if self.gradient_widths != self.widths:
                lines[-1] += f", backward {list(self.gradient_widths)}"
        return "\n".join(lines)

    def _total(self, what: str) -> int:
        return sum(int(getattr(part, what)) for part in self.parts)

    def _sent(self, bits: float) -> str:
        return human(sum(self.bytes_per_epoch(part, bits) for part in range(len(self.parts))))


def describe(
    shards: Iterable[Shard],
    *,
    widths: Sequence[int] = (),
    gradient_widths: Sequence[int] | None = None,
    train_mask: str = "train_mask",
) -> Description:
    """Sizes, balance, traffic and memory of a cut; ``print()`` it for a table.

    Args:
        shards: All shards, in rank order, one at a time if they are a generator:
            ``cut_each(graph, assignment, num_parts)`` or ``store.read(key, rank)`` of every rank.
        widths: Values per row of each exchange of one forward pass, usually the input width of
            every layer.
        gradient_widths: Likewise backward. None: as forward. When the first layer exchanges the
            input features themselves, they have no gradient: leave the first width out.
        train_mask: Name of the boolean node tensor of the training nodes.
    """
    parts, num_nodes = [], 0
    for shard in shards:
        parts.append(PartSize.of(shard, train_mask))
        num_nodes = shard.num_nodes
    if not parts:
        raise ValueError("expected the shards of a cut, got none")
    backward = widths if gradient_widths is None else gradient_widths
    return Description(tuple(parts), num_nodes, tuple(widths), tuple(backward))


def _tensors(shard: Shard) -> Iterator[Tensor]:
    yield from (shard.edge_index, shard.node_id, shard.halo_id, shard.edge_id)
    yield from (shard.plan.send_index, *shard.node.values(), *shard.edge.values())
    if shard.reverse is not None:
        reverse = shard.reverse
        yield from (reverse.edge_index, reverse.halo_id, reverse.edge_id, reverse.plan.send_index)
        yield from reverse.edge.values()


def _line(*cells: object) -> str:
    return " ".join(f"{cell!s:>9}" for cell in cells).rstrip()


def human(size: int) -> str:
    """`size` bytes with three digits and a unit of 1000s."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
