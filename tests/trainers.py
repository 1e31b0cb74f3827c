"""Trainers for tests: the same script on one device and on the ranks of `run_ranks`.

A case is a module-level function that takes a `Setting`, trains with ``setting.trainer(...)`` and
returns what is to be compared. `alone` calls it in this process with an ordinary single-device
Trainer; `on_ranks` calls it on every rank with `SylvieStrategy`. Many cases share one start of the
ranks: a test asks for its own.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import ClusterEnvironment
from ranks import run_ranks
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphSAGE

from lightning_sylvie import SylvieStrategy

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 120, 6, 4


def small_graph(dtype: torch.dtype = torch.float64, num_nodes: int = NUM_NODES) -> Data:
    """A directed graph with classes that edges and features tell, masks and a weight per class."""
    draw, real = torch.Generator().manual_seed(7), torch.float64
    y = torch.randint(NUM_CLASSES, (num_nodes,), generator=draw)
    source = torch.randint(num_nodes, (num_nodes * 5,), generator=draw)
    alike = torch.randint(num_nodes, (num_nodes * 5, 12), generator=draw)
    match = (y[alike] == y[source, None]).int().argmax(1)
    edge_index = torch.stack([source, alike.gather(1, match[:, None]).squeeze(1)])
    means = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=draw, dtype=real)
    x = means[y] + torch.randn(num_nodes, NUM_FEATURES, generator=draw, dtype=real)
    split = torch.rand(num_nodes, generator=draw, dtype=real)
    return Data(
        x=x.to(dtype),
        edge_index=edge_index,
        y=y,
        train_mask=split < 0.5,
        val_mask=(split >= 0.5) & (split < 0.75),
        test_mask=split >= 0.75,
    )


def small_gnn(seed: int = 0, **options: Any) -> GraphSAGE:
    """A model with the same weights whenever the seed is the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GraphSAGE(NUM_FEATURES, 8, num_layers=3, out_channels=NUM_CLASSES, **options)


