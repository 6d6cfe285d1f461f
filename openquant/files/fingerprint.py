"""What tells a checkpoint from every other one, without reading all of it.

fingerprint(checkpoint)             # "5f70bf18a0..": of a directory

part = Fingerprint(checkpoint)      # of shards that come and go
part.look("model-00001-of-00002.safetensors", path)
part.hexdigest()
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from .checkpoint import Checkpoint, RemoteFile, readable

# Read of each shard, at its middle and at its end: headers are alike in models of one shape.
SAMPLE = 1 << 16


class Fingerprint:
    """SHA-256 of a checkpoint's config.json, its shards' headers and sizes, and some bytes of each shard.

    The same wherever it lies, whenever it was copied. Weights that were changed in a few places pass.

    Args:
        checkpoint: the opened checkpoint.
        remote: shards of it that lie elsewhere.
    """

    def __init__(self, checkpoint: Checkpoint, remote: Mapping[str, RemoteFile] | None = None) -> None:
        self.checkpoint = checkpoint
        self.remote = remote or {}
        # Of the shards that were looked at.
        self._parts: dict[str, bytes] = {}

    def look(self, shard: str, path: Path) -> None:
        """Read what counts of a shard where it lies now; once is enough.

        Raises:
            SourceError: it cannot be read.
        """
        if shard in self._parts:
            return
        with readable(), path.open("rb") as file:
            parts = []
            for offset, length in self._samples(shard):
                file.seek(offset)
                parts.append(file.read(length))
        self._parts[shard] = b"".join(parts)

    def hexdigest(self) -> str:
        """The digest; shards that were not looked at are read now, from the checkpoint's directory or elsewhere.

        Raises:
            SourceError: one cannot be read.
        """
        facts = [self.checkpoint.config, self.checkpoint.headers, self.checkpoint.shards]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for shard in self.checkpoint.shards:
            if shard not in self._parts and shard in self.remote:
                samples = self._samples(shard)
                self._parts[shard] = b"".join(self.remote[shard].read(offset, length) for offset, length in samples)
            self.look(shard, self.checkpoint.root / shard)
            digest.update(self._parts[shard])
        return digest.hexdigest()

    def _samples(self, shard: str) -> Iterator[tuple[int, int]]:
        """Offsets and lengths of what counts of a shard."""
        size = self.checkpoint.shards[shard]
        for offset in (max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)):
            yield offset, min(SAMPLE, size - offset)


def fingerprint(checkpoint: Checkpoint) -> str:
    """The digest of a checkpoint that lies in its directory; see Fingerprint.

    Raises:
        SourceError: a shard cannot be read.
    """
    return Fingerprint(checkpoint).hexdigest()
