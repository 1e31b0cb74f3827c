"""Transparency: N ranks with attached layers compute what one process computes without them.

Every layer of the catalogue is trained for some Adam steps in float64, plain in this process and
attached in real gloo ranks. Outputs, loss, gradients of all parameters and of the input, buffers,
weights afterwards and outputs in evaluation mode agree to 1e-10 relative. One start of the ranks
runs the whole catalogue in all configurations of so many ranks.

The suite runs a selection in two minutes; `write_layer_table.py` runs every layer in every
partition, with ten steps each, in about a quarter of an hour.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from catalogue import NOT_RUN, Entry, entries, make_graph
from ranks import run_ranks
from torch import Tensor
from torch_geometric.nn import MessagePassing, conv, norm

from lightning_sylvie.attach import REFUSED, Attachment, Exchange, RefusedLayerError
from lightning_sylvie.attach.refusals import REFUSED_AT_INPUT
from lightning_sylvie.exchange import Halo
from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Metis, Random
from lightning_sylvie.shard import Shard, cut_each
from lightning_sylvie.transport import Transport, connect

TABLE = Path(__file__).parents[1] / "docs" / "layers.md"
INTRODUCTION = """\
# Layers

Made by `python tests/write_layer_table.py`, which proves it; `tests/test_transparency.py` repeats a
selection of the runs and fails if this file says something else. "exact": outputs, loss, every
gradient, buffers, the weights after 10 Adam steps and outputs in evaluation mode equal those of one
process to 1e-10 relative, in float64, on 1, 2 and 4 ranks, on a directed and an undirected graph
with self loops, isolated nodes and duplicate edges, for METIS parts, random parts, parts without a
common boundary and a rank without training nodes; models also for a rank without nodes. `message`
and `input` are the values of `exchange`. D, H: input and output channels.
"""
TOLERANCE = 1e-10
INPUTS = ("x", "x_0", "hops")
Record = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Config:
    """One start of the ranks.

    Args:
        num_ranks: Ranks.
        partition: "metis", "random", "bands" (no edge between parts 0 and 2), "untrained" (no
            training node on rank 1) or "empty" (no node at all on rank 1).
        directed: Which of the two graphs.
        exchange: Where the halo rows come in.
        steps: Adam steps.
        models_only: Leaves convolutions and norms out. Some of PyG's can't run on no rows at all.
    """

    num_ranks: int
    partition: str
    directed: bool
    exchange: Exchange
    steps: int
    models_only: bool = False

    def runs(self, entry: Entry) -> bool:
        """Whether the entry is in this configuration."""
        return entry.kind == "model" or not self.models_only

    def assignment(self, graph: Graph) -> Tensor:
        """The part of each node, int64 ``(num_nodes,)``."""
        edges, num_nodes = graph.edge_index, graph.num_nodes
        if self.partition == "metis":
            return Metis().assign(edges, num_nodes, self.num_ranks)
        if self.partition == "bands":
            return torch.arange(num_nodes) * self.num_ranks // num_nodes
        parts = Random(seed=3).assign(edges, num_nodes, self.num_ranks)
        if self.partition == "untrained":
            parts[graph.node["train_mask"] & (parts == 1)] = 0
        if self.partition == "empty":
            parts[parts == 1] = 0
        return parts


MESSAGE = [
    Config(1, "random", True, "message", 10),
    Config(2, "metis", True, "message", 3),
    Config(2, "random", False, "message", 2),
    Config(4, "random", True, "message", 2),
    Config(4, "bands", True, "message", 2, models_only=True),
    Config(4, "untrained", False, "message", 2),
    Config(4, "empty", True, "message", 2, models_only=True),
]
INPUT = [Config(2, "metis", True, "input", 2), Config(4, "untrained", False, "input", 2)]
SELECTION = {"message": MESSAGE, "input": INPUT}

COMPLETE: dict[str, list[Config]] = {
    exchange: [
        Config(1, "random", True, exchange, 10),
        Config(2, "metis", True, exchange, 10),
        Config(2, "random", False, exchange, 10),
        Config(2, "untrained", True, exchange, 10),
        Config(4, "metis", False, exchange, 10),
        Config(4, "random", True, exchange, 10),
        Config(4, "bands", True, exchange, 10),
        Config(4, "untrained", False, exchange, 10),
        Config(4, "empty", True, exchange, 10, models_only=True),
    ]
    for exchange in get_args(Exchange)
}
Runs = dict[str, list[Config]]


def part_of(config: Config, graph: Graph, rank: int) -> Shard:
    """The shard of `rank`, with the out-edges for the layers that read them."""
    return part(graph, config.assignment(graph), config.num_ranks, rank)


def part(graph: Graph, assignment: Tensor, num_parts: int, rank: int) -> Shard:
    """One shard of a cut, with the out-edges for the layers that read them."""
    shards = cut_each(graph, assignment, num_parts, reverse=True)
    return next(shard for number, shard in enumerate(shards) if number == rank)


def reference(entry: Entry, graph: Graph, steps: int) -> Record:
    """The layer in one process, as PyG runs it."""
    given = {**graph.node, **graph.edge, "edge_index": graph.edge_index}
    num_train = int(graph.node["train_mask"].sum())
    return train(entry, entry.build(), given, num_train, steps, None)


def run_entry(
    entry: Entry, built: torch.nn.Module, shard: Shard, transport: Transport, config: Config
) -> Record:
    """The layer attached on one rank. Row-wise results are of the owned rows."""
    module, halo = copy.deepcopy(built), Halo(transport)
    attachment = Attachment(module, halo, exchange=config.exchange)
    attachment.keep(shard)
    given = {**shard.node, **shard.edge, "edge_index": shard.edge_index}
    with halo.using(shard, checking=False):
        record = train(
            entry, module, given, shard.mask_counts["train_mask"], config.steps, transport
        )
    attachment.detach()
    return record | {"node_id": {"": shard.node_id}}


def train(
    entry: Entry,
    module: torch.nn.Module,
    given: dict[str, Any],
    num_train: int,
    steps: int,
    transport: Transport | None,
) -> Record:
    """What is compared: see the keys."""
    leaves = {name: given[name].clone().requires_grad_() for name in INPUTS}
    parameters = dict(module.named_parameters())
    # A bias in front of a norm has a gradient of zero, and Adam would make steps of its rounding.
    optimizer = torch.optim.Adam(parameters.values(), lr=0.01, eps=1e-4) if parameters else None
    record: Record = {}
    for step in range(steps):
        out = entry(module, given | copies(leaves))
        record.setdefault("outputs", {"": out.detach().clone()})
        loss = masked_mean(out, given["target"], given["train_mask"], num_train)
        module.zero_grad()
        loss.backward()
        if transport is not None:
            reduce(list(parameters.values()), transport)
        if step == 0:
            record["loss"] = {"": loss}
            record["gradient of"] = {
                n: p.grad.clone() for n, p in parameters.items() if p.grad is not None
            }
            record["input gradient of"] = {
                n: leaf.grad.clone() for n, leaf in leaves.items() if leaf.grad is not None
            }
        if optimizer is not None:
            optimizer.step()
    record["trained"] = dict(module.named_parameters())
    record["buffer"] = {n: b.clone() for n, b in module.named_buffers()}
    with torch.no_grad():
        record["evaluation outputs"] = {"": entry(module.eval(), given | copies(leaves))}
    return {kind: {n: t.detach() for n, t in values.items()} for kind, values in record.items()}


def run_or_refuse(
    entry: Entry, built: torch.nn.Module, shard: Shard, transport: Transport, config: Config
) -> Record | str:
    try:
        return run_entry(entry, built, shard, transport, config)
    except RefusedLayerError as error:
        return f"refused: {error}"


def copies(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs in storage of their own, because GroupAddRev frees its input."""
    return {name: leaf.clone() for name, leaf in leaves.items()}


