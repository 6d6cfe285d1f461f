"""Damage to a checkpoint's directory, chosen by a `random.Random`.

Each kind of damage knows what it damages (JSON trees, headers, front matter, journals, kinds of files), so that most
of it passes the first check and meets a later one. All return what they did, in words, for whoever reads a report.
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

INDEX, JOURNAL = "model.safetensors.index.json", ".openquant.json"
# Files of a case stay small; what claims to be large claims it in its header.
MOST = 8 << 20

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 128, 1 << 30, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 64, -(1 << 63),
    10**400, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), "", " ", "0", "128", "a" * 300, "\0", "\ud800",
    "../../x", "/etc/passwd", "é", "{", "{a,b}", "{0}", "%s", "re:", "re:(", "re:(a+)+$", "re:.*", "**", "*.weight",
    [], {}, [[]], [{}], [None], [0], [128, 128], [1 << 40, 1 << 40], [128], ["lm_head"], {"": ""}, {"a": {"b": []}},
]  # fmt: skip
KEYS = [
    "architectures", "model_type", "text_config", "vision_config", "quantization_config", "compression_config",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size",
    "num_experts", "num_local_experts", "n_routed_experts", "num_nextn_predict_layers", "tie_word_embeddings",
    "torch_dtype", "dtype", "auto_map", "layer_types", "rope_parameters", "vocab_size", "quant_method", "ignore",
    "ignored_layers", "modules_to_not_convert", "weight_block_size", "activation_scheme", "config_groups", "targets",
    "weights", "strategy", "num_bits", "type", "format", "kv_cache_scheme", "scale_fmt", "quant_algo", "quantized_layers",
    "global_quant_config", "layer_quant_config", "export", "dtype", "qscheme", "load_in_4bit", "blocksize",
    "quantization", "weight_map", "metadata", "total_size", "shape",
    "data_offsets", "__metadata__", "digest", "files", "done", "exclude_modules", "group_size", "block_structure",
]  # fmt: skip
DTYPES = [
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "F64", "I64", "U64", "C64",
]  # fmt: skip
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
NAMES = [
    "model.layers.0.self_attn.q_proj.weight", "model.layers.9.mlp.up_proj.weight", "lm_head.weight", "weight", "",
    ".", "..", "a" * 300, f"model.layers.{'9' * 5000}.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight", "model.layers.{0..1}.weight", "{0}", "{}", "%d", "\n",
    "model.layers.99999999999999999999.input_layernorm.weight", "model.layers.٣.mlp.up_proj.weight", "\x1b[31mred",
    "model.layers.0.self_attn.q_proj.weight_scale", "model.layers.0.self_attn.q_proj.weight_scale_inv",
    "model.layers.0.self_attn.q_proj.input_scale", "model.layers.0.mlp.experts.0.up_proj.weight", "__metadata__",
    "model.layers.0.self_attn.q_proj.weight_packed", "model.layers.0.mlp.experts.gate_up_proj_blocks", "\ud800",
    "model.layers.0.self_attn.q_proj.qweight", "re:.*", "a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z.weight",
]  # fmt: skip
QUANTIZATIONS: list[Any] = [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "bitnet"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    {"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "fbgemm_fp8"}, {"quant_method": None}, {},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quant_method": "hqq"},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
     "layer_quant_config": {"*.q_proj": {"weight": {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}}}},
    {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*gate$", "lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
         "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}}},
    {"quant_method": "compressed-tensors", "format": "pack-quantized",
     "config_groups": {"group_0": {"targets": ["re:.*experts.*"], "weights": {
         "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}}},
]  # fmt: skip


def damage(rng: random.Random, root: Path) -> list[str]:
    """Damage a directory, most often in one way: the first that is noticed hides the others."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        # What an earlier one left may be nothing that a later one understands.
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            done.append(rng.choice(WAYS)(rng, root))
    return [words for words in done if words]


