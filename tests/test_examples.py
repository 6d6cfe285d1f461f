"""The scripts and notebooks in examples/ run as they are."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conftest import EXAMPLE, ROOT

SCRIPTS = ROOT / "examples" / "scripts"
NOTEBOOKS = ROOT / "examples" / "notebooks"

# What each script is given, and the end of what it prints.
GIVEN = {
    "compress.py": ([EXAMPLE, "out"], "0.0 GB -> 0.0 GB; vllm serve out\n"),
    "four_bits.py": ([EXAMPLE, "out", "texts.txt"], "0.00 GB in out, loaded by vLLM and SGLang\n"),
    "compare.py": ([EXAMPLE, "made"], "nats, close\n"),
    "fit_gpu.py": ([EXAMPLE, "4090", "out"], f"{EXAMPLE} fits 4090 as it is"),
    "read_layer.py": (["made"], "model.layers.3.self_attn.v_proj\n"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import openquant

    output = tmp_path_factory.mktemp("made") / "made"
    openquant.compress(EXAMPLE, output)
    return output


def test_every_script_is_run() -> None:
    assert GIVEN.keys() == {path.name for path in SCRIPTS.iterdir()}
    assert len(list(NOTEBOOKS.iterdir())) == 3


@pytest.mark.usefixtures("short_answers")
@pytest.mark.parametrize("name", GIVEN)
def test_a_script_runs(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "made")
    Path("texts.txt").write_text("A text for the calibration, of many words. " * 4000)
    arguments, end = GIVEN[name]
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit as ended:
        print(ended, end="")
    assert capsys.readouterr().out.endswith(end)
    assert len((SCRIPTS / name).read_text().splitlines()) <= 20


@pytest.mark.usefixtures("short_answers")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.iterdir()), ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    cells = json.loads(path.read_text())["cells"]
    known: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), known)
    assert "100%" in capsys.readouterr().err


def test_a_result_is_a_line(tmp_path: Path) -> None:
    import openquant

    result = openquant.compress(EXAMPLE, tmp_path / "<out>", dry_run=True)
    assert repr(result) == f"<Result: would write {tmp_path}/<out>, tensor, 8.39 MB -> 5.25 MB>"
