"""What the formats promise: rounding bounds, scales, zeros, exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from openquant.errors import UsageError
from openquant.formats.hardware import SCHEME_NAMES
from openquant.formats.numbers import E2M1, E4M3, INT8, INT8_WORDS, Number
from openquant.formats.quantization import read_quantization
from openquant.formats.reference import decode, encode, group_absmax, group_global_scale, group_scale, stored_scale
from openquant.formats.schemes import (
    BLOCK,
    BLOCK_COMPRESSED,
    BLOCK_UE8M0,
    CHANNEL,
    INT4_W4A16,
    INT4_W4A16_32,
    INT4_W4A16_CHANNEL,
    INT8_W8A8,
    INT8_W8A16,
    INTEGER_GROUPS,
    MIXED,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_W4A4,
    SCHEMES,
    STATIC,
    TENSOR,
    TENSOR_COMPRESSED,
    TENSOR_STATIC,
    VARIANTS,
    Scheme,
    as_written,
    find_others,
    find_scheme,
)


def half_a_code(number: Number, weight: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """How far a code may be from weights of some magnitudes, under scales."""
    if number in (INT8, INT8_WORDS):
        return step / 2
    if number.dtype == "I32":
        # A scale of bfloat16 that is rounded down may put the largest weight beyond the last code.
        return step / 2 + weight * 2.0**-8
    # Normal codes have 3 bits of mantissa, or 1: half a unit is 1/16 of the weight, or 1/4; subnormal ones are 2^-9
    # apart, or 1/2. The largest magnitude of FP4 is 6, and what is up to 9 times a scale made of the largest is clamped to it.
    return torch.maximum(weight / (16 if number == E4M3 else 3), step * (2.0**-10 if number == E4M3 else 0.25))


def made_of(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of a weight."""
    scale = group_scale(group_absmax(weight, scheme.format.group), scheme.format)
    return scale, encode(weight, scale, scheme.format)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), magnitude=st.floats(-30, 30), spread=st.floats(0, 4))
def test_decoding_gives_the_weight_back_within_half_a_code(seed: int, magnitude: float, spread: float) -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed))
    weight = (weight * (weight.abs() ** spread) * 2.0**magnitude).float()
    for scheme in VARIANTS:
        scale, codes = made_of(weight, scheme)
        found = decode(codes, scale, scheme.format)
        down, along = 256 // scale.shape[0], 128 // scale.shape[1]
        step = scale.repeat_interleave(down, 0).repeat_interleave(along, 1)
        bound = half_a_code(scheme.format.number, weight.abs(), step) * (1 + 2e-5)
        assert ((found - weight).abs() <= bound).all(), scheme.suffix
        assert torch.isfinite(scale).all() and (scale > 0).all(), scheme.suffix


def test_zeros_stay_zeros_under_a_scale_above_zero(subtests: pytest.Subtests) -> None:
    weight = torch.zeros(256, 128)
    for scheme in VARIANTS:
        with subtests.test(scheme=scheme.suffix):
            scale, codes = made_of(weight, scheme)
            assert (scale == (2.0**-7 if scheme.group_size else 1)).all()
            if scheme.format.number not in (INT8_W8A16.format.number, *(groups[0].format.number for groups in GROUPS)):
                assert (codes.view(torch.uint8) == 0).all()
            assert (decode(codes, scale, scheme.format) == 0).all()


@given(share=st.floats(0, 1, width=32) | st.sampled_from([0.5, 1.0]))
def test_no_code_overflows_bfloat16(share: float) -> None:
    for scheme in (*VARIANTS, *STATIC):
        absmax = np.array([[share * scheme.largest]], np.float32)
        scale = torch.from_numpy(scheme.format.scales(absmax))
        assert torch.isfinite((scale * scheme.format.number.largest).bfloat16()).all(), scheme.suffix
        largest = scale * scheme.format.number.span
        # A scale of bfloat16 may be rounded down, and FP4 clamps what is below 7 to 6.
        usual = 2.0**-8 if scheme.format.scale.dtype == "BF16" else 2.0**-23
        slack = {MXFP4: 1 / 6, NVFP4: 2.0**-21, NVFP4_W4A4: 2.0**-21}.get(scheme, usual)
        assert (largest * (1 + slack) >= torch.from_numpy(absmax)).all(), scheme.suffix


