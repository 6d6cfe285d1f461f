"""A few of the interrupts that interrupts.py places at random; many more are placed by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("verb", ["calibrate", "gptq", "eval"])
def test_an_interrupt_at_a_random_bytecode_ends_the_command_and_the_next_run_gives_the_same_bytes(verb: str) -> None:
    script = Path(__file__).with_name("interrupts.py")
    done = subprocess.run(
        [sys.executable, str(script), "--cases", "6", verb],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "0 failed of 6"), done.stdout + done.stderr
