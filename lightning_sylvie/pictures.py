"""Pictures of a cut and of runs, as matplotlib figures. Needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from lightning_sylvie.describe import BITS, Description
from lightning_sylvie.runlog import Scalars
from lightning_sylvie.traffic import SPLIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3a8fd0", "#e0902a", "#2aa876", "#c86fa5", "#8a7fd6", "#a0813f")  # on light and on dark
FIELDS = {"nodes": "nodes", "edges": "edges", "halo": "halo rows", "train_nodes": "training nodes"}
_INK = "#010203"  # stands for the colour of the page's text


def traffic(description: Description) -> Figure:
    """Rows that each part sends to each other part in one exchange, as a heat map."""
    rows = [part.sent for part in description.parts]
    with _axes("receiving part", "sending part", height=4.2, width=5.2) as axes:
        image = axes.imshow(rows, cmap="viridis", vmin=0)
        middle = max(max(row) for row in rows) / 2
        for sender, row in enumerate(rows):
            for receiver, count in enumerate(row):
                if sender != receiver and len(rows) <= 8:
                    color = "black" if count > middle else "white"
                    axes.text(receiver, sender, f"{count}", ha="center", va="center", color=color)
        ticks = range(0, len(rows), -(-len(rows) // 16))
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        _figure(axes).colorbar(image, ax=axes, label="rows")
    return _figure(axes)


def balance(description: Description) -> Figure:
    """Nodes, edges, halo rows and training nodes of each part, relative to the mean part."""
    parts = range(len(description.parts))
    with _axes("part", "share of the mean part") as axes:
        for place, (field, label) in enumerate(FIELDS.items()):
            counts = [int(getattr(part, field)) for part in description.parts]
            mean = sum(counts) / len(counts) or 1.0
            left = [part + 0.2 * (place - 1.5) for part in parts]
            axes.bar(left, [n / mean for n in counts], 0.18, label=label, color=COLORS[place])
        axes.axhline(1, color=_INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(0, len(parts), -(-len(parts) // 16)))
        _legend(axes)
    return _figure(axes)


def bytes_over_bits(description: Description) -> Figure:
    """Megabytes that all parts together send in one training epoch, at each number of bits."""
    parts = range(len(description.parts))
    sent = [sum(description.bytes_per_epoch(part, bits) for part in parts) / 1e6 for bits in BITS]
    with _axes("bits per value", "MB per epoch") as axes:
        bars = axes.bar(range(len(BITS)), sent, color=COLORS[0])
        axes.bar_label(bars, [f"{size:.3g}" for size in sent], padding=2)
        axes.set_xticks(range(len(BITS)), [str(bits) for bits in BITS])
        axes.margins(y=0.12)
    return _figure(axes)


def curves(runs: Mapping[str, Scalars], name: str) -> Figure:
    """One logged value of several runs over the epochs.

    Args:
        runs: The run's label -> what `read_scalars` gave for it.
        name: The value, such as ``"val_acc"``.

    Raises:
        ValueError: If no run has logged it.
    """
    if not any(name in run for run in runs.values()):
        known = sorted({known for run in runs.values() for known in run})
        raise ValueError(f"expected a logged value among {known}, got {name!r}")
    with _axes("epoch", name) as axes:
        for place, (label, run) in enumerate(runs.items()):
            if name in run:
                steps, values = run[name]
                mark = "o" if len(steps) < 3 else None
                color = COLORS[place % len(COLORS)]
                axes.plot(steps, values, label=label, color=color, marker=mark)
        _legend(axes)
    return _figure(axes)


def time_split(runs: Mapping[str, Scalars]) -> Figure:
    """What an epoch's step spends its time on, a bar for each run (Figure 2 of the paper).

    Args:
        runs: The run's label -> what `read_scalars` gave for it. Means over the epochs that
            `HaloTraffic` has logged; if there are several, without the first, which sets up.

    Raises:
        ValueError: If no run had `HaloTraffic`.
    """
    split = {label: _mean_split(run) for label, run in runs.items() if "time/compute" in run}
    if not split:
        raise ValueError(
            f"expected time/compute in the log of a run, which callbacks=[HaloTraffic()] puts "
            f"there, got runs {list(runs)} without it"
        )
    with _axes("ms per epoch", "", height=1.5 + 0.45 * len(split)) as axes:
        ends = [0.0] * len(split)
        for color, what in zip(COLORS, SPLIT, strict=True):
            lengths = [1000 * seconds[what] for seconds in split.values()]
            label = what.replace("_", "-")
            axes.barh(range(len(split)), lengths, 0.6, ends, label=label, color=color)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        axes.set_yticks(range(len(split)), list(split))
        axes.invert_yaxis()
        _legend(axes)
    return _figure(axes)


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element for a page, with its text in the page's colour."""
    import matplotlib

    file = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "sylvie"}):  # the same figure, the same text
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


@contextmanager
def _axes(x: str, y: str, *, width: float = 6.4, height: float = 3.6) -> Iterator[Axes]:
    """Empty axes with names, on a figure that belongs to nobody else."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected matplotlib for pictures: pip install 'lightning-sylvie[plots]'"
        ) from error
    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    look: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(look | dict.fromkeys(ink, _INK)):
        axes = Figure(figsize=(width, height), layout="constrained").subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield axes


def _mean_split(run: Scalars) -> dict[str, float]:
    """Seconds of each part of `SPLIT`."""
    found = {what: run[f"time/{what}"][1] for what in SPLIT}
    return {what: fmean(values[1:] or values) for what, values in found.items()}


def _figure(axes: Axes) -> Figure:
    return cast("Figure", axes.figure)


def _legend(axes: Axes) -> None:
    """Above the axes, where it hides no line."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
