"""The halo exchange: select, quantize, move, dequantize, append; backward in reverse."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sylvie.allocation import Allocations
from lightning_sylvie.constants import Constants
from lightning_sylvie.functions import Append, Fold, Sum
from lightning_sylvie.history import Fresh, History
from lightning_sylvie.observer import Observer
from lightning_sylvie.overlap import Aggregation, ExchangedAggregation, Pace
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.quantizer import Code, Full
from lightning_sylvie.route import Route, RowIds
from lightning_sylvie.shard import Shard
from lightning_sylvie.transport import Transport, check_signature

_log = logging.getLogger("lightning.pytorch.lightning_sylvie")  # shown, where Lightning is in use


class Halo:
    """What the layers of a model see of the other ranks.

    It is in force only inside `using`; outside, attached layers behave as unmodified ones. Every
    rank must make the same calls in the same order. Set its `observer` to hear of its exchanges.

    Args:
        transport: Moves messages between ranks; owned by the caller.
        quantizer: How rows travel.
        gradient_quantizer: How their gradients travel; None: likewise.
        seed: Of the noise; the same on every rank.
        keep_features: Move node tensors that never change once, as they are; see `keep`.
        history: How old halo rows are in training; None: of the same step.
    """

    def __init__(
        self,
        transport: Transport,
        quantizer: Code | None = None,
        gradient_quantizer: Code | None = None,
        *,
        seed: int = 0,
        keep_features: bool = True,
        history: History | None = None,
    ) -> None:
        self.transport = transport
        self.constants = Constants() if keep_features else None
        self.history = history or Fresh()
        self._fresh = Fresh(self.history.lane)
        self._quantizers = quantizer or Full(), gradient_quantizer or quantizer or Full()
        self.seed, self.observer, self.allocations = seed, Observer(), Allocations()
        self.checking = self._exact = False
        self._epoch = self._slot = 0
        self._shard: Shard | None = None
        self._ids: dict[int, RowIds] = {}
        self._recent: list[tuple[Tensor, int, bool, Tensor]] = []
        self._read_once: dict[tuple[int, int, bool], bool] = {}
        self._paces: dict[tuple[int, int, bool], tuple[Pace, Pace]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Halo:
        return self  # copies of a module stay on the ranks and the groups of the original

    @property
    def active(self) -> bool:
        return self._shard is not None

    @property
    def shard(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("no shard is in force: call inside `Halo.using`")
        return self._shard

    @property
    def plan(self) -> HaloPlan:
        return self.shard.plan

    def keep(self, shard: Shard) -> None:
        """Declares the node tensors of `shard` constant, so their halo rows are moved once."""
        if self.constants is not None and shard.plan.num_ranks > 1:
            self.constants.keep(shard)

    def keeps(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a constant of the part in force, so that its halo rows are here."""
        return self.constants is not None and self.constants.holds(self.shard, tensor)

    def bits_per_value(self) -> float:
        """What a value of a wide row takes on the wire, there and back, on average."""
        rows, codes = torch.empty(0, 256), (Full(),) if self._exact else self._quantizers
        return sum(8 * code.row_bytes(rows) for code in codes) / len(codes) / rows.shape[1]

    @contextmanager
    def using(
        self, shard: Shard, *, epoch: int = 0, exact: bool = False, checking: bool = False
    ) -> Iterator[None]:
        """Puts the plan of `shard` in force.

        Args:
            shard: The part whose rows the layers hold.
            epoch: Of the noise.
            exact: Let all rows travel as they are (validation, test, prediction).
            checking: Compare slot, shapes and types of every exchange over the ranks first.
        """
        outer = self._shard, self._epoch, self._exact, self.checking
        if outer[0] is None:
            self._slot = 0
        self._shard, self._epoch, self._exact, self.checking = shard, epoch, exact, checking
        self._recent = []
        try:
            yield
        finally:
            self._shard, self._epoch, self._exact, self.checking = outer
            self._recent = []

    def append(self, *tensors: Tensor, exact: bool = False, name: str = "") -> tuple[Tensor, ...]:
        """The tensors with the halo rows behind their owned rows, moved in one message per peer.

        Backward adds the gradients of the halo rows to their owners' rows (spec: One epoch;
        Algorithms 1 and 2 of the paper, lines 10-13). Rows that the last call moved are not moved
        again, and constants (see `keep`) are moved once for good.

        Args:
            tensors: Each ``(num_owned, ...)``, of any type.
            exact: Let them travel as they are.
            name: The layer, for messages.

        Returns:
            Each ``(num_rows, ...)``: owned rows, then halo rows in plan order.
        """
        for tensor in tensors:
            self._check(tensor, self.plan.num_owned, name)
        if self.plan.num_ranks == 1 and not self.checking:
            return tensors
        known = {id(t): extended for t in tensors if (extended := self._moved(t, name)) is not None}
        fresh = [t for t in tensors if id(t) not in known]
        if fresh:
            appended = self._append(fresh, exact, name)
            known.update((id(t), extended) for t, extended in zip(fresh, appended, strict=True))
            self._recent = [
                (t, t._version, t.requires_grad, known[id(t)])
                for t in tensors
                if not t.is_inference()
            ]
        return tuple(known[id(t)] for t in tensors)

    def aggregate(self, aggregation: Aggregation, tensor: Tensor, *, name: str = "") -> Tensor:
        """``aggregation.whole`` of `tensor` with its halo rows appended.

        In sync mode a layer computes what needs no halo row while they travel, once a step has
        shown that no other layer reads the same rows; where it pays (see `Pace`).

        Args:
            aggregation: Of the part in force.
            tensor: ``(num_owned, width)``.
            name: The layer, for messages.

        Returns:
            ``(num_owned, width)``.
        """
        place = id(self.shard), self._slot + 1, self._exact
        overlaps = self._read_once.get(place, False) and isinstance(self.history, Fresh)
        if overlaps and self._moved(tensor, name) is None:
            self._check(tensor, self.plan.num_owned, name)
            out: Tensor = self._aggregate(aggregation, tensor, name, self._paces[place])
            return out
        extended = self.append(tensor, name=name)[0]
        if place[1] == self._slot and place not in self._read_once and self.plan.num_ranks > 1:
            self._read_once[place], self._paces[place] = True, (Pace(), Pace())
        return aggregation.whole(extended)

    def fold(self, tensor: Tensor) -> Tensor:
        """The owned rows with what other ranks hold for them added: the adjoint of `append`.

        Args:
            tensor: ``(num_rows, ...)``, floating point.

        Returns:
            ``(num_owned, ...)``.
        """
        self._check(tensor, self.plan.num_rows, "fold")
        folded: Tensor = Fold.apply(self._route(True, ""), tensor)
        return folded

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the ranks; its gradient is summed too."""
        summed: Tensor = Sum.apply(self._add_up, tensor)
        return summed

    def max(self, tensor: Tensor) -> Tensor:
        """The largest `tensor` over the ranks, without a gradient."""
        values = tensor.new_zeros((self.transport.num_ranks, *tensor.shape))
        values[self.transport.rank] = tensor.detach()
        self._add_up(values)
        return values.amax(0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _append(self, tensors: list[Tensor], exact: bool, name: str) -> tuple[Tensor, ...]:
        self._begin(tensors)
        if self.plan.num_ranks == 1:
            return tuple(tensors)
        fresh = exact or self._exact or not all(t.is_floating_point() for t in tensors)
        history = self._fresh if fresh else self.history
        route = self._route(exact, name)
        appended: tuple[Tensor, ...] = Append.apply(route, history, self._forget, *tensors)
        return appended

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _aggregate(
        self, aggregation: Aggregation, tensor: Tensor, name: str, paces: tuple[Pace, Pace]
    ) -> Tensor:
        self._begin([tensor])
        out: Tensor = ExchangedAggregation.apply(
            self._route(False, name), aggregation, paces, tensor
        )
        self._recent = []
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _constant(self, tensor: Tensor, name: str) -> Tensor:
        """The rows of a constant, extended. It takes no slot, so what follows has its own noise and
        place in every epoch, whether this one happens in it or not.
        """
        if self.checking:
            self._compare(f"constant {tuple(tensor.shape[1:])} {tensor.dtype}")
        if self.transport.rank == 0:
            _log.info("%s reads features that never change: their halo rows move once", name)
        with torch.inference_mode(False), torch.no_grad():
            return self._route(True, name).push([tensor])[0]

    def _route(self, exact: bool, name: str) -> Route:
        shard = self.shard
        if id(shard) not in self._ids:
            self._ids[id(shard)] = RowIds(shard)
        return Route(
            self.transport,
            shard.plan,
            self._ids[id(shard)],
            *((Full(), Full()) if exact or self._exact else self._quantizers),
            key=(self.seed, self._epoch, self._slot),
            name=name or f"exchange {self._slot}",
            lane=self.history.lane,
            observer=self.observer,
            allocations=self.allocations,
        )

    def _begin(self, tensors: Sequence[Tensor]) -> None:
        """Takes the next slot, and compares what travels in it over the ranks."""
        self._slot += 1
        if self.checking:
            layout = [(tuple(t.shape[1:]), str(t.dtype), t.requires_grad) for t in tensors]
            self._compare(f"exchange {self._slot}: {layout}")

    def _compare(self, signature: str) -> None:
        """Raises unless all ranks are at the same exchange."""
        self.history.lane.run(partial(check_signature, self.transport, signature))

    def _add_up(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over the ranks."""
        with self.observer.timer.timing("all_reduce"):
            if tensor.is_cuda:  # NCCL pairs the calls of a group by their order
                self.history.lane.run(partial(self.transport.all_reduce, tensor), tensor)
            else:
                self.transport.all_reduce(tensor)

    def _forget(self) -> None:
        self._recent = []

    def _moved(self, tensor: Tensor, name: str) -> Tensor | None:
        """The extended rows of a constant, or of what the last call moved and nothing changed."""
        if self.constants is not None and self.constants.holds(self.shard, tensor):
            return self.constants.extended(self.shard, tensor, lambda: self._constant(tensor, name))
        for known, version, requires_grad, extended in self._recent:
            unchanged = known is tensor and version == tensor._version
            differentiable = extended.requires_grad or not (
                requires_grad and torch.is_grad_enabled()
            )
            if unchanged and requires_grad == tensor.requires_grad and differentiable:
                self._read_once[id(self.shard), self._slot, self._exact] = False
                return extended
        return None

    @staticmethod
    def _check(tensor: Tensor, expected: int, name: str) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != expected:
            raise ValueError(
                f"{name or 'exchange'}: expected {expected} rows (the nodes this rank holds), got "
                f"a tensor of shape {tuple(tensor.shape)}: the model changes the number of rows "
                "between its layers"
            )
