"""An evaluation that was stopped continues after the last finished layer, and gives the figures of one that was not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import EXAMPLE
from openquant import compress, evaluate
from openquant.distributed import Ranks
from openquant.errors import SourceError
from openquant.evaluation import as_served, results
from openquant.evaluation import run as evaluation_run
from openquant.files.checkpoint import open_checkpoint
from openquant.hub.source import Source
from openquant.models import MODELS
from openquant.options import Evaluate
from openquant.streaming import offload, session
from openquant.streaming.model import StreamedModel
from openquant.streaming.pass_checkpoint import PassCheckpoint
from support.reporters import Told
from support.small_checkpoints import change_weights
from support.task_files import write_lines

SMALL: dict[str, Any] = {"samples": 2, "length": 48}
pytestmark = pytest.mark.usefixtures("short_answers", "at_once")


class Stopped(Exception):
    """Ends a run, as a kill would."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output whose activations engines round, and one with rounded weights alone."""
    folder = tmp_path_factory.mktemp("made")
    compress(EXAMPLE, folder / "fp8", "tensor")
    # Values of the first layer that an FP8 cache does not hold.
    scale = "model.layers.0.self_attn.v_proj.weight_scale"
    change_weights(folder / "fp8", lambda held: held[scale].mul_(3000))
    compress(EXAMPLE, folder / "int4", "int4")
    return folder


@pytest.fixture
def outputs(made: Path, tmp_path: Path) -> list[Path]:
    return [shutil.copytree(made / name, tmp_path / name) for name in ("fp8", "int4")]


def stop_after(monkeypatch: pytest.MonkeyPatch, saves: int, run: Callable[[], object]) -> None:
    """Run until passes were saved so many times."""
    write, left = PassCheckpoint.write, [saves]

    def stopping(*arguments: Any) -> None:
        write(*arguments)
        left[0] -= 1
        if not left[0]:
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(PassCheckpoint, "write", stopping)
        run()


def test_a_run_continues_after_any_layer(outputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Answers would load all layers once more.
    monkeypatch.setattr(as_served, "BUILT_IN", 0)
    task, file = write_lines(tmp_path / "mine.jsonl", 3), tmp_path / "results.json"
    run = partial(evaluate, outputs, EXAMPLE, out=file, tasks=task, kv_cache="fp8", **SMALL)
    run()
    expected = file.read_bytes()
    assert b"static scales clip" in expected
    monkeypatch.setattr(session, "BUDGET", 0)
    monkeypatch.setattr(offload, "LEAST", 1)
    loaded: list[str] = []
    load = StreamedModel.load

    def recorded(model: StreamedModel, unit: str) -> None:
        loaded.append(unit)
        load(model, unit)

    for saves in (1, 4):
        file.unlink(missing_ok=True)
        stop_after(monkeypatch, saves, run)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "fp8",
            "fp8.results.json.part",
            "int4",
            "mine.jsonl",
        ]
        seen = Told()
        with monkeypatch.context() as patch:
            patch.setattr(StreamedModel, "load", recorded)
            run(reporter=seen)
        assert file.read_bytes() == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "int4", "mine.jsonl", "results.json"]
        assert seen.notes[0].endswith("; an earlier run is continued")
        steps = [step for step, _ in seen.steps]
        assert steps == sorted(steps) and steps[-1] == seen.steps[-1][1]
    # Of three models, in the run that was stopped after one of four layers; the other had computed all.
    assert [unit for unit in loaded if "layers" in unit] == [
        f"model.layers.{number}" for number in (1, 2, 3) for _ in range(3)
    ]


def stopped(output: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """The file that is left of a run that was stopped after its first layer."""
    stop_after(monkeypatch, 1, lambda: evaluate(output, EXAMPLE, **{**SMALL, **more}))
    return output.with_name(f"{output.name}.eval.json.part")


def refusal(output: Path, source: Path = EXAMPLE, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(SourceError) as caught:
        evaluate(output, source, **{**SMALL, **more})
    assert not (output / "eval.json").exists()
    return caught.value.message, caught.value.hint


def test_a_saved_pass_of_another_run_is_never_used(
    outputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, other = outputs
    part = stopped(output, monkeypatch)
    saved = part.read_bytes()

    def said(what: str) -> tuple[str, str]:
        return f"{part} is from a run with other {what}", f"remove it to begin again, or use the same {what}"

    assert refusal(output, samples=3) == said("texts")
    assert refusal(output, seed=1) == said("options")
    assert refusal(output, kv_cache="fp8") == said("options")
    assert refusal(output, tasks=write_lines(tmp_path / "mine.jsonl", 2)) == said("tasks")
    with monkeypatch.context() as patch:
        patch.setattr(results, "__version__", "0.0.0")
        assert refusal(output) == said("versions of libraries")
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    assert refusal(output, source) == said("source")
    with pytest.raises(SourceError) as caught:
        evaluate([output, other], EXAMPLE, **SMALL)
    assert (caught.value.message, caught.value.hint) == said("outputs")
    # A file that says how activations are rounded, or what was done to the weights.
    (output / "README.md").write_text("another card")
    assert refusal(output) == said("outputs")
    (output / "README.md").unlink()
    assert refusal(output) == said("outputs")
    assert part.read_bytes() == saved


def saved_at(directory: Path, out: Path | None = None) -> Path | None:
    options = Evaluate(["org/name"], "source", out=out, scratch=directory)
    output = Source(directory, "name", "org/name", "0" * 40)
    subject = results.ModelUnderTest("name", open_checkpoint(EXAMPLE))
    read: Any = ([], SimpleNamespace(), SimpleNamespace(sha256="", length=48), None)
    inputs = evaluation_run._Inputs([output] * 2, [subject] * 2, *read)
    found = evaluation_run._pass_checkpoint(options, inputs, Ranks())
    return None if found is None else found.path


def test_the_place_of_saved_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside the first output that is a directory; never in the Hub's cache.
    far = Source(tmp_path / "hf" / "snapshots" / "0", "name", "org/name", "0" * 40)
    near = Source(tmp_path / "models" / "out", "out", None, None)
    places = [
        evaluation_run._scratch_directory(Evaluate(["out"], "org/name"), [far, *of]) for of in ([far, near], [far])
    ]
    assert places == [tmp_path / "models", Path()]
    assert saved_at(tmp_path) == tmp_path / "name.eval.json.part"
    assert saved_at(tmp_path, Path("there", "results.json")) == tmp_path / "name.results.json.part"
    # Classes that may keep more than arguments between layers.
    for entry in (None, MODELS["HrmTextForCausalLM"]):
        with monkeypatch.context() as patch:
            patch.setattr(evaluation_run, "known_architecture", lambda _, entry=entry: entry)
            assert saved_at(tmp_path) is None
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *more, **words: path != tmp_path and access(path, *more, **words))
    assert saved_at(tmp_path) is None
