"""Write a synthetic checkpoint with the names and shapes of a published model: random bfloat16, safetensors shards.

python benchmarks/make_checkpoint.py qwen3-8b --layers 12 DIR
python benchmarks/make_checkpoint.py qwen3-30b-a3b --headers-only --layers 1000 DIR     (sparse: no data on disk)
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHARD_BYTES = 5_000_000_000
POOL = 1 << 25


@dataclass(frozen=True)
class Shape:
    """Sizes of a published model, from its config.json."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    head_dim: int = 128
    experts: int = 0
    expert_mlp: int = 0
    qk_norm: bool = True


MODELS = {
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", "qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True),
    "qwen3-1.7b": Shape("Qwen3ForCausalLM", "qwen3", 28, 2048, 6144, 16, 8, 151936, tied=True),
    "qwen3-8b": Shape("Qwen3ForCausalLM", "qwen3", 36, 4096, 12288, 32, 8, 151936),
    "qwen3-32b": Shape("Qwen3ForCausalLM", "qwen3", 64, 5120, 25600, 64, 8, 151936),
    "qwen3-30b-a3b": Shape(
        "Qwen3MoeForCausalLM", "qwen3_moe", 48, 2048, 6144, 32, 4, 151936, experts=128, expert_mlp=768
    ),
    "qwen3-235b-a22b": Shape(
        "Qwen3MoeForCausalLM", "qwen3_moe", 94, 4096, 12288, 64, 4, 151936, experts=128, expert_mlp=1536
    ),
    "llama3-8b": Shape("LlamaForCausalLM", "llama", 32, 4096, 14336, 32, 8, 128256, qk_norm=False),
}


def tensors(shape: Shape, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape."""
    hidden = shape.hidden
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for number in range(layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{layer}.self_attn.{part}_proj.weight", (heads * shape.head_dim, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, shape.heads * shape.head_dim)
        if shape.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        blocks = [(f"{layer}.mlp", shape.mlp)]
        if shape.experts:
            yield f"{layer}.mlp.gate.weight", (shape.experts, hidden)
            blocks = [(f"{layer}.mlp.experts.{expert}", shape.expert_mlp) for expert in range(shape.experts)]
        for path, size in blocks:
            yield f"{path}.gate_proj.weight", (size, hidden)
            yield f"{path}.up_proj.weight", (size, hidden)
            yield f"{path}.down_proj.weight", (hidden, size)
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def config(shape: Shape, layers: int) -> dict[str, object]:
    """config.json."""
    moe = {"num_experts": shape.experts, "moe_intermediate_size": shape.expert_mlp} if shape.experts else {}
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": layers,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        **moe,
    }


def write(root: Path, shape: Shape, layers: int, shard_bytes: int, headers_only: bool) -> None:
    """Write config, shards and index."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config(shape, layers), indent=2))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, sizes in tensors(shape, layers):
        nbytes = 2 * int(np.prod(sizes))
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, sizes))
        filled += nbytes
    generator = np.random.default_rng(0)
    # A tiny model needs no more numbers than it has.
    count = min(POOL, 2 * sum(int(np.prod(sizes)) for content in shards for _, sizes in content))
    pool = (generator.standard_normal(count, dtype=np.float32) * 0.02).view(np.uint32) >> 16
    bits = pool.astype(np.uint16)
    placed = {}
    for number, content in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, sizes in content:
            nbytes = 2 * int(np.prod(sizes))
            header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, offset + nbytes]}
            placed[name] = file
            offset += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (root / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            if headers_only:
                os.truncate(out.fileno(), 8 + len(text) + offset)
                continue
            left = offset // 2
            while left:
                start = int(generator.integers(0, count // 2))
                part = bits[start : start + min(left, count // 2)]
                out.write(part.data)
                left -= part.size
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="fewer (or more) layers than the published model")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--headers-only", action="store_true", help="sparse files: headers and sizes without data")
    options = parser.parse_args()
    shape = MODELS[options.model]
    write(options.directory, shape, options.layers or shape.layers, options.shard_bytes, options.headers_only)


if __name__ == "__main__":
    main()
