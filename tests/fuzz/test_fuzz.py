"""Some cases of what run.py plays by the hundred thousand, the same ones each time."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bases
from cases import SHM, Base, play, warm


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Base]:
    found = bases.make(tmp_path_factory.mktemp("bases"))
    warm(next(base for base in found if base.source))
    return found


# A random choice of what must hold would fail by chance, for somebody whose change has no part in it.
@settings(max_examples=80, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_whatever_is_damaged_the_command_says_so_and_ends(sound: list[Base], rng: random.Random) -> None:
    with tempfile.TemporaryDirectory(dir=SHM) as here:
        told = play(rng, sound, Path(here))
    assert not told.problems, f"{told.damage}\nopenquant {' '.join(told.words)}\n{told.outcome}"
