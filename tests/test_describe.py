"""The numbers of a description against counting by hand and against loops."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_sylvie.describe import BITS, describe, row_bytes
from lightning_sylvie.graph import Graph
from lightning_sylvie.shard import cut, cut_each


def path_graph() -> Graph:
    """0 - 1 - 2 - 3 - 4 in both directions; training nodes 0, 1, 4."""
    there = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    return Graph(
        5,
        torch.cat([there, there.flip(0)], dim=1),
        node={
            "x": torch.zeros(5, 3),
            "train_mask": torch.tensor([True, True, False, False, True]),
        },
    )


def test_path_counted_by_hand() -> None:
    description = describe(
        cut_each(path_graph(), torch.tensor([0, 0, 0, 1, 1]), 2), widths=[3, 100]
    )
    one, two = description.parts
    assert (one.nodes, one.edges, one.cut_edges, one.halo, one.boundary) == (3, 5, 1, 1, 1)
    assert (two.nodes, two.edges, two.cut_edges, two.halo, two.boundary) == (2, 3, 1, 1, 1)
    assert (one.train_nodes, two.train_nodes) == (2, 1)
    assert description.edge_cut == 2 / 8
    assert description.halo_ratio == 2 / 5
    assert description.balance("nodes") == 3 / 2.5
    assert description.balance("work") == 8 / 6.5
    # One row of 3 values in 16 bits and one of 100 signs, two scales and a mean, there and back.
    assert description.bytes_per_epoch(0, 1) == 2 * (6 + 13 + 6)
    assert description.bytes_per_epoch(0, 32) == 2 * (12 + 400)
    # Indices: 5 edges, 3 owned, 1 halo, 5 edge numbers, 1 sent; x; mask.
    assert one.data_bytes == 8 * (10 + 3 + 1 + 5 + 1) + 3 * 3 * 4 + 3
    assert description.memory(0) == one.data_bytes + 4 * 2 * 4 * 103


@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 63, 64, 100, 256])
@pytest.mark.parametrize("bits", BITS)
def test_row_bytes(width: int, bits: int) -> None:
    if width < 16 and bits < 16:
        assert row_bytes(width, bits) == 2 * width
    elif bits > 2:
        side = 0 if bits > 8 else 2 if width < 32 else 4
        assert row_bytes(width, bits) == math.ceil(width * bits / 8) + side
    else:  # a scale for each power of two that fits, and a mean
        scales = -(-width // 2 ** int(math.log2(width)))
        side = 2 * scales + (2 if width >= 32 else 0)
        assert row_bytes(width, bits) == math.ceil(width * bits / 8) + side


def test_input_features_have_no_gradient() -> None:
    shards = cut(path_graph(), torch.tensor([0, 1, 0, 1, 0]), 2)
    full = describe(shards, widths=[64, 32])
    less = describe(shards, widths=[64, 32], gradient_widths=[32])
    for part in range(2):
        saved = full.bytes_per_epoch(part, 32) - less.bytes_per_epoch(part, 32)
        assert saved == shards[part].plan.num_halo * 64 * 4


def test_bytes_sent_are_bytes_received() -> None:
    """All parts together send forward what they receive, so boundary and halo totals agree."""
    generator = torch.Generator().manual_seed(0)
    graph = Graph(50, torch.randint(0, 50, (2, 200), generator=generator))
    parts = describe(cut(graph, torch.arange(50) % 4, 4)).parts
    assert sum(part.halo for part in parts) == sum(part.boundary for part in parts)
    assert sum(part.edges for part in parts) == 200


def test_reverse_edges_take_memory() -> None:
    graph, assignment = path_graph(), torch.tensor([0, 0, 0, 1, 1])
    plain = describe(cut(graph, assignment, 2))
    both = describe(cut(graph, assignment, 2, reverse=True))
    assert both.memory(0) - plain.memory(0) == 8 * (10 + 1 + 5 + 1)


def test_table_reads_well() -> None:
    assignment = torch.tensor([0, 0, 0, 2, 2])
    assert str(describe(cut(path_graph(), assignment, 3), widths=[256])) == "\n".join(
        [
            "     part     nodes     edges      halo  boundary     train    memory",
            "        0         3         5         1         1         2   8.39 kB",
            "        1         0         0         0         0         0       0 B",
            "        2         2         3         1         1         1   6.27 kB",
            " max/mean      1.80      1.88      1.50      1.50      2.00",
            "edge cut 25.0%, halo ratio 0.40",
            "",
            "     bits         1         2         4         8        16        32",
            "     sent     144 B     272 B     528 B   1.04 kB   2.05 kB    4.1 kB",
            "bytes per epoch, all parts together, widths [256]",
        ]
    )


def test_one_part_and_no_edges() -> None:
    graph = Graph(3, torch.empty(2, 0, dtype=torch.int64))
    description = describe(cut(graph, torch.zeros(3, dtype=torch.int64), 1), widths=[8])
    assert description.edge_cut == 0
    assert description.balance("edges") == 1
    assert description.bytes_per_epoch(0, 1) == 0
    assert "edge cut 0.0%" in str(description)


def test_no_shards() -> None:
    with pytest.raises(ValueError, match="got none"):
        describe([])
