"""CPU time of an epoch on one rank and on four, beside plain PyG.

    python examples/benchmarks/compute/main.py

One rank must be no slower than plain PyG. Four ranks together may cost what one costs, and what
their halo rows add.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from graphs import community_graph, named_graph  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_geometric.nn import GCN, GraphSAGE  # noqa: E402
from torch_geometric.transforms import ToSparseTensor  # noqa: E402

from lightning_sylvie import GraphDataModule, SylvieStrategy  # noqa: E402

WARM_UP = 2  # epochs that are not counted


class Step(L.LightningModule):
    """A training step and nothing else: what is left of Lightning takes milliseconds."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, data: Any, _: int) -> Tensor:
        return loss(self.model, data, data.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


class Clock(L.Callback):
    """CPU seconds at the start of every epoch, in a file per rank, with the rank's sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.readings = folder, []
        self.sizes = (0, 0, 0)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, _: int) -> None:
        plan = batch.shard.plan
        self.sizes = plan.num_owned, plan.num_halo, batch.edge_index.shape[1]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.readings.append(time.process_time())

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.readings.append(time.process_time())
        path = self.folder / f"{trainer.global_rank}.json"
        path.write_text(json.dumps([self.readings, self.sizes]))


def loss(model: torch.nn.Module, data: Any, edges: Any) -> Tensor:
    scores = model(data.x, edges)
    return F.cross_entropy(scores[data.train_mask], data.y[data.train_mask])


def plain(model: torch.nn.Module, graph: Any, epochs: int, *, sparse: bool) -> list[float]:
    """CPU seconds of every epoch of a bare loop.

    Args:
        model: A PyG model.
        graph: The whole graph.
        epochs: Epochs to count.
        sparse: Hand PyG a sparse adjacency in place of `edge_index`.
    """
    (data,) = GraphDataModule(graph).train_dataloader()
    edges = (
        ToSparseTensor(layout=torch.sparse_csr)(data.clone()).adj_t if sparse else data.edge_index
    )
    optimizer, readings = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(epochs + WARM_UP):
        readings.append(time.process_time())
        optimizer.zero_grad()
        loss(model, data, edges).backward()
        optimizer.step()
    return durations([*readings, time.process_time()])


def ranks(model: torch.nn.Module, graph: Any, epochs: int, num_ranks: int) -> dict[str, Any]:
    """CPU seconds of every epoch, added over the ranks, and rows and edges, added likewise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=num_ranks,
            strategy=SylvieStrategy(bits=32, start_method="fork", cache_dir=folder),
            max_epochs=epochs + WARM_UP,
            limit_val_batches=0,
            callbacks=[Clock(folder)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Step(model), GraphDataModule(graph))
        files = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    epochs = [durations(readings) for readings, _ in files]
    times = [sum(parts) for parts in zip(*epochs, strict=True)]
    owned, halo, edges = map(sum, zip(*(sizes for _, sizes in files), strict=True))
    return {"times": times, "owned": owned, "halo": halo, "edges": edges}


def durations(readings: list[float]) -> list[float]:
    return [end - start for start, end in pairwise(readings[WARM_UP:])]


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Everything that the table shows; variants take turns, so that noise meets all of them."""
    graph = named_graph(options.dataset) if options.dataset else community_graph()
    width, num_classes = graph.num_features, int(graph.y.max()) + 1
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "GraphSAGE": lambda: GraphSAGE(width, 64, 3, num_classes, dropout=0.5),
        "GCN": lambda: GCN(width, 64, 3, num_classes, dropout=0.5),
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in models}
    for _ in range(options.rounds):
        for name, make in models.items():
            turn = {
                "PyG, edge_index": {"times": plain(make(), graph, options.epochs, sparse=False)},
                "PyG, sparse adj_t": {"times": plain(make(), graph, options.epochs, sparse=True)},
                "1 rank": ranks(make(), graph, options.epochs, 1),
                f"{options.ranks} ranks": ranks(make(), graph, options.epochs, options.ranks),
            }
            for variant, values in turn.items():
                earlier = found[name].get(variant, {"times": []})["times"]
                found[name][variant] = {**values, "times": earlier + values["times"]}
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["| model | variant | ms of CPU per epoch, least (median) | against PyG | rows |"]
    lines.append("|---|---|---|---|---|")
    for name, variants in found.items():
        base = min(variants["PyG, edge_index"]["times"])
        for variant, values in variants.items():
            times = values["times"]
            cost = f"{1000 * min(times):.0f} ({1000 * median(times):.0f})"
            rows = f"{values['owned']} + {values['halo']} halo" if "owned" in values else ""
            lines.append(f"| {name} | {variant} | {cost} | {min(times) / base:.2f} | {rows} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="Computers", help="empty: a graph made here")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    found = measure(options)
    options.results.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found) + "\n")
    for name, variants in found.items():
        least = {variant: min(values["times"]) for variant, values in variants.items()}
        one, four = least["1 rank"], least[f"{options.ranks} ranks"]
        verdict = "yes" if one <= least["PyG, edge_index"] else "NO"
        print(f"{name}: one rank no slower than PyG: {verdict}; ", end="")
        print(f"{options.ranks} ranks together cost {four / one:.2f} times one rank")


if __name__ == "__main__":
    main()
