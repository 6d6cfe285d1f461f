"""What the machine lets a process use."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from openquant.machine import available_cpus, available_memory, give_memory_back

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "found"),
    [("max 100000", CPUS), ("100000 100000", 1), ("50000 100000", 1), (f"{CPUS}50000 100000", CPUS), ("", CPUS)],
)
def test_a_container_s_share_of_the_cpus_counts(tmp_path: Path, quota: str, found: int) -> None:
    file = tmp_path / "cpu.max"
    assert available_cpus(file) == CPUS
    file.write_text(f"{quota}\n")
    assert available_cpus(file) == found


def test_memory_that_is_free_is_no_more_than_there_is_or_a_container_may_have(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory(tmp_path / "memory.max") <= whole
    assert 0 < available_memory(tmp_path / "no such file") <= whole
    (tmp_path / "memory.max").write_text("51000\n")
    assert available_memory(tmp_path / "memory.max") == 50_000
    (tmp_path / "memory.current").write_text("60000\n")
    assert available_memory(tmp_path / "memory.max") == 0


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
