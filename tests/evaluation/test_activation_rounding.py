"""Activations, keys and values rounded as engines round them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Llama4TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from openquant.errors import UsageError
from openquant.evaluation.as_served import (
    SMALLEST_SCALE,
    ActivationRounding,
    ClippedCount,
    Fp8Cache,
    GrowingFp8Cache,
    QuantizedInputs,
    refuse_latent_cache,
    round_activations,
)
from openquant.formats.format import ActivationQuantization, Format, Scale
from openquant.formats.numbers import E2M1, E4M3, INT8, Number
from openquant.formats.reference import decode, encode, group_absmax, round_values
from openquant.formats.schemes import NVFP4_W4A4
from openquant.streaming.interleaved import ExpertWeights

TOKEN, TENSOR, INT8_TOKEN = (
    ActivationQuantization(E4M3, (1, None)),
    ActivationQuantization(E4M3, (None, None)),
    ActivationQuantization(INT8, (1, None)),
)
LOCAL = ActivationQuantization(E2M1, (1, 16), has_global_scale=True)
STATIC = ActivationQuantization(E4M3, (None, None), static=True)


def values(*shape: int) -> torch.Tensor:
    """Some tokens far larger than others, one all zero."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    made *= torch.logspace(-3, 3, shape[-2])[:, None]
    made[..., 1, :] = 0
    return made.bfloat16()


def fp8(value: float, scale: float) -> float:
    return float(torch.tensor(max(-448.0, min(448.0, value / scale))).to(torch.float8_e4m3fn)) * scale


def int8(value: float, scale: float) -> float:
    return max(-127, min(127, round(value / scale))) * scale


def scale_of(part: list[float], largest: float, power_of_two: bool = False) -> float:
    absmax = max(map(abs, part))
    scale = max(absmax / largest, SMALLEST_SCALE) if absmax else 1.0
    return 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale


def plainly(x: torch.Tensor, inputs: ActivationQuantization, static: float = 0.0) -> torch.Tensor:
    """Value by value."""
    number = fp8 if inputs.number == E4M3 else int8
    flat = x.double().reshape(-1, x.shape[-1]).tolist()
    whole = [value for row in flat for value in row]
    made = []
    for row in flat:
        width = inputs.group[1] or len(row)
        for low in range(0, len(row), width):
            part = row[low : low + width]
            shared = part if inputs.group[0] == 1 else whole
            scale = static or scale_of(shared, inputs.number.largest, inputs.power_of_two)
            made += [number(value, scale) for value in part]
    return torch.tensor(made).reshape(x.shape).to(x.dtype)


# The last group of 300 is smaller.
def test_values_are_those_of_a_plain_implementation(subtests: pytest.Subtests) -> None:
    for width in [256, 300]:
        for inputs in [
            TOKEN,
            TENSOR,
            INT8_TOKEN,
            ActivationQuantization(E4M3, (1, 128)),
            ActivationQuantization(E4M3, (1, 128), power_of_two=True),
            ActivationQuantization(E4M3, (1, 32), power_of_two=True),
        ]:
            with subtests.test(width=width, inputs=inputs):
                x = values(2, 5, width)
                found = round_activations(x, inputs)
                assert (found.dtype, found.shape) == (x.dtype, x.shape)
                # The scale is a float32 here: a value between two codes may go either way.
                torch.testing.assert_close(found, plainly(x, inputs), rtol=2**-7, atol=0)
                assert (found != plainly(x, inputs)).float().mean() < 0.01


@pytest.mark.parametrize("number", [E4M3, INT8])
def test_no_codes_are_needed(number: Number) -> None:
    x = torch.cat([values(64, 256).float(), torch.tensor([[1e30, -1e30, 0.0, -0.0] * 64])])
    for group in [(1, None), (None, None), (1, 128)]:
        fmt = Format(number, group, Scale(""))
        scale = group_absmax(x, group).clamp(1e-6, 1e6) / number.largest
        assert torch.equal(round_values(x, scale, fmt), decode(encode(x, scale, fmt), scale, fmt))


