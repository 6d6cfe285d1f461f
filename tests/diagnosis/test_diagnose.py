"""What diagnose says of each layer: against plain loops, and against what verify says of a real conversion."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import EXAMPLE
from openquant import Diagnosis, compress, dequantize, diagnose, verify
from openquant.cli.commands import main
from openquant.diagnosis.diagnose import sample_step
from openquant.diagnosis.result import LayerDiagnosis
from openquant.errors import SourceError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.reference import decode, encode, group_absmax, group_scale
from openquant.formats.schemes import (
    BLOCK,
    CHANNEL,
    INT4_W4A16,
    INT8_W8A8,
    INT8_W8A16,
    MXFP4,
    MXFP8,
    NVFP4,
    SCHEMES,
    TENSOR,
)
from openquant.report.text import diagnosis_text
from support import small_checkpoints
from support.conversions import Shelf
from support.quantized_checkpoints import BLOCKS, by_blocks, store
from support.reporters import Told
from support.representatives import in_all_ways

DOWN = "model.layers.0.mlp.down_proj"
FULL = in_all_ways([TENSOR, CHANNEL, BLOCK, MXFP8, INT8_W8A8, INT8_W8A16, MXFP4, INT4_W4A16, NVFP4])


def model(root: Path, **layers: torch.Tensor) -> Path:
    """A checkpoint of nothing but the layers of model.layers.0: mlp__down_proj=weight."""
    named = {f"model.layers.0.{name.replace('__', '.')}.weight": weight for name, weight in layers.items()}
    return small_checkpoints.write(root, weights=named)


def noise(*shape: int, seed: int = 0, scale: float = 0.05, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def only(found: Diagnosis) -> LayerDiagnosis:
    assert [layer.module for layer in found.layers] == [DOWN]
    return found.layers[0]


def test_errors_are_those_of_torch(tmp_path: Path) -> None:
    weight = noise(128, 128, dtype=torch.float32)
    # Something becomes zero, something is zero, one weight stands out.
    weight[3, :20], weight[5, 7], weight[9], weight[11, 5] = 1e-6, 40.0, 0.0, 0.0
    layer = only(diagnose(model(tmp_path / "model", mlp__down_proj=weight)))
    assert (layer.shape, layer.rows) == ((128, 128), 128)
    for scheme in (TENSOR, CHANNEL, BLOCK, INT8_W8A8):
        scale = group_scale(group_absmax(weight, scheme.format.group), scheme.format)
        off = (decode(encode(weight, scale, scheme.format), scale, scheme.format) - weight).double().square().sum(1)
        signal = weight.double().square().sum(1)
        by_row = (off[signal > 0] / signal[signal > 0]).sum() / len(weight)
        assert layer.errors[scheme.name] == pytest.approx(math.sqrt(off.sum() / signal.sum()), rel=1e-4)
        assert layer.row_errors[scheme.name] == pytest.approx(math.sqrt(by_row), rel=1e-4)


def test_errors_are_those_that_verify_finds(shelf: Shelf, subtests: pytest.Subtests) -> None:
    """Fused layers in different shards, experts in tensors of their own, and stacked with rows as columns."""
    for architecture in ("Qwen3MoeForCausalLM", "Llama4ForCausalLM"):
        found = {layer.module: layer for layer in diagnose(shelf.source(architecture)).layers}
        for scheme in (scheme for scheme in FULL if not small_checkpoints.refused(architecture, scheme)):
            with subtests.test(architecture=architecture, scheme=scheme.name):
                source, output, _ = shelf.converted(architecture, scheme)
                errors = verify(output, source, full=True).errors
                assert len(errors) >= 14
                for error in errors:
                    layer = found[error.module]
                    assert layer.errors[scheme.name] == pytest.approx(error.relative, rel=1e-6), error.module
                    assert layer.shape == error.shape


def spiked(rows: int = 1024, cols: int = 512) -> torch.Tensor:
    """A layer of which one weight dominates the norm, in a row that no step meets."""
    weight = noise(rows, cols)
    weight[rows // 2 + 1, 300] = 900.0
    return weight


@pytest.mark.parametrize("make", [noise, spiked])
def test_a_sample_is_close_to_all_rows(
    tmp_path: Path, make: Callable[[int, int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "model", mlp__down_proj=make(1024, 512))
    sampled = diagnose(source)
    monkeypatch.setattr("openquant.diagnosis.diagnose.MAX_UNSAMPLED", 1 << 20)
    full = diagnose(source)
    layer, exact = only(sampled), only(full)
    assert sampled.rows_read == layer.rows / 1024 < 0.25 < full.rows_read == 1.0
    assert exact.rows == 1024
    for name in SCHEMES:
        assert layer.errors[name] == pytest.approx(exact.errors[name], rel=0.03), name
        assert layer.row_errors[name] == pytest.approx(exact.row_errors[name], rel=0.03), name


def test_a_layer_of_zeros_has_no_error(tmp_path: Path) -> None:
    source = model(tmp_path / "model", mlp__down_proj=torch.zeros(256, 128, dtype=torch.float32))
    layer = only(diagnose(source))
    assert layer.errors == layer.row_errors == dict.fromkeys(SCHEMES, 0.0)
    # It is named.
    assert f"note: all weights are zero: {DOWN}\n" in diagnosis_text(diagnose(source), every=False)
    sound = model(tmp_path / "sound", mlp__up_proj=noise(64, 64))
    assert "all weights are zero" not in diagnosis_text(diagnose(sound), every=False)


def test_layers_that_a_scheme_cannot_store_have_no_error(
    tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    for shape in [(1, 7), (130, 96), (257, 33)]:
        with subtests.test(shape=shape):
            root = tmp_path_factory.mktemp("row")
            layer = only(diagnose(model(root / "model", mlp__down_proj=noise(*shape))))
            stored = {name for name, error in layer.errors.items() if error is not None}
            # int4 falls back to groups of 32.
            assert stored == {
                name
                for name, scheme in SCHEMES.items()
                if any(form and form.format.shape_error(shape) is None for form in (scheme, scheme.fallback))
            }
            assert {"tensor", "channel", "int8"} <= stored
            assert {name for name, error in layer.row_errors.items() if error is not None} == stored
            assert layer.rows == shape[0]


def test_fused_layers_share_a_per_tensor_scale(tmp_path: Path) -> None:
    up, gate = noise(128, 128), noise(128, 128, seed=1)
    alone = diagnose(model(tmp_path / "alone", mlp__up_proj=up)).layers[0]
    gate[0, 0] = 9000.0
    found = diagnose(model(tmp_path / "both", mlp__gate_proj=gate, mlp__up_proj=up)).layers[1]
    assert found.module == alone.module
    assert found.errors["tensor"] > 5 * alone.errors["tensor"]
    # Under a global scale that is far too large for it, its own are small, and of few bits.
    assert found.errors["nvfp4"] > 1.1 * alone.errors["nvfp4"]
    shared = dict.fromkeys(("tensor", "nvfp4", "nvfp4-w4a4"), 0)
    assert {**found.errors, **shared} == {**alone.errors, **shared}
    # Beyond what one scale may hold for its neighbour, it cannot be stored either.
    gate[0, 0] = 70000.0
    found = diagnose(model(tmp_path / "large", mlp__gate_proj=gate, mlp__up_proj=up)).layers[1]
    assert (found.errors["tensor"], found.row_errors["tensor"]) == (None, None)


def test_a_quantized_source_is_measured_by_its_decoded_weights(tmp_path: Path) -> None:
    """Codes that stay lose nothing; any other scheme rounds what they stand for."""
    source = store(tmp_path / "blocks", by_blocks(), BLOCKS)
    found = diagnose(source)
    assert len(found.layers) == 14
    compress(source, tmp_path / "channel", "channel")
    for root in (source, tmp_path / "channel"):
        dequantize(root, tmp_path / f"{root.name}-plain")
    before, after = (small_checkpoints.read(tmp_path / f"{name}-plain") for name in ("blocks", "channel"))
    for layer in found.layers:
        plain, other = (weights[f"{layer.module}.weight"].double() for weights in (before, after))
        assert layer.errors["channel"] == pytest.approx(float((other - plain).norm() / plain.norm()), rel=0.05)
        assert (layer.errors["block"], layer.row_errors["block"]) == (0, 0)


def test_nan_or_infinity_among_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = f"{DOWN}.weight in model.safetensors holds NaN or infinity"
    for value, row in ((math.nan, 0), (math.nan, 500), (math.inf, 0), (math.inf, 500)):
        weight = noise(1024, 512)
        weight[row, 5] = value
        source = model(tmp_path / f"{value}{row}", mlp__down_proj=weight, mlp__up_proj=noise(64, 64))
        with pytest.raises(SourceError) as caught:
            diagnose(source)
        assert caught.value.message == message, (value, row)
        assert caught.value.hint == "the weights are damaged: download or save them again"
    assert main(["diagnose", str(source)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {message}\nhint: {caught.value.hint}\n")
    # As it says.
    assert len(diagnose(source, ignore=["**.down_proj"]).layers) == 1


def test_passthrough_tensors_are_checked_for_nan(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=5, vocab=128)
    assert diagnose(source).not_finite == {}

    def change(held: dict[str, torch.Tensor]) -> None:
        held["model.norm.weight"][3] = math.nan
        held["model.embed_tokens.weight"][-1, -2:] = math.inf
        held["model.layers.1.self_attn.q_proj.weight"][0, 0] = math.nan

    small_checkpoints.change_weights(source, change)
    found = diagnose(source, ignore=["**.q_proj"], workers=3)
    assert found.not_finite == {
        "model.embed_tokens.weight": "infinity (2 values)",
        "model.layers.1.self_attn.q_proj.weight": "NaN (1 value)",
        "model.norm.weight": "NaN (1 value)",
    }
    assert found.to_json()["not_finite"] == found.not_finite
    assert "model.embed_tokens.weight holds infinity (2 values), model.layers.1" in diagnosis_text(found, every=False)


def test_progress_and_an_interrupt(example: Path) -> None:
    seen = Told()
    told = seen.steps
    weights = 6_291_456  # bytes of the layers, as README.md has it of their sum
    others = sum(info.nbytes for info in open_checkpoint(example).tensors.values()) - weights
    diagnose(example, reporter=seen)
    assert (told[-1], len({total for _, total in told})) == ((weights + others, weights + others), 1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnose(example, workers=3, reporter=Told(interrupt))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("openquant")] == []


def test_sound_layers_are_not_conspicuous(example: Path) -> None:
    """Trained layers lose about what normally distributed weights do, in every scheme."""
    diagnosed = diagnose(example)
    for name in [scheme.name for scheme in in_all_ways(SCHEMES.values())]:
        found = replace(diagnosed, scheme=name)
        assert found.conspicuous == []
        for layer in found.layers:
            assert layer.row_errors[name] == pytest.approx(found.normal[name], rel=0.15)


def test_the_smaller_groups_that_compress_falls_back_to_are_measured(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", weights={f"{DOWN}.weight": noise(256, 576)})
    compress(source, tmp_path / "out", "int4")
    [error] = verify(tmp_path / "out", source, full=True).errors
    assert only(diagnose(source)).errors["int4"] == pytest.approx(error.relative, rel=1e-6)


def test_invalid_options_are_refused(example: Path, subtests: pytest.Subtests) -> None:
    for given, message in [
        ({"workers": 0}, "0 workers cannot work"),
        ({"scheme": "int1"}, "--scheme: int1 is none of tensor, "),
        ({"stream": True}, f"{EXAMPLE} is a local directory, nothing of it can be streamed"),
        ({"ignore": ["**"]}, None),
    ]:
        with subtests.test(given=given, message=message):
            if message is None:
                found = diagnose(example, **given)  # type: ignore[arg-type]
                assert (found.layers, found.rows_read) == ((), 1.0)
                return
            with pytest.raises(UsageError) as caught:
                diagnose(example, **given)  # type: ignore[arg-type]
            assert caught.value.message.startswith(message)


def test_the_table_and_json(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["diagnose", str(example), *words]) == 0
        out, err = capsys.readouterr()
        # How far it is, where that takes long.
        assert re.sub(r"(?m)^\d+ % diagnosed.*\n", "", err) == ""
        return out

    lines = said().splitlines()
    assert lines[:2] == [f"{example}: Qwen3ForCausalLM, --scheme tensor", "28 layers, measured on all their rows"]
    assert sum(line.startswith("model.layers.") for line in lines) == 10
    assert lines[14:] == [
        "normally distributed weights      "
        "2.64 %   2.64 %  2.66 %  0.778 %       0.779 %  2.49 %  4.93 %  9.97 %  11.1 %  8.21 %      8.21 %",
        "",
        "activations, which most schemes round too, are not counted",
        "no layer loses more than twice what normally distributed weights do",
        "",
        "what lost less on SmolLM2-135M-Instruct at about the same size, and the size of this model:",
        "",
        "openquant compress          KL, nats                size  activations  texts",
        "--scheme tensor               0.0355             5.25 MB          FP8     no",
        "--scheme int8-weights         0.0051  86 % less  5.27 MB      16 bits     no",
        "--scheme int8 --smooth 0.5    0.0202  43 % less  5.29 MB         INT8   once",
        "--scheme channel              0.0299  16 % less  5.29 MB          FP8     no",
    ]
    every = said("--verbose").splitlines()
    assert [line.split()[0] for line in every if line.startswith("model.layers.")] == [
        layer.module for layer in diagnose(example).layers
    ]
    found = json.loads(said("--json", "--scheme", "channel"), parse_constant=pytest.fail)
    assert found == json.loads(json.dumps(diagnose(example, "channel").to_json())) | {"model": str(example)}
    assert (found["scheme"], found["rows_read"], len(found["layers"])) == ("channel", 1.0, 28)
    layer = found["layers"][0]
    assert layer["row_errors"]["channel"] > 0


def test_the_step_is_odd_and_measures_enough() -> None:
    assert [sample_step(shape) for shape in [(1, 5000), (128, 4096), (2048, 2048), (53248, 16384)]] == [1, 5, 65, 1665]
