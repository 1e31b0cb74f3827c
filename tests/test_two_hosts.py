"""Two hosts that share no folder train as one host does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from network.hosts import Hosts, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SCRIPT = """
import json, sys
import lightning as L, torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from lightning_sylvie import GraphDataModule, SylvieModule, SylvieStrategy

devices, num_nodes, cache, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
draw = torch.Generator().manual_seed(0)
graph = Data(
    x=torch.randn(200, 8, generator=draw, dtype=torch.float64),
    edge_index=torch.randint(200, (2, 1200), generator=draw),
    y=torch.randint(3, (200,), generator=draw),
)
L.seed_everything(1, verbose=False)
module = SylvieModule(GraphSAGE(8, 16, num_layers=2, out_channels=3))
cut = SylvieStrategy(bits=32, partition="random", cache_dir=cache)
strategy = cut if devices * num_nodes > 1 else "auto"
trainer = L.Trainer(
    accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, max_epochs=5,
    precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, GraphDataModule(graph))
weights = [p.detach().flatten().tolist() for p in module.parameters()]
scores = trainer.predict(module, GraphDataModule(graph))[0].tolist()
if trainer.is_global_zero:
    with open(result, "w") as file:
        json.dump([weights, scores], file)
"""


def train_alone(folder: Path) -> list[list[list[float]]]:
    """Weights and predictions after training in one process."""
    result = folder / "alone.json"
    arguments = ["1", "1", str(folder / "unused"), str(result)]
    command = [sys.executable, str(folder / "script.py"), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return json.loads(result.read_text())


def train_on_two_hosts(folder: Path) -> list[list[list[float]]]:
    """The same with two ranks on each of two hosts, each with a cache folder of its own."""
    result = folder / "hosts.json"
    with Hosts(2, rate="100mbit") as hosts:
        processes = []
        for number, host in enumerate(hosts):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            launch += ["--nproc-per-node=2", f"--node-rank={number}", "--master-port=29501"]
            launch += [f"--master-addr={hosts[0].address}", str(folder / "script.py")]
            arguments = ["2", "2", str(folder / f"cache{number}"), str(result)]
            processes.append(host.start([*launch, *arguments]))
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return json.loads(result.read_text())


def test_two_hosts_agree_with_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found, expected = train_on_two_hosts(tmp_path), train_alone(tmp_path)
    sent = sorted(path.name for path in (tmp_path / "cache1").glob("*/shard*"))
    assert sent == ["shard-2.pt", "shard-3.pt"], "the second host got its own parts, no others"
    for kind in (0, 1):
        for found_rows, expected_rows in zip(found[kind], expected[kind], strict=True):
            assert found_rows == pytest.approx(expected_rows, rel=1e-9, abs=1e-12)
