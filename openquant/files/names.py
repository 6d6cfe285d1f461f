"""Names of the files in a model's directory, and which files are no part of a model."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# Our own record beside an output (output.py); it says nothing of a model.
JOURNAL_FILE = ".openquant.json"
# What an evaluation says of a model, in numbers, as a page and as a picture. They lie beside it and are no part of it:
# of a source they are not copied, as they say nothing of what is made from it.
EVAL_FILE, EVAL_PAGE, EVAL_PICTURE = EVALUATION_FILES = ("eval.json", "eval.html", "eval.png")
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
# Names that files have in an output.
_TAKEN = (CARD_FILE, JOURNAL_FILE, *EVALUATION_FILES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def left_out_part(name: str) -> str | None:
    """What of a file's name says that it is no part of the model: the file, or a directory it lies in; else None.

    For example "original/" for "original/params.json".
    """
    parts = name.split("/")
    for depth, directory in enumerate(parts[:-1], 1):
        # An output has files of these names.
        if _matches(directory, LEFT_OUT_DIRECTORIES) or (depth == 1 and directory in _TAKEN):
            return "/".join(parts[:depth]) + "/"
    return name if _matches(parts[-1], LEFT_OUT_FILES) or name in (JOURNAL_FILE, *EVALUATION_FILES) else None
