"""`--awq`: which factors it takes, what it searches scales by, and that an output with it loses less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import EXAMPLE, change_json
from openquant import calibrate, compress, evaluate, verify
from openquant.calibration.smoothing import (
    EXPONENTS,
    SampledRows,
    SmoothingMapping,
    nearest_powers_of_two,
    sample_rows,
    search_scale,
)
from openquant.errors import SourceError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.reference import decode, encode, group_absmax
from openquant.formats.schemes import INT4_SHIFTED, INT4_W4A16, SCHEMES, Scheme
from openquant.plan.plan import make_plan
from openquant.weights.reading import Reader
from openquant.weights.statistics import read_calibration
from support import small_checkpoints
from support.outlier_channels import twin
from support.random_calibrations import Planned, skewed
from support.zero_points import group_ranges

RANDOM = np.random.default_rng(11)
WIDTH = 256
MAPPING = SmoothingMapping("norm", ("a", "b"), WIDTH, 0, 0.0, WIDTH, 1)
SQUARE = np.exp(RANDOM.standard_normal(WIDTH)).astype(np.float32)


def sampled(seed: int, scheme: Scheme = INT4_W4A16, rows: int = 16) -> SampledRows:
    values = np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)
    return SampledRows(values, SQUARE, scheme, 1.0)


@pytest.mark.parametrize("scheme", [INT4_W4A16, INT4_SHIFTED], ids=lambda scheme: scheme.suffix)
def test_the_output_error_is_that_of_rounding(scheme: Scheme) -> None:
    each, form = sampled(1, scheme), scheme.format
    columns = np.exp2(RANDOM.integers(-3, 4, WIDTH)).astype(np.float32)
    folded = torch.from_numpy(each.rows * columns)
    if form.zero_point is None:
        scale, zero = torch.from_numpy(form.scales(group_absmax(folded, form.group).numpy())), None
    else:
        scale, zero = group_ranges(folded, form)
    off = (decode(encode(folded, scale, form, zero), scale, form, zero) - folded).double() / torch.from_numpy(columns)
    wanted = (off.square() * torch.from_numpy(SQUARE)).sum().item()
    assert each.output_error(columns) == pytest.approx(wanted, rel=1e-5)
    assert replace(each, share=3.0).output_error(columns) == pytest.approx(3 * wanted, rel=1e-5)


def test_much_larger_inputs_have_larger_scales() -> None:
    mean = np.ones(WIDTH, np.float32)
    mean[[3, 200]], mean[7] = 40, 0
    readers = [replace(sampled(seed), square=mean**2) for seed in (1, 2)]
    found = search_scale(MAPPING, readers, mean)
    assert found is not None
    others = np.delete(found, [3, 200])
    assert found[[3, 200]].min() >= 2 * others.max()
    # What no text went through stays.
    assert found[7] == 1
    # No other exponent is better.
    spread = sum(each.relative_magnitudes() for each in readers) / 32
    for exponent in EXPONENTS:
        ideal = np.where(mean > 0, mean**exponent / (spread ** (1 - exponent) + 1e-4), 0)
        by = nearest_powers_of_two(ideal.astype(np.float32))
        assert sum(each.output_error(found) for each in readers) <= sum(each.output_error(by) for each in readers)


def test_no_scale_is_chosen_unless_the_error_falls() -> None:
    alike = np.where(RANDOM.random((16, WIDTH)) < 0.5, -1, 1).astype(np.float32)
    assert search_scale(MAPPING, [SampledRows(alike, SQUARE, INT4_W4A16, 1.0)], np.ones(WIDTH, np.float32)) is None
    damaged = replace(sampled(1), rows=np.full((2, WIDTH), np.nan, np.float32))
    with np.errstate(invalid="ignore"):
        assert search_scale(MAPPING, [damaged], SQUARE) is None


def test_query_heads_share_the_scale_of_their_value_head() -> None:
    mapping = SmoothingMapping("v", ("o",), WIDTH // 2, 0, 0.0, 32, 2)
    mean = np.ones(WIDTH, np.float32)
    # The fourth input of the third and of the fourth head read one channel: the fourth of the second head of values.
    mean[[64 + 3, 96 + 3]] = 40
    found = search_scale(mapping, [replace(sampled(5), square=mean**2)], mean)
    assert found is not None
    assert found.shape == (WIDTH // 2,)
    assert int(found.argmax()) == 32 + 3


@pytest.mark.parametrize("most", [100, 5000])
def test_sampled_rows_are_evenly_spaced(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    # They are read in several pieces.
    monkeypatch.setattr("openquant.weights.reading.BUFFER", 40_000)
    plan = make_plan(open_checkpoint(EXAMPLE), INT4_W4A16)
    reader = Reader(plan.decoded.where, EXAMPLE.joinpath)
    weight = plan.layers["model.layers.1.mlp.up_proj"]
    values = small_checkpoints.read(EXAMPLE)["model.layers.1.mlp.up_proj.weight"].float().numpy()
    found = sample_rows(weight, reader, most)
    assert np.array_equal(found, values[[number * 768 // min(most, 768) for number in range(min(most, 768))]])


class Twin:
    """The twin with outliers, a calibration of it, and what INT4 makes of it."""

    def __init__(self, root: Path) -> None:
        self.source, self.root = twin(EXAMPLE, root / "source"), root
        self.calibration = calibrate(self.source, root / "of.safetensors", samples=8, length=128)
        self.plain, self.output, self.reporter = root / "plain", root / "out", Planned()
        compress(self.source, self.plain, "int4")
        compress(self.source, self.output, "int4", awq=True, calibration=self.calibration, reporter=self.reporter)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("awq"))


def test_outliers_cost_little(made: Twin, tmp_path: Path) -> None:
    shifted = tmp_path / "shifted"
    compress(made.source, shifted, "int4", asymmetric=True, awq=True, calibration=made.calibration)
    found = evaluate([made.plain, made.output, shifted], made.source, samples=4, length=128, no_prompts=True).outputs
    before, after, with_zero_points = (each["kl"]["mean"] for each in found)
    assert before > 0.04
    assert after < 0.2 * before
    # With signed scales symmetric groups lose as little.
    assert with_zero_points < 1.1 * after
    assert verify(shifted, made.source, full=True).problems == ()


def test_plan_and_card_name_the_method(made: Twin) -> None:
    plan = made.reporter.plan
    assert "AWQ: inputs are divided by powers of two in 16 of 16 smoothing mappings" in plan.notes
    assert "the search for scales of 20 layers weighs errors by the mean squares of inputs" in plan.notes
    card = (made.output / "README.md").read_text().splitlines()
    assert "| folded | AWQ: inputs divided by powers of two in 16 norms and projections |" in card
    assert "| scales | searched for by what goes into each column of 20 layers |" in card
    # Queries and keys have the scales of their weights.
    assert plan.options.transforms is not None
    for module, transform in plan.options.transforms.weights.items():
        assert (transform.importance is None) == (module.rpartition(".")[2] in ("q_proj", "k_proj"))
    seen = read_calibration(made.calibration).of("model.layers.2.mlp.down_proj.weight")
    transform = plan.options.transforms.weights["model.layers.2.mlp.down_proj"]
    assert transform.importance is not None
    assert transform.columns is not None
    assert seen is not None
    assert np.array_equal(
        transform.importance, (seen.square / transform.columns.astype(np.float64) ** 2).astype(np.float32)
    )


def test_verify_accepts_only_scales_that_the_search_tries(made: Twin, tmp_path: Path) -> None:
    report = verify(made.output, made.source, full=True)
    assert (report.problems, report.equal_share) == ((), 1)

    def moved(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight_scale"][5, 1] *= 0.98

    [scale, *_] = verify(
        small_checkpoints.changed_copy(made.output, tmp_path / "x", moved), made.source, full=True
    ).problems
    assert "up_proj.weight_scale holds" in scale
    assert "at [5, 1], the source makes it" in scale
    # Where nothing says that a calibration had a part in it they are others than the source makes.
    plain = small_checkpoints.changed_copy(made.output, tmp_path / "y", lambda _: None)
    change_json(plain / ".openquant.json", lambda journal: journal["weights"].update(weighed=False))
    assert len(verify(plain, made.source, full=True).problems) > 4


@pytest.mark.parametrize(
    ("architecture", "asymmetric"),
    [("Qwen3MoeForCausalLM", False), ("Gemma3ForCausalLM", True), ("Phi3ForCausalLM", True)],
)
def test_any_architecture_is_verified(tmp_path: Path, architecture: str, asymmetric: bool) -> None:
    source, reporter = small_checkpoints.write(tmp_path / "source", architecture), Planned()
    calibration = skewed(make_plan(open_checkpoint(source), SCHEMES["int4"]), tmp_path / "of.safetensors")
    options: dict[str, Any] = {"awq": True, "asymmetric": asymmetric, "calibration": calibration, "group_size": "32"}
    compress(source, tmp_path / "out", "int3", reporter=reporter, **options)
    report = verify(tmp_path / "out", source, full=True)
    assert (report.problems, report.equal_share) == ((), 1)
    assert reporter.plan.options.transforms is not None
    transforms = reporter.plan.options.transforms.weights
    assert any(transform.smooths for transform in transforms.values())
    assert any(transform.importance is not None for transform in transforms.values())
    if architecture == "Gemma3ForCausalLM":
        assert not any(transforms[module].smooths for module in transforms if module.endswith(("q_proj", "k_proj")))


def test_quantized_sources_are_searched_by_mean_squares_of_inputs(tmp_path: Path) -> None:
    source, reporter = tmp_path / "fp8", Planned()
    compress(EXAMPLE, source, "channel")
    calibration = calibrate(source, tmp_path / "of", samples=2, length=64)
    compress(source, tmp_path / "out", "int4", awq=True, calibration=calibration, reporter=reporter)
    assert "AWQ: inputs are divided by powers of two in 0 of 16 smoothing mappings" in reporter.plan.notes
    assert "the search for scales of 20 layers weighs errors by the mean squares of inputs" in reporter.plan.notes
    assert verify(tmp_path / "out", source, full=True).problems == ()


def test_layers_in_other_schemes_stay_as_they_were(made: Twin, tmp_path: Path) -> None:
    reporter = Planned()
    options: dict[str, Any] = {"scheme_for": {"**.mlp.*": "int4"}, "awq": True, "calibration": made.calibration}
    compress(made.source, tmp_path / "out", "channel", reporter=reporter, **options)
    assert "AWQ: inputs are divided by powers of two in 8 of 16 smoothing mappings" in reporter.plan.notes
    notes = "\n".join(reporter.plan.notes)
    assert "self_attn.v_proj" in notes
    assert ": a layer is stored in another scheme" in notes
    assert "the search for scales of 12 layers weighs errors" in notes
    assert verify(tmp_path / "out", made.source, full=True).problems == ()


def test_unsupported_options_are_refused(made: Twin, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        compress(EXAMPLE, tmp_path / "out", "int8", awq=True)
    assert caught.value.message == "--awq brings --scheme int8 nothing: it is for groups of integers"
    with pytest.raises(UsageError, match="^--smooth and --awq both divide inputs of layers"):
        compress(EXAMPLE, tmp_path / "out", "int8", smooth=0.5, scheme_for={"**.mlp.*": "int4"}, awq=True)
    old = replace(
        read_calibration(made.calibration),
        inputs=tuple(replace(each, square=None) for each in read_calibration(made.calibration).inputs),
    )
    (tmp_path / "old").write_bytes(old.to_bytes())
    with pytest.raises(SourceError, match="the calibration has no mean squares of 256 inputs of model.layers.0"):
        # Of several workers either could be first.
        compress(made.source, tmp_path / "out", "int4", awq=True, calibration=tmp_path / "old", workers=1)


def test_any_valid_calibration_works(tmp_path: Path) -> None:
    source, reporter = small_checkpoints.write(tmp_path / "source"), Planned()
    path = skewed(make_plan(open_checkpoint(source), SCHEMES["int4"]), tmp_path / "of.safetensors")
    found = read_calibration(path)
    extreme = [np.float32(each) for each in (3e38, 1e-45, 0, 1)]
    for number, each in enumerate(found.inputs):
        for part in (each.absmax, each.mean, each.square):
            assert part is not None
            part[:] = np.resize(np.roll(extreme, number)[: 1 + number % 4], part.shape)
    path.write_bytes(found.to_bytes())
    compress(source, tmp_path / "out", "int4", awq=True, asymmetric=True, calibration=path, reporter=reporter)
    report = verify(tmp_path / "out", source, full=True)
    assert (report.problems, report.equal_share) == ((), 1)
    assert reporter.plan.options.transforms is not None
    assert all(
        np.isfinite(each.importance).all()
        for each in reporter.plan.options.transforms.weights.values()
        if each.importance is not None
    )
