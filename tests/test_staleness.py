"""The pipelined mode against a simulation in one process, and what bounds its age."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from ranks import run_ranks
from stale_reference import train_stale
from torch import Tensor
from torch_geometric.nn import GraphSAGE
from trainers import (
    NUM_CLASSES,
    NUM_FEATURES,
    OnRanks,
    Setting,
    UserModule,
    assert_equal_runs,
    largest_difference,
    loader,
    small_gnn,
    small_graph,
    weights,
)

from lightning_sylvie import BoundedStaleness, SylvieStrategy
from lightning_sylvie.schedule import Drifting

EPOCHS = 20


def parts(num_ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(max(num_ranks, 1), (small_graph().num_nodes,), generator=draw)


def fit(setting: Setting, **options: Any) -> dict[str, Tensor]:
    strategy = {"partition": parts(setting.num_ranks), **options.pop("strategy", {})}
    module = options.pop("module", UserModule)()
    data = (loader(), loader()) if options.pop("validate", False) else (loader(),)
    setting.trainer(strategy=strategy, max_epochs=EPOCHS, **options).fit(module, *data)
    return weights(module)


class Training(UserModule):
    validation_step = None  # type: ignore[assignment]


class Normed(Training):
    """Its norms sum over ranks while halo rows are under way."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            gnn = GraphSAGE(NUM_FEATURES, 32, 3, NUM_CLASSES, norm="batch_norm", dropout=0.2)
        super().__init__(gnn)


ASYNC = {"mode": "async"}


def unbounded(setting: Setting) -> Any:
    return fit(setting, strategy=ASYNC, module=Training)


def validated(setting: Setting) -> Any:
    """Validation and a sanity check in full precision neither use nor disturb what is kept."""
    return fit(setting, strategy=ASYNC, validate=True, num_sanity_val_steps=1)


def bounded_3(setting: Setting) -> Any:
    return fit(setting, strategy=ASYNC, module=Training, callbacks=[BoundedStaleness(3)])


def bounded_2(setting: Setting) -> Any:
    callbacks = [BoundedStaleness(2)]
    return fit(setting, strategy=ASYNC, validate=True, callbacks=callbacks, limit_train_batches=1)


def smoothed(setting: Setting) -> Any:
    """PipeGCN's rule, for rows and gradients apart."""
    return fit(setting, strategy={"smoothing": (0.95, 0.8), **ASYNC}, module=Training)


def smoothed_and_bounded(setting: Setting) -> Any:
    callbacks = [BoundedStaleness(3)]
    strategy = {"smoothing": 0.95, **ASYNC}
    return fit(setting, strategy=strategy, module=Training, callbacks=callbacks)


def tuned(setting: Setting) -> Any:
    """A search for a learning rate trains, and goes back: its rows are not those of an epoch."""
    finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False)
    return fit(setting, strategy=ASYNC, module=Training, callbacks=[finder])


MOMENTA = {smoothed: (0.95, 0.8), smoothed_and_bounded: (0.95, 0.95)}
SIMULATED: dict[Callable[[Setting], Any], Callable[[int], bool]] = {
    unbounded: lambda epoch: False,
    validated: lambda epoch: False,
    bounded_3: lambda epoch: epoch % 3 == 0,
    bounded_2: lambda epoch: epoch % 2 == 0,
    smoothed: lambda epoch: False,
    tuned: lambda epoch: False,
    smoothed_and_bounded: lambda epoch: epoch % 3 == 0,
}


def one_bit(setting: Setting, **options: Any) -> Any:
    torch.manual_seed(1)
    return fit(setting, module=Normed, **options)


def synchronous(setting: Setting) -> Any:
    return one_bit(setting, strategy={"bits": 1})


def bounded_1(setting: Setting) -> Any:
    strategy = {"bits": 1, **ASYNC}
    return one_bit(setting, strategy=strategy, callbacks=[BoundedStaleness(1)])


def asynchronous(setting: Setting) -> Any:
    return one_bit(setting, strategy={"bits": 1, **ASYNC})