class UserModule(L.LightningModule):
    """What a user of one device has written; it knows nothing of parts."""

    def __init__(self, gnn: torch.nn.Module | None = None, lr: float = 0.02) -> None:
        super().__init__()
        self.gnn = small_gnn() if gnn is None else gnn
        self.lr = lr

    def training_step(self, data: Data, _: int) -> Any:
        loss = self.loss(data, data.train_mask)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, data: Data, _: int) -> Any:
        out = self.gnn(data.x, data.edge_index)
        right = out.argmax(-1) == data.y
        self.log("val_loss", F.cross_entropy(out[data.val_mask], data.y[data.val_mask]))
        self.log("val_acc", right[data.val_mask].double().mean(), prog_bar=True)

    def loss(self, data: Data, mask: Tensor) -> Tensor:
        out = self.gnn(data.x, data.edge_index)
        return F.cross_entropy(out[mask], data.y[mask])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Launched(ClusterEnvironment):
    """The environment of ranks that somebody else has started and connected."""

    def __init__(self) -> None:
        super().__init__()
        # Known from the start, as from environment variables: a failure closes the world's group.
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._size = dist.get_world_size() if dist.is_initialized() else 1

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        assert size == self.world_size()

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.global_rank()

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Setting:
    """Where a case runs.

    Attributes:
        num_ranks: 0: one device and no strategy of ours.
        folder: Empty; the same on all ranks.
        options: Of every `SylvieStrategy` here, beside a case's own.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.num_ranks, self.folder = num_ranks, folder
        self.options: dict[str, Any] = {}

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.num_ranks else 0

    def strategy(self, **options: Any) -> Any:
        if not self.num_ranks:
            return "auto"
        place = {"partition": "random", "cache_dir": self.folder / "parts"}
        options = {**place, **self.options, **options}
        return SylvieStrategy(cluster_environment=Launched(), **{"bits": 32, **options})

    def trainer(self, *, strategy: dict[str, Any] | None = None, **options: Any) -> L.Trainer:
        """A quiet Trainer for 10 epochs in float64; `strategy`: options of `SylvieStrategy`."""
        return self.trainer_of(self.strategy(**(strategy or {})), **options)

    def trainer_of(self, strategy: Any, **options: Any) -> L.Trainer:
        """As `trainer`, with a strategy."""
        defaults = {
            "accelerator": "cpu",
            "devices": self.num_ranks or 1,
            "strategy": strategy,
            "precision": "64-true",
            "max_epochs": 10,
            "default_root_dir": self.folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
        }
        return L.Trainer(**{**defaults, **options})


Case = Callable[[Setting], Any]


def loader(data: Data | None = None) -> DataLoader:
    """PyG's loader of one batch."""
    return DataLoader([small_graph() if data is None else data], batch_size=1)


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def alone(case: Case) -> Any:
    """What the case gives on one device."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Trying to infer the `batch_size`")  # of a plain Data
        return case(Setting(0, Path(folder)))


class OnRanks:
    """What some cases give on every rank, from one start of the ranks for all of them."""

    def __init__(self, *cases: Case, timeout: float = 90.0) -> None:
        self._cases, self._timeout = cases, timeout
        self._results = functools.cache(self._run)

    def __call__(self, case: Case, num_ranks: int) -> list[Any]:
        """The case's value on each rank; raises what it raised on a rank, as text."""
        values = self._of(case, num_ranks)
        for rank, value in enumerate(values):
            if isinstance(value, _Raised):
                raise AssertionError(f"rank {rank} of {num_ranks}:\n{value.text}")
        return values

    def raised(self, case: Case, num_ranks: int) -> list[str]:
        """The traceback that the case ended with on each rank."""
        values = self._of(case, num_ranks)
        assert all(isinstance(value, _Raised) for value in values), values
        return [value.text for value in values]

    def _of(self, case: Case, num_ranks: int) -> list[Any]:
        results = self._results(num_ranks)
        if isinstance(results, AssertionError):
            raise AssertionError(str(results))
        return results[self._cases.index(case)]

    def _run(self, num_ranks: int) -> list[list[Any]] | AssertionError:
        try:
            with tempfile.TemporaryDirectory() as folder:
                by_rank = run_ranks(_all, num_ranks, self._cases, folder, timeout=self._timeout)
        except AssertionError as error:
            return error
        return [list(values) for values in zip(*by_rank, strict=True)]


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _all(cases: Sequence[Case], folder: str) -> list[Any]:
    """The body of every rank: all cases, each in a folder of its own.

    A case that raises ends the connections of its rank and, thereby, the case on all ranks; they
    connect again.
    """
    values: list[Any] = []
    store, rank, num_ranks = _get_default_store(), dist.get_rank(), dist.get_world_size()
    for case in cases:
        if not dist.is_initialized():
            again = PrefixStore(case.__name__, store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=num_ranks)
        place = Path(folder) / case.__name__
        place.mkdir(exist_ok=True)
        torch.manual_seed(0)
        try:
            values.append(case(Setting(num_ranks, place)))
        except Exception:
            values.append(_Raised(f"{case.__name__}: {traceback.format_exc()}"))
            print(values[-1].text, flush=True)  # for the report, if another rank hangs
    return values


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all tensors, relative to the largest value in each."""
    assert found.keys() == expected.keys()
    differences = [
        (found[name].double() - value.double()).abs().max() / (value.double().abs().max() or 1.0)
        for name, value in expected.items()
        if value.numel()
    ]
    return float(torch.stack(differences).max())  # not a number if one is


def assert_equal_runs(
    found: Sequence[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Every rank has the expected tensors, and all ranks have the same bits."""
    for rank, values in enumerate(found):
        difference = largest_difference(values, expected)
        assert difference <= tolerance, f"rank {rank}: {difference:.1e}"
        for name, value in values.items():
            assert torch.equal(value, found[0][name]), f"{name}: rank {rank} is not rank 0"
