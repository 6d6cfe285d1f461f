"""No file that a verb writes replaces a part of a model, an input or a file of another kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import EXAMPLE, change_json
from openquant import calibrate, compress
from openquant.cli.commands import main
from openquant.errors import UsageError

SMALL = ("--samples", "2", "--length", "16")
pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, an output of it, and texts."""
    root = tmp_path_factory.mktemp("made")
    shutil.copytree(EXAMPLE, root / "source")
    compress(root / "source", root / "out")
    (root / "mine.txt").write_text("def main():\n    return 0\n" * 400)
    (root / "prompts.txt").write_text("import\n")
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


VERBS = {
    "calibrate -o": ["calibrate", "source", "--text", "mine.txt", *SMALL, "-o"],
    "eval --out": ["eval", "out", "--source", "source", "--text", "mine.txt", *SMALL, "--out"],
    "eval --report": ["eval", "out", "--source", "source", "--prompts", "prompts.txt", *SMALL, "--report"],
    "eval --figure": ["eval", "out", "--source", "source", "--text", "mine.txt", *SMALL, "--figure"],
}
VICTIMS = (
    "{model}/{shard}", "{model}/../{model}/config.json", "link/config.json", "linked", "hard",
    "mine.txt", "out/.openquant.json",
)  # fmt: skip
# Of what each verb reads.
MODEL = dict.fromkeys(VERBS, "source") | {"eval --out": "out"}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_no_verb_writes_over_what_is_not_its_own(subtests, place, capsys):
    for verb, words in VERBS.items():
        model, option = MODEL[verb], verb.split()[-1]
        shard = min(path.name for path in (place / model).glob("*.safetensors"))
        links = (place / "link", place / "linked", place / "hard")
        links[0].symlink_to(place / model)
        links[1].symlink_to(place / model / "config.json")
        links[2].hardlink_to(place / model / shard)
        before = tree(place)
        for victim in VICTIMS:
            name = victim.format(model=model, shard=shard)
            with subtests.test(verb=verb, victim=victim):
                code = main([*words, name, "--json"])
                stdout, stderr = capsys.readouterr()
                assert (code, tree(place)) == (2, before)
                assert stderr.startswith(f"error: {option} {name} ")
                assert json.loads(stdout)["error"] == stderr.splitlines()[0].removeprefix("error: ")
        for link in links:
            link.unlink()


def test_no_calibration_lies_beside_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(place)
    (place / "link").symlink_to(place / "source")
    for name in ("source/x.safetensors", "link/x.safetensors"):
        assert main(["calibrate", "source", *SMALL, "-o", name]) == 2
        assert capsys.readouterr().err == (
            f"error: -o {name} lies in the model source\nhint: name another file with -o\n"
        )
    (place / "link").unlink()
    assert tree(place) == before


def test_an_evaluation_lies_beside_its_output_under_its_own_names(place: Path) -> None:
    words = ["eval", "out", "--source", "source", *SMALL]
    shown = ["--report", "out/eval.html", "--figure", "out/eval.png"]
    assert main([*words, *shown]) == 0
    first = tree(place / "out")
    assert {"eval.json", "eval.html", "eval.png"} <= first.keys()
    # Made again, they are replaced.
    assert main([*words, *shown, "--out", "out/eval.json", "--seed", "1"]) == 0
    again = tree(place / "out")
    assert {name for name in again if again[name] != first[name]} == {"eval.json", "eval.html", "eval.png"}


def test_a_calibration_of_another_model_needs_overwrite(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(place / "source", place / "other")
    change_json(other / "config.json", lambda config: config.update(rms_norm_eps=2e-6))
    words = [*SMALL, "-o", "c.safetensors"]
    assert main(["calibrate", "source", *words]) == 0
    # Of the same model it is replaced, whatever the texts.
    assert main(["calibrate", "source", "--text", "mine.txt", *words]) == 0
    before = (place / "c.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["calibrate", "other", *words]) == 2
    assert capsys.readouterr().err == (
        "error: c.safetensors is a calibration of another model\nhint: name another file with -o, or give --overwrite\n"
    )
    assert (place / "c.safetensors").read_bytes() == before
    with pytest.raises(UsageError, match="of another model"):
        calibrate(other, "c.safetensors", samples=2, length=16)
    assert main(["calibrate", "other", *words, "--overwrite"]) == 0
    assert (place / "c.safetensors").read_bytes() != before


def test_compress_replaces_calibrations_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("openquant.calibration.run._run", run)
    (place / "mine.txt").rename(place / "source.calibration.safetensors")
    before = tree(place)
    words = ["compress", "-m", "source", "-o", "new", "--kv-cache", "fp8", "--calibrate", "--overwrite", *SMALL]
    assert main(words) == 2
    assert tree(place) == before
