"""What the machine lets a process use."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from openquant.machine import available_cpus, available_memory, give_memory_back

CPUS = len(os.sched_getaffinity(0))


def test_a_container_s_share_of_the_cpus_counts(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    assert available_cpus(file) == CPUS
    for quota, found in (
        ("max 100000", CPUS), ("100000 100000", 1), ("50000 100000", 1), (f"{CPUS}50000 100000", CPUS), ("", CPUS)
    ):  # fmt: skip
        file.write_text(f"{quota}\n")
        assert available_cpus(file) == found, quota


def test_the_memory_that_a_group_has_left_counts(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for group in (".", "a", "a/b"):
        with subtests.test(group=group):
            groups = tmp_path / group.replace("/", "-").replace(".", "top")
            here = groups / group
            here.mkdir(parents=True)
            (groups / "mine").write_text("9:name=systemd:/a\n0::/a/b\n")
            free = available_memory(groups, groups / "mine")
            assert free > 100_000_000
            (here / "memory.max").write_text("max\n")
            # Pages of files make room.
            (here / "memory.stat").write_text("anon 30000000\nfile 69000000\n")
            assert available_memory(groups, groups / "mine") > 0.5 * free
            (here / "memory.max").write_text("100000000\n")
            assert available_memory(groups, groups / "mine") == 70_000_000
            (here / "memory.max").write_text("20000000\n")
            assert available_memory(groups, groups / "mine") == 0


def test_memory_without_groups_is_the_machine_s(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 100_000_000 < available_memory(tmp_path, tmp_path / "mine") <= whole


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such function")
def test_what_was_freed_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(ctypes.c_size_t(1 << 16)) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 16)
    # The last stays, so that what lies below it cannot be cut off.
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = resident()
    give_memory_back()
    assert before - resident() > 50_000_000
    libc.free(ctypes.c_void_p(blocks[-1]))


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
