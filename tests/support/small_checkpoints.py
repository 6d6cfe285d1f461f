"""Small checkpoints made from a seed, with the real tensor names and a config.json that engines accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from openquant.formats.schemes import SCHEMES, Scheme
from openquant.models import MODELS
from openquant.plan.engines import find_refusal
from openquant.registry.architecture import Refusal
from openquant.streaming import transformers_internals
from support import small_models

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, EXPERTS = 256, 4, 2, 64, 512, 2, 4
VISION = 128

COMMON = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "bfloat16",
}
GEMMA_TEXT = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": HEAD_DIM,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
LLAMA4_TEXT = {
    "intermediate_size": 128,
    "intermediate_size_mlp": MLP,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "use_qk_norm": True,
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 512,
    "attn_temperature_tuning": True,
}

HAND_MADE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)
ARCHITECTURES = (*HAND_MADE, *small_models.MODELS)
# Those that transformers has.
STREAMED = (*HAND_MADE, *(name for name, small in small_models.MODELS.items() if small.streamed))
# Those of them that the installed release cannot run itself.
FAILING = tuple(
    name for name, release in transformers_internals.FAILING if version("transformers").startswith(f"{release}.")
)
RUNNABLE = tuple(name for name in STREAMED if name not in FAILING)


def config(architecture: str, vocab: int = 512) -> dict[str, Any]:
    """config.json of a small model."""
    common = {**COMMON, "vocab_size": vocab}
    if architecture in small_models.MODELS:
        return small_models.config(architecture, common)
    name = {"architectures": [architecture]}
    if architecture == "LlamaForCausalLM":
        return {**name, "model_type": "llama", **common, "mlp_bias": False}
    if architecture == "MistralForCausalLM":
        return {**name, "model_type": "mistral", **common, "sliding_window": None}
    if architecture == "Qwen3ForCausalLM":
        return {**name, "model_type": "qwen3", **common, "use_sliding_window": False, "sliding_window": None}
    if architecture == "Qwen3MoeForCausalLM":
        moe = {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        }
        return {**name, "model_type": "qwen3_moe", **common, **moe}
    if architecture == "Gemma3ForCausalLM":
        return {**name, "model_type": "gemma3_text", **common, **GEMMA_TEXT}
    if architecture == "Gemma3ForConditionalGeneration":
        vision = {
            "model_type": "siglip_vision_model",
            "hidden_size": VISION,
            "intermediate_size": 192,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        }
        text = {"model_type": "gemma3_text", **common, **GEMMA_TEXT}
        return {
            **name,
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": vision,
            "mm_tokens_per_image": 4,
            "boi_token_index": 5,
            "eoi_token_index": 6,
            "image_token_index": 7,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }
    if architecture == "Llama4ForCausalLM":
        return {**name, "model_type": "llama4_text", **common, **LLAMA4_TEXT}
    if architecture == "Llama4ForConditionalGeneration":
        vision = {
            "model_type": "llama4_vision_model",
            "hidden_size": VISION,
            "intermediate_size": 4 * VISION,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": VISION,
            "projector_output_dim": VISION,
            "vision_output_dim": VISION,
        }
        text = {"model_type": "llama4_text", **common, **LLAMA4_TEXT}
        return {
            **name,
            "model_type": "llama4",
            "text_config": text,
            "vision_config": vision,
            "boi_token_index": 5,
            "eoi_token_index": 6,
            "image_token_index": 7,
            "dtype": "bfloat16",
        }
    raise KeyError(architecture)


def shapes(architecture: str, vocab: int = 512) -> dict[str, tuple[int, ...]]:
    """Every tensor of a small model, in the order of the real files."""
    if architecture in small_models.MODELS:
        return small_models.shapes(architecture, json.dumps(config(architecture, vocab)))
    wrapped = architecture.endswith("ForConditionalGeneration")
    model = "language_model.model" if wrapped else "model"
    found: dict[str, tuple[int, ...]] = {f"{model}.embed_tokens.weight": (vocab, HIDDEN)}
    gemma, llama4 = architecture.startswith("Gemma3"), architecture.startswith("Llama4")
    for number in range(LAYERS):
        layer = f"{model}.layers.{number}"
        found[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        found[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        if gemma:
            found[f"{layer}.pre_feedforward_layernorm.weight"] = (HIDDEN,)
            found[f"{layer}.post_feedforward_layernorm.weight"] = (HIDDEN,)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{layer}.self_attn.{part}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if gemma or architecture.startswith("Qwen3"):
            found[f"{layer}.self_attn.q_norm.weight"] = (HEAD_DIM,)
            found[f"{layer}.self_attn.k_norm.weight"] = (HEAD_DIM,)
        if number == 1 and llama4:
            found[f"{layer}.feed_forward.router.weight"] = (EXPERTS, HIDDEN)
            found[f"{layer}.feed_forward.experts.gate_up_proj"] = (EXPERTS, HIDDEN, 256)
            found[f"{layer}.feed_forward.experts.down_proj"] = (EXPERTS, 128, HIDDEN)
            _mlp(found, f"{layer}.feed_forward.shared_expert", 128)
        elif number == 1 and architecture == "Qwen3MoeForCausalLM":
            found[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                _mlp(found, f"{layer}.mlp.experts.{expert}", 128)
        else:
            _mlp(found, f"{layer}.{'feed_forward' if llama4 else 'mlp'}", MLP)
    found[f"{model}.norm.weight"] = (HIDDEN,)
    if not gemma:
        found["language_model.lm_head.weight" if wrapped else "lm_head.weight"] = (vocab, HIDDEN)
    if wrapped:
        found |= _gemma3_vision() if gemma else _llama4_vision()
    return found


def _mlp(found: dict[str, tuple[int, ...]], path: str, size: int) -> None:
    found[f"{path}.gate_proj.weight"] = (size, HIDDEN)
    found[f"{path}.up_proj.weight"] = (size, HIDDEN)
    found[f"{path}.down_proj.weight"] = (HIDDEN, size)


def _gemma3_vision() -> dict[str, tuple[int, ...]]:
    tower = "vision_tower.vision_model"
    layer = f"{tower}.encoder.layers.0"
    found: dict[str, tuple[int, ...]] = {
        f"{tower}.embeddings.patch_embedding.weight": (VISION, 3, 14, 14),
        f"{tower}.embeddings.patch_embedding.bias": (VISION,),
        f"{tower}.embeddings.position_embedding.weight": (16, VISION),
        f"{tower}.post_layernorm.weight": (VISION,),
        f"{tower}.post_layernorm.bias": (VISION,),
        f"{layer}.mlp.fc1.weight": (192, VISION),
        f"{layer}.mlp.fc1.bias": (192,),
        f"{layer}.mlp.fc2.weight": (VISION, 192),
        f"{layer}.mlp.fc2.bias": (VISION,),
        "multi_modal_projector.mm_input_projection_weight": (VISION, HIDDEN),
        "multi_modal_projector.mm_soft_emb_norm.weight": (VISION,),
    }
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found[f"{layer}.self_attn.{part}.weight"] = (VISION, VISION)
        found[f"{layer}.self_attn.{part}.bias"] = (VISION,)
    for norm in ("layer_norm1", "layer_norm2"):
        found[f"{layer}.{norm}.weight"] = (VISION,)
        found[f"{layer}.{norm}.bias"] = (VISION,)
    return found


def _llama4_vision() -> dict[str, tuple[int, ...]]:
    layer = "vision_model.model.layers.0"
    found: dict[str, tuple[int, ...]] = {
        "vision_model.class_embedding": (VISION,),
        "vision_model.patch_embedding.linear.weight": (VISION, 3 * 14 * 14),
        "vision_model.positional_embedding_vlm": (17, VISION),
        f"{layer}.mlp.fc1.weight": (4 * VISION, VISION),
        f"{layer}.mlp.fc1.bias": (4 * VISION,),
        f"{layer}.mlp.fc2.weight": (VISION, 4 * VISION),
        f"{layer}.mlp.fc2.bias": (VISION,),
        "vision_model.vision_adapter.mlp.fc1.weight": (VISION, 4 * VISION),
        "vision_model.vision_adapter.mlp.fc2.weight": (VISION, VISION),
        "multi_modal_projector.linear_1.weight": (HIDDEN, VISION),
    }
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        found[f"{layer}.self_attn.{part}.weight"] = (VISION, VISION)
        found[f"{layer}.self_attn.{part}.bias"] = (VISION,)
    for norm in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        found[f"{norm}.weight"] = (VISION,)
        found[f"{norm}.bias"] = (VISION,)
    for norm in ("layernorm_pre", "layernorm_post"):
        found[f"vision_model.{norm}.weight"] = (VISION,)
        found[f"vision_model.{norm}.bias"] = (VISION,)
    return found


def tensors(architecture: str, seed: int = 0, dtype: str = "bfloat16", vocab: int = 512) -> dict[str, torch.Tensor]:
    """Random weights; norms near one (Gemma's near zero, which it adds one to)."""
    generator = torch.Generator().manual_seed(seed)
    zero_norms = (
        small_models.MODELS[architecture].zero_norms
        if architecture in small_models.MODELS
        else architecture.startswith("Gemma3")
    )
    centre = 0.0 if zero_norms else 1.0
    indices = small_models.MODELS[architecture].indices if architecture in small_models.MODELS else {}
    found = {}
    for name, shape in shapes(architecture, vocab).items():
        value = torch.randn(shape, generator=generator) * 0.05
        if "norm" in name and len(shape) == 1 and name.endswith("weight"):
            value += centre
        found[name] = value.to(getattr(torch, dtype))
    if architecture in small_models.MODELS:
        found |= small_models.constants(architecture, json.dumps(config(architecture, vocab)))
    for name, below in ((name, below) for name in found for end, below in indices.items() if name.endswith(end)):
        rows, chosen = found[name].shape
        found[name] = torch.rand(rows, below, generator=generator).argsort(-1)[:, :chosen].contiguous()
    return found


def write(
    root: Path,
    architecture: str = "Qwen3ForCausalLM",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "bfloat16",
    vocab: int = 512,
    weights: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A checkpoint directory. Several shards take tensors in turn, so joined layers lie in different ones."""
    root.mkdir(parents=True, exist_ok=True)
    weights = weights if weights is not None else tensors(architecture, seed, dtype, vocab)
    (root / "config.json").write_text(json.dumps(config(architecture, vocab), indent=2))
    (root / "generation_config.json").write_text('{"eos_token_id": 0}\n')
    if shards == 1:
        save_file(weights, root / "model.safetensors", {"format": "pt"})
        return root
    placed: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {tensor: weights[tensor] for tensor in list(weights)[number::shards]}
        save_file(part, root / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return root


def read(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by the safetensors library."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def change_weights(root: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a directory in place; new ones go into its last file."""
    shards = {path: load_file(path) for path in sorted(root.glob("*.safetensors"))}
    weights = {name: tensor for held in shards.values() for name, tensor in held.items()}
    change(weights)
    placed = {name: path for path, held in shards.items() for name in held}
    last = list(shards)[-1]
    for path in shards:
        held = {name: tensor for name, tensor in weights.items() if placed.setdefault(name, last) == path}
        save_file(held, path, {"format": "pt"})
    index = root / "model.safetensors.index.json"
    if index.exists():
        found = json.loads(index.read_text())
        found["weight_map"] = {name: placed[name].name for name in weights}
        index.write_text(json.dumps(found))


def write_layers(root: Path, layers: int, vocab: int = 512) -> Path:
    """A Qwen3 of so many layers, which are alike."""
    weights = tensors("Qwen3ForCausalLM", vocab=vocab)
    first = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.")}
    weights = {name: weight for name, weight in weights.items() if not name.startswith("model.layers.1.")}
    for number in range(layers):
        weights |= {name.replace(".0.", f".{number}.", 1): weight.clone() for name, weight in first.items()}
    write(root, weights=weights, vocab=vocab)
    config_file = root / "config.json"
    sizes = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | sizes))
    return root


def changed_copy(root: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a directory with its tensors changed."""
    out.mkdir()
    for path in root.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    change_weights(out, change)
    return out


def read_names(path: Path) -> set[str]:
    """The tensor names of one file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return set(file.keys())


def served_in(name: str, *schemes: str) -> Scheme:
    """The first of these schemes that an architecture can be served in."""
    return next(SCHEMES[scheme] for scheme in schemes if refused(name, SCHEMES[scheme]) is None)


def refused(name: str, scheme: Scheme) -> Refusal | None:
    """Why an architecture cannot be served in a scheme; None if it can."""
    return find_refusal(MODELS[name].refused, scheme)
