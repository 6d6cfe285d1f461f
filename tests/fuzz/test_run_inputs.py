"""Some cases of what run_inputs.py plays by the hundred thousand, the same ones each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_whatever_is_given_beside_a_model_the_command_says_so_and_ends() -> None:
    # In a process of its own: what is forked must have no other threads, and one that reads is asked for no more memory.
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_inputs.py"), "--cases", "120", "--commands", "0.04"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout
