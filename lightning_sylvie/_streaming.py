"""Streaming parts: linear deterministic greedy, repeated, a few hundred nodes at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def stream(
    edge_index: Ints, weights: Ints, num_parts: int, *, seed: int, passes: int, imbalance: float
) -> Ints:
    """The part of each node: where most of its neighbours are, unless that part is full.

    Each node in turn goes to the part with the highest (neighbours there) * (room there), as in
    Stanton and Kliot, "Streaming graph partitioning for large distributed graphs" (KDD 2012).
    Later passes move nodes with all their neighbours in place (Nishimura and Ugander, "Restreaming
    graph partitioning", KDD 2013). Nodes are taken in chunks, so everything is an array operation.

    Args:
        edge_index: ``(2, E)``; both directions of an edge count.
        weights: ``(num_nodes, num_weights)``, each balanced over the parts.
        num_parts: Number of parts.
        seed: Of the order of the nodes.
        passes: Times each node is placed.
        imbalance: Allowed excess of the heaviest part over the mean, exceeded only by a node that
            fits nowhere.
    """
    num_nodes = len(weights)
    starts, neighbours = _adjacency(edge_index, num_nodes)
    shares = weights * (num_parts / np.maximum(weights.sum(axis=0), 1))  # a part's mean is 1
    parts = np.full(num_nodes, -1)
    loads = np.zeros((num_parts, weights.shape[1]))
    order = np.random.default_rng(seed).permutation(num_nodes)
    for _ in range(passes):
        for chunk in np.array_split(order, min(num_nodes, 256 + num_nodes // 4096)):
            placed = parts[chunk] >= 0
            np.subtract.at(loads, parts[chunk][placed], shares[chunk][placed])
            near = _count_near(starts, neighbours, parts, chunk, num_parts)
            parts[chunk] = _place(near, shares[chunk], loads, 1 + imbalance)
    return parts


def _adjacency(edge_index: Ints, num_nodes: int) -> tuple[Ints, NDArray[np.int32 | np.int64]]:
    """Row starts and neighbours over both directions; duplicates count as often as they occur."""
    narrow = np.int32 if num_nodes < 2**31 else np.int64
    source, target = edge_index.astype(narrow)
    ends = np.concatenate([target, source])
    starts = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(ends, minlength=num_nodes), out=starts[1:])
    order = np.argsort(ends, kind="stable")
    del ends
    return starts, np.concatenate([source, target])[order]


def _count_near(
    starts: Ints, neighbours: NDArray[np.int32 | np.int64], parts: Ints, chunk: Ints, num_parts: int
) -> Floats:
    """Placed neighbours of each chunk node in each part, ``(len(chunk), num_parts)``."""
    degrees = starts[chunk + 1] - starts[chunk]
    row = np.repeat(np.arange(len(chunk)), degrees)
    first = np.cumsum(degrees) - degrees
    there = parts[neighbours[np.arange(len(row)) + (starts[chunk] - first)[row]]]
    cell = (row * num_parts + there)[there >= 0]
    counts = np.bincount(cell, minlength=len(chunk) * num_parts)
    return counts.reshape(len(chunk), num_parts).astype(np.float64)


def _place(near: Floats, shares: Floats, loads: Floats, limit: float) -> Ints:
    """The part of each node of a chunk; adds the nodes' shares to `loads`.

    A part takes its best-scoring nodes until it is full; the others try their next best part.
    """
    room = np.maximum(limit - loads.max(axis=1), 1e-6)
    score = (near + 1e-3) * room
    answer = np.zeros(len(near), np.int64)
    pending = np.arange(len(near))
    for _ in range(len(loads)):
        choice = score[pending].argmax(axis=1)
        order = np.lexsort((-score[pending, choice], choice))
        pending, choice = pending[order], choice[order]
        total = np.cumsum(shares[pending], axis=0)
        first = np.searchsorted(choice, choice)
        total -= total[first] - shares[pending[first]]
        fits = (loads[choice] + total <= limit).all(axis=1)
        answer[pending[fits]] = choice[fits]
        np.add.at(loads, choice[fits], shares[pending[fits]])
        score[pending[~fits], choice[~fits]] = -np.inf
        pending = pending[~fits]
        if not len(pending):
            break
    for node in pending:  # few: nodes that fit nowhere, such as hubs
        answer[node] = (loads + shares[node]).max(axis=1).argmin()
        loads[answer[node]] += shares[node]
    return answer
