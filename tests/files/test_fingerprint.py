"""What tells one checkpoint from another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import tiny
from openquant.errors import SourceError
from openquant.files.checkpoint import open_checkpoint
from openquant.files.fingerprint import SAMPLE, Fingerprint, fingerprint


class InMemory:
    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.size = len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def test_a_copy_is_the_same_and_wherever_a_shard_lies(tmp_path: Path) -> None:
    one = tiny.write(tmp_path / "one")
    found = fingerprint(open_checkpoint(one))
    two = shutil.copytree(one, tmp_path / "two")
    for path in two.iterdir():
        os.utime(path, (0, 0))
    (two / "README.md").write_text("# Something else")
    assert fingerprint(open_checkpoint(two)) == found
    remote = {name: InMemory(one / name) for name in open_checkpoint(one).shards}
    assert Fingerprint(open_checkpoint(two), remote).hexdigest() == found


def test_shards_may_have_gone_by_then(tmp_path: Path) -> None:
    root = tiny.write(tmp_path / "root", shards=4)
    checkpoint = open_checkpoint(root)
    found = fingerprint(checkpoint)
    here, elsewhere, late, last = checkpoint.shards
    seen = Fingerprint(checkpoint, {elsewhere: InMemory(root / elsewhere)})
    for shard in (last, here):
        (root / shard).rename(tmp_path / "passing")
        seen.look(shard, tmp_path / "passing")
        (tmp_path / "passing").unlink()
        # Once is enough.
        seen.look(shard, tmp_path / "passing")
    (root / elsewhere).unlink()
    assert seen.hexdigest() == seen.hexdigest() == found
    assert (root / late).exists()
    with pytest.raises(SourceError, match=f"{here} cannot be read: No such file or directory"):
        fingerprint(checkpoint)


def test_another_config_and_other_weights_are_not(tmp_path: Path) -> None:
    one = tiny.write(tmp_path / "one")
    found = {fingerprint(open_checkpoint(one))}
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    found.add(fingerprint(open_checkpoint(one)))
    # Same names, shapes and sizes.
    found.add(fingerprint(open_checkpoint(tiny.write(tmp_path / "other", seed=1))))
    shard = one / next(iter(open_checkpoint(one).shards))
    for place in (shard.stat().st_size // 2, shard.stat().st_size - 1, shard.stat().st_size - SAMPLE):
        data = bytearray(shard.read_bytes())
        data[place] ^= 1
        shard.write_bytes(data)
        found.add(fingerprint(open_checkpoint(one)))
    assert len(found) == 6
