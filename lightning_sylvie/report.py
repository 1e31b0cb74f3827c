"""One self-contained page about a run: what it reached, and what its cut costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import nan
from pathlib import Path

from lightning_sylvie import pictures
from lightning_sylvie.describe import Description
from lightning_sylvie.pictures import svg
from lightning_sylvie.runlog import Scalars, read_scalars

_TRAFFIC = ("halo/", "time/")  # what `HaloTraffic` logs has pictures of its own

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;
background:#fff;color:#1f2328}
.wide{overflow-x:auto}
figure{margin:1.5rem 0}figure svg{max-width:100%;height:auto}figcaption,td.num{font-size:.9rem}
table{border-collapse:collapse}
td,th{padding:.2rem .8rem;border-bottom:1px solid #8886;text-align:left}
td.num{text-align:right;font-variant-numeric:tabular-nums}pre{overflow-x:auto;font-size:.8rem}
@media (prefers-color-scheme:dark){body{background:#161b22;color:#e6edf3}}
"""


def report(
    runs: dict[str, str | Path], description: Description | None = None, *, title: str = ""
) -> str:
    """An HTML page with tables and pictures inside, for a light and a dark screen.

    Args:
        runs: Label -> folder of a run, which `read_scalars` takes.
        description: Of their cut; None: only what was logged.
        title: Of the page.

    Raises:
        ValueError: For a folder without a log.
        ModuleNotFoundError: Without matplotlib.
    """
    title = escape(title or ", ".join(runs))
    logged = {label: read_scalars(folder) for label, folder in runs.items()}
    body = [f"<h1>{title}</h1>", "<h2>Metrics</h2>", _table(logged)]
    beside = ("test_", *_TRAFFIC)
    names = sorted({n for run in logged.values() for n in run if not n.startswith(beside)})
    body += [
        _figure(svg(pictures.curves(logged, name)), f"{name} over the epochs")
        for name in names
        if any(len(run[name][0]) > 1 for run in logged.values() if name in run)
    ]
    if any("time/compute" in run for run in logged.values()):
        caption = "What a step's time goes to, on the rank that computes longest"
        body += ["<h2>The exchanges</h2>", _figure(svg(pictures.time_split(logged)), caption)]
        body.append(_traffic_table(logged))
    if description is not None:
        body += _cut(description)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(logged: dict[str, Scalars]) -> str:
    """Last, lowest and highest value of everything that was logged, single exchanges apart."""
    head = ("run", "value", "points", "last", "lowest", "highest")
    rows = []
    for label, run in logged.items():
        for name, (steps, values) in sorted(run.items()):
            if _exchange(name) is None:
                numbers = (values[-1], min(values), max(values))
                rows.append(((label, name), (float(len(steps)), *numbers)))
    return _html_table(head, rows)


def _traffic_table(logged: dict[str, Scalars]) -> str:
    """The last values of each exchange: a row per layer and direction."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for label, run in logged.items():
        for name, (_, values) in run.items():
            if (exchange := _exchange(name)) is not None:
                layer, direction, what = exchange
                found.setdefault((label, layer, direction), {})[what] = values[-1]
    columns = sorted({what for row in found.values() for what in row})
    rows = [(key, tuple(row.get(what, nan) for what in columns)) for key, row in found.items()]
    return _html_table(("run", "layer", "direction", *columns), rows)


def _exchange(name: str) -> tuple[str, str, str] | None:
    """Layer, direction and quantity of a value of one exchange; see `HaloTraffic`."""
    match name.split("/"):
        case ["halo", layer, direction, what]:
            return layer, direction, what
    return None


def _html_table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], Sequence[float]]]) -> str:
    """Rows of texts, then of numbers."""
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for texts, numbers in rows:
        cells = [f"<td>{escape(text)}</td>" for text in texts]
        cells += [f'<td class="num">{number:.4g}</td>' for number in numbers]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return '<div class="wide"><table>' + "".join(lines) + "</table></div>"


def _cut(description: Description) -> list[str]:
    body = ["<h2>The cut</h2>", f"<pre>{escape(str(description))}</pre>"]
    body.append(_figure(svg(pictures.balance(description)), "How even the parts are"))
    if len(description.parts) > 1:
        caption = "Rows from part to part in one exchange"
        body.append(_figure(svg(pictures.traffic(description)), caption))
    if description.widths:
        caption = "What all parts send in one training epoch"
        body.append(_figure(svg(pictures.bytes_over_bits(description)), caption))
    return body


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
