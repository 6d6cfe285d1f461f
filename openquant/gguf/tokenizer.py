"""Tokenizer files from the metadata of a GGUF file.

transformers builds the tokenizer. How a byte-level vocabulary splits text into words is only named in the metadata
(`tokenizer.ggml.pre`), so names that are not known stop the reading: other splits give other tokens without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ..errors import SourceError, UsageError
from ..files.small_files import short_repr

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
    space = _BYTE_LEVEL_SPACE if kind == "gpt2" else _SPACE
    if not any(token.startswith(space) for token in tokens):
        raise SourceError(
            f"{name} has the tokenizer {kind!r}, but its vocabulary is of another kind: no token begins with {space!r}",
            _NO_TOKENIZER,
        )
