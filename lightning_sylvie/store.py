"""Shards on disk: cut once, checked, and then read by each rank for itself."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sylvie._shard_file import (
    StoreError,
    describe_bytes,
    describe_file,
    load,
    pack,
    replace,
    seal,
    unpack,
    unseal,
    write,
)
from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Partitioner, check_assignment
from lightning_sylvie.shard import Shard, cut_each

__all__ = ["ShardStore", "StoreError", "default_folder"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_ASSIGNMENT = "assignment.pt"
_BUILDING = ".building"
_STALE_SECONDS = 24 * 3600
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """``lightning_sylvie/parts`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` unless set."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lightning_sylvie" / "parts"


class ShardStore:
    """A folder of cut graphs, one entry per graph, partitioner and number of parts.

    An entry is a folder named by its key: a file per rank, the assignment, and a manifest with the
    size and checksum of each. It is written under another name and renamed when complete, so a
    crash leaves no entry, and two processes that write the same one both end with a whole one.
    Files hold plain tensors and are memory mapped.

    Args:
        folder: Where entries live. None: `default_folder`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)

    @staticmethod
    def key(
        graph: Graph,
        partitioner: Partitioner,
        num_parts: int,
        train_mask: Tensor | None = None,
        *,
        reverse: bool = False,
    ) -> str:
        """The entry's name: changes with the graph, the settings or the format, and only then."""
        mask = b"" if train_mask is None else train_mask.numpy().tobytes()
        settings = (_FORMAT, graph.fingerprint(), partitioner.settings, num_parts, reverse)
        digest = hashlib.blake2b(repr(settings).encode() + mask, digest_size=16)
        return f"{num_parts}-{digest.hexdigest()}"

    def open_or_build(
        self,
        graph: Graph,
        partitioner: Partitioner,
        num_parts: int,
        train_mask: Tensor | None = None,
        *,
        reverse: bool = False,
    ) -> str:
        """The key of a complete and undamaged entry; partitions and cuts only if there is none.

        For rank 0 (or one rank per host), before the others `read`. Arguments as for
        `Partitioner.assign` and `cut`.

        Raises:
            StoreError: The folder can't be written.
            ValueError: The partitioner's assignment does not fit.
            RuntimeError: METIS failed.
        """
        key = self.key(graph, partitioner, num_parts, train_mask, reverse=reverse)
        if (self.folder / key).exists():
            try:
                self.verify(key)
                return key
            except StoreError as error:
                _log.warning("%s. Cutting the graph again.", error)
        parts = partitioner.assign(graph.edge_index, graph.num_nodes, num_parts, train_mask)
        assignment = check_assignment(parts, graph.num_nodes, num_parts)
        try:
            self.build(key, graph, assignment, num_parts, reverse=reverse)
        except OSError as error:
            raise StoreError(
                f"could not write parts to {self.folder} ({error}): free some space there or set "
                "cache_dir to another folder"
            ) from error
        return key

    def build(
        self,
        name: str,
        graph: Graph,
        assignment: Tensor,
        num_parts: int,
        *,
        reverse: bool = False,
        progress: Callable[[Iterator[Shard]], Iterable[Shard]] = iter,
    ) -> None:
        """Cuts the graph and writes an entry of any name; one that is there and whole stays.

        Args:
            name: The entry's name; `open_or_build` takes the key.
            graph: As for `cut`, like `assignment`, `num_parts` and `reverse`.
            progress: Passes the shards on as they are made, such as a progress bar.

        Raises:
            OSError: The folder can't be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        prefix = f"{_BUILDING}+{socket.gethostname()}+{os.getpid()}+"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=self.folder) as folder:
            entry = Path(folder) / name
            entry.mkdir()
            files = {_ASSIGNMENT: write(entry / _ASSIGNMENT, assignment)}
            for shard in progress(cut_each(graph, assignment, num_parts, reverse=reverse)):
                file = _shard_name(shard.plan.rank)
                files[file] = write(entry / file, pack(shard))
            replace(entry / _MANIFEST, seal({"num_parts": num_parts, "files": files}))
            self._publish(entry)

    def read(self, key: str, rank: int) -> Shard:
        """The shard of `rank`, memory mapped, from its own file only.

        Raises:
            StoreError: The file is missing or damaged.
        """
        return unpack(load(self._verified(key, _shard_name(rank))))

    def assignment(self, key: str) -> Tensor:
        """The part of each node of the whole graph, int64 ``(num_nodes,)``."""
        assignment: Tensor = load(self._verified(key, _ASSIGNMENT))
        return assignment

    def verify(self, key: str) -> None:
        """Raises StoreError, naming the file, unless every file of the entry is as written."""
        for name in self._files(key):
            self._verified(key, name)

    def holds(self, key: str, rank: int) -> bool:
        """Whether `read` would find the shard whole."""
        try:
            self._verified(key, _shard_name(rank))
        except StoreError:
            return False
        return True

    def manifest(self, key: str) -> bytes:
        """The manifest's bytes, which `adopt` takes on another host."""
        self._files(key)
        return (self.folder / key / _MANIFEST).read_bytes()

    def shard_bytes(self, key: str, rank: int) -> Tensor:
        """The file of `rank`, uint8 ``(bytes,)``, memory mapped, to be sent to another host."""
        path = self._verified(key, _shard_name(rank))
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def adopt(self, key: str, rank: int, manifest: bytes, data: Tensor) -> None:
        """Stores a shard that another host's store gave; `read` then works here.

        Args:
            key: The entry's key there.
            rank: Whose shard it is.
            manifest: What `manifest` gave there.
            data: What `shard_bytes` gave there.

        Raises:
            StoreError: The bytes are not those that the manifest lists, or can't be written.
        """
        content, entry = data.contiguous().numpy().data, self.folder / key
        listed = unseal(manifest, f"the received manifest of {key}")["files"]
        if listed.get(_shard_name(rank)) != describe_bytes(content):
            raise StoreError(
                f"the {content.nbytes} bytes received for {key}/{_shard_name(rank)} are not those "
                "of the sender's file: send them again"
            )
        try:
            entry.mkdir(parents=True, exist_ok=True)
            replace(entry / _shard_name(rank), content)
            replace(entry / _MANIFEST, manifest)
        except OSError as error:
            raise StoreError(
                f"could not write a shard to {entry} ({error}): free some space there or set "
                "cache_dir to another folder"
            ) from error

    def _files(self, key: str) -> dict[str, Any]:
        path = self.folder / key / _MANIFEST
        try:
            files: dict[str, Any] = unseal(path.read_bytes(), str(path))["files"]
        except OSError as error:
            raise StoreError(f"could not read {path}: {error}") from error
        return files

    def _verified(self, key: str, name: str) -> Path:
        path, expected = self.folder / key / name, self._files(key).get(name)
        if expected is None:
            raise StoreError(f"expected {name} in {path.parent}, which was cut for fewer ranks")
        found = describe_file(path)
        if found != expected:
            raise StoreError(f"{path} is damaged: expected {expected}, got {found}")
        return path

    def _publish(self, entry: Path) -> None:
        """Gives a complete entry its name, unless another process did so first."""
        final = self.folder / entry.name
        for attempt in range(10):
            try:
                entry.rename(final)
                return
            except OSError:
                if not final.exists():
                    raise
            try:
                self.verify(entry.name)
                return
            except StoreError:
                with suppress(FileNotFoundError):
                    final.rename(entry.with_name(f"damaged-{attempt}"))
        raise StoreError(f"other processes keep replacing {final}: let one process write it")

    def _remove_stale(self) -> None:
        """Removes what crashed builders left: dead on this host, or untouched for a day."""
        for path in self.folder.glob(f"{_BUILDING}+*+*+*"):
            _, host, process, _ = path.name.split("+")
            with suppress(OSError):
                touched = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
                dead = host == socket.gethostname() and not _alive(int(process))
                if dead or time.time() - touched > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def _shard_name(rank: int) -> str:
    return f"shard-{rank}.pt"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
