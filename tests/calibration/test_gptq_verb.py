"""`openquant compress --gptq`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import EXAMPLE, change_json, tree
from openquant import calibrate, compress, evaluate, verify
from openquant.cli.commands import main
from openquant.errors import OpenQuantError, OutputError, SourceError
from openquant.files.shardfile import LayerStore
from openquant.report.text import verification_text
from support import mixture_of_experts, small_checkpoints, starting
from support.reporters import Told
from support.starting import Job

SMALL: dict[str, Any] = {"samples": 2, "length": 64}
TEXTS = ("--samples", "2", "--length", "64")
GPTQ_NOTE = (
    "were rounded by GPTQ, whose codes are not recomputed; their weight errors are larger on purpose, and openquant eval "
    "measures what the model loses"
)


def shards(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("*.safetensors")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example by GPTQ with a few texts."""
    out = tmp_path_factory.mktemp("gptq") / "out"
    compress(EXAMPLE, out, "int4", gptq=True, **SMALL)
    return out


def test_gptq_halves_the_loss(tmp_path: Path) -> None:
    compress(EXAMPLE, tmp_path / "nearest", "int4")
    compress(EXAMPLE, tmp_path / "gptq", "int4", gptq=True, samples=8, length=128)
    found = evaluate([tmp_path / "nearest", tmp_path / "gptq"], EXAMPLE, samples=4, length=96, no_prompts=True)
    nearest, gptq_rounded = (output["kl"]["mean"] for output in found.outputs)
    assert gptq_rounded < 0.6 * nearest


