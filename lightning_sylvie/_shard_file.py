"""The bytes of a stored shard: plain tensors, written in one go, with a size and a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sylvie.plan import HaloPlan
from lightning_sylvie.shard import Shard

_BLOCK = 1 << 24


class StoreError(RuntimeError):
    """A stored file is missing, damaged, or can't be written; the message names it."""


def pack(shard: Shard) -> dict[str, Any]:
    """The shard as dicts, lists, tensors, text and numbers only."""
    fields = dict(vars(shard))
    plan = dict(vars(shard.plan))
    for name in ("send_counts", "recv_counts"):
        plan[name] = list(plan[name])
    for name in ("node", "edge", "mask_counts"):
        fields[name] = dict(fields[name])
    fields["rest"] = _compact(dict(shard.rest))
    return fields | {"plan": plan, "reverse": shard.reverse and pack(shard.reverse)}


def unpack(fields: dict[str, Any]) -> Shard:
    """The shard that `pack` took apart."""
    plan = dict(fields["plan"])
    for name in ("send_counts", "recv_counts"):
        plan[name] = tuple(plan[name])
    reverse = fields["reverse"] and unpack(fields["reverse"])
    return Shard(**fields | {"plan": HaloPlan(**plan), "reverse": reverse})


def write(path: Path, content: object) -> dict[str, Any]:
    """Writes `content` to a new file and returns what a manifest lists of it."""
    torch.save(content, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return describe_file(path)


def load(path: Path) -> Any:
    """What `write` wrote, memory mapped. Writing into a tensor does not reach the file."""
    try:
        return torch.load(str(path), mmap=True, weights_only=True)
    except Exception as error:
        raise StoreError(f"could not load {path}: {error}") from error


def replace(path: Path, content: bytes | memoryview) -> None:
    """Puts `content` at `path`, at once or not at all."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum of a file.

    Raises:
        StoreError: It can't be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
            return {"bytes": file.tell(), "blake2b": digest.hexdigest()}
    except OSError as error:
        raise StoreError(f"could not read {path}: {error}") from error


def describe_bytes(content: bytes | memoryview) -> dict[str, Any]:
    """Size and checksum of what would be a file."""
    checksum = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {"bytes": memoryview(content).nbytes, "blake2b": checksum}


def seal(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON with a checksum of itself."""
    text = json.dumps(manifest, sort_keys=True)
    return json.dumps({"manifest": manifest, "seal": describe_bytes(text.encode())}).encode()


def unseal(content: bytes, name: str) -> dict[str, Any]:
    """The manifest that `seal` wrote.

    Raises:
        StoreError: It is damaged; the message starts with `name`.
    """
    try:
        sealed = json.loads(content)
        manifest: dict[str, Any] = sealed["manifest"]
        if sealed["seal"] == describe_bytes(json.dumps(manifest, sort_keys=True).encode()):
            return manifest
    except (ValueError, KeyError, TypeError):
        pass
    raise StoreError(f"{name} is damaged: its checksum does not fit its content")


def _compact(value: Any) -> Any:
    """`value` without tensors that drag a larger storage into the file."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_compact(item) for item in value)
    return value
