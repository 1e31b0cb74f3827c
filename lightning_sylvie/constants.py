"""Node tensors that never change, whose halo rows are moved once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_sylvie.shard import Shard


class Constants:
    """The extended rows of input features and the like.

    A constant is known by identity. All ranks run one program, so they agree on what it is. One
    that is changed in place after its rows were moved, which its version tells, or that asks for a
    gradient, is treated as any other tensor from then on. Costs the memory of the extended rows.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Constant] = {}

    def keep(self, shard: Shard) -> None:
        """Declares the node tensors of `shard` constant, in both orientations of its edges."""
        for part in (shard, shard.reverse):
            if part is not None:
                for tensor in shard.node.values():
                    self._kept.setdefault((id(part), id(tensor)), _Constant(part, tensor))

    def holds(self, shard: Shard, tensor: Tensor) -> bool:
        """Whether `tensor` is a constant of `shard`, unchanged since its rows were moved."""
        constant = self._kept.get((id(shard), id(tensor)))
        return constant is not None and constant.is_unchanged()

    def extended(self, shard: Shard, tensor: Tensor, move: Callable[[], Tensor]) -> Tensor:
        """The extended rows of a constant: `move()` at its first use."""
        return self._kept[id(shard), id(tensor)].extended(move)


class _Constant:
    """One tensor of one shard; both are held, so that their identities stay theirs."""

    def __init__(self, shard: Shard, tensor: Tensor) -> None:
        self._shard, self._tensor = shard, tensor
        self._version = -1  # not moved yet
        self._extended: Tensor | None = None

    def is_unchanged(self) -> bool:
        tensor = self._tensor
        if tensor.requires_grad or tensor.is_inference():  # an inference tensor has no version
            return False
        return self._version in (-1, tensor._version)

    def extended(self, move: Callable[[], Tensor]) -> Tensor:
        if self._extended is None:
            self._version, self._extended = self._tensor._version, move()
        return self._extended
