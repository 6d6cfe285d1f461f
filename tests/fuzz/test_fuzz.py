"""Damaged directories: the same cases each time, or those that OPENQUANT_FUZZ=FIRST:COUNT numbers."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import bases
import cases

FIRST, COUNT = map(int, os.environ.get("OPENQUANT_FUZZ", "0:40").split(":"))


def test_whatever_is_damaged_the_command_says_so_and_ends(tmp_path: Path) -> None:
    sound = bases.make(tmp_path)
    wrong = []
    for number in range(FIRST, FIRST + COUNT):
        with tempfile.TemporaryDirectory(dir=cases.SHM, ignore_cleanup_errors=True) as here:
            told = cases.play(random.Random(number), sound, Path(here))
        wrong += [f"case {number}: {each}" for each in told]
    assert not wrong, "\n".join(wrong)
