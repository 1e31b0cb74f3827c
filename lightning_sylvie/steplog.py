"""What a step logs on one part, told as the value of the whole graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport

MASKS = {"training": "train_mask", "validating": "val_mask", "testing": "test_mask"}
ALREADY_GLOBAL = object()
"""`sync_dist_group` of values that are the same on all ranks: reducing them would be idle."""

_GLOBAL = {"sync_dist": True, "sync_dist_group": ALREADY_GLOBAL}
_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


@dataclass(frozen=True)
class _Entry:
    """A value under its name: what `log` was given."""

    value: Tensor
    options: dict[str, Any]

    @property
    def recipe(self) -> tuple[torch.dtype, dict[str, Any]]:
        """What a rank that did not log it needs, to tell it too."""
        dtype = self.value.dtype if self.value.is_floating_point() else torch.float32
        return dtype, {**self.options, "sync_dist_group": None}


class StepLog:
    """Collects what a step logs on this rank and logs the value over all ranks.

    A mean over the marked nodes of a part counts as much as the part has of the graph's marked
    nodes. Which mask a mean belongs to is read from its name (``"val_acc"``: `val_mask`), else from
    the hook that logs it. All values of a step, and its loss, travel in one all-reduce. The ranks
    agree on the names once; a rank that skips a value, as it has no node for it, is told it. A
    rank that is alone holds nothing back: its values are the graph's.

    Args:
        module: Whose `log` this one takes the place of.
        transport: Sums over ranks.

    Attributes:
        carried: The sums over ranks of the riders of the last `flush`.
    """

    def __init__(self, module: LightningModule, transport: Transport) -> None:
        self._module, self._log = module, module.log
        self._transport, self._alone = transport, transport.num_ranks == 1
        self.carried = 0.0, 0.0
        self._stage: str | None = None
        self._shards: dict[str, Shard] = {}
        self._held: dict[str, _Entry] = {}
        self._agreed: dict[str, dict[str, tuple[torch.dtype, dict[str, Any]]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> StepLog:
        return self  # the ranks' connections are not copied with a module

    @contextmanager
    def step(self, stage: str, shard: Shard) -> Iterator[None]:
        """Holds back what is logged inside; `flush` tells it."""
        self._stage, self._held = stage, {}
        self._shards[stage] = shard
        try:
            yield
        finally:
            self._stage, self._held = None, {}

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes the place of `LightningModule.log`."""
        # An epoch is one batch, so its size weighs nothing, and Lightning need not guess it.
        options = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
        options["batch_size"] = options.get("batch_size") or 1
        single = isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)
        how, rank_zero_only = _reduction(options), options.get("rank_zero_only")
        if how in ("min", "max") and single:
            self._log(name, value, **{**options, "sync_dist": True})
        elif how not in ("mean", "sum") or not single or rank_zero_only:
            self._log(name, value, **options)
        elif self._alone:
            self._log(name, value, **{**options, **_GLOBAL})
        elif self._stage is not None:
            self._held[name] = _Entry(torch.as_tensor(value).detach(), options)
        else:
            self._tell_now(name, _Entry(torch.as_tensor(value).detach(), options))

    def flush(
        self, loss: Tensor | None, share: float, riders: tuple[float, float] = (0.0, 0.0)
    ) -> Tensor | None:
        """Logs what the step held back; returns the loss over all ranks, None if it is this one's.

        Args:
            loss: This rank's loss, or None.
            share: What this rank's loss counts in the sum over ranks.
            riders: Two numbers that travel along; see `carried`.

        Raises:
            RuntimeError: If some ranks have a loss and others none.
        """
        if self._alone:
            return None
        assert self._stage is not None
        held, self._held = self._held, {}
        agreed = self._agreed.setdefault(self._stage, {})
        totals = self._sum(held, agreed, loss, share, riders)
        if totals[-1, 2]:  # a value that is new to some rank
            for recipes in self._transport.all_gather_object(
                {name: entry.recipe for name, entry in held.items() if name not in agreed}
            ):
                agreed |= {name: how for name, how in recipes.items() if name not in agreed}
            totals = self._sum(held, agreed, loss, share, riders)
        with_loss = int(totals[-1, 1])
        if 0 < with_loss < self._transport.num_ranks:
            raise RuntimeError(
                f"training_step returned a loss on {with_loss} of {self._transport.num_ranks} "
                "ranks: return one on every rank (a part without training nodes counts nothing)"
            )
        for (name, (dtype, options)), total in zip(agreed.items(), totals[:-1], strict=True):
            if total[2]:
                options = {**options, **held[name].options} if name in held else options
                self._tell(name, total, dtype, options)
        return None if loss is None else totals[-1, 0].to(loss)

    def _sum(
        self,
        held: dict[str, _Entry],
        agreed: dict[str, Any],
        loss: Tensor | None,
        share: float,
        riders: tuple[float, float],
    ) -> Tensor:
        """Over all ranks, float64 on the CPU: a row per agreed name, and one of the step.

        A value's row: sum of weighted values, sum of weights, ranks that logged it. The step's:
        the loss, ranks with a loss, ranks with a value that is not agreed yet.
        """
        rows: list[list[float]] = [[0.0, *riders]]
        values: list[Tensor | None] = [None]
        for name in agreed:
            entry = held.get(name)
            weight = self._weight(name, entry) if entry else 0.0
            rows.append([weight, weight, float(entry is not None)])
            values.append(entry.value if entry else None)
        news = not held.keys() <= agreed.keys()
        rows.append([share, float(loss is not None), float(news)])
        values.append(None if loss is None else loss.detach())
        table = torch.tensor(rows, dtype=torch.float64, device=self._transport.device)
        zero = table.new_zeros(())
        column = torch.stack([zero if v is None else v.to(zero).reshape(()) for v in values])
        # The mean over no node is not a number: where nothing counts, it is no value either.
        table[:, 0] = torch.where(table[:, 0] == 0, 0.0, column * table[:, 0])
        self._transport.all_reduce(table)
        totals = table.cpu()
        self.carried = float(totals[0, 1]), float(totals[0, 2])
        return totals[1:]

    def _tell_now(self, name: str, entry: _Entry) -> None:
        """Tells a value of a hook outside of the steps, which all ranks run too."""
        stage = _stage_of(self._module._current_fx_name or "")
        shard = self._shards.get(stage) or next(iter(self._shards.values()), None)
        if shard is None:
            self._log(name, entry.value, **entry.options)
            return
        with self.step(stage, shard):
            agreed = {name: entry.recipe}
            total = self._sum({name: entry}, agreed, None, 0.0, (0.0, 0.0))[0]
        self._tell(name, total, *entry.recipe)

    def _tell(self, name: str, total: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> None:
        value = total[0] if _reduction(options) == "sum" else total[0] / total[1]
        self._log(name, value.to(self._module.device, dtype), **{**options, **_GLOBAL})

    def _weight(self, name: str, entry: _Entry) -> float:
        if _reduction(entry.options) == "sum":
            return 1.0
        assert self._stage is not None
        shard = self._shards[self._stage]
        named = [f"{word}_mask" for word in re.split(r"[^a-zA-Z0-9]", name)]
        known = [mask for mask in (*named, MASKS.get(self._stage)) if mask in shard.mask_counts]
        return shard.share(known[0] if known else None)


def _reduction(options: dict[str, Any]) -> str:
    """The name of `reduce_fx`, which may be a function."""
    given = options.get("reduce_fx", "mean")
    name = given.lower() if isinstance(given, str) else getattr(given, "__name__", "")
    return "mean" if name == "avg" else name


def _stage_of(hook: str) -> str:
    words = {"validation": "validating", "test": "testing"}
    return next((stage for word, stage in words.items() if word in hook), "training")
