"""From a process group to the transport that suits it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_sylvie.transport.all_to_all import AllToAll
from lightning_sylvie.transport.loopback import Loopback
from lightning_sylvie.transport.point_to_point import PointToPoint
from lightning_sylvie.transport.transport import Transport


def connect(group: ProcessGroup | None, *, timeout: timedelta) -> Transport:
    """The transport for a process group, which belongs to it from now on.

    Args:
        group: A group made for this purpose alone, as in ``connect(dist.new_group(...), ...)``.
            Keep no other reference to it: gloo closes its connections, and thereby wakes the
            other ranks, only when the last reference is gone. None for a single process.
        timeout: The longest wait for another rank. Make the group with the same value.

    Raises:
        ValueError: If the group's backend is neither gloo nor nccl.
    """
    if group is None or group.size() == 1:
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(f"expected a group for {dist.get_world_size()} ranks, got None")
        if group is not None:
            dist.destroy_process_group(group)
        return Loopback()
    backend = dist.get_backend(group)
    if backend == "gloo":
        return PointToPoint(group, timeout=timeout)
    if backend == "nccl":
        return AllToAll(group, timeout=timeout)
    raise ValueError(f'expected a process group of backend "gloo" or "nccl", got "{backend}"')
