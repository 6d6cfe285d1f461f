"""`--scheme int4 --asymmetric`: what is written, what of a source passes through unchanged, and what `verify` finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from conftest import EXAMPLE
from openquant import compress, dequantize, verify
from openquant.convert.conversion import TorchKernels
from openquant.files.checkpoint import open_checkpoint
from openquant.formats import kernels
from openquant.formats.kernels import choose_scales
from openquant.formats.reference import encode
from openquant.formats.schemes import ASYMMETRIC, INT4_SHIFTED, INT4_SHIFTED_32, Scheme
from openquant.plan import summary
from openquant.plan.decisions import PlanOptions
from openquant.plan.plan import Plan, make_plan
from support import small_checkpoints
from support.quantized_checkpoints import Weights, asymmetric, asymmetric_config, decompressed, is_layer, store
from support.representatives import in_all_ways
from support.rows import for_each
from support.small_checkpoints import change_weights

UP = "model.layers.0.mlp.up_proj"


def made(weight: torch.Tensor, scheme: Scheme) -> Weights:
    scale, zero = choose_scales(scheme, weight.float().numpy().view(np.uint32), "F32")
    codes = encode(weight, torch.from_numpy(scale), scheme.format, torch.from_numpy(zero))
    words = kernels.pack_words(scheme.format.number.encode(zero), scheme.format.number).view(np.int32)
    return {
        "weight_packed": codes,
        "weight_scale": torch.from_numpy(scale).bfloat16(),
        "weight_zero_point": torch.from_numpy(words),
        "weight_shape": torch.tensor(weight.shape),
    }


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


@for_each("scheme", in_all_ways(ASYMMETRIC))
def test_converts_to_what_torch_computes(shelf: object, tmp_path: Path, scheme: Scheme) -> None:
    source, out = shelf.source("Qwen3ForCausalLM"), tmp_path / "out"
    compress(source, out, scheme.name, group_size=scheme.group_size, asymmetric=True, workers=2)
    found, weights = small_checkpoints.read(out), small_checkpoints.read(source)
    expected = {}
    for name, weight in weights.items():
        made_of = made(weight, scheme) if is_layer(name) else {"weight": weight}
        expected |= {name.removesuffix("weight") + last: tensor for last, tensor in made_of.items()}
    assert set(found) == set(expected)
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    report = verify(out, source, full=True)
    assert (report.problems, report.notes, report.equal_share) == ((), (), 1)
    dequantize(out, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    config = open_checkpoint(out).config["quantization_config"]
    for name in filter(is_layer, plain):
        assert same(plain[name], decompressed(found, name.removesuffix(".weight"), config))
    # In its own scheme, the same bytes again.
    compress(out, tmp_path / "again", scheme.name, group_size=scheme.group_size, asymmetric=True)
    again = small_checkpoints.read(tmp_path / "again")
    assert set(again) == set(found)
    assert all(same(again[name], tensor) for name, tensor in found.items())


def test_codes_with_zero_points_are_made_anew_without(tmp_path: Path) -> None:
    source = store(tmp_path / "source", asymmetric(), asymmetric_config())
    compress(source, tmp_path / "out", "int4", group_size="32")
    dequantize(source, tmp_path / "plain")
    assert not any(name.endswith("zero_point") for name in small_checkpoints.read(tmp_path / "out"))
    assert verify(tmp_path / "out", tmp_path / "plain", full=True).problems == ()


def test_a_device_makes_the_same_codes() -> None:
    form, bits = INT4_SHIFTED.format, np.random.default_rng(1).standard_normal((16, 256), np.float32).view(np.uint32)
    scale, zero = choose_scales(INT4_SHIFTED.unsearched, bits, "F32")
    made = []
    for loops in (kernels, TorchKernels("cpu:0")):
        made.append(np.empty((16, 128), np.uint8))
        loops.encode_stored(bits, "F32", scale, form, made[-1], zero)
    assert np.array_equal(*made)


def moved(weights: Weights) -> None:
    weights[f"{UP}.weight_zero_point"][0, 0] ^= 0x30


def test_another_zero_point_shows(shelf: object, tmp_path: Path) -> None:
    source = shelf.source("Qwen3ForCausalLM", 1)
    compress(source, tmp_path / "out", "int4", asymmetric=True, group_size="32")
    held = small_checkpoints.read(tmp_path / "out")[f"{UP}.weight_zero_point"][0, 0].item() >> 4 & 15
    change_weights(tmp_path / "out", moved)
    problems = verify(tmp_path / "out", source, full=True).problems
    assert len(problems) == 2
    place = f"model.safetensors: {UP}"
    rows, cols = small_checkpoints.read(source)[f"{UP}.weight"].shape
    assert problems[0] == (
        f"{place}.weight_zero_point holds {held ^ 3} at [1, 0], the source makes it {held} "
        f"(1 of {rows * cols // 32} zero points differ)"
    )
    assert problems[1].startswith(f"{place}.weight_packed has the code ")


def plan_of(root: Path, tp: int | None = None) -> Plan:
    return make_plan(open_checkpoint(root), INT4_SHIFTED, PlanOptions(tp=tp))


def test_the_plan_says_what_cannot_load_it() -> None:
    plan = plan_of(EXAMPLE)
    assert summary.title(plan) == "one scale and zero point per 128 inputs of a row"
    assert summary.suffix(plan) == "-INT4-asym"
    assert plan.notes[-1] == (
        "transformers cannot load zero points (5.24 with compressed-tensors 0.20; 5.19 with 0.17 does)"
    )
    # 128 rows of k_proj and v_proj are two heads.
    assert summary.parallel_sizes(plan) == [1, 2]
    assert summary.schemes(plan_of(EXAMPLE, 4)) == {INT4_SHIFTED: 20, INT4_SHIFTED_32: 8}
