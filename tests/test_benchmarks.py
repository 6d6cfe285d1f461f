"""The benchmarks run, small: what they time is what they say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from conftest import ROOT
from openquant.formats.schemes import SCHEMES


def test_what_is_timed_of_a_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    assert all(callable(resolve_name(name)) for name in (*gpu.EVAL_STEPS, *gpu.GPTQ_STEPS))


def measured_gpu(script: Path, directory: Path) -> tuple[int, list[list[str]]]:
    """The exit code of benchmarks/gpu.py, or of a script around it, and the rows of its table."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    command = [sys.executable, script, "--device", "cpu", "--small"]
    done = subprocess.run(command, timeout=300, stdout=subprocess.PIPE, text=True, env=environment)
    assert list(directory.iterdir()) == []
    return done.returncode, [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]


def test_all_that_is_measured_of_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    code, rows = measured_gpu(ROOT / "benchmarks" / "gpu.py", tmp_path)
    assert code == 0
    names = [name for name, *_ in rows]
    assert [name for name in names if ", " not in name] == ["GPTQ of a layer", "GPTQ of experts", "eval", "GPTQ"]
    assert [name for name in names if name.startswith("convert")] == [
        "convert, a copy",
        *(f"convert, {scheme}, cpu" for scheme in ("tensor", "block", "int4")),
    ]

    codes = {name.removeprefix("codes, "): figure for name, figure, *_ in rows if name.startswith("codes")}
    assert codes == dict.fromkeys([*SCHEMES, "int4 by GPTQ"], "100")
    for _, figure, unit, ratio, compared, gpu_memory, memory in rows:
        assert float(figure) > 0
        assert float(ratio) > 0
        assert unit and compared
        assert gpu_memory == "0" and float(memory) > 100
