"""The exchange at a layer's input, as the paper draws it (``exchange="input"``)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from lightning_sylvie.attach.message_passing import Attached


class HaloInput(Attached):
    """A layer that receives owned and halo rows and gives back owned rows.

    The halo rows go through everything the layer does before it aggregates, so this costs more
    computation than `HaloMessagePassing` alone; in return the layer may read rows through
    `edge_index` wherever it likes. What it reads in a second hop is exchanged where it reads it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attachment.halo.active or self.attachment.wide.active:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = self._widened(args, kwargs)
        with self.attachment.wide.on():
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self._owned(out)

    def message(self, *args: Any, **kwargs: Any) -> Any:
        with self.attachment.wide.on_edges():
            return super().message(*args, **kwargs)  # type: ignore[misc]

    def edge_update(self, *args: Any, **kwargs: Any) -> Any:
        with self.attachment.wide.on_edges():
            return super().edge_update(*args, **kwargs)  # type: ignore[misc]

    def _widened(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with halo rows appended to every tensor that has a row per owned node."""
        forward = inspect.signature(self.original.forward)  # type: ignore[attr-defined]
        bound = forward.bind(self, *args, **kwargs)
        found: dict[int, Tensor] = {}
        _map_rows(self._is_node_level, lambda t: found.setdefault(id(t), t), bound.arguments)
        extended = self.attachment.append(self, found.values(), 0)
        moved = dict(zip(found, extended, strict=True))
        bound.arguments = _map_rows(self._is_node_level, lambda t: moved[id(t)], bound.arguments)
        return bound.args[1:], bound.kwargs

    def _is_node_level(self, name: str, value: Tensor) -> bool:
        return (
            "edge" not in name
            and not self.attachment.cache.keeps(value)
            and value.dim() > 0
            and value.shape[0] == self.attachment.halo.plan.num_owned
        )

    def _owned(self, out: Any) -> Any:
        plan = self.attachment.halo.plan
        if isinstance(out, Tensor) and out.dim() and out.shape[0] == plan.num_rows:
            return out[: plan.num_owned]
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
