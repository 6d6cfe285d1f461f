"""PackedLinear: the module that holds what is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from openquant import PackedLinear, compress, dequantize
from support import small_checkpoints
from support.rows import for_each

CODES = {
    "int8": {"weight": (torch.int8, (128, 256))},
    "int8-weights": {"weight_packed": (torch.int32, (128, 64)), "weight_shape": (torch.int64, (2,))},
    "mxfp4": {"weight_packed": (torch.uint8, (128, 128))},
    "nvfp4": {"weight_packed": (torch.uint8, (128, 128)), "weight_global_scale": (torch.float32, (1,))},
    "int4": {"weight_packed": (torch.int32, (128, 32)), "weight_shape": (torch.int64, (2,))},
}
SCALES = {"mxfp8": torch.uint8, "mxfp4": torch.uint8, "int8-weights": torch.bfloat16, "int4": torch.bfloat16}
SCALES |= {"nvfp4": torch.float8_e4m3fn}


@for_each(("scheme", "format", "scale_name", "shape"), [
    ("mxfp8", None, "weight_scale", (128, 8)),
    ("nvfp4", None, "weight_scale", (128, 16)),
    ("int8", None, "weight_scale", (128, 1)),
    ("int8-weights", None, "weight_scale", (128, 1)),
    ("int4", None, "weight_scale", (128, 2)),
    ("tensor", None, "weight_scale", ()),
    ("tensor", "compressed-tensors", "weight_scale", (1,)),
    ("block", None, "weight_scale_inv", (1, 2)),
    ("block", "compressed-tensors", "weight_scale", (1, 2)),
])  # fmt: skip
def test_state_dict_holds_the_written_names_and_comes_back(
    scheme: str, format: str | None, scale_name: str, shape: tuple[int, ...]
) -> None:
    linear = nn.Linear(256, 128, dtype=torch.bfloat16)
    packed = PackedLinear.from_linear(linear, scheme, format)
    state = packed.state_dict()
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} == {
        **CODES.get(scheme, {"weight": (torch.float8_e4m3fn, (128, 256))}),
        scale_name: (SCALES.get(scheme, torch.float32), shape),
        "bias": (torch.bfloat16, (128,)),
    }
    again = PackedLinear(
        next(iter(state.values())), state[scale_name], state["bias"], format, scheme, state.get("weight_global_scale")
    )
    assert again.scheme == packed.scheme
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(packed(x), again(x))
    assert packed(x).dtype == torch.bfloat16


def test_inputs_that_share_a_scale_can_be_chosen() -> None:
    for size, groups in (("32", 8), (64, 4), (128, 2), ("channel", 1)):
        linear = nn.Linear(256, 128, dtype=torch.bfloat16)
        packed = PackedLinear.from_linear(linear, "int4", group_size=size)
        assert packed.scheme.group_size == str(size)
        assert packed.scale.shape == (128, groups)
        error = (packed.dequantized() - linear.weight).norm() / linear.weight.norm()
        assert 0.06 < error < 0.09
    # They are those of `compress` where 128 does not divide the inputs.
    linear = nn.Linear(96, 128, bias=False, dtype=torch.bfloat16)
    assert PackedLinear.from_linear(linear, "int4").scheme.group_size == "32"
    with pytest.raises(ValueError, match="96 inputs per row do not divide into groups of 128"):
        PackedLinear.from_linear(linear, "int4", group_size=128)


# (options, the packed layer's scheme)
OUTPUTS = [
    ({"scheme": "int4", "asymmetric": True}, "int4"),
    ({"scheme": "int5", "asymmetric": True, "group_size": 32}, "int5"),
    ({"scheme": "nvfp4"}, None),
    ({"scheme": "tensor"}, None),
]


@for_each(("options", "scheme"), OUTPUTS)
def test_a_layer_of_an_output_is_read_back(options: dict[str, object], scheme: str | None, tmp_path: Path) -> None:
    compress(small_checkpoints.write(tmp_path / "source"), tmp_path / "out", **options)
    dequantize(tmp_path / "out", tmp_path / "plain")
    name = "model.layers.0.mlp.down_proj."
    state = {
        key.removeprefix(name): tensor
        for key, tensor in small_checkpoints.read(tmp_path / "out").items()
        if key.startswith(name)
    }
    packed = PackedLinear.from_state_dict(state, scheme)
    expected = small_checkpoints.read(tmp_path / "plain")[f"{name}weight"]
    assert torch.equal(packed.dequantized(torch.bfloat16), expected)
    assert set(packed.state_dict()) == set(state)


def test_a_layer_that_is_not_whole_is_not_read() -> None:
    state = dict(PackedLinear.from_linear(nn.Linear(256, 128), "int4", group_size="channel").state_dict())
    with pytest.raises(
        ValueError, match=r"weight_shape is \[128, 256\], and as int8-weights the codes have \[128, 128\]"
    ):
        PackedLinear.from_state_dict(state)
    with pytest.raises(ValueError, match="^weight_g_idx: no scheme of PackedLinear has such a tensor$"):
        PackedLinear.from_state_dict({**state, "weight_g_idx": torch.zeros(256)}, "int4")
    del state["weight_scale"]
    with pytest.raises(ValueError, match="^there are no codes or no scales among bias, weight_packed, weight_shape$"):
        PackedLinear.from_state_dict(state, "int4")


def test_forward_is_the_dequantized_layer() -> None:
    linear = nn.Linear(128, 128, bias=False)
    packed = PackedLinear.from_linear(linear, "block")
    x = torch.randn(2, 128)
    weight = packed.weight.float() * packed.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(packed(x), x @ weight.T)
    assert (packed(x) - linear(x)).abs().max() < 0.2
    assert "bias" not in packed.state_dict()
    # Scales can be powers of two.
    packed = PackedLinear.from_linear(linear, "block", scale_format="ue8m0")
    assert torch.frexp(packed.scale).mantissa.item() == 0.5
    assert (packed.dequantized() - linear.weight).abs().max() <= linear.weight.abs().max() / 16


def test_bad_parts_are_refused() -> None:
    codes = torch.zeros(128, 256).to(torch.float8_e4m3fn)
    words, ones = torch.zeros(128, 32, dtype=torch.int32), torch.ones(128, 2, dtype=torch.bfloat16)
    linear, nan, large, larger = (nn.Linear(128, 128) for _ in range(4))
    for layer, value in ((nan, torch.nan), (large, 70000), (larger, -3.3e38)):
        with torch.no_grad():
            layer.weight[3, 4] = value
    make = PackedLinear.from_linear
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: PackedLinear(torch.zeros(128, 256), torch.tensor(1.0)), r"float8_e4m3fn matrix, not float32 \[128, 256\]"),
        (lambda: PackedLinear(torch.zeros(128, 128, dtype=torch.uint8), torch.tensor(1.0), scheme="int4"),
         r"^weight must be codes of int4: int32 matrix, not uint8 \[128, 128\]$"),
        (lambda: PackedLinear(words, ones), r"does not fit a weight \[128, 128\] of int8-weights: give scheme= if it is"),
        (lambda: PackedLinear(words, torch.ones(128, 3, dtype=torch.bfloat16), scheme="int4"),
         r"does not fit a weight \[128, 256\]$"),
        (lambda: PackedLinear(words, ones, scheme="int9"), "^int9 is not a scheme$"),
        (lambda: PackedLinear(codes, torch.ones(128, 1), scheme="channel", zero_point=words),
         "^scheme channel has no zero_point$"),
        (lambda: PackedLinear(words, ones, scheme="int4", zero_point=words[:16, :1]),
         r"^zero_point must be int32 \[16, 2\], not int32 \[16, 1\]$"),
        (lambda: PackedLinear(codes, torch.ones(2, 1)), r"scale \[2, 1\] does not fit a weight \[128, 256\]"),
        (lambda: PackedLinear(codes, torch.tensor(1.0, dtype=torch.float64)), "torch.float64 scale"),
        (lambda: make(nn.Linear(256, 96), "block"), "96 x 256 does not divide"),
        (lambda: make(nan), "NaN or infinity"),
        (lambda: make(large), "reaches 70000, engines load at most 65504"),
        (lambda: make(larger, "channel"), r"reaches 3.3e\+38, engines load at most 2.97747e\+38"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    make(linear)
