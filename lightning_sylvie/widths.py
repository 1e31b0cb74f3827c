"""How wide the rows are that a model exchanges, found by two training steps on a small graph."""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sylvie.attach import Attachment, Exchange, wants_out_edges
from lightning_sylvie.batch import ShardData
from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.lazy import initialize, is_lazy
from lightning_sylvie.quantizer import Full, Noise, Quantizer
from lightning_sylvie.rowless import taking_no_rows
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads

_SAMPLE = 1000  # nodes


def exchange_widths(
    module: LightningModule,
    shard: Shard,
    *,
    exchange: Exchange = "message",
    keep_features: bool = True,
) -> tuple[list[int], list[int]]:
    """Values per row of each tensor that the halo exchanges of a training step move.

    Copies of `module` take two steps on some nodes of `shard`, in two parts that are threads of
    this process; the second step counts, as what is exchanged only once is not an epoch's cost.

    Args:
        module: As for the Trainer; it is not changed.
        shard: A part of the graph; a few of its nodes are used.
        exchange: As in `SylvieStrategy`.
        keep_features: Likewise.

    Returns:
        Widths of the forward pass, in order, and of the backward pass.

    Raises:
        RefusedLayerError: If a layer can't be right on a cut graph.
    """
    graph = _sample(shard)
    halves = torch.arange(graph.num_nodes) % 2
    parts = cut(graph, halves, 2, reverse=wants_out_edges(module.modules()))

    def run(transport: Transport) -> tuple[list[int], list[int]]:
        subject, part = copy.deepcopy(module).cpu(), parts[transport.rank]
        subject.log = subject.log_dict = _ignore  # type: ignore[method-assign]
        forward, backward = _Recorder(), _Recorder()
        halo = Halo(transport, forward, backward, keep_features=keep_features)
        Attachment(subject, halo, exchange=exchange).keep(part)
        with halo.using(part), taking_no_rows(subject):
            if is_lazy(subject):
                initialize(subject, ShardData.of(part))
            for _ in range(2):
                forward.widths, backward.widths = [], []
                step: Any = subject.training_step(ShardData.of(part), 0)
                (step["loss"] if isinstance(step, dict) else step).backward()
        return forward.widths, backward.widths

    return run_threads(run, 2)[0]


@final
class _Recorder(Quantizer):
    """Rows as they are, and their widths noted."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self._full = Full()

    def row_bytes(self, rows: Tensor) -> int:
        return self._full.row_bytes(rows)

    def quantize(self, rows: Tensor, *rest: Any) -> None:
        self.widths.append(rows.shape[1])
        self._full.quantize(rows, *rest)

    def dequantize(self, message: Tensor, offset: int, noise: Noise, rows: Tensor) -> None:
        self._full.dequantize(message, offset, noise, rows)


def _sample(shard: Shard) -> Graph:
    """The part's first nodes and the edges among them."""
    inside = shard.edge_index[0] < shard.plan.num_owned
    graph = Graph(
        shard.plan.num_owned,
        shard.edge_index[:, inside],
        shard.node,
        {name: value[inside] for name, value in shard.edge.items()},
        shard.rest,
    )
    return graph.subgraph(torch.arange(graph.num_nodes) < _SAMPLE)


def _ignore(*args: Any, **options: Any) -> None:
    """Stands in for `log`: there is no trainer."""
