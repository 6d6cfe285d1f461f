"""`--smooth`: what it changes, that a smoothed model computes the same, and that its output loses little."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import EXAMPLE
from openquant import calibrate, compress, dequantize, evaluate, verify
from openquant.calibration.smoothing import divide_norm, nearest_powers_of_two, smoothquant_scale, usable_mappings
from openquant.errors import OutputError, PlanError, UsageError
from openquant.files.cards import with_evaluation
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import SCHEMES
from openquant.plan.plan import make_plan
from openquant.weights.reading import Reader
from openquant.weights.statistics import Calibration, InputStatistics
from support import small_checkpoints
from support.outlier_channels import twin
from support.random_calibrations import Planned, skewed

INT8 = SCHEMES["int8"]
SMALL: dict[str, Any] = {"samples": 8, "length": 128}
Weights = dict[str, torch.Tensor]


class Twin:
    """The twin with outliers, a calibration of it, and its smoothed INT8 output."""

    def __init__(self, root: Path) -> None:
        self.source = twin(EXAMPLE, root / "source")
        self.calibration = calibrate(self.source, root / "of.safetensors", **SMALL)
        self.output, self.reporter = root / "out", Planned()
        options: dict[str, Any] = {"calibration": self.calibration, "reporter": self.reporter}
        self.result = compress(self.source, self.output, "int8", smooth=0.5, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("smooth"))


def test_outliers_cost_nothing_with_smoothquant(made: Twin, tmp_path: Path) -> None:
    compress(made.source, tmp_path / "plain", "int8")
    outputs = [tmp_path / "plain", made.output]
    found = evaluate(outputs, made.source, samples=4, length=128, no_prompts=True).outputs
    before, after = (each["kl"]["mean"] for each in found)
    assert before > 0.01
    assert after < 0.0008
    # Smoothed norms are no suspects.
    assert not found[1]["suspects"]
    # With other factors it is another output.
    with pytest.raises(OutputError, match="another"):
        compress(made.source, made.output, "int8", smooth=0.75, calibration=made.calibration)


def test_plan_and_card_name_the_method(made: Twin) -> None:
    assert (
        "SmoothQuant 0.5: inputs are divided by powers of two in 16 of 16 smoothing mappings"
        in made.reporter.plan.notes
    )
    assert made.result.folded == "SmoothQuant 0.5: inputs divided by powers of two in 16 norms and projections"
    line = "| folded | SmoothQuant 0.5: inputs divided by powers of two in 16 norms and projections |"
    card = (made.output / "README.md").read_text().splitlines()
    texts = "8 x 128 tokens (openquant texts for calibration)"
    assert line in card and f"| calibrated on | {texts} |" in card
    # The config is the same without smoothing.
    config = json.loads((made.output / "config.json").read_text())
    assert config["quantization_config"] == make_plan(open_checkpoint(made.source), INT8).quantization_config


def test_verify_smooths_the_source_as_the_run_did(made: Twin, tmp_path: Path) -> None:
    for full in (False, True):
        report = verify(made.output, made.source, full=full)
        assert report.problems == ()
        assert report.notes == (
            "inputs of layers are smoothed: 8 norms and biases and 28 matrices were compared with the smoothed source",
        )
        assert report.equal_share == (1 if full else None)
    # Without the journal it is that of another tool, whose norms are not those of the source.
    plain = small_checkpoints.changed_copy(made.output, tmp_path / "plain", lambda _: None)
    (plain / ".openquant.json").unlink()
    assert len(verify(plain, made.source).problems) == 8
    # So no card tells its readers to verify it.
    commands = "## Measured against the source\n\n```\nopenquant verify x\nopenquant eval x\n```\n"
    card = with_evaluation((made.output / "README.md").read_text(), commands)
    assert "openquant eval x\n" in card and "openquant verify x" not in card


LAYER = "model.layers.1"
NORM, UP, DOWN = f"{LAYER}.input_layernorm.weight", f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.down_proj.weight"


def times(name: str, factor: float, at: int) -> Callable[[Weights], Any]:
    return lambda weights: weights[name][at].mul_(factor)


def without(name: str) -> Callable[[Weights], Any]:
    return lambda weights: weights.pop(name)


def with_shape(name: str, *shape: int) -> Callable[[Weights], Any]:
    return lambda weights: weights.update({name: torch.ones(shape, dtype=weights[name].dtype)})


# What is done to an output, whether all of it must be read, and what is said of it.
DAMAGE: list[tuple[Callable[[Weights], Any], bool, str]] = [
    (times(NORM, 1.25, 7), False, f"{NORM} differs from the source's after smoothing, first in byte 14 of 512"),
    (times(NORM, 2, 7), False, f"{NORM} differs from the source's after smoothing"),
    (times(f"{LAYER}.self_attn.q_norm.weight", 2, 3), False, "self_attn.q_norm.weight differs from the source's, first in byte"),
    (times(f"{UP}_scale", 2, 5), True, f"{UP}_scale holds .* the source makes it"),
    (times(f"{UP}_scale", np.nan, 5), False, "holds nan"),
    (without(f"{UP}_scale"), True, f"{UP}_scale"),
    (without(DOWN), True, DOWN),
    (without(NORM), True, f"{NORM} is missing"),
    (with_shape(NORM, 128), True, f"{NORM} is BF16 \\[128\\], the source has BF16 \\[256\\]"),
    (with_shape(f"{LAYER}.self_attn.v_proj.weight", 64, 256), True, "v_proj"),
]  # fmt: skip


def test_damage_is_reported(made: Twin, tmp_path: Path) -> None:
    for number, (change, full, problem) in enumerate(DAMAGE):
        damaged = small_checkpoints.changed_copy(made.output, tmp_path / str(number), change)
        problems = verify(damaged, made.source, full=full).problems
        assert any(re.search(problem, found) for found in problems), (problem, problems)


def test_dequantized_weights_stay_smoothed(made: Twin, tmp_path: Path) -> None:
    reporter = Planned()
    dequantize(made.output, tmp_path / "plain", reporter=reporter)
    assert "norms stay as the output has them, folded with the weights" in "; ".join(reporter.plan.notes)
    found, weights = small_checkpoints.read(tmp_path / "plain"), small_checkpoints.read(made.source)
    ids = torch.randint(10, 2000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [
            AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)(ids, use_cache=False).logits
            for root in (made.source, tmp_path / "plain")
        ]
    kl = torch.nn.functional.kl_div(*(each.log_softmax(-1) for each in logits[::-1]), reduction="none", log_target=True)
    assert kl.sum(-1).mean() < 0.001
    assert not torch.equal(found[NORM], weights[NORM])


def opened(root: Path) -> Reader:
    checkpoint = open_checkpoint(root)
    return Reader(checkpoint.where, root.joinpath)


def test_any_architecture_is_verified(tmp_path: Path, subtests: pytest.Subtests) -> None:
    smoothed = {
        "Qwen3MoeForCausalLM": "model.layers.1.mlp.gate.weight",
        "Qwen2ForCausalLM": "model.layers.1.self_attn.v_proj.bias",
    }
    for architecture, name in smoothed.items():
        with subtests.test(architecture=architecture):
            source, out = tmp_path / architecture, tmp_path / f"{architecture}-out"
            plan = make_plan(open_checkpoint(small_checkpoints.write(source, architecture)), INT8)
            compress(
                source, out, "int8", smooth=0.5, calibration=skewed(plan, tmp_path / f"{architecture}.safetensors")
            )
            report = verify(out, source, full=True)
            assert (report.problems, report.equal_share) == ((), 1)
            assert "smoothed" in report.notes[0]
            norm = "model.layers.1.input_layernorm.weight"
            found, weights = small_checkpoints.read(out), small_checkpoints.read(source)
            assert not any(torch.equal(found[each], weights[each]) for each in (norm, name))

            small_checkpoints.change_weights(out, lambda held, name=name: held[name].view(-1)[3].mul_(3))
            [problem] = verify(out, source).problems
            assert re.search(rf"{re.escape(name)} differs from .* after smoothing", problem)


def test_tensors_that_cannot_be_divided_are_not(tmp_path: Path) -> None:
    bias, norm = "model.layers.0.self_attn.v_proj.bias", "model.layers.0.input_layernorm.weight"
    integers = {bias: torch.zeros(small_checkpoints.KV_HEADS * small_checkpoints.HEAD_DIM).int()}
    for architecture, others in (
        ("Qwen2ForCausalLM", (integers, {bias: torch.zeros(3).bfloat16()})),
        ("Qwen3ForCausalLM", ({norm: torch.zeros(small_checkpoints.HIDDEN).int()}, {norm: torch.tensor(1.0)})),
    ):
        source = small_checkpoints.write(tmp_path / architecture, architecture)
        all_places = usable_mappings(make_plan(open_checkpoint(source), INT8)).mappings
        for other in others:
            small_checkpoints.change_weights(source, lambda weights, other=other: weights.update(other))
            places = usable_mappings(make_plan(open_checkpoint(source), INT8)).mappings
            [name] = other
            missing = {each.smooth_layer for each in all_places} - {each.smooth_layer for each in places}
            assert missing == {name.rpartition(".")[0]}, other


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any]
    for options, message in (
        ({"scheme": "channel"}, "--smooth brings --scheme channel nothing"),
        ({"scheme": "int4"}, "--smooth brings --scheme int4 nothing"),
        ({"smooth": 0.0}, "--smooth 0 is not above 0 and at most 1"),
        ({"smooth": float("nan")}, "--smooth nan is not above 0 and at most 1"),
    ):
        with pytest.raises(UsageError, match=message):
            compress(EXAMPLE, tmp_path / "out", **{"scheme": "int8", "smooth": 0.5, **options})


def test_quantized_sources_are_refused(made: Twin, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is quantized already"):
        compress(made.output, tmp_path / "out", "int8", smooth=0.5, **SMALL)


def test_notes_name_unused_mappings(made: Twin, tmp_path: Path) -> None:
    reporter = Planned()
    options: dict[str, Any] = {"ignore": ["**.layers.0.mlp.down_proj"], "scheme_for": {"**.layers.1.mlp.*": "channel"}}
    out = tmp_path / "out"
    compress(
        made.source, out, "int8", smooth=0.5, calibration=made.calibration, kv_cache="fp8", reporter=reporter, **options
    )
    notes = "\n".join(reporter.plan.notes)
    assert "in 9 of 16 smoothing mappings" in notes
    assert "no smoothing at model.layers.{0..3}.self_attn.v_proj: the KV cache is in FP8" in notes
    assert "no smoothing at model.layers.0.mlp.up_proj: a layer is not quantized (--ignore **.layers.0.mlp" in notes
    assert "model.layers.1.mlp.up_proj: a layer is stored in another scheme" in notes
    report = verify(out, made.source, full=True)
    assert (report.problems, report.equal_share) == ((), 1)


def test_a_mapping_that_does_not_help_is_not_used(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    plan = make_plan(open_checkpoint(source), INT8)
    flat = tuple(
        InputStatistics(
            (weight.source.name,), *(np.ones(weight.shape[1], np.float32) for _ in "xx"), 9, np.ones(weight.shape[1])
        )
        for weight in plan.layers.values()
    )
    reader = opened(source)
    [first, *_] = usable_mappings(plan).mappings
    assert (
        smoothquant_scale(first, reader, plan, Calibration((), "", {}), 0.5)
        == "the calibration has no inputs of a layer"
    )
    assert smoothquant_scale(first, reader, plan, Calibration(flat, "", {}), 0.5) == "all scales would be 1"
    few = tuple(replace(each, absmax=each.absmax * 100, square=each.square / 1e6) for each in flat)
    few[0].absmax[:] = 1
    found = smoothquant_scale(first, reader, plan, Calibration(few, "", {}), 0.5)
    assert isinstance(found, str)


def test_scales_are_powers_of_two_with_median_one() -> None:
    ideal = np.array([3.0, 6, 12, 24, 48, 0, np.nan, np.inf, 3e-20, 1e30], np.float32)
    assert nearest_powers_of_two(ideal).tolist() == [0.25, 0.5, 1, 2, 4, 1, 1, 1, 2.0**-8, 2.0**8]
    assert nearest_powers_of_two(np.zeros(3, np.float32)).tolist() == [1, 1, 1]


def test_a_norm_is_divided_as_its_dtype_allows() -> None:
    held, scale = np.array([0.5, 0, -1, 1.5, -0.984375], np.float32), np.array([2, 4, 4, 4, 4], np.float32)
    made, by = divide_norm(held, scale, 0, "BF16")
    assert (made.tolist(), by.tolist()) == ([0.25, 0, -0.25, 0.375, -0.24609375], [2, 1, 4, 4, 4])
    # Of 1 + w: -1 lets nothing through; what bfloat16 rounds is made up for in the columns.
    made, by = divide_norm(held, scale, 1, "BF16")
    assert made.tolist() == [-0.25, -0.75, -1, -0.375, -0.99609375]
    assert by.tolist() == [2, 4, 1, 4, 4]
    made, by = divide_norm(np.array([0.0078125], np.float32), np.array([256], np.float32), 1, "BF16")
    assert by == (1 + 0.0078125) / (1 + made.astype(np.float64))
    assert by != 256
