"""Opens GGUF files as a checkpoint, and writes config.json from their metadata.

A GGUF file is a magic number, a version, two counts, metadata, a table of tensors, and the tensors
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Only little-endian files are read, as transformers does.

What llama.cpp's converter writes for each architecture (convert_hf_to_gguf.py) is here as far as config.json needs it.
Names of tensors are not: the package gguf maps them. Metadata keys that are not here stop the reading, since a
config.json without what they say could be wrong.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import SourceError, UsageError
from ..files.checkpoint import read_config, readable
from ..files.model_files import MAX_SMALL, SINGLE_FILE, short_repr
from ..files.shardfile import DAMAGED, MAX_TENSORS, TENSOR_NAME, Location, SourceFile, TensorInfo
from ..formats.format import Blocks, Format, GgmlType, Scale, decode_blocks, ggml_types
from ..formats.numbers import Floats
from ..patterns import template
from ..weights.find import GgufCheckpoint
from ..weights.weight import Weight

if TYPE_CHECKING:
    from .names import PlacedTensor


SUFFIX = ".gguf"
# Bytes that the tensors of an output shard take in bfloat16.
SHARD_BYTES = 5_000_000_000
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_FILES = 1000
# Numbers of an array that are kept: one for each layer.
_MAX_KEPT = 10_000
_UNREADABLE = "it is incomplete, or newer than the package: download it again, or pip install -U gguf"


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file, such as "blk.0.attn_q.weight".
        type_id: number of its type.
        shape: sizes of the axes in the order of torch, rows first.
        offset: bytes from the start of the file.
        nbytes: size in bytes.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file.

    Attributes:
        size: size of the file in bytes.
        digest: SHA-256 of the header, hexadecimal.
        metadata: values by key: numbers, bools, strings, and arrays of numbers; of an array of strings, or of more than
            10,000 numbers, only how many it has.
        tensors: all tensors, by name, in the order of the file.
    """

    size: int
    digest: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, name: str, types: Collection[int]) -> GgufHeader:
    """Read the header of a GGUF file.

    Args:
        path: the file.
        name: its name in messages.
        types: the tensor types that can be read, by their number in GGUF files.

    Returns:
        Its metadata and tensors, which lie within the file.

    Raises:
        SourceError: it cannot be read, is no complete GGUF file, or has a tensor of another type.
    """
    from gguf import GGUFEndian, GGUFReader

    with readable():
        try:
            reader = GGUFReader(path)
        except (ValueError, LookupError, OverflowError) as error:
            raise SourceError(f"{name} is no GGUF file that the package gguf reads: {error}", _UNREADABLE) from None
    if reader.endianess != GGUFEndian.LITTLE:
        raise SourceError(f"{name} is big-endian", "take the little-endian file of the model")

    tensors: dict[str, GgufTensor] = {}
    for tensor in reader.tensors:
        if not tensor.name.isprintable() or not TENSOR_NAME.fullmatch(tensor.name):
            raise SourceError(f"{name}: {tensor.name!r} is not a possible name of a tensor", _UNREADABLE)
        if int(tensor.tensor_type) not in types:
            raise SourceError(
                f"{name}: {tensor.name} has the type {tensor.tensor_type.name}, which the installed gguf does not "
                "decode",
                "a newer gguf may know it: pip install -U gguf",
            )
        # The axis whose elements lie side by side comes first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[tensor.name] = GgufTensor(
            tensor.name, int(tensor.tensor_type), shape, tensor.data_offset, tensor.n_bytes
        )

    metadata = {key: _value(field) for key, field in reader.fields.items()}
    digest = hashlib.sha256(reader.data[: reader.data_offset].tobytes()).hexdigest()
    return GgufHeader(reader.data.size, digest, metadata, tensors)


def _value(field: Any) -> Any:
    """Return the value of a metadata key, or the number of values in a long array."""
    is_texts = field.types[-1].name == "STRING" and len(field.types) > 1
    if is_texts or len(field.data) > _MAX_KEPT:
        return len(field.data)
    return field.contents()


