"""The file for hidden states: where it may lie, what fits, and what is said where it does not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from openquant.errors import OutputError
from openquant.streaming.offload import OffloadFile

FREE = "free some space, or name another directory with --scratch"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as raised:
        OffloadFile(tmp_path / "missing", 0)
    expected = f"hidden states cannot be written in {tmp_path / 'missing'}: No such file or directory"
    assert (raised.value.message, raised.value.hint) == (expected, FREE)


def test_what_was_read_leaves_its_place_to_what_is_as_long(tmp_path: Path) -> None:
    with OffloadFile(tmp_path, 0) as scratch:
        assert [scratch.write(memoryview(each)) for each in (b"first", b"second", b"third")] == [0, 5, 11]
        into = bytearray(6)
        scratch.read(memoryview(into), 5)
        assert into == b"second"
        assert scratch.write(memoryview(b"three")) == 16
        assert scratch.write(memoryview(b"fourth")) == 5
        assert scratch.write(memoryview(b"fifth.")) == 21
        for text, offset in ((b"first", 0), (b"fourth", 5), (b"third", 11), (b"three", 16), (b"fifth.", 21)):
            into = bytearray(len(text))
            scratch.read(memoryview(into), offset)
            assert into == text
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OffloadFile(tmp_path, 0) as scratch:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            assert scratch.write(memoryview(bytes(100))) == 0
            with pytest.raises(OutputError) as raised:
                scratch.write(memoryview(bytes(100)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        expected = f"hidden states cannot be written in {tmp_path}: File too large"
        assert (raised.value.message, raised.value.hint) == (expected, FREE)
