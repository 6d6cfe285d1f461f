"""A source shard is read whole, however few bytes the file system returns at a time."""

import os

import numpy as np
import pytest

from openquant.errors import SourceError
from openquant.files.shardfile import SourceFile


def test_a_file_system_that_returns_fewer_bytes_than_asked(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data.tobytes())

    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, views, offset: whole(handle, [views[0][:300]], offset))
    into = np.zeros(990, np.uint8)
    with SourceFile(path, path.name) as file:
        file.read(into, 10, "model.norm.weight")

    assert np.array_equal(into, data[10:])


def test_a_shard_that_ends_too_early(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    with SourceFile(path, path.name) as file, pytest.raises(SourceError) as caught:
        file.read(np.zeros(991, np.uint8), 10, "model.norm.weight")

    assert caught.value.message == "model.safetensors ends inside model.norm.weight"
