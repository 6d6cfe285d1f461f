"""What tells one checkpoint from another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from openquant.errors import SourceError
from openquant.files.checkpoint import Fingerprint, open_checkpoint
from support import small_checkpoints


class InMemory:
    def __init__(self, path: Path, digest: str = "0" * 40) -> None:
        self.data = path.read_bytes()
        self.size = len(self.data)
        self.digest = digest

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def test_a_copy_is_the_same_and_wherever_a_shard_lies(tmp_path: Path) -> None:
    one = small_checkpoints.write(tmp_path / "one")
    found = Fingerprint(open_checkpoint(one)).hexdigest()
    two = shutil.copytree(one, tmp_path / "two")
    for path in two.iterdir():
        os.utime(path, (0, 0))
    (two / "README.md").write_text("# Something else")
    assert Fingerprint(open_checkpoint(two)).hexdigest() == found
    remote = {name: InMemory(one / name) for name in open_checkpoint(one).shards}
    assert Fingerprint(open_checkpoint(two), remote).hexdigest() == found


def test_any_other_byte_is_another_checkpoint(tmp_path: Path) -> None:
    one = small_checkpoints.write(tmp_path / "one")
    found = {Fingerprint(open_checkpoint(one)).hexdigest()}
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    found.add(Fingerprint(open_checkpoint(one)).hexdigest())
    # Same names, shapes and sizes.
    found.add(Fingerprint(open_checkpoint(small_checkpoints.write(tmp_path / "other", seed=1))).hexdigest())
    checkpoint = open_checkpoint(one)
    [shard] = checkpoint.shards
    whole = (one / shard).read_bytes()
    start = min(place.offset for place in checkpoint.where.values())
    for place in range(start, len(whole), (len(whole) - start) // 5):
        (one / shard).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found.add(Fingerprint(open_checkpoint(one)).hexdigest())
    assert len(found) == 3 + 6


def test_a_shard_that_changed_is_named(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "root", shards=2)
    checkpoint = open_checkpoint(root)
    seen = Fingerprint(checkpoint)
    one, other = checkpoint.shards
    seen.require_unchanged()
    times, data = (root / other).stat(), (root / other).read_bytes()
    (root / other).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(root / other, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.require_unchanged([one])
    for names in (None, [other]):
        with pytest.raises(SourceError) as caught:
            seen.require_unchanged(names)
        assert caught.value.message == f"{root / other} changed while it was being read"
    # Of a repository its commit says it.
    Fingerprint(checkpoint, None, "org/name@01").require_unchanged()


def test_what_a_repository_says_of_a_shard_is_not_computed(tmp_path: Path) -> None:
    root = small_checkpoints.write(tmp_path / "root")
    checkpoint = open_checkpoint(root)
    found, [shard] = Fingerprint(checkpoint).hexdigest(), checkpoint.shards
    file = InMemory(root / shard, hashlib.sha256((root / shard).read_bytes()).hexdigest())
    file.data = b""
    (root / shard).unlink()
    seen = Fingerprint(checkpoint, {shard: file}, "org/name@0123")
    seen.add(shard, root / shard)
    assert seen.hexdigest() == found
