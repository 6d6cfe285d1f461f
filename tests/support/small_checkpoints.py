"""Small checkpoints made from a seed, with the real tensor names and a config.json that engines accept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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

# Their shapes are written here: most tests want these models, and transformers takes seconds to import.
HAND_MADE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Llama4ForCausalLM",
)
# Those of the first release.
FIRST = (*HAND_MADE, "Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration")
ARCHITECTURES = tuple(small_models.MODELS)
# Those that transformers has.
STREAMED = tuple(name for name, small in small_models.MODELS.items() if small.streamed)
# Those of them that the installed release cannot run itself.
FAILING = tuple(
    name for name, release in transformers_internals.FAILING if version("transformers").startswith(f"{release}.")
)
RUNNABLE = tuple(name for name in STREAMED if name not in FAILING)


def config(architecture: str, vocab: int = 512) -> dict[str, Any]:
    """config.json of a small model."""
    return small_models.config(architecture, {**COMMON, "vocab_size": vocab})


def shapes(architecture: str, vocab: int = 512) -> dict[str, tuple[int, ...]]:
    """Every tensor of a small model, in the order of the real files."""
    if architecture not in HAND_MADE:
        return small_models.shapes(architecture, json.dumps(config(architecture, vocab)))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    gemma, llama4 = architecture.startswith("Gemma3"), architecture.startswith("Llama4")
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
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
    found["model.norm.weight"] = (HIDDEN,)
    if not gemma:
        found["lm_head.weight"] = (vocab, HIDDEN)
    return found


def _mlp(found: dict[str, tuple[int, ...]], path: str, size: int) -> None:
    found[f"{path}.gate_proj.weight"] = (size, HIDDEN)
    found[f"{path}.up_proj.weight"] = (size, HIDDEN)
    found[f"{path}.down_proj.weight"] = (HIDDEN, size)


def tensors(architecture: str, seed: int = 0, dtype: str = "bfloat16", vocab: int = 512) -> dict[str, torch.Tensor]:
    """Random weights; norms near one (Gemma's near zero, which it adds one to)."""
    generator, small = torch.Generator().manual_seed(seed), small_models.MODELS[architecture]
    centre = 0.0 if small.zero_norms else 1.0
    found = {}
    for name, shape in shapes(architecture, vocab).items():
        value = torch.randn(shape, generator=generator) * 0.05
        if "norm" in name and len(shape) == 1 and name.endswith("weight"):
            value += centre
        found[name] = value.to(getattr(torch, dtype))
    if architecture not in HAND_MADE:
        found |= small_models.constants(architecture, json.dumps(config(architecture, vocab)))
    for name, below in ((name, below) for name in found for end, below in small.indices.items() if name.endswith(end)):
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
    names = list(weights)
    write_shards(root, [{name: weights[name] for name in names[number::shards]} for number in range(shards)])
    return root


def write_shards(root: Path, parts: Sequence[dict[str, torch.Tensor]]) -> None:
    """Write these tensors to a shard each, and the index."""
    placed: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, root / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    total = sum(weight.nbytes for part in parts for weight in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


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


def served_in(name: str, *schemes: str) -> Scheme:
    """The first of these schemes that an architecture can be served in."""
    return next(SCHEMES[scheme] for scheme in schemes if refused(name, SCHEMES[scheme]) is None)


def refused(name: str, scheme: Scheme) -> Refusal | None:
    """Why an architecture cannot be served in a scheme; None if it can."""
    return find_refusal(MODELS[name].refused, scheme)
