"""Proves a model on a cut graph: N parts against one process, at full precision."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch_geometric.data import Data

from lightning_sylvie.attach import Attachment, Exchange, wants_out_edges
from lightning_sylvie.batch import ShardData, graph_of
from lightning_sylvie.exchange import Halo
from lightning_sylvie.loss import LossReduction, loss_share, silence
from lightning_sylvie.module import SylvieModule
from lightning_sylvie.partition import Partitioner
from lightning_sylvie.rowless import taking_no_rows
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads


@dataclass(frozen=True)
class Verification:
    """How far N parts are from one process: largest relative difference of each quantity.

    Attributes:
        num_parts: Parts that were compared with one process.
        differences: ``"output"``, ``"loss"`` or a parameter's or buffer's name -> difference,
            relative to the largest value in it.
        tolerance: What still counts as rounding.
        remarks: What the comparison could not cover.
    """

    num_parts: int
    differences: dict[str, float]
    tolerance: float
    remarks: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return all(value <= self.tolerance for value in self.differences.values())

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        verdict = "exact to rounding" if self.exact else "NOT EXACT"
        width = max(map(len, self.differences), default=0)
        lines = [f"{self.num_parts} parts against one process: {verdict}"]
        for name, value in self.differences.items():
            mark = "ok" if value <= self.tolerance else "differs"
            lines.append(f"  {name:<{width}}  {value:8.1e}  {mark}")
        return "\n".join(lines + [f"  note: {remark}" for remark in self.remarks])


def verify(
    model: torch.nn.Module,
    data: Data,
    *,
    num_parts: int = 2,
    partition: Partitioner,
    exchange: Exchange = "message",
    loss_reduction: LossReduction = "mean",
    tolerance: float = 1e-9,
) -> Verification:
    """Runs one training step of a copy of `model` whole and in parts, in float64 on the CPU.

    Dropout is switched off in the copies. The parts run as threads of this process.

    Args:
        model: A PyG model, or a LightningModule, of which one `training_step` is run.
        data: The graph; keep it small.
        num_parts: Parts to cut it into.
        partition: Assigns nodes to parts.
        exchange: As in `SylvieStrategy`.
        loss_reduction: Likewise.
        tolerance: Largest relative difference that counts as rounding.

    Raises:
        RefusedLayerError: If a layer can't be right on a cut graph.
    """
    subject = _prepared(model)
    data = copy.copy(data).cpu().apply(lambda t: t.double() if t.is_floating_point() else t)
    if isinstance(subject, SylvieModule):
        with torch.no_grad():
            data["cotangent"] = torch.rand_like(copy.deepcopy(subject)(data)) - 0.5
    expected, again = (_step(copy.deepcopy(subject), data, 1.0) for _ in range(2))
    remarks = []
    if any(value > tolerance for value in _differences(again, expected).values()):
        remarks.append("two runs in one process differ: the model draws random numbers")
    graph = graph_of(data)
    assignment = partition.assign(
        graph.edge_index, graph.num_nodes, num_parts, graph.node.get("train_mask")
    )
    shards = cut(graph, assignment, num_parts, reverse=wants_out_edges(subject.modules()))

    def run(transport: Transport) -> dict[str, Tensor]:
        module, shard = copy.deepcopy(subject), shards[transport.rank]
        batch, halo = ShardData.of(shard), Halo(transport)
        Attachment(module, halo, exchange=exchange).keep(shard)
        with halo.using(shard, checking=True), taking_no_rows(module):
            return _step(module, batch, loss_share(loss_reduction, batch, shard, transport))

    found = _joined(run_threads(run, num_parts), shards)
    return Verification(num_parts, _differences(found, expected), tolerance, remarks)


def _prepared(model: torch.nn.Module) -> LightningModule:
    """A float64 copy in training mode, without dropout and without a trainer."""
    subject = copy.deepcopy(model)
    if not isinstance(subject, LightningModule):
        subject = SylvieModule(subject)
    layer: Any
    for layer in subject.modules():
        if isinstance(layer, torch.nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        rate = layer.__dict__.get("dropout")
        if isinstance(rate, float):
            layer.dropout = 0.0
        elif isinstance(rate, list):
            layer.dropout = [0.0] * len(rate)
    subject.log = _ignore  # type: ignore[method-assign]
    subject.log_dict = _ignore  # type: ignore[method-assign]
    return subject.double().cpu().train()


def _ignore(*args: Any, **options: Any) -> None:
    """Stands in for `log`: there is no trainer."""


def _step(module: LightningModule, data: Any, share: float) -> dict[str, Tensor]:
    """Outputs or loss, gradients, and buffers of one step."""
    found: dict[str, Tensor] = {}
    if isinstance(module, SylvieModule):
        output = module(data)
        found["output"], loss = output, (output * data.cotangent).sum()
    else:
        step: Any = module.training_step(data, 0)
        loss = (step["loss"] if isinstance(step, dict) else step) * share
        found["loss"] = loss if share else torch.zeros(())
        if not share:
            silence(loss)
    loss.backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    found.update(module.named_buffers())
    return {name: value.detach() for name, value in found.items()}


def _joined(parts: list[dict[str, Tensor]], shards: list[Shard]) -> dict[str, Tensor]:
    """Outputs in the graph's order, losses and gradients summed, buffers of the first part."""
    joined: dict[str, Tensor] = {}
    order = torch.cat([shard.node_id for shard in shards]).argsort()
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if name == "output":
            joined[name] = torch.cat(values)[order]
        elif name == "loss" or name.startswith("gradient of "):
            joined[name] = torch.stack(values).sum(0)
        else:
            joined[name] = values[0]
    return joined


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each quantity, relative to the largest expected value in it.

    A gradient that is zero but for rounding (a bias in front of a norm) is measured against a
    thousandth of the largest gradient.
    """
    gradients = [v for name, v in expected.items() if name.startswith("gradient of ")]
    floor = 1e-3 * max((float(value.abs().max()) for value in gradients), default=0.0)
    return {
        name: _difference(found.get(name), value, floor if "gradient" in name else 0.0)
        for name, value in expected.items()
    }


def _difference(found: Tensor | None, expected: Tensor, floor: float) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), floor) or 1.0
    return float((found - expected).abs().max()) / scale
