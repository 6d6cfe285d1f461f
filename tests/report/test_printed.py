"""Names and texts that others chose are printed, and a terminal or a card obeys none of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import EXAMPLE, change_json
from openquant.cli.commands import main
from openquant.files.cards import shell_word, split_card
from openquant.report.card import evaluated_card
from support.evaluation_files import evaluate as evaluated

# Of a directory: colours, a line that ends a block of code, one that ends metadata, and what turns text around.
EVIL = "a\x1b[31m\n```\n---\n# b\x7f\x9b2J\u202e`|<i>"
SMALL = ["--samples", "2", "--length", "16"]


def require_plain(text: str) -> None:
    """No control character but the newlines of a layout, and no line of a name's."""
    odd = {letter for letter in text if not letter.isprintable() and letter != "\n"}
    assert odd == set(), odd
    assert not {"```", "---", "# b"} & {line[:3] for line in text.splitlines()}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    source = shutil.copytree(EXAMPLE, tmp_path / EVIL)
    change_json(source / "config.json", lambda config: config.update({EVIL: EVIL, "model_name": EVIL}))
    (source / f"{EVIL}.txt".replace("/", "")).write_text(EVIL)
    (source / "README.md").unlink(missing_ok=True)
    return source


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """What a command prints, which is plain; and with --json, which is one line of JSON."""
    assert main([*words]) == code, capsys.readouterr()
    found = capsys.readouterr()
    require_plain(found.out)
    require_plain(found.err)
    return found.out + found.err


@pytest.mark.usefixtures("short_answers")
def test_no_verb_prints_what_a_terminal_obeys(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"out{EVIL}"
    text = Path(f"text{EVIL}")
    text.write_text("def main():\n    return '\x1b[31m\u202e'\n" * 400)
    prompts = Path(f"prompts{EVIL}")
    prompts.write_text("import \x1b[31m\u202e\n")
    assert "a\\x1b[31m\\n```" in said(capsys, 0, "compress", "-m", EVIL, "-o", out, "--dry-run", "-v")
    said(capsys, 0, "compress", "-m", EVIL, "-o", out, "-v")
    said(capsys, 0, "verify", out, "--source", EVIL, "--full")
    said(capsys, 0, "diagnose", EVIL, "-v")
    said(capsys, 0, "explain", EVIL, "**.q_proj")
    said(capsys, 0, "dequantize", out, "-o", f"plain{EVIL}")
    said(capsys, 0, "calibrate", EVIL, "-o", f"c{EVIL}", "--text", str(text), *SMALL)
    words = ["eval", out, "--source", EVIL, "--text", str(text), "--prompts", str(prompts), *SMALL]
    assert "a\\x1b[31m\\n```" in said(capsys, 0, *words)
    json.loads(said(capsys, 0, "diagnose", EVIL, "--json").splitlines()[0])
    for wrong in (["verify", EVIL], ["calibrate", f"no{EVIL}"], ["compress", "-m", EVIL, "-o", out, "--scheme", EVIL]):
        assert said(capsys, 2, *wrong).count("\n") == 2


HEADINGS = ["## Use", "## How it was made"]


def card_is_sound(card: str) -> None:
    assert {letter for letter in card if not letter.isprintable()} == {"\n"}
    text = split_card(card)[2]
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "vllm"
    assert [line for line in card.splitlines() if line.startswith("---")] == ["---", "---"]
    fences = [line for line in text.splitlines() if line.startswith("```")]
    use = ["```"] * 4
    assert fences in (use + ["```"] * 2, use + ["```"] * 4)
    title, *headings = (line for line in text.splitlines() if line.startswith("#"))
    assert [heading for heading in headings if heading != "## Measured against the source"] == HEADINGS
    assert "<" not in title


@pytest.mark.parametrize("repo", [False, True])
def test_a_card_keeps_its_structure(source: Path, tmp_path: Path, repo: bool) -> None:
    where = EVIL
    if repo:
        snapshots = tmp_path / f"models--org--{EVIL}" / "snapshots"
        snapshots.mkdir(parents=True)
        source.rename(snapshots / ("0" * 40))
        where = str(snapshots / ("0" * 40))
    assert main(["compress", "-m", where, "-o", f"out{EVIL}", "-q"]) == 0
    card = Path(f"out{EVIL}/README.md").read_text()
    card_is_sound(card)
    found: dict[str, Any] = evaluated(Path(f"out{EVIL}"))
    hostile = {**found, "text": {**found["text"], "files": [EVIL]}, "source": {"name": EVIL, "digest": ""}}
    card_is_sound(evaluated_card(card, EVIL, hostile))


def test_a_word_of_a_command_means_the_same(subtests: pytest.Subtests) -> None:
    for name in [EVIL, "plain", "it's", "-x", "a b"]:
        with subtests.test(name=name):
            word = shell_word(name)
            done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
            assert done.stdout.decode(errors="surrogateescape").removeprefix("./") == name


def test_progress_for_programs_is_plain(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compress", "-m", EVIL, "-o", f"out{EVIL}", "--awq", "--scheme", "int4", *SMALL, "--progress", "json"]
    progress = [line for line in said(capsys, 0, *words).splitlines() if line.startswith("{")]
    assert {json.loads(line)["stage"] for line in progress} >= {"calibrating", "compressing"}
