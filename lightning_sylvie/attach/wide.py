"""Which rows are right while a layer holds halo rows from its input on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class Wide:
    """The state of the layer that got its halo rows at its input (``exchange="input"``).

    What it computes row by row from its input is right in the halo rows too. What it aggregates
    is right in the owned rows only, so what is read in a second hop is exchanged again.
    """

    def __init__(self) -> None:
        self._read: dict[int, Tensor] | None = None
        self._hopped = False
        self._on_edges = False

    @property
    def active(self) -> bool:
        """Whether the layer that runs now holds halo rows from its input on."""
        return self._read is not None

    @property
    def on_nodes(self) -> bool:
        """Whether it computes on nodes, where its halo rows are another rank's to count."""
        return self.active and not self._on_edges

    @contextmanager
    def on(self) -> Iterator[None]:
        """Marks the layer that runs inside."""
        self._read, self._hopped = {}, False
        try:
            yield
        finally:
            self._read = None

    @contextmanager
    def on_edges(self) -> Iterator[None]:
        """Marks what runs inside as computing on edges, which are on one rank each."""
        outer, self._on_edges = self._on_edges, True
        try:
            yield
        finally:
            self._on_edges = outer

    def is_stale(self, tensor: Tensor) -> bool:
        """Whether the halo rows of `tensor` may differ from their owners' rows."""
        return self._hopped and id(tensor) not in (self._read or {})

    def note_read(self, tensors: Iterable[Tensor], *, hop: bool) -> None:
        """Notes what the layer reads of its neighbours; `hop` if it aggregates it."""
        if self._read is not None and not self._hopped:
            self._read.update((id(tensor), tensor) for tensor in tensors)
        self._hopped |= hop
