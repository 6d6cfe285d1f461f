"""The file for hidden states: where it may lie, what fits, and what is said where it does not."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import pytest

from openquant.errors import OutputError
from openquant.streaming.offload import OffloadFile, file_system, require_disk

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say where what is mounted")
FREE = "free some space, or name another directory with --scratch"


@LINUX
def test_file_systems_are_called_as_the_system_calls_them(tmp_path: Path) -> None:
    assert file_system(Path("/proc")) == "proc"
    assert file_system(Path("/sys")) == "sysfs"
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    assert file_system(tmp_path) in known - {"proc", "sysfs"}
    assert file_system(tmp_path / "missing") == ""


@LINUX
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="nothing here is kept in memory")
def test_what_is_kept_in_memory_is_no_place_for_hidden_states() -> None:
    with pytest.raises(OutputError) as raised:
        OffloadFile(Path("/dev/shm"), 0)
    assert raised.value.message == "/dev/shm is kept in memory, where there is no room for hidden states"
    assert raised.value.hint == "name a directory on a disk with --scratch"
    with OffloadFile(Path("/dev/shm"), 0, may_be_in_memory=True) as scratch:
        assert scratch.write(memoryview(b"some")) == 0
    require_disk(Path("/proc"), "anything")


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as raised:
        OffloadFile(tmp_path / "missing", 0)
    expected = f"hidden states cannot be written in {tmp_path / 'missing'}: No such file or directory"
    assert (raised.value.message, raised.value.hint) == (expected, FREE)


def test_what_was_read_leaves_its_place_to_what_is_as_long(tmp_path: Path) -> None:
    with OffloadFile(tmp_path, 0, may_be_in_memory=True) as scratch:
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


def test_room_counts_what_the_file_has_already(tmp_path: Path) -> None:
    with OffloadFile(tmp_path, 0, may_be_in_memory=True) as scratch:
        scratch.require_room(1 << 10)
        with pytest.raises(OutputError) as raised:
            scratch.require_room(1 << 60)
        said = re.fullmatch(
            rf"hidden states take 1,152,921,504,606,846,976 bytes in {tmp_path}, which has room for ([\d,]+)",
            raised.value.message,
        )
        assert said is not None
        found = os.statvfs(tmp_path)
        # Others write to the disk, too.
        room = int(said[1].replace(",", ""))
        assert abs(room - found.f_bavail * found.f_frsize) < 0.5 * room
        assert raised.value.hint == (
            "free some space, name another directory with --scratch, or use fewer or shorter texts"
        )


def test_a_disk_that_takes_no_more_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OffloadFile(tmp_path, 0, may_be_in_memory=True) as scratch:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            assert scratch.write(memoryview(bytes(100))) == 0
            with pytest.raises(OutputError) as raised:
                scratch.write(memoryview(bytes(100)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        expected = f"hidden states cannot be written in {tmp_path}: File too large"
        assert (raised.value.message, raised.value.hint) == (expected, FREE)


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    with OffloadFile(tmp_path, 0, may_be_in_memory=True) as scratch:
        scratch.write(memoryview(bytes(100)))
        with pytest.raises(OutputError) as raised:
            scratch.read(memoryview(bytearray(50)), 80)
        expected = f"hidden states cannot be read in {tmp_path}: the scratch file ends at 100"
        assert (raised.value.message, raised.value.hint) == (expected, FREE)
