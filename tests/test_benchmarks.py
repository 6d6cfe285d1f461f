"""The benchmarks run, small: what they time is what they say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from openquant.formats.schemes import SCHEMES


def test_the_floor_writes_as_many_bytes_as_asked(subtests: pytest.Subtests, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(b"abcdefgh" * 5_000_000)
    (source / "small").write_bytes(b"x" * 1000)
    (source / "empty").touch()
    for nbytes in (1_000_000, 30_000_001, 40_000_000):
        with subtests.test(nbytes=nbytes):
            out = tmp_path / str(nbytes)
            command = [sys.executable, ROOT / "benchmarks" / "floor.py", source, out, "--bytes", str(nbytes)]
            subprocess.run([*command, "--workers", "3"], check=True, timeout=60)
            sizes = {path.name: path.stat().st_size for path in out.iterdir()}
            assert sizes == {"large": nbytes * 40_000_000 // 40_001_000, "small": nbytes * 1000 // 40_001_000}
            # What is written is what was read: no holes.
            assert (out / "large").read_bytes().count(b"\0") == 0


def test_kernels_are_timed_for_each_scheme() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "kernels.py", "--rows", "128"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines()[2:]]
    schemes = (*SCHEMES, *(f"{name} --no-search" for name, scheme in SCHEMES.items() if scheme.searches_scales))
    assert rows == [[f"| {dtype}", scheme] for dtype in ("BF16", "F16", "F32") for scheme in schemes]


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


def test_the_table_of_questions_has_outputs_of_a_source_that_answers_none_rightly(capsys):
    metric = {"source": 0.0, "output": 0.05, "difference": 0.05, "difference_interval": [0.0, 0.15], "recovery": None}
    pooled = {"metrics": [{**metric, "lost": 0, "gained": 1}], "answered_otherwise": 0.25}
    tasks = {"pooled": pooled, "questions": 20, "tokens": 1234}
    results = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))
    results["print_tasks"]({"outputs": [{"output": {"name": "int4"}, "tasks": tasks}]})
    assert capsys.readouterr().out.splitlines()[3:] == [
        "| `--scheme int4` | 5.0 % | 5.0 % [+0.0, +15.0] | - | 25.0 % | 0, 1 |",
        "",
        "Source: 0.0 % of 20 questions, 1,234 tokens.",
    ]
