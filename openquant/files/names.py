"""Names of files in a model's directory, and patterns of those that are no part of the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# The record of a run in its output (journal.py).
JOURNAL_FILE = ".openquant.json"
# An evaluation of the model: figures, page and picture. They are not copied from a source, because they do not describe
# the output.
EVAL_FILE, EVAL_PAGE, EVAL_PICTURE = EVALUATION_FILES = ("eval.json", "eval.html", "eval.png")
# What engines, transformers, its processors and sentence-transformers read, in any directory and in lower case; parsers
# that `vllm serve` takes as plugins; and what a reader of the card is referred to.
MODEL_FILES = (
    "config.json", "*_config.json", "configuration.json", "config_sentence_transformers.json", "modules.json",
    "params.json", "modelcard.json", ".gitattributes", "*_parser*.py",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tekken.json", "normalizer.json", "emoji.json",
    "*vocab*.json", "*vocab*.txt", "*vocab*.gz", "merges*.txt", "dict.txt", "encoder.json", "*.bpe", "bpe.codes",
    "*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.jinja", "chat_template.json", "system_prompt.txt",
    "readme*", "license*", "licence*", "*[_-]license*", "copying*", "notice*", "*policy*", "*agreement*", "citation*",
)  # fmt: skip
# Never copied to the output, whatever else says so: weights in other formats, adapters, archives and videos. With
# adapter_config.json transformers would look for the adapter's weights (models/auto/auto_factory.py:302-309 of 5.24.0).
LEFT_OUT_FILES = (
    "*.safetensors", "*.index.json", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.onnx*", "*.gguf", "*.msgpack",
    "*.ot", "*.tflite", "*.pkl", "*.pickle", "consolidated*", "adapter_config.json", ".git",
    "*.nemo", "openvino_*", "*.mlmodel", "*imatrix*", "events.out.tfevents.*", "*.log",
    "*.zip", "*.tar", "*.tar.*", "*.tgz", "*.7z", "*.rar",
    "*.mp4", "*.mov", "*.avi", "*.mkv", "*.webm",
)  # fmt: skip
LEFT_OUT_DIRECTORIES = (".*", "original", "consolidated*", "checkpoint-*", "__pycache__", "*.mlpackage")
# Files that the output has; directories of these names are left out.
_OUTPUT_FILES = (CARD_FILE, JOURNAL_FILE, *EVALUATION_FILES)


def is_shard(name: str) -> bool:
    """Whether a file of an output is a shard of it; weights in a folder are of a module of sentence-transformers."""
    return name.endswith(".safetensors") and "/" not in name and not is_adapter(name)


def is_adapter(name: str) -> bool:
    """Whether a file is one of those that peft saves for an adapter, in the model's own directory."""
    return name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def left_out_part(name: str) -> str | None:
    """Return the part of a file's path for which it is no part of the model, such as a hidden directory.

    Args:
        name: path relative to the model's directory; that of a directory ends in a slash.

    Returns:
        The file's path itself, or that of a directory with a slash: "original/" for "original/params.json". None if the
        file belongs to the model.
    """
    parts = name.split("/")
    for depth, directory in enumerate(parts[:-1], 1):
        if _matches(directory, LEFT_OUT_DIRECTORIES) or (depth == 1 and directory in _OUTPUT_FILES):
            return "/".join(parts[:depth]) + "/"
    return name if _matches(parts[-1], LEFT_OUT_FILES) or name in (JOURNAL_FILE, *EVALUATION_FILES) else None
