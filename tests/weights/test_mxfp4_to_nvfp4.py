"""A source in MXFP4 becomes NVFP4 without a change of any value, where E4M3 has all of its powers of two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from openquant import compress, diagnose, verify
from openquant.files.shardfile import TensorInfo
from openquant.formats.schemes import MXFP4, NVFP4
from openquant.weights.weight import Weight, WeightTransform
from support import small_checkpoints
from support.quantized_checkpoints import Make, Weights, group, is_layer, store
from support.rows import for_each

CONFIG = group("group", num_bits=4, group_size=32, scale_dtype="torch.uint8") | {"format": "mxfp4-pack-quantized"}
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
ATTENTION = "model.layers.0.self_attn"


def mxfp4(low: int, high: int) -> Make:
    """Random codes, with exponents from `low` to `high`, both of which occur. Some groups are all zeros, of either sign,
    with exponents of any size; some have zeros in one half.
    """
    generator = torch.Generator().manual_seed(low)

    def make(weight: torch.Tensor) -> Weights:
        rows, cols = weight.shape
        codes = torch.randint(0, 256, (rows, cols // 32, 16), generator=generator).to(torch.uint8)
        scale = torch.randint(low, high + 1, (rows, cols // 32), generator=generator).to(torch.uint8)
        scale[0, :4] = torch.tensor([low, high, 0, 254])
        codes[0, 0] |= 0x11
        codes[0, 1] |= 0x11
        codes[0, 2], codes[0, 3], codes[1, 0, :8] = 0, 0x88, 0
        return {"weight_packed": codes.reshape(rows, cols // 2), "weight_scale": scale}

    return make


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes stand for, float64."""
    nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).long()
    scale = scale.repeat_interleave(nibbles.shape[1] // scale.shape[1], 1)
    return VALUES[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * scale


def meant(stored: Weights, module: str) -> torch.Tensor:
    """The values of a weight in MXFP4 or NVFP4."""
    codes, scale = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
    if scale.dtype == torch.uint8:
        return values(codes, 2.0 ** (scale.double() - 127))
    return values(codes, scale.double() / stored[f"{module}.weight_global_scale"].double())


def modules() -> list[str]:
    return [name.removesuffix(".weight") for name in small_checkpoints.tensors("Qwen3ForCausalLM") if is_layer(name)]


# The last: a global scale of 2^125 instead of one that is infinite.
@for_each(
    ("low", "high", "scheme"),
    [(110, 118, "nvfp4-w4a4"), (110, 127, "nvfp4"), (230, 247, "nvfp4-w4a4"), (1, 8, "nvfp4")],
)
def test_no_value_changes(tmp_path: Path, low: int, high: int, scheme: str) -> None:
    source, out = store(tmp_path / "source", mxfp4(low, high), CONFIG, shards=2), tmp_path / "out"
    compress(source, out, scheme)
    report = verify(out, source, full=True)
    assert (report.problems, {error.largest for error in report.errors}) == ((), {0.0})
    stored, found = small_checkpoints.read(source), small_checkpoints.read(out)
    for module in modules():
        assert torch.equal(found[f"{module}.weight_packed"], stored[f"{module}.weight_packed"])
        assert torch.equal(meant(found, module), meant(stored, module)), module
        assert found[f"{module}.weight_global_scale"].log2().frac() == 0
        # No scale is zero, nor that of zeros.
        assert (found[f"{module}.weight_scale"].float() > 0).all()
    scales = [found[f"{ATTENTION}.{part}_proj.weight_global_scale"] for part in "qkv"]
    assert scales[0] == scales[1] == scales[2]


def test_powers_of_two_that_e4m3_does_not_have(tmp_path: Path) -> None:
    """Of one layer alone: its group is quantized again, the others keep their codes."""
    near, far = mxfp4(110, 118), mxfp4(101, 119)
    source, out = store(tmp_path / "source", near, CONFIG), tmp_path / "out"
    key = f"{ATTENTION}.k_proj"
    parts = far(torch.empty(128, 256))
    small_checkpoints.change_weights(
        source, lambda found: found.update({f"{key}.{last}": part for last, part in parts.items()})
    )
    compress(source, out, "nvfp4")
    report = verify(out, source, full=True)
    assert report.problems == ()
    fused = {f"{ATTENTION}.{part}_proj" for part in "qkv"}
    changed = {error.module for error in report.errors if error.largest > 0}
    assert key in changed
    assert changed <= fused
    # As exact as quantizing other weights.
    assert max(error.relative for error in report.errors) < 0.1


def test_smoothed_weights_are_others() -> None:
    shape = (16, 32)
    weight = Weight("up", "up", TensorInfo("up.weight", "BF16", shape), shape, format=MXFP4.format)
    smoothed = weight._replace(transform=WeightTransform(columns=np.ones(32, np.float32)))
    assert [each.divides_into(NVFP4.format) for each in (weight, smoothed)] == [True, False]
    assert not weight.divides_into(MXFP4.format)


def test_diagnose_knows_it(tmp_path: Path) -> None:
    source = store(tmp_path / "source", mxfp4(110, 118), CONFIG)
    assert {layer.errors["nvfp4"] for layer in diagnose(source, "nvfp4").layers} == {0.0}
