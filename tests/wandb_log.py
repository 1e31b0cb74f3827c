"""Reads what an offline run of Weights & Biases has kept, from its file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD, BLOCK = 7, 32768  # bytes of the file's head, and of a block, which pieces do not cross
LAST = (1, 4)  # kinds of pieces that end a record: the only one, the last one


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged: a dictionary per call.

    Args:
        folder: Where the run was started; it holds ``wandb/offline-run-*``.
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for text in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(text)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: pieces of checksum, length, kind and bytes."""
    assert data.startswith(b":W&B")
    position, record = HEAD, b""
    while position + HEAD <= len(data):
        if (room := BLOCK - position % BLOCK) < HEAD:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEAD
        record += data[position : position + length]
        position += length
        if kind in LAST:
            yield record
            record = b""
