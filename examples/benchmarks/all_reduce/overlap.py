"""How much of the gradients' sum is hidden behind backward, in a model of four layers.

    python examples/benchmarks/all_reduce/overlap.py         # Linux, as root: one namespace a rank

Epochs with sums after backward and with sums that start in backward take turns; then there is the
time of the sums alone. What is hidden is the difference of the first two, as a share of the third.
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
    """Seconds from the start of backward until all gradients are summed, in turn in both ways."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"after": [], "overlapped": [], "alone": []}

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.run._reducer._overlap = bool(trainer.current_epoch % 2)
        dist.barrier()
        self._start = time.perf_counter()

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        way = "overlapped" if trainer.current_epoch % 2 else "after"
        self.seconds[way].append(time.perf_counter() - self._start)
        dist.barrier()
        start = time.perf_counter()
        trainer.strategy.run._reducer.reduce(scale=1 / trainer.world_size)  # the same sums again
        self.seconds["alone"].append(time.perf_counter() - start)


def serve(options: argparse.Namespace) -> None:
    """One rank: trains, and prints its seconds as one line of JSON."""
    torch.set_num_threads(1)
    clock = Clock()
    way = GradientSum(options.all_reduce, bucket_bytes=options.bucket_bytes)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=SylvieStrategy(
            bits=1, all_reduce=way, partition="random", cache_dir=options.folder
        ),
        max_epochs=2 * (options.epochs + WARM_UP),
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
    found = {name: seconds[WARM_UP:] for name, seconds in clock.seconds.items()}
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
    parser.add_argument("--rate", default="100mbit", help="of every link, each way")
    parser.add_argument("--all-reduce", default="auto")
    parser.add_argument("--bucket-bytes", type=int, default=GradientSum().bucket_bytes)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=256, help="hidden units")
    parser.add_argument("--nodes", type=int, default=12000)
    parser.add_argument("--epochs", type=int, default=20, help="of each way")
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
