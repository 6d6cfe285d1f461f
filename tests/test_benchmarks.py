"""The benchmarks run, small: what they time is what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from openquant.formats.schemes import SCHEMES


def test_a_diagnosis_is_timed_beside_a_conversion(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "diagnose.py", EXAMPLE, "--turns", "1", "--scratch", tmp_path]
    done = subprocess.run([*command, "--full"], check=True, timeout=60, capture_output=True, text=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| compress", "| diagnose", "| diagnose --full"]
    assert rows[0][-1] == "1.00, 1.00, 1.00 |"
    assert list(tmp_path.iterdir()) == []


def test_schemes_are_evaluated_on_one_model(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("import os\n")
    for named in ([], ["int8", "channel"]):
        with subtests.test(named=named):
            command = [sys.executable, ROOT / "benchmarks" / "schemes.py", EXAMPLE, "--samples", "2", "--length", "32"]
            command += ["--prompts", tmp_path / "prompts.txt", "--scratch", tmp_path]
            command += [word for scheme in named for word in ("--scheme", scheme)]
            done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
            rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:-2]]
            assert [row[0] for row in rows] == (named or list(SCHEMES))
            assert {len(row) for row in rows} == {8}
            assert {row[6] for row in rows} <= {"same", "close", "similar", "changed"}
            assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]
