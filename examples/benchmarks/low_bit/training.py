"""One training run on ranks that are threads: the library's own layers, codes and exchanges."""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

from lightning_sylvie import AdaptiveBits
from lightning_sylvie.attach import Attachment
from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.history import Fresh, History, Pipelined
from lightning_sylvie.lane import Inline
from lightning_sylvie.observer import Observer, Tallies
from lightning_sylvie.overlap import Aggregation
from lightning_sylvie.partition import resolve
from lightning_sylvie.quantizer import Code, Noise, Quantizer, choose
from lightning_sylvie.schedule import Every, Unbounded
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Pending, Transport
from lightning_sylvie.transport.threads import run_threads

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "GCN": GCN,
    "GraphSAGE": GraphSAGE,
    "GAT": lambda *sizes, **options: GAT(*sizes, heads=4, **options),
}


class Way(NamedTuple):
    """How halo rows travel, and how old they are."""

    bits: float | AdaptiveBits
    quantizer: str = "auto"
    mode: str = "sync"
    eps_s: int | None = None
    smoothing: float = 0.0


CODES: dict[str, Way] = {
    "32": Way(32),
    "rotated 1": Way(1, "rotated"),
    "minmax 1": Way(1, "minmax"),
    "rotated 2": Way(2, "rotated"),
    "centroid 1": Way(1, "centroid"),
    "rotated 0.5": Way(0.5, "rotated"),
    "minmax 2": Way(2, "minmax"),
    "16": Way(16),
    "degrees 2": Way(AdaptiveBits(2)),
    "ranges 2": Way(AdaptiveBits(2, refresh_every=10)),
    "minmax ranges 2": Way(AdaptiveBits(2, refresh_every=10), "minmax"),
    "ranges 1": Way(AdaptiveBits(1, refresh_every=10, choices=(0.5, 1, 2, 4))),
    "everything 1": Way(1, "minmax"),
}
AGES: dict[str, Way] = {
    "sync, 32 bits": Way(32),
    "sync, 1 bit": Way(1),
    "async, 32 bits": Way(32, mode="async"),
    "async, 1 bit": Way(1, mode="async"),
    "async, 1 bit, eps_s=10": Way(1, mode="async", eps_s=10),
    "async, 1 bit, eps_s=5": Way(1, mode="async", eps_s=5),
    "async, 1 bit, eps_s=2": Way(1, mode="async", eps_s=2),
    "async, 1 bit, smoothing=0.95": Way(1, mode="async", smoothing=0.95),
}
WAYS = CODES | AGES
FEATURES = 128
HIDDEN, DROPOUT, RATE, DECAY = 64, 0.5, 0.01, 5e-4
VALIDATE_EVERY, MEASURE_EVERY, LAST = 5, 33, 10


class Run(NamedTuple):
    """What one number of the grid stands for."""

    graph: str
    model: str
    num_layers: int
    code: str
    seed: int

    def __str__(self) -> str:
        return f"{self.graph}, {self.num_layers} {self.model}, {self.code}, seed {self.seed}"