CASES = OnRanks(*SIMULATED, synchronous, bounded_1, asynchronous)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", SIMULATED)
def test_rows_of_the_last_epoch_equal_the_simulation(case: Any, num_ranks: int) -> None:
    start = {name: value.double() for name, value in weights(small_gnn()).items()}
    graph = small_graph()
    momentum = MOMENTA.get(case, (0.0, 0.0))
    expected = train_stale(
        start, graph, parts(num_ranks), EPOCHS, SIMULATED[case], momentum=momentum
    )
    found = [
        {name.removeprefix("gnn."): value for name, value in rank.items()}
        for rank in CASES(case, num_ranks)
    ]
    assert_equal_runs(found, expected, 1e-10)
    if num_ranks > 1:  # and staleness is no small thing, nor is smoothing
        fresh = train_stale(start, graph, parts(num_ranks), EPOCHS, lambda epoch: True)
        assert largest_difference(expected, fresh) > 1e-3
        rough = train_stale(start, graph, parts(num_ranks), EPOCHS, SIMULATED[case])
        assert (largest_difference(expected, rough) > 1e-3) == (case in MOMENTA)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_bound_of_one_epoch_is_the_synchronous_mode_to_the_bit(num_ranks: int) -> None:
    expected = CASES(synchronous, num_ranks)
    for found, value in zip(CASES(bounded_1, num_ranks), expected, strict=True):
        assert largest_difference(found, value) == 0.0
    if num_ranks > 1:
        assert largest_difference(CASES(asynchronous, num_ranks)[0], expected[0]) > 1e-3


class Weighing(Callback):
    """Tensors alive and resident megabytes after some epochs."""

    def __init__(self, *epochs: int) -> None:
        self.epochs = epochs
        self.tensors: list[int] = []
        self.megabytes: list[float] = []

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch in self.epochs:
            gc.collect()
            self.tensors.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def many_epochs(folder: str, num_epochs: int) -> Any:
    """Every kind of epoch: stale, synchronous, the one before it."""
    weighing = Weighing(num_epochs // 3, num_epochs - 1)
    trainer = Setting(2, Path(folder)).trainer(
        strategy={"bits": 1, **ASYNC},
        max_epochs=num_epochs,
        callbacks=[weighing, BoundedStaleness(3)],
    )
    trainer.fit(Normed(), loader())
    threads = [thread.name for thread in threading.enumerate()]
    return weighing.tensors, weighing.megabytes, threads


def test_hundreds_of_epochs_take_no_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for tensors, (early, late), threads in run_ranks(many_epochs, 2, folder, 300):
            assert tensors[0] == tensors[1]
            assert late - early < 2.0
            assert "beside" not in threads  # it ends with the fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps_s": 0}, 'positive integer or "auto", got 0'),
        ({"eps_s": 2.0}, 'positive integer or "auto", got 2.0'),
        ({"eps_s": True}, 'positive integer or "auto", got True'),
        ({"eps_s": "often"}, "got 'often'"),
        ({"eps_s": "auto", "maximum": 0}, "maximum of at least 1 epoch, got 0"),
        ({"eps_s": "auto", "threshold": 0.0}, "threshold above 0, got 0.0"),
    ],
)
def test_a_bound_that_means_nothing_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundedStaleness(**options)


def test_a_bound_needs_the_pipelined_mode() -> None:
    with pytest.raises(ValueError, match=r'mode="async".*got SylvieStrategy\(mode="sync"\)'):
        Setting(0, Path()).trainer_of(SylvieStrategy(), callbacks=[BoundedStaleness(2)]).fit(
            Training(), loader()
        )
    with pytest.raises(ValueError, match="got SingleDeviceStrategy"):
        Setting(0, Path()).trainer(callbacks=[BoundedStaleness(2)]).fit(Training(), loader())


def test_drift_and_the_maximum_decide() -> None:
    schedule = Drifting(maximum=4, threshold=0.5)
    drifts = [0.1, 0.2, 0.1, 0.3, 0.1, 0.7, 0.2, 0.1, 0.1, 0.1, 0.1]
    found = []
    for epoch, drift in enumerate(drifts):
        synchronous = schedule.is_synchronous(epoch)
        schedule.began(epoch, synchronous=synchronous)
        schedule.measured(drift**2 * 7.0, 7.0)
        found += [epoch] * synchronous
    assert found == [0, 4, 6, 10]
