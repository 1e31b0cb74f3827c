"""One model on its part, from set-up to tear-down: what a step does around the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sylvie.attach import Attachment, Exchange
from lightning_sylvie.exchange import Halo
from lightning_sylvie.gradient import GradientReducer, GradientSum
from lightning_sylvie.history import History
from lightning_sylvie.loss import LossReduction, as_global, loss_share, silence
from lightning_sylvie.observer import Observer
from lightning_sylvie.rng import rng_state, set_rng_state
from lightning_sylvie.rowless import taking_no_rows
from lightning_sylvie.shard import Shard
from lightning_sylvie.steplog import StepLog
from lightning_sylvie.transport import Transport
from lightning_sylvie.world import end_all


class Run:
    """A module whose layers exchange halo rows, whose `log` tells global values, until `detach`.

    Args:
        module: Changed in place.
        halo: How halo rows are exchanged.
        transports: For halo rows, and for sums of values and gradients.
        exchange: As in `SylvieStrategy`.
        loss_reduction: Likewise.
        all_reduce: Likewise.
        debug: Likewise.
    """

    def __init__(
        self,
        module: LightningModule,
        halo: Halo,
        transports: Sequence[Transport],
        *,
        exchange: Exchange,
        loss_reduction: LossReduction,
        all_reduce: GradientSum,
        debug: bool,
    ) -> None:
        self._module, self._transports = module, transports
        self._sums = transports[1]
        self._reduction, self._checking = loss_reduction, debug
        self._gradient_sum = all_reduce
        self.attachment = Attachment(module, halo, exchange=exchange)
        self.log = StepLog(module, self._sums)
        module.log = self.log  # type: ignore[method-assign]
        self._reducer: GradientReducer | None = None
        self._shard: Shard | None = None
        self._share = 1.0
        self._resumed: dict[str, Any] | None = None
        self._lacking: dict[int, bool] = {}

    def detach(self) -> None:
        """Gives the module its own layers and its own `log` back, after what is under way."""
        if self._reducer is not None:
            self._reducer.close()
        self.attachment.halo.history.close()
        self.attachment.detach()
        self._module.__dict__.pop("log", None)

    def prepare_gradients(self) -> None:
        """Makes room for the sums of gradients; when the parameters have their sizes and device."""
        self._reducer = GradientReducer(self._module.parameters(), self._sums, self._gradient_sum)

    @property
    def shard(self) -> Shard:
        """The part of the last training step."""
        assert self._shard is not None
        return self._shard

    def observe(self, observer: Observer) -> None:
        """Lets `observer` hear of exchanges and sums that begin from here on."""
        assert self._reducer is not None
        self.attachment.halo.observer = self._reducer.observer = observer

    def train(self, step: Callable[[], Any], batch: Any, shard: Shard) -> Any:
        """The output of a training step, with the loss of the whole graph as its loss's value."""
        self._shard = shard
        with self._using(shard, "training"):
            self._share = loss_share(self._reduction, batch, shard, self._sums)
            history = self._begin(shard)
            output = step()
            loss: Any = output.get("loss") if isinstance(output, dict) else output
            value = self.log.flush(loss, self._share, history.drift)
            history.agree(*self.log.carried)
        if value is None:
            return output
        loss = as_global(loss, value)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def evaluate(self, step: Callable[[], Any], stage: str, shard: Shard) -> Any:
        """The output of a step without gradients."""
        with self._using(shard, stage):
            output = step()
            if stage != "predicting":
                self.log.flush(None, 0.0)
        return output

    def backward(self, loss: Tensor, backward: Callable[[Tensor], None]) -> None:
        """Backward of this rank's share, and the sum of all gradients over the ranks.

        The share is scaled up by the number of ranks and the sum down by it, so gradients that an
        earlier backward of the same step has summed already stay as they are. Hooks after backward
        and clipping see the gradients of the whole graph.
        """
        assert self._shard is not None
        assert self._reducer is not None
        num_ranks = self._sums.num_ranks
        halo, epoch = self.attachment.halo, self._module.trainer.global_step
        with (
            self._failing_together(),
            halo.using(self._shard, epoch=epoch),
            self._reducer.overlapping(scale=1.0 / num_ranks),
        ):
            scaled = loss if num_ranks == 1 else loss * (self._share * num_ranks)
            if not self._share:
                silence(scaled)
            backward(scaled)
            halo.history.lane.check()  # an error beside the computation is told at once

    def fail(self, error: BaseException) -> None:
        """Ends this rank's exchanges after an error, and tells the other ranks. Safe twice."""
        self.attachment.halo.history.lane.give_up(error)
        end_all(self._transports, error)

    def progress(self) -> dict[str, Any] | None:
        """What `resume` needs to go on from here on this rank; None before the first step."""
        if self._shard is None:
            return self._resumed
        halo = self.attachment.halo
        return {
            "seed": halo.seed,
            "cut": self._shard.fingerprint,
            "rng": rng_state(self._module.device),
            "history": halo.history.state(),  # after what is under way
            "bits": halo.allocations.state(),
            "gradients": self._reducer.state() if self._reducer is not None else [],
        }

    def forget(self) -> None:
        """Lets the next step use nothing of the last one: the weights are others."""
        self.attachment.halo.history.forget()
        self.attachment.halo.allocations.restore({})

    def resume(self, progress: dict[str, Any]) -> None:
        """Goes on from what `progress` gave on this rank, or from its ``"seed"`` alone."""
        halo = self.attachment.halo
        halo.seed = progress["seed"]
        halo.history.restore(progress.get("history", {}))
        halo.allocations.restore(progress.get("bits", {}))
        if self._reducer is not None:
            self._reducer.restore(progress.get("gradients", []))
        self._resumed = progress if "rng" in progress else None

    def _begin(self, shard: Shard) -> History:
        """Begins a training step; the first one after `resume` with its random numbers."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_rng_state(resumed["rng"], self._module.device)
            if resumed["history"] and resumed["cut"] != shard.fingerprint:
                rank_zero_info(
                    "The graph is cut in another way than in the checkpoint: the first epoch is "
                    "synchronous."
                )
        history = self.attachment.halo.history
        history.begin(self._module.trainer.current_epoch)
        return history

    @contextmanager
    def _using(self, shard: Shard, stage: str) -> Iterator[None]:
        halo, epoch = self.attachment.halo, self._module.trainer.global_step
        exact = stage != "training"
        if id(shard) not in self._lacking:
            self._lacking[id(shard)] = _lacks_rows(shard)
        lacking = taking_no_rows(self._module) if self._lacking[id(shard)] else nullcontext()
        with (
            halo.using(shard, epoch=epoch, exact=exact, checking=self._checking),
            self.log.step(stage, shard),
            lacking,
            self._failing_together(),
        ):
            yield
        self._checking = False

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Tells the others of an error at once: a callback's `on_exception` may wait for them."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise


def _lacks_rows(shard: Shard) -> bool:
    """Whether this rank has no row for one of the graph's masks."""
    counts = ((name, count) for name, count in shard.mask_counts.items() if name in shard.node)
    return any(count and not bool(shard.node[name].any()) for name, count in counts)