class SeededDropout(torch.nn.Module):
    """Dropout from a generator of its own: threads would take turns at the global one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.rand(x.shape, generator=self.generator) >= DROPOUT
        return x * keep / (1 - DROPOUT)


def narrowed(data: Data) -> Data:
    """`data` with at most `FEATURES` features, the principal ones, of variance 1 together.

    Hundreds of bag-of-words columns would take most of the time and change no comparison.
    """
    torch.manual_seed(0)
    if data.x.shape[1] > FEATURES:
        left, size, _ = torch.svd_lowrank(data.x, q=FEATURES, niter=4)
        data.x = left * size
    data.x = data.x / data.x.std()
    return data


def build(run: Run, num_features: int, num_classes: int) -> torch.nn.Module:
    torch.manual_seed(run.seed)
    sizes = num_features, HIDDEN, run.num_layers, num_classes
    return MODELS[run.model](*sizes, dropout=0.0)


def train(run: Run, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """The columns of the table for one run; `data` has masks."""
    node = {name: data[name] for name in ("x", "y", "train_mask", "val_mask", "test_mask")}
    graph = Graph(int(data.num_nodes), data.edge_index, node)
    partition = resolve("metis" if options.metis else "random")
    assignment = partition.assign(graph.edge_index, graph.num_nodes, options.ranks)
    shards = cut(graph, assignment, options.ranks)
    model = build(run, data.x.shape[1], int(data.y.max()) + 1)
    start = time.process_time()
    ranks = run_threads(
        lambda transport: Rank(run, transport, shards[transport.rank], model).fit(options.epochs),
        options.ranks,
    )
    spent = (time.process_time() - start) / options.epochs
    total = {name: sum(found[name] for found in ranks) for name in ranks[0] if name != "curve"}
    return {
        "curve": ranks[0]["curve"],
        "val": ranks[0]["val"],
        "test": ranks[0]["test"],
        "loss": total["loss"],
        "seconds": spent,
        "bytes": total["bytes"],
        "row_error": total["row_error"] / max(total["row_energy"], 1e-30),
        "gradient_error": total["gradient_error"] / max(total["gradient_energy"], 1e-30),
        "sum_error": total["sum_error"] / max(total["sum_energy"], 1e-30),
    }


class AtOnce(Inline):
    """A lane whose exchanges end where they begin: these ranks have one thread each.

    What a pipelined exchange brings is used an epoch later all the same.
    """

    def submit(
        self, begin: Callable[[], Pending], finish: Callable[[Tensor], None], *_: Tensor
    ) -> AtOnce:
        finish(begin().wait())
        return self

    def wait(self) -> None:
        """There is nothing under way."""


def history_of(way: Way) -> History:
    if way.mode == "sync":
        return Fresh()
    schedule = Every(way.eps_s) if way.eps_s else Unbounded()
    return Pipelined(AtOnce(), schedule, (way.smoothing, way.smoothing))


class Everywhere(torch.autograd.Function):
    """Codes all rows, the rank's own too, and all their gradients (Table 4 of the paper)."""

    @staticmethod
    def forward(ctx: Any, code: Quantizer, noise: tuple[int, Tensor], x: Tensor) -> Tensor:
        ctx.code, ctx.noise = code, noise
        return Everywhere.coded(code, noise[0], noise[1], x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, Everywhere.coded(ctx.code, ~ctx.noise[0], ctx.noise[1], grad)

    @staticmethod
    def coded(code: Quantizer, key: int, ids: Tensor, x: Tensor) -> Tensor:
        rows = x.detach().flatten(1).contiguous()
        message = torch.empty(len(rows), code.row_bytes(rows), dtype=torch.uint8)
        out = torch.empty_like(rows)
        code.quantize(rows, None, Noise(key, ids), message, 0)
        code.dequantize(message, 0, Noise(key, ids), out)
        return out.view_as(x)


class Rank:
    """One rank of a run: its part, its copy of the model, and what it has measured."""

    def __init__(
        self, run: Run, transport: Transport, shard: Shard, model: torch.nn.Module
    ) -> None:
        self.transport, self.shard, self.model = transport, shard, copy.deepcopy(model)
        self.model.dropout = SeededDropout(1000 * run.seed + transport.rank)
        way = WAYS[run.code]
        self.code: Code = choose(way.bits, way.quantizer)
        everywhere = run.code.startswith("everything")
        code = choose(32) if everywhere else self.code
        self.halo = Halo(transport, code, seed=run.seed, history=history_of(way))
        Attachment(self.model, self.halo).keep(shard)
        if everywhere:
            self.code_everywhere()
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=RATE, weight_decay=DECAY, foreach=False
        )
        self.tallies = Tallies(sample=256)
        self.sums = {"sum_error": 0.0, "sum_energy": 0.0}

    def fit(self, epochs: int) -> dict[str, Any]:
        losses, best, num_bytes, curve = [], (-1.0, -1.0), 0, []
        for epoch in range(epochs):
            before = sum(self.transport.bytes_sent)
            measures = epoch % MEASURE_EVERY == MEASURE_EVERY - 1
            losses.append(self.step(epoch, measures))
            if epoch == 1:  # in the first one the features travel too
                num_bytes = sum(self.transport.bytes_sent) - before
            if epoch % VALIDATE_EVERY == VALIDATE_EVERY - 1:
                curve.append(self.validate())
                best = max(best, curve[-1], key=lambda pair: pair[0])
        return {
            "curve": [val for val, _ in curve],
            "val": best[0],
            "test": best[1],
            "loss": sum(losses[-LAST:]) / LAST,
            "bytes": num_bytes,
            **self.errors(),
            **self.sums,
        }

    def code_everywhere(self) -> None:
        """Rows are coded where they are made, and travel as what that has left of them."""
        append, count = self.halo.append, itertools.count()

        def coded(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
            if self.model.training:
                given = [(next(count), self.shard.node_id) for _ in tensors]
                pairs = zip(given, tensors, strict=True)
                tensors = tuple(
                    Everywhere.apply(self.code, noise, t) if t.requires_grad else t
                    for noise, t in pairs
                )
            return append(*tensors, **options)

        self.halo.append = coded  # type: ignore[method-assign]

    def step(self, epoch: int, measures: bool) -> float:
        """One epoch: this rank's share of the training loss."""
        self.model.train()
        self.optimizer.zero_grad()
        self.halo.observer = self.tallies if measures else Observer()
        self.halo.history.begin(epoch)
        with self.halo.using(self.shard, epoch=epoch), self.probing(measures):
            out = self.model(self.shard.node["x"], self.shard.edge_index)
            mask, y = self.shard.node["train_mask"], self.shard.node["y"]
            total = self.shard.mask_counts["train_mask"]
            loss = F.cross_entropy(out[mask], y[mask], reduction="sum") / total
            loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.transport_sum(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        return float(loss.detach())

    def transport_sum(self, values: Tensor) -> None:
        """Not counted: the sum of gradients is the same for every code."""
        sent, received = list(self.transport.bytes_sent), list(self.transport.bytes_received)
        self.transport.all_reduce(values)
        self.transport.bytes_sent[:], self.transport.bytes_received[:] = sent, received

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Validation and test accuracy over all ranks, with rows as they are."""
        self.model.eval()
        self.halo.observer = Observer()
        node = self.shard.node
        with self.halo.using(self.shard, exact=True):
            right = self.model(node["x"], self.shard.edge_index).argmax(-1) == node["y"]
        masks = [node[name] for name in ("val_mask", "test_mask")]
        counts = torch.tensor([float(right[mask].sum()) for mask in masks])
        self.transport_sum(counts)
        totals = [self.shard.mask_counts[name] for name in ("val_mask", "test_mask")]
        return float(counts[0] / totals[0]), float(counts[1] / totals[1])

    def errors(self) -> dict[str, float]:
        """Squared errors and norms of what was sent, out and back."""
        names = {"forward": "row", "backward": "gradient"}
        found = dict.fromkeys(
            [f"{n}_{w}" for n in names.values() for w in ("error", "energy")], 0.0
        )
        for (_, direction), tally in self.tallies.by_layer.items():
            found[f"{names[direction]}_error"] += tally.error
            found[f"{names[direction]}_energy"] += tally.energy
        return found

    @contextmanager
    def probing(self, measures: bool) -> Iterator[None]:
        """Compares what arrives, averaged over each node's in-edges, with the rows as they are."""
        if not measures:
            yield
            return
        append, aggregate = self.halo.append, self.halo.aggregate

        def probe(*tensors: Tensor, exact: bool = False, name: str = "") -> tuple[Tensor, ...]:
            found = append(*tensors, exact=exact, name=name)
            observer, self.halo.observer = self.halo.observer, Observer()
            for tensor, rows in zip(tensors, found, strict=True):
                if rows.is_floating_point() and rows.requires_grad and rows[0].numel() >= 16:
                    (right,) = append(tensor.detach() + 0, exact=True)
                    self.halo._slot -= 1  # the layers' own exchanges keep their numbers
                    self.sums["sum_error"] += self.energy(rows.detach() - right)
                    self.sums["sum_energy"] += self.energy(right)
            self.halo.observer = observer
            return found

        def at_once(aggregation: Aggregation, tensor: Tensor, *, name: str = "") -> Tensor:
            return aggregation.whole(self.halo.append(tensor, name=name)[0])

        self.halo.append, self.halo.aggregate = probe, at_once  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.halo.append, self.halo.aggregate = append, aggregate  # type: ignore[method-assign]

    def energy(self, rows: Tensor) -> float:
        """Squared norm of the mean of `rows` over each node's in-edges."""
        source, target = self.shard.edge_index
        total = rows.new_zeros(self.shard.plan.num_owned, rows[0].numel())
        total.index_add_(0, target, rows.flatten(1)[source])
        degree = target.bincount(minlength=len(total)).clamp(min=1)
        return float((total / degree[:, None]).square().sum())
