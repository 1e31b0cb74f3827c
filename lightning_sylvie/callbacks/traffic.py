"""What halo exchanges cost and lose, in every logger of the Trainer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_sylvie.describe import human
from lightning_sylvie.observer import Observer, Tallies
from lightning_sylvie.strategy import SylvieStrategy
from lightning_sylvie.traffic import Traffic

_SHARE = 0.003
"""Of the steps' time: what measuring and logging may take, as far as it shows. It is a third of
what is promised, as threads of loggers go unseen."""


@dataclass(frozen=True)
class _Measured:
    """One epoch's step: what was heard, and under which step and epoch loggers know it."""

    tallies: Tallies
    end: Callable[[], None]
    step: int
    epoch: int


@final
class HaloTraffic(Callback):
    """Logs bytes, times, quantization error and age of the halo exchanges of training epochs.

    ``halo/<layer>/<forward|backward>/...``: ``bytes`` and, of them, ``side_bytes`` (scales and
    zeros); seconds ``quantize_s``, ``move_s``, ``wait_s`` (for the slowest rank to begin),
    ``dequantize_s``, and ``stall_s``, in which the step waited for it; ``age`` of the rows used,
    in epochs: each the maximum over the ranks. ``nmse``: squared error of a sample of all ranks'
    rows, relative to their squared norm.

    ``halo/bytes``: of all ranks together; ``halo/ratio``: halo rows / nodes; ``halo/hidden``: share
    of the exchanges' time in which no step waited for them, if there were any. ``time/...``:
    seconds of ``compute``, ``quantize``, ``move``, ``wait``, ``dequantize`` and ``all_reduce`` on
    the rank that computes longest, which add up to its step.

    In ``mode="async"`` an epoch's exchanges go on in the next one: its values are logged one epoch
    later, under its own step.

    Args:
        every_n_epochs: Measure and log one epoch in so many, the last of them; the others cost
            nothing. ``"auto"``: the first three, then so seldom that it takes less than 1 % of
            the steps' time.
        progress_bar: Show bytes and hidden share in the progress bar.

    Attributes:
        interval: Epochs of which ``"auto"`` measures one, as it knows its cost so far.

    Raises:
        ValueError: For a value outside of the above, or for another strategy.
    """

    def __init__(
        self, every_n_epochs: int | Literal["auto"] = "auto", progress_bar: bool = True
    ) -> None:
        if every_n_epochs != "auto" and (type(every_n_epochs) is not int or every_n_epochs < 1):
            raise ValueError(
                f'expected every_n_epochs as a positive integer or "auto", got {every_n_epochs!r}'
            )
        self.every_n_epochs, self.progress_bar = every_n_epochs, progress_bar
        self._begin()

    def _begin(self) -> None:
        self._running: _Measured | None = None
        self._measured: list[_Measured] = []  # and not told yet
        self._costs: list[float] = []
        self._last, self.interval = -1, 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SylvieStrategy):
            raise ValueError(
                "HaloTraffic expects strategy=SylvieStrategy(...), got "
                f"{type(trainer.strategy).__name__}, which exchanges no halo rows: remove the "
                "callback or set the strategy"
            )
        self._begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._running = None  # a step that was skipped has no end
        if self._is_due(epoch := trainer.current_epoch):
            self._last = epoch
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning counts them
            tallies = Tallies(device=pl_module.device)
            _strategy(trainer).run.observe(tallies)
            self._running = _Measured(tallies, tallies.timer.start("step"), step, epoch)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._running is not None:
            self._running.end()
            self._measured.append(self._running)
        self._running = None
        _strategy(trainer).run.observe(Observer())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before = trainer.current_epoch + (_strategy(trainer).mode == "sync")
        while self._measured and self._measured[0].epoch < before:
            self._tell(trainer, self._measured.pop(0))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._measured:  # what is on the lane ends first
            _strategy(trainer).run.attachment.halo.history.lane.run(lambda: None)
        while self._measured:
            self._tell(trainer, self._measured.pop(0))

    def _is_due(self, epoch: int) -> bool:
        """Whether to measure an epoch; the same on all ranks."""
        if self.every_n_epochs == "auto":
            return epoch >= self._last + self.interval
        return (epoch + 1) % self.every_n_epochs == 0

    def _tell(self, trainer: Trainer, measured: _Measured) -> None:
        """Agrees with the other ranks and logs; every rank calls it."""
        start, strategy, tallies = time.perf_counter(), _strategy(trainer), measured.tallies
        # The first time loggers open their files, which is no measure of what follows.
        cost = statistics.median(self._costs[1:]) if len(self._costs) > 1 else 0.0
        plan, transport = strategy.run.shard.plan, strategy.gradient_transport
        traffic = Traffic.gather(tallies, plan, transport, cost)
        self.interval = traffic.interval(_SHARE)
        if trainer.is_global_zero:
            self._log(trainer, measured, traffic)
        sampling = sum(record.timer.seconds("sample") for record in tallies.records)
        self._costs.append(time.perf_counter() - start + sampling)

    def _log(self, trainer: Trainer, measured: _Measured, traffic: Traffic) -> None:
        metrics = {**traffic.metrics(), "epoch": measured.epoch}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=measured.step)
        if self.progress_bar and (hidden := traffic.hidden) is not None:
            line = f"{human(traffic.num_bytes)}/epoch {hidden:.0%} hidden"
            trainer.progress_bar_metrics["halo"] = line  # type: ignore[assignment]


def _strategy(trainer: Trainer) -> SylvieStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, SylvieStrategy)
    return strategy