def test_scales_of_small_weights_are_normal_numbers_that_float16_keeps_where_there_is_one() -> None:
    scale = TENSOR.format.scales(np.array([[0.0137, 0.0136, 0]], np.float32))
    np.testing.assert_array_equal(scale, np.array([[np.float32(0.0137) / np.float32(448), 2.0**-15, 1]], np.float32))
    for scheme in (CHANNEL, BLOCK):
        scale = scheme.format.scales(np.array([[1e-45, 1e-38, 1.0, 0.0]], np.float32))
        np.testing.assert_array_equal(scale, np.array([[2.0**-126, 2.0**-126, 1 / 448, 1.0]], np.float32))


def test_golden_bytes_of_fp8() -> None:
    weight = torch.tensor(
        [[448.0, -448.0, 1.0, -1.0], [0.0, 240.0, 2.0**-9, 17.0], [18.0, 19.0, 465.0 / 464, 2.0**-10]]
    )
    scale, codes = made_of(weight, TENSOR)
    assert scale.item() == 1.0
    # 17 lies between 16 (0x58) and 18 (0x59) and goes to the even code, 19 between 18 and 20 (0x5a) likewise.
    expected = [[0x7E, 0xFE, 0x38, 0xB8], [0x00, 0x77, 0x01, 0x58], [0x59, 0x5A, 0x38, 0x00]]
    assert codes.view(torch.uint8).tolist() == expected

    weight = torch.tensor([[0.5, -0.25, 0.1, 0.003], [0.0, -0.0, 0.0, 0.0], [-896.0, 2.0, 17.0, 1.0]])
    scale, codes = made_of(weight, CHANNEL)
    assert scale.tolist() == [[float(np.float32(0.5) / np.float32(448))], [1.0], [2.0]]
    # 17 / 2 lies between 8 (0x50) and 9 (0x51) and goes to the even code.
    expected = [[0x7E, 0xF6, 0x6B, 0x43], [0x00, 0x80, 0x00, 0x00], [0xFE, 0x38, 0x50, 0x30]]
    assert codes.view(torch.uint8).tolist() == expected

    weight = torch.zeros(128, 256)
    weight[0, :4] = torch.tensor([0.5, -0.25, 0.1, 0.003])
    weight[127, 255] = 896.0
    weight[0, 128] = -1.0
    scale, codes = made_of(weight, BLOCK)
    assert scale.tolist() == [[float(np.float32(0.5) / np.float32(448)), 2.0]]
    codes = codes.view(torch.uint8)
    assert codes[0, :4].tolist() == [0x7E, 0xF6, 0x6B, 0x43]
    assert (codes[127, 255], codes[0, 128], int((codes != 0).sum())) == (0x7E, 0xB0, 6)

    weight = torch.zeros(128, 384)
    weight[0, :4] = torch.tensor([0.5, -0.25, 0.1, 0.003])
    weight[5, 128] = 449.0
    scale, codes = made_of(weight, BLOCK_UE8M0)
    assert scale.tolist() == [[2.0**-9, 2.0, 1.0]]
    # 256, -128, 51.2 -> 52, 1.536 -> 1.5 and 224.5 -> 224.
    assert codes.view(torch.uint8)[0, :4].tolist() == [0x78, 0xF0, 0x65, 0x3C]
    assert codes.view(torch.uint8)[5, 128] == 0x76


SENTENCE = {"scale_fmt": "one scale per tensor: transformers misreads this; use vLLM or SGLang"}


def test_fp8_config_is_what_engines_read() -> None:
    for scheme, block, more in (
        (TENSOR, None, SENTENCE),
        (BLOCK, [128, 128], {}),
        (BLOCK_UE8M0, [128, 128], {"scale_fmt": "ue8m0"}),
    ):
        assert scheme.config(["lm_head"]) == {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": block,
            "ignored_layers": ["lm_head"],
            "modules_to_not_convert": ["lm_head"],
            **more,
        }, scheme.suffix


