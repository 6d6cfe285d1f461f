"""Damaged directories and files: the same cases each time, or those that OPENQUANT_FUZZ=FIRST:COUNT numbers."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import bases
import cases
import inputs

FIRST, COUNT = map(int, os.environ.get("OPENQUANT_FUZZ", "0:80").split(":"))


def play_all(play: Callable[[random.Random, Path], list[str]]) -> None:
    """Play each case in an empty directory; fail with what did not hold of any."""
    wrong = []
    for number in range(FIRST, FIRST + COUNT):
        with tempfile.TemporaryDirectory(dir=cases.SHM, ignore_cleanup_errors=True) as here:
            told = play(random.Random(number), Path(here))
        wrong += [f"case {number}: {each}" for each in told]
    assert not wrong, "\n".join(wrong)


def test_whatever_is_damaged_the_command_says_so_and_ends(tmp_path: Path) -> None:
    sound = bases.make(tmp_path)
    play_all(lambda rng, here: cases.play(rng, sound, here))


def test_whatever_is_given_beside_a_model_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is asked of the Hub, whatever a recipe names.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sound = inputs.make(tmp_path)
    play_all(lambda rng, here: inputs.play(rng, sound, here))
