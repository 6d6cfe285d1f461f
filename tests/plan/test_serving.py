"""What it takes to serve, against figures worked out by hand for published checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openquant.files.checkpoint import Checkpoint
from openquant.formats.schemes import TENSOR
from openquant.plan import summary
from openquant.plan.plan import make_plain_plan, make_plan
from openquant.plan.serving import OVERHEAD, UTILIZATION, CachedLayers, Fit, SequenceMemory, Serving
from support.published_checkpoints import published, with_few_experts
from support.rows import for_each

MAMBA = {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128}
DELTA = {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
KDA = {"linear_attn_config": {"num_heads": 32, "head_dim": 128}}
GLOBAL = {"attention_k_eq_v": True, "sliding_window": 1024}
SCOUT = {"num_hidden_layers": 48, "attention_chunk_size": 8192, "max_position_embeddings": 10485760}


def with_config(checkpoint: Checkpoint, **more: Any) -> Checkpoint:
    """The same with more in the language model's part of config.json."""
    inner = checkpoint.config.get("text_config")
    config = {**checkpoint.config, **({"text_config": {**inner, **more}} if isinstance(inner, dict) else more)}
    return replace(checkpoint, config=config)


def served(checkpoint: Checkpoint, **more: Any) -> Serving:
    """The output of the default scheme."""
    found = summary.serving(make_plan(with_config(checkpoint, **more), TENSOR))
    assert found is not None
    return found[1]


