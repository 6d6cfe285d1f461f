"""`openquant eval` and evaluate(): what is opened, written and said."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import EXAMPLE, change_json, shorten_answers
from openquant import OpenQuantError, compress, evaluate
from openquant.cli.commands import main
from openquant.errors import SourceError, UsageError
from openquant.evaluation import as_served
from openquant.evaluation.results import Evaluation
from openquant.files.cards import find_evaluation, read_evaluation
from openquant.files.checkpoint import open_checkpoint
from openquant.options import Evaluate
from openquant.report.text import evaluation_text
from openquant.streaming import session
from openquant.streaming.offload import OffloadFile
from support.reporters import Told

SMALL = {"samples": 2, "length": 48}
# Of texts as long as these, states between layers are worth a file.
LONGER = {"samples": 2, "length": 128}
WORDS = ("--samples", "2", "--length", "48")
QUICK = (*WORDS, "--no-prompts")
pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(compress(EXAMPLE, tmp_path_factory.mktemp("made") / "tiny-FP8", "tensor").output)


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "tiny-FP8")


class Measured(NamedTuple):
    """What was found of `made`, and what was told meanwhile."""

    found: Evaluation
    written: bytes
    told: list[str]
    steps: list[tuple[int, int]]


@pytest.fixture(scope="module")
def measured(made: Path) -> Measured:
    seen = Told()
    with pytest.MonkeyPatch.context() as patch:
        shorten_answers(patch)
        found = evaluate([made], EXAMPLE, **SMALL, reporter=seen)
    beside = find_evaluation(open_checkpoint(made))
    assert beside is not None and beside.files == ["eval.json"]
    assert read_evaluation(made) == found.outputs[0]
    written = (made / "eval.json").read_bytes()
    (made / "eval.json").unlink()
    return Measured(found, written, seen.notes, seen.steps)


def test_figures_lie_beside_the_output_and_are_the_same_again(measured: Measured, made: Path) -> None:
    assert json.loads(measured.written) == measured.found.outputs[0]
    assert measured.told == ["2 documents of 48 tokens: prose (1), code (1); 4 passes"]
    done, total = zip(*measured.steps, strict=True)
    assert list(done) == sorted(done)
    # The texts in four passes, and two answers.
    assert (done[-1], set(total)) == (4 * 2 * 48 + 2 * 8, {4 * 2 * 48 + 2 * 8})
    evaluate([str(made)], str(EXAMPLE), **SMALL)
    again = (made / "eval.json").read_bytes()
    (made / "eval.json").unlink()
    assert again == measured.written
    assert [text["source"] != "" for text in measured.found.outputs[0]["texts"]] == [True]


def run_main(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The command in this process, which has transformers already: its exit code, stdout and stderr."""
    code = main(list(map(str, words)))
    return code, *capsys.readouterr()


