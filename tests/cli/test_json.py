"""What programs read: every key that a verb prints stands in its schema, and no other; progress; pipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conftest import EXAMPLE, ROOT
from openquant.cli.arguments import verb_parser
from openquant.cli.commands import VERBS, main
from openquant.fit import session
from support import starting
from support.loopback_hub import LoopbackHub
from support.task_files import write_lines


def progress_keys() -> set[str]:
    """The keys of a line of progress, as docs/json.md has them."""
    text = (ROOT / "docs" / "json.md").read_text().split("\n## Progress\n")[1].split("\n## ")[0]
    return {key for keys in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE) for key in re.findall(r"`(\w+)`", keys)}


def schema(verb: str) -> dict[str, Any]:
    """The published schema of what a verb prints."""
    name = {"dequantize": "compress"}.get(verb, verb).replace(" --", "-")
    return json.loads((ROOT / "docs" / "schema" / f"{name}.json").read_text())


def in_schema(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, bool]]:
    """The paths of the keys of a schema, as the document has them, and whether each is always there."""
    for key, inner in node.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        yield here, key in node["required"]
        yield from in_schema(inner, here)
    for key, here in (("additionalProperties", f"{path}.*"), ("items", f"{path}[]")):
        if key in node:
            if key == "additionalProperties":
                yield here, True
            yield from in_schema(node[key], here)


def printed(value: Any, known: dict[str, bool], path: str = "") -> Iterator[str]:
    """The paths of keys in an object, with `*` for those that are data to the schema."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else key
            here = f"{path}.*" if here not in known and f"{path}.*" in known else here
            yield here
            yield from printed(inner, known, here)
    elif isinstance(value, list):
        for inner in value:
            yield from printed(inner, known, f"{path}[]")


def require(verb: str, *objects: Any) -> None:
    """What is printed is what the schema has, but for keys that are there only in some cases."""
    known = dict(in_schema(schema(verb)))
    for each in objects:
        jsonschema.validate(each, schema(verb))
    found = {path for each in objects for path in printed(each, known)}
    assert found - known.keys() == set()
    always = {path for path, required in known.items() if required and not path.endswith(".*")}
    assert always - found == set()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    assert main(["compress", "-m", str(EXAMPLE), "-o", str(tmp_path / "out"), "-q"]) == 0
    return tmp_path / "out"


@pytest.mark.usefixtures("short_answers")
def test_every_key_is_in_the_schema(out, tmp_path, capsys, monkeypatch):
    # A search writes its scores there.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "COMPARED", (2, 32))

    def say(*words: object, code: int = 0) -> Any:
        assert main([*map(str, words), "--json"]) == code
        stdout = capsys.readouterr().out
        assert stdout.count("\n") == 1
        return json.loads(stdout)

    compressed = say("compress", "-m", EXAMPLE, "-o", out)
    require("compress", compressed, say("dequantize", out, "-o", tmp_path / "plain"))
    require("explain", say("explain", EXAMPLE, "**.{q_proj,down_proj}", "--scheme", "block"))
    require("fit", say("fit", EXAMPLE, "--gpu", "4090", "--for", "both", "--quantize-lm-head"), say("fit", EXAMPLE))
    search = ("--search", "--candidates", "int8-weights", "--gpu", "2.18GB", "--context", "1")
    require("fit --search", say("fit", EXAMPLE, *search))
    require("verify", say("verify", out, "--source", EXAMPLE, "--full"))
    require("diagnose", say("diagnose", EXAMPLE))
    tasks = write_lines(tmp_path / "tasks.jsonl", 3)
    require("calibrate", say("calibrate", EXAMPLE, "-o", tmp_path / "c", "--samples", 2, "--length", 16))
    require("eval", say("eval", out, "--source", EXAMPLE, "--samples", 2, "--length", 16, "--tasks", tasks))
    require("completion", say("completion", "bash"))
    require("error", say("compress", "-m", tmp_path / "nowhere", code=2))
    with LoopbackHub(tmp_path / "hub", token="hf_x") as hub:
        settings = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "hf_x",
            "HF_HUB_DISABLE_XET": "1",
        }
        environment = {**os.environ, **settings}
        for name, more in (("dry-run", ["--dry-run"]), ("push", [])):
            words = ["-m", "openquant", "push", out, "user/name", "--json", *more]
            done = starting.run(words, cwd=ROOT, env=environment)
            assert done.returncode == 0, done.stderr
            require(name, json.loads(done.stdout))


SCHEMAS = sorted(path.stem for path in (ROOT / "docs" / "schema").glob("*.json"))


def undescribed(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """The keys of a schema of which nothing is said."""
    for key, inner in node.get("properties", {}).items():
        if not inner.get("description"):
            yield f"{path}.{key}"
        yield from undescribed(inner, f"{path}.{key}")
    for key in ("additionalProperties", "items"):
        if key in node:
            yield from undescribed(node[key], path)


def test_a_schema_says_what_each_key_is(subtests: pytest.Subtests) -> None:
    for name in SCHEMAS:
        with subtests.test(name=name):
            published = schema(name.replace("fit-", "fit --"))
            jsonschema.Draft202012Validator.check_schema(published)
            assert list(undescribed(published)) == []
            # An object without its keys, and a text for an object, are refused.
            for wrong in ({}, "text"):
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(wrong, published)


def test_every_verb_has_a_schema() -> None:
    assert {*SCHEMAS} == {*VERBS} - {"dequantize"} | {"error", "fit-search", "dry-run"}


def test_every_verb_takes_json_and_has_a_schema() -> None:
    (verbs,) = (action for action in verb_parser()._actions if action.dest == "verb")
    assert verbs.choices is not None
    assert set(VERBS) == set(verbs.choices)
    for name, parser in dict(verbs.choices).items():  # type: ignore[call-overload]
        assert "--json" in parser._option_string_actions, name
        assert schema(name)
        takes = "--progress" in parser._option_string_actions
        assert takes == (name in ("compress", "dequantize", "fit", "diagnose", "calibrate", "eval", "verify")), name


WORDS: list[tuple[str, list[object]]] = [
    ("compressing", ["compress", "-m", EXAMPLE, "-o", "made", "--overwrite"]),
    ("diagnosing", ["diagnose", EXAMPLE]),
    ("verifying", ["verify", "out", "--source", EXAMPLE, "--full"]),
]


def test_progress_is_objects_on_request(subtests, out, capsys, monkeypatch):
    for stage, words in WORDS:
        with subtests.test(stage=stage, words=words), monkeypatch.context() as patch:
            patch.chdir(out.parent)
            assert main([*map(str, words), "--progress", "json", "--json"]) == 0
            told = capsys.readouterr()
            lines = [json.loads(line) for line in told.err.splitlines()]
            assert len(lines) >= 2
            assert {line["stage"] for line in lines} == {stage}
            assert all(set(line) == progress_keys() for line in lines)
            assert (lines[0]["done"], lines[-1]["done"]) == (0, lines[-1]["total"]) or stage != "compressing"
            assert json.loads(told.out)


def test_pipes_get_no_colours_bars_or_questions(out: Path) -> None:
    for words in (["compress", "-m", EXAMPLE, "-o", "piped"], ["verify", "out", "--source", EXAMPLE, "--full"]):
        done = subprocess.run(
            [sys.executable, "-m", "openquant", *map(str, words)],
            cwd=out.parent, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TERM": "xterm-256color"},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert not {b"\x1b", b"\r", b"\b"} & {bytes([byte]) for byte in done.stdout}