def masked_mean(out: Tensor, target: Tensor, mask: Tensor, num_train: int) -> Tensor:
    """This rank's share of the mean over all training nodes, as a user's mean and its weight."""
    out = out.flatten(1)
    rows = (out - target[:, : out.shape[1]]).square().mean(1)[mask]
    return rows.mean() * (len(rows) / num_train) if len(rows) else rows.sum()


def reduce(parameters: Sequence[Tensor], transport: Transport) -> None:
    """Sums every gradient that some rank has over the ranks."""
    used = [float(p.grad is not None) for p in parameters]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([torch.tensor(used), *(grad.flatten() for grad in grads)])
    transport.all_reduce(flat)
    used_somewhere, *summed = flat.split([len(used), *(grad.numel() for grad in grads)])
    for parameter, some, grad in zip(parameters, used_somewhere.tolist(), summed, strict=True):
        parameter.grad = grad.view_as(parameter) if some else None


def compare(parts: Sequence[Record], expected: Record) -> str:
    """What differs from the reference, worst first; empty if nothing does."""
    order = torch.cat([part["node_id"][""] for part in parts]).argsort()
    found: Record = dict(parts[0])
    for kind in ("outputs", "evaluation outputs", "input gradient of"):
        for name in {name for part in parts for name in part[kind]}:
            rows = torch.cat([part[kind][name] for part in parts])[order]
            found[kind] = found[kind] | {name: rows}
    found["loss"] = {"": torch.stack([part["loss"][""] for part in parts]).sum()}
    wrong = list(differences(found, expected))
    for rank, part in enumerate(parts[1:], 1):
        same = {kind: part[kind] for kind in ("trained", "buffer")}
        wrong += [(value, f"{what} on rank {rank}") for value, what in differences(same, expected)]
    return "; ".join(f"{what}: {value:.1e}" for value, what in sorted(wrong, reverse=True)[:4])


