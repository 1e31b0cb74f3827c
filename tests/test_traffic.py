"""What `HaloTraffic` logs, read back from the loggers' own files, against formulas."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch_geometric.nn import GraphSAGE
from trainers import NUM_CLASSES, NUM_FEATURES, OnRanks, Setting, UserModule, loader, small_graph
from trainers import weights as weights_of

from lightning_sylvie import BoundedStaleness, HaloTraffic
from lightning_sylvie.runlog import Scalars, read_scalars
from lightning_sylvie.traffic import SPLIT, Traffic

WIDTH, EPOCHS, RANKS = 40, 5, 2
PLACES = [("gnn.convs.1", "forward"), ("gnn.convs.2", "forward")]
PLACES += [(layer, "backward") for layer, _ in PLACES]


class Slow(UserModule):
    """Rank 1 comes late to the last layer; validation exchanges rows too, which do not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(GraphSAGE(NUM_FEATURES, WIDTH, 3, NUM_CLASSES))
        self.gnn.convs[2].register_forward_pre_hook(lambda *_: self.late(seconds))  # type: ignore[union-attr,index]

    def late(self, seconds: float) -> None:
        if self.training and self.global_rank == 1:
            time.sleep(seconds)


class Skipping(Slow):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 else None


def parts() -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(RANKS, (small_graph().num_nodes,), generator=draw)


def rows() -> tuple[int, int, int]:
    """Most rows that a part sends forward, and backward; halo rows of all parts."""
    part, pairs = parts(), small_graph().edge_index.T.tolist()
    halo = {(source, int(part[to])) for source, to in pairs if part[source] != part[to]}
    owners, readers = [int(part[s]) for s, _ in halo], [reader for _, reader in halo]
    return (
        max(owners.count(rank) for rank in range(RANKS)),
        max(readers.count(rank) for rank in range(RANKS)),
        len(halo),
    )


def fit(
    setting: Setting, *callbacks: Any, module: UserModule | None = None, **strategy: Any
) -> tuple[Path, L.Trainer]:
    """A run that writes two logs into the folder."""
    torch.manual_seed(1)
    module, folder = module or Slow(), setting.folder
    trainer = setting.trainer(
        strategy={"partition": parts(), **strategy},
        max_epochs=EPOCHS,
        logger=[CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "events", "")],
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader(), loader())
    trainer.logged = weights_of(module)  # type: ignore[attr-defined]
    return folder, trainer


def logs(folder: Path) -> tuple[Scalars, Scalars]:
    return read_scalars(folder / "csv"), read_scalars(folder / "events")


def rotated(setting: Setting) -> Any:
    folder, trainer = fit(setting, HaloTraffic(1), bits=1, gradient_bits=2)
    return logs(folder), dict(trainer.progress_bar_metrics)


def pipelined(setting: Setting) -> Any:
    folder, trainer = fit(setting, HaloTraffic(1), bits=4, quantizer="minmax", mode="async")
    return logs(folder), dict(trainer.progress_bar_metrics)


def bounded(setting: Setting) -> Any:
    callbacks = BoundedStaleness(2), HaloTraffic(1, progress_bar=False)
    folder, trainer = fit(setting, *callbacks, bits=1, mode="async")
    return logs(folder), dict(trainer.progress_bar_metrics)


def late(setting: Setting) -> Any:
    return logs(fit(setting, HaloTraffic(1), module=Slow(0.06), bits=32)[0])[0]


def every_second(setting: Setting) -> Any:
    """The weights of runs with and without the callback, and what it logged."""
    options = {"bits": 1, "mode": "async"}
    folder, trainer = fit(setting, HaloTraffic(2), **options)
    other = Setting(setting.num_ranks, setting.folder / "unheard")
    other.folder.mkdir(exist_ok=True)
    unheard = fit(other, **options)[1]
    return logs(folder)[0], trainer.logged, unheard.logged  # type: ignore[attr-defined]


def seldom(setting: Setting) -> Any:
    """Steps of this graph are so short that logging takes more than 1 % of several."""
    return logs(fit(setting, HaloTraffic(), bits=1)[0])[0]


def skipping(setting: Setting) -> Any:
    return logs(fit(setting, HaloTraffic(1), module=Skipping(), bits=1)[0])[0]


def alone(setting: Setting) -> Any:
    folder, trainer = fit(setting, HaloTraffic(1), bits=1, partition="random")
    return logs(folder)[0], dict(trainer.progress_bar_metrics)


on_ranks = OnRanks(rotated, pipelined, bounded, late, every_second, seldom, skipping)
on_one = OnRanks(alone)


def of(case: Callable[[Setting], Any]) -> Any:
    """What rank 0, which alone writes logs, has returned."""
    return on_ranks(case, RANKS)[0]


