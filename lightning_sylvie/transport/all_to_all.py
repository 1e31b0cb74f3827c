"""Exchange by one collective, for NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lightning_sylvie.transport.group import GroupTransport, Transfer


@final
class AllToAll(GroupTransport):
    """One `all_to_all_single` with uneven parts per exchange; NCCL pairs the sends itself.

    Waiting makes the current stream wait, not the process: rows and message belong to the current
    stream again after it, so the caching allocator may reuse the message's memory. The limit on
    waits is the group's own: its watchdog ends the work, and the next call on the group raises.
    """

    def _post(
        self, transfer: Transfer, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> None:
        def post(group: ProcessGroup) -> Work:
            work: Work = dist.all_to_all_single(
                transfer.rows,
                transfer.message,
                list(recv_counts),
                list(send_counts),
                group=group,
                async_op=True,
            )
            return work

        transfer.peers.append(None)
        transfer.works.append(self.guard(post, None, transfer.name))

    def _wait(self, transfer: Transfer) -> None:
        self.guard(lambda _: transfer.works[0].wait(), None, transfer.name)

    def _release(self, *, failed: bool) -> None:
        if failed and self._group is not None and self.device.type == "cuda":
            self._group.abort()  # shutting down would wait for the collective that has failed
        super()._release(failed=failed)