def differences(found: Record, expected: Record) -> Iterator[tuple[float, str]]:
    """``(relative difference, what)`` of everything outside the tolerance."""
    for kind, values in found.items():
        if kind == "node_id":
            continue
        if values.keys() != expected[kind].keys():
            yield float("inf"), f"{kind} {sorted(values.keys() ^ expected[kind].keys())}"
            continue
        sizes = [float(t.abs().max()) for t in expected[kind].values() if t.numel()]
        for name, value in values.items():
            other = expected[kind][name]
            if value.shape != other.shape:
                yield float("inf"), f"{kind} {name} {tuple(value.shape)}, {tuple(other.shape)}"
            elif value.numel():
                scale = max(float(other.abs().max()), 1e-3 * max(sizes), 1e-12)
                error = float((value.double() - other.double()).abs().max()) / scale
                if not error <= TOLERANCE:
                    yield error, f"{kind} {name}".strip()


Results = dict[tuple[str, Config], "Record | str"]


def run_catalogue(configs: list[Config], assignments: list[Tensor]) -> Results:
    """Rank body: results of every entry in every configuration, or why there are none."""
    torch.set_default_dtype(torch.float64)
    limit = timedelta(seconds=60)
    transport = connect(dist.new_group(timeout=limit), timeout=limit)
    shards = [
        part(make_graph(directed=config.directed), assignment, config.num_ranks, dist.get_rank())
        for config, assignment in zip(configs, assignments, strict=True)
    ]
    found: Results = {}
    try:
        # Attached layers don't use the code that PyG generates for every class.
        with mock.patch.object(MessagePassing, "_set_jittable_templates"):
            for entry in entries():
                built = entry.build()
                for config, shard in zip(configs, shards, strict=True):
                    if config.runs(entry):
                        key = entry.name, config
                        found[key] = run_or_refuse(entry, built, shard, transport, config)
    except Exception as error:
        transport.report_failure(error)
        found[entry.name, config] = traceback.format_exc()
    transport.close()
    return found


class Proof:
    """What the whole catalogue gives in some runs; the ranks are started once per number of them.

    Args:
        runs: Configurations for each value of `exchange`.
        timeout: Seconds for one start of the ranks.
    """

    def __init__(self, runs: Runs, timeout: float) -> None:
        self.runs, self._timeout = runs, timeout
        self.results = functools.cache(self._results)

    def _results(self, num_ranks: int) -> list[Results]:
        """What every rank finds."""
        configs = [c for configs in self.runs.values() for c in configs if c.num_ranks == num_ranks]
        assignments = [c.assignment(make_graph(directed=c.directed)) for c in configs]
        return run_ranks(run_catalogue, num_ranks, configs, assignments, timeout=self._timeout)

    def verdicts(self, entry: Entry, exchange: str) -> dict[Config, str]:
        """Of every run that the entry is in."""
        return {c: self._verdict(entry, c) for c in self.runs[exchange] if c.runs(entry)}

    def _verdict(self, entry: Entry, config: Config) -> str:
        """ "exact", "refused: why", or what is wrong."""
        missing = "not run: an earlier layer failed"
        found = self.results(config.num_ranks)
        parts = [part.get((entry.name, config), missing) for part in found]
        if reasons := {part for part in parts if isinstance(part, str)}:
            return "\n".join(sorted(reasons))
        whole = expected(entry, config.directed, config.steps)
        return compare(parts, whole) or "exact"  # type: ignore[arg-type]


