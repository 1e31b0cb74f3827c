"""Shards on disk: cut once, checked, and then read by each rank for itself."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sylvie.graph import Graph
from lightning_sylvie.partition import Partitioner, check_assignment
from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.shard import Shard, cut_each

_FORMAT = 1
_MANIFEST = "manifest.json"
_ASSIGNMENT = "assignment.pt"
_STALE_SECONDS = 24 * 3600
_log = logging.getLogger(__name__)


class StoreError(RuntimeError):
    """A stored file is missing, damaged, or can't be written; the message names it."""


class ShardStore:
    """A folder of cut graphs, one entry per graph, partitioner and number of parts.

    An entry is a folder named by its key: a file per rank, the assignment, and a manifest with the
    size and checksum of each. It is written under another name and renamed when complete, so a
    crash leaves no entry and two processes that write the same one both end with a whole one.
    Files hold plain tensors and are memory mapped, so a rank loads what it touches.

    Args:
        folder: Where entries live. None: ``lightning_sylvie/parts`` in the user's cache folder.
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
        digest = hashlib.blake2b(digest_size=16)
        mask = "" if train_mask is None else _digest(train_mask.contiguous().numpy().tobytes())
        for text in (_FORMAT, graph.fingerprint(), partitioner.settings, num_parts, mask, reverse):
            digest.update(f"{text}\n".encode())
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

        For rank 0 (or one rank per host), before the others `read`.

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
                _log.warning("%s; cutting the graph again", error)
        parts = partitioner.assign(graph.edge_index, graph.num_nodes, num_parts, train_mask)
        assignment = check_assignment(parts, graph.num_nodes, num_parts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            with tempfile.TemporaryDirectory(
                prefix=_temporary_prefix(), dir=self.folder, ignore_cleanup_errors=True
            ) as name:
                entry = Path(name) / key
                entry.mkdir()
                files = {_ASSIGNMENT: _write(entry / _ASSIGNMENT, assignment)}
                for shard in cut_each(graph, assignment, num_parts, reverse=reverse):
                    file = _file(shard.plan.rank)
                    files[file] = _write(entry / file, _pack(shard))
                _replace(entry / _MANIFEST, _seal({"num_parts": num_parts, "files": files}))
                self._publish(entry)
        except OSError as error:
            raise StoreError(
                f"could not write parts to {self.folder} ({error}): free some space there or set "
                "cache_dir to another folder"
            ) from error
        return key

    def read(self, key: str, rank: int) -> Shard:
        """The shard of `rank`, memory mapped, from its own file only.

        Raises:
            StoreError: The file is missing or damaged.
        """
        path = self.folder / key / _file(rank)
        self._verify_file(key, path.name)
        return _unpack(_load(path))

    def assignment(self, key: str) -> Tensor:
        """The part of each node of the whole graph, int64 ``(num_nodes,)``."""
        self._verify_file(key, _ASSIGNMENT)
        assignment: Tensor = _load(self.folder / key / _ASSIGNMENT)
        return assignment

    def verify(self, key: str) -> None:
        """Raises StoreError, naming the file, unless every file of the entry is as written."""
        for name in self._files(key):
            self._verify_file(key, name)

    def holds(self, key: str, rank: int) -> bool:
        """Whether `read` would succeed."""
        try:
            self._verify_file(key, _file(rank))
        except StoreError:
            return False
        return True

    def manifest(self, key: str) -> str:
        """The manifest's text, which `adopt` takes on another host."""
        self._files(key)
        return (self.folder / key / _MANIFEST).read_text()

    def shard_bytes(self, key: str, rank: int) -> Tensor:
        """The file of `rank`, uint8 ``(bytes,)``, memory mapped, to be sent to another host."""
        self._verify_file(key, _file(rank))
        path = self.folder / key / _file(rank)
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def adopt(self, key: str, rank: int, manifest: str, data: Tensor) -> None:
        """Stores the bytes that another host's `shard_bytes` gave; `read` then works here.

        Args:
            key: The entry's key there.
            rank: Whose shard it is.
            manifest: What `manifest` gave there.
            data: uint8 ``(bytes,)``.

        Raises:
            StoreError: The bytes are not those that the manifest lists.
        """
        content = data.contiguous().numpy()
        listed = _unseal(manifest, f"the manifest received for {key}").get(_file(rank))
        if listed != {"bytes": content.nbytes, "blake2b": _digest(content)}:
            raise StoreError(
                f"the {content.nbytes} bytes received for {key}/{_file(rank)} are not those that "
                "were sent: send them again"
            )
        entry = self.folder / key
        entry.mkdir(parents=True, exist_ok=True)
        _replace(entry / _file(rank), content)
        _replace(entry / _MANIFEST, manifest.encode())

    def _files(self, key: str) -> dict[str, Any]:
        path = self.folder / key / _MANIFEST
        try:
            return _unseal(path.read_text(), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"could not read {path}: {error}") from error

    def _verify_file(self, key: str, name: str) -> None:
        path, listed = self.folder / key / name, self._files(key).get(name)
        if listed is None:
            raise StoreError(f"{path} is not part of this entry: the graph was cut for fewer ranks")
        try:
            found = {"bytes": path.stat().st_size, "blake2b": _file_digest(path)}
        except OSError as error:
            raise StoreError(f"could not read {path}: {error}") from error
        if found != listed:
            raise StoreError(
                f"{path} is damaged: expected {listed['bytes']} bytes with checksum "
                f"{listed['blake2b']}, got {found['bytes']} bytes with {found['blake2b']}"
            )

    def _publish(self, entry: Path) -> None:
        """Gives a complete entry its name, unless another process was faster."""
        final = self.folder / entry.name
        for _ in range(10):
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
                _move_away(final, entry.with_name("damaged"))
        raise StoreError(f"{final} is replaced by another process again and again")

    def _remove_stale(self) -> None:
        """Removes what crashed builders left: dead on this host, or untouched for a day."""
        for path in self.folder.glob(".building-*"):
            _, host, process, _ = path.name.split("+")
            here = host == socket.gethostname()
            old = time.time() - max(child.stat().st_mtime for child in (path, *path.rglob("*")))
            if old > _STALE_SECONDS or (here and not _alive(int(process))):
                shutil.rmtree(path, ignore_errors=True)
