"""Layouts that one maker has: read as float64 has them, and refused where they are not quite so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openquant import compress, dequantize, verify
from openquant.errors import SourceError
from openquant.formats.schemes import BLOCK, CHANNEL
from openquant.plan import summary
from openquant.plan.plan import make_plain_plan, make_plan
from support import small_checkpoints
from support.published_checkpoints import with_few_experts
from support.quantized_checkpoints import BLOCKS, FP8, Weights, is_layer, store
from support.rows import for_each
from support.small_checkpoints import change_weights

# The magnitudes of E2M1's codes; the fourth bit is the sign.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
V4 = BLOCKS | {"fmt": "e4m3", "scale_fmt": "ue8m0"}


def exponents(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Scales from 2^-10 to 2^-6, a byte each."""
    return torch.randint(117, 122, shape, generator=generator).to(torch.uint8).view(torch.float8_e8m0fnu)


def powers(scale: torch.Tensor) -> torch.Tensor:
    return 2.0 ** (scale.view(torch.uint8).double() - 127)


def deepseek_v4(root: Path, packed: torch.dtype = torch.int8) -> tuple[Path, Weights]:
    """A model whose MLPs are in MXFP4 and whose attention is in FP8, as its config.json says of all of it."""
    generator, meant = torch.Generator().manual_seed(4), {}

    def make(weight: torch.Tensor) -> Weights:
        rows, cols = weight.shape
        if cols == 512 or rows == 512:
            codes = torch.randint(0, 256, (rows, cols // 2), generator=generator).to(torch.uint8)
            scale = exponents((rows, cols // 32), generator)
            made = {"weight": codes.view(packed), "scale": scale}
        else:
            codes = torch.randint(0, 0x7F, (rows, cols), generator=generator).to(torch.uint8)
            scale = exponents((rows // 128, cols // 128), generator)
            made = {"weight": codes.view(FP8), "scale": scale}
        return made

    store(root, make, V4, shards=2)
    stored = small_checkpoints.read(root)
    for name in filter(is_layer, stored):
        codes, scale = stored[name], powers(stored[name.replace(".weight", ".scale")])
        if codes.dtype == FP8:
            meant[name] = codes.double() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            bits = codes.view(torch.uint8).long()
            nibbles = torch.stack([bits & 15, bits >> 4], 2).flatten(1)
            values = torch.tensor(E2M1, dtype=torch.float64)[nibbles & 7] * (1 - 2 * (nibbles >> 3))
            meant[name] = values * scale.repeat_interleave(32, 1)
    return root, meant


def test_deepseek_v4(tmp_path: Path) -> None:
    source, meant = deepseek_v4(tmp_path / "source")
    assert {stored.dtype for stored in small_checkpoints.read(source).values()} >= {
        FP8,
        torch.int8,
        torch.float8_e8m0fnu,
    }
    dequantize(source, tmp_path / "plain")
    plain = small_checkpoints.read(tmp_path / "plain")
    assert set(plain) == set(small_checkpoints.tensors("Qwen3ForCausalLM"))
    for name, weight in meant.items():
        assert torch.equal(plain[name], weight.to(torch.bfloat16)), name
    compress(source, tmp_path / "rows", "channel")
    assert verify(tmp_path / "rows", source, full=True).problems == ()
    found = small_checkpoints.read(tmp_path / "rows")
    for name, weight in meant.items():
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        assert torch.equal(found[f"{name}_scale"], scale), name
        assert torch.equal(found[name].view(torch.uint8), (weight.float() / scale).to(FP8).view(torch.uint8)), name


@for_each("scheme", ["block", "mxfp4"])
def test_deepseek_v4_in_one_of_its_schemes(tmp_path: Path, scheme: str) -> None:
    source, meant = deepseek_v4(tmp_path / "source")
    compress(source, tmp_path / "out", scheme, scale_format="ue8m0" if scheme == "block" else None)
    assert verify(tmp_path / "out", source).problems == ()
    stored, found = small_checkpoints.read(source), small_checkpoints.read(tmp_path / "out")
    passed = [name for name in meant if (stored[name].dtype == FP8) == (scheme == "block")]
    assert len(passed) == (8 if scheme == "block" else 6)
    for name in passed:
        codes = found[name if scheme == "block" else f"{name}_packed"]
        scale = found[f"{name}_scale_inv" if scheme == "block" else f"{name}_scale"]
        assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8)), name
        told = powers(stored[name.replace(".weight", ".scale")])
        assert torch.equal(powers(scale) if scheme == "mxfp4" else scale.double(), told), name


UP = "model.layers.0.mlp.up_proj"
SCALE = f"{UP}.scale"
FAULTS: list[tuple[Callable[[Weights], object], str]] = [
    (lambda weights: weights.update({SCALE: weights[SCALE][:, :-1].clone()}), f"{SCALE} is [512, 7], for [512, 256] with one scale per 1x32 block it must be [512, 8]"),
    (lambda weights: weights.update({SCALE: torch.ones(512, 8)}), f"{UP}.weight is I8, but config.json has its layer as FP8"),
    (lambda weights: weights.pop(SCALE), f"{UP}.weight is I8, but config.json has its layer as FP8"),
    (lambda weights: weights[SCALE].view(torch.uint8).fill_(255), f"{SCALE} in model-00001-of-00002.safetensors holds nan, which is not a valid scale"),
]  # fmt: skip


@for_each(("change", "message"), FAULTS)
def test_what_is_not_quite_deepseek_v4(tmp_path: Path, change: Callable[[Weights], object], message: str) -> None:
    source, _ = deepseek_v4(tmp_path / "source")
    change_weights(source, change)
    with pytest.raises(SourceError) as caught:
        dequantize(source, tmp_path / "out")
    assert caught.value.message == message
    # Exponents may be bytes.
    change_weights(source, lambda weights: weights.update({SCALE: torch.zeros(512, 8, dtype=torch.uint8)}))
    dequantize(source, tmp_path / "plain")


def test_mxfp8_as_minimax_m3_has_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def make(weight: torch.Tensor) -> Weights:
        rows, cols = weight.shape
        codes = torch.randint(0, 0x7F, (rows, cols), generator=generator).to(torch.uint8).view(FP8)
        return {"weight": codes, "weight_scale_inv": exponents((rows, cols // 32), generator).view(torch.uint8)}

    source = store(tmp_path / "source", make, {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]})
    dequantize(source, tmp_path / "plain")
    compress(source, tmp_path / "out", "mxfp8")
    assert verify(tmp_path / "out", source).problems == ()
    stored, plain, found = (small_checkpoints.read(tmp_path / name) for name in ("source", "plain", "out"))
    for name in filter(is_layer, plain):
        scale = stored[f"{name}_scale_inv"]
        wide = powers(scale).repeat_interleave(32, 1)
        assert torch.equal(plain[name], (stored[name].double() * wide).to(torch.bfloat16)), name
        assert torch.equal(found[name].view(torch.uint8), stored[name].view(torch.uint8)), name
        assert torch.equal(found[f"{name}_scale"], scale), name


# With two experts a layer: how many weights are quantized there, and how many in an output in a scheme.
PUBLISHED = {
    "KimiK25ForConditionalGeneration": (60 * 2 * 3, CHANNEL, 247 + 60 * 3 * 3),
    "MiniMaxM3SparseForConditionalGeneration": (363 + 57 * 3 * 3, CHANNEL, 363 + 57 * 3 * 3),
    # FP8 in blocks beside experts in MXFP4, of which its config.json says nothing. Draft layers are decoded, and stay so.
    "DeepseekV4ForCausalLM": (62 * 8 + 30 + 2 + 62 * 2 * 3, BLOCK, 61 * 8 + 30 + 61 * 2 * 3),
}


@for_each("name", PUBLISHED)
def test_published_layouts(name: str) -> None:
    checkpoint = with_few_experts(f"quantized/{name}", 2)
    stored, scheme, quantized = PUBLISHED[name]
    assert summary.quantized_tensors(make_plan(checkpoint, scheme)) == quantized
    plain = make_plain_plan(checkpoint)
    assert summary.decoded_tensors(plain) == stored
    outputs = {info.name: info for shard in plain.layout.shards for info in plain.layout.outputs(shard.name)}
    assert outputs == with_few_experts(name, 2).tensors
