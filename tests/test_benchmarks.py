"""The benchmarks run, small: what they time is what they say."""

from __future__ import annotations

import os
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


PLANTED = """
import os, signal, sys
sys.path.insert(0, {benchmarks!r})
import gpu

def write_other_codes(bench, source, output, *others, **options):
    import torch
    from safetensors.torch import save_file

    (bench.directory / output).mkdir(exist_ok=True)
    codes = torch.tensor([1, 2, 3, len(output)], dtype=torch.int8)
    save_file({{"codes": codes}}, bench.directory / output / "model.safetensors")

def die(bench):
    os.kill(os.getpid(), signal.SIGKILL)

def take_all_time(bench):
    gpu.LAST_START = -1
    yield "long", 3.0, "s", 1.5, "nothing"

gpu.Bench.compress = write_other_codes
gpu.PARTS = {{"codes": gpu.compare_codes, "killed": die, "long": take_all_time, "late": die}}
if __name__ == "__main__":
    gpu.main()
"""


def test_what_fails_on_a_gpu_is_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(benchmarks=str(ROOT / "benchmarks")))
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    code, rows = measured_gpu(script, temporary)
    assert code == 1
    assert [row[:5] for row in rows] == [
        *([f"codes, {name}", "75", "% equal", "0.75", "the CPU's"] for name in (*SCHEMES, "int4 by GPTQ")),
        ["codes", f"failed: ValueError: not the CPU's codes: {', '.join(SCHEMES)}", "", "", ""],
        ["killed", "failed: ended by signal 9", "", "", ""],
        ["long", "3", "s", "1.5", "nothing"],
        ["late", "left out: no time", "", "", ""],
    ]