def test_a_scheme_is_known_by_its_config() -> None:
    for scheme in (*VARIANTS, TENSOR_STATIC):
        settings = scheme.settings | dict.fromkeys(scheme.ignored_keys)
        assert read_quantization({"quantization_config": settings}).scheme is scheme
        assert as_written(scheme, settings), scheme.suffix
    assert not as_written(BLOCK, BLOCK.settings | dict.fromkeys(BLOCK.ignored_keys) | SENTENCE)


WIDTHS = (2, 3, 5, 6, 7)
GROUPS = tuple(INTEGER_GROUPS.values())
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
E4M3FN = "torch.float8_e4m3fn"
NV = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3FN, "zp_dtype": E4M3FN}
COMPRESSED = [
    (TENSOR_COMPRESSED, {"strategy": "tensor"}, {"strategy": "token"}),
    (CHANNEL, {"strategy": "channel"}, {"strategy": "token"}),
    (INT8_W8A8, {"strategy": "channel"}, {"strategy": "token"}),
    (INT8_W8A16, {"strategy": "channel"}, None),
    (INT4_W4A16, {"num_bits": 4, "strategy": "group", "group_size": 128}, None),
    (INT4_W4A16_32, {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    (INT4_W4A16_CHANNEL, {"num_bits": 4, "strategy": "channel"}, None),
    *((INTEGER_GROUPS[bits][0], {"num_bits": bits, "strategy": "group", "group_size": 128}, None) for bits in WIDTHS),
    *((INTEGER_GROUPS[bits][3], {"num_bits": bits, "strategy": "channel"}, None) for bits in WIDTHS),
    (BLOCK_COMPRESSED, {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
    (MXFP8, MX, MX),
    (MXFP4, MX | {"num_bits": 4}, None),
    (NVFP4, NV, None),
    (NVFP4_W4A4, NV, {**NV, "dynamic": "local"}),
]  # fmt: skip
STORED = {
    MXFP8: "mxfp8-quantized",
    MXFP4: "mxfp4-pack-quantized",
    NVFP4: "nvfp4-pack-quantized",
    NVFP4_W4A4: "nvfp4-pack-quantized",
    INT8_W8A8: "int-quantized",
} | dict.fromkeys((INT8_W8A16, *(scheme for groups in GROUPS for scheme in groups)), "pack-quantized")


def test_compressed_tensors_reads_configs_and_decompresses_tensors(subtests: pytest.Subtests) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    for scheme, weights, activations in COMPRESSED:
        with subtests.test(scheme=scheme.suffix):
            found = scheme.config(["lm_head"])
            kind = "float" if scheme.format.number in (E4M3, E2M1) else "int"
            number = {"num_bits": 8, "type": kind, "symmetric": True}
            assert found == {
                "quant_method": "compressed-tensors",
                "format": STORED.get(scheme, "float-quantized"),
                "quantization_status": "compressed",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {**number, "dynamic": False, **weights},
                        "input_activations": activations and {**number, "dynamic": True, **activations},
                    }
                },
                "ignore": ["lm_head"],
            }
            config = QuantizationConfig.model_validate(found)
            assert config.quantization_status == QuantizationStatus.COMPRESSED
            assert config.ignore == ["lm_head"]

            form, absmax = scheme.format, group_absmax(weight, scheme.format.group)
            divisor = group_global_scale(absmax.amax(), form)
            scale = group_scale(absmax, form, divisor)
            codes = encode(weight, scale, form)
            stored = {form.codes: codes, "weight_scale": stored_scale(scale, form, (256, 384), divisor)}
            if form.global_scale:
                stored["weight_global_scale"] = divisor.reshape(1)
            stored |= {info.name[1:]: torch.tensor([256, 384]) for info, _ in form.constant_tensors("", (256, 384))}
            compressor = BaseCompressor.get_value_from_registry(config.format)
            theirs = compressor.decompress(stored, config.config_groups["group_0"])["weight"]
            # compressed-tensors multiplies in bfloat16 where its scales are powers of two.
            assert torch.equal(theirs, decode(codes, scale, form).to(theirs.dtype))
            read = stored["weight_scale"].float() / divisor if form.global_scale else stored["weight_scale"]
            assert torch.equal(decode(codes, read, form), decode(codes, scale, form))


def test_what_is_said_of_schemes_is_so() -> None:
    assert {name: (named.suffix, named.mixes) for name, named in SCHEME_NAMES.items()} == {
        name: (scheme.suffix, name in {other.name for other in MIXED}) for name, scheme in SCHEMES.items()
    }


def test_schemes_of_several_formats_have_groups_that_name_theirs() -> None:
    found = INT8_W8A8.config(["a"], {CHANNEL: ["b"], INT8_W8A16: ["c"]})
    assert found["format"] == "mixed-precision"
    assert [(group["targets"], group["format"]) for group in found["config_groups"].values()] == [
        (["Linear"], "int-quantized"),
        (["b"], "float-quantized"),
        (["c"], "pack-quantized"),
    ]
    read = read_quantization({"quantization_config": found})
    assert [read.format_of(name) for name in "xbc"] == [INT8_W8A8.format, CHANNEL.format, INT8_W8A16.format]
    assert as_written(INT8_W8A8, read.settings)
    assert not as_written(CHANNEL, read.settings)
    assert not as_written(INT8_W8A8, {**read.settings, "format": "int-quantized"})


def test_golden_bytes_of_int8() -> None:
    weight = torch.tensor([[127.0, -127.0, 1.0, -1.0], [0.5, 1.5, -2.5, 63.5], [0.0, -0.0, 0.0, 0.0]])
    scale, codes = made_of(weight, INT8_W8A8)
    assert scale.tolist() == [[1.0], [0.5], [1.0]]
    assert codes.tolist() == [[127, -127, 1, -1], [1, 3, -5, 127], [0, 0, 0, 0]]
    # In words each is 128 above its value, the first lowest.
    words = encode(weight, scale, INT8_W8A16.format)
    assert [word & 0xFFFFFFFF for word in words[:, 0].tolist()] == [0x7F8101FF, 0xFF7B8381, 0x80808080]
    # Half of a code goes to the even one.
    halves = torch.tensor([[127.0, 0.5, 1.5, -2.5]])
    assert encode(halves, torch.ones(1, 1), INT8_W8A8.format).tolist() == [[127, 0, 2, -2]]

    # Scales of bfloat16 are rounded before codes are made.
    scale, codes = made_of(torch.tensor([[127.4, 50.0, -127.4, 0.3]]), INT8_W8A16)
    assert scale.item() == 1.0
    assert stored_scale(scale, INT8_W8A16.format, (1, 4)).dtype == torch.bfloat16
    assert INT8_W8A16.format.encode_scales(scale.numpy()).tolist() == [[0x3F80]]
    assert decode(codes, scale, INT8_W8A16.format).tolist() == [[127, 50, -127, 0]]

    # Other tools divide by 127.5 and use -128 too.
    for scheme, code in ((INT8_W8A8, 0x80), (INT8_W8A16, 0)):
        assert scheme.format.number.decode(np.array([code], np.uint8)).tolist() == [-128.0]


def test_golden_bytes_of_int4() -> None:
    weight = torch.zeros(2, 128)
    weight[0, :8] = torch.tensor([-7.5, -7.0, -1.0, 0.0, 1.0, 2.0, 6.0, 7.5])
    weight[0, 8:16] = torch.tensor([0.5, 1.5, -2.5, -0.5, 3.49, 3.51, -0.0, 7.0])
    scale, codes = made_of(weight, INT4_W4A16)
    # The largest weight is divided by 7.5; a group of zeros has the spacing of bfloat16.
    assert scale.tolist() == [[1.0], [2.0**-7]]
    words = [[word & 0xFFFFFFFF for word in row] for row in codes.tolist()]
    # Each code is 8 above its value, the first lowest; -7.5 rounds to -8, and 7.5 is cut to 7.
    assert words == [[0xFEA98710, 0xF8CB86A8, *[0x88888888] * 14], [0x88888888] * 16]


def test_every_name_has_a_default_and_every_format_is_found() -> None:
    for scheme in VARIANTS:
        found = find_scheme(scheme.name, scheme.method, scheme.scale_format, group_size=scheme.group_size)
        assert found == scheme
        assert find_scheme(scheme.name) == SCHEMES[scheme.name]
    assert len({scheme.suffix for scheme in VARIANTS}) == len(VARIANTS)
    assert find_scheme("block", None, "float") is find_scheme("block") is BLOCK
    assert find_scheme("block", None, "ue8m0") is BLOCK_UE8M0
    assert find_scheme("mxfp8", None, "ue8m0") is MXFP8
    assert find_scheme("tensor", "compressed-tensors", "float") is TENSOR_COMPRESSED


def test_what_is_no_scheme_says_what_is() -> None:
    kinds = "leave --scale-format out: block in the fp8 format has both kinds, mxfp8 and mxfp4 ue8m0, all else float"
    static = "use --scheme tensor for static ones, or leave --activation-scheme out"
    for asked, message, hint in (
        (("rows",), "rows is not a scheme", f"choose one of {', '.join(SCHEME_NAMES)}"),
        (("int8-weights", None, None, "dynamic", "64"), "--scheme int8-weights has no groups of a size to choose",
         "use --scheme int4, or leave --group-size out"),
        (("tensor", "gguf"), "the format gguf has no scheme tensor", "use --format fp8 or compressed-tensors"),
        (("int4", "fp8"), "the format fp8 has no scheme int4", "use --format compressed-tensors"),
        (("channel", "fp8"), "the format fp8 has no scheme channel", "use --format compressed-tensors"),
        (("block", "compressed-tensors", "ue8m0"),
         "--scheme block has no ue8m0 scales in the compressed-tensors format", kinds),
        (("tensor", "fp8", "ue8m0"), "--scheme tensor has no ue8m0 scales in the fp8 format", kinds),
        (("channel", None, "ue8m0"), "--scheme channel has no ue8m0 scales in the compressed-tensors format", kinds),
        (("mxfp8", None, "float"), "--scheme mxfp8 has no float scales in the compressed-tensors format", kinds),
        (("channel", None, None, "static"), "--scheme channel has no static activations", static),
        (("tensor", None, None, "frozen"), "--scheme tensor has no frozen activations", static),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            find_scheme(*asked)
        assert (caught.value.message, caught.value.hint) == (message, hint)


def test_schemes_that_no_config_holds_together() -> None:
    assert find_others(TENSOR, {}) == ()
    assert find_others(CHANNEL, {"a": "block", "b": "tensor"}) == (("a", BLOCK_COMPRESSED), ("b", TENSOR_COMPRESSED))
    with pytest.raises(UsageError) as caught:
        find_others(MXFP8, {"**": "channel"})
    assert (caught.value.message, caught.value.hint) == (
        "--scheme-for does not go with --scheme mxfp8 in the compressed-tensors format: all layers are alike",
        "use --scheme channel, or --scheme tensor or block with --format compressed-tensors",
    )
    with pytest.raises(UsageError) as caught:
        find_others(CHANNEL, {"**": "mxfp8"})
    assert (caught.value.message, caught.value.hint) == (
        "--scheme-for **=mxfp8: mxfp8 is not a scheme to mix",
        f"choose one of {', '.join(name for name, scheme in SCHEME_NAMES.items() if scheme.mixes)}",
    )


def test_golden_bytes_of_mxfp8() -> None:
    weight = torch.zeros(2, 96)
    weight[0, :4] = torch.tensor([0.5, -0.25, 0.1, 0.003])
    weight[1, 32] = 449.0
    weight[1, 95] = 1e-45
    scale, codes = made_of(weight, MXFP8)
    stored = MXFP8.format.encode_scales(scale.numpy())
    assert stored.tolist() == [[118, 127, 127], [127, 128, 1]]
    assert torch.equal(stored_scale(scale, MXFP8.format, (2, 96)), torch.from_numpy(stored))
    codes = codes.view(torch.uint8)
    assert codes[0, :4].tolist() == [0x78, 0xF0, 0x65, 0x3C]
    assert (codes[1, 32], int((codes != 0).sum())) == (0x76, 5)


def test_golden_bytes_of_mxfp4() -> None:
    weight = torch.zeros(3, 64)
    # OCP Microscaling Formats 1.0, 5.3.3: all magnitudes in order, then all with their sign.
    weight[0, :16] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    # Half way goes to the even code, and what is below 7 is clamped.
    weight[0, 32:40] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6.96875])
    weight[1, 0], weight[1, 32] = 7.0, 1e-45
    scale = group_scale(group_absmax(weight, MXFP4.format.group), MXFP4.format)
    stored = MXFP4.format.encode_scales(scale.numpy())
    assert stored.tolist() == [[127, 127], [128, 1], [127, 127]]
    codes = encode(weight, scale, MXFP4.format)
    assert codes.dtype == torch.uint8
    assert codes.shape == (3, 32)
    assert bytes(codes[0, :8].tolist()).hex(" ") == "10 32 54 76 98 ba dc fe"
    assert bytes(codes[0, 16:20].tolist()).hex(" ") == "20 42 64 f6"
    assert codes[1].nonzero().tolist() == [[0]]
    # 3.5 is half way between 3 and 4, whose code is even.
    assert codes[1, 0] == 6


def test_golden_bytes_of_nvfp4() -> None:
    weight = torch.zeros(3, 32)
    weight[0, :16] = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    weight[0, 16:24] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6])
    # Groups of 1/448 and of 2^-9/448 of the largest, which is 6 * 448.
    weight[1, 0], weight[1, 16] = 2688.0, 6 * 2.0**-9
    weight[2, 0] = 6 * 2.0**-11
    form = NVFP4.format
    absmax = group_absmax(weight, form.group)
    divisor = group_global_scale(absmax.amax(), form)
    assert divisor.item() == 1.0
    scale = group_scale(absmax, form, divisor)
    assert scale.tolist() == [[1, 1], [448, 2.0**-9], [2.0**-9, 1]]
    stored = stored_scale(scale, form, (3, 32), divisor)
    assert stored.view(torch.uint8).tolist() == [[0x38, 0x38], [0x7E, 0x01], [0x01, 0x38]]
    assert form.encode_scales(scale.numpy(), divisor.numpy()).tolist() == stored.view(torch.uint8).tolist()
    codes = encode(weight, scale, form)
    assert bytes(codes[0].tolist()).hex(" ") == "10 32 54 76 98 ba dc fe 20 42 64 f6 00 00 00 00"
    assert codes[1].tolist() == [7, *[0] * 7, 7, *[0] * 7]
    # A quarter of the least scale: 1.5.
    assert codes[2].tolist() == [3, *[0] * 15]


