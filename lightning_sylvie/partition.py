"""Which part each node belongs to."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_sylvie._metis import solve_apart
from lightning_sylvie._streaming import stream

_MOST_PARTS = 2**31 - 1


class Partitioner(ABC):
    """Assigns each node of a graph to a part; part p is trained by rank p."""

    @property
    @abstractmethod
    def settings(self) -> str:
        """Text that differs whenever the same graph could be assigned differently."""

    @abstractmethod
    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        """The part of each node, int64 ``(num_nodes,)`` with values in 0..num_parts-1.

        Args:
            graph_edge_index: int64 ``(2, E)``.
            num_nodes: N.
            num_parts: Number of parts.
            train_mask: bool ``(num_nodes,)``, nodes to spread evenly over the parts.

        Raises:
            ValueError: More parts than nodes, or an assignment that does not fit.
        """


class Metis(Partitioner):
    """METIS's k-way parts: few halo rows, balanced by work and by training nodes, none empty.

    The work of a node is 1 + its in-degree, its share of nodes and edges. METIS sees the graph
    undirected, without self loops and duplicate edges. It runs in a process of its own, so that
    a crash in it is an error here.

    Args:
        seed: Different seeds give different parts of like quality.
        objective: "volume" minimises the halo rows (the bytes of an epoch), "cut" the edges
            between parts, in about an eighth of the time and with up to a tenth more halo rows.
        imbalance: Allowed excess of the heaviest part over the mean, 0.03 is 3 %. METIS may miss
            it on small or very skewed graphs.
    """

    def __init__(
        self, *, seed: int = 0, objective: str = "volume", imbalance: float = 0.03
    ) -> None:
        if objective not in ("volume", "cut"):
            raise ValueError(f"expected objective 'volume' or 'cut', got {objective!r}")
        if not 0.001 <= imbalance <= 10:
            raise ValueError(f"expected an imbalance of 0.001..10, got {imbalance}")
        self.seed, self.objective, self.imbalance = seed, objective, imbalance

    @property
    def settings(self) -> str:
        return f"metis seed={self.seed} objective={self.objective} imbalance={self.imbalance}"

    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        _check_request(num_nodes, num_parts, train_mask)
        if num_parts == 1:
            return torch.zeros(num_nodes, dtype=torch.int64)
        weights = _weights(graph_edge_index, num_nodes, train_mask)
        parts = torch.from_numpy(
            solve_apart(
                graph_edge_index.numpy(),
                weights.numpy(),
                num_parts=num_parts,
                seed=self.seed,
                objective=self.objective,
                imbalance=self.imbalance,
            )
        )
        parts = check_assignment(parts, num_nodes, num_parts)
        return _fill_empty(parts, weights[:, 0], num_parts)


class Random(Partitioner):
    """Random parts whose sizes, and whose numbers of training nodes, differ by at most one.

    The same seed gives the same parts whatever torch's global generator has done.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    @property
    def settings(self) -> str:
        return f"random seed={self.seed}"

    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        _check_request(num_nodes, num_parts, train_mask)
        order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(self.seed))
        if train_mask is not None:
            order = order[(~train_mask[order]).long().argsort(stable=True)]
        parts = torch.empty(num_nodes, dtype=torch.int64)
        parts[order] = torch.arange(num_nodes) % num_parts
        return parts


class Streaming(Partitioner):
    """Parts by restreaming, for graphs that METIS can't hold: no copy of the graph is coarsened.

    Balanced by work and by training nodes like `Metis`, with fewer halo rows than `Random` and
    more than `Metis`. Takes about 40 bytes per edge, a third of METIS's memory.

    Args:
        seed: Of the order in which nodes are placed.
        passes: Times each node is placed.
        imbalance: Allowed excess of the heaviest part over the mean.
    """

    def __init__(self, *, seed: int = 0, passes: int = 5, imbalance: float = 0.05) -> None:
        if passes < 1 or imbalance <= 0:
            raise ValueError(
                f"expected passes >= 1 and imbalance > 0, got {passes} and {imbalance}"
            )
        self.seed, self.passes, self.imbalance = seed, passes, imbalance

    @property
    def settings(self) -> str:
        return f"streaming seed={self.seed} passes={self.passes} imbalance={self.imbalance}"

    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        _check_request(num_nodes, num_parts, train_mask)
        weights = _weights(graph_edge_index, num_nodes, train_mask)
        parts = stream(
            graph_edge_index.numpy(),
            weights.numpy(),
            num_parts,
            seed=self.seed,
            passes=self.passes,
            imbalance=self.imbalance,
        )
        return _fill_empty(torch.from_numpy(parts), weights[:, 0], num_parts)


