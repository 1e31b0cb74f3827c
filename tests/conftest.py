"""What every test gets: one thread, and a check that it leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from ranks import server_pids

# Variables that other libraries set for good.
FOREIGN = {
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "RANK",
    "TF2_BEHAVIOR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WORLD_SIZE",
}

hypothesis.settings.register_profile("sylvie", deadline=None, print_blob=True)
hypothesis.settings.load_profile("sylvie")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_leaked_processes() -> Iterator[None]:
    before = _descendants()
    yield
    deadline = time.monotonic() + 2
    while leaked := _descendants().keys() - before.keys() - server_pids():
        if time.monotonic() > deadline:
            names = [f"{pid} ({_descendants().get(pid, 'gone')})" for pid in sorted(leaked)]
            pytest.fail(f"the test leaves processes running: {', '.join(names)}")
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if leaked := sorted(names - FOREIGN):
        pytest.fail(f"the test leaves environment variables changed: {', '.join(leaked)}")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real graphs, named by the environment variable SYLVIE_DATA."""
    folder = os.environ.get("SYLVIE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set SYLVIE_DATA to the folder of real graphs")
    return Path(folder)


def _descendants() -> dict[int, str]:
    """Running processes below this one, with their names (Linux only; elsewhere none)."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue  # ended meanwhile
        state, above = tail.split()[:2]
        if state not in "ZX":
            pid = int(stat.parent.name)
            parents[pid], names[pid] = int(above), head.partition("(")[2]
    found: dict[int, str] = {}
    for pid, ancestor in parents.items():
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            found[pid] = names[pid]
    return found
