"""What the machine lets a process use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openquant.machine import available_cpus

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
