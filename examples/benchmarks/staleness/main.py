"""Test accuracy and convergence with halo rows of last epoch, and with synchronous epochs between.

    python examples/benchmarks/staleness/main.py

Every finished run is kept in results.json; the same command goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "accuracy"), str(HERE.parent / "low_bit")]
import quiet  # noqa: E402, F401

# isort: split

import torch  # noqa: E402
from graphs import named_graph  # noqa: E402
from recipe import split  # noqa: E402
from spread import spread  # noqa: E402
from training import AGES, MODELS, VALIDATE_EVERY, Run, narrowed, train  # noqa: E402

FULL = "sync, 32 bits"
Results = dict[str, dict[str, Any]]


def table(results: Results, options: argparse.Namespace) -> str:
    """A row per graph, model and way: over the seeds that there are, beside full precision."""
    lines = [
        "| graph | model | halo rows | seeds | test accuracy | to full precision | training loss |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for graph, model, way in itertools.product(options.graphs, options.models, options.ways):
        keys = [[str(Run(graph, model, 3, w, seed)) for w in (way, FULL)] for seed in options.seeds]
        pairs = [(results[a], results[b]) for a, b in keys if a in results and b in results]
        if pairs:
            tests = [100 * run["test"] for run, _ in pairs]
            gain = mean(100 * (run["test"] - full["test"]) for run, full in pairs)
            loss = mean(run["loss"] for run, _ in pairs)
            lines.append(
                f"| {graph} | {model} | {way} | {len(pairs)} | {mean(tests):.2f} ± "
                f"{spread(tests):.2f} | {gain:+.2f} | {loss:.4f} |"
            )
    return "\n".join(lines)


def draw(results: Results, options: argparse.Namespace, path: Path) -> None:
    """Validation accuracy over epochs, seed by seed averaged: a panel per graph and model."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print('no picture without matplotlib: pip install "lightning-sylvie[plots]"')
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(itertools.product(options.graphs, options.models))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(4.8 * len(cases), 4.2), squeeze=False)
    for axis, (graph, model) in zip(axes[0], cases, strict=True):
        for way in options.ways:
            keys = [str(Run(graph, model, 3, way, seed)) for seed in options.seeds]
            curves = [results[key]["curve"] for key in keys if key in results]
            if curves:
                values = [100 * mean(points) for points in zip(*curves, strict=True)]
                epochs = [VALIDATE_EVERY * (i + 1) for i in range(len(values))]
                axis.plot(epochs, values, label=way, linewidth=1.2)
        axis.set(title=f"{graph}, {model}", xlabel="epoch", ylabel="validation accuracy, %")
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=["Photo", "PubMed"])
    parser.add_argument("--models", nargs="+", default=["GraphSAGE", "GCN"], choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(AGES), choices=list(AGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--random", dest="metis", action="store_false", help="random parts")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true", help="print and draw what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks are the threads
    results: Results = json.loads(options.results.read_text()) if options.results.exists() else {}
    graphs: dict[str, Any] = {}
    grid = itertools.product(options.seeds, options.graphs, options.models, options.ways)
    for seed, graph, model, way in () if options.table else grid:
        key = str(run := Run(graph, model, 3, way, seed))
        if key not in results:
            if graph not in graphs:
                graphs[graph] = narrowed(named_graph(graph))
            start = time.perf_counter()
            results[key] = train(run, split(graphs[graph].clone(), seed), options)
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            spent = time.perf_counter() - start
            print(f"{key}: test {100 * results[key]['test']:.2f} %, {spent:.0f} s", flush=True)
    print(table(results, options))
    draw(results, options, options.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
