"""What diagnose says of a whole model: what was measured to lose less than the scheme that a user asks for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE, ROOT
from openquant import diagnose, verify
from openquant.cli.commands import main
from openquant.diagnosis.result import MEASURED, MODEL
from openquant.formats.hardware import SCHEME_NAMES
from support import small_checkpoints
from support.quantized_checkpoints import BLOCKS, by_blocks, store


def test_the_figures_are_those_of_the_results() -> None:
    text = (ROOT / "docs" / "results.md").read_text().partition("## Two and three bits")[0]
    rows = re.findall(r"^\| `(--scheme [^`]+)` \| [^|]+ \| ([\d.]+) ", text, re.MULTILINE)
    # Static scales are for engines that need them, and gain nothing.
    measured = {options: float(kl) for options, kl in rows if "static" not in options}
    assert {row.options: row.kl for row in MEASURED} == measured
    assert f"{MODEL}," in text
    assert {row.scheme.name for row in MEASURED} == set(SCHEME_NAMES) - {"block", "int2", "int3", "int7"}


def test_what_lost_less_at_about_the_same_size(example: Path, subtests: pytest.Subtests) -> None:
    for scheme, expected in [
        ("int8", ["--scheme int8-weights", "--scheme int8 --smooth 0.5", "--scheme channel"]),
        ("nvfp4", ["--scheme nvfp4 --gptq", "--scheme int5", "--scheme int4 --awq --gptq", "--scheme int4 --gptq"]),
        (
            "int4",
            [
                *("--scheme nvfp4 --gptq", "--scheme int4 --awq --gptq", "--scheme int4 --gptq", "--scheme int4 --awq"),
                *("--scheme nvfp4", "--scheme int4 --group-size 32", "--scheme int4 --asymmetric"),
            ],
        ),
    ]:
        with subtests.test(scheme=scheme, expected=expected):
            found = diagnose(example, scheme)  # type: ignore[arg-type]
            assert [choice.options for choice in found.choices] == expected
            assert found.kl is not None
            for choice in found.choices:
                assert choice.gain == pytest.approx(1 - choice.kl / found.kl)
                assert choice.gain >= 0.1
                assert 0.9 * found.bytes < choice.bytes < 1.11 * found.bytes
                assert choice.readings == sum(word in choice.options for word in ("--awq", "--gptq", "--smooth"))


def test_options_can_be_typed_and_sizes_are_as_promised(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source")
    for scheme in ("int8", "int4"):
        for choice in diagnose(source, scheme).choices:  # type: ignore[arg-type]
            output = tmp_path / choice.options.replace(" ", "")
            if not choice.readings:
                assert main(["compress", "-m", str(source), "-o", str(output), "-q", *shlex.split(choice.options)]) == 0
                assert verify(output, source).nbytes == choice.bytes


def test_options_that_read_texts_can_be_typed(tmp_path: Path) -> None:
    command = ["compress", "-m", str(EXAMPLE), "-o", str(tmp_path / "out"), "-q"]
    for options in sorted({row.options for row in MEASURED if row.readings}):
        assert main([*command, *shlex.split(options), "--dry-run"]) == 0, options


def test_a_quantized_source_gains_nothing_by_texts(tmp_path: Path) -> None:
    source = store(tmp_path / "blocks", by_blocks(), BLOCKS)
    assert {choice.readings for choice in diagnose(source, "tensor").choices} == {0}


def test_schemes_that_engines_cannot_load_are_left_out(tmp_path: Path) -> None:
    weights = {"model.layers.0.mlp.down_proj.weight": torch.randn(64, 68).bfloat16()}
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    found = diagnose(source, "tensor")
    assert {choice.options.split()[1] for choice in found.choices} == {"int8-weights", "int8", "channel"}


def test_a_scheme_that_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(EXAMPLE, "block")
    assert (found.kl, found.choices) == (None, ())
    assert main(["diagnose", str(EXAMPLE), "--scheme", "block"]) == 0
    assert f"--scheme block was not measured on {MODEL}" in capsys.readouterr().out
    assert main(["diagnose", str(EXAMPLE), "--scheme", "int8-weights"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"nothing of about this size lost a tenth less on {MODEL}"


def test_conspicuous_layers_and_a_scheme_in_which_they_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    weights["model.layers.1.mlp.down_proj.weight"][7, 3] = 9000.0
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    found = diagnose(source)
    assert [layer.module for layer in found.conspicuous] == ["model.layers.1.mlp.down_proj"]
    assert found.to_json()["conspicuous"] == ["model.layers.1.mlp.down_proj"]
    assert diagnose(source, "channel").conspicuous == []
    assert main(["diagnose", str(source)]) == 0
    text = capsys.readouterr().out
    assert (
        "1 of 14 layers lose more than twice what normally distributed weights do, or cannot be stored: "
        "model.layers.1.mlp.down_proj; none does with --scheme channel or mxfp8\n"
    ) in text
    errors = found.worst[0].row_errors
    assert errors["channel"] < 0.03 < 2 * found.normal["tensor"] < errors["tensor"]


def test_a_weight_too_large_for_the_scheme_is_conspicuous(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    weights["model.layers.0.mlp.down_proj.weight"][7, 3] = 70000.0
    found = diagnose(small_checkpoints.write(tmp_path / "source", weights=weights))
    [layer] = found.conspicuous
    assert (layer.errors["tensor"], layer.row_errors["tensor"]) == (None, None)
    assert layer.row_errors["channel"] < 0.03