def values(scalars: Scalars, place: tuple[str, str], what: str) -> list[float]:
    return scalars["/".join(("halo", *place, what))][1]


def test_bytes_of_rotated_rows_are_those_of_the_message_format() -> None:
    """40 values: codes, two scales (the last 32 columns, and the 8 before them), a mean."""
    scalars = of(rotated)[0][0]
    sent, sent_back, halo = rows()
    features = halo * NUM_FEATURES * 8  # once, as they are
    for place in PLACES:
        codes, count = (40 // 8, sent) if place[1] == "forward" else (40 * 2 // 8, sent_back)
        assert values(scalars, place, "bytes") == [count * (codes + 2 * 2 + 2)] * EPOCHS
        assert values(scalars, place, "side_bytes") == [count * (2 * 2 + 2)] * EPOCHS
        assert values(scalars, place, "age") == [0] * EPOCHS
    usual = 2 * halo * (5 + 6 + 10 + 6)
    assert scalars["halo/bytes"] == ([*range(EPOCHS)], [usual + features, *[usual] * (EPOCHS - 1)])
    assert set(scalars["halo/ratio"][1]) == {halo / small_graph().num_nodes}
    layers = {name.split("/")[1] for name in scalars if name.count("/") > 1}
    assert layers == {"gnn.convs.0", "gnn.convs.1", "gnn.convs.2"}, "validation was counted"


def test_bytes_of_minmax_rows_in_the_pipelined_mode() -> None:
    """An epoch's own messages, though the last of them arrive in the next epoch."""
    (scalars, _), bar = of(pipelined)
    sent, sent_back, _ = rows()
    for place in PLACES:
        count = sent if place[1] == "forward" else sent_back
        assert values(scalars, place, "bytes") == [count * (40 * 4 // 8 + 4)] * EPOCHS
        assert values(scalars, place, "side_bytes") == [count * 4] * EPOCHS
        assert values(scalars, place, "age") == [0, *[1] * (EPOCHS - 1)]
        for what in ("quantize_s", "move_s", "dequantize_s"):
            assert all(seconds > 0 for seconds in values(scalars, place, what)), what
    hidden = scalars["halo/hidden"][1]
    assert hidden[0] == 0
    assert all(0 < share <= 1 for share in hidden[1:])
    assert re.fullmatch(r"[\d.]+ kB/epoch \d+% hidden", bar["halo"])


def test_an_epoch_before_a_synchronous_one_sends_nothing() -> None:
    (scalars, _), bar = of(bounded)
    full = rows()[0] * (5 + 6)
    assert values(scalars, PLACES[0], "age") == [0, 1, 0, 1, 0]
    assert values(scalars, PLACES[0], "bytes") == [full, 0, full, 0, full]
    assert scalars["halo/hidden"][0] == [0, 2, 4]
    assert "halo" not in bar


@pytest.mark.parametrize("case", [rotated, pipelined, bounded])
def test_event_files_and_the_table_hold_the_same(case: Callable[[Setting], Any]) -> None:
    (table, events), _ = of(case)
    assert table.keys() == events.keys()
    for name, (steps, expected) in events.items():
        assert table[name][0] == steps, name
        assert table[name][1] == pytest.approx(expected, rel=1e-6), name


def test_errors_are_those_of_the_bits() -> None:
    """Rows as they are lose nothing; the rotated sign of a value has an error of pi / 2 - 1."""
    scalars = of(rotated)[0][0]
    assert values(scalars, ("gnn.convs.0", "forward"), "nmse") == [0]
    for place in PLACES:
        bounds = (0.3, 0.8) if place[1] == "forward" else (0.05, 0.3)
        for nmse in values(scalars, place, "nmse"):
            assert bounds[0] < nmse < bounds[1], place
        assert max(values(of(pipelined)[0][0], place, "nmse")) < 0.05


def test_waiting_for_the_slowest_rank_is_told_from_moving() -> None:
    """Rank 1 is late at the last layer: rank 0 waits there, and rank 1 computes longest."""
    scalars = of(late)
    for epoch in range(1, EPOCHS):
        assert 0.05 < values(scalars, ("gnn.convs.2", "forward"), "wait_s")[epoch]
        assert values(scalars, ("gnn.convs.2", "forward"), "move_s")[epoch] < 0.04
        assert scalars["time/compute"][1][epoch] > 0.06
        assert scalars["time/wait"][1][epoch] < 0.05


def test_listening_changes_nothing_and_skips_epochs() -> None:
    for rank in range(RANKS):
        heard, unheard = on_ranks(every_second, RANKS)[rank][1:]
        assert all(torch.equal(heard[name], unheard[name]) for name in heard)
    assert of(every_second)[0]["halo/bytes"][0] == [1, 3]


def test_measuring_takes_less_than_it_may() -> None:
    """Three epochs tell what it costs; then come more epochs than these without it."""
    assert of(seldom)["halo/bytes"][0] == [0, 1, 2]


def test_a_step_that_was_skipped_is_not_told() -> None:
    scalars = of(skipping)
    assert len(scalars["halo/bytes"][0]) == EPOCHS - 1
    assert all(seconds > 0 for seconds in scalars["time/compute"][1])


def test_on_one_device_there_is_no_traffic() -> None:
    scalars, bar = on_one(alone, 1)[0]
    assert scalars["halo/bytes"][1] == scalars["halo/ratio"][1] == [0] * EPOCHS
    assert all(seconds > 0 for seconds in scalars["time/compute"][1])
    assert "halo/hidden" not in scalars
    assert "halo" not in bar


def two_ranks() -> Traffic:
    """Rank 0 waits 2 s for rank 1 in a fresh exchange; a stale one goes on beside rank 1's step."""
    fresh = [[[0, 1], [1, 4], [4, 5]], [[2, 3], [3, 4], [4, 5]]]
    stale = [[[5, 6], [6, 9], [9, 10]], [[5, 6], [6, 8], [8, 9]]]
    spans = torch.tensor([fresh, stale], dtype=torch.float64).transpose(0, 1)
    head = torch.tensor([[8, 2, 30, 50, 0.5], [9, 1, 20, 50, 0.1]], dtype=torch.float64)
    numbers = [
        [[100, 10, 0, 1, 4, 5], [200, 20, 1, 1, 2, 0]],
        [[300, 30, 0, 2, 4, 3], [100, 10, 1, 2, 2, 1]],
    ]
    places = (("conv", "forward"), ("conv", "backward"))
    return Traffic(places, head, torch.tensor(numbers, dtype=torch.float64), spans)


def hiding(stall: float) -> dict[str, float]:
    """The split of rank 0 of a fresh exchange of 4 s, 3 of them waiting, that stalls for less."""
    spans = [[[[0, 1], [1, 5], [5, 6]]], [[[0, 4], [4, 5], [5, 6]]]]
    head = torch.tensor([[20, 0, 1, 1, 0], [10, 0, 1, 1, 0]], dtype=torch.float64)
    numbers = torch.tensor([[[1, 0, 0, 0, 0, stall]], [[1, 0, 0, 0, 0, 6]]], dtype=torch.float64)
    places = (("conv", "forward"),)
    return Traffic(places, head, numbers, torch.tensor(spans, dtype=torch.float64)).split()


@pytest.mark.parametrize(("stall", "wait", "move"), [(6, 3, 1), (4, 1, 1), (2.5, 0, 0.5)])
def test_what_computation_hides_is_the_beginning_of_an_exchange(
    stall: float, wait: float, move: float
) -> None:
    split = hiding(stall)
    assert (split["wait"], split["move"]) == (wait, move)
    assert sum(split.values()) == 20


def test_a_step_of_known_times() -> None:
    traffic = two_ranks()
    assert traffic.waits.tolist() == [[2, 0], [0, 0]]
    assert traffic.hidden == pytest.approx(1 - (5 + 0 + 3 + 1) / (10 + 7))
    split = {"compute": 4, "quantize": 1, "move": 1 + 1, "wait": 0, "dequantize": 1}
    assert traffic.split() == {**split, "all_reduce": 1}  # of rank 1; rank 0 computes 1 s
    assert tuple(traffic.split()) == SPLIT
    assert sum(traffic.split().values()) == 9
    metrics = traffic.metrics()
    forward = {name.rpartition("/")[2]: v for name, v in metrics.items() if "conv/forward" in name}
    assert forward == {
        "bytes": 300, "side_bytes": 30, "quantize_s": 1, "move_s": 1, "wait_s": 2,
        "dequantize_s": 1, "stall_s": 5, "age": 0, "nmse": 3 / 8,
    }  # fmt: skip
    assert metrics["halo/bytes"] == 700
    assert metrics["halo/ratio"] == 0.5
    assert traffic.interval(0.01) == 6  # 0.5 s of every 50 at least
    assert traffic.interval(0.5) == 1


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    trainer = Setting(0, tmp_path).trainer(callbacks=[HaloTraffic(1)])
    with pytest.raises(ValueError, match=r"expects strategy=SylvieStrategy.*SingleDeviceStrategy"):
        trainer.fit(UserModule(), loader(), loader())


@pytest.mark.parametrize("given", [0, -1, 2.5, True])
def test_every_n_epochs_is_checked(given: Any) -> None:
    with pytest.raises(ValueError, match="expected every_n_epochs as a positive integer or"):
        HaloTraffic(given)
