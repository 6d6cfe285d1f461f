"""What a caller of a function is told names keywords, what the command line says flags; and what `openquant` exports."""

from __future__ import annotations

import ast
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import openquant
from conftest import EXAMPLE, ROOT
from openquant.cli.commands import main
from openquant.errors import OpenQuantError, UsageError
from openquant.hub.error_mapping import PushError
from openquant.keywords import in_python
from openquant.options import Calibrate, CalibrationTexts, Check, Diagnose, Evaluate, Recipe, Run, flags_of, options_of

VERBS = [
    *("calibrate", "compress", "dequantize", "diagnose", "evaluate", "explain", "fit_table", "push", "search_mixtures"),
    "verify",
]


# What is said of flags, and of keywords.
SAID = {
    'give --max-memory 1.4GB or more, or leave --gptq out': 'give max_memory="1.4GB" or more, or leave gptq out',
    'give --kv-cache fp8 too': 'give kv_cache="fp8" too',
    'give --samples 12 or more': 'give samples=12 or more',
    'give --samples from 1 to 100,000': 'give samples from 1 to 100,000',
    'replace that output with --overwrite': 'replace that output with overwrite=True',
    'choose another directory with -o': 'choose another directory with output',
    'use -w 128, or --scheme tensor': 'use scheme="block", or scheme="tensor"',
    '--ignore model.layers.9.** matches no module': 'ignore="model.layers.9.**" matches no module',
    "say --ignore '**' if": 'say ignore="**" if',
    '--scheme-for **.q=block matches': 'scheme_for={"**.q": "block"} matches',
    'give --text FILE or --dataset NAME': 'give text=FILE or dataset=NAME',
    '--tp -2 is no number': 'tp=-2 is no number',
    'leave it as it is with --ignore': 'leave it as it is with ignore',
    '--architecture auto asks vLLM': 'architecture="auto" asks vLLM',
    'make it again: openquant calibrate MODEL -o FILE': 'make it again: openquant.calibrate(MODEL, out=FILE)',
    'openquant verify DIR --full looks at both': 'openquant.verify(DIR, full=True) looks at both',
    'run openquant eval again': 'run openquant.evaluate() again',
    'compress --dry-run -v lists them': 'openquant.explain(MODEL, "**").layers lists them',
    'nearest is a; compress --dry-run lists all': 'nearest is a; openquant.explain(MODEL, "**").layers lists all',
    'engines use them with --kv-cache-dtype fp8': 'engines use them with --kv-cache-dtype fp8',
    'ulimit -v is 100': 'ulimit -v is 100',
    'a-b - c --': 'a-b - c --',
}  # fmt: skip


def test_messages_name_keywords(subtests):
    for text, expected in SAID.items():
        with subtests.test(text):
            assert in_python(text, ("output",)) == expected
            assert in_python(expected, ("output",)) == expected
    # The keyword that the function has.
    hint = "name another file with -o"
    assert in_python(hint, inspect.signature(openquant.calibrate).parameters) == "name another file with out"
    assert in_python(hint, inspect.signature(openquant.compress).parameters) == "name another file with output"


def texts() -> Iterator[str]:
    """Every message and hint in the package, with what is put in as {}."""
    for path in sorted((ROOT / "openquant").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                for argument in node.args:
                    if isinstance(argument, ast.JoinedStr):
                        yield "".join(
                            str(each.value) if isinstance(each, ast.Constant) else "{}" for each in argument.values
                        )
                    elif isinstance(argument, ast.Constant):
                        yield str(argument.value)


def test_no_message_of_the_package_keeps_a_flag() -> None:
    kinds = (Calibrate, CalibrationTexts, Check, Diagnose, Evaluate, Recipe, Run)
    flags = {flag for kind in kinds for name, option in options_of(kind).items() for flag in flags_of(name, option)}
    known = "|".join(sorted(flag for flag in flags if flag.startswith("-")))
    named = re.compile(rf"(?<![\w-])({known})(?![\w-])")
    found = [text for text in texts() if named.search(text)]
    assert len(found) > 50
    assert [text for text in found if named.search(in_python(text))] == []


def test_who_calls_a_function_is_told_keywords_and_who_types_a_command_flags(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(openquant.OutputError) as caught:
        openquant.compress(EXAMPLE, tmp_path / "out")
    assert main(["compress", "-m", str(EXAMPLE), "-o", str(tmp_path / "out")]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {caught.value}"
    assert " -o" in hint
    assert caught.value.hint == hint.removeprefix("hint: ").replace("-o", "output")
    with pytest.raises(openquant.UsageError, match='^awq=True brings scheme="int8" nothing: '):
        openquant.explain(EXAMPLE, "lm_head", "int8", awq=True)


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


def test_a_name_is_enough_to_push_to() -> None:
    assert Run.parse(model="m", push="you/name").push == openquant.Push("you/name")
    with pytest.raises(UsageError, match="^push is of type int, not a name or a Push$"):
        openquant.compress(EXAMPLE, dry_run=True, push=3)
    with pytest.raises(openquant.OutputError, match="missing"):
        openquant.push("missing", "you/name")


def test_a_value_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(UsageError, match="^ignore is of type int, not a text or a list of texts$"):
        openquant.compress(EXAMPLE, dry_run=True, ignore=3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ignore": [3]}, "ignore is of type int, not a text or a path"),
        ({"output": 3}, "output is of type int, not a text or a path"),
        ({"tp": [1]}, "tp is of type list, not a number"),
        ({"fit": 5}, "fit is of type int, not a text"),
        ({"gptq": "yes"}, "gptq is of type str, not True or False"),
    ]
    for values, message in wrong:
        with pytest.raises(UsageError, match=f"^{message}$"):
            openquant.compress(EXAMPLE, dry_run=True, **values)
    layer: Any = 3
    with pytest.raises(UsageError, match="^layer is of type int, not a text$"):
        openquant.explain(EXAMPLE, layer)
    with pytest.raises(TypeError, match=r"^explain\(\) got an unexpected keyword argument 'no_such'$"):
        openquant.explain(EXAMPLE, "**", no_such=1)


def test_a_result_has_the_notes_and_engines_that_the_command_prints() -> None:
    plans: list[openquant.Plan] = []

    class Keeper(openquant.Reporter):
        def planned(self, plan: openquant.Plan, *_: object) -> None:
            plans.append(plan)

    result = openquant.compress(
        EXAMPLE, scheme="int4", group_size="128", scheme_for={"**.q_proj": "int5"}, dry_run=True, reporter=Keeper()
    )
    assert result.engines == ["vLLM"]
    assert result.notes == list(plans[0].notes)
    assert any(note.startswith("--scheme-for **.q_proj=int5 also applies") for note in result.notes)
