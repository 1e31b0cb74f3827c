"""How the processes of a run start, and what Lightning's own collectives among them need."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn


class Launched(DDPStrategy):
    """A process per device, by Lightning's launchers; a single process has no group."""

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:  # torchrun, SLURM: ours would start them twice
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )
        else:
            super()._configure_launcher()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}  # every rank's loader yields the whole graph

    def setup_distributed(self) -> None:
        """One process needs no group, nor what Lightning asks of one at every step."""
        if self.world_size > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        if self.world_size > 1 or trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
        else:
            self._setup_alone(trainer)

    def _setup_alone(self, trainer: Any) -> None:
        """Lightning's set-up for evaluation, without the group that it expects of one process."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()