PROOF = Proof(SELECTION, timeout=580)


@functools.cache
def expected(entry: Entry, directed: bool, steps: int) -> Record:
    """The reference; in float64, also where a layer makes tensors of the default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return reference(entry, make_graph(directed=directed), steps)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_whole_catalogue_runs(num_ranks: int) -> None:
    for found in PROOF.results(num_ranks):
        reasons = [value for value in found.values() if isinstance(value, str)]
        failures = [reason for reason in reasons if not reason.startswith("refused")]
        assert not failures, failures[0]


ENTRIES = pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)


@ENTRIES
def test_a_layer_in_parts_equals_the_whole(entry: Entry) -> None:
    verdicts = PROOF.verdicts(entry, "message")
    assert set(verdicts.values()) == {"exact"}, _shown(verdicts)


@ENTRIES
def test_a_layer_with_the_exchange_at_its_input_equals_the_whole(entry: Entry) -> None:
    verdicts = PROOF.verdicts(entry, "input")
    if entry.layer in REFUSED_AT_INPUT:
        assert all(REFUSED_AT_INPUT[entry.layer] in value for value in verdicts.values())
    else:
        assert set(verdicts.values()) == {"exact"}, _shown(verdicts)


def _shown(verdicts: dict[Config, str]) -> str:
    return "\n".join(f"{config}: {value}" for config, value in verdicts.items())


@pytest.mark.parametrize("kind", ["outputs", "loss", "gradient of", "trained", "buffer"])
def test_the_comparison_sees_what_is_off_by_a_billionth(kind: str) -> None:
    entry = next(
        entry for entry in entries() if entry.code == 'GIN(D, 10, 3, H, norm="batch_norm")'
    )
    whole = expected(entry, True, 2)
    part = copy.deepcopy(whole) | {"node_id": {"": torch.arange(72)}}
    assert compare([part], whole) == ""
    name = next(name for name, value in part[kind].items() if value.abs().sum() > 0.1)
    part[kind][name] = part[kind][name].double() * (1 + 1e-9)
    assert compare([part], whole).startswith(f"{kind} {name}".strip())


def test_every_conv_and_norm_is_proven_or_refused() -> None:
    proven = {entry.layer for entry in entries()} | {"MessagePassing"}
    for name in (*conv.__all__, *norm.__all__):
        assert (name in proven) + (name in REFUSED) + (name in NOT_RUN) == 1, name


def test_the_table_of_layers_is_what_the_proof_finds() -> None:
    assert TABLE.read_text() == table(PROOF), "run `python tests/write_layer_table.py`"


def table(proof: Proof) -> str:
    """docs/layers.md, from the verdicts."""
    rows: dict[str, list[Entry]] = {}
    for entry in entries():
        rows.setdefault(entry.layer, []).append(entry)
    lines = INTRODUCTION.splitlines()
    for title, kind in (("Convolutions", "conv"), ("Norms", "norm"), ("Models", "model")):
        lines += ["", f"## {title}", "", "| layer | variants proven | `message` | `input` |"]
        lines += ["|---|---|---|---|"]
        names = {name for name, found in rows.items() if found[0].kind == kind}
        for name in sorted(names, key=str.lower):
            variants = "<br>".join(f"`{entry.variant}`" for entry in rows[name])
            cells = [variants, *(_cell(proof, rows[name], exchange) for exchange in proof.runs)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## Refused", "", "| layer | why, and what to use instead |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(REFUSED.items())]
    lines += ["", "## Not run", "", "| layer | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(NOT_RUN.items())]
    return "\n".join(lines) + "\n"


def _cell(proof: Proof, found: list[Entry], exchange: str) -> str:
    """What the table says of a layer; never "exact" unless every variant is in every run."""
    name = found[0].layer
    if exchange == "input" and name in REFUSED_AT_INPUT:
        return f"refused: {REFUSED_AT_INPUT[name]}"
    wrong = [e.variant for e in found if set(proof.verdicts(e, exchange).values()) != {"exact"}]
    return f"**not exact**: {', '.join(wrong)}" if wrong else "exact"