def test_divisors_are_finite() -> None:
    for largest, divisor in ((0.0, 1.0), (1e-45, 2.0**125), (2.0**-110, 2688 * 2.0**110)):
        assert NVFP4.format.choose_global_scale(np.float32([largest])).tolist() == [divisor]
        assert MXFP4.format.choose_global_scale(np.float32([largest])).tolist() == [1]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 4), more=st.floats(1, 8))
def test_fp4_is_what_compressed_tensors_packs(seed: int, spread: float, more: float) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
    weight = weight * weight.abs() ** spread
    # The largest weight of the joined layers may be another's.
    largest = weight.abs().amax() * more
    for scheme in (NVFP4, MXFP4):
        form = scheme.format
        groups = weight.view(64, -1, form.group[1])
        arguments = QuantizationConfig.model_validate(scheme.config([])).config_groups["group_0"]
        divisor = generate_gparam(-largest, largest) if scheme is NVFP4 else None
        theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments.weights, global_scale=divisor)
        state = {"weight": weight, "weight_scale": theirs}
        if scheme is NVFP4:
            # Where it rounds a scale to zero, it takes 1/8; we take the least there is.
            least = torch.where(groups.abs().amax(-1) / 6 * divisor > 2.0**-10, theirs, 2.0**-9)
            state |= {"weight_scale": least, "weight_global_scale": divisor}
            assert torch.equal(group_global_scale(largest, form).reshape(1), divisor)
        packed = BaseCompressor.get_value_from_registry(STORED[scheme]).compress(state, arguments)
        scale = group_scale(group_absmax(weight, form.group), form, divisor)
        stored = stored_scale(scale, form, (64, 128), divisor)
        assert torch.equal(stored.view(torch.uint8), packed["weight_scale"].view(torch.uint8)), scheme.suffix
        assert torch.equal(encode(weight, scale, form), packed["weight_packed"]), scheme.suffix
