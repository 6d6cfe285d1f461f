"""`openquant calibrate`, and static activations with the scales that it gives."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import EXAMPLE
from openquant import Reporter, calibrate, compress, evaluate, verify
from openquant.cli.commands import main
from openquant.errors import OpenQuantError, OutputError, SourceError, UsageError
from openquant.files.checkpoint import Fingerprint, open_checkpoint
from openquant.plan.plan import Plan
from openquant.weights.statistics import Calibration, InputStatistics, read_calibration
from support import small_checkpoints
from support.reporters import Told

SMALL: dict[str, Any] = {"samples": 2, "length": 64}
TEXTS = ("--samples", 2, "--length", 64)


class Recording(Told):
    """Keeps when a plan was made, beside notes, and its own notes."""

    def on_plan(self, plan: Plan, *_: Any) -> None:
        self.notes.append("planned")
        self.of_plan = plan.notes


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate(EXAMPLE, tmp_path_factory.mktemp("calibration") / "of.safetensors", **SMALL)


def test_the_command_writes_a_file(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["calibrate", str(EXAMPLE), *map(str, TEXTS)]
    assert main(words) == 0
    said, name = capsys.readouterr(), "tiny-qwen3.calibration.safetensors"
    assert said.out == f"wrote {name}\n"
    assert said.err.startswith(
        "2 documents of 64 tokens: prose (1), code (1); no text was given: the model is calibrated on openquant's own "
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == calibration.read_bytes()

    assert main([*words, "-o", "made/x", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"calibration": "made/x"}
    found = read_calibration(tmp_path / "made" / "x")
    assert found.model == Fingerprint(open_checkpoint(EXAMPLE)).hexdigest()
    assert (found.texts["documents"], found.texts["length"]) == (2, 64)
    assert sum(len(each.tensors) for each in found.inputs) == 28


def test_a_card_names_the_texts_of_a_calibration_file(calibration: Path, tmp_path: Path) -> None:
    compress(EXAMPLE, tmp_path / "out", "int8", smooth=0.5, calibration=calibration)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--scheme int8 --smooth 0.5 --calibrate --samples 2 --length 64\n" in card


def scales(root: Path) -> dict[str, float]:
    """Of activations, by module."""
    held = {name: tensor for name, tensor in small_checkpoints.read(root).items() if name.endswith(".input_scale")}
    assert {(tensor.dtype, tensor.numel()) for tensor in held.values()} == {(torch.float32, 1)}
    return {name.removesuffix(".input_scale"): float(tensor) for name, tensor in held.items()}


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors"])
def test_scales_are_those_of_the_calibration(calibration: Path, tmp_path: Path, format: str) -> None:
    out, seen = tmp_path / "out", read_calibration(calibration)
    static = {"activation_scheme": "static", "calibration": calibration, "format": format}
    assert compress(EXAMPLE, out, **static).quantized_tensors == 28
    found = scales(out)
    assert len(found) == 28
    for module, scale in found.items():
        inputs = seen.of(f"{module}.weight")
        assert inputs is not None
        assert scale == np.float32(2 * inputs.largest / 448)
    assert len({found[f"model.layers.0.self_attn.{letter}_proj"] for letter in "qkv"}) == 1
    compress(EXAMPLE, tmp_path / "dynamic", format=format)
    weights, dynamic = small_checkpoints.read(out), small_checkpoints.read(tmp_path / "dynamic")
    assert weights.keys() - dynamic.keys() == {f"{module}.input_scale" for module in found}
    assert all(torch.equal(weights[name].float(), dynamic[name].float()) for name in dynamic)
    report = verify(out, EXAMPLE, full=True)
    assert (report.problems, report.notes, report.recomputed) == ((), (), True)
    # As with any output a second run has nothing to do, and other scales are another output.
    assert compress(EXAMPLE, out, **static).resumed
    other = tmp_path / "other.safetensors"
    doubled = tuple(replace(each, absmax=2 * each.absmax) for each in seen.inputs)
    other.write_bytes(replace(seen, inputs=doubled).to_bytes())
    with pytest.raises(OutputError, match="holds the output of another run: other options"):
        compress(EXAMPLE, out, **{**static, "calibration": other})


@pytest.mark.usefixtures("at_once")
def test_a_stopped_run_goes_on(calibration: Path, tmp_path: Path) -> None:
    kept = tmp_path / "tiny-qwen3.calibration.safetensors"
    part = kept.with_name(f"{kept.name}.part")

    def stop(*_: int) -> None:
        if part.exists():
            raise KeyboardInterrupt

    static: dict[str, Any] = {"activation_scheme": "static"}
    with pytest.raises(KeyboardInterrupt):
        compress(EXAMPLE, tmp_path / "out", **static, **SMALL, reporter=Told(stop))
    # Nothing has its final name, nor has the output begun.
    assert [path.name for path in tmp_path.iterdir()] == [part.name]
    with pytest.raises(SourceError) as caught:
        compress(EXAMPLE, tmp_path / "out", **static, samples=3, length=64)
    assert caught.value.message == f"{part} is from a run with other texts"

    reporter = Recording()
    compress(EXAMPLE, tmp_path / "out", **static, **SMALL, reporter=reporter)
    assert reporter.notes[1].endswith(f"; an earlier run is continued; kept in {kept}")
    assert kept.read_bytes() == calibration.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", kept.name]


def test_static_activations_are_calibrated_first(
    calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compress", "-m", str(EXAMPLE), "-o", "made/out", "--activation-scheme", "static", *map(str, TEXTS)]
    assert main([*words, "--dry-run"]) == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    assert main(words) == 0
    kept = "made/tiny-qwen3.calibration.safetensors"
    assert capsys.readouterr().err.splitlines()[0].endswith(f" has yours; kept in {kept}")
    assert (tmp_path / kept).read_bytes() == calibration.read_bytes()
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["out", Path(kept).name]
    # Its bytes are those of the same in two steps.
    compress(EXAMPLE, tmp_path / "steps", activation_scheme="static", calibration=calibration)
    for path in (tmp_path / "steps").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "made" / "out" / path.name).read_bytes()


def test_a_calibration_file_is_reused(calibration: Path, tmp_path: Path) -> None:
    kept = tmp_path / "tiny-qwen3.calibration.safetensors"
    kept.write_bytes(calibration.read_bytes())
    reporter = Recording()
    made = compress(EXAMPLE, tmp_path / "out", "nvfp4-w4a4", calibrate=True, no_search=True, reporter=reporter, **SMALL)
    assert (reporter.notes, reporter.steps) == (["planned", "planned"], [])
    compress(EXAMPLE, tmp_path / "steps", "nvfp4-w4a4", calibration=calibration, no_search=True)
    for path in (tmp_path / "steps").glob("*.safetensors"):
        assert path.read_bytes() == Path(made.output, path.name).read_bytes()
    with pytest.raises(UsageError) as caught:
        compress(EXAMPLE, tmp_path / "other", activation_scheme="static", samples=3, length=64)
    assert (caught.value.message, caught.value.hint) == (
        f"{kept} is a calibration of another model or with other texts",
        f"give --calibration {kept} to use it, or --overwrite to replace it",
    )


def test_a_calibration_of_other_texts_is_replaced_if_asked_for(calibration: Path, tmp_path: Path) -> None:
    kept = tmp_path / "tiny-qwen3.calibration.safetensors"
    calibrate(EXAMPLE, kept, samples=1, length=16)
    reporter = Recording()
    compress(EXAMPLE, tmp_path / "out", activation_scheme="static", overwrite=True, reporter=reporter, **SMALL)
    assert kept.read_bytes() == calibration.read_bytes()
    # The plan comes before the texts run, and once more with what they showed.
    first, about, *_, last = reporter.notes
    assert (first, last, bool(reporter.steps)) == ("planned", "planned", True)
    assert about.startswith("2 documents of 64 tokens: ")


def test_scales_of_the_source_need_no_calibration(calibration: Path, tmp_path: Path) -> None:
    compress(EXAMPLE, tmp_path / "first", activation_scheme="static", calibration=calibration)
    compress(tmp_path / "first", tmp_path / "again", activation_scheme="static")
    assert scales(tmp_path / "again") == scales(tmp_path / "first")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "first"]


def test_a_mixture_has_the_scales_that_engines_fuse(tmp_path: Path) -> None:
    """Of random weights, with inputs of another size for each. Some experts saw no token, and some layers no input."""
    root = small_checkpoints.write(tmp_path / "mixture", "Qwen3MoeForCausalLM")
    experts, attention = "model.layers.1.mlp.experts", "model.layers.1.self_attn"
    inputs = {}
    for number, (name, tensor) in enumerate(small_checkpoints.read(root).items(), 1):
        if name.endswith("_proj.weight"):
            width = tensor.shape[1]
            held = InputStatistics((name,), np.full(width, number, np.float32), np.full(width, 0.5, np.float32), 9)
            first = ".experts." in name and "down" not in name
            held = replace(held, routed=(5, 0, 4, 0)) if first else held
            inputs[name] = replace(held, tokens=0) if ".experts.2." in name else held
    for last in ("k_proj", "o_proj"):
        del inputs[f"{attention}.{last}.weight"]
    model = Fingerprint(open_checkpoint(root)).hexdigest()
    seen = Calibration(tuple(inputs.values()), model, {"documents": 1, "length": 9})
    (tmp_path / "x").write_bytes(seen.to_bytes())
    out, reporter = tmp_path / "out", Recording()
    plan = compress(root, out, activation_scheme="static", calibration=tmp_path / "x", reporter=reporter)
    assert (
        "no token was routed to 2 experts, which use the scale of the others of their layer; more texts (--samples) "
        "would reach them"
    ) in reporter.of_plan

    def largest(*names: str) -> np.float32:
        every = [seen.of(f"{name}.weight") for name in names]
        return np.float32(2 * max(each.largest for each in every if each) / 448)

    found = scales(out)
    first = [f"{experts}.{expert}.{last}" for expert in range(4) for last in ("gate_proj", "up_proj")]
    down = [f"{experts}.{expert}.down_proj" for expert in range(4)]
    # Keys have no statistics of their own, and their inputs are those of queries and values.
    for together in (first, down, [f"{attention}.{letter}_proj" for letter in "qkv"]):
        assert {found[name] for name in together} == {largest(*together)}
    assert largest(*first) != largest(*down)
    assert not verify(out).problems

    # What has none at all stays unquantized.
    assert len(found) == plan.quantized_tensors and f"{attention}.o_proj" not in found
    assert (
        f"{attention}.o_proj" in json.loads((out / "config.json").read_text())["quantization_config"]["ignored_layers"]
    )


def test_keys_and_values_have_the_scales_of_a_calibration(calibration: Path, tmp_path: Path) -> None:
    seen = read_calibration(calibration)
    compress(EXAMPLE, tmp_path / "out", "nvfp4-w4a4", no_search=True, kv_cache="fp8", calibration=calibration)
    held = small_checkpoints.read(tmp_path / "out")
    assert list(seen.cached) == [0, 1, 2, 3]
    for number, both in seen.cached.items():
        for last, largest in zip(("k_scale", "v_scale"), both, strict=True):
            scale = float(held[f"model.layers.{number}.self_attn.{last}"])
            assert largest / 448 <= scale < 2 * largest / 448
            assert math.frexp(scale)[0] == 0.5

    # And activations in FP4: the largest becomes half of the largest scale of a group, 448, times 6.
    inputs = {name for name in held if name.endswith(".input_global_scale")}
    assert len(inputs) == 28
    for name in inputs:
        found = seen.of(f"{name.removesuffix('.input_global_scale')}.weight")
        assert found is not None
        assert held[name].tolist() == [np.float32(1 / (2 * found.largest / 2688))]
    assert not verify(tmp_path / "out", EXAMPLE).problems


def test_options_that_exclude_each_other_are_refused(
    calibration: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    static, of = {"activation_scheme": "static"}, {"calibration": calibration}
    rows: list[tuple[dict[str, Any], type[OpenQuantError], str]] = [
        (of, UsageError, "nothing uses --calibration"),
        (static | {"calibration": "missing"}, SourceError, "missing cannot be read: No such file"),
        ({"calibrate": True}, UsageError, "nothing uses --calibrate"),
        (static | of | {"calibrate": True}, UsageError, "--calibrate and --calibration are both given"),
        (static | of | {"samples": 3}, UsageError, "texts are given, and nothing is calibrated"),
        ({"text": ["x.txt"]}, UsageError, "texts are given, and nothing is calibrated"),
        (static | of | {"scheme": "block"}, UsageError, "--scheme block has no static activations"),
        (of | {"scheme": "int4", "gptq": True}, UsageError, "nothing uses --calibration"),
    ]
    for options, kind, message in rows:
        with subtests.test(message):
            with pytest.raises(kind, match=f"^{message}"):
                compress(EXAMPLE, tmp_path / "out", **options)
            assert not (tmp_path / "out").exists()


def other_byte(source: Path) -> None:
    """Change the lowest bit of one weight, and leave size and time of modification as they were."""
    shard = next(source.glob("*.safetensors"))
    times, data = shard.stat(), bytearray(shard.read_bytes())
    place = min(at.offset for at in open_checkpoint(source).where.values() if at.shard == shard.name)
    data[place] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_fine_tune_of_one_weight_is_another_model(calibration: Path, tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    options: dict[str, Any] = {"activation_scheme": "static", "calibration": calibration, "dry_run": True}
    compress(source, tmp_path / "out", **options)
    other_byte(source)
    with pytest.raises(UsageError, match="is a calibration of another model than"):
        compress(source, tmp_path / "out", **options)


def test_a_shard_that_changes_meanwhile_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for verb in ("calibrate", "eval", "gptq"):
        with subtests.test(verb):
            source, output = Path(shutil.copytree(EXAMPLE, tmp_path / verb)), tmp_path / f"{verb}-out"
            if verb == "eval":
                compress(source, output)

            def change(*_: int, left: list[Path] = [source]) -> None:  # noqa: B006
                if left:
                    other_byte(left.pop())

            reporter = Reporter()
            reporter.on_progress = change  # type: ignore[method-assign]
            with pytest.raises(SourceError, match=rf"^{source}/\S+\.safetensors changed while it was being read"):
                if verb == "calibrate":
                    calibrate(source, tmp_path / "x", reporter=reporter, **SMALL)
                elif verb == "eval":
                    evaluate([output], source, reporter=reporter, no_prompts=True, **SMALL)
                else:
                    compress(source, output, "int4", gptq=True, reporter=reporter, **SMALL)
            assert not (tmp_path / "x").exists()
            assert not (output / "eval.json").exists()