def test_the_command_says_what_it_does(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compress", "-m", str(EXAMPLE), "-o", "out", "--scheme", "int4", "--gptq", *TEXTS]
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr()
    note = "note: GPTQ rounds 28 layers with their Hessians over 2 x 64 tokens\n"
    assert note in said.out
    assert re.search(r" meanwhile for rounded layers; the run\s+needs \S+ MB at a time\n", said.out)
    assert not list(tmp_path.iterdir())
    assert main(words) == 0
    said = capsys.readouterr()
    assert note in said.out
    assert "GPTQ with 2 documents of 64 tokens: prose (1), code (1); no text was given: " in said.err
    assert shards(tmp_path / "out") == shards(made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    texts = "2 x 64 tokens (openquant texts for calibration)"
    assert f"| rounded by | GPTQ, {texts} |\n" in (made / "README.md").read_text()


def test_a_finished_output_needs_no_pass(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = tree(shutil.copytree(made, out))
    reporter = Told()
    assert compress(EXAMPLE, out, "int4", gptq=True, reporter=reporter, **SMALL).resumed
    others: list[dict[str, Any]] = [
        {},
        {"gptq": True, "samples": 3, "length": 64},
        {"awq": True, "gptq": True, **SMALL},
    ]
    for options in others:
        with pytest.raises(OutputError) as caught:
            compress(EXAMPLE, out, "int4", reporter=reporter, **options)
        assert caught.value.message == (
            f"{out} holds the output of another run: other options, another source or another version"
        )
    assert reporter.notes == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert tree(out) == before


def test_verify_recomputes_scales_but_not_codes(made: Path, tmp_path: Path) -> None:
    report = verify(made, EXAMPLE, full=True)
    assert (report.problems, report.recomputed, report.compared_codes) == ((), True, 0)
    assert report.notes == (f"28 layers {GPTQ_NOTE}",)
    assert len(report.errors) == 28
    assert max(error.relative for error in report.errors) < 0.2
    printed = verification_text(report)
    assert "28 layers decoded: relative error" in printed
    assert "of the codes" not in printed
    # If the journal did not say GPTQ, they would have to be those of the source.
    name = "model.layers.0.mlp.up_proj.weight_scale"
    spoiled = small_checkpoints.changed_copy(made, tmp_path / "spoiled", lambda weights: weights[name].mul_(2))
    of_scale, of_codes = verify(spoiled, EXAMPLE, full=True).problems
    assert f": {name} holds " in of_scale
    assert of_codes.endswith("has a relative error of 1.02, where GPTQ explains 0.98")
    change_json(spoiled / ".openquant.json", lambda journal: journal["weights"].update(gptq=False))
    assert len(verify(spoiled, EXAMPLE, full=True).problems) > 28


class Stopped(Exception):
    """Ends a run."""


class Stopping(Told):
    """Ends a run once the first layer's file is there and passes are kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_progress(self, done: int, total: int, unit: str = "tokens") -> None:
        del done, total, unit
        if list(self.folder.glob("*.passes")):
            raise Stopped


class Watching(Told):
    """Has the times of files of layers as the conversion begins."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.stamps = folder, dict[str, int]()

    def on_start(self, total: int, done: int) -> None:
        del total, done
        self.stamps = stamps(self.folder)


class Beginning(Watching):
    """Stops the run as the conversion begins."""

    def on_start(self, total: int, done: int) -> None:
        super().on_start(total, done)
        raise Stopped


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


@pytest.fixture
def stopped(tmp_path: Path, at_once: None) -> Path:
    """What a run leaves beside its output that ended after the first layer."""
    folder = tmp_path / "out.rounded"
    with pytest.raises(Stopped):
        compress(EXAMPLE, tmp_path / "out", "int4", gptq=True, reporter=Stopping(folder), **SMALL)
    return folder


def test_a_stopped_run_goes_on(stopped: Path, made: Path, tmp_path: Path) -> None:
    left, reporter = stamps(stopped), Watching(stopped)
    assert [name.partition("-")[2] for name in left] == ["000-0.safetensors"]
    # As a kill in the middle of a write leaves it.
    (stopped / f".openquant-{'0' * 16}.partial").write_bytes(b"half")
    compress(EXAMPLE, tmp_path / "out", "int4", gptq=True, reporter=reporter, **SMALL)
    assert reporter.notes[0].endswith("; an earlier run is continued")
    assert (reporter.stamps.items() & left.items(), len(reporter.stamps)) == (left.items(), 4)
    assert shards(tmp_path / "out") == shards(made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "int4", "awq": True},
        {"scheme": "int8", "smooth": 0.5},
        {"scheme": "tensor", "activation_scheme": "static", "calibrate": True},
    ],
)
def test_one_pass_finds_what_two_do(options: dict[str, Any], tmp_path: Path, at_once: None) -> None:
    options = {"gptq": True, **SMALL, **options}
    once, twice = tmp_path / "once", tmp_path / "twice"
    file = twice / f"{EXAMPLE.name}.calibration.safetensors"
    once.mkdir(), twice.mkdir()
    calibrate(EXAMPLE, file, **SMALL)
    compress(EXAMPLE, twice / "out", **options)

    with pytest.raises(Stopped):
        compress(EXAMPLE, once / "out", reporter=Stopping(once / "out.rounded"), **options)
    left, reporter = stamps(once / "out.rounded"), Beginning(once / "out.rounded")
    assert left and not (once / file.name).exists()
    with pytest.raises(Stopped):
        compress(EXAMPLE, once / "out", reporter=reporter, **options)
    [passed] = [note for note in reporter.notes if "tokens" in note]
    assert passed.startswith("GPTQ with 2 documents of 64 tokens: prose (1), code (1); no text was given: ")
    assert passed.endswith(f"; an earlier run is continued; statistics are kept in {once / file.name}")
    assert {path.name: path.read_bytes() for path in once.glob("*.safetensors")} == {file.name: file.read_bytes()}

    # The plan that came of it finds all layers again.
    later = Watching(once / "out.rounded")
    compress(EXAMPLE, once / "out", reporter=later, **options)
    assert later.stamps == reporter.stamps and len(later.stamps) == 4
    assert tree(once / "out") == tree(twice / "out")


def test_rounded_layers_of_other_texts_are_not_reused(stopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = stamps(stopped)
    reporter = Watching(stopped)
    compress(EXAMPLE, out, "int4", gptq=True, samples=3, length=32, reporter=reporter)
    assert "an earlier run is continued" not in reporter.notes[0]
    assert not left.items() & reporter.stamps.items()
    assert not stopped.exists()


def test_damaged_and_foreign_files_are_named(stopped: Path, tmp_path: Path) -> None:
    folder, [first] = stopped, list(stopped.glob("*.safetensors"))
    sound = first.read_bytes()

    def refusal() -> OpenQuantError:
        with pytest.raises(OpenQuantError) as caught:
            compress(EXAMPLE, tmp_path / "out", "int4", gptq=True, **SMALL)
        return caught.value

    first.write_bytes(sound[:-1])
    error = refusal()
    assert isinstance(error, SourceError) and str(first) in error.message
    first.unlink()
    assert refusal().message.endswith(f".passes continues after layers whose files are gone from {folder}")
    first.symlink_to(EXAMPLE / "config.json")
    assert refusal().message == f"{first} was not made by openquant"
    first.unlink()
    first.write_bytes(sound)
    (folder / "mine.txt").write_text("something of the user's")
    assert refusal().message == f"{folder / 'mine.txt'} was not made by openquant"
    assert (folder / "mine.txt").exists()


def test_too_small_a_disk_is_found_before_the_pass(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for the output alone.
    room = sum(path.stat().st_size for path in made.iterdir()) + 100_000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room))
    reporter = Told()
    with pytest.raises(OutputError, match=r"out needs [0-9,]+ bytes, its disk has [0-9,]+ free"):
        compress(EXAMPLE, tmp_path / "out", "int4", gptq=True, reporter=reporter, **SMALL)
    assert reporter.notes == []
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture_of_experts.make(tmp_path_factory.mktemp("experts") / "source")


def test_a_run_that_is_killed_between_experts_goes_on(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"no_search": True, "gptq": True, **SMALL}
    compress(experts, tmp_path / "whole", "int4", **options)
    monkeypatch.setattr("openquant.streaming.session.BUDGET", 10 << 20)
    write = LayerStore.write

    def ended(folder: LayerStore, number: int, *more: Any) -> Any:
        if number == 1 and list(folder.path.glob("*-001-*")):
            raise Stopped
        return write(folder, number, *more)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(LayerStore, "write", ended)
        compress(experts, tmp_path / "out", "int4", **options)
    left = stamps(tmp_path / "out.rounded")
    assert [name.partition("-")[2] for name in left if "-001-" in name] == ["001-0.safetensors"]
    watching = Watching(tmp_path / "out.rounded")
    compress(experts, tmp_path / "out", "int4", reporter=watching, **options)
    assert left.items() <= watching.stamps.items()
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


@pytest.fixture
def job() -> Iterator[Job]:
    with starting.job() as found:
        yield found


def test_ranks_round_to_the_same_bytes(made: Path, job: Job, tmp_path: Path) -> None:
    done = job.finish(2, "-m", EXAMPLE, "-o", tmp_path / "out", "--scheme", "int4", "--gptq", *TEXTS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("GPTQ with 2 documents of 64 tokens") == 1
    assert shards(tmp_path / "out") == shards(made)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