def gguf_weight(name: str, shape: tuple[int, ...], stored: GgufTensor, number: GgmlType, blocks: Blocks) -> Weight:
    """Return a weight that lies in a GGUF file.

    Args:
        name: full tensor name in a Hugging Face directory.
        shape: its shape there: [out, in] or [out]. Vectors are read as one row.
        stored: the tensor of the file, or the part of it that one expert has.
        number: its tensor type.
        blocks: what is undone after blocks are decoded.
    """
    rows, cols = (1, *shape)[-2:]
    codes = TensorInfo(name, "U8", (rows, stored.nbytes // rows))
    module = name.removesuffix(".weight")
    source = TensorInfo(name, "BF16", shape)
    fmt = Format(number, (1, number.block), Scale(""), blocks=blocks)
    return Weight(module, template(module), source, (rows, cols), format=fmt, parts=(codes,))


@dataclass(frozen=True)
class OpenedGguf:
    """A GGUF file, shown as a Hugging Face directory.

    Attributes:
        checkpoint: its config, files, and tensors under the names that they have in such a directory. Its `root` is a
            temporary directory, which is removed with this object.
    """

    checkpoint: GgufCheckpoint


def open_gguf(path: Path) -> OpenedGguf:
    """Open a GGUF file, or the first of several that are one model. Weights are not read.

    Args:
        path: the file.

    Returns:
        Its checkpoint. config.json, tokenizer and chat template are made from the metadata, in a temporary directory.

    Raises:
        SourceError: it cannot be read, is damaged, or its metadata and tensors are not those of a class of transformers
            that is known here.
        UsageError: the package gguf is not installed, transformers is too old, or another file must be given.
    """
    types = ggml_types()
    files = _all_files(path.absolute())
    headers = [read_gguf_header(file, file.name, types) for file in files]
    # Files that are whole have a count of 0 or 1, or none.
    count = headers[0].metadata.get("split.count") or 1
    if count != len(files):
        raise SourceError(
            f"{path.name} says that it is one of {short_repr(count)} parts (split.count), not of {len(files)}",
            "give the parts their first names: NAME-00001-of-00003.gguf and so on",
        )
    owners, tensors = _all_tensors(files, headers)
    metadata = headers[0].metadata
    name = path.name
    architecture, entry = find_gguf_architecture(metadata, name)
    # torch and transformers take seconds to load, so all else is checked before.
    from .names import ROPE_FACTORS, errors_only, model_tensors, place_tensors, write_tokenizer

    rope = tensors.get(ROPE_FACTORS)
    factors = None if rope is None else _read_vector(files[owners[rope.name]], rope, types[rope.type_id])
    with errors_only(), readable():
        config, expected = model_tensors(gguf_config(metadata, tensors, factors, name), name)
        placed = place_tensors(architecture, entry, config, expected, tensors, name)
        root = Path(tempfile.mkdtemp(prefix="openquant-gguf-"))
        try:
            config.save_pretrained(root)
            write_tokenizer(files[0], metadata, root)
            made = {file.name: file.stat().st_size for file in sorted(root.iterdir())}
            groups = list(_shards([(owners[tensor.stored.name], tensor) for tensor in placed]))
            shards = _link_shards(root, [files[group[0][0]] for group in groups])
            weights: dict[str, Weight] = {}
            where: dict[str, Location] = {}
            owner: dict[str, GgufHeader] = {}
            for shard, group in zip(shards, groups, strict=True):
                owner[shard] = headers[group[0][0]]
                for _, tensor in group:
                    blocks = Blocks(tensor.head_rows, tensor.plus_one)
                    kind = types[tensor.stored.type_id]
                    weights[tensor.name] = gguf_weight(tensor.name, tensor.shape, tensor.stored, kind, blocks)
                    where[tensor.name] = Location(shard, tensor.stored.offset)
            checkpoint = GgufCheckpoint(
                root=root,
                config=read_config(root),
                architecture=config.architectures[0],
                shards={shard: header.size for shard, header in owner.items()},
                headers={shard: header.digest for shard, header in owner.items()},
                tensors={name: weight.codes for name, weight in weights.items()},
                where=where,
                indexed=len(shards) > 1,
                files=made,
                left_out=(),
                weights=weights,
                file=path,
            )
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
    opened = OpenedGguf(checkpoint)
    weakref.finalize(opened, shutil.rmtree, root, ignore_errors=True)
    return opened


def _link_shards(root: Path, files: list[Path]) -> list[str]:
    """Make a link to the GGUF file that has its tensors for each output shard, and return their names."""
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = [SINGLE_FILE]
    for name, file in zip(names, files, strict=True):
        (root / name).symlink_to(file)
    return names


def _all_tensors(files: list[Path], headers: list[GgufHeader]) -> tuple[dict[str, int], dict[str, GgufTensor]]:
    """Return the number of the file that holds each tensor, and the tensors, by name."""
    owners: dict[str, int] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in tensors:
                both = f"{files[owners[name]].name} and in {files[number].name}"
                raise SourceError(f"{name} is in {both}", "download or copy the files again")
            owners[name] = number
            tensors[name] = tensor
    return owners, tensors


def _all_files(path: Path) -> list[Path]:
    """Return the files of a model, which are several if the name says so."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]

    count = int(split["count"])
    number = int(split["number"])
    if not 1 <= count <= _MOST_FILES or number != 1:
        first = f"{split['stem']}-00001-of-{split['count']}.gguf"
        raise UsageError(f"{path.name} is not the first of {count} files", f"give {first}, in the same directory")

    files = [path.with_name(f"{split['stem']}-{part:05d}-of-{split['count']}.gguf") for part in range(1, count + 1)]
    with readable():
        for file in files:
            if not file.exists():
                raise SourceError(f"{file.name} is missing from {file.parent}", "download or copy it again")
    return files


def _shards(tensors: list[tuple[int, PlacedTensor]]) -> Iterator[list[tuple[int, PlacedTensor]]]:
    """Divide tensors, each with the number of its file, into output shards: of one file, and about SHARD_BYTES."""
    group: list[tuple[int, PlacedTensor]] = []
    nbytes = 0
    # Within a file they keep the model's order.
    for owner, tensor in sorted(tensors, key=lambda tensor: tensor[0]):
        size = TensorInfo("", "BF16", tensor.shape).nbytes
        if group and (owner != group[0][0] or nbytes + size > SHARD_BYTES):
            yield group
            group = []
            nbytes = 0
        group.append((owner, tensor))
        nbytes += size
    yield group


def _read_vector(file: Path, tensor: GgufTensor, kind: GgmlType) -> Floats:
    """Read and decode a small tensor, float32 of one axis."""
    if tensor.nbytes > MAX_SMALL:
        raise SourceError(f"{file.name}: {tensor.name} has {tensor.nbytes:,} bytes", DAMAGED)
    codes = np.empty(tensor.nbytes, np.uint8)
    out = np.empty((1, prod(tensor.shape)), np.float32)
    with SourceFile(file, file.name) as source:
        source.read(codes, tensor.offset, tensor.name)
    decode_blocks(codes.reshape(1, -1), kind, Blocks(), out)
    return out.reshape(-1)


# The output head. llama.cpp does not write one that is the embedding.
HEAD = "output.weight"
_MOST_LAYERS = 10_000
# Values of these keys follow from others; they are compared with them.
_CHECKED = ("attention.value_length", "rope.dimension_count")
# Sizes that no tensor bounds, in contrast to all other numbers. Layers that are all experts have no dense one.
_UNBOUNDED = ("max_position_embeddings", "original_max_position_embeddings", "sliding_window", "intermediate_size")
_FLOATS = ("rms_norm_eps", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping")
_SCALING = "rope.scaling."
# Keys of rope.scaling in metadata and in config.json.
_SCALING_KEYS = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
# What Llama 3.1 and later have beside the factor (their config.json).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NOT_REBUILT = "start from the model's Hugging Face directory"


def find_gguf_architecture(metadata: Mapping[str, Any], name: str) -> tuple[str, GgufArchitecture]:
    """Return the architecture of a GGUF file, with its name there.

    Args:
        metadata: its metadata.
        name: the file's name, for messages.

    Raises:
        SourceError: it names none, or one that is not read.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise SourceError(f"{name} names no architecture (general.architecture)", _NOT_REBUILT)
    if architecture not in ARCHITECTURES:
        raise SourceError(
            f"{name} has the architecture {short_repr(architecture)}; read are {', '.join(ARCHITECTURES)}", _NOT_REBUILT
        )
    return architecture, ARCHITECTURES[architecture]


def gguf_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_factors: np.ndarray[Any, Any] | None, name: str
) -> dict[str, Any]:
    """Return the values of config.json that a GGUF file says, for the config class of transformers.

    Args:
        metadata: its metadata.
        tensors: its tensors, by name.
        rope_factors: `rope_freqs.weight`, float32 [head_dim / 2], by which llama.cpp divides rotary frequencies; None
            if the file has none.
        name: the file's name, for messages.

    Raises:
        SourceError: its metadata do not say what config.json needs, or say something that it has no place for.
    """
    architecture, entry = find_gguf_architecture(metadata, name)
    keys = {**COMMON, **entry.keys}
    largest = max((max(tensor.shape) for tensor in tensors.values()), default=0)

    config: dict[str, Any] = {"model_type": entry.model_type, **entry.fixed}
    checked = {}
    scaling = {}

    for key, value in metadata.items():
        prefix, _, rest = key.partition(".")
        if prefix != architecture:
            continue

        if rest in keys:
            _require_number(value, key, keys[rest], largest, name)
            config[keys[rest]] = value
        elif rest in _CHECKED:
            checked[rest] = value
        elif rest.startswith(_SCALING):
            scaling[rest.removeprefix(_SCALING)] = value
        else:
            raise SourceError(f"{name}: no key of config.json is known for {key} = {short_repr(value)}", _NOT_REBUILT)

    for rest in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length"):
        if keys[rest] not in config:
            raise SourceError(f"{name} lacks the metadata key {architecture}.{rest}", _NOT_REBUILT)

    # Each layer has a tensor, and each expert three.
    layers = config["num_hidden_layers"]
    experts = config.get("num_experts", 1)
    if layers > min(len(tensors), _MOST_LAYERS) or layers * experts * 3 > MAX_TENSORS:
        raise SourceError(
            f"{name} claims {layers:,} layers and {experts:,} experts, and holds {len(tensors):,} tensors", DAMAGED
        )

    _set_heads(config, entry, architecture, checked, name)

    if rope_factors is not None:
        config["rope_scaling"] = _llama3_scaling(rope_factors, config, name)
    elif scaling:
        config["rope_scaling"] = _rope_scaling(scaling, architecture, name)

    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, int):
        config.setdefault("vocab_size", tokens)
    if not 1 <= config.get("vocab_size", 0) <= largest:
        raise SourceError(f"{name} has no vocabulary (tokenizer.ggml.tokens)", _NOT_REBUILT)

    for key, config_key in _TOKENS.items():
        # Without one, none: the class would have that of another model.
        token = metadata.get(f"tokenizer.ggml.{key}")
        config[config_key] = token if type(token) is int and 0 <= token < config["vocab_size"] else None

    return {**config, "tie_word_embeddings": HEAD not in tensors, "dtype": "bfloat16"}


