"""What tells a checkpoint from every other one, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from .checkpoint import Checkpoint, RemoteFile, readable

# Read of each shard, at its middle and at its end: headers are alike in models of one shape.
SAMPLE = 1 << 16


def fingerprint(checkpoint: Checkpoint, remote: Mapping[str, RemoteFile] | None = None) -> str:
    """SHA-256, hexadecimal, of a checkpoint's config.json, its shards' headers and sizes, and some bytes of each shard.

    The same wherever it lies, whenever it was copied. Weights that were changed in a few places pass.

    Args:
        checkpoint: the opened checkpoint.
        remote: shards of it that lie elsewhere.

    Raises:
        SourceError: a shard cannot be read.
    """
    facts = [checkpoint.config, checkpoint.headers, checkpoint.shards]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, size in checkpoint.shards.items():
        for offset in (max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
            file = (remote or {}).get(name)
            digest.update(_read(checkpoint, name, offset) if file is None else file.read(offset, min(SAMPLE, size)))
    return digest.hexdigest()


def _read(checkpoint: Checkpoint, name: str, offset: int) -> bytes:
    with readable(), (checkpoint.root / name).open("rb") as file:
        file.seek(offset)
        return file.read(SAMPLE)
