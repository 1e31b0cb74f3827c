"""How old halo rows may become: the Bounded Staleness Adaptor."""

from __future__ import annotations

from typing import Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sylvie.schedule import Drifting, Every, Schedule
from lightning_sylvie.strategy import SylvieStrategy


@final
class BoundedStaleness(Callback):
    """Makes some epochs of ``SylvieStrategy(mode="async")`` synchronous (Sylvie-A with eps_s).

    Rows of one epoch ago cost some models accuracy; a synchronous epoch now and then returns most
    of it for little time.

    Args:
        eps_s: Epochs whose number is a multiple of it are synchronous; 1: all. ``"auto"``: the
            epoch after one in which the boundary rows changed by more than `threshold`.
        maximum: With ``"auto"``: there is a synchronous epoch at least every so many.
        threshold: With ``"auto"``: the relative change from epoch to epoch of the sum of a sample
            of boundary rows (so that dropout's noise averages out), over all layers and ranks.

    Raises:
        ValueError: For a value outside of the above.
    """

    def __init__(
        self, eps_s: int | Literal["auto"], *, maximum: int = 20, threshold: float = 0.2
    ) -> None:
        if eps_s != "auto" and (type(eps_s) is not int or eps_s < 1):
            raise ValueError(f'expected eps_s as a positive integer or "auto", got {eps_s!r}')
        if maximum < 1:
            raise ValueError(f"expected maximum of at least 1 epoch, got {maximum}")
        if not threshold > 0:
            raise ValueError(f"expected a threshold above 0, got {threshold}")
        self.eps_s, self.maximum, self.threshold = eps_s, maximum, threshold

    def schedule(self) -> Schedule:
        """What decides about every epoch of one fit."""
        if self.eps_s == "auto":
            return Drifting(self.maximum, self.threshold)
        return Every(self.eps_s)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SylvieStrategy) or strategy.mode != "async":
            given = getattr(strategy, "mode", None)
            raise ValueError(
                'BoundedStaleness expects strategy=SylvieStrategy(mode="async"), got '
                f"{type(strategy).__name__}" + (f'(mode="{given}")' if given else "") + ": without "
                "the pipelined mode every epoch is synchronous; remove the callback or set the mode"
            )
        strategy.schedule = self.schedule()
