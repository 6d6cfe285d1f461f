"""Queries, keys and values that lie as one tensor in FP8, in a part for each of some ranks, are read as if they did not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from conftest import change_json
from openquant import compress, dequantize, verify
from openquant.errors import PlanError, SourceError
from openquant.formats.reference import decode
from openquant.formats.schemes import BLOCK, CHANNEL
from openquant.plan.plan import make_plain_plan
from support import small_checkpoints
from support.published_checkpoints import with_few_experts
from support.quantized_checkpoints import widened

NAME = "MiMoV2ForCausalLM"
# The first layer's parts are whole blocks; the other's are not, so that it has more scales than blocks.
SIZES = {"head_dim": 80, "v_head_dim": 32, "swa_head_dim": 96, "swa_v_head_dim": 64}
PARTS = 2
# Of a part's queries, keys and values, by layer; the first has a window, and more heads of keys.
ROWS = ((192, 192, 128), (160, 80, 32))


def fused(root: Path) -> dict[str, torch.Tensor]:
    """Write such a checkpoint; the projections it stands for, by name."""
    small_checkpoints.write(root, NAME)
    config = {**small_checkpoints.config(NAME), **SIZES}
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    (root / "config.json").write_text(json.dumps(config))
    expected: dict[str, torch.Tensor] = {}

    def store(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in [name for name in weights if re.search(r"self_attn\.[qkv]_proj", name)]:
            del weights[name]
        for layer in range(2):
            sizes, codes, scales = ROWS[layer], [], []
            members: tuple[list[torch.Tensor], ...] = ([], [], [])
            for _ in range(PARTS):
                rows = sum(sizes)
                code = torch.randn((rows, 256), generator=generator).to(torch.float8_e4m3fn)
                scale = torch.rand((-(-rows // 128), 2), generator=generator) + 0.5
                codes.append(code)
                scales.append(scale)
                for member, values in zip(
                    members, (code.float() * widened(scale, code.shape)).split(sizes), strict=True
                ):
                    member.append(values)
            module = f"model.layers.{layer}.self_attn"
            weights[f"{module}.qkv_proj.weight"] = torch.cat(codes)
            weights[f"{module}.qkv_proj.weight_scale_inv"] = torch.cat(scales)
            expected.update(
                {f"{module}.{part}_proj.weight": torch.cat(held) for part, held in zip("qkv", members, strict=True)}
            )

    small_checkpoints.change_weights(root, store)
    return expected


def test_each_is_read_as_its_codes_and_scales_stand_for(tmp_path: Path) -> None:
    expected = fused(tmp_path / "source")
    dequantize(tmp_path / "source", tmp_path / "plain")
    found = small_checkpoints.read(tmp_path / "plain")
    assert not any("qkv_proj" in name for name in found)
    for name, values in expected.items():
        assert torch.equal(found[name], values.to(torch.bfloat16)), name


def test_an_output_is_what_its_bfloat16_weights_give(tmp_path: Path) -> None:
    """Of blocks too: keys and values have others than they lie in."""
    source = tmp_path / "source"
    expected = fused(source)
    # 80 rows are no blocks.
    for scheme, suffix, count in ((BLOCK, "_scale_inv", 3), (CHANNEL, "_scale", 6)):
        out = tmp_path / scheme.name
        compress(source, out, scheme.name)
        found = small_checkpoints.read(out)
        quantized = {name: values for name, values in expected.items() if f"{name}{suffix}" in found}
        assert len(quantized) == count
        for name, values in quantized.items():
            made = decode(found[name], found[f"{name}{suffix}"], scheme.format)
            assert (made - values).norm() / values.norm() < 0.04, name
        assert verify(out, source).problems == ()
        assert "attention_projection_layout" not in json.loads((out / "config.json").read_text())


def test_the_config_says_that_projections_lie_one_by_one(tmp_path: Path) -> None:
    """With "fused_qkv" vLLM 0.33 builds a layer in blocks that takes no projection by itself."""
    source, key = tmp_path / "source", "attention_projection_layout"
    fused(source)
    change_json(source / "config.json", lambda found: found.update({key: "fused_qkv"}))
    dequantize(source, tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())[key] == "split"
    out = tmp_path / "out"
    compress(source, out, "block")
    assert json.loads((out / "config.json").read_text())[key] == "split"
    assert verify(out, source).problems == ()
    change_json(out / "config.json", lambda found: found.update({key: "fused_qkv"}))
    assert verify(out, source).problems == (f'config.json: {key} is "fused_qkv", but must be "split": engines read it',)


def test_codes_cannot_be_kept_and_other_scales_and_sizes_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    fused(source)
    with pytest.raises(PlanError) as caught:
        compress(source, tmp_path / "out", "keep")
    assert caught.value.message == (
        "compressed-tensors has no layout for model.layers.0.self_attn.qkv_proj.weight: FP8 with one scale per 128x128 "
        "block, F32 scales, stored per tensor-parallel rank, FP8 activations"
    )
    # Sizes that account for no rows.
    text = (source / "config.json").read_text()
    for key in ("num_key_value_heads", "v_head_dim"):
        (source / "config.json").write_text(json.dumps({**json.loads(text), key: 3}))
        with pytest.raises(SourceError, match="config.json has no heads that give so many rows"):
            dequantize(source, tmp_path / "plain")
    (source / "config.json").write_text(text)

    name = "model.layers.1.self_attn.qkv_proj.weight_scale_inv"
    small_checkpoints.change_weights(source, lambda weights: weights.update({name: weights[name][:-1].clone()}))
    with pytest.raises(SourceError) as caught:
        dequantize(source, tmp_path / "plain")
    assert caught.value.message == (
        f"{name} is [5, 2], for 2 parts of [272, 256] with one scale per 128x128 block it must be [6, 2]"
    )


def test_published() -> None:
    checkpoint = with_few_experts(f"quantized/{NAME}")
    outputs = make_plain_plan(checkpoint)
    found = {info.name: info for shard in outputs.layout.shards for info in outputs.layout.outputs(shard.name)}
    assert found == with_few_experts(NAME).tensors
