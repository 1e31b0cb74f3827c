"""What a step computes on one part, told as the value of the whole graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport

MASKS = {"training": "train_mask", "validating": "val_mask", "testing": "test_mask"}
ALREADY_GLOBAL = object()
"""`sync_dist_group` of values that are the same on all ranks: reducing them would be idle."""


class StepLog:
    """Collects what a step logs on this rank and logs the value over all ranks.

    A mean over the marked nodes of a part counts as much as the part has of the graph's marked
    nodes. Which mask a mean belongs to is read from its name (``"val_acc"``: `val_mask`), else from
    the stage. All values of a step, and its loss, travel in one all-reduce.

    Args:
        log: The module's own `log`.
        transport: Sums over ranks.
    """

    def __init__(self, log: Callable[..., None], transport: Transport) -> None:
        self._log = log
        self._transport = transport
        self._shard: Shard | None = None
        self._last: tuple[str, Shard] | None = None
        self._stage_mask: str | None = None
        self._held: list[tuple[str, Tensor, dict[str, Any]]] = []
        self._shares: dict[tuple[int, str | None], float] = {}

    @contextmanager
    def step(self, stage: str, shard: Shard) -> Iterator[None]:
        """Holds back what is logged inside; `flush` tells it."""
        self._shard, self._stage_mask, self._held = shard, MASKS.get(stage), []
        self._last = stage, shard
        try:
            yield
        finally:
            self._shard, self._held = None, []

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes the place of `LightningModule.log`."""
        plain = options.get("reduce_fx", "mean") in ("mean", "sum", torch.mean) and not args
        if not plain or isinstance(value, Metric) or options.get("rank_zero_only"):
            self._log(name, value, *args, **options)
        elif self._shard is not None:
            self._held.append((name, torch.as_tensor(value).detach(), options))
        elif self._last is not None:  # in a hook after the step, which all ranks run too
            with self.step(*self._last):
                self(name, value, **options)
                self.flush(None, 0.0)
        else:
            self._log(name, value, **options)

    def flush(self, loss: Tensor | None, share: float) -> Tensor | None:
        """Logs what the step held back; returns the loss over all ranks.

        Args:
            loss: This rank's loss, or None.
            share: What this rank's loss counts in the sum over ranks.

        Raises:
            RuntimeError: If some ranks have a loss and others none.
        """
        assert self._shard is not None
        if loss is None and not self._held and self._stage_mask != MASKS["training"]:
            return None  # nothing to tell
        held, self._held = self._held, []
        told = float(loss is not None)
        packed = [self._weighted(value, self._weight(name, how)) for name, value, how in held]
        packed.append(self._weighted(loss, share))
        packed.append(packed[-1].new_tensor(told))
        total = torch.stack(packed)
        self._transport.all_reduce(total)
        if 0 < total[-1] < self._transport.num_ranks:
            raise RuntimeError(
                f"training_step returned a loss on {int(total[-1])} of {self._transport.num_ranks} "
                "ranks: return one on every rank (a part without training nodes counts nothing)"
            )
        for (name, value, options), result in zip(held, total):
            self._tell(name, result.to(value.dtype if value.is_floating_point() else torch.float32), options)
        return None if loss is None else total[-2].to(loss.dtype)

    def share(self, shard: Shard, mask: str | None) -> float:
        """The part's share of the graph's marked nodes; of all nodes without such a mask."""
        key = (id(shard), mask)
        if key not in self._shares:
            self._shares[key] = _share(shard, mask)
        return self._shares[key]

    def _tell(self, name: str, value: Tensor, options: dict[str, Any]) -> None:
        options = {"batch_size": 1, **options}
        options.update(sync_dist=True, sync_dist_group=ALREADY_GLOBAL)
        self._log(name, value, **options)

    def _weight(self, name: str, options: dict[str, Any]) -> float:
        if options.get("reduce_fx") == "sum":
            return 1.0
        assert self._shard is not None
        named = [f"{word}_mask" for word in re.split(r"[^a-zA-Z0-9]", name)]
        known = [mask for mask in (*named, self._stage_mask) if mask in self._shard.mask_counts]
        return self.share(self._shard, known[0] if known else None)

    def _weighted(self, value: Tensor | None, weight: float) -> Tensor:
        """`value * weight`, and 0 where nothing counts: the mean over no node is not a number."""
        assert self._shard is not None
        device = self._shard.edge_index.device
        if value is None or not weight:
            return torch.zeros((), dtype=torch.float64, device=device)
        return value.detach().to(device, torch.float64).squeeze() * weight


def _share(shard: Shard, mask: str | None) -> float:
    if mask is None or mask not in shard.mask_counts:
        return shard.plan.num_owned / shard.num_nodes
    local = int(shard.node[mask].sum())
    return local / shard.mask_counts[mask] if local else 0.0
