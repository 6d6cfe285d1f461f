"""`--dry-run` of verbs that have no plan: what would be read, done and written, refusals, and that nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import EXAMPLE, tree
from openquant import compress, explain
from openquant.cli.arguments import verb_parser
from openquant.cli.commands import main
from openquant.files.cards import evaluation_digest
from support.evaluation_files import evaluate
from support.hub_site import Site

TEXTS = ("--samples", "2", "--length", "16")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compress(EXAMPLE, tmp_path / "FP8")
    (tmp_path / "mine.txt").write_text("Some words of a text. " * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def site(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site")) as found:
        found.cwd = here
        yield found


def test_verbs_that_convert_or_publish_have_it() -> None:
    [verbs] = [action for action in verb_parser()._actions if action.dest == "verb"]
    assert verbs.choices is not None
    having = {name for name, parser in dict(verbs.choices).items() if "--dry-run" in parser._option_string_actions}  # type: ignore[call-overload]
    assert having == {"compress", "dequantize", "push"}


def test_a_push_is_described_and_makes_no_repository(site: Site, here: Path) -> None:
    before = tree(here / "FP8")
    done = site.ask("push", "FP8", "name", "--private", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    files = sorted(name for name in before if name != ".openquant.json")
    reads = [f"reads   {here}/FP8/{name} (a {'shard' if name.endswith('.safetensors') else 'file'}, " for name in files]
    lines = done.stdout.splitlines()
    assert [line[: len(read)] for line, read in zip(lines, reads, strict=False)] == reads
    assert lines[len(reads) :] == [
        f"does    those of {len(files)} files are uploaded that the repository does not have; one commit to main",
        "writes  user/name (a repository that is created, private)",
        'note    the card names no base_model: add "base_model: .." to the metadata at the top of FP8/README.md',
        "note    no figures are added to the card: openquant eval FP8 --source SOURCE, then push again",
        "nothing was written",
    ]
    assert not site.hub.stored and tree(here / "FP8") == before
    assert site.ask("push", "FP8", "name").returncode == 0
    commits = site.hub.commits("user/name")
    done = site.ask("push", "FP8", "name", "--create-pr", "--dry-run")
    replaced = f"{', '.join(files[:4])} and {len(files) - 4} more in the repository are replaced where they differ"
    exists = "writes  user/name (a repository that exists)\n"
    assert f"a pull request is opened\ndoes    {replaced}\n{exists}" in done.stdout
    done = site.ask("compress", "-m", EXAMPLE, "-o", "out", "--push-to-hub", "other", "--dry-run")
    assert "note: the run pushes to user/other, a repository that is created: one commit to main\n" in done.stdout
    assert site.hub.commits("user/name") == commits


def test_notes_of_a_push_are_the_same_without_it(site: Site, here: Path) -> None:
    found = evaluate(here / "FP8")
    for name, shown in (("eval.html", "another"), ("eval.png", evaluation_digest(found))):
        (here / "FP8" / name).write_text(shown)
    notes = [
        'the card names no base_model: add "base_model: .." to the metadata at the top of FP8/README.md',
        "eval.html is of another evaluation than eval.json, and is left out",
    ]
    done = site.ask("push", "FP8", "name", "--dry-run", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)["notes"]) == (0, "", notes)
    done = site.ask("push", "FP8", "name", "--json")
    assert (done.returncode, done.stderr) == (0, "".join(f"note: {note}\n" for note in notes))
    # What is added to the card is not asked for again.
    card = here / "FP8" / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nbase_model: org/name\n", 1))
    (here / "FP8" / "eval.html").unlink()
    done = site.ask("push", "FP8", "name", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_conversion_is_refused_as_the_run_would_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "foreign").mkdir()
    (here / "foreign" / "notes.txt").write_text("mine")
    gptq = ["--scheme", "int4", "--gptq", *TEXTS, "--text"]
    for words, message in (
        (["-o", "foreign"], "foreign is not empty and was not made by openquant: it holds notes.txt"),
        (["-o", "FP8", "-w", "128"], "FP8 holds the output of another run: other options, another source or another"),
        (["-o", "new", *gptq, "nope.jsonl"], "nope.jsonl cannot be read: No such file or directory"),
    ):
        assert main(["compress", str(EXAMPLE), *words, "--dry-run"]) == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert main(["compress", str(EXAMPLE), "-o", "new", *gptq, "mine.txt", "--dry-run"]) == 0
    assert explain(EXAMPLE, "**.q_proj", "int4", gptq=True, text="nope.jsonl").layers
    assert not (here / "new").exists()


def test_a_plan_says_that_codes_are_rounded_a_second_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "note: the source is quantized already, and is rounded a second time (docs/sources.md)"
    for words, noted in ((["-m", "FP8", "--scheme", "int4"], True), (["-m", "FP8", "--scheme", "keep"], False)):
        assert main(["compress", *words, "--dry-run"]) == 0
        assert (note in capsys.readouterr().out.splitlines()) == noted
    assert main(["compress", "-m", str(EXAMPLE), "--dry-run"]) == 0
    assert note not in capsys.readouterr().out
