"""Gives every layer of a model that reads other nodes its exchange, and takes it back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric import utils
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_sylvie.attach.degree import Degrees
from lightning_sylvie.attach.inputs import HaloFeatures, HaloInput, maps_first
from lightning_sylvie.attach.message_passing import Attached, HaloMessagePassing, forgotten
from lightning_sylvie.attach.norms import NORMS
from lightning_sylvie.attach.refusals import refusals
from lightning_sylvie.attach.sparse import Adjacency, AdjacencyCache
from lightning_sylvie.attach.special import SPECIAL, OutEdges
from lightning_sylvie.attach.wide import Wide
from lightning_sylvie.exchange import Halo
from lightning_sylvie.shard import Shard

Exchange = Literal["message", "input"]


class RefusedLayerError(ValueError):
    """The model has layers that can't be right on a cut graph."""


class Attachment:
    """A model whose layers exchange halo rows, until `detach`.

    Every layer gets a subclass of its own class, made for this attachment, so its code, name,
    parameters, state dict and hooks stay as they are. Functions of `torch_geometric` that need the
    whole graph (degrees, normalisations) are replaced inside those subclasses only.

    Args:
        module: The model; changed in place.
        halo: The exchange; nothing happens unless it is in force.
        exchange: ``"message"``: where a layer reads its neighbours' rows. ``"input"``: at the
            layer's input.

    Raises:
        RefusedLayerError: Naming every layer that can't be right, and the remedy.
        ValueError: The model is attached already.
    """

    def __init__(
        self, module: torch.nn.Module, halo: Halo, *, exchange: Exchange = "message"
    ) -> None:
        if exchange not in ("message", "input"):
            raise ValueError(f'expected exchange "message" or "input", got {exchange!r}')
        if any(isinstance(layer, Attached) for layer in module.modules()):
            raise ValueError("the model is attached already: detach the other attachment first")
        if refused := [
            f"  {where}: {why}" for where, why in refusals(module, at_input=exchange == "input")
        ]:
            raise RefusedLayerError(
                "these layers can't be right on a cut graph:\n" + "\n".join(refused)
            )
        self.halo = halo
        self.cache = AdjacencyCache()
        self.wide = Wide()
        self.degrees = Degrees(halo, self.cache, self.wide)
        self._exchange = exchange
        self._turned: dict[int, dict[int, Tensor]] = {}
        self._paths = {id(layer): path for path, layer in module.named_modules()}
        self._classes: dict[tuple[type, tuple[type, ...]], type] = {}
        self._layers = [(layer, type(layer)) for layer in module.modules()]
        self._layers = [(layer, kind) for layer, kind in self._layers if self._bases(kind, layer)]
        for layer, kind in self._layers:
            layer.__class__ = self._subclass(kind, layer)
            vars(layer).update(forgotten(layer))

    def detach(self) -> None:
        """Gives every layer its own class back; what it kept of its part is forgotten."""
        for layer, kind in self._layers:
            layer.__class__ = kind
            vars(layer).update(forgotten(layer))

    def keep(self, shard: Shard) -> None:
        """Declares the tensors of `shard` constant, so what is derived from them is kept."""
        self.halo.keep(shard)
        for part in (shard, shard.reverse):
            if part is not None:
                self.cache.keep(part.edge_index, *part.edge.values())

    def path(self, layer: Any) -> str:
        """Full path and class of a layer, for messages."""
        return f"{self._paths.get(id(layer), '(a copy)') or 'the model'} ({type(layer).__name__})"

    def append(self, layer: Attached, tensors: Iterable[Tensor], node_dim: int) -> list[Tensor]:
        """Each tensor with halo rows appended along `node_dim`, in one message per peer."""
        tensors = list(tensors)
        dims = [node_dim % max(tensor.dim(), 1) for tensor in tensors]
        rows = [t if dim == 0 else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
        if not rows:
            return []
        moved = self.halo.append(*rows, name=self.path(layer))
        return [t if dim == 0 else t.movedim(0, dim) for t, dim in zip(moved, dims, strict=True)]

    def aggregate(self, layer: Attached, adjacency: Adjacency, rows: Tensor) -> Tensor:
        """The sum over owned nodes' in-edges; `rows` are the owned ones, neighbours' arrive."""
        return self.halo.aggregate(adjacency, rows, name=self.path(layer))

    @contextmanager
    def reversed(self, layer: Attached) -> Iterator[Callable[[str, Any], Any]]:
        """Puts the out-edges in force; yields what maps the batch's edge tensors to theirs.

        The map takes an argument's name and value. Sources of the edges it gives are owned rows,
        destinations owned and halo rows, as in the batch's own orientation.
        """
        shard = self.halo.shard
        if shard.reverse is None:
            raise RefusedLayerError(
                f"{self.path(layer)} reads out-edges, which this part does not hold: "
                "let the strategy cut the graph (it asks for them), or cut with reverse=True"
            )
        turned = self._turn(shard, shard.reverse)

        def turn(name: str, value: Any) -> Any:
            if isinstance(value, Tensor) and "edge" in name and id(value) not in turned:
                raise RefusedLayerError(
                    f"{self.path(layer)} reads out-edges, but its {name} is not a tensor of the "
                    "graph itself, so its rows for the out-edges are not known: compute it before "
                    'training and store it in the graph, or use flow="source_to_target"'
                )
            return turned.get(id(value), value)

        with self.halo.using(shard.reverse, checking=self.halo.checking):
            yield turn

    def _turn(self, shard: Shard, back: Shard) -> dict[int, Tensor]:
        """The tensor of the out-edges for each edge tensor of `shard`, by identity."""
        key = id(shard.edge_index)
        if key not in self._turned:
            flipped = back.edge_index.flip(0)
            self.cache.keep(shard.edge_index, flipped, *shard.edge.values(), *back.edge.values())
            self._turned[key] = {key: flipped} | {
                id(value): back.edge[name] for name, value in shard.edge.items()
            }
        return self._turned[key]

    def _bases(self, kind: type, layer: Any) -> tuple[type, ...]:
        """What goes in front of the class of `layer`; empty if it reads no other node."""
        bases = tuple(base for special, base in SPECIAL.items() if issubclass(kind, special))
        if issubclass(kind, MessagePassing):
            turned = (OutEdges,) if layer.flow == "target_to_source" else ()
            early = HaloFeatures if maps_first(layer) else None
            wide = (HaloInput,) if self._exchange == "input" else (early,) if early else ()
            return (*bases, *turned, *wide, HaloMessagePassing)
        norms = tuple(base for norm, base in NORMS.items() if issubclass(kind, norm))
        return bases or norms[:1]

    def _subclass(self, kind: type, layer: Any) -> type:
        bases = self._bases(kind, layer)
        if (kind, bases) not in self._classes:
            body: dict[str, Any] = {
                "__module__": kind.__module__,
                "__doc__": kind.__doc__,
                "attachment": self,
                "original": kind,
            }
            if HaloMessagePassing in bases:
                # In the class's own dict, or unpickling would write PyG's templates over them.
                body["propagate"] = HaloMessagePassing.propagate
                body["edge_updater"] = HaloMessagePassing.edge_updater
            bases_below = rebind(kind, self._replacements())
            self._classes[kind, bases] = type(kind.__name__, (*bases, *bases_below), body)
        return self._classes[kind, bases]

    def _replacements(self) -> dict[Any, Any]:
        """The functions that need the whole graph, and what stands in for them."""
        return {
            gcn_norm: self.degrees.gcn_norm,
            utils.get_laplacian: self.degrees.get_laplacian,
            utils.degree: self.degrees.degree,
            utils.add_self_loops: self.degrees.add_self_loops,
            utils.add_remaining_self_loops: self.degrees.add_remaining_self_loops,
            utils.spmm: self.cache.spmm,
        }


def rebind(kind: type, replacements: dict[Any, Any]) -> tuple[type, ...]:
    """What to inherit from instead of `kind`, so that it calls the replacements.

    A class whose methods call a replaced function gets a subclass in front of it, with the same
    code over a copy of the module's globals. Nothing outside the returned classes changes, and
    ``super()`` still finds its way.

    Args:
        kind: A class.
        replacements: Function -> what to call in its place.
    """
    library = set(MessagePassing.__mro__)
    twins = [
        type(owner.__name__, (owner,), twins | {"__module__": owner.__module__})
        for owner in kind.__mro__
        if owner not in library and (twins := _rebound(owner, replacements))
    ]
    return tuple(twins) if twins and twins[0].__base__ is kind else (kind, *twins)


def _rebound(owner: type, replacements: dict[Any, Any]) -> dict[str, Any]:
    """The class's own methods that call a replaced function, calling its replacement."""
    twins: dict[str, Any] = {}
    for name, function in vars(owner).items():
        if not isinstance(function, types.FunctionType):
            continue
        changed = {
            called: replacements[value]
            for called in _names(function.__code__)
            if isinstance(value := function.__globals__.get(called), types.FunctionType)
            and value in replacements
        }
        if changed:
            twin = types.FunctionType(
                function.__code__,
                {**function.__globals__, **changed},
                name,
                function.__defaults__,
                function.__closure__,
            )
            twin.__kwdefaults__ = function.__kwdefaults__
            twins[name] = functools.wraps(function)(twin)
    return twins


def _names(code: types.CodeType) -> Iterator[str]:
    """Every name that the code, or a comprehension or function inside it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