def contents(path: Path) -> bytes | None:
    """The bytes of a file; None if it is none, or an earlier damage made it large or something else."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 4 * MOST:
        return None
    return path.read_bytes()


# JSON.


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of a tree: what holds it, and its key or number there."""
    level = [value]
    while level:
        outer = level.pop()
        inner = list(outer.items()) if isinstance(outer, dict) else list(enumerate(outer))
        for key, held in inner:
            yield outer, key
            if isinstance(held, (dict, list)):
                level.append(held)


def odd(rng: random.Random, others: Sequence[Any] = ()) -> Any:
    """A value that few expect; it may be changed, as it is a copy."""
    return copy.deepcopy(rng.choice([*ODD, *others]))


def change_tree(rng: random.Random, value: Any) -> Any:
    """A JSON value with one of its entries changed; it may be changed itself."""
    found = list(places(value)) if isinstance(value, (dict, list)) else []
    if not found or rng.random() < 0.03:
        return odd(rng)
    outer, key = rng.choice(found)
    way = rng.randrange(8)
    if way <= 2:
        outer[key] = odd(rng)
    elif way == 3:
        del outer[key]
    elif way == 4:
        other, place = rng.choice(found)
        outer[key] = copy.deepcopy(other[place])
    elif way == 5:
        held = outer[key]
        outer[key] = [held] if rng.random() < 0.5 else {rng.choice(KEYS): held}
    elif way == 6 and isinstance(outer, dict):
        outer[rng.choice([*KEYS, *NAMES])] = outer.pop(key) if rng.random() < 0.5 else odd(rng, QUANTIZATIONS)
    elif isinstance(outer[key], bool) or not isinstance(outer[key], (int, float)):
        outer[key] = str(outer[key])[: rng.randint(0, 40)] + rng.choice(["", "x", ".", "*", "\n", "}"])
    else:
        outer[key] = outer[key] + rng.choice([1, -1, 1 << 31, -2 * outer[key]])
    return value


def text_of(rng: random.Random, value: Any) -> bytes:
    """JSON text of a value, most often sound."""
    text = json.dumps(value, indent=rng.choice([None, 2]))
    way = rng.randrange(40)
    if way == 0:
        return b"\xef\xbb\xbf" + text.encode()
    if way == 1:
        return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32"]))
    if way == 2:
        return text[: rng.randint(0, len(text))].encode()
    if way == 3:
        return text.encode() + rng.choice([b"\0", b"x", b"}", b" " * 1000, b"\xff"])
    if way == 4:
        return (text[:-1] + ', "x": ' + "[" * rng.choice([10, 100, 100_000]) + text[-1]).encode()
    if way == 5:
        return (text[:-1] + ', "a": 1, "a": 2' + text[-1]).encode()
    if way == 6:
        depth = rng.choice([50, 70, 900, 5000])
        return (text[:-1] + ', "x": ' + "[" * depth + "]" * depth + text[-1]).encode()
    return text.encode(errors="replace")


def _json_file(rng: random.Random, root: Path, name: str) -> str | None:
    path = root / name
    try:
        value = json.loads(contents(path) or b"")
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.randint(1, 3)):
        value = change_tree(rng, value)
    _write(path, text_of(rng, value))
    return f"{path.name}: entries changed"


def _quantization(rng: random.Random, root: Path) -> str | None:
    """Another quantization_config, or a change in the one that is there."""
    path = root / "config.json"
    try:
        config = json.loads(contents(path) or b"")
        held = config.get("quantization_config")
        if held is None or rng.random() < 0.2:
            held = copy.deepcopy(rng.choice(QUANTIZATIONS))
        for _ in range(rng.randint(0, 2)):
            held = change_tree(rng, held)
        config["quantization_config"] = held
        if rng.random() < 0.1:
            _write(root / "hf_quant_config.json", text_of(rng, config.pop("quantization_config")))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None
    _write(path, text_of(rng, config))
    return f"quantization_config {str(held)[:80]}"


# Shards.


