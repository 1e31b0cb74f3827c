"""How gradients are summed: the options that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sylvie.all_reduce import choose


@dataclass(frozen=True)
class GradientSum:
    """How parameter gradients are summed over the ranks.

    Attributes:
        all_reduce: ``"auto"`` (the backend's own), ``"ring"``, ``"segmented_ring"``,
            ``"recursive_doubling"``, ``"rabenseifner"``, ``"linear"`` or ``"nonoverlapping"``.
        bucket_bytes: Gradients travel together in buckets of about this size. Small ones start
            earlier, large ones cost fewer messages.
        bits: Bits per value on the way: 32; 16, or 1 with the error fed back into the next step
            (see `Compressed`), which go past `all_reduce`. float64 gradients travel as they are.
        overlap: Start a bucket in backward as soon as its gradients are there, not after it.

    Raises:
        ValueError: For a value outside of the above.
    """

    all_reduce: str = "auto"
    bucket_bytes: int = 2**18
    bits: int = 32
    overlap: bool = True

    @classmethod
    def of(cls, given: str | GradientSum) -> GradientSum:
        """The options for the name of an algorithm; options as they are."""
        return given if isinstance(given, GradientSum) else cls(given)

    def __post_init__(self) -> None:
        choose(self.all_reduce)
        if self.bucket_bytes < 1:
            raise ValueError(f"expected bucket_bytes of at least 1, got {self.bucket_bytes}")
        if self.bits not in (1, 16, 32):
            raise ValueError(f"expected bits of gradient sums in (1, 16, 32), got {self.bits}")
