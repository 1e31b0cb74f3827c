"""Two hosts talk over a link of known rate, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from network.hosts import Host, Hosts, missing

SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, address, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group(
    "gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2, timeout=limit
)
dist.barrier()
start = time.perf_counter()
value = torch.full((size,), rank + 1.0)
dist.all_reduce(value)
print(value.unique().tolist(), time.perf_counter() - start)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def all_reduce(hosts: list[Host], size: int) -> list[tuple[str, float]]:
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        host.start([*command, str(rank), hosts[0].address, str(size)])
        for rank, host in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    parts = [output.strip().splitlines()[-1].rsplit(maxsplit=1) for output in outputs]
    return [(sums, float(seconds)) for sums, seconds in parts]


def test_two_hosts_all_reduce_at_the_rate_of_their_link() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        results = all_reduce(hosts, 500_000)  # 2 MB each way: 0.16 s at 100 Mbit/s
        sent = [host.link_bytes_sent for host in hosts]
    for sums, seconds in results:
        assert sums == "[3.0]"
        assert 0.1 < seconds < 5
    assert all(2_000_000 < count < 2_500_000 for count in sent)


def test_nothing_is_left_even_after_an_error() -> None:
    def namespaces() -> list[str]:
        command = ["ip", "netns", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [line.split()[0] for line in listing.splitlines()]

    names = []

    def fail_inside() -> None:
        with Hosts(2) as hosts:
            names.extend(host.namespace for host in hosts)
            assert set(names) < set(namespaces())
            hosts[0].start(["sleep", "100"])
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert len(names) == 2
    assert not set(names) & set(namespaces())
