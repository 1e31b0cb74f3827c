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
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "accuracy")]
import quiet  # noqa: E402, F401

# isort: split

import torch  # noqa: E402
from graphs import named_graph  # noqa: E402
from recipe import split  # noqa: E402
from spread import spread  # noqa: E402
from training import CODES, MODELS, Run, narrowed, train  # noqa: E402

GRAPHS = ("Photo", "PubMed", "Facebook")


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """Every run; what compares codes with each other comes together."""
    grid = itertools.product(
        options.seeds, options.layers, options.graphs, options.models, options.codes
    )
    for seed, num_layers, graph, model, code in grid:
        yield Run(graph, model, num_layers, code, seed)


Results = dict[str, dict[str, float]]


def table(results: Results, options: argparse.Namespace) -> str:
    """A row per graph, model and code: means over the seeds that there are, beside 32 bits."""
    head = "graph", "layers", "code", "seeds", "test accuracy", "to 32 bits", "training loss"
    head += "CPU ms", "kB", "error of rows", "of gradients", "aggregated"
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for graph, model, layers, code in itertools.product(
        options.graphs, options.models, options.layers, options.codes
    ):
        every = [Run(graph, model, layers, code, seed) for seed in options.seeds]
        pairs = pairs_of(results, every)
        if pairs:
            cells = f"| {graph} | {layers} {model} | {code} | {len(pairs)} | "
            lines.append(cells + " | ".join(_cells(pairs)) + " |")
    return "\n".join(lines)


def pairs_of(results: Results, every: list[Run]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Each run with that of the same seed at 32 bits, where there are both."""
    keys = [(str(run), str(run._replace(code="32"))) for run in every]
    return [(results[a], results[b]) for a, b in keys if a in results and b in results]


def _cells(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> Iterator[str]:
    columns = {name: mean(run[name] for run, _ in pairs) for name in pairs[0][0]}
    yield f"{100 * columns['test']:.2f} ± {100 * spread([run['test'] for run, _ in pairs]):.2f}"
    yield f"{100 * mean(run['test'] - full['test'] for run, full in pairs):+.2f}"
    yield f"{columns['loss']:.4f}"
    yield f"{1e3 * columns['seconds']:.0f}"
    yield f"{columns['bytes'] / 1e3:.0f}"
    for name in ("row_error", "gradient_error", "sum_error"):
        yield f"{columns[name]:.3f}"


def summary(results: Results, options: argparse.Namespace) -> str:
    """How far each code is from 32 bits, over all pairs of runs that there are."""
    lines = ["| code | pairs | accuracy to 32 bits | worst pair | training loss to 32 bits |"]
    lines.append("|---|---|---|---|---|")
    for code in options.codes:
        pairs = pairs_of(results, [run for run in runs(options) if run.code == code])
        if pairs and code != "32":
            gains = [100 * (run["test"] - full["test"]) for run, full in pairs]
            loss = mean(run["loss"] - full["loss"] for run, full in pairs)
            error = spread(gains) / len(gains) ** 0.5
            cells = f"{mean(gains):+.2f} ± {error:.2f} | {min(gains):+.2f} | {loss:+.4f}"
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
            found = train(run, split(graphs[run.graph].clone(), run.seed), options)
            del found["curve"]
            results[str(run)] = found
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            spent = time.perf_counter() - start
            print(f"{run}: test {100 * results[str(run)]['test']:.2f} %, {spent:.0f} s", flush=True)
    print(summary(results, options) + "\n\n" + table(results, options))


if __name__ == "__main__":
    main()
