"""Small GGUF files, as llama.cpp's converter writes them, of every architecture that is read.

Tensors are blocks of random bytes in whichever tensor types are asked for, so no type needs an encoder.
"""

from __future__ import annotations

import re
import string
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from gguf import GGUFReader, GGUFWriter

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS = 256, 512, 2, 1, 128, 2, 3
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
DECODABLE = []
for _kind, (_, _size) in GGML_QUANT_SIZES.items():
    try:
        dequantize(np.zeros((1, _size), np.uint8), _kind)
        DECODABLE.append(_kind)
    except NotImplementedError:
        pass

_SIZES = {
    "context_length": 512,
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 20000.0,
}
_HEADS = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
_EXPERTS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 256}
METADATA: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"rope.dimension_count": HEAD_DIM},
    "qwen2": _SIZES,
    "qwen3": _SIZES | _HEADS,
    "qwen2moe": _SIZES | _EXPERTS | {"expert_shared_feed_forward_length": 256},
    "qwen3moe": _SIZES | _HEADS | _EXPERTS,
    "gemma2": _SIZES
    | _HEADS
    | {"attention.sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": _SIZES | _HEADS | {"attention.sliding_window": 64},
    "phi3": _SIZES | {"rope.dimension_count": HEAD_DIM, "attention.sliding_window": 64,
                      "rope.scaling.original_context_length": 512},
}  # fmt: skip
SENTENCEPIECE = ("gemma2", "gemma3", "phi3")

# Bytes as GPT-2 spells them, without those that need more than a table.
_LETTERS = [character for character in string.printable if character.isprintable() and character != " "]
BYTE_TOKENS = ["<unk>", "<s>", "</s>", *_LETTERS, "Ġ", "Ċ", "he", "Ġt", "12"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, "▁", "he", "▁t"]


def tokens_of(architecture: str) -> list[str]:
    return PIECES if architecture in SENTENCEPIECE else BYTE_TOKENS


def shapes_of(architecture: str, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape, rows first, of the tensors of a small file."""
    vocabulary = len(tokens_of(architecture))
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    heads = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, WIDTH)}
    for layer in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
        if architecture == "phi3":
            block |= {"attn_qkv.weight": (queries + 2 * keys, WIDTH), "ffn_up.weight": (2 * INNER, WIDTH)}
        else:
            block |= {f"attn_{part}.weight": (rows, WIDTH) for part, rows in heads.items()}
        block |= {"attn_output.weight": (WIDTH, queries)}
        if architecture in ("qwen2", "qwen2moe"):
            block |= {f"attn_{part}.bias": (rows,) for part, rows in heads.items()}
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            block |= {f"attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        if architecture.startswith("gemma"):
            block |= {f"post_{part}_norm.weight": (WIDTH,) for part in ("attention", "ffw")}
        if "moe" in architecture:
            block |= {"ffn_gate_inp.weight": (EXPERTS, WIDTH)}
            block |= {f"ffn_{part}_exps.weight": (EXPERTS, 256, WIDTH) for part in ("gate", "up")}
            block |= {"ffn_down_exps.weight": (EXPERTS, WIDTH, 256)}
        else:
            if architecture != "phi3":
                block |= {f"ffn_{part}.weight": (INNER, WIDTH) for part in ("gate", "up")}
            block |= {"ffn_down.weight": (WIDTH, INNER)}
        if architecture == "qwen2moe":
            block |= {"ffn_gate_inp_shexp.weight": (WIDTH,), "ffn_down_shexp.weight": (WIDTH, 256)}
            block |= {f"ffn_{part}_shexp.weight": (256, WIDTH) for part in ("gate", "up")}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (WIDTH,)
    return shapes if tied or architecture.startswith("gemma") else shapes | {"output.weight": (vocabulary, WIDTH)}


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Blocks that decode to numbers of a moderate size, uint8 [.., bytes of a row]."""
    block, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    with np.errstate(all="ignore"):
        while (odd := ~(np.abs(dequantize(blocks, kind)) < 1e4).reshape(count, -1).all(1)).any():
            blocks[odd] = rng.integers(0, 256, (odd.sum(), size), np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // block * size)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    types: Iterable[GGMLQuantizationType] = (GGMLQuantizationType.Q8_0,),
    *,
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    vectors: dict[str, np.ndarray] | None = None,
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Write a small file, whose matrices take turns with the types, and return the blocks and type of each tensor.

    Args:
        metadata: keys without the architecture's name, None for a key to be left out.
        tokenizer: keys without `tokenizer.ggml.`.
        shapes: other tensors than those of the architecture.
        vectors: further float32 tensors.
    """
    rng, types = np.random.default_rng(0), list(types)
    writer = GGUFWriter(path, architecture)
    for key, value in (METADATA.get(architecture, _SIZES) | (metadata or {})).items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (_tokenizer(architecture) | (tokenizer or {})).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.add_chat_template(TEMPLATE)
    written: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = {}
    for name, shape in (shapes or shapes_of(architecture, tied)).items():
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else types[len(written) % len(types)]
        written[name] = random_blocks(shape, kind, rng), kind
        blocks = written[name][0]
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, blocks.view(np.float32))
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(name, blocks.view(np.float16))
        else:
            writer.add_tensor(name, blocks, raw_dtype=kind)
    for name, values in (vectors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def _tokenizer(architecture: str) -> dict[str, Any]:
    tokens = tokens_of(architecture)
    # Three that control, and those that stand for bytes.
    kinds = [3, 3, 3, *(6 if re.fullmatch("<0x..>", token) else 1 for token in tokens[3:])]
    special = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    }
    common = {"tokens": tokens, "token_type": kinds, **special}
    if architecture in SENTENCEPIECE:
        return {"model": "llama", "scores": [-float(n) for n in range(len(tokens))], **common}
    return {"model": "gpt2", "pre": "qwen2", "merges": ["h e", "Ġ t", "1 2"], **common}


def split_gguf(path: Path, directory: Path, count: int, both: Container[str] = ()) -> None:
    """Write the tensors of a file to several, as llama.cpp's gguf-split does: metadata are in the first. Tensors named in `both` are in all."""
    reader = GGUFReader(path)
    directory.mkdir(exist_ok=True)
    for number in range(count):
        part = directory / f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
        if number == 0:
            for key, field in reader.fields.items():
                if key.partition(".")[0] not in ("GGUF", "general"):
                    writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for place, tensor in enumerate(reader.tensors):
            if place % count != number and tensor.name not in both:
                continue
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
