"""Message passing over a part: neighbours' rows arrive where a layer reads them.

PyG collects what `message` and `edge_update` ask for in one place, `MessagePassing._collect`; every
name that ends in ``_j`` is read through the edges' sources. There, and only there, the halo rows are
appended, so multi-hop layers exchange once per hop, attention sends its logits, and a layer that
maps before it aggregates sends the mapped, often narrower, rows.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import is_sparse

if TYPE_CHECKING:
    from lightning_sylvie.attach.attachment import Attachment


class Attached:
    """Base of every attached layer; `attachment` is set on the layer's own subclass.

    The attachment lives on the class, never on the instance, so state dicts, deep copies and
    pickles of a layer hold nothing of it.
    """

    attachment: Attachment
    original: type

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = copy.deepcopy(self.__dict__, memo)
        setstate = getattr(twin, "__setstate__", twin.__dict__.update)
        setstate(state)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the layer that the user wrote."""
        return copyreg.__newobj__, (self.original,), self.__dict__  # type: ignore[attr-defined]


class HaloMessagePassing(Attached, MessagePassing):
    """A `MessagePassing` layer whose sources are owned and halo rows, its targets owned rows."""

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        halo = self.attachment.halo
        if halo.active and not self.attachment.wide:
            matrix = self.attachment.cache.matrix(self, edge_index, halo.plan, kwargs)
            edge_index = edge_index if matrix is None else matrix
        elif halo.active:
            self.attachment.note_hop(self, kwargs)
        return MessagePassing.propagate(self, edge_index, size, **kwargs)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return MessagePassing.edge_updater(self, edge_index, size, **kwargs)

    def _collect(self, args: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        halo = self.attachment.halo
        if not halo.active or self.attachment.wide:
            return super()._collect(args, edge_index, size, kwargs)
        if is_sparse(edge_index):
            given = {name: kwargs.get(name) for name in args}
            return given | {"x": self._extended({"x": kwargs["x"]}, pair=False)["x"]}
        names = sorted({arg[:-2] for arg in args if arg.endswith("_j")})
        source_dim = 0 if self.flow == "source_to_target" else 1
        sources = {name: kwargs[name] for name in names if _read(kwargs.get(name), source_dim)}
        size[source_dim], size[1 - source_dim] = halo.plan.num_rows, halo.plan.num_owned
        extended = self._extended(sources, pair=True)
        collected = super()._collect(args, edge_index, size, kwargs | extended)
        collected.update({name: value for name, value in sources.items() if name in args})
        return collected

    def _extended(self, sources: dict[str, Any], *, pair: bool) -> dict[str, Any]:
        """Each source with its halo rows, beside its owned rows where both sides are read."""
        source_dim = 0 if self.flow == "source_to_target" else 1
        picked = {
            name: value[source_dim] if isinstance(value, (tuple, list)) else value
            for name, value in sources.items()
        }
        moved = dict(zip(picked, self.attachment.append(self, picked.values(), self.node_dim)))
        out: dict[str, Any] = {}
        for name, value in sources.items():
            if isinstance(value, (tuple, list)):
                out[name] = (moved[name], value[1]) if source_dim == 0 else (value[0], moved[name])
            elif pair:
                out[name] = (moved[name], value) if source_dim == 0 else (value, moved[name])
            else:
                out[name] = moved[name]
        return out


def _read(value: Any, source_dim: int) -> bool:
    """Whether rows are read from `value` through the edges' sources."""
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and isinstance(value[source_dim], Tensor)
    return isinstance(value, Tensor)


def wants_out_edges(modules: Iterable[Any]) -> bool:
    """Whether one of the layers reads its out-neighbours."""
    from torch_geometric.nn import DirGNNConv

    return any(
        isinstance(module, DirGNNConv)
        or (isinstance(module, MessagePassing) and module.flow == "target_to_source")
        for module in modules
    )
