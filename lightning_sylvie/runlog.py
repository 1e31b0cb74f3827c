"""What a run has logged, read back from the files of Lightning's CSV or TensorBoard logger."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypeAlias

Scalars: TypeAlias = dict[str, tuple[list[int], list[float]]]
"""Name -> steps and values, in the order of logging."""


def read_scalars(folder: str | Path) -> Scalars:
    """The scalars of one run.

    Args:
        folder: Of the run (``lightning_logs/version_0``), with ``metrics.csv`` or an event file.

    Raises:
        ValueError: If it holds neither.
    """
    folder = Path(folder)
    table = folder / "metrics.csv"
    if table.is_file():
        return _from_csv(table)
    if any(folder.glob("events.out.tfevents.*")):
        return _from_events(folder)
    raise ValueError(
        f"expected metrics.csv or a TensorBoard event file in {folder}, got neither: pass the "
        "folder of a run, such as lightning_logs/version_0"
    )


def _from_csv(table: Path) -> Scalars:
    found: Scalars = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(int(row["step"]))
                    values.append(float(value))
    return found


def _from_events(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found: Scalars = {}
    for name in events.Tags()["scalars"]:
        if name not in ("epoch", "hp_metric"):  # the latter is a placeholder of Lightning
            points = events.Scalars(name)
            found[name] = [point.step for point in points], [point.value for point in points]
    return found
