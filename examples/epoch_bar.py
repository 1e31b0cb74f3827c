"""A progress bar for training that takes one step per epoch."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm


class EpochBar(ProgressBar):
    """One bar over the epochs; Lightning's own would start again, at 0/1, in every epoch.

    Args:
        name: Written in front of the bar.

    Attributes:
        seconds: What training took, without set-up.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seconds = name, 0.0
        self._enabled = True
        self._bar: tqdm[Any] | None = None

    def disable(self) -> None:
        self._enabled = False  # Lightning calls this on every rank but the first

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._started = time.perf_counter()
        self._bar = tqdm(
            total=trainer.max_epochs, desc=self.name, unit="epoch", disable=not self._enabled
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        assert self._bar is not None
        self._bar.set_postfix(metrics, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds = time.perf_counter() - self._started
        assert self._bar is not None
        self._bar.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._bar is not None:
            self._bar.close()
