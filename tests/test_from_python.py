"""What `openquant` exports, and what a caller of its functions is told."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import openquant
from conftest import EXAMPLE, ROOT
from openquant.cli.commands import main
from openquant.errors import OpenQuantError, UsageError
from openquant.hub.error_mapping import PushError
from openquant.options import Run
from openquant.result import NotebookReporter

VERBS = [
    *("calibrate", "compress", "dequantize", "diagnose", "evaluate", "explain", "fit_table", "push", "search_mixtures"),
    "verify",
]


def test_errors_name_options_as_the_command_does(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(openquant.OutputError) as caught:
        openquant.compress(EXAMPLE, tmp_path / "out")
    assert main(["compress", "-m", str(EXAMPLE), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\nhint: {caught.value.hint}\n"
    assert " -o" in caught.value.hint


def test_none_is_an_empty_list() -> None:
    nothing: dict[str, Any] = {"ignore": None, "copy": None, "text": None}
    found = openquant.compress(EXAMPLE, dry_run=True, **nothing)
    assert found.notes == openquant.compress(EXAMPLE, dry_run=True).notes


def test_what_is_exported_is_what_is_listed() -> None:
    assert dir(openquant) == sorted(openquant.__all__)
    assert [name for name in dir(openquant) if inspect.isfunction(getattr(openquant, name))] == VERBS
    shown = pydoc.render_doc(openquant, renderer=pydoc.plaintext)
    for verb in VERBS:
        assert f"\n    {verb}(" in shown
        assert pickle.loads(pickle.dumps(getattr(openquant, verb))) is getattr(openquant, verb)


def test_importing_the_package_and_a_conversion_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, openquant\n"
        "dir(openquant)\n"
        "print(sorted({'numpy', 'torch', 'transformers', 'typing'} & set(sys.modules)))\n"
        f"openquant.compress({str(EXAMPLE)!r}, {str(tmp_path / 'out')!r})\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    code = code.replace("import sys", f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}; import sys", 1)
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "[]\n[]\n")


def test_errors_come_out_of_a_pool_of_processes() -> None:
    for kind in (OpenQuantError, UsageError, PushError):
        found = pickle.loads(pickle.dumps(kind("what", "what to do")))
        assert (type(found), str(found), found.message, found.hint) == (kind, "what", "what", "what to do")


def test_a_notebook_has_a_bar_for_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = NotebookReporter()
    for done in (5, 10, 5, 10):
        reporter.on_progress(done, 10)
    assert capsys.readouterr().err.count(" 10/10 [") == 2


def test_a_name_is_enough_to_push_to() -> None:
    assert Run(model="m", push="you/name").push == openquant.Push("you/name")
    with pytest.raises(UsageError, match="^push is of type int, not a name or a Push") as caught:
        openquant.compress(EXAMPLE, dry_run=True, push=3)
    # Before Python 3.11 a traceback has the message only.
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ['hint: give "org/name"']
    with pytest.raises(openquant.OutputError, match="missing"):
        openquant.push("missing", "you/name")


def test_a_value_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(UsageError, match="^ignore is of type int, not a text or a list of texts"):
        openquant.compress(EXAMPLE, dry_run=True, ignore=3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ignore": [3]}, "ignore is of type int, not a text or a path"),
        ({"tp": [1]}, "tp is of type list, not a whole number"),
        ({"gptq": "yes"}, "gptq is of type str, not True or False"),
    ]
    for values, message in wrong:
        with pytest.raises(UsageError, match=f"^{message}"):
            openquant.compress(EXAMPLE, dry_run=True, **values)
    layer: Any = 3
    with pytest.raises(UsageError, match="^layer is of type int, not a text"):
        openquant.explain(EXAMPLE, layer)
    with pytest.raises(TypeError, match=r"^explain\(\) got an unexpected keyword argument 'no_such'$"):
        openquant.explain(EXAMPLE, "**", no_such=1)


def test_a_result_has_the_notes_and_engines_that_the_command_prints() -> None:
    plans: list[openquant.Plan] = []

    class Keeper(openquant.Reporter):
        def on_plan(self, plan: openquant.Plan, *_: object) -> None:
            plans.append(plan)

    result = openquant.compress(
        EXAMPLE, scheme="int4", group_size="128", scheme_for={"**.q_proj": "int5"}, dry_run=True, reporter=Keeper()
    )
    assert result.engines == ["vLLM"]
    assert result.notes == list(plans[0].notes)
    assert any(note.startswith("--scheme-for **.q_proj=int5 also applies") for note in result.notes)