def test_a_stored_scale_is_taken_as_it_is() -> None:
    x = values(2, 5, 64)
    torch.testing.assert_close(round_activations(x, STATIC, 0.5), plainly(x, STATIC, 0.5), rtol=2**-7, atol=0)
    assert round_activations(x.new_tensor([[1000.0, -1000.0]]), STATIC, 0.5).tolist() == [[224, -224]]


@pytest.mark.parametrize("global_scale", [0.25, 1.0, 300.0])
def test_fp4_under_a_stored_scale_is_what_compressed_tensors_makes_of_it(global_scale: float) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    x = values(2, 5, 64)
    args = QuantizationArgs.model_validate(NVFP4_W4A4.group["input_activations"])
    tokens, above = x.reshape(-1, 64).float(), torch.tensor([global_scale])
    grouped = tokens.unflatten(1, (4, 16))
    scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), args, global_scale=above)
    expected = fake_quantize(tokens, scale, zero, args, global_scale=above).reshape(x.shape).to(x.dtype)
    found = round_activations(x, LOCAL, global_scale)
    # It keeps the least scales from becoming 0.
    large = (x.abs() > 2.0**-6 / global_scale) | (x == 0)
    assert large.float().mean() > 0.5
    torch.testing.assert_close(found[large], expected[large], rtol=2**-7, atol=0)


def test_fp4_has_bounds_under_a_stored_scale() -> None:
    x = torch.zeros(3, 32)
    x[0, 0], x[1, 0], x[1, 1], x[2, 16] = 4000.0, 0.1, 0.02, 0.0029
    found = round_activations(x.bfloat16(), LOCAL, 1.0)
    assert (found[0, 0], LOCAL.largest(1.0), LOCAL.largest(4.0)) == (2688, 2688, 672)
    # 6 and 1 times 9/512.
    assert found[1, :2].tolist() == [0.10546875, 0.017578125]
    assert not found[2].any()


def test_layers_are_rounded_while_it_is_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    x = values(3, 64)
    asked: list[str] = []

    def scale() -> float:
        asked.append("scale")
        return 2.0

    plain = model(x)
    rounding = ActivationRounding(model, {"0": QuantizedInputs(TOKEN), "1": QuantizedInputs(STATIC, scale)}, {})
    assert torch.equal(model(x), plain)
    with rounding.on():
        assert torch.equal(model(x), model[1](round_activations(model[0](x), STATIC, 2.0)))
        assert torch.equal(
            model[0](input=x), nn.functional.linear(round_activations(x, TOKEN), model[0].weight, model[0].bias)
        )
    assert torch.equal(model(x), plain)
    assert asked == ["scale"]


def test_activations_beyond_a_stored_scale_are_counted_by_module() -> None:
    model, clipped = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ClippedCount()
    layers = {"0": QuantizedInputs(STATIC, lambda: 0.5), "1": QuantizedInputs(STATIC, lambda: 1.0)}
    rounding = ActivationRounding(model, layers, {}, clipped)
    # 224 is the largest that 0.5 holds.
    x = torch.tensor([[224.0, -224.0, 225.0, -300.0], [0.0, 1.0, 2.0, 1000.0]])
    with rounding.on():
        model[0](x)
        model[1](input=x)
    assert clipped.counts == {"0": (3, 8), "1": (1, 8)}
    assert clipped.largest(lambda place: isinstance(place, str)) == 3 / 8
    assert clipped.largest(lambda place: place == "1") == 1 / 8
    assert clipped.largest(lambda place: place == "2") is None
    clipped.merge({"1": (7, 8), "2": (0, 0)})
    assert clipped.counts == {"0": (3, 8), "1": (8, 16), "2": (0, 0)}


SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "vocab_size": 100, "pad_token_id": 0, "dtype": torch.bfloat16,
}  # fmt: skip