def parts_of(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """A shard's header and data; None if it is none."""
    try:
        data = contents(path) or b""
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
    except (ValueError, struct.error, RecursionError):
        return None
    return (header, data[8 + length :]) if isinstance(header, dict) else None


def assemble(rng: random.Random, path: Path, header: Any, data: bytes) -> None:
    """Write a shard, now and then with another length of the header than it has, or of the file."""
    text = text_of(rng, header) if rng.random() < 0.3 else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = len(text)
    way = rng.randrange(30)
    if way == 0:
        length = rng.choice([0, 1, 2, length - 1, length + 1, 1 << 31, 100_000_001, (1 << 63), (1 << 64) - 1])
    elif way == 1:
        data = data[: rng.randint(0, len(data))]
    elif way == 2:
        data += bytes(rng.choice([1, 7, 4096]))
    _write(path, struct.pack("<Q", length) + text + data)


def _shard(rng: random.Random, root: Path) -> Path | None:
    found = sorted(path for path in root.glob("*.safetensors") if path.is_file())
    return rng.choice(found) if found else None


def _header(rng: random.Random, root: Path) -> str | None:
    """Entries of a header changed, its data left as it is."""
    path = _shard(rng, root)
    found = path and parts_of(path)
    if not path or not found:
        return None
    header, data = found
    for _ in range(rng.randint(1, 3)):
        header = change_tree(rng, header)
    assemble(rng, path, header, data)
    return f"{path.name}: entries of the header changed"


def _tensor(rng: random.Random, root: Path) -> str | None:
    """One tensor with another name, shape or dtype, or none at all, in a shard that is sound."""
    path = _shard(rng, root)
    found = path and parts_of(path)
    if not path or not found:
        return None
    header, data = found
    try:
        metadata = header.pop("__metadata__", None)
        held = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    except (TypeError, KeyError, ValueError):
        return None
    if not header:
        return None
    name = rng.choice(list(header))
    entry = header[name]
    way = rng.randrange(6)
    if way == 0:
        did = f"{name} is gone"
        del header[name], held[name]
    elif way == 1:
        new = rng.choice([*NAMES, f"{name}_scale", f"{name}_scale_inv", name.replace("0", "1"), f"x.{name}", name[:-7]])
        header[new], held[new] = header.pop(name), held.pop(name)
        did = f"{name} is called {new[:60]!r}"
    elif way == 2:
        new = rng.choice([*NAMES, f"{name}_scale", f"{name}_scale_inv", name.replace("0", "1")])
        header[new], held[new] = dict(entry), held[name]
        did = f"{new[:60]!r} is there too"
    elif way == 3:
        did = f"{name} is filled with {_fill(rng, held, name)}"
    else:
        if rng.random() < 0.5:
            entry["dtype"] = rng.choice(DTYPES)
        if way == 4 or rng.random() < 0.3:
            entry["shape"] = _shape(rng, entry["shape"])
        did = f"{name} is {entry['dtype']} {str(entry['shape'])[:60]}"
        count = 1
        for size in entry["shape"]:
            count *= size
        nbytes = count * BITS.get(entry["dtype"], _digits(entry["dtype"])) // 8
        if nbytes <= MOST:
            held[name] = (held[name] + bytes(max(0, nbytes - len(held[name]))))[:nbytes]
    start = 0
    for name, entry in header.items():
        entry["data_offsets"] = [start, start + len(held[name])]
        start += len(held[name])
    assemble(rng, path, {**({} if metadata is None else {"__metadata__": metadata}), **header}, b"".join(held.values()))
    return did


def _digits(dtype: str) -> int:
    return int("".join(filter(str.isdigit, dtype.split("_")[0])) or "8")


def _shape(rng: random.Random, shape: list[int]) -> list[int]:
    way = rng.randrange(7)
    sizes = [0, 1, 2, 31, 32, 64, 100, 127, 128, 129, 256, 257, 512]
    if way == 0:
        return shape[::-1]
    if way == 1:
        return [*shape, 1]
    if way == 2:
        return [1] * rng.choice([0, 1, 3, 64, 1000])
    if way == 3:
        return rng.choice([[1 << 32, 1 << 32, 0], [0, 1 << 64], [1 << 63], [0], [1 << 20, 1 << 20]])
    if way == 4 and shape:
        return [rng.choice(sizes), *shape[1:]]
    return [rng.choice(sizes) for _ in range(rng.randint(0, 3))]


def _fill(rng: random.Random, held: dict[str, bytes], name: str) -> str:
    pattern = rng.choice([b"\0", b"\xff", b"\x7f", b"\x80\x7f", b"\x7f\x7f", b"\xc0\x7f", b"\x80\xff", b"\x01\x00",
                          b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x01\x00\x00\x00"])  # fmt: skip
    data = held[name]
    start = rng.randint(0, len(data)) // 4 * 4
    end = rng.choice([len(data), start + 4, start + 64])
    held[name] = (data[:start] + pattern * (len(data) // len(pattern) + 1))[: min(end, len(data))] + data[end:]
    return pattern.hex()


def _bytes(rng: random.Random, root: Path) -> str | None:
    """A file cut, extended, or with some of its bytes changed, whatever it is."""
    found = [(path, data) for path in sorted(root.iterdir()) if (data := contents(path))]
    if not found:
        return None
    path, data = rng.choice(found)
    changed = bytearray(data)
    way = rng.randrange(4)
    if way == 0:
        del changed[rng.randint(0, len(changed)) :]
    elif way == 1:
        changed += rng.choice([b"\0", b"x" * 4096, data[:64]])
    else:
        for _ in range(rng.choice([1, 4, 64])):
            # Most of what matters is at the start.
            changed[rng.randrange(min(len(changed), rng.choice([8, 64, 4096, len(changed)])))] = rng.randrange(256)
    _write(path, bytes(changed))
    return f"{path.name}: {('cut', 'extended', 'bytes changed', 'bytes changed')[way]}"


# Other files.


def _kind(rng: random.Random, root: Path) -> str | None:
    """A file that is a directory, a link to nothing, empty or gone."""
    names = [*sorted(path.name for path in root.iterdir()), "README.md", INDEX, "hf_quant_config.json"]
    path = root / rng.choice(names)
    if path.is_dir():
        return None

    path.unlink(missing_ok=True)
    way = rng.choice(["directory", "link", "empty", "gone"])
    if way == "directory":
        path.mkdir()
    elif way == "link":
        path.symlink_to("nowhere")
    elif way == "empty":
        path.touch()
    return f"{path.name}: {way}"


def _extra(rng: random.Random, root: Path) -> str | None:
    """One more file or directory, of an odd name."""
    name = rng.choice(["x" * 255, "a\nb.json", "a\\b", "-rf", "é.txt", os.fsdecode(b"\xff\xfe.json"), "pytorch_model.bin",
                       "model.safetensors", "model-00001-of-00002.safetensors", "extra.safetensors", "CON", "adapter_model.safetensors",
                       "chat_template.jinja", "hf_quant_config.json", "tokenizer.json", "consolidated.safetensors", "x.safetensors.index.json",
                       ".openquant", "adapter_config.json", "modeling_x.py", "\x1b[2Jx", "{x}", "config.json "])  # fmt: skip
    path = root / name
    if path.exists() or path.is_symlink():
        return None
    found = _shard(rng, root)
    if name.endswith(".safetensors") and found:
        _write(path, contents(found) or b"")
    else:
        _write(path, rng.choice([b"", b"{}", b"[]", b"\xff" * 100]))
    return f"{name[:40]!r} is there too"


def _write(path: Path, data: bytes) -> None:
    """Write a file whatever is there; what an earlier damage made is left alone."""
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    path.write_bytes(data)


_config = partial(_json_file, name="config.json")
WAYS: list[Callable[[random.Random, Path], str | None]] = [
    _config, _config, partial(_json_file, name=INDEX), partial(_json_file, name=JOURNAL), _quantization, _quantization, _header, _header, _tensor, _tensor,
    _tensor, _bytes, _kind, _extra,
]  # fmt: skip
