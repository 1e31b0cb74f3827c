"""The command line: Lightning's, with three commands more that train nothing."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_sylvie.ahead import describe_run, partition_run
from lightning_sylvie.datamodule import GraphDataModule
from lightning_sylvie.report import report

try:
    import jsonargparse  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "expected jsonargparse for the command line: pip install 'lightning-sylvie[cli]'"
    ) from error
from lightning.pytorch.cli import LightningCLI


class GraphTrainer(Trainer):
    """Lightning's Trainer with commands before and after training."""

    def describe(self, model: LightningModule, datamodule: LightningDataModule) -> None:
        """Prints parts, balance, traffic and memory of a run, and trains nothing."""
        print(describe_run(self, model, datamodule))

    def partition(
        self, model: LightningModule, datamodule: LightningDataModule, folder: str
    ) -> None:
        """Cuts the graph for the run's devices into a folder that --data.data takes.

        Args:
            folder: Made by this command; holds the parts.
        """
        partition_run(self, model, datamodule, Path(folder))

    def report(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        run: str,
        output: str = "report.html",
    ) -> None:
        """Writes a page about a finished run: metrics, curves, and pictures of its cut.

        Args:
            run: Folder of the run's CSV or TensorBoard log.
            output: The page.
        """
        page = report({Path(run).name: run}, describe_run(self, model, datamodule))
        Path(output).write_text(page)
        print(output)


class GraphCLI(LightningCLI):
    """Lightning's commands, and those of `GraphTrainer`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        known: dict[str, set[str]] = LightningCLI.subcommands()
        ahead = {"describe", "partition", "report"}
        return known | {command: {"model", "datamodule"} for command in ahead}


def main(args: list[str] | None = None, *, run: bool = True) -> GraphCLI:
    """Runs the command that the command line names.

    Args:
        args: In place of the command line.
        run: False: only makes trainer, model and data; `args` then name no command.
    """
    return GraphCLI(
        LightningModule,
        GraphDataModule,
        subclass_mode_model=True,
        trainer_class=GraphTrainer,
        trainer_defaults={"strategy": {"class_path": "lightning_sylvie.SylvieStrategy"}},
        parser_kwargs={"prog": "python -m lightning_sylvie"},
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        args=args,
        run=run,
    )
