"""What transformers says of a GGUF file: the tensors that its model has, by their published names, and tokenizer files.

transformers builds the tokenizer. How a byte-level vocabulary splits text into words is only named in the metadata
(`tokenizer.ggml.pre`), so names that are not known stop the reading: other splits give other tokens without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from ..errors import SourceError, UsageError
from ..files.model_files import short_repr
from ..files.shardfile import TensorInfo

if TYPE_CHECKING:
    from .source import GgufArchitecture, GgufTensor

_HEAD_NAME = "lm_head.weight"
# Rotary frequencies' factors, which become a part of config.json.
ROPE_FACTORS = "rope_freqs.weight"
# Stacks of experts that transformers makes of tensors for each expert, and the stacks that llama.cpp makes of these.
_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_STACK_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
# Tensors whose rows llama.cpp's Llama has in another order.
_INTERLEAVED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_NORM = "norm.weight"
_NO_FIT = "the file was not made from this class, or is damaged: start from the model's Hugging Face directory"


class PlacedTensor(NamedTuple):
    """A tensor of a Hugging Face directory, and where a GGUF file has it.

    Attributes:
        name: full tensor name.
        shape: its shape.
        stored: the tensor of the file, or the part of it that one expert has.
        head_rows: rows of a head if they are interleaved, else 0.
        plus_one: whether 1 was added to it.
    """

    name: str
    shape: tuple[int, ...]
    stored: GgufTensor
    head_rows: int
    plus_one: bool


def model_tensors(values: Mapping[str, Any], name: str) -> tuple[PretrainedConfig, list[TensorInfo]]:
    """Make the config of transformers, and list the tensors of its model, without memory for them.

    Args:
        values: values of config.json, from `gguf_config`.
        name: the file's name, for messages.

    Returns:
        The config, with the model's class as its architecture; and name, dtype and shape of each tensor, experts one by
        one.

    Raises:
        SourceError: transformers refuses the config.
    """
    try:
        config = AutoConfig.for_model(**values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{name}: transformers refuses the config of its metadata: {reason}", _NO_FIT) from None
    config.architectures = [type(model).__name__]
    return config, list(_iter_published(model.state_dict()))


def _iter_published(state: Mapping[str, torch.Tensor]) -> Iterator[TensorInfo]:
    for name, tensor in state.items():
        if (stack := _STACK.fullmatch(name)) is None:
            yield TensorInfo(name, "BF16", tuple(tensor.shape))
            continue
        parts = _STACK_PARTS[stack[2]]
        experts, rows, cols = tensor.shape
        prefix = name.rpartition(".")[0]
        for expert in range(experts):
            for part in parts:
                yield TensorInfo(f"{prefix}.{expert}.{part}_proj.weight", "BF16", (rows // len(parts), cols))


def place_tensors(
    architecture: str,
    entry: GgufArchitecture,
    config: PretrainedConfig,
    expected: list[TensorInfo],
    tensors: Mapping[str, GgufTensor],
    name: str,
) -> list[PlacedTensor]:
    """Find each tensor of a model in a GGUF file.

    Args:
        architecture: the architecture's name in the file.
        entry: what llama.cpp changes about its weights.
        config: the config of transformers.
        expected: the model's tensors, from `model_tensors`.
        tensors: the file's tensors, by name.
        name: the file's name, for messages.

    Returns:
        The tensors in the order of the model. An output head that is the embedding is not among them.

    Raises:
        SourceError: the file lacks one, has another shape for it, or has tensors that the model has no place for.
    """
    kind = next((kind for kind, title in MODEL_ARCH_NAMES.items() if title == architecture), None)
    if kind is None:
        raise SourceError(
            f"the installed gguf does not know the architecture {short_repr(architecture)}", "pip install -U gguf"
        )

    names = get_tensor_name_map(kind, config.num_hidden_layers)
    placed = []
    used = {ROPE_FACTORS}

    for info in expected:
        stem, _, suffix = info.name.rpartition(".")
        expert = _EXPERT.fullmatch(stem)
        stored_stem = f"blk.{expert[1]}.ffn_{expert[3]}_exps" if expert else names.get_name(stem)
        stored_name = f"{stored_stem}.{suffix}"
        if info.name == _HEAD_NAME and config.tie_word_embeddings:
            continue

        stored = tensors.get(stored_name)
        if stored is None:
            missing = f"what gguf's {architecture} has no name for"
            if stored_stem:
                missing = stored_name
            raise SourceError(f"{name} lacks {missing}, from which {info.name} is made", _NO_FIT)
        used.add(stored_name)

        shape = info.shape
        if expert:
            shape = (config.num_experts, *info.shape)

        # One row may be stored as a vector.
        if stored.shape != shape and (1, *stored.shape) != shape:
            raise SourceError(
                f"{name}: {stored_name} is {list(stored.shape)}, but {info.name} of {config.architectures[0]} is made "
                f"from {list(shape)}",
                _NO_FIT,
            )

        if expert:
            nbytes = stored.nbytes // config.num_experts
            stored = stored._replace(shape=info.shape, offset=stored.offset + int(expert[2]) * nbytes, nbytes=nbytes)

        head_rows = 0
        turned = _INTERLEAVED.fullmatch(stored_name) if entry.interleaved else None
        if turned:
            heads = config.num_attention_heads if turned[1] == "q" else config.num_key_value_heads
            head_rows = info.shape[0] // heads

        plus_one = entry.norms_plus_one and stored_name.endswith(_NORM)
        placed.append(PlacedTensor(info.name, info.shape, stored, head_rows, plus_one))

    if extra := [tensor for tensor in tensors if tensor not in used]:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        raise SourceError(
            f"{name} holds {', '.join(extra[:3])}{more}, which {config.architectures[0]} has no place for", _NO_FIT
        )

    return placed


# llama.cpp splits these into single digits, then as GPT-2 does (src/llama-vocab.cpp).
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
# Those that split as GPT-2 does, which is what transformers' GPT2Tokenizer does.
_GPT2 = ("gpt-2", "gpt2")
# What a vocabulary has in place of a space: byte-level ones the first, those of SentencePiece the second.
_BYTE_LEVEL_SPACE = "\u0120"
_SPACE = "\u2581"
_NO_TOKENIZER = "start from the model's Hugging Face directory"


@contextmanager
def errors_only() -> Iterator[None]:
    """Context manager in which transformers logs errors only."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def write_tokenizer(file: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF file.

    Args:
        file: the file, whose header was checked.
        metadata: its metadata.
        directory: where to write.

    Raises:
        SourceError: it has no tokenizer, or one that is not known.
        UsageError: this transformers cannot build tokenizers as GGUF files name them.
    """
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as known
    except ImportError:
        raise UsageError(
            "this transformers is too old to build the tokenizers of GGUF files", 'pip install "transformers>=5.24"'
        ) from None

    kind = metadata.get("tokenizer.ggml.model")
    split = metadata.get("tokenizer.ggml.pre")

    if kind not in known.GGUF_TOKENIZER_TYPES:
        raise SourceError(
            f"{file.name} has the tokenizer {short_repr(kind)}; read are {', '.join(known.GGUF_TOKENIZER_TYPES)}",
            _NO_TOKENIZER,
        )
    if kind == "gpt2" and split not in (*_SINGLE_DIGITS, *_GPT2, *known.GGUF_PRE_TOKENIZER_SPLITS):
        raise SourceError(
            f"{file.name}: it is not known how the tokenizer {short_repr(split)} (tokenizer.ggml.pre) splits text",
            _NO_TOKENIZER,
        )

    # Files that lie beside the GGUF file must not have a say.
    link = directory / "model.gguf"
    link.symlink_to(file)

    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            directory, gguf_file=link.name, local_files_only=True, token=False
        )
    except BaseException as error:
        # The tokenizers library panics with an exception of its own.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{file.name}: its tokenizer cannot be built: {reason}", _NO_TOKENIZER) from None
    finally:
        link.unlink()

    _check_vocabulary(file.name, str(kind), tokenizer.get_vocab())
    if kind == "gpt2" and split in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )

    tokenizer.save_pretrained(directory)


def _check_vocabulary(name: str, kind: str, tokens: Iterable[str]) -> None:
    """Refuse a vocabulary of another kind than the tokenizer's: it builds, and splits every text wrongly."""
    space = {"gpt2": _BYTE_LEVEL_SPACE}.get(kind, _SPACE)
    if not any(token.startswith(space) for token in tokens):
        raise SourceError(
            f"{name} has the tokenizer {kind!r}, but its vocabulary is of another kind: no token begins with {space!r}",
            _NO_TOKENIZER,
        )
