"""What tells a checkpoint from every other one: its contents, and what shows without reading that they are the same.

fingerprint(checkpoint)             # "5f70bf18a0..": of a directory, all of which is read

part = Fingerprint(checkpoint)      # of shards that come and go
part.add("model-00001-of-00002.safetensors", path)
part.hexdigest()
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import SourceError
from .checkpoint import Checkpoint, RemoteFile, readable
from .small_files import open_regular

# Bytes that are hashed at a time.
_PIECE = 1 << 22

# Of a file: size, times of its last modification and change (ns), inode. Where they are the same, so are the bytes.
Stamp = list[int]


def stamps_of(root: Path, shards: Iterable[str]) -> dict[str, Stamp]:
    """The stamps of shards in a directory.

    Raises:
        SourceError: one cannot be read.
    """
    with readable():
        found = {name: (root / name).stat() for name in shards}
    return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in found.items()}


class Fingerprint:
    """SHA-256 of a checkpoint: of its config.json, and of its shards' headers, sizes and contents.

    Args:
        checkpoint: the opened checkpoint.
        remote: shards of it that lie elsewhere.
        commit: the repository and commit that it is, which says what its shards are; "" for any other.
        stamps: of the shards of a local one, as it was opened; those of now if None.

    Attributes:
        stamp: SHA-256 of config.json, headers, sizes, and the shards' stamps or the commit. Checkpoints with the same
            stamp have the same contents; a copy has another stamp.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        remote: Mapping[str, RemoteFile] | None = None,
        commit: str = "",
        stamps: Mapping[str, Stamp] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.remote = remote or {}
        if stamps is None:
            local = () if commit else [shard for shard in checkpoint.shards if shard not in self.remote]
            stamps = stamps_of(checkpoint.root, local)
        self._stamps = dict(stamps)
        self.stamp = self._sha256(commit, self._stamps)
        self._digests: dict[str, str] = {}

    def _sha256(self, *facts: object) -> str:
        everything = [self.checkpoint.config, self.checkpoint.headers, self.checkpoint.shards, *facts]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    def add(self, shard: str, path: Path) -> None:
        """Hash a shard where it lies now, unless that was done or the repository says its digest.

        Raises:
            SourceError: it cannot be read.
        """
        if shard not in self._digests:
            self._digests[shard] = self._known(shard) or _hash(path)

    def require_unchanged(self, shards: Iterable[str] | None = None) -> None:
        """Refuse shards that were written to since the checkpoint was opened.

        Args:
            shards: names; all if None.

        Raises:
            SourceError: one was, or is gone.
        """
        local = [shard for shard in (self._stamps if shards is None else shards) if shard in self._stamps]
        for shard, now in stamps_of(self.checkpoint.root, local).items():
            # Not the inode: some network file systems give a file another one every now and then, and a replaced file
            # has another time of change.
            if now[:-1] != self._stamps[shard][:-1]:
                raise SourceError(
                    f"{self.checkpoint.root / shard} changed while it was being read",
                    "let nothing write to the model meanwhile, and run the same command again",
                )

    def hexdigest(self) -> str:
        """The digest; shards that were not added are read now, from the checkpoint's directory or elsewhere.

        Raises:
            SourceError: one cannot be read.
        """
        for shard in self.checkpoint.shards:
            if shard in self.remote and shard not in self._digests:
                self._digests[shard] = self._known(shard) or _hash_remote(self.remote[shard])
            self.add(shard, self.checkpoint.root / shard)
        return self._sha256([self._digests[shard] for shard in self.checkpoint.shards])

    def matches(self, digest: str, stamp: str) -> bool:
        """Whether digest and stamp, which were stored of some checkpoint, are of this one; shards are read only if the
        stamp differs.

        Raises:
            SourceError: a shard cannot be read.
        """
        return stamp == self.stamp or digest == self.hexdigest()

    def _known(self, shard: str) -> str | None:
        """The SHA-256 that a repository has of a shard; None where it has none."""
        digest = self.remote[shard].digest if shard in self.remote else ""
        return digest if len(digest) == 64 else None


def _hash(path: Path) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with readable(), open_regular(path, str(path)) as file:
        while count := os.readv(file.fileno(), [piece]):
            digest.update(piece[:count])
    return digest.hexdigest()


def _hash_remote(file: RemoteFile) -> str:
    digest = hashlib.sha256()
    for offset in range(0, file.size, _PIECE):
        digest.update(file.read(offset, min(_PIECE, file.size - offset)))
    return digest.hexdigest()
