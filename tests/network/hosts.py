"""Hosts that share a kernel but no network: one namespace each, joined by a bridge.

::

    with Hosts(2, rate="100mbit") as hosts:
        first = hosts[0].start(["torchrun", ..., f"--master-addr={hosts[0].address}"])

The bridge lives in a namespace of its own, so nothing is added to the machine's network. Every
link is shaped at both ends (up and down) with a token bucket; delay is not emulated, as many
kernels lack netem. Names carry this process's id, and only what was made here is removed. Linux,
root and iproute2 are needed: see `missing`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

INTERFACE = "eth0"  # of every host; gloo is told to use it
_counter = itertools.count()


def missing() -> str | None:
    """Why hosts cannot be made on this machine, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "iproute2 (ip, tc) is not installed"
    name = f"sylvie-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine does not let root make network namespaces"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


class Host:
    """One host: commands run in its network."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command with its output in a pipe; it is killed when the hosts are removed."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})},
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    @property
    def link_bytes_sent(self) -> int:
        """Bytes this host has put on its link, headers included."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self.namespace, "cat", path))


class Hosts:
    """`num_hosts` hosts at 10.77.0.1, 10.77.0.2, …, as a context manager.

    Args:
        num_hosts: Hosts, at most 200.
        rate: Of every link in each direction, as `tc` writes it, such as "1gbit"; None: unlimited.
    """

    def __init__(self, num_hosts: int, *, rate: str | None = None) -> None:
        self._prefix = f"sylvie-{os.getpid()}-{next(_counter)}"
        self._num_hosts = num_hosts
        self._rate = rate
        self._namespaces: list[str] = []
        self._hosts: list[Host] = []

    def __enter__(self) -> list[Host]:
        try:
            bridge = self._add_namespace("bridge")
            _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", bridge, "link", "set", "bridge", "up")
            for index in range(self._num_hosts):
                self._add_host(bridge, index)
        except BaseException:
            self._remove()
            raise
        return self._hosts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _add_namespace(self, suffix: str) -> str:
        name = f"{self._prefix}-{suffix}"
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def _add_host(self, bridge: str, index: int) -> None:
        name, port = self._add_namespace(str(index)), f"port{index}"
        peer = ("peer", "name", port, "netns", bridge)
        _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", *peer)
        host = Host(name, f"10.77.0.{index + 1}")
        _run("ip", "-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-n", bridge, "link", "set", port, "master", "bridge")
        for namespace, device in [(name, INTERFACE), (bridge, port)]:
            if self._rate is not None:
                shape = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)
            _run("ip", "-n", namespace, "link", "set", device, "up")
        self._hosts.append(host)

    def _remove(self) -> None:
        for host in self._hosts:
            for process in host.processes:
                _end(process)
        for name in self._namespaces:
            _run("ip", "netns", "delete", name)
        self._namespaces.clear()


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a command, and whatever it started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