def test_a_command_tells_of_all_outputs_and_writes_to_one_file(
    output: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(made, tmp_path / "other")
    (other / ".openquant.json").unlink()
    words = ("eval", output, other, "--source", EXAMPLE, *WORDS)
    code, stdout, stderr = run_main(capsys, *words)
    assert code == 0
    assert re.fullmatch(r".*; 6 passes\n(\d+ % evaluated, .*\n)*", stderr)
    assert stdout.count("tiny-FP8") == 4 and stdout.count("\n  prompt ") == 2 and "noise: the floor" in stdout
    assert f"wrote {output / 'eval.json'}\n" in stdout
    assert "note: no text was given" in stdout
    # Not in what others made, unless asked.
    assert (output / "eval.json").exists() and not (other / "eval.json").exists()
    (output / "eval.json").unlink()
    more = ("--json", "--out", tmp_path / "all.json", "--no-prompts", "--fail-above", "0.0000001")
    code, stdout, stderr = run_main(capsys, *words, *more)
    found = json.loads(stdout)
    above = [
        f"{each['output']['name']}: mean KL {each['kl']['mean']:.3g} nats, above --fail-above 1e-07"
        for each in found["outputs"]
    ]
    first, *others, first_above, second_above = stderr.splitlines()
    assert (code, [first_above, second_above]) == (1, above)
    assert first.endswith("; 6 passes") and any(line.startswith("note: no text was given") for line in others)
    assert found == json.loads((tmp_path / "all.json").read_text())
    assert [each["output"]["name"] for each in found["outputs"]] == ["tiny-FP8", "other"]
    largest = max(each["kl"]["mean"] for each in found["outputs"])
    code, _, stderr = run_main(capsys, *words, *more[:-1], f"{1.01 * largest:.15f}")
    assert code == 0 and "above" not in stderr
    assert not (output / "eval.json").exists()


def test_texts_and_prompts_of_one_s_own(output: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("def main():\n    return 0\n" * 400)
    (tmp_path / "prompts.txt").write_text("class A\x1b[31m:\n")
    found = evaluate(
        [output], EXAMPLE, text=[tmp_path / "mine.txt"], prompts=tmp_path / "prompts.txt", **SMALL
    ).outputs[0]
    assert found["text"]["files"] == ["mine.txt"]
    assert [text["prompt"] for text in found["texts"]] == ["class A\x1b[31m:"]


def test_prompts_can_be_left_out(
    measured: Measured, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is answered then, and no other figure changes."""

    def answered(*_: object, **__: object) -> None:
        raise AssertionError("prompts were answered")

    monkeypatch.setattr(as_served, "continue_prompts", answered)
    found = evaluate(made, EXAMPLE, no_prompts=True, out=tmp_path / "e.json", **SMALL)
    # Nobody who leaves them out is told that they were not answered.
    assert not [note for note in found.notes if "--prompts" in note]
    without = found.outputs[0]
    assert without["texts"] == []
    assert {**without, "texts": []} == {**measured.found.outputs[0], "texts": []}
    assert "--no-prompts answers none" in refused_options(outputs=["one"], prompts="mine.txt", no_prompts=True)


def refused(kind: type[OpenQuantError], *outputs: Path, source: Path = EXAMPLE, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        evaluate(list(outputs), source, **{**SMALL, **options})
    return caught.value.message


def test_what_cannot_be_evaluated_is_refused(output: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("import os")
    for text in ("empty.txt", "short.txt"):
        assert text in refused(SourceError, output, text=[tmp_path / text])
    out = tmp_path / "short.txt" / "eval.json"
    assert f"--out {out}: {tmp_path / 'short.txt'} is no directory" in refused(UsageError, output, out=out)
    assert "no output" in refused_options(outputs=[])
    assert "not a device" in refused_options(outputs=["one"], device="tpu")
    assert "--kv-cache: int8 is none of fp8, auto" in refused_options(outputs=["one"], kv_cache="int8")
    assert "no seed" in refused_options(outputs=["one"], seed=-1)
    assert "no seed" in refused_options(outputs=["one"], seed=2**32)


def refused_options(**options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Evaluate(**{"source": "source", **options})
    return caught.value.message


def test_tokenizers_are_held_against_each_other(output: Path) -> None:
    change_json(output / "tokenizer.json", lambda found: found["model"]["merges"].reverse())
    found = evaluate([output], EXAMPLE, **SMALL, no_prompts=True).outputs[0]
    assert (found["verdict"], found["suspects"]) == ("broken", ["tokenizer"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).unlink()
    assert "has no tokenizer" in refused(SourceError, output)


def test_what_has_no_place_is_refused_before_it_is_computed(output: Path, tmp_path: Path) -> None:
    (output / "eval.json").symlink_to(output / "config.json")
    assert "eval.json is a link" in refused(UsageError, output)
    assert "--out /dev/null is a link, a pipe or a device" in refused(UsageError, output, out="/dev/null")


def test_prompts_that_find_no_memory_are_noted(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts").write_text("import\n")
    monkeypatch.setattr(as_served, "available_memory", lambda: 1000)
    found = evaluate([output], EXAMPLE, prompts=tmp_path / "prompts", **SMALL)
    assert found.outputs[0]["texts"] == []
    assert not re.search(r"(?m)^  (prompt|text|source|output)  ", evaluation_text(found.to_json(), found.notes))
    assert [note for note in found.notes if note.startswith("--prompts were not answered")]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where hidden states are written, a place for each write."""
    places: list[Path] = []
    write = OffloadFile.write

    def writing(self: OffloadFile, data: memoryview) -> int:
        places.append(self.directory)
        return write(self, data)

    monkeypatch.setattr(OffloadFile, "write", writing)
    return places


def test_what_memory_has_no_room_for_waits_in_a_file(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = spied(monkeypatch)
    (tmp_path / "there").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    evaluate([output], EXAMPLE, **LONGER, no_prompts=True, out=tmp_path / "roomy.json", max_memory=1 << 40)
    assert places == []
    # As little as --max-memory leaves of a larger model.
    monkeypatch.setattr(session, "BUDGET", 1)
    evaluate([output], EXAMPLE, **LONGER, no_prompts=True, out=tmp_path / "tight.json", scratch=tmp_path / "there")
    assert set(places) == {tmp_path / "there"}
    assert (tmp_path / "tight.json").read_bytes() == (tmp_path / "roomy.json").read_bytes()
    assert list((tmp_path / "there").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "roomy.json", "tight.json"])
