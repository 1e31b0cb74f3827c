"""Test accuracy and training loss of every code on the wire, on three graphs and three models.

    python examples/benchmarks/low_bit/main.py

Every finished run is kept in results.json; the same command goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "accuracy")]
import quiet  # noqa: E402, F401

# isort: split

import torch  # noqa: E402
from graphs import named_graph  # noqa: E402
from recipe import split  # noqa: E402
from training import CODES, MODELS, Run, narrowed, train  # noqa: E402

GRAPHS = ("Photo", "PubMed", "Facebook")


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Every run; what compares codes with each other comes together."""
    grid = itertools.product(
        options.seeds, options.layers, options.graphs, options.models, options.codes
    )
    for seed, num_layers, graph, model, code in grid:
        yield Run(graph, model, num_layers, code, seed)


def table(results: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    """A row per graph, model and code: means over the seeds that every code of the row has."""
    head = "graph", "layers", "code", "seeds", "test accuracy", "to 32 bits", "training loss"
    head += "CPU ms", "kB", "error of rows", "of gradients", "aggregated"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    grid = itertools.product(options.graphs, options.models, options.layers)
    for graph, model, num_layers in grid:
        common = [
            seed
            for seed in options.seeds
            if all(str(Run(graph, model, num_layers, c, seed)) in results for c in options.codes)
        ]
        if common:
            found = {
                code: [results[str(Run(graph, model, num_layers, code, s))] for s in common]
                for code in options.codes
            }
            lines += [
                f"| {graph} | {num_layers} {model} | {code} | {len(common)} | "
                + _cells(found[code], found.get("32"))
                for code in options.codes
            ]
    return "\n".join(lines)


def _cells(found: list[dict[str, float]], full: list[dict[str, float]] | None) -> str:
    columns = {name: mean(run[name] for run in found) for name in found[0]}
    spread = 100 * pstdev(run["test"] for run in found)
    ahead = 100 * mean(a["test"] - b["test"] for a, b in zip(found, full or found, strict=True))
    cells = [f"{100 * columns['test']:.2f} ± {spread:.2f}", f"{ahead:+.2f}"]
    cells += [f"{columns['loss']:.4f}", f"{1e3 * columns['seconds']:.0f}"]
    cells += [f"{columns['bytes'] / 1e3:.0f}"]
    cells += [f"{columns[name]:.3f}" for name in ("row_error", "gradient_error", "sum_error")]
    return " | ".join(cells) + " |"


def summary(results: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    """Over all graphs, models and seeds that every code has: how far each is from 32 bits."""
    lines = ["| code | pairs | accuracy to 32 bits | worst pair | training loss to 32 bits |"]
    lines.append("|---|---|---|---|---|")
    every = argparse.Namespace(**{**vars(options), "codes": ["32"]})
    full = [run for run in runs(every) if str(run) in results]
    for code in options.codes:
        pairs = [
            (results[str(run)], results[key])
            for run in full
            if (key := str(run._replace(code=code))) in results
        ]
        if pairs:
            gain = [100 * (b["test"] - a["test"]) for a, b in pairs]
            loss = mean(b["loss"] - a["loss"] for a, b in pairs)
            error = pstdev(gain) / len(gain) ** 0.5
            cells = f"{mean(gain):+.2f} ± {error:.2f} | {min(gain):+.2f} | {loss:+.4f}"
            lines.append(f"| {code} | {len(pairs)} | {cells} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 2])
    parser.add_argument("--codes", nargs="+", default=list(CODES)[:6], choices=list(CODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--metis", action="store_true", help="METIS parts instead of random ones")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true", help="print what there is and stop")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # the ranks are the threads
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    graphs: dict[str, Any] = {}
    for run in () if options.table else runs(options):
        if str(run) not in results:
            if run.graph not in graphs:
                graphs[run.graph] = narrowed(named_graph(run.graph))
            start = time.perf_counter()
            results[str(run)] = train(run, split(graphs[run.graph].clone(), run.seed), options)
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            spent = time.perf_counter() - start
            print(f"{run}: test {100 * results[str(run)]['test']:.2f} %, {spent:.0f} s", flush=True)
    print(summary(results, options) + "\n\n" + table(results, options))


if __name__ == "__main__":
    main()