class Assignment(Partitioner):
    """Parts that the user gives, a part per node. A part may be empty or have no training nodes.

    Args:
        parts: Whole numbers ``(num_nodes,)``.
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = check_assignment(parts.cpu().contiguous(), parts.numel(), _MOST_PARTS)

    @property
    def settings(self) -> str:
        digest = hashlib.blake2b(self.parts.numpy().tobytes(), digest_size=16)
        return f"assignment {digest.hexdigest()}"

    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        return check_assignment(self.parts, num_nodes, num_parts)


def resolve(partition: str | Tensor | Partitioner) -> Partitioner:
    """The partitioner that a user's `partition` option means.

    Args:
        partition: "metis", "random", "streaming", a part per node, or a partitioner.
    """
    if isinstance(partition, Partitioner):
        return partition
    if isinstance(partition, Tensor):
        return Assignment(partition)
    named: dict[str, type[Metis | Random | Streaming]] = {
        "metis": Metis,
        "random": Random,
        "streaming": Streaming,
    }
    if partition not in named:
        raise ValueError(
            f"expected partition to be one of {sorted(named)}, a tensor with a part per node, or "
            f"a Partitioner, got {partition!r}"
        )
    return named[partition]()


def check_assignment(parts: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    """Returns `parts` as int64 if it names one of `num_parts` parts for every node.

    Raises:
        ValueError: Saying what was expected, what was given, and what to change.
    """
    if parts.is_floating_point() or parts.is_complex() or parts.dtype == torch.bool:
        raise ValueError(f"expected whole part numbers, got {parts.dtype}: convert with .long()")
    if parts.shape != (num_nodes,):
        raise ValueError(
            f"expected one part per node, shape ({num_nodes},), got {tuple(parts.shape)}: give "
            "the assignment of the graph that is trained on"
        )
    low, high = (int(value) for value in parts.aminmax()) if parts.numel() else (0, 0)
    if low < 0 or high >= num_parts:
        raise ValueError(
            f"expected part numbers 0..{num_parts - 1}, got {low}..{high}: assign each node to one "
            f"of the {num_parts} ranks, or train on {high + 1} ranks"
        )
    return parts.long()


def _check_request(num_nodes: int, num_parts: int, train_mask: Tensor | None) -> None:
    if not 1 <= num_parts <= num_nodes:
        raise ValueError(
            f"expected 1..{num_nodes} parts for {num_nodes} nodes, got {num_parts}: train on fewer "
            "ranks, or give an assignment that leaves ranks without nodes"
        )
    if train_mask is not None and (
        train_mask.dtype != torch.bool or train_mask.shape != (num_nodes,)
    ):
        raise ValueError(
            f"expected train_mask bool of shape ({num_nodes},), got {train_mask.dtype} of shape "
            f"{tuple(train_mask.shape)}"
        )


def _weights(edge_index: Tensor, num_nodes: int, train_mask: Tensor | None) -> Tensor:
    """What is balanced, int64 ``(num_nodes, 1 or 2)``: work = 1 + in-degree, and training nodes."""
    weights = [1 + edge_index[1].bincount(minlength=num_nodes)]
    if train_mask is not None and bool(train_mask.any()):
        weights.append(train_mask.long())
    return torch.stack(weights, dim=1)


def _fill_empty(parts: Tensor, work: Tensor, num_parts: int) -> Tensor:
    """Gives every empty part the lightest node of the part with most nodes."""
    for empty in (parts.bincount(minlength=num_parts) == 0).nonzero().flatten().tolist():
        fullest = (parts == parts.bincount().argmax()).nonzero().squeeze(1)
        parts[fullest[work[fullest].argmin()]] = empty
    return parts
