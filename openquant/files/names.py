"""Names of the files in a model's directory, and which files are no part of a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# Our own record beside an output (output.py); it says nothing of a model.
JOURNAL_FILE = ".openquant.json"
# Never part of the output: weights in other formats, what a training run leaves behind, archives and films. Pictures
# stay, which the card shows, and so does a lone .gz, since some tokenizers' code reads its vocabulary from one.
LEFT_OUT_FILES = (
    "*.safetensors", "*.index.json", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.onnx*", "*.gguf", "*.msgpack",
    "*.ot", "*.tflite", "*.pkl", "*.pickle", "consolidated*", ".git",
    "*.nemo", "openvino_*", "*.mlmodel", "*imatrix*", "events.out.tfevents.*", "*.log",
    "*.zip", "*.tar", "*.tar.*", "*.tgz", "*.7z", "*.rar",
    "*.mp4", "*.mov", "*.avi", "*.mkv", "*.webm",
)  # fmt: skip
LEFT_OUT_DIRECTORIES = (".*", "original", "consolidated*", "checkpoint-*", "__pycache__", "*.mlpackage")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def left_out_part(name: str) -> str | None:
    """What of a file's name says that it is no part of the model: the file, or a directory it lies in; else None.

    For example "original/" for "original/params.json".
    """
    parts = name.split("/")
    for depth, directory in enumerate(parts[:-1], 1):
        # An output has files of these names.
        if _matches(directory, LEFT_OUT_DIRECTORIES) or (depth == 1 and directory in (CARD_FILE, JOURNAL_FILE)):
            return "/".join(parts[:depth]) + "/"
    return name if _matches(parts[-1], LEFT_OUT_FILES) or name == JOURNAL_FILE else None
