"""Every way to start the ranks, as a user's script in processes of its own.

None of them runs inside pytest: popen would start the whole test session again in each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from trainers import small_graph

from lightning_sylvie import SylvieStrategy

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 120.0  # seconds; hangs are ended by it


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """A process group of its own, so that nothing of it is left."""
    launchers = ("SLURM", "MASTER", "RANK", "WORLD", "LOCAL", "NODE", "PL_", "TORCHELASTIC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.Popen(
        command,
        env=kept,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Exit codes and what all of them wrote."""
    output = ""
    try:
        for process in processes:
            output += process.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"hangs after {LIMIT} s:\n{output}{error.output!r}")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [process.returncode for process in processes], output


def results(*processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What the ranks printed, by rank."""
    codes, output = finish(*processes)
    assert codes == [0] * len(codes), output
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return sorted(found, key=lambda result: result["rank"])


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / script), *arguments]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("one"))
    command = python("train.py", "--devices", "1", "--strategies", "auto", "--folder", folder)
    (found,) = results(start(command))
    return found


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], num_ranks: int) -> None:
    assert [result["rank"] for result in found] == list(range(num_ranks))
    for result in found:
        assert result["world"] == num_ranks
        assert result.keys() == expected.keys()
        for name in result.keys() - {"rank", "world"}:
            assert result[name] == pytest.approx(expected[name], rel=1e-9), name


def test_script(one_device: dict[str, Any], tmp_path: Path) -> None:
    """popen: the script runs once for each device, with all four calls of the Trainer."""
    found = results(start(python("train.py", "--folder", str(tmp_path))))
    assert_same(found, one_device, 2)


def test_torchrun(one_device: dict[str, Any], tmp_path: Path) -> None:
    """By name; a spawn strategy under torchrun would start every rank twice and hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(SCRIPTS / "train.py"), "--folder", str(tmp_path)]
    command += ["--strategies", "sylvie,sylvie_spawn"]
    found = results(start(command, XDG_CACHE_HOME=str(tmp_path)))
    assert_same(found[::2], one_device, 2)
    assert_same(found[1::2], one_device, 2)


def test_slurm(one_device: dict[str, Any], tmp_path: Path) -> None:
    """The variables that srun sets, on two tasks of one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = python("train.py", "--folder", str(tmp_path))
    tasks = [
        start(command, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **slurm)
        for rank in range(2)
    ]
    assert_same(results(*tasks), one_device, 2)


@pytest.mark.parametrize(
    ("flags", "strategies"), [((), "sylvie_spawn,sylvie_fork"), (("-i",), "sylvie_notebook")]
)
def test_processes_of_multiprocessing(
    one_device: dict[str, Any], tmp_path: Path, flags: tuple[str, ...], strategies: str
) -> None:
    """By name, after the import; ``-i`` is what an interactive session looks like to Lightning.

    The weights come back into a model of single precision.
    """
    arguments = ("--strategies", strategies, "--folder", str(tmp_path))
    interpreter, *rest = python("train.py", *arguments)
    found = results(start([interpreter, *flags, *rest], XDG_CACHE_HOME=str(tmp_path)))
    assert len(found) == len(strategies.split(","))
    for result in found:
        assert result["weights"] == pytest.approx(one_device["weights"], rel=1e-6)
        if "test" in result:
            assert result["test"] == pytest.approx(one_device["test"], rel=1e-6)


def test_a_failing_rank_ends_the_script_with_its_reason(tmp_path: Path) -> None:
    codes, output = finish(start(python("train.py", "--folder", str(tmp_path), "--fail")))
    assert codes != [0]
    assert "ArithmeticError: the third epoch is cursed" in output
    assert "rank 1 failed: ArithmeticError: the third epoch is cursed" in output


def test_command_line(tmp_path: Path) -> None:
    """Class paths and their options, written to YAML and read back, on two ranks."""
    pytest.importorskip("jsonargparse")
    torch.save(small_graph(torch.float32), tmp_path / "graph.pt")
    options = [
        "--model=lightning_sylvie.SylvieModule",
        "--model.model=torch_geometric.nn.GraphSAGE",
        "--model.model.in_channels=6",
        "--model.model.hidden_channels=16",
        "--model.model.num_layers=2",
        "--model.model.out_channels=4",
        f"--data.data={tmp_path}/graph.pt",
        "--trainer.strategy.bits=1",
        "--trainer.strategy.exchange=input",
        "--trainer.strategy.partition=random",
        f"--trainer.strategy.cache_dir={tmp_path}/parts",
        f"--trainer.default_root_dir={tmp_path}/run",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.max_epochs=1",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
    ]
    command = [sys.executable, "-m", "lightning_sylvie", "fit"]
    config = tmp_path / "config.yaml"
    codes, output = finish(start([*command, *options, "--print_config"]))
    assert codes == [0], output
    config.write_text(output)
    codes, output = finish(start([*command, "--config", str(config)]))
    assert codes == [0], output
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in output
    strategy = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_sylvie.SylvieStrategy"
    chosen = {"bits": 1, "exchange": "input", "partition": "random"}
    assert chosen.items() <= strategy["init_args"].items()
    assert list((tmp_path / "parts").glob("2-*"))


def test_names_are_registered_once() -> None:
    """A second import, as in a reloaded notebook, is no error."""
    SylvieStrategy.register_strategies(StrategyRegistry)
    names = {name for name in StrategyRegistry if name.startswith("sylvie")}
    assert names == {"sylvie", "sylvie_spawn", "sylvie_fork", "sylvie_notebook"}