def _set_heads(
    config: dict[str, Any], entry: GgufArchitecture, architecture: str, checked: Mapping[str, Any], name: str
) -> None:
    """Add the sizes of heads to a config, and refuse those that it has no key for."""
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    head_dim = config.setdefault("head_dim", checked.get("rope.dimension_count") or width // heads)
    if type(head_dim) is not int or not 0 < head_dim <= config["hidden_size"] or head_dim % 2:
        raise SourceError(f"{name}: {architecture} has heads of {short_repr(head_dim)} dimensions", _NOT_REBUILT)

    values = checked.get("attention.value_length", head_dim)
    rotated = checked.get("rope.dimension_count", head_dim)
    partial = entry.partial_rotary and type(rotated) is int and 0 < rotated < head_dim
    if values != head_dim or (rotated != head_dim and not partial):
        raise SourceError(
            f"{name}: {architecture} has heads of {head_dim} dimensions, {short_repr(values)} for values and "
            f"{short_repr(rotated)} that are rotated; no key of config.json is known for that",
            _NOT_REBUILT,
        )

    if partial:
        config["partial_rotary_factor"] = rotated / head_dim
    if config["num_hidden_layers"] in entry.scaled_by_width:
        config["query_pre_attn_scalar"] = width // heads


def _require_number(value: Any, key: str, config_key: str, largest: int, name: str) -> None:
    """Refuse what is no number of its kind, and sizes that the file's tensors cannot have."""
    if config_key in _FLOATS:
        sound = isinstance(value, float) and math.isfinite(value) and value > 0
    else:
        sound = type(value) is int and 1 <= value <= (1 << 31 if config_key in _UNBOUNDED else largest)
    if not sound:
        raise SourceError(f"{name}: {key} is {short_repr(value)}, which its tensors contradict", _NOT_REBUILT)


def _rope_scaling(scaling: Mapping[str, Any], architecture: str, name: str) -> dict[str, Any]:
    """Return `rope_scaling` of config.json: linear or YaRN."""
    kind = scaling.get("type")
    unknown = sorted(scaling.keys() - {"type", "finetuned", *_SCALING_KEYS})
    if kind not in ("linear", "yarn") or unknown or not isinstance(scaling.get("factor"), float):
        found = ", ".join(f"{_SCALING}{key} = {short_repr(value)}" for key, value in scaling.items())
        raise SourceError(f"{name}: no rope_scaling of config.json is known for {architecture}'s {found}", _NOT_REBUILT)
    values = {config_key: scaling[key] for key, config_key in _SCALING_KEYS.items() if key in scaling}
    return {"rope_type": kind, **values}


def _llama3_scaling(factors: np.ndarray[Any, Any], config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `rope_scaling` of Llama 3.1 and later, which GGUF files have as a factor for each frequency.

    Low frequencies are divided by the factor itself, high ones not at all, and those between by a mixture
    (transformers, modeling_rope_utils.py, _compute_llama3_parameters; llama.cpp, convert_hf_to_gguf.py).
    """
    factor = float(factors.max(initial=1.0))
    head_dim = config["head_dim"]
    low = 1.0
    high = _LLAMA3["high_freq_factor"]
    waves = 2 * np.pi * np.float64(config.get("rope_theta", 10000.0)) ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise SourceError(f"{name}: rope_freqs.weight are not the factors of Llama 3's rope_scaling", _NOT_REBUILT)
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


# Keys of most architectures, without the architecture's name before them, and the keys of config.json.
COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: `model_type` of its config.json.
        keys: metadata keys besides COMMON, and the keys of config.json.
        fixed: values of config.json that the class does not have by default and no metadata says.
        interleaved: whether rows of q and k are in llama.cpp's order of rotary halves.
        norms_plus_one: whether 1 was added to the weights of norms.
        scaled_by_width: numbers of layers of the models that scale queries by hidden_size / num_attention_heads instead
            of head_dim, which no metadata says.
        partial_rotary: whether only a part of a head may be rotated.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    norms_plus_one: bool = False
    scaled_by_width: tuple[int, ...] = ()
    partial_rotary: bool = False


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", interleaved=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe", _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    ),
    "qwen3": GgufArchitecture("qwen3"),
    # llama.cpp divides by the sum of the chosen experts' weights (src/models/qwen3moe.cpp), the class by default not.
    "qwen3moe": GgufArchitecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "gemma2": GgufArchitecture(
        "gemma2",
        _WINDOW
        | {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        norms_plus_one=True,
        scaled_by_width=(46,),
    ),
    "gemma3": GgufArchitecture("gemma3_text", _WINDOW, norms_plus_one=True, scaled_by_width=(62,)),
    "phi3": GgufArchitecture(
        "phi3",
        _WINDOW | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        partial_rotary=True,
    ),
}
