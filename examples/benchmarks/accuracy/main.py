"""Test accuracy of four ranks beside one process, on five graphs and three seeds.

    python examples/benchmarks/accuracy/main.py

Every finished run is kept in results.json; the same command goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
import torch  # noqa: E402
from graphs import named_graph  # noqa: E402
from recipe import BestEpoch, SparseGCN, packed, split  # noqa: E402
from spread import spread  # noqa: E402

from lightning_sylvie import GraphDataModule, SylvieStrategy  # noqa: E402


@dataclass(frozen=True)
class Recipe:
    """What differs between the graphs."""

    hidden: int = 64
    epochs: int = 100
    validate_every: int = 5
    public: bool = False  # the dataset's own masks and row-normalised features


RECIPES = {
    "Photo": Recipe(),
    "Physics": Recipe(),
    "Facebook": Recipe(),
    "GitHub": Recipe(),
    "PubMed": Recipe(hidden=16, epochs=200, validate_every=1, public=True),
}

DROPOUT = 0.5


def prepare(name: str, path: Path) -> None:
    """Saves the graph with its features packed: Physics alone is 1.2 GB of zeros before."""
    graph = packed(named_graph(name), normalize=RECIPES[name].public)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(graph, path)


def run(name: str, seed: int, num_ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """Validation and test accuracy at the best validation epoch."""
    path = options.work / f"{name}.pt"
    if not path.exists():  # in a process of its own, which takes its memory with it
        process = multiprocessing.get_context("spawn").Process(target=prepare, args=(name, path))
        process.start()
        process.join()
    recipe, graph = RECIPES[name], torch.load(path, weights_only=False)
    if not recipe.public:
        graph = split(graph, seed)
    L.seed_everything(seed, verbose=False)
    model = SparseGCN(graph.num_inputs, recipe.hidden, int(graph.y.max()) + 1, options.dropout)
    strategy = SylvieStrategy(bits=32, start_method="fork", cache_dir=options.work / "parts")
    with tempfile.TemporaryDirectory() as folder:
        best = BestEpoch(Path(folder) / "best.json")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=num_ranks,
            strategy="auto" if num_ranks == 1 else strategy,
            max_epochs=options.epochs or recipe.epochs,
            check_val_every_n_epoch=recipe.validate_every,
            num_sanity_val_steps=0,
            callbacks=[best],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, GraphDataModule(graph))
        return json.loads(best.path.read_text())


def key_of(name: str, seed: int, num_ranks: int, options: argparse.Namespace) -> str:
    """Under which a run is kept."""
    without = "" if options.dropout == DROPOUT else f", dropout {options.dropout}"
    return f"{name}, seed {seed}, {num_ranks} ranks{without}"


def table(results: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    """Test accuracy in percent, mean and sample standard deviation over the seeds."""
    many = f"{options.ranks} ranks"
    lines = [f"| graph | one process | {many} | difference | within one deviation |"]
    lines.append("|---|---|---|---|---|")
    for name in options.graphs:
        runs = [
            [
                100 * results[key]["test"]
                for seed in options.seeds
                if (key := key_of(name, seed, n, options)) in results
            ]
            for n in (1, options.ranks)
        ]
        if all(runs):
            (one, four), width = map(mean, runs), spread(runs[0])
            verdict = "yes" if abs(four - one) <= width else "NO"
            cells = [f"{mean(values):.2f} ± {spread(values):.2f} %" for values in runs]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} | {four - one:+.2f} | {verdict} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--epochs", type=int, default=0, help="0: as the recipe says")
    parser.add_argument("--work", type=Path, default=Path("data/accuracy"))
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in options.graphs:
        for seed in options.seeds:
            for num_ranks in (1, options.ranks):
                key = key_of(name, seed, num_ranks, options)
                if key not in results:
                    results[key] = run(name, seed, num_ranks, options)
                    options.results.write_text(json.dumps(results, indent=2) + "\n")
                print(f"{key}: test {100 * results[key]['test']:.2f} %", flush=True)
    print("\n" + table(results, options))


if __name__ == "__main__":
    main()
