"""Every rank gets its part: from one folder, from a host without it, from parts made ahead."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from trainers import (
    OnRanks,
    Setting,
    UserModule,
    alone,
    assert_equal_runs,
    loader,
    small_gnn,
    small_graph,
    weights,
)

from lightning_sylvie import GraphDataModule, SylvieModule
from lightning_sylvie.batch import graph_of
from lightning_sylvie.partition import Partitioner, Random
from lightning_sylvie.store import ShardStore


class Counting(Random):
    """Remembers how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def assign(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        return super().assign(*args, **options)


def fit(setting: Setting, partition: Partitioner | None = None, **strategy: Any) -> Any:
    module = UserModule()
    options = {"partition": partition or Random(), **strategy}
    setting.trainer(max_epochs=4, strategy=options).fit(module, loader(), loader())
    return weights(module)


def host_without_the_folder(setting: Setting) -> Any:
    """Each rank as on a host of its own; only rank 0's cuts the graph."""
    host, counting = setting.folder / f"host{setting.rank}", Counting()
    found = fit(setting, counting, cache_dir=host)
    if setting.num_ranks:
        assert counting.calls == (setting.rank == 0)
        held = sorted(path.name for path in host.glob("*/shard-*"))
        every = [f"shard-{rank}.pt" for rank in range(setting.num_ranks)]
        assert held == (every if setting.rank == 0 else [every[setting.rank]])
        assert_equal_runs([fit(setting, counting, cache_dir=host)], found, 0.0)
        assert counting.calls == (setting.rank == 0), "the cache is not used"
    return found


def damaged_file(setting: Setting) -> Any:
    """One byte of one part is wrong: it is cut again."""
    counting, folder = Counting(), setting.folder / "parts"
    fit(setting, counting, cache_dir=folder)
    if setting.num_ranks:
        dist.barrier()
        if setting.rank == 0:
            (file,) = folder.glob("*/shard-1.pt")
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
    found = fit(setting, counting, cache_dir=folder)
    if setting.num_ranks:
        assert counting.calls == (2 if setting.rank == 0 else 0)
    return found


def missing_file_on_another_host(setting: Setting) -> Any:
    host = setting.folder / f"host{setting.rank}"
    fit(setting, cache_dir=host)
    if setting.rank == 1:
        (file,) = host.glob("*/shard-1.pt")
        file.unlink()
    return fit(setting, cache_dir=host)


def parts_made_ahead(folder: Path, num_parts: int) -> Path:
    """What another script has left."""
    store = ShardStore(folder)
    return folder / store.open_or_build(graph_of(small_graph()), Random(), num_parts)


def folder_of_parts(setting: Setting) -> Any:
    module = UserModule()
    data: Any = small_graph()
    if setting.num_ranks:
        if setting.rank == 0:
            parts_made_ahead(setting.folder, setting.num_ranks)
        dist.barrier()
        (data,) = setting.folder.glob(f"{setting.num_ranks}-*")
    setting.trainer().fit(module, GraphDataModule(data))
    return weights(module)


def folder_for_more_ranks(setting: Setting) -> None:
    folder = setting.folder / str(setting.rank)
    parts = parts_made_ahead(folder, setting.num_ranks + 1)
    setting.trainer().fit(UserModule(), GraphDataModule(parts))


def folder_for_fewer_ranks(setting: Setting) -> None:
    folder = setting.folder / str(setting.rank)
    parts = parts_made_ahead(folder, setting.num_ranks - 1)
    setting.trainer().fit(UserModule(), GraphDataModule(parts))


def different_cuts(setting: Setting) -> None:
    """Parts of another graph on rank 1, under the same name."""
    folder = setting.folder / str(setting.rank)
    parts = parts_made_ahead(folder, setting.num_ranks)
    if setting.rank == 1:
        other = ShardStore(folder / "other")
        graph = graph_of(small_graph(num_nodes=90))
        key = other.open_or_build(graph, Random(), setting.num_ranks)
        parts.rename(folder / "away")
        (folder / "other" / key).rename(parts)
    setting.trainer().fit(UserModule(), GraphDataModule(parts))


class ThreeLoaders(UserModule):
    def validation_step(self, data: Data, batch: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(data, data.val_mask))


def one_cut_for_all_loaders(setting: Setting) -> Any:
    counting, module = Counting(), ThreeLoaders()
    trainer = setting.trainer(strategy={"partition": counting})
    trainer.fit(module, loader(), [loader(), loader()])
    trainer.test(SylvieModule(small_gnn()), loader(), verbose=False)
    if setting.num_ranks:
        assert counting.calls == (setting.rank == 0)
    return weights(module)


def a_graph_per_stage(setting: Setting) -> Any:
    """Validation on another, larger graph."""
    module = UserModule()
    trainer = setting.trainer()
    trainer.fit(module, loader(), loader(small_graph(num_nodes=200)))
    return {**weights(module), "val_loss": trainer.callback_metrics["val_loss"]}


def inductive_with_a_given_assignment(setting: Setting) -> Any:
    """A part per node of the whole graph also cuts the subgraph of the training nodes."""
    module = UserModule()
    parts = torch.arange(small_graph().num_nodes) % max(1, setting.num_ranks)
    trainer = setting.trainer(strategy={"partition": parts})
    trainer.fit(module, GraphDataModule(small_graph(), inductive=True))
    return weights(module)


class Copying(UserModule):
    """Copies itself while it is attached, and uses the copy."""

    def on_train_epoch_end(self) -> None:
        self.copies = copy.deepcopy(self), copy.deepcopy(self.gnn)

    def validation_step(self, data: Data, _: int) -> None:
        out = self.gnn(data.x, data.edge_index)
        if self.trainer.current_epoch == self.trainer.max_epochs:
            return
        self.log("val_loss", F.cross_entropy(out[data.val_mask], data.y[data.val_mask]))
        copied = copy.deepcopy(self.gnn)
        assert torch.equal(copied(data.x, data.edge_index), out)


def copies_of_an_attached_module(setting: Setting) -> Any:
    """They compute with their own weights, and after the run they are ordinary modules."""
    module = Copying()
    setting.trainer(max_epochs=3).fit(module, loader(), loader())
    graph, (whole, gnn) = small_graph(), module.copies
    with torch.no_grad():
        for net in (whole.gnn, gnn):
            net.double()
            copied = net(graph.x, graph.edge_index)
            assert torch.allclose(copied, module.gnn(graph.x, graph.edge_index), atol=1e-12)
    copy.deepcopy(module)
    return weights(whole) | {"after": copied}


class Watching(UserModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, data: Data, _: int) -> Any:
        self.seen.append(list(data.to_dict().values()))
        data.x = data.x * 2.0  # gone in the next epoch
        data.x = data.x / 2.0
        return super().training_step(data, _)


def the_same_tensors_in_every_epoch(setting: Setting) -> None:
    module = Watching()
    trainer = setting.trainer(max_epochs=3)
    trainer.fit(module, loader(), loader())
    first, *others = module.seen
    assert len(others) == 2
    for later in others:
        assert all(one is other for one, other in zip(first, later, strict=True))
    assert not isinstance(trainer.train_dataloader, torch.utils.data.DataLoader)


RUNS = [
    host_without_the_folder,
    damaged_file,
    missing_file_on_another_host,
    folder_of_parts,
    one_cut_for_all_loaders,
    a_graph_per_stage,
    inductive_with_a_given_assignment,
    copies_of_an_attached_module,
]
REFUSED = {
    folder_for_more_ranks: "expected parts for 2 ranks, got 3: cut them again",
    folder_for_fewer_ranks: "expected shard-1.pt in .*, which was cut for fewer ranks",
    different_cuts: "the ranks hold parts of different cuts",
}
on_ranks = OnRanks(*RUNS, the_same_tensors_in_every_epoch, *REFUSED)


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_that_of_one_device(case: Any) -> None:
    assert_equal_runs(on_ranks(case, 2), alone(case))


def test_loaders_move_nothing_and_have_no_workers() -> None:
    on_ranks(the_same_tensors_in_every_epoch, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_do_not_fit_are_refused(case: Any) -> None:
    for text in on_ranks.raised(case, 2):
        assert re.search(REFUSED[case], text.replace("\n", " ")), text


def test_a_folder_of_parts_needs_the_strategy(tmp_path: Path) -> None:
    data = GraphDataModule(parts_made_ahead(tmp_path, 2))
    with pytest.raises(ValueError, match="expected SylvieStrategy for a folder of parts"):
        next(iter(data.train_dataloader()))
