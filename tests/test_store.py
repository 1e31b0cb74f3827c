"""Stored shards come back as they were cut, and damage never goes unnoticed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Assignment, Metis, Partitioner, Random
from lightning_sylvie.shard import Shard, cut
from lightning_sylvie.store import ShardStore, StoreError, default_folder


class Counting(Partitioner):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def settings(self) -> str:
        return "counting"

    def assign(
        self,
        graph_edge_index: Tensor,
        num_nodes: int,
        num_parts: int,
        train_mask: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        return torch.arange(num_nodes) % num_parts


def make_graph(num_nodes: int = 30, seed: int = 0) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, num_nodes, (2, 4 * num_nodes), generator=generator)
    return Graph(
        num_nodes,
        edge_index,
        node={
            "x": torch.randn(num_nodes, 5, generator=generator),
            "half": torch.randn(num_nodes, 2, generator=generator).bfloat16(),
            "train_mask": torch.rand(num_nodes, generator=generator) < 0.3,
        },
        edge={"edge_weight": torch.rand(4 * num_nodes, generator=generator)},
        rest={"classes": ["a", "b"], "table": torch.arange(1000)[:3], "sizes": (1, {"k": None})},
    )


def assert_equal(one: object, two: object) -> None:
    """Recursive equality of shards, dicts, sequences and tensors, with dtypes and types."""
    if isinstance(one, Tensor):
        assert isinstance(two, Tensor)
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    elif hasattr(one, "__dataclass_fields__"):
        assert type(one) is type(two)
        assert_equal(vars(one), vars(two))
    elif isinstance(one, dict):
        assert isinstance(two, dict)
        assert list(one) == list(two)
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    else:
        assert one == two


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "parts")


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_read_gives_what_was_cut(store: ShardStore, num_parts: int, reverse: bool) -> None:
    graph = make_graph()
    key = store.open_or_build(graph, Random(), num_parts, reverse=reverse)
    assignment = Random().assign(graph.edge_index, graph.num_nodes, num_parts)
    assert torch.equal(store.assignment(key), assignment)
    for rank, shard in enumerate(cut(graph, assignment, num_parts, reverse=reverse)):
        assert_equal(store.read(key, rank), shard)


def test_empty_part_is_stored(store: ShardStore) -> None:
    graph = make_graph()
    key = store.open_or_build(graph, Assignment(torch.arange(30) % 2 * 2), 3)
    shard = store.read(key, 1)
    assert shard.plan.num_rows == 0
    assert shard.node["x"].shape == (0, 5)


def test_a_view_does_not_drag_its_storage_along(store: ShardStore) -> None:
    large = torch.zeros(1_000_000)
    graph = Graph(4, torch.tensor([[0], [1]]), node={"x": large[:4]}, rest={"t": large[:2]})
    key = store.open_or_build(graph, Random(), 2)
    assert all(file.stat().st_size < 50_000 for file in (store.folder / key).iterdir())


def test_second_open_neither_partitions_nor_writes(store: ShardStore) -> None:
    graph, partitioner = make_graph(), Counting()
    key = store.open_or_build(graph, partitioner, 2)
    before = {file: file.stat().st_mtime_ns for file in (store.folder / key).iterdir()}
    assert store.open_or_build(make_graph(), partitioner, 2) == key
    assert partitioner.calls == 1
    assert before == {file: file.stat().st_mtime_ns for file in (store.folder / key).iterdir()}


def test_key_depends_on_content_and_settings() -> None:
    graph, mask = make_graph(), torch.arange(30) < 10
    turned = Graph(
        graph.num_nodes,
        graph.edge_index,
        {name: graph.node[name] for name in reversed(list(graph.node))},
        graph.edge,
        {name: graph.rest[name] for name in reversed(list(graph.rest))},
    )
    assert ShardStore.key(graph, Metis(), 2) == ShardStore.key(turned, Metis(), 2)
    keys = [
        ShardStore.key(graph, Metis(), 2),
        ShardStore.key(graph, Metis(seed=1), 2),
        ShardStore.key(graph, Random(), 2),
        ShardStore.key(graph, Metis(), 3),
        ShardStore.key(graph, Metis(), 2, mask),
        ShardStore.key(graph, Metis(), 2, ~mask),
        ShardStore.key(graph, Metis(), 2, reverse=True),
        ShardStore.key(make_graph(seed=1), Metis(), 2),
    ]
    assert len(set(keys)) == len(keys)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", ["shard-1.pt", "manifest.json"])
def test_damage_is_found_named_and_repaired(
    store: ShardStore, caplog: pytest.LogCaptureFixture, damage: object, name: str
) -> None:
    graph, partitioner = make_graph(), Counting()
    key = store.open_or_build(graph, partitioner, 2)
    whole = [store.read(key, rank).node["x"].clone() for rank in range(2)]
    assert callable(damage)
    damage(store.folder / key / name)
    with pytest.raises(StoreError, match=f"{key}/{name}"):
        store.read(key, 1)
    assert not store.holds(key, 1)
    if name != "manifest.json":
        assert torch.equal(store.read(key, 0).node["x"], whole[0])
    with caplog.at_level(logging.WARNING):
        assert store.open_or_build(graph, partitioner, 2) == key
    assert name in caplog.text
    assert partitioner.calls == 2
    for rank in range(2):
        assert torch.equal(store.read(key, rank).node["x"], whole[rank])
    assert [path.name for path in store.folder.iterdir()] == [key]


def test_every_byte_of_a_manifest_counts(store: ShardStore) -> None:
    key = store.open_or_build(make_graph(), Random(), 1)
    file = store.folder / key / "manifest.json"
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        file.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        with pytest.raises(StoreError):
            store.verify(key)


def test_a_file_in_place_of_an_entry_is_replaced(store: ShardStore) -> None:
    graph = make_graph()
    store.folder.mkdir()
    (store.folder / store.key(graph, Random(), 2)).write_text("not a folder")
    key = store.open_or_build(graph, Random(), 2)
    store.verify(key)


def test_asking_for_a_rank_beyond_the_cut(store: ShardStore) -> None:
    key = store.open_or_build(make_graph(), Random(), 2)
    with pytest.raises(StoreError, match=r"shard-2\.pt .*fewer ranks"):
        store.read(key, 2)


def test_leftovers_of_dead_builders_are_removed(store: ShardStore) -> None:
    store.folder.mkdir()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = os.uname().nodename
    dead = store.folder / f".building+{host}+{child.pid}+abc"
    alive = store.folder / f".building+{host}+{os.getpid()}+abc"
    abroad = store.folder / f".building+elsewhere+{child.pid}+abc"
    forgotten = store.folder / ".building+elsewhere+1+abc"
    for folder in (dead, alive, abroad, forgotten):
        folder.mkdir()
    os.utime(forgotten, (0, 0))
    store.open_or_build(make_graph(), Random(), 2)
    assert not dead.exists()
    assert not forgotten.exists()
    assert alive.exists()
    assert abroad.exists()


def test_a_failed_build_leaves_nothing(store: ShardStore) -> None:
    class Wrong(Counting):
        def assign(self, *_: object, **__: object) -> Tensor:
            return torch.arange(30)

    with pytest.raises(ValueError, match=r"part numbers 0\.\.1"):
        store.open_or_build(make_graph(), Wrong(), 2)
    assert not store.folder.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="set cache_dir to another folder"):
        ShardStore(tmp_path / "file" / "parts").open_or_build(make_graph(), Random(), 2)


def build_and_read(folder: Path, barrier: object, results: object) -> None:
    """Body of one of two racing processes."""
    torch.set_num_threads(1)
    graph, store = make_graph(2000), ShardStore(folder)
    barrier.wait()  # type: ignore[attr-defined]
    key = store.open_or_build(graph, Random(), 4)
    results.put(sum(store.read(key, rank).plan.num_owned for rank in range(4)))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_write_one_entry_at_once(store: ShardStore, damaged: bool) -> None:
    if damaged:
        key = store.open_or_build(make_graph(2000), Random(), 4)
        flip_a_byte(store.folder / key / "shard-2.pt")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=build_and_read, args=(store.folder, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [2000, 2000]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    entries = list(store.folder.iterdir())
    assert len(entries) == 1
    store.verify(entries[0].name)


def test_shards_move_to_another_host(store: ShardStore, tmp_path: Path) -> None:
    graph = make_graph()
    key = store.open_or_build(graph, Random(), 3, reverse=True)
    there = ShardStore(tmp_path / "there")
    manifest, data = store.manifest(key), store.shard_bytes(key, 1)
    assert not there.holds(key, 1)
    for wrong_rank, wrong in ((1, data[:-1]), (1, data + 1), (2, data)):
        with pytest.raises(StoreError, match="send them again"):
            there.adopt(key, wrong_rank, manifest, wrong)
    with pytest.raises(StoreError, match="manifest"):
        there.adopt(key, 1, manifest[:-3], data)
    there.adopt(key, 1, manifest, data)
    assert_equal(there.read(key, 1), store.read(key, 1))
    with pytest.raises(StoreError, match=r"shard-0\.pt"):
        there.read(key, 0)
    assert there.open_or_build(graph, Random(), 3, reverse=True) == key
    there.verify(key)


def test_read_tensors_do_not_write_through(store: ShardStore) -> None:
    key = store.open_or_build(make_graph(), Random(), 2)
    shard: Shard = store.read(key, 0)
    shard.node["x"].zero_()
    store.verify(key)


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lightning_sylvie" / "parts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ShardStore().folder == tmp_path / ".cache" / "lightning_sylvie" / "parts"
