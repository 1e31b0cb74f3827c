"""The exchange at a layer's input, as the paper draws it (``exchange="input"``)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from lightning_sylvie.attach.message_passing import Attached


class HaloInput(Attached):
    """A layer that receives owned and halo rows and gives back owned rows.

    The halo rows go through everything the layer does before it aggregates, so this costs more
    computation than `HaloMessagePassing` alone and suits layers that read neighbours once.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attachment, plan = self.attachment, self.attachment.halo
        if not plan.active or attachment.wide:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = self._widened(args, kwargs)
        with attachment.widening(self):
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._owned(out)

    def _widened(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with halo rows appended to every tensor that has a row per owned node."""
        bound = inspect.signature(self.original.forward).bind(self, *args, **kwargs)  # type: ignore[attr-defined]
        found: list[Tensor] = []
        _map_rows(self._is_node_level, found.append, bound.arguments)
        moved = dict(zip(map(id, found), self.attachment.append(self, found, 0)))
        bound.arguments = _map_rows(
            self._is_node_level, lambda tensor: moved[id(tensor)], bound.arguments
        )
        return bound.args[1:], bound.kwargs

    def _is_node_level(self, name: str, value: Tensor) -> bool:
        num_owned = self.attachment.halo.plan.num_owned
        cache = self.attachment.cache
        return (
            not name.startswith("edge")
            and not cache.keeps(value)
            and value.dim() > 0
            and value.shape[0] == num_owned
        )

    def _owned(self, out: Any) -> Any:
        num_rows, num_owned = self.attachment.halo.plan.num_rows, self.attachment.halo.plan.num_owned
        if isinstance(out, torch.Tensor) and out.dim() and out.shape[0] == num_rows:
            return out[:num_owned]
        if isinstance(out, (tuple, list)):
            return type(out)(self._owned(part) for part in out)
        return out


def _map_rows(chosen: Any, change: Any, value: Any, name: str = "") -> Any:
    """`value` with `change` applied to each chosen tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value) if chosen(name, value) else value
    if isinstance(value, dict):
        return {key: _map_rows(chosen, change, part, key) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map_rows(chosen, change, part, name) for part in value)
    return value
