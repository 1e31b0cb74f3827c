"""Every example and benchmark runs, with small arguments, as a user runs it."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from network.hosts import missing
from torch_geometric.data import Data
from wandb_log import history

from lightning_sylvie.runlog import read_scalars

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs an example in an empty folder, with a cache of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / arguments[0]), *arguments[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_demo_compares_one_process_with_two_and_says_nothing_else(tmp_path: Path) -> None:
    done = run(tmp_path, "demo.py", "--epochs", "4")
    rows = [line for line in done.stdout.splitlines() if "process" in line]
    assert [row.split("process")[0].strip() for row in rows] == ["one", "2"]
    bars = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    assert all("process" in line and "epoch" in line for line in bars), done.stderr
    assert any("train_loss=" in line for line in bars)
    assert list(tmp_path.glob("lightning_logs/demo/version_0/events.out.tfevents.*"))
    assert list(tmp_path.glob("cache/lightning_sylvie/parts/*"))


def test_demo_takes_a_saved_graph_with_several_labels_per_node(tmp_path: Path) -> None:
    edges = torch.randint(60, (2, 300))
    graph = Data(x=torch.rand(60, 5), edge_index=edges, y=(torch.rand(60, 3) < 0.5).float())
    torch.save(graph, tmp_path / "graph.pt")
    done = run(tmp_path, "demo.py", "--epochs", "2", "--dataset", "graph.pt")
    assert "60 nodes, 300 edges, 5 features" in done.stdout


def test_demo_takes_a_dataset_by_name(tmp_path: Path, data_root: Path) -> None:
    done = run(tmp_path, "demo.py", "--epochs", "2", "--hidden", "8", "--dataset", "computers")
    assert "13752 nodes, 491722 edges, 767 features" in done.stdout


def test_demo_names_datasets_when_it_does_not_know_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"expected a file or a dataset, such as .*Photo"):
        run(tmp_path, "demo.py", "--dataset", "Fotos")


def test_one_line_makes_a_script_of_one_device_one_of_several(tmp_path: Path) -> None:
    names = "side_by_side/one_device.py", "side_by_side/several_devices.py"
    one, several = ((EXAMPLES / name).read_text().splitlines() for name in names)
    changes = [line for line in difflib.ndiff(one, several) if line[0] in "+-" and line[1:].strip()]
    assert changes == [
        "+ from lightning_sylvie import SylvieStrategy",
        "+     strategy=SylvieStrategy(),",
        "-     devices=1,",
        "+     devices=2,",
    ]
    expected, found = (accuracy(run(tmp_path, name).stdout) for name in names)
    assert expected > 0.8
    assert abs(found - expected) < 0.03


def accuracy(output: str) -> float:
    """The test accuracy in Lightning's table."""
    (value,) = re.findall(r"test_acc\W+([0-9.]+)", output)
    return float(value)


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    options = {"timeout": 200, "resources": {"metadata": {"path": str(tmp_path)}}}
    with warnings.catch_warnings():  # of Jupyter's own packages
        warnings.simplefilter("ignore")
        NotebookClient(notebook, kernel_name="python3", **options).execute()
    printed = [out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", [])]
    (value,) = re.findall(r"test accuracy: ([0-9.]+) %", "".join(printed))
    assert float(value) > 80


def test_own_module_on_one_device(tmp_path: Path) -> None:
    done = run(tmp_path, "bring_your_own_module.py", "--epochs", "2")
    assert "test accuracy of the gathered predictions" in done.stdout


def test_own_module_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(
        tmp_path, "bring_your_own_module.py", "--epochs", "2", "--devices", "2", launcher=launcher
    )
    assert done.stdout.count("test accuracy of the gathered predictions") == 1


def test_inductive(tmp_path: Path) -> None:
    assert (
        "test accuracy on the whole graph" in run(tmp_path, "inductive.py", "--epochs", "2").stdout
    )


def test_multi_label(tmp_path: Path) -> None:
    assert "test micro-F1" in run(tmp_path, "multi_label.py", "--epochs", "2").stdout


def test_resume(tmp_path: Path) -> None:
    done = run(tmp_path, "resume.py", "--devices", "1", "--epochs", "4")
    assert done.stdout.rstrip().endswith(": equal")


def test_weights_and_biases_holds_what_the_table_holds(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run(tmp_path, "weights_and_biases.py", "--epochs", "12")
    assert re.search(r"the last epoch: [\d.]+ kB/epoch \d+% hidden", done.stdout)
    table = read_scalars(tmp_path / "traffic")
    rows = [row for row in history(tmp_path) if "halo/bytes" in row]
    assert [row["trainer/global_step"] for row in rows] == [*range(12)]
    assert [row["epoch"] for row in rows] == [*range(12)]
    ages = [row["halo/model.convs.1/backward/age"] for row in rows]
    assert ages == [0, *[1] * 9, 0, 1]
    for name, (_, values) in table.items():
        if name.startswith(("halo/", "time/")):
            assert [row[name] for row in rows if name in row] == pytest.approx(values), name


def test_launch_script_of_torchrun(tmp_path: Path) -> None:
    """What it runs, with a torchrun that says so: torchrun itself is in the tests above."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [str(EXAMPLES / "launch/torchrun.sh"), "one", "2", "4", "--epochs", "3"]
    printed = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    ).stdout
    assert "--nnodes 2 --nproc-per-node 4" in printed
    assert "--rdzv-endpoint one:29500" in printed
    assert printed.rstrip().endswith("--nodes 2 --devices 4 --epochs 3")


def test_overhead_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(
        tmp_path,
        "benchmarks/overhead/main.py",
        "--epochs",
        "150",
        "--rounds",
        "1",
        "--results",
        str(results),
    )
    assert "times everything off" in done.stdout
    assert set(json.loads(results.read_text())) == {"linear", "GraphSAGE"}


def test_traffic_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(
        tmp_path, "benchmarks/overhead/traffic.py", "--nodes", "400", "--hidden", "8",
        "--pairs", "1", "--results", str(results),
    )  # fmt: skip
    assert done.stdout.count("% wanted: ") == 4
    found = json.loads(results.read_text())
    assert len(found["async"]["cpu on"]) == len(found["async"]["cpu off"]) == 1


def test_compute_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(
        tmp_path, "benchmarks/compute/main.py", "--dataset", "", "--epochs", "1", "--rounds", "1",
        "--ranks", "2", "--results", str(results),
    )  # fmt: skip
    assert "GCN: one rank no slower than PyG" in done.stdout
    ranks = json.loads(results.read_text())["GCN"]["2 ranks"]
    assert (ranks["owned"], ranks["edges"]) == (8000, 96000)


def test_accuracy_benchmark_goes_on_where_it_stopped(tmp_path: Path, data_root: Path) -> None:
    results = tmp_path / "results.json"
    command = (
        "benchmarks/accuracy/main.py", "--graphs", "PubMed", "--seeds", "0", "--ranks", "2",
        "--epochs", "2", "--results", str(results),
    )  # fmt: skip
    assert "| PubMed |" in run(tmp_path, *command).stdout
    kept = json.loads(results.read_text())
    kept["PubMed, seed 0, 1 ranks"]["test"] = 0.1234
    results.write_text(json.dumps(kept))
    assert "PubMed, seed 0, 1 ranks: test 12.34 %" in run(tmp_path, *command).stdout


def test_low_bit_benchmark(tmp_path: Path, data_root: Path) -> None:
    results = tmp_path / "results.json"
    small = "--models", "GCN", "--seeds", "0", "--ranks", "2", "--epochs", "35"
    command = "benchmarks/low_bit/main.py", "--layers", "2", "--graphs", "Photo", *small
    done = run(tmp_path, *command, "--codes", "32", "minmax 1", "--results", str(results))
    assert "| Photo | 2 GCN | minmax 1 | 1 | " in done.stdout
    full, coded = json.loads(results.read_text()).values()
    assert full["row_error"] == 0 < coded["row_error"]


def test_staleness_benchmark(tmp_path: Path, data_root: Path) -> None:
    results = tmp_path / "results.json"
    small = "--models", "GCN", "--seeds", "0", "--ranks", "2", "--epochs", "10"
    ways = "--ways", "sync, 32 bits", "async, 32 bits", "async, 1 bit, eps_s=2"
    command = "benchmarks/staleness/main.py", "--graphs", "Photo", *small, *ways
    run(tmp_path, *command, "--results", str(results))
    found = json.loads(results.read_text()).values()
    assert len({round(each["loss"], 4) for each in found}) == 3  # none is another's computation
    assert all(len(each["curve"]) == 2 for each in found)
    assert results.with_suffix(".png").exists()


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_all_reduce_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(
        tmp_path, "benchmarks/all_reduce/main.py",
        "--ranks", "2", "--sizes", "4000", "16000000", "--rate", "1gbit", "--results", str(results),
    )  # fmt: skip
    assert "| rabenseifner | " in done.stdout
    assert "ring, 2 ranks, 16 MB: " in done.stdout
    rows = json.loads(results.read_text())["rows"]
    assert len(rows) == 2 * 7
    assert all(row["seconds"] and row["predicted"] > 0 for row in rows)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_epoch_time_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run(
        tmp_path, "benchmarks/epoch_time/main.py", "--dataset", "", "--width", "16",
        "--epochs", "3", "--rounds", "1", "--num-hosts", "2", "--rates", "1gbit",
        "--results", str(results),
    )  # fmt: skip
    assert "| async, 1 bit, communication skipped |" in done.stdout
    (row,) = json.loads(results.read_text())
    modes = row["modes"]
    assert all(len(found["seconds"]) == 3 for found in modes.values())
    assert 0 < 5 * modes["sync, 1 bit"]["bytes"] < modes["sync, 32 bits"]["bytes"]
