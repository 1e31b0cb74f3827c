"""Runs a plain function in several real ranks: one process each, gloo, one torch thread.

Processes are forked from a server that has imported torch and PyG once, so a run of four ranks
costs a fraction of a second. A body is a module-level function of a test module::

    def sum_of_ranks() -> int:
        value = torch.tensor(dist.get_rank())
        dist.all_reduce(value)
        return int(value)

    def test_sum() -> None:
        assert run_ranks(sum_of_ranks, 4) == [6, 6, 6, 6]

Ranks see the environment and the warning filters of the test that starts them. Rank 0 serves the
store, as it does under torchrun. All ranks share one hash seed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch_geometric.nn",
    "lightning_sylvie",
    "pytest",
    "hypothesis",
]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GRACE = 3.0  # seconds the other ranks get to report after the first failure


@dataclass
class Outcome:
    """How one rank ended: a value, or an error (a traceback, a death or a stack dump)."""

    rank: int
    value: Any = None
    error: str | None = None
    seconds: float = 0.0  # from the start of all ranks to this rank's report
    output: str = ""  # what it wrote to stdout and stderr
    reported: bool = False


def run_ranks(
    body: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """The value that `body(*args)` returns on every rank, in rank order.

    Args:
        body: A module-level function; it runs with the gloo world initialised.
        num_ranks: Processes to start.
        args: Picklable; copied to every rank.
        timeout: Seconds until ranks that have not returned are ended.

    Raises:
        AssertionError: If a rank raises, dies or does not return: with every rank's traceback.
    """
    outcomes = rank_outcomes(body, num_ranks, *args, timeout=timeout, grace=GRACE)
    if any(outcome.error for outcome in outcomes):
        raise AssertionError(_report(body, outcomes))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    body: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float | None = None,
    num_hung: int = 0,
) -> list[Outcome]:
    """How each rank ended, without raising; for tests of failures.

    A rank whose body has raised stays alive, as an interactive session would, until all ranks have
    reported. `grace` shortens the time limit to that many seconds after the first failure;
    `num_hung` ranks are ended without a report once all others have given theirs.
    """
    task = pickle.dumps((body, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(num_ranks)]
        processes, pipes = _start(task, logs)
        try:
            outcomes = _collect(processes, pipes, timeout, grace, num_hung)
        finally:
            _end(processes, pipes)
        for outcome, log in zip(outcomes, logs, strict=True):
            outcome.output = log.read_text(errors="replace") if log.exists() else ""
    return outcomes


def server_pids() -> set[int]:
    """Processes that serve all tests of the session and outlive each of them."""
    pids = (
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    )
    return {pid for pid in pids if pid is not None}


def _start(
    task: bytes, logs: Sequence[Path]
) -> tuple[list[ForkServerProcess], list[Connection[Any, Any]]]:
    context = multiprocessing.get_context("forkserver")
    _start_server(context)
    processes, pipes = [], []
    for rank, log in enumerate(logs):
        here, there = context.Pipe()
        setting = (dict(os.environ) | ONE_THREAD, list(sys.path), list(warnings.filters))
        process = context.Process(
            target=_rank_main, args=(task, rank, len(logs), there, str(log), pickle.dumps(setting))
        )
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return processes, pipes


def _start_server(context: Any) -> None:
    """Starts the server with one thread per library: a pool of threads would not survive a fork."""
    context.set_forkserver_preload(PRELOADED)
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(
    processes: Sequence[ForkServerProcess],
    pipes: Sequence[Connection[Any, Any]],
    timeout: float,
    grace: float | None,
    num_hung: int,
) -> list[Outcome]:
    start = time.monotonic()
    deadline = start + timeout
    outcomes = [Outcome(rank) for rank in range(len(pipes))]
    waiting = dict(zip(pipes, outcomes, strict=True))
    while len(waiting) > num_hung and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(pipe, Connection)
            outcome = waiting[pipe]
            try:
                kind, payload = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = processes[outcome.rank]
                process.join(5)
                kind, payload = "died", _death(process.exitcode)
            if kind == "port":
                for other in pipes[1:]:
                    _tell(other, payload)
                continue
            outcome.reported = kind != "died"
            outcome.seconds = time.monotonic() - start
            if kind == "value":
                outcome.value = pickle.loads(payload)
            else:
                outcome.error = payload
                deadline = min(deadline, time.monotonic() + grace) if grace else deadline
            del waiting[pipe]
    _dump(processes, list(waiting.values()), time.monotonic() - start)
    return outcomes


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"process ended with exit code {exitcode} before its body returned"


def _dump(processes: Sequence[ForkServerProcess], hung: Sequence[Outcome], seconds: float) -> None:
    """Has every hung rank write its stacks to its log, then kills it."""
    for outcome in hung:
        outcome.error = f"no answer after {seconds:.1f} s; its stacks are in its output"
        outcome.seconds = seconds
        pid = processes[outcome.rank].pid
        if pid is not None and processes[outcome.rank].is_alive():
            os.kill(pid, signal.SIGUSR1)
    if hung:
        time.sleep(0.5)
    for outcome in hung:
        processes[outcome.rank].kill()


def _end(processes: Sequence[ForkServerProcess], pipes: Sequence[Connection[Any, Any]]) -> None:
    for pipe in pipes:
        _tell(pipe, "end")
    deadline = time.monotonic() + 5
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


def _tell(pipe: Connection[Any, Any], value: object) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its own pipe reports that
        pipe.send(value)


def _report(body: Callable[..., Any], outcomes: Sequence[Outcome]) -> str:
    lines = [f"{body.__name__} failed on {len(outcomes)} ranks"]
    for outcome in outcomes:
        state = "ok" if outcome.error is None else outcome.error.rstrip()
        lines.append(f"---- rank {outcome.rank}, {outcome.seconds:.1f} s ----\n{state}")
        if outcome.output.strip():
            lines.append(f"output of rank {outcome.rank}:\n{outcome.output.rstrip()}")
    return "\n".join(lines)


def _rank_main(
    task: bytes, rank: int, num_ranks: int, pipe: Connection[Any, Any], log: str, setting: bytes
) -> None:
    """One rank: init, run the body, report, wait until all have reported, destroy the groups."""
    output = open(log, "wb", buffering=0)  # noqa: SIM115 (open as long as the process lives)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the server, which ends with pytest
    try:
        _apply(setting)
        body, args = pickle.loads(task)
        _connect(rank, num_ranks, pipe)
        pipe.send(("value", pickle.dumps(body(*args))))
    except BaseException:  # pytest.fail and SystemExit are reported too
        pipe.send(("error", traceback.format_exc()))
    try:
        pipe.recv()
    except EOFError:
        return
    if dist.is_initialized():
        dist.destroy_process_group()


def _apply(setting: bytes) -> None:
    environment, path, filters = pickle.loads(setting)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def _connect(rank: int, num_ranks: int, pipe: Connection[Any, Any]) -> None:
    """Rank 0 takes a free port and serves the store there; the starter passes the port on."""
    limit = timedelta(seconds=60)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, num_ranks, True, limit, wait_for_workers=False)
        pipe.send(("port", store.port))
    else:
        store = TCPStore("127.0.0.1", pipe.recv(), num_ranks, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
