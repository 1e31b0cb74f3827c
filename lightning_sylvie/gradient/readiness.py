"""Which buckets are complete while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_sylvie.gradient.bucket import Bucket


class Readiness:
    """Starts buckets in their order, each once it and all before it have their gradients.

    The order is that of the list, so it is the same on all ranks, whatever came first on each. A
    parameter is ready when it has received as many gradients as in earlier backwards: one, or more
    under reentrant checkpointing. Until that number is known, or where a parameter receives none,
    its bucket and later ones are left to whoever calls after backward. So is the last bucket:
    backward ends with it.

    Args:
        buckets: In the order in which they start.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._usual: dict[Tensor, int] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._seen: dict[Tensor, int] = {}
        self._missing: list[int] = []
        self._start: Callable[[Bucket], None] | None = None
        self._num_started = 0

    @contextmanager
    def watching(self, start: Callable[[Bucket], None]) -> Iterator[None]:
        """Calls `start` with every bucket that completes inside.

        Raises:
            RuntimeError: If a gradient comes after its bucket has started.
        """
        self._seen, self._missing, self._num_started = {}, [], 0
        for number, bucket in enumerate(self._buckets):
            trainable = [p for p in bucket.parameters if p.requires_grad]
            self._missing.append(len(trainable))
            for parameter in trainable:
                if parameter not in self._handles:
                    hook = partial(self._received, number)
                    handle = parameter.register_post_accumulate_grad_hook(hook)
                    self._handles[parameter] = handle
        self._start = start
        try:
            yield
        finally:
            self._start = None
        for seen, count in self._seen.items():
            self._usual[seen] = max(count, self._usual.get(seen, 0))

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _received(self, number: int, parameter: Tensor) -> None:
        if self._start is None:
            return
        if number < self._num_started:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} received another gradient after "
                "its sum over the ranks had started, more than in earlier backwards: pass "
                "all_reduce=GradientSum(overlap=False)"
            )
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._seen[parameter] == self._usual.get(parameter):
            self._missing[number] -= 1
            self._advance()

    def _advance(self) -> None:
        assert self._start is not None
        while self._num_started < len(self._buckets) - 1 and not self._missing[self._num_started]:
            bucket = self._buckets[self._num_started]
            self._num_started += 1
            self._start(bucket)
