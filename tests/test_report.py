"""Pictures show the numbers of a cut and of a log; the page holds all and needs nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from test_describe import path_graph

from lightning_sylvie import pictures
from lightning_sylvie.describe import Description, describe
from lightning_sylvie.report import report
from lightning_sylvie.runlog import Scalars, read_scalars
from lightning_sylvie.shard import cut_each

pytest.importorskip("matplotlib")
VALUES = [0.5, 0.25, 0.75]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder that Lightning's own logger has written, a value in every second step."""
    kind = getattr(request, "param", CSVLogger)
    logger = kind(tmp_path, name="", version="first")
    for epoch, value in enumerate(VALUES):
        logger.log_metrics({"val_acc": value, "epoch": epoch}, step=2 * epoch)
    logger.log_metrics({"test_acc": 0.7}, step=6)
    logger.save()
    logger.finalize("success")
    return tmp_path / "first"


@pytest.fixture
def description() -> Description:
    shards = cut_each(path_graph(), torch.tensor([0, 0, 0, 1, 2]), 3)
    return describe(shards, widths=[64, 32], gradient_widths=[32])


@pytest.mark.parametrize("run", [CSVLogger, TensorBoardLogger], indirect=True)
def test_logs_are_read_back(run: Path) -> None:
    found = read_scalars(run)
    assert found.keys() == {"val_acc", "test_acc"}
    assert found["val_acc"] == ([0, 2, 4], VALUES)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected metrics\.csv or a TensorBoard event file in"):
        read_scalars(tmp_path)


def test_traffic_names_the_rows_from_part_to_part(description: Description) -> None:
    """0 - 1 - 2 | 3 | 4: node 2 and node 3 are neighbours, and node 3 and node 4."""
    axes = pictures.traffic(description).axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown == {
        (receiver, sender): "1" if abs(sender - receiver) == 1 else "0"
        for sender in range(3)
        for receiver in range(3)
        if sender != receiver
    }


def test_balance_is_relative_to_the_mean(description: Description) -> None:
    (axes,) = pictures.balance(description).axes
    nodes = [bar.get_height() for bar in axes.containers[0]]
    assert nodes == pytest.approx([3 / (5 / 3), 1 / (5 / 3), 1 / (5 / 3)])


def test_bytes_over_bits(description: Description) -> None:
    """Four boundary entries of 64 and 32 values forward, four halo rows of 32 backward."""
    (axes,) = pictures.bytes_over_bits(description).axes
    assert axes.containers[0][-1].get_height() == pytest.approx(4 * (64 + 32 + 32) * 4 / 1e6)


def test_curves_of_several_runs(run: Path) -> None:
    first = read_scalars(run)
    second = {"val_acc": ([0, 2], [0.1, 0.2])}
    (axes,) = pictures.curves({"first": first, "second": second}, "val_acc").axes
    assert [line.get_label() for line in axes.lines] == ["first", "second"]
    assert list(axes.lines[0].get_ydata()) == VALUES
    with pytest.raises(ValueError, match=r"among \['test_acc', 'val_acc'\], got 'loss'"):
        pictures.curves({"first": first}, "loss")


def traffic_log(compute: float) -> Scalars:
    """Two epochs of HaloTraffic: the first one sets up."""
    split = {"compute": compute, "quantize": 0.02, "move": 0.5, "wait": 0.03, "dequantize": 0.04}
    seconds = {**split, "all_reduce": 0.1}
    found = {f"time/{what}": ([0, 1], [9.0, value]) for what, value in seconds.items()}
    return {**found, "halo/convs.1/forward/nmse": ([0, 1], [0.5, 0.25])}


def test_the_split_stacks_what_an_epoch_spends() -> None:
    runs = {"sync": traffic_log(1.0), "async": traffic_log(2.0), "no callback": {}}
    (axes,) = pictures.time_split(runs).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sync", "async"]
    bars = {stack.get_label(): stack.patches for stack in axes.containers}
    assert list(bars) == ["compute", "quantize", "move", "wait", "dequantize", "all-reduce"]
    assert [bar.get_width() for bar in bars["compute"]] == pytest.approx([1000, 2000])
    last = bars["all-reduce"][1]
    assert last.get_x() + last.get_width() == pytest.approx(2690)
    with pytest.raises(ValueError, match=r"expected time/compute .* got runs \['no callback'\]"):
        pictures.time_split({"no callback": {}})


def test_page_shows_the_exchanges_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="first")
    for step in range(2):
        logger.log_metrics({k: values[step] for k, (_, values) in traffic_log(1.0).items()}, step)
    logger.save()
    page = report({"first": tmp_path / "first"})
    assert page.count("<svg") == 1
    cells = '<td>first</td><td>convs.1</td><td>forward</td><td class="num">0.25</td>'
    assert cells in page
    assert "halo/convs.1" not in page


def test_page_is_complete_and_needs_nothing_else(run: Path, description: Description) -> None:
    page = report({"first <1>": run}, description)
    assert page.count("<svg") == 4  # val_acc, balance, traffic, bytes
    assert "first &lt;1&gt;" in page
    assert str(description).splitlines()[1] in page
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []
    assert pictures._INK not in page
    assert page.count("currentColor") > 10
    assert report({"first <1>": run}, description) == page, "the same run gives another page"


def test_without_matplotlib_it_says_what_to_install(
    description: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-sylvie\[plots\]'"):
        pictures.balance(description)
