"""Fingerprints: a digest of a checkpoint's contents, and a stamp that shows without reading that they are unchanged.

fingerprint = Fingerprint(checkpoint)
fingerprint.add("model-00001-of-00002.safetensors", path)   # shards may come and go
fingerprint.hexdigest()                                     # "5f70bf18a0.."; reads the shards that were not added
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import SourceError
from .checkpoint import Checkpoint, RemoteFile, readable
from .small_files import file_sha256

# Bytes that are hashed at a time.
_PIECE = 1 << 22

# Size, mtime and ctime in ns, and inode of a file. While they are the same, so are its bytes.
Stamp = list[int]


def stamps_of(root: Path, shards: Iterable[str]) -> dict[str, Stamp]:
    """Return what shows without reading that shards are unchanged.

    Args:
        root: the directory of the checkpoint.
        shards: file names of the shards.

    Returns:
        By file name: [size in bytes, mtime in ns, ctime in ns, inode].

    Raises:
        SourceError: one cannot be read.
    """
    with readable():
        stats = {name: (root / name).stat() for name in shards}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats.items()}


class Fingerprint:
    """SHA-256 of a checkpoint: of its config.json, and of its shards' headers, sizes and contents.

    Args:
        checkpoint: the opened checkpoint.
        remote: its shards that are not in the directory, by name.
        commit: repository and commit that it comes from, which identify its shards; "" for a local checkpoint.
        stamps: stamps of local shards when the checkpoint was opened; taken now if None.

    Attributes:
        stamp: SHA-256 of config.json, headers, sizes, and the shards' stamps or the commit. Checkpoints with the same
            stamp have the same contents, but a copy has another stamp.

    Raises:
        SourceError: a shard cannot be read to take its stamp.
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
        """Hash a shard, unless it was hashed before or the repository has its SHA-256.

        Args:
            shard: file name of the shard.
            path: where it lies now.

        Raises:
            SourceError: it cannot be read.
        """
        if shard not in self._digests:
            # Shards of a GGUF file are links to it, and have one stamp.
            stamp = self._stamps.get(shard)
            twins = (self._digests.get(other) for other in self._stamps if stamp and self._stamps[other] == stamp)
            self._digests[shard] = next(filter(None, twins), None) or self._repository_sha256(shard) or _hash(path)

    def require_unchanged(self, shards: Iterable[str] | None = None) -> None:
        """Refuse shards that were written to since the checkpoint was opened.

        Args:
            shards: names of shards; all if None. Those without a stamp, as of a commit, are not checked.

        Raises:
            SourceError: one was, or is gone.
        """
        local = [shard for shard in (self._stamps if shards is None else shards) if shard in self._stamps]
        for shard, now in stamps_of(self.checkpoint.root, local).items():
            # Without the inode, which some network file systems change; a replaced file has another ctime anyway.
            if now[:-1] != self._stamps[shard][:-1]:
                raise SourceError(
                    f"{self.checkpoint.root / shard} changed while it was being read",
                    "let nothing write to the model or link its files meanwhile, and run the same command again",
                )

    def hexdigest(self) -> str:
        """Return the digest. Shards that were not added are read now, from the directory or the repository.

        Raises:
            SourceError: one cannot be read.
        """
        for shard in self.checkpoint.shards:
            if shard in self.remote and shard not in self._digests:
                self._digests[shard] = self._repository_sha256(shard) or _hash_remote(self.remote[shard])
            self.add(shard, self.checkpoint.root / shard)
        return self._sha256([self._digests[shard] for shard in self.checkpoint.shards])

    def matches(self, digest: str, stamp: str) -> bool:
        """Return whether a stored digest and stamp are this checkpoint's. Reads shards only if the stamp differs.

        Args:
            digest: `hexdigest()` of a checkpoint.
            stamp: `stamp` of the same checkpoint.

        Raises:
            SourceError: a shard cannot be read.
        """
        return stamp == self.stamp or digest == self.hexdigest()

    def _repository_sha256(self, shard: str) -> str | None:
        """Return the SHA-256 that the repository has of a shard; None if it has none."""
        digest = self.remote[shard].digest if shard in self.remote else ""
        return digest if len(digest) == 64 else None


def _hash(path: Path) -> str:
    with readable():
        return file_sha256(path, str(path))


def _hash_remote(file: RemoteFile) -> str:
    digest = hashlib.sha256()
    for offset in range(0, file.size, _PIECE):
        digest.update(file.read(offset, min(_PIECE, file.size - offset)))
    return digest.hexdigest()
