"""What diagnose advises: the options it prints, typed into compress, do what it promised."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import run_openquant
from openquant import Diagnosis, dequantize, diagnose, verify
from openquant.cli.commands import main
from openquant.models import MODELS
from openquant.patterns import compile_any, patterns_of
from openquant.registry.architecture import Refusal
from support import small_checkpoints

Weights = dict[str, torch.Tensor]


def row_error(weight: torch.Tensor, other: torch.Tensor) -> float:
    noise, signal = (other.double() - weight.double()).square().sum(1), weight.double().square().sum(1)
    return float((noise / signal).mean().sqrt())


def checked(source: Path, output: Path, found: Diagnosis) -> dict[str, float]:
    """The row errors by module of what compress makes with the options that were advised, once these are as promised."""
    assert main(["compress", "-m", str(source), "-o", str(output), "-q", *found.options]) == 0
    report = verify(output, source, full=True)
    assert report.problems == ()
    assert report.nbytes == found.bytes_after
    dequantize(output, output.with_name("plain"))
    before, after = small_checkpoints.read(source), small_checkpoints.read(output.with_name("plain"))
    errors = {
        error.module: row_error(before[f"{error.module}.weight"], after[f"{error.module}.weight"])
        for error in report.errors
    }
    for one in found.advice:
        worst = max(errors.get(module, 0.0) for module in one.layers)
        # What is decoded was rounded once more, to bfloat16.
        assert worst == pytest.approx(one.error_after, rel=0.01)
        assert one.error_before is None or one.error_after <= one.error_before / 2
        assert shlex.split(one.option)[1] in found.options
        assert one.scheme is not None or not errors.keys() & set(one.layers)
    return errors


def planted(root: Path, change: dict[str, float], architecture: str = "Qwen3ForCausalLM", row: int = 7) -> Path:
    """A model with one large weight in each of some layers."""
    weights = small_checkpoints.tensors(architecture)
    for module, value in change.items():
        weights[f"{module}.weight"][row, 3] = value
    return small_checkpoints.write(root, architecture, weights=weights)


def test_a_finer_scheme_for_layers_with_an_outlier(tmp_path: Path) -> None:
    source = planted(
        tmp_path / "source", {"model.layers.1.mlp.down_proj": 4000.0, "model.layers.0.self_attn.k_proj": 9000.0}
    )
    found = diagnose(source, full=True)
    # The worse first.
    assert [(one.scheme, one.option) for one in found.advice] == [
        ("channel", "--scheme-for 'model.layers.0.self_attn.{k_proj,q_proj,v_proj}=channel'"),
        ("channel", "--scheme-for model.layers.1.mlp.down_proj=channel"),
    ]
    assert [(one["scheme"], one["layers"], one["option"]) for one in found.to_json()["advice"]] == [
        (one.scheme, one.layers, one.option) for one in found.advice
    ]
    assert found.options[:2] == ("--format", "compressed-tensors")
    assert found.bytes_after == found.bytes_before + sum(one.bytes for one in found.advice)
    # A scale for each of 256 rows in place of one; q has 256 rows, k and v 128.
    assert sorted(one.bytes for one in found.advice) == [4 * 255, 4 * (255 + 127 + 127)]
    checked(source, tmp_path / "out", found)


def test_all_layers_of_a_kind_have_one_pattern(tmp_path: Path) -> None:
    source = planted(tmp_path / "source", {f"model.layers.{layer}.mlp.up_proj": 3000.0 for layer in (0, 1)})
    found = diagnose(source, full=True)
    assert [one.option for one in found.advice] == ["--scheme-for 'model.layers.*.mlp.{gate_proj,up_proj}=channel'"]
    checked(source, tmp_path / "out", found)


def test_channel_scales_where_blocks_are_not_fine_enough(tmp_path: Path) -> None:
    source = planted(tmp_path / "source", {"model.layers.1.self_attn.o_proj": 9000.0})
    found = diagnose(source, "block", full=True)
    assert [one.option for one in found.advice] == ["--scheme-for model.layers.1.self_attn.o_proj=channel"]
    assert found.options[:4] == ("--scheme", "block", "--format", "compressed-tensors")
    checked(source, tmp_path / "out", found)


def test_layers_that_no_scheme_stores_well_stay_unquantized(tmp_path: Path) -> None:
    weights = small_checkpoints.tensors("Qwen3ForCausalLM")
    wide = torch.randn((256, 4096), generator=torch.Generator().manual_seed(0)) * 0.05
    wide[torch.arange(256), torch.arange(256)] = 3.2  # of each row so much that INT8's steps are coarse
    weights["model.layers.1.mlp.down_proj.weight"] = wide.bfloat16()
    source = small_checkpoints.write(tmp_path / "source", weights=weights)
    found = diagnose(source, "int8", full=True)
    (one,) = found.advice
    assert (one.scheme, one.option, one.error_after) == (None, "--ignore model.layers.1.mlp.down_proj", 0.0)
    assert one.error_before == found.worst[0].row_errors["int8"] > 0.05
    assert one.bytes == 256 * 4096 - 4 * 256
    assert found.options == ("--scheme", "int8", "--ignore", "model.layers.1.mlp.down_proj")
    checked(source, tmp_path / "out", found)
    assert diagnose(source).advice == ()


def test_experts_of_a_layer_have_one_scheme(tmp_path: Path) -> None:
    place = "model.layers.1.mlp.experts"
    source = planted(tmp_path / "source", {f"{place}.2.down_proj": 5000.0}, "Qwen3MoeForCausalLM")
    found = diagnose(source, full=True)
    (one,) = found.advice
    assert (len(one.layers), one.scheme) == (12, "channel")
    assert one.option == "--scheme-for 'model.layers.*.mlp.experts.**=channel'"
    checked(source, tmp_path / "out", found)


def test_experts_leave_no_choice_but_another_scheme_for_all(tmp_path: Path) -> None:
    """Engines load none with one scale per tensor beside layers of another scheme."""
    source = planted(tmp_path / "source", {"model.layers.0.self_attn.o_proj": 5000.0}, "Qwen3MoeForCausalLM")
    found = diagnose(source, full=True)
    assert [(one.layers, one.option) for one in found.advice] == [
        (("model.layers.0.self_attn.o_proj",), "--scheme channel")
    ]
    assert found.options == ("--scheme", "channel")
    assert len(checked(source, tmp_path / "out", found)) == 4 + 3 + 4 + 12


def test_no_options_where_engines_load_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = planted(tmp_path / "source", {"model.layers.0.mlp.down_proj": 5000.0})
    entry = MODELS["Qwen3ForCausalLM"]
    monkeypatch.setitem(MODELS, entry.name, replace(entry, refused=(Refusal("channel", None, "it cannot", "wait"),)))
    found = diagnose(source)
    assert (found.advice, found.options, found.bytes_after) == ((), (), found.bytes_before)
    assert found.notes == (
        "no options can be suggested: Qwen3ForCausalLM cannot be served with one scale per output row: it cannot",
    )


def test_a_weight_too_large_for_the_scheme(tmp_path: Path) -> None:
    source = planted(tmp_path / "source", {"model.layers.0.mlp.down_proj": 70000.0})
    found = diagnose(source, full=True)
    (one,) = found.advice
    assert (one.error_before, one.scheme) == (None, "channel")
    assert "large" in found.worst[0].flags
    checked(source, tmp_path / "out", found)
    shown = run_openquant("diagnose", source).stdout
    assert ": cannot be stored -> " in shown
    assert f"  openquant compress -m {source} {shlex.join(found.options)}" in shown.splitlines()


def test_ignored_layers_stay_ignored(tmp_path: Path) -> None:
    source = planted(
        tmp_path / "source", {"model.layers.0.mlp.down_proj": 3000.0, "model.layers.1.mlp.down_proj": 3000.0}
    )
    found = diagnose(source, full=True, ignore=["model.layers.0.**"])
    assert found.options == (
        "--format", "compressed-tensors", "--ignore", "model.layers.0.**",
        "--scheme-for", "model.layers.*.mlp.down_proj=channel",
    )  # fmt: skip
    checked(source, tmp_path / "out", found)


def test_schemes_that_do_not_mix_can_only_leave_a_layer_unquantized(tmp_path: Path) -> None:
    source = planted(tmp_path / "source", {"model.layers.0.mlp.down_proj": 3000.0})
    for scheme in ("mxfp8", "int8-weights"):
        assert {one.scheme for one in diagnose(source, scheme).advice} <= {None}


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["a.3.b", "a.7.b", "a.11.b"], ["a.{3,7,11}.b"]),
        (["a.3.b"], ["a.3.b"]),
        (["a.1.b.2", "a.1.b.4", "a.2.b.4"], ["a.1.b.2", "a.{1,2}.b.4"]),
        (["head"], ["head"]),
        (["a.0"], ["a.0"]),
    ],
)
def test_patterns_match_their_names_and_no_others(names: list[str], patterns: list[str]) -> None:
    assert patterns_of(names) == patterns
    others = ["a.4.b", "a.1.b", "a.2.b.2", "a.1.b.3", "heads", "a.00", "a.1"]
    matched = [name for name in (*names, *others) if compile_any(patterns).fullmatch(name)]
    assert matched == names
