"""Message passing over a part: neighbours' rows arrive where a layer reads them.

PyG collects what `message` and `edge_update` ask for in one place, `MessagePassing._collect`; every
name that ends in ``_j`` is read through the edges' sources. There, and only there, the halo rows
are appended, so multi-hop layers exchange once per hop, attention sends its logits, and a layer
that maps before it aggregates sends the mapped, often narrower, rows.
"""

from __future__ import annotations

import copy
import copyreg
import dis
import functools
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch_geometric.nn import DirGNNConv, MessagePassing
from torch_geometric.utils import is_sparse, spmm

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
        """Pickles as the layer that the user wrote, readable without this package."""
        state = self.__dict__ | forgotten(self)
        return copyreg._reconstructor, (self.original, object, None), state  # type: ignore[attr-defined]


class HaloMessagePassing(Attached, MessagePassing):
    """A `MessagePassing` layer whose sources are owned and halo rows, its targets owned rows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except IndexError as error:
            if not self.attachment.halo.active:
                raise
            raise IndexError(self._advice(error)) from error

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        halo = self.attachment.halo
        if halo.active and is_sparse(edge_index):
            raise TypeError(
                f"{self.attachment.path(self)}: expected the part's edge_index, got a sparse "
                "matrix; keep edges as `edge_index`, the fused product is used where it can be"
            )
        if halo.active:
            wide = self.attachment.wide.active
            matrix = self.attachment.cache.matrix(self, edge_index, halo.plan, kwargs, wide=wide)
            edge_index = edge_index if matrix is None else matrix
        return MessagePassing.propagate(self, edge_index, size, **kwargs)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
        return MessagePassing.edge_updater(self, edge_index, size, **kwargs)

    def _collect(self, args: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        if not self.attachment.halo.active:
            return super()._collect(args, edge_index, size, kwargs)
        cache = self.attachment.cache
        cache.reader = None
        if is_sparse(edge_index):
            x, sources = kwargs["x"], {"x": kwargs["x"]}
            if not self.attachment.wide.active and reads_in_spmm(self.original):
                cache.reader = partial(self.attachment.aggregate, self)
                return {name: kwargs.get(name) for name in args}
            is_wide = self.attachment.wide.active
            pairs = self._refreshed(sources, hop=True) if is_wide else self._extended(sources)
            pair = pairs["x"]
            x = pair if isinstance(x, (tuple, list)) else pair[self._far]
            return {name: kwargs.get(name) for name in args} | {"x": x}
        sources = self._sources(args, kwargs)
        if self.attachment.wide.active:
            pairs = self._refreshed(sources, hop=args is not self._edge_user_args)
        else:
            plan = self.attachment.halo.plan
            size[1 - self._far], size[self._far] = plan.num_owned, plan.num_rows
            pairs = self._extended(sources)
        collected = super()._collect(args, edge_index, size, kwargs | pairs)
        collected.update({name: value for name, value in sources.items() if name in args})
        return collected

    @property
    def _far(self) -> int:
        """Which end of an edge is the neighbour that is read."""
        return 0 if self.flow == "source_to_target" else 1

    def _sources(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What is read of neighbours, in an order that is the same on every rank."""
        names = sorted({arg[:-2] for arg in args if arg.endswith("_j")})
        found = {name: kwargs.get(name) for name in names}
        return {name: v for name, v in found.items() if isinstance(_ends(v)[0], Tensor)}

    def _extended(self, sources: dict[str, Any]) -> dict[str, Any]:
        """Each source as a pair: owned and halo rows of the neighbours, owned rows of the rest."""
        ends = {name: _ends(value) for name, value in sources.items()}
        moved = self.attachment.append(self, [far for far, _ in ends.values()], self.node_dim)
        pairs = zip(moved, ends.items(), strict=True)
        return {name: self._pair(rows, near) for rows, (name, (_, near)) in pairs}

    def _refreshed(self, sources: dict[str, Any], *, hop: bool) -> dict[str, Any]:
        """The sources as pairs; halo rows that are not their owners' any more come anew."""
        wide, num_owned = self.attachment.wide, self.attachment.halo.plan.num_owned
        ends = {name: _ends(value) for name, value in sources.items()}
        stale = [name for name, (far, _) in ends.items() if wide.is_stale(far)]
        wide.note_read([far for far, _ in ends.values()], hop=hop)
        owned = [ends[name][0].narrow(self.node_dim, 0, num_owned) for name in stale]
        fresh = self.attachment.append(self, owned, self.node_dim)
        moved = dict(zip(stale, fresh, strict=True))
        return {name: self._pair(moved.get(name, far), near) for name, (far, near) in ends.items()}

    def _pair(self, far: Any, near: Any) -> tuple[Any, Any]:
        """In the order in which `MessagePassing._collect` reads them."""
        return (far, near) if self._far == 0 else (near, far)

    def _advice(self, error: IndexError) -> str:
        return (
            f"{self.attachment.path(self)}: {error}. Its forward reads rows through `edge_index` "
            "outside of `message` and `edge_update`, where neighbours' rows are; use "
            'exchange="input", or pass what it reads through `propagate` as a name ending in _j'
        )


def _ends(value: Any) -> tuple[Any, Any]:
    """What neighbours and what destinations are read from: PyG's templates take a pair so, for
    both flows; a single value serves both.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return (value[0], value[1]) if is_pair else (value, value)


@functools.cache
def reads_in_spmm(kind: type) -> bool:
    """Whether a layer's fused aggregation is PyG's own, and one `spmm` is all that reads there."""
    fused = kind.message_and_aggregate  # type: ignore[attr-defined]
    of_pyg = fused.__module__.startswith("torch_geometric.nn.")
    calls = [i for i in dis.get_instructions(fused) if i.argval == "spmm"]
    return of_pyg and fused.__globals__.get("spmm") is spmm and len(calls) == 1


def forgotten(layer: Any) -> dict[str, None]:
    """What the layer keeps of the graph it saw last, emptied."""
    return {name: None for name in vars(layer) if name.startswith("_cached_")}


def wants_out_edges(modules: Iterable[Any]) -> bool:
    """Whether one of the layers reads its out-neighbours."""
    return any(
        isinstance(module, DirGNNConv)
        or (isinstance(module, MessagePassing) and module.flow == "target_to_source")
        for module in modules
    )
