"""How much of the gradients' sum is hidden behind backward, in a model of four layers.

    python examples/benchmarks/all_reduce/overlap.py         # Linux, as root: one namespace a rank

Three times per epoch: with sums after backward, with sums that start in backward, and of one sum
alone. What is hidden is the difference of the first two, as a share of the third.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "tests")]
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from graphs import community_graph  # noqa: E402
from network.hosts import Hosts, missing  # noqa: E402
from torch_geometric.nn import GraphSAGE  # noqa: E402

from lightning_sylvie import (  # noqa: E402
    GradientSum,
    GraphDataModule,
    SylvieModule,
    SylvieStrategy,
)

KEPT = ("rate", "all_reduce", "bucket_bytes", "features", "width", "nodes")
WARM_UP = 3  # epochs that are not counted
LAYERS = 4


class Clock(L.Callback):
    """Seconds from the start of backward to the step, when all gradients are summed."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.alone: list[float] = []

    def on_before_backward(self, *_: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        reducer = trainer.strategy.run._reducer
        dist.barrier()
        start = time.perf_counter()
        reducer.reduce(scale=1 / trainer.world_size)  # sums of what is summed: the same again
        self.alone.append(time.perf_counter() - start)


def train(options: argparse.Namespace, overlap: bool) -> dict[str, list[float]]:
    """Backward's seconds in each epoch, and those of a sum alone, on this rank."""
    way = GradientSum(options.all_reduce, bucket_bytes=options.bucket_bytes, overlap=overlap)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=SylvieStrategy(
            bits=1, all_reduce=way, partition="random", cache_dir=options.folder
        ),
        max_epochs=options.epochs + WARM_UP,
        limit_val_batches=0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(0, verbose=False)
    model = GraphSAGE(options.features, options.width, LAYERS, 8)
    graph = community_graph(options.nodes, num_features=options.features)
    trainer.fit(SylvieModule(model), GraphDataModule(graph))
    return {"backward": clock.seconds[WARM_UP:], "alone": clock.alone[WARM_UP:]}


def serve(options: argparse.Namespace) -> None:
    """One rank: the two ways in turn, as one line of JSON."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"after": [], "overlapped": [], "alone": []}
    for _ in range(options.rounds):
        for name, overlap in [("after", False), ("overlapped", True)]:
            times = train(options, overlap)
            found[name] += times["backward"]
            found["alone"] += times["alone"]
    print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Seconds of the slower of two ranks."""
    with Hosts(2, rate=options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, host in enumerate(hosts):
            command = [sys.executable, __file__, *arguments, "--serve", "--folder"]
            env = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "NODE_RANK": str(rank)}
            processes.append(host.start([*command, f"{folder}/{rank}"], env=env))
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))
    lines = [
        next(line for line in output.splitlines() if line.startswith("{")) for output in outputs
    ]
    first, second = map(json.loads, lines)
    return {
        name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in first
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit", help="of every link, each way")
    parser.add_argument("--all-reduce", default="auto")
    parser.add_argument("--bucket-bytes", type=int, default=GradientSum().bucket_bytes)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=256, help="hidden units")
    parser.add_argument("--nodes", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "overlap.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if (reason := missing()) is not None:
        sys.exit(reason)
    found = measure(options, sys.argv[1:])
    settings = {name: getattr(options, name) for name in KEPT}
    options.results.write_text(json.dumps({**settings, **found}, indent=1) + "\n")
    after, overlapped, alone = (median(found[name]) for name in ("after", "overlapped", "alone"))
    print(f"backward and a sum after it:     {1000 * after:.1f} ms")
    print(f"backward with the sum inside:    {1000 * overlapped:.1f} ms")
    print(f"a sum alone:                     {1000 * alone:.1f} ms")
    print(f"hidden: {100 * (after - overlapped) / alone:.0f} % of the sum's time")


if __name__ == "__main__":
    main()