def test_stacked_experts_are_rounded_before_both_of_their_layers() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    model = Qwen3MoeForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    experts = model.model.layers[0].mlp.experts
    rounding = ActivationRounding(
        model, {}, {"model.layers.0.mlp.experts": ExpertWeights(QuantizedInputs(TOKEN), QuantizedInputs(INT8_TOKEN))}
    )
    x, index = values(6, 64), torch.tensor([[0, 2]] * 6)
    weights = torch.tensor([[0.75, 0.25]] * 6).bfloat16()
    with torch.inference_mode(), rounding.on():
        found = experts(x, index, weights)
        expected = torch.zeros(6, 64)
        for expert, share in ((0, 0.75), (2, 0.25)):
            gate, up = (round_activations(x, TOKEN) @ experts.gate_up_proj[expert].T).chunk(2, -1)
            down = round_activations(nn.functional.silu(gate) * up, INT8_TOKEN) @ experts.down_proj[expert].T
            expected += share * down.float()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    with torch.inference_mode():
        assert (experts(x, index, weights) - found).norm() > 0.01 * found.norm()


def test_experts_that_compute_in_a_way_of_their_own_are_rounded_too() -> None:
    """Llama 4's get all tokens for each expert, as zeros where it was not chosen."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 2}
    experts = Llama4TextExperts(Llama4TextConfig(**sizes)).bfloat16()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = nn.ModuleDict({"experts": experts})
    rounding = ActivationRounding(
        model, {}, {"experts": ExpertWeights(QuantizedInputs(TOKEN), QuantizedInputs(INT8_TOKEN))}
    )
    x = values(6, 64)
    x[3:] = 0
    with torch.inference_mode():
        plain = experts(x)
        with rounding.on():
            found = experts(x)
        gate, up = (round_activations(x[:3], TOKEN) @ experts.gate_up_proj[0]).chunk(2, -1)
        down = round_activations(up * nn.functional.silu(gate), INT8_TOKEN) @ experts.down_proj[0]
        again = experts(x)
    assert torch.equal(found, torch.cat([down, torch.zeros_like(down)]))
    assert torch.equal(again, plain)
    assert (found - plain).norm() > 0.01 * plain.norm()


def test_keys_and_values_are_rounded_and_kept_for_continuations_only() -> None:
    scales = {0: (1.0, 1.0), 1: (0.5, 4.0)}
    cache = Fp8Cache(Qwen3Config(**SMALL), scales.__getitem__)
    first, second = values(1, 1, 8, 32), values(1, 1, 3, 32)
    keys, held = cache.update(first, first, 1)
    assert torch.equal(keys, round_activations(first, STATIC, 0.5))
    assert torch.equal(held, round_activations(first, STATIC, 4.0))
    assert cache.get_seq_length() == 0

    growing = GrowingFp8Cache(Qwen3Config(**SMALL), scales.__getitem__)
    growing.update(first, first, 1)
    keys, held = growing.update(second, second, 1)
    for found, scale in ((keys, 0.5), (held, 4.0)):
        assert torch.equal(found, torch.cat([round_activations(each, STATIC, scale) for each in (first, second)], -2))
    assert growing.get_seq_length(1) == 11


def test_latent_attention_has_no_such_cache() -> None:
    config = Qwen3Config(**SMALL)
    refuse_latent_cache(config)
    config.kv_lora_rank = 512
    with pytest.raises(UsageError, match="multi-head latent attention"):
        refuse_latent_cache(config)


def test_what_several_layers_read_is_rounded_for_each_as_it_is_quantized() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkv"}).bfloat16()
    rounding = ActivationRounding(
        model, {"q": QuantizedInputs(TOKEN), "k": QuantizedInputs(TOKEN), "v": QuantizedInputs(INT8_TOKEN)}, {}
    )
    x = values(3, 64)
    with rounding.on():
        for name, inputs in (("q", TOKEN), ("k", TOKEN), ("v", INT8_TOKEN)):
            expected = nn.functional.linear(round_activations(x, inputs), model[name].weight, model[name].bias)
            assert torch.equal(model[name](x), expected)
