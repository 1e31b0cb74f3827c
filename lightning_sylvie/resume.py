"""What a checkpoint holds of every rank, so that a run goes on as if it had not been stopped."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sylvie.launch import Launched
from lightning_sylvie.run import Run
from lightning_sylvie.transport import Transport
from lightning_sylvie.world import end_all

KEY = "lightning_sylvie"
"""The checkpoint's entry: a version, and the progress of every rank in rank order."""

VERSION = 1


class Resumable(Launched):
    """Puts every rank's state into checkpoints, and goes on from one.

    Beside what Lightning stores, a run that continues to the bit needs each rank's random numbers
    (dropout masks), the seed of the quantizers' noise, and in the pipelined mode the rows of age 1
    and the phase of the schedule. On another number of ranks or another cut rows of age 1 are of no
    use: the first epoch is synchronous.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._transports: list[Transport] = []
        self._run: Run | None = None
        self._loaded: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes one file, on rank 0. Every rank calls it.

        Checkpoints that training can't go on from hold weights alone. After an error the other
        ranks may be anywhere: they are told, and nothing is asked of them.
        """
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            end_all(self._transports, sys.exc_info()[1] or RuntimeError("training was interrupted"))
        elif "optimizer_states" in checkpoint:
            state = (self._run.progress() if self._run is not None else None) or self._last
            if state is not None and (states := _gathered(self._transports[-1], state)):
                checkpoint[KEY] = {"version": VERSION, "ranks": states}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = checkpoint.pop(KEY, None)
        if self._run is not None:  # a tuner, which goes back to where it began
            self._run.forget()
            self._resume(self._trainer)
        return checkpoint

    def _resume(self, trainer: Trainer) -> None:
        """Has the run that begins go on from the checkpoint that was loaded for it."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self._run is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if loaded["version"] != VERSION:
            raise ValueError(
                f"expected a checkpoint of version {VERSION}, got {loaded['version']}: it was "
                "written by another lightning_sylvie; its weights can be loaded alone"
            )
        states, num_ranks = loaded["ranks"], self._transports[0].num_ranks
        if len(states) == num_ranks:
            self._run.resume(states[self._transports[0].rank])
            return
        self._run.resume({"seed": states[0]["seed"]})
        if states[0]["history"]:
            rank_zero_info(
                f"The checkpoint is of {len(states)} ranks, this run has {num_ranks}: its first "
                "epoch is synchronous."
            )

    def _keep_progress(self) -> None:
        """Remembers where training ends, for a checkpoint that is saved after it."""
        state = self._trainer.state
        if self._run is not None and state.fn == TrainerFn.FITTING:
            interrupted = state.status == TrainerStatus.INTERRUPTED
            self._last = None if interrupted else self._run.progress()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _gathered(transport: Transport, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks, in rank order, on rank 0; elsewhere nothing."""
    file = io.BytesIO()
    torch.save(state, file)
    sizes = transport.all_gather_object(file.tell())
    rank, num_ranks = transport.rank, transport.num_ranks
    message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    send_counts, recv_counts = [0] * num_ranks, [0] * num_ranks
    if rank:
        send_counts[0] = sizes[rank]
    else:
        recv_counts[1:] = sizes[1:]
    message = (message if rank else message[:0]).to(transport.device).unsqueeze(1)
    received = transport.exchange(message, send_counts, recv_counts).squeeze(1).cpu()
    if rank:
        return []
    files = received.split(recv_counts)[1:]
    return [state, *(torch.load(io.BytesIO(f.numpy().tobytes()), weights_only=True) for f in files)]
