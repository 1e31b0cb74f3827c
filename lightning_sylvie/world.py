"""The ranks' own groups beside Lightning's: how they are made, and how they end after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_sylvie.transport import PeerError, Transport, connect
from lightning_sylvie.transport.failure import is_echo


def connect_own(num_transports: int, timeout: timedelta) -> list[Transport]:
    """Transports on groups of their own; Lightning's serves its own collectives only."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    groups = (None if alone else dist.new_group(timeout=timeout) for _ in range(num_transports))
    return [connect(group, timeout=timeout) for group in groups]


def end_all(transports: Sequence[Transport], exception: BaseException) -> None:
    """Gives up this rank's connections after an error, and names the rank at fault in it.

    The other ranks may wait in an exchange or in a collective of Lightning's own (a barrier, the
    broadcast after every batch), which knows no reasons: an error that only says that a connection
    is gone gets the reason in front. Safe to call twice. The processes then have no connections
    left: they can't train together again, start them anew.
    """
    _leave_world()
    if is_echo(exception) and not isinstance(exception, PeerError) and transports:
        try:
            transports[-1].all_reduce(torch.zeros(1, device=transports[-1].device))
        except PeerError as error:
            exception.args = (f"{error}\n{exception}",)
    for transport in transports:
        transport.report_failure(exception)


def _leave_world() -> None:
    """Closes Lightning's own group, so that nobody waits in it for this rank.

    NCCL's is left to its watchdog: to destroy it would wait for the collective that has failed.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
