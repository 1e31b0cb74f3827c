"""Lets torchmetrics objects take the batch of a rank that has no row for them.

torchmetrics is made for batches with rows: without, some metrics raise, others warn, and one that
is never updated gathers fewer tensors than its peers on the other ranks, which then wait for ever.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


@contextmanager
def taking_no_rows(module: torch.nn.Module) -> Iterator[None]:
    """Inside, an update of a metric below `module` with tensors of no rows counts as done.

    The metric's states stay what they are, so they add nothing; lists of rows get an empty entry,
    which has the shape that the other ranks' entries have.
    """
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [
        (metric, metric.__dict__["update"], metric.__dict__.get("forward")) for metric in metrics
    ]
    for metric in metrics:
        metric.__dict__["forward"] = functools.partial(_forward, metric, metric.forward)
        metric.__dict__["update"] = functools.partial(_update, metric, metric.__dict__["update"])
    try:
        yield
    finally:
        for metric, update, forward in before:
            metric.__dict__["update"] = update
            metric.__dict__["forward"] = forward
            if forward is None:
                del metric.__dict__["forward"]


def _update(metric: Metric, update: Callable[..., None], *args: Any, **options: Any) -> None:
    if not _lacks_rows(*args, *options.values()):
        update(*args, **options)
        return
    one = copy.deepcopy(metric)
    one.reset()
    one.update(*map(_one_row, args), **{name: _one_row(value) for name, value in options.items()})
    for name, default in metric._defaults.items():
        if isinstance(default, list):
            getattr(metric, name).extend(rows[:0] for rows in getattr(one, name))
    metric._computed = None
    metric._update_count += 1


def _forward(metric: Metric, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not _lacks_rows(*args, *options.values()):
        return forward(*args, **options)
    metric.update(*args, **options)
    value: Any = torch.tensor(torch.nan, device=metric.device)
    metric._forward_cache = value
    return value


def _lacks_rows(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.shape[:1] == (0,) for value in values)


def _one_row(value: Any) -> Any:
    lacking = isinstance(value, Tensor) and value.shape[:1] == (0,)
    return value.new_zeros((1, *value.shape[1:])) if lacking else value
