"""What an entry of the registry says of a module."""

from __future__ import annotations

from openquant.models import GENERIC, MODELS
from openquant.registry.architecture import HEAD, ModuleRules, is_head


def test_a_set_may_reach_into_a_submodule() -> None:
    """The index over the tokens is a part of the layer that q, k and v are joined to."""
    entry = ModuleRules(MODELS["Qwen4ExpForCausalLM"])
    names = ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")
    third, seventh = (tuple(f"model.layers.{layer}.self_attn.{name}" for name in names) for layer in (3, 7))
    sets = entry.fused_groups([*third, *seventh, "model.layers.3.self_attn.o_proj"])
    assert sets == {**dict.fromkeys(third, third), **dict.fromkeys(seventh, seventh)}
    assert "model.layers.3.self_attn.qkv_proj" in entry.engine_names([third[3]])


def test_a_prefix_may_have_a_number_in_it() -> None:
    """Of a layer of Whisper's vLLM has the number, and then one more name."""
    model = MODELS["MossTranscribeDiarizeForConditionalGeneration"]
    layer, engine = "model.whisper_encoder.layers.12", "whisper_encoder.layers.12.layers"
    for name, other in {"self_attn.q_proj": "self_attn.q_proj", "fc1": "mlp.fc1"}.items():
        assert model.names_of(f"{layer}.{name}") == [f"{layer}.{name}", f"{engine}.{other}"]
    for name in ("model.whisper_encoder.conv1", "model.whisper_encoder.layers.x.fc1", "model.whisper_encoder.layers.1"):
        assert model.names_of(name) == [name]


def test_a_module_that_patterns_contradict_each_other_of_says_so() -> None:
    assert ModuleRules(GENERIC).rule("model.layers.0.mlp.up_proj").patterns == 1
    assert ModuleRules(GENERIC).rule("model.layers.0.something").patterns == 0
    head = ModuleRules(MODELS["Qwen3ForCausalLM"]).rule("lm_head")
    assert (head.patterns, head.keep, head.compress) == (1, "output head", False)
    with_head = ModuleRules(MODELS["Qwen3ForCausalLM"].with_quantized(HEAD)).rule("lm_head")
    assert (with_head.patterns, with_head.keep, with_head.compress) == (1, None, True)
    assert is_head("language_model.lm_head")
    assert not is_head("model.lm_head_norm")