@for_each(("names", "more", "token", "sequence"), [
    # Layers x (keys and values) x heads x numbers of a head x bytes.
    ("Qwen3ForCausalLM", {}, 28 * 2 * 8 * 128 * 2, 0),
    # Asked for by a key that says no.
    ("Qwen2ForCausalLM", {"sliding_window": 131072, "use_sliding_window": False}, 48 * 2 * 8 * 128 * 2, 0),
    ("Qwen2ForCausalLM", {"sliding_window": 131072}, 48 * 2 * 8 * 128 * 2, 0),
    # One tensor holds queries, keys and values.
    ("Phi3ForCausalLM", {}, 40 * 2 * 10 * 128 * 2, 0),
    # Latent attention: one vector of 512 + 64 for all heads, draft layers left out.
    ("DeepseekV3ForCausalLM", {}, 61 * 576 * 2, 0),
    ("GlmMoeDsaForCausalLM", {}, 78 * (576 * 2 + 132), 0),
    # All layers have a window, and none grows.
    ("MistralForCausalLM", {"sliding_window": 4096}, 0, 40 * 2 * 8 * 128 * 2 * 4096),
    # Every other layer, the second one not.
    ("Gemma2ForCausalLM", {"sliding_window": 4096}, 13 * 2 * 4 * 256 * 2, 13 * 2 * 4 * 256 * 2 * 4096),
    # Five of six, of 34 layers 29.
    ("Gemma3ForConditionalGeneration", {"sliding_window": 1024}, 5 * 2 * 4 * 256 * 2, 29 * 4096 * 1024),
    # Layers that attend to everything have no projection of values, and 4 heads of 512.
    ("Gemma4ForConditionalGeneration", GLOBAL, 10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2 * 1024),
    # The last 20 read what earlier ones keep: 12 with a window, 3 that attend to everything are left of 35.
    ("Gemma4ForCausalLM", {"sliding_window": 512, "num_kv_shared_layers": 20,
     "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}, 3 * 2 * 512 * 2, 12 * 2 * 256 * 2 * 512),
    # Three of four attend to a chunk.
    ("Llama4ForConditionalGeneration", SCOUT, 12 * 2 * 8 * 128 * 2, 36 * 4096 * 8192),
    ("Llama4ForConditionalGeneration", {**SCOUT, "no_rope_layers": [1] * 47 + [0]}, 1 * 2 * 8 * 128 * 2,
     47 * 4096 * 8192),
    # Layers of four letters, and of a number.
    ("Exaone4ForCausalLM", {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, 16 * 4096, 48 * 4096 * 4096),
    ("Cohere2ForCausalLM", {"sliding_window": 4096, "sliding_window_pattern": 2}, 16 * 4096, 16 * 4096 * 4096),
    # A state of each sequence: three inputs of a convolution, and a matrix for each head.
    ("Qwen3NextForCausalLM", DELTA, 12 * 2 * 2 * 256 * 2, 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 2)),
    ("Qwen3NextForCausalLM", {**DELTA, "mamba_ssm_dtype": "float32"}, 12 * 2 * 2 * 256 * 2,
     36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
    ("NemotronHForCausalLM", MAMBA, 6 * 2 * 256 * 2, 23 * (3 * 6144 * 2 + 64 * 64 * 128 * 4)),
    # Counted inside linear_attn_config; the seven others keep a vector of 512 + 64.
    ("KimiLinearForCausalLM", KDA, 7 * 576 * 2, 20 * (3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4)),
    # The index keeps a key of 128 numbers for four tokens.
    ("Qwen4ExpForCausalLM", {**DELTA, "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32"},
     12 * (2 * 2 * 256 * 2 + 64), 36 * (3 * 10240 * 2 + 48 * 128 * 128 * 4)),
    # The second time through its layers a token is kept while it is in a window.
    ("IQuestLoopCoderForCausalLM", {"loop_window_size": 64}, 80 * 2 * 8 * 128 * 2, 80 * 2 * 8 * 128 * 2 * 64),
    # A state without a convolution.
    ("BailingMoeV2_5ForCausalLM", {"head_dim": 128}, 4 * 576 * 2, 28 * 32 * 128 * 128 * 2),
    ("Lfm2ForCausalLM", {}, 6 * 2 * 512 * 2, 10 * 2 * 2048 * 2),
    # Two attentions in a layer.
    ("LongcatFlashForCausalLM", {}, 28 * 2 * 576 * 2, 0),
    # A token goes twice through one stack, six times through the other.
    ("HrmTextForCausalLM", {"H_cycles": 2, "L_cycles": 3}, 16 * (2 + 6) * 2 * 1536 * 2, 0),
])  # fmt: skip
def test_what_is_kept_of_a_sequence(names: str, more: dict[str, Any], token: int, sequence: int) -> None:
    cache = served(with_few_experts(names), **more).cache
    assert cache is not None
    assert (cache.per_token(False), cache.per_sequence(False)) == (token, sequence)


def test_a_cache_in_fp8_takes_half_but_where_a_kernel_has_a_layout_of_its_own() -> None:
    for names, fp8 in (("Qwen3ForCausalLM", 57344), ("DeepseekV3ForCausalLM", 61 * 576)):
        cache = served(with_few_experts(names)).cache
        assert cache is not None
        assert cache.per_token(True) == fp8
    # 512 codes, 4 scales of 4 bytes and 64 numbers of 2; of the index 128 codes and a scale.
    cache = served(with_few_experts("DeepseekV32ForCausalLM")).cache
    assert cache is not None
    assert cache.per_token(True) == 61 * (512 + 16 + 128 + 128 + 4)
    # A state is not rounded.
    cache = served(with_few_experts("Qwen3NextForCausalLM"), **DELTA).cache
    assert cache is not None
    assert cache.per_sequence(True) == cache.per_sequence(False) == cache.state


@for_each(("names", "more", "why"), [
    ("Qwen3NextForCausalLM", {}, "the size of a state"),
    ("Qwen3NextForCausalLM", {**DELTA, "mamba_ssm_dtype": "int3"}, "the size of a state"),
    ("Qwen3NextForCausalLM", {**DELTA, "linear_key_head_dim": 10**40}, "the size of a state"),
    ("KimiLinearForCausalLM", {"linear_attn_config": 3}, "the size of a state: config.json's linear_attn_config.num"),
    ("Gemma4ForConditionalGeneration", {"sliding_window": 1024, "attention_k_eq_v": None}, "keys and no values"),
    ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": True}, "which layers have a window"),
    ("MistralForCausalLM", {"sliding_window": "wide"}, "config.json's sliding_window is 'wide'"),
    ("MistralForCausalLM", {"sliding_window": -1}, "config.json's sliding_window is -1"),
    ("Gemma2ForCausalLM", {"layer_types": ["sliding_attention"] * 26}, "config.json's sliding_window is None"),
    ("Phi3ForCausalLM", {"num_key_value_heads": None}, "does not count its heads"),
    ("HrmTextForCausalLM", {"L_cycles": 3}, "how often a token runs through a layer: config.json's H_cycles"),
])  # fmt: skip
def test_what_is_not_known_is_not_guessed(names: str, more: dict[str, Any], why: str) -> None:
    found = served(with_few_experts(names), **more)
    assert found.cache is None
    assert why in (found.unknown or "")
    assert found.weights_bytes > 10**8
    assert all((fit.tokens_bf16, fit.tokens_fp8) == (None, None) for fit in found.fits)
    assert found.to_json()["kv_bytes_per_token"] is None


def test_source_and_output_differ_by_their_weights() -> None:
    plan = make_plan(published("Qwen3ForCausalLM"), TENSOR)
    assert summary.serving(plan) is not None
    source, output = summary.serving(plan)
    assert (source.weights_bytes, output.weights_bytes) == (summary.source_bytes(plan), summary.output_bytes(plan))
    assert source.cache == output.cache
    # Draft layers are not loaded.
    plan = make_plan(with_few_experts("GlmMoeDsaForCausalLM"), TENSOR)
    assert summary.serving(plan) is not None
    drafts = sum(line.bytes_after for line in plan.lines if line.why == "MTP layer")
    assert drafts > 0
    assert summary.serving(plan)[1].weights_bytes == summary.output_bytes(plan) - drafts
    # A plan that dequantizes says nothing.
    assert summary.serving(make_plain_plan(with_few_experts("quantized/DeepseekV3ForCausalLM"))) is None


def test_gpus_and_tokens() -> None:
    found = served(with_few_experts("Qwen3ForCausalLM"), max_position_embeddings=40960)
    room = int(24e9 * UTILIZATION) - OVERHEAD - found.weights_bytes
    assert found.fits[0] == Fit(24, 1, room // 114688, room // 57344)
    plan = make_plan(with_config(published("DeepseekV3ForCausalLM"), max_position_embeddings=163840), TENSOR)
    assert summary.serving(plan) is not None
    deepseek = summary.serving(plan)[1]
    assert [(fit.gpu_gb, fit.gpus) for fit in deepseek.fits] == [
        (24, None), (48, None), (80, None), (96, 8), (141, 8), (192, 4),
    ]  # fmt: skip
    json = deepseek.to_json()
    assert json["kv_bytes_per_token"] == {"bf16": 70272, "fp8": 35136}
    assert json["fits"][0] == {"gpu_gb": 24, "gpus": None, "tokens_bf16": None, "tokens_fp8": None}


FULL = CachedLayers(4096, 2048, None, 8)
NEAR = CachedLayers(4096, 2048, 1024, 8)


@for_each(("layers", "state", "length", "gpus", "tokens"), [
    ((FULL,), 0, None, 1, 1_000_000_000 // 4096),
    ((FULL,), 0, 40960, 1, 1_000_000_000 // 4096),
    # Two ranks have half the heads each; 16 have one head each, as 8.
    ((FULL,), 0, None, 2, 1_000_000_000 // 2048),
    ((FULL,), 0, None, 16, 1_000_000_000 // 512),
    # What every rank keeps in whole.
    ((replace(FULL, heads=1),), 0, None, 8, 1_000_000_000 // 4096),
    # Sequences of 40960 tokens, each with a full window and a state.
    ((FULL, NEAR), 10**6, 40960, 1, 1_000_000_000 * 40960 // (4096 * 40960 + 4096 * 1024 + 10**6)),
    # One that is shorter than the model allows.
    ((FULL, NEAR), 0, 10**6, 1, (1_000_000_000 - 4096 * 1024) // 4096),
    ((FULL,), 999_999_999, 10**6, 1, 0),
    ((FULL,), 2_000_000_000, 10**6, 1, 0),
])  # fmt: skip
def test_tokens_of_a_cache(
    layers: tuple[CachedLayers, ...], state: int, length: int | None, gpus: int, tokens: int
) -> None:
    assert SequenceMemory(layers, state, length).tokens(1_000_000_000, False, gpus) == tokens


def test_gpus_share_only_heads_that_are_counted() -> None:
    known, unknown = (CachedLayers(4, 2, None, heads) for heads in (8, None))
    for layers, divided in (((known,), True), ((known, unknown), False)):
        memory = SequenceMemory(layers, 0, None)
        assert memory.divides(1) and memory.divides(2) == divided
