"""Two hosts talk over a link of known rate, both ways at once, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from network.hosts import Host, Hosts, missing

ALL_REDUCE = """
value = torch.full((size,), rank + 1.0)
measure(lambda: dist.all_reduce(value))
assert value.unique().tolist() == [3.0]
"""
EXCHANGE = """
from lightning_sylvie.transport import connect
transport = connect(dist.new_group(timeout=limit), timeout=limit)
message = torch.full((size, 4), rank, dtype=torch.uint8)
counts = [0 if peer == rank else size for peer in range(2)]
for late in (0, 1):  # a rank that comes late must not cost the other direction its place
    measure(lambda: transport.exchange(message, counts, counts), late == rank)
transport.close()
"""
SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, address, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=60)
dist.init_process_group(
    "gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2, timeout=limit
)

def measure(action, late=False):
    dist.barrier()
    start = time.perf_counter()
    time.sleep(0.02 * late)
    action()
    print("seconds", time.perf_counter() - start)

exec(sys.argv[4])
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def seconds_taken(hosts: list[Host], part: str, size: int) -> list[float]:
    """Of each measured action, the seconds of the slower host."""
    processes = [
        host.start([sys.executable, "-c", SCRIPT, str(rank), hosts[0].address, str(size), part])
        for rank, host in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    times = [
        [float(line.split()[1]) for line in output.splitlines() if line.startswith("seconds")]
        for output in outputs
    ]
    return [max(pair) for pair in zip(*times, strict=True)]


def test_two_hosts_all_reduce_at_the_rate_of_their_link() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        (seconds,) = seconds_taken(hosts, ALL_REDUCE, 500_000)  # 2 MB: 0.16 s at 100 Mbit/s
        sent = [host.link_bytes_sent for host in hosts]
    assert 0.1 < seconds < 5
    assert all(2_000_000 < count < 2_500_000 for count in sent)


def test_an_exchange_uses_both_directions_of_the_link_at_once() -> None:
    """gloo's own all-to-all, and sends posted before receives, take 2.1 times the line's time."""
    with Hosts(2, rate="50mbit") as hosts:
        times = seconds_taken(hosts, EXCHANGE, 1_250_000)  # 5 MB each way: 0.8 s at 50 Mbit/s
    assert max(times) < 1.3


def test_nothing_is_left_even_after_an_error() -> None:
    def namespaces() -> list[str]:
        command = ["ip", "netns", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [line.split()[0] for line in listing.splitlines()]

    names: list[str] = []

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
