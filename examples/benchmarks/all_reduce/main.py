"""Seconds of every all-reduce over size and number of ranks, beside the cost model.

    python examples/benchmarks/all_reduce/main.py            # Linux, as root: one namespace a rank
    python examples/benchmarks/all_reduce/main.py --plot     # the picture again, from results.json

Ranks are processes on hosts of their own, joined by links of one rate in each direction.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "tests")]
import quiet  # noqa: E402, F401

# isort: split

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from network.hosts import Hosts, missing  # noqa: E402

from lightning_sylvie.all_reduce import ALGORITHMS, AllReduce  # noqa: E402
from lightning_sylvie.transport import Transport, connect  # noqa: E402

VALUE = 4  # bytes of a float32
LIMIT = timedelta(minutes=5)


def bits_per_second(rate: str) -> float:
    """Of a rate as `tc` writes it."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]]


def predicted(
    name: str, num_bytes: int, num_ranks: int, latency: float, seconds_per_byte: float
) -> float:
    """The cost model: every step takes a latency and the time of its bytes on the busiest link.

    Segments of a segmented ring travel while others are added: only the first waits in each step.
    """
    path = ALGORITHMS[name].path(num_bytes // VALUE, num_ranks)
    num_waits = 2 * (num_ranks - 1) if name == "segmented_ring" else len(path)
    return num_waits * latency + sum(path) * VALUE * seconds_per_byte


def seconds_of(algorithm: AllReduce, transport: Transport, num_bytes: int) -> list[float]:
    """Of some calls, the seconds of the slowest rank."""
    values = torch.ones(num_bytes // VALUE)
    taken: list[float] = []
    while sum(taken) < 0.4 and len(taken) < 20:
        dist.barrier()
        start = time.perf_counter()
        algorithm(values, transport)
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append(float(slowest))
    return taken


def serve(rank: int, address: str, options: argparse.Namespace) -> None:
    """One rank: measures everything, and rank 0 prints it, a line of JSON each."""
    torch.set_num_threads(1)
    where = f"tcp://{address}:29500"
    dist.init_process_group("gloo", where, LIMIT, options.num_ranks, rank)
    transport = connect(dist.new_group(timeout=LIMIT), timeout=LIMIT)
    steps = 2 * (options.num_ranks - 1)
    for algorithm in ALGORITHMS.values():  # opens all connections
        seconds_of(algorithm, transport, VALUE)
    latency = median(seconds_of(ALGORITHMS["ring"], transport, VALUE * options.num_ranks)) / steps
    for num_bytes in options.sizes:
        for name, algorithm in ALGORITHMS.items():
            row = {
                "algorithm": name,
                "num_bytes": num_bytes,
                "num_ranks": options.num_ranks,
                "seconds": seconds_of(algorithm, transport, num_bytes),
                "latency": latency,
            }
            if rank == 0:
                print(json.dumps(row), flush=True)
    transport.close()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, num_ranks: int) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    with Hosts(num_ranks, rate=options.rate) as hosts:
        command = [sys.executable, __file__, "--num-ranks", str(num_ranks), "--sizes"]
        command += map(str, options.sizes)
        command += ["--address", hosts[0].address, "--serve"]
        processes = [host.start([*command, str(rank)]) for rank, host in enumerate(hosts)]
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))
    rows = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    for row in rows:
        where = (row["algorithm"], row["num_bytes"], row["num_ranks"], row["latency"])
        row["predicted"] = predicted(*where, 8 / bits_per_second(options.rate))
    return rows


def keep(path: Path, rate: str, rows: list[dict[str, Any]]) -> None:
    """Writes the rows into the results, in the place of earlier ones of as many ranks."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rate": rate, "rows": []}
    new = {row["num_ranks"] for row in rows}
    others = [row for row in earlier["rows"] if row["num_ranks"] not in new]
    rows = [*(others if earlier["rate"] == rate else []), *rows]
    path.write_text(json.dumps({"rate": rate, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds, measured and by the model, for each number of ranks."""
    sizes = sorted({row["num_bytes"] for row in rows})
    lines = []
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        lines.append(f"| {num_ranks} ranks | " + " | ".join(map(size_of, sizes)) + " |")
        lines.append("|---" * (len(sizes) + 1) + "|")
        for name in ALGORITHMS:
            mine = [r for r in rows if (r["algorithm"], r["num_ranks"]) == (name, num_ranks)]
            cells = {
                row["num_bytes"]: f"{ms(median(row['seconds']))} ({ms(row['predicted'])})"
                for row in mine
            }
            lines.append(f"| {name} | " + " | ".join(cells.get(size, "") for size in sizes) + " |")
        lines.append("")
    return "\n".join(lines)


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds > 0.1 else f"{1000 * seconds:.1f}"


def size_of(num_bytes: int) -> str:
    return f"{num_bytes // 10**6} MB" if num_bytes >= 10**6 else f"{num_bytes // 1000} kB"


def bound(rows: list[dict[str, Any]], rate: str) -> str:
    """What the rings take over the least that their bytes need on the link."""
    lines = []
    for row in rows:
        if "ring" in row["algorithm"] and row["num_bytes"] >= 16e6:
            num_ranks = row["num_ranks"]
            least = 2 * (num_ranks - 1) / num_ranks * row["num_bytes"] * 8 / bits_per_second(rate)
            over = median(row["seconds"]) / least
            which = f"{row['algorithm']}, {num_ranks} ranks, {size_of(row['num_bytes'])}"
            lines.append(f"{which}: {over:.3f} times 2(N-1)/N * bytes / rate")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], rate: str, path: Path) -> None:
    """Measured points and the model's lines, a panel for each number of ranks."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print('no picture without matplotlib: pip install "lightning-sylvie[plots]"')
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({row["num_ranks"] for row in rows})
    figure, axes = pyplot.subplots(
        1, len(counts), figsize=(4.6 * len(counts), 4.6), sharey=True, squeeze=False
    )
    for axis, num_ranks in zip(axes[0], counts, strict=True):
        for index, name in enumerate(ALGORITHMS):
            mine = [r for r in rows if (r["algorithm"], r["num_ranks"]) == (name, num_ranks)]
            sizes = [row["num_bytes"] for row in mine]
            times = [1000 * median(row["seconds"]) for row in mine]
            model = [1000 * row["predicted"] for row in mine]
            label = "auto (the backend's)" if name == "auto" else name
            style = {"color": f"C{index}", "markerfacecolor": "none", "markersize": 7}
            axis.plot(sizes, times, "oshv^Dx"[index], label=label, **style)
            if name != "auto":
                axis.plot(sizes, model, color=f"C{index}", linewidth=1)
        axis.set(xscale="log", yscale="log", title=f"{num_ranks} ranks", xlabel="bytes summed")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("milliseconds")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"All-reduce on links of {rate}: points measured, lines by the cost model")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    sizes = [1000, 10_000, 100_000, 1_000_000, 16_000_000, 64_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--rate", default="200mbit", help="of every link, each way")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--plot", action="store_true", help="only draw")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.address, options)
        return
    if not options.plot:
        if (reason := missing()) is not None:
            sys.exit(reason)
        for num_ranks in options.ranks:
            keep(options.results, options.rate, measure(options, num_ranks))
    found = json.loads(options.results.read_text())
    print(table(found["rows"]))
    print(bound(found["rows"], found["rate"]))
    draw(found["rows"], found["rate"], options.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
