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
from lightning_sylvie.attach.inputs import HaloInput
from lightning_sylvie.attach.message_passing import Attached, HaloMessagePassing
from lightning_sylvie.attach.norms import NORMS
from lightning_sylvie.attach.refusals import refusals
from lightning_sylvie.attach.sparse import AdjacencyCache
from lightning_sylvie.attach.special import SPECIAL, OutEdges
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
    """

    def __init__(
        self, module: torch.nn.Module, halo: Halo, *, exchange: Exchange = "message"
    ) -> None:
        if exchange not in ("message", "input"):
            raise ValueError(f'expected exchange "message" or "input", got {exchange!r}')
        if refused := [f"  {where}: {why}" for where, why in refusals(module)]:
            raise RefusedLayerError(
                "these layers can't be right on a cut graph:\n" + "\n".join(refused)
            )
        self.halo = halo
        self.cache = AdjacencyCache()
        self.degrees = Degrees(halo, self.cache)
        self._exchange = exchange
        self._wide: Attached | None = None
        self._hop: set[int] | None = None
        self._paths = {id(layer): path for path, layer in module.named_modules()}
        self._classes: dict[type, type] = {}
        self._layers = [(layer, type(layer)) for layer in module.modules()]
        self._layers = [(layer, kind) for layer, kind in self._layers if self._bases(kind, layer)]
        for layer, kind in self._layers:
            layer.__class__ = self._subclass(kind, layer)

    def detach(self) -> None:
        """Gives every layer its own class back."""
        for layer, kind in self._layers:
            layer.__class__ = kind

    def keep(self, shard: Shard) -> None:
        """Declares the tensors of `shard` constant, so what is derived from them is kept."""
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
        rows = [t if dim == 0 else t.movedim(dim, 0) for t, dim in zip(tensors, dims)]
        try:
            moved = self.halo.append(*rows)
        except ValueError as error:
            raise ValueError(f"{self.path(layer)}: {error}") from error
        return [t if dim == 0 else t.movedim(0, dim) for t, dim in zip(moved, dims)]

    @property
    def wide(self) -> bool:
        """Whether the layer that runs now holds halo rows from its input on."""
        return self._wide is not None

    @contextmanager
    def widening(self, layer: Attached) -> Iterator[None]:
        """Marks `layer` as one that holds halo rows from its input on."""
        self._wide, self._hop = layer, None
        try:
            yield
        finally:
            self._wide = self._hop = None

    def note_hop(self, layer: Attached, inputs: dict[str, Any]) -> None:
        """Raises if a layer that got its halo at the input reads neighbours a second time."""
        read = {id(part) for value in inputs.values() for part in _tensors(value)}
        if self._hop is not None and not read & self._hop:
            raise RefusedLayerError(
                f"{self.path(self._wide)}: it reads neighbours of neighbours, whose rows it does "
                'not hold with exchange="input"; use exchange="message"'
            )
        self._hop = read

    @contextmanager
    def reversed(self, layer: Attached) -> Iterator[Callable[[Any], Any]]:
        """Puts the out-edges in force; yields what maps the batch's edge tensors to theirs."""
        shard = self.halo.shard
        if shard.reverse is None:
            raise RefusedLayerError(
                f"{self.path(layer)} reads out-edges, which this part does not hold: "
                "let the strategy cut the graph (it asks for them), or cut with reverse=True"
            )
        back = shard.reverse
        turned = {id(shard.edge_index): self._flipped(back)} | {
            id(value): back.edge[name] for name, value in shard.edge.items()
        }
        with self.halo.using(back, checking=self.halo.checking):
            yield lambda value: turned.get(id(value), value)

    def _flipped(self, shard: Shard) -> Tensor:
        flipped = shard.edge_index.flip(0)
        self.cache.keep(flipped)
        return flipped

    def _bases(self, kind: type, layer: Any) -> tuple[type, ...]:
        """What goes in front of the class of `layer`; empty if it reads no other node."""
        bases = tuple(base for special, base in SPECIAL.items() if issubclass(kind, special))
        if issubclass(kind, MessagePassing):
            turned = (OutEdges,) if layer.flow == "target_to_source" else ()
            wide = (HaloInput,) if self._exchange == "input" else ()
            return (*bases, *turned, *wide, HaloMessagePassing)
        norms = tuple(base for norm, base in NORMS.items() if issubclass(kind, norm))
        return bases or norms[-1:]

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
            rebound = type(kind.__name__, (kind,), rebind(kind, self._replacements()))
            self._classes[kind, bases] = type(kind.__name__, (*bases, rebound), body)
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


def rebind(kind: type, replacements: dict[Any, Any]) -> dict[str, Any]:
    """The methods of `kind` that call a replaced function, calling its replacement instead.

    Each is the same code over a copy of its module's globals, so nothing outside the returned
    functions changes.

    Args:
        kind: A class.
        replacements: Function -> what to call in its place.
    """
    rebound: dict[str, Any] = {}
    library = set(MessagePassing.__mro__)
    for owner in kind.__mro__:
        for name, function in vars(owner).items() if owner not in library else ():
            if name in rebound or not isinstance(function, types.FunctionType):
                continue
            changed = {
                called: replacements[value]
                for called in function.__code__.co_names
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
                rebound[name] = functools.wraps(function)(twin)
    return rebound


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
