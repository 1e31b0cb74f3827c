"""The exchange at a layer's input, as the paper draws it (``exchange="input"``)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn

from lightning_sylvie.attach.message_passing import Attached


class HaloInput(Attached):
    """A layer that receives owned and halo rows and gives back owned rows.

    The halo rows go through everything the layer does before it aggregates, so this costs more
    computation than `HaloMessagePassing` alone; in return the layer may read rows through
    `edge_index` wherever it likes. What it reads in a second hop is exchanged where it reads it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._widens(*args, **kwargs):
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

    def _widens(self, *args: Any, **kwargs: Any) -> bool:
        return self.attachment.halo.active and not self.attachment.wide.active

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


class HaloFeatures(HaloInput):
    """A layer that maps rows before it aggregates them, on input features that never change.

    Their halo rows are here (see `Halo.keep`), so the layer maps these too, and neither mapped rows
    nor their gradients travel.
    """

    def _widens(self, *args: Any, **kwargs: Any) -> bool:
        x = args[0] if args else kwargs.get("x")
        return (
            super()._widens()
            and isinstance(x, Tensor)
            and self.attachment.halo.keeps(x)
            and self._is_cheaper(x)
        )

    def _is_cheaper(self, x: Tensor) -> bool:
        """Whether mapping a halo row costs less than moving it mapped.

        There and back these are ``4 * width_in * width_out`` operations beside ``2 * width_out``
        values: the width of what travels cancels out, and every rank decides alike.
        """
        operations = 16 * x.shape[-1] / self.attachment.halo.bits_per_value()  # per byte
        return operations <= OPERATIONS_PER_BYTE.get(x.device.type, 5000)


OPERATIONS_PER_BYTE = {"cpu": 1000}
"""What a device computes while a byte travels: 1 TFLOP/s beside 1 GB/s, 50 beside 10 on GPUs."""

MAPS_FIRST = {
    pyg_nn.GCNConv,
    pyg_nn.GATConv,
    pyg_nn.GATv2Conv,
    pyg_nn.TransformerConv,
    pyg_nn.ResGatedGraphConv,
    pyg_nn.LEConv,
    pyg_nn.PDNConv,
}
"""Layers that send mapped rows, and do to each row the same before that."""


def maps_first(layer: Any) -> bool:
    """Whether the layer sends rows that it has mapped, each by itself and without randomness."""
    plain = (torch.nn.Linear, torch.nn.Identity, pyg_nn.Linear, pyg_nn.Aggregation)
    parts = [part for part in layer.modules() if part is not layer]
    return type(layer) in MAPS_FIRST and all(isinstance(part, plain) for part in parts)


def _map_rows(chosen: Any, change: Any, value: Any, name: str = "") -> Any:
    """`value` with `change` applied to each chosen tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value) if chosen(name, value) else value
    if isinstance(value, dict):
        return {key: _map_rows(chosen, change, part, key) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map_rows(chosen, change, part, name) for part in value)
    return value
