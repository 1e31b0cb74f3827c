"""Seconds of an epoch by mode and bits, on hosts that are joined by slow links.

    python examples/benchmarks/epoch_time/main.py             # Linux, as root: one namespace a rank

The ranks train the same model in all modes in turn, a few rounds. Beside them stands the same
trainer with communication skipped: what an epoch takes if the network costs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "tests")]
import quiet  # noqa: E402, F401

# isort: split

import lightning as L  # noqa: E402
import torch  # noqa: E402
from graphs import community_graph, named_graph  # noqa: E402
from network.hosts import Hosts, missing  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_geometric.nn import GraphSAGE  # noqa: E402

from lightning_sylvie import (  # noqa: E402
    BoundedStaleness,
    GraphDataModule,
    SylvieModule,
    SylvieStrategy,
)
from lightning_sylvie.transport import Pending  # noqa: E402

SKIPPED = "async, 1 bit, communication skipped"
MODES: dict[str, dict[str, Any]] = {
    SKIPPED: {"bits": 1, "mode": "async"},
    "async, 1 bit": {"bits": 1, "mode": "async"},
    "async, 1 bit, every 5th epoch sync": {"bits": 1, "mode": "async"},
    "sync, 1 bit": {"bits": 1},
    "async, 32 bits": {"bits": 32, "mode": "async"},
    "sync, 32 bits": {"bits": 32},
}
WARM_UP = 3  # epochs that are not counted: connections, buffers, the first synchronous epoch
UNITS = {"mbit": 1e6, "gbit": 1e9}


class Nothing(Pending):
    """An exchange of zeros that takes no time."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


class Clock(L.Callback):
    """The start of every epoch, and bytes sent by then; may skip communication."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.starts: list[float] = []
        self.sent: list[int] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.skip and trainer.current_epoch == WARM_UP:
            self._switch(trainer.strategy)
        self.starts.append(time.perf_counter())
        self.sent.append(sum(trainer.strategy.halo_transport.bytes_sent))

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.starts.append(time.perf_counter())
        if self.skip:
            self._switch(trainer.strategy)

    @staticmethod
    def _switch(strategy: SylvieStrategy) -> None:
        """Takes communication away, or gives it back, when what is under way has begun."""
        strategy.run.attachment.halo.history.lane.run(lambda: None)
        num_ranks = strategy.halo_transport.num_ranks
        for transport in (strategy.halo_transport, strategy.gradient_transport):
            if "_start" in vars(transport):
                del transport._start, transport._all_reduce
            else:
                transport._start = lambda move: Nothing(move.rows.zero_())
                transport._all_reduce = lambda tensor: tensor.mul_(num_ranks)

    @property
    def seconds(self) -> list[float]:
        """Of every epoch after the warm-up and but the last, which the trainer's end is part of."""
        return [end - start for start, end in pairwise(self.starts[WARM_UP:-1])]

    @property
    def num_bytes(self) -> int:
        """Of an epoch, on average: what is under way at its end is counted in the next one."""
        return (self.sent[-1] - self.sent[WARM_UP]) // (len(self.sent) - 1 - WARM_UP)


def serve(options: argparse.Namespace) -> None:
    """One rank: trains in all modes, and prints seconds and bytes of each as a line of JSON."""
    torch.set_num_threads(1)
    graph = named_graph(options.dataset) if options.dataset else community_graph()
    num_classes = int(graph.y.max()) + 1
    found: dict[str, Any] = {name: {"seconds": []} for name in MODES}
    for _ in range(options.rounds):
        for name, chosen in MODES.items():
            clock = Clock(skip=name == SKIPPED)
            bounded = [BoundedStaleness(eps_s=5)] if "every 5th" in name else []
            trainer = L.Trainer(
                accelerator="cpu",
                devices=1,
                num_nodes=options.hosts,
                strategy=SylvieStrategy(cache_dir=options.folder, **chosen),
                max_epochs=options.epochs + WARM_UP + 1,
                limit_val_batches=0,
                callbacks=[clock, *bounded],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            L.seed_everything(0, verbose=False)
            model = GraphSAGE(graph.num_features, options.width, 3, num_classes, dropout=0.5)
            trainer.fit(SylvieModule(model), GraphDataModule(graph))
            found[name]["seconds"] += clock.seconds
            found[name]["bytes"] = clock.num_bytes
    print(json.dumps(found), flush=True)


def measure(options: argparse.Namespace, num_hosts: int, rate: str) -> dict[str, Any]:
    """Of every mode, seconds of the slowest rank and bytes of the rank that sends most."""
    with Hosts(num_hosts, rate=rate) as hosts, tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, host in enumerate(hosts):
            command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
            command += ["--hosts", str(num_hosts), "--folder", f"{folder}/{rank}"]
            env = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "NODE_RANK": str(rank)}
            processes.append(host.start(command, env=env))
        outputs = [process.communicate(timeout=3600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))
    ranks = [
        json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        for output in outputs
    ]
    slowest = {
        name: {
            "seconds": [
                max(s) for s in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)
            ],
            "bytes": max(rank[name]["bytes"] for rank in ranks),
        }
        for name in MODES
    }
    return {"hosts": num_hosts, "rate": rate, "modes": slowest}


def table(row: dict[str, Any]) -> str:
    """Of one number of hosts and rate: seconds, and seconds that the bytes alone need."""
    lines = [f"{row['hosts']} hosts, {row['rate']} links:", ""]
    lines.append(
        "| mode | ms per epoch, median (least) | over no communication | MB sent | ms of line |"
    )
    lines.append("|---|---|---|---|---|")
    base = median(row["modes"][SKIPPED]["seconds"])
    bits_per_second = float(row["rate"][:-4]) * UNITS[row["rate"][-4:]]
    for name, found in row["modes"].items():
        seconds, num_bytes = found["seconds"], 0 if name == SKIPPED else found["bytes"]
        lines.append(
            f"| {name} | {1000 * median(seconds):.0f} ({1000 * min(seconds):.0f}) "
            f"| {median(seconds) / base:.2f} | {num_bytes / 1e6:.2f} "
            f"| {8000 * num_bytes / bits_per_second:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="Computers", help="empty: a graph made here")
    parser.add_argument("--num-hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--width", type=int, default=256, help="hidden units")
    parser.add_argument("--epochs", type=int, default=10, help="that count, per mode and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if (reason := missing()) is not None:
        sys.exit(reason)
    rows = []
    for num_hosts in options.num_hosts:
        for rate in options.rates:
            rows.append(measure(options, num_hosts, rate))
            print(table(rows[-1]), flush=True)
            options.results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
