"""Files of a model's directory: which belong to the model, and small ones read whole, such as configs and journals.

belonging(["vocab.txt", "train.py", ".env"], read)    # {"vocab.txt"}: not texts, keys, logs, scripts beside it

Anybody may have put anything into a directory: a pipe, a link to an endless device, a gigabyte. What is read here is
bounded in size, and comes from a regular file.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import SourceError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CARD_FILE = "README.md"
# The record of a run in its output (destination.py).
JOURNAL_FILE = ".openquant.json"
# An evaluation of the model: figures, page and picture. They are not copied from a source, because they do not describe
# the output.
EVAL_FILE = "eval.json"
EVAL_PAGE = "eval.html"
EVAL_PICTURE = "eval.png"
EVALUATION_FILES = (EVAL_FILE, EVAL_PAGE, EVAL_PICTURE)
# What engines, transformers, its processors and sentence-transformers read, in any directory and in lower case; parsers
# that `vllm serve` takes as plugins; and what a reader of the card is referred to.
MODEL_FILES = (
    "config.json", "configuration.json", "generation_config.json", "*processor_config.json", "*extractor_config.json",
    "*quant*_config.json", "*tokenizer_config.json", "sparse_attention_config.json", "modules.json",
    "sentence_*_config.json", "config_sentence_transformers.json",
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

# Where transformers looks for a model's own way of generating (generation/utils.py, load_custom_generate).
_GENERATE = "custom_generate/generate.py"
# What a card shows, or refers its readers to.
_SHOWN = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".md", ".pdf")
# Weights of sentence-transformers' modules (models/Dense.py), each in a folder that modules.json names.
_MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_WITH_WEIGHTS = ("Dense", "LayerNorm", "LSTM", "CNN", "WeightedLayerPooling")

# An adapter that config.json says is beside the weights (transformers, models/granite_speech, GraniteSpeechConfig). Its
# users give vLLM the model's own directory as the adapter: --lora-modules speech=DIR.
_HAS_ADAPTER = "has_lora_adapter"
_ADAPTER_CONFIG = "adapter_config.json"

Read = Callable[[str], bytes]


def is_shard(name: str) -> bool:
    """Whether a file of an output is a shard of it; weights in a folder are of a module of sentence-transformers."""
    return name.endswith(".safetensors") and "/" not in name and not is_adapter(name)


def is_adapter(name: str) -> bool:
    """Whether a file is one of those that peft saves for an adapter, in the model's own directory."""
    return name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


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
    if _matches(parts[-1], LEFT_OUT_FILES) or name in (JOURNAL_FILE, *EVALUATION_FILES):
        return name
    return None


def belonging(names: Collection[str], read: Read, copy: Iterable[str] = ()) -> set[str]:
    """Choose the files that belong to a model.

    Args:
        names: paths of all files but the weights that are read, relative to the model's directory.
        read: returns the contents of one of them; b"" if it cannot.
        copy: patterns of further files, as fnmatch has them. Hidden files are never chosen so, nor are weights and
            adapters that engines would load with the model.

    Returns:
        Those whose names engines, transformers, sentence-transformers or readers of the card look for, the code that
        `auto_map` names with what it imports, weights in folders that modules.json names, adapters that config.json
        names, and pictures and texts that the card names.
    """
    known = {name for name in names if _matches(name.rsplit("/", 1)[-1].lower(), MODEL_FILES)}
    found = known | _code(names, known, read) | _module_weights(names, read) | _shown(names, read)
    found = {name for name in found if left_out_part(name) is None or name.endswith(_MODULE_WEIGHTS)}
    found |= _adapters(names, read)
    return found | {name for name in names if _matches(name, copy) and _may_be_copied(name)}


def deciding(names: Iterable[str]) -> list[str]:
    """Choose the files that `belonging` reads to decide about others: configs and code if there is code, and the like.

    Args:
        names: paths of all files, relative to the model's directory.
    """
    names = list(names)
    patterns = ["modules.json"]
    if any(name.endswith(".py") for name in names):
        patterns += ["*config.json", "*.py"]
    if any(name.lower().endswith(_SHOWN) and name != CARD_FILE for name in names):
        patterns.append(CARD_FILE)
    return [name for name in names if _matches(name, patterns) and ("/" not in name or name == _GENERATE)]


def _may_be_copied(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and ("/" in name or left_out_part(name) is None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _code(names: Collection[str], known: Iterable[str], read: Read) -> set[str]:
    """Modules that `auto_map` of a config names, and what they import from beside them."""
    modules = {name for name in names if name.endswith(".py")}
    configs = [name for name in known if modules and "/" not in name and name.endswith("config.json")]
    left = [f"{module}.py" for name in configs for module in _auto_map(_parse(read(name)))] + [_GENERATE]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name not in modules or name in found:
            continue
        found.add(name)
        folder = name[: name.rfind("/") + 1]
        left += [f"{folder}{module}.py" for module in _find_imports(read(name).decode(errors="replace"))]
    return found


def _auto_map(config: Any) -> Iterator[str]:
    """Modules of this repository, of "modeling_x.Model" or ["tokenization_x.Slow", null]."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key != "auto_map":
            yield from _auto_map(value)
        elif isinstance(value, dict):
            for entry in value.values():
                classes = entry if isinstance(entry, list) else [entry]
                yield from (str(each).rpartition(".")[0] for each in classes)


def _find_imports(code: str) -> Iterator[str]:
    """Modules that relative imports name: `from .a import b`, `from . import a, b`, `import .a`."""
    for module, members in re.findall(r"^\s*(?:from|import)\s+\.(\w*)(?:\s+import\s+([\w, ]+))?", code, re.MULTILINE):
        yield from [module] if module else re.findall(r"\w+", members)


def _module_weights(names: Collection[str], read: Read) -> set[str]:
    """Weights in the folders that modules.json names."""
    found: set[str] = set()
    modules = _parse(read("modules.json")) if "modules.json" in names else None
    if not isinstance(modules, list):
        return found

    for module in modules:
        if not isinstance(module, dict) or not module.get("path"):
            continue
        folder = module["path"]

        weights = {f"{folder}/{name}" for name in _MODULE_WEIGHTS}.intersection(names)
        kind = str(module.get("type")).rpartition(".")[2]
        if kind in _WITH_WEIGHTS and not weights:
            raise SourceError(
                f"modules.json names {folder}, a {kind} layer, whose weights are not there",
                "download or copy the model again, with its folders",
            )
        found |= weights
    return found


def _adapters(names: Collection[str], read: Read) -> set[str]:
    """Adapters that config.json says the model has: beside weights with an index, by which engines tell them apart, or
    in a folder that it names, such as vision-lora for its "vision_lora" (Phi-4-multimodal).
    """
    configs = [name for name in names if name.rpartition("/")[2] == _ADAPTER_CONFIG]
    config = _parse(read("config.json"))
    if not isinstance(config, dict):
        return set()
    beside = {name for name in names if is_adapter(name)}
    is_whole = _ADAPTER_CONFIG in beside and len(beside) > 1 and INDEX_FILE in names
    if config.get(_HAS_ADAPTER) is True and not is_whole:
        raise SourceError(
            f"config.json says that the model has an adapter ({_HAS_ADAPTER}), and none lies beside {INDEX_FILE}",
            f"download the model again whole, or set {_HAS_ADAPTER} to false in config.json",
        )

    named = {text.removeprefix("./").rstrip("/").replace("-", "_") for text in _texts(config)}
    found: set[str] = set()
    for folder in (name[: -len(_ADAPTER_CONFIG)] for name in configs):
        if folder and folder.rstrip("/").replace("-", "_") in named:
            found.update(name for name in names if name.startswith(f"{folder}adapter_"))
        elif not folder and config.get(_HAS_ADAPTER) is True:
            found |= beside
    return found


def _texts(value: Any) -> Iterator[str]:
    """All texts of a parsed config, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in (*value, *value.values()):
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _shown(names: Collection[str], read: Read) -> set[str]:
    shown = {name for name in names if name.lower().endswith(_SHOWN)}
    if not shown or CARD_FILE not in names:
        return set()
    card = read(CARD_FILE).decode(errors="replace")
    return {name for name in shown if name in card}


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# Largest sizes in bytes: of a config, card or journal, and of an index, which lists every tensor.
MAX_SMALL = 16 << 20
MAX_INDEX = 100_000_000
# Bytes that are hashed at a time.
PIECE = 1 << 22
# Characters of foreign text that a message shows.
_MAX_SHOWN = 100

# How a pointer of git-lfs begins, and the bytes that one has at most (docs/spec.md of git-lfs).
_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_POINTER = 1023

_DAMAGED = "download or copy it again"


# Files of JSON that engines parse before they load a model, besides config.json and the index.
PARSED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)


def damaged_json(root: Path) -> list[str]:
    """Find files of a model beside its weights that engines cannot parse: "tokenizer.json is not valid JSON: ...".

    Args:
        root: the model's directory.
    """
    problems = []
    for name in PARSED:
        if (root / name).is_file():
            try:
                json.loads((root / name).read_bytes().decode())
            except OSError as error:
                problems.append(f"{root / name} cannot be read: {error.strerror}")
            except (ValueError, RecursionError) as error:
                problems.append(f"{root / name} is not valid JSON: {error}")
    return problems


def open_regular(path: Path, what: str, hint: str = _DAMAGED, *, links: bool = True) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or a device.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".
        hint: hint of the error.
        links: whether a link to a regular file is allowed.

    Returns:
        The open binary file, which the caller closes.

    Raises:
        SourceError: it is not a regular file, or no file can have this path.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    try:
        status = path.stat() if links else path.lstat()
    except ValueError:
        # A null byte or half of a surrogate pair, which names from JSON may have.
        raise SourceError(f"{what} is no name that a file can have", "give the name of a file") from None

    # Opening a pipe would wait for its other end.
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{what} is not a regular file", hint)
    return path.open("rb")


def file_sha256(path: Path, what: str) -> str:
    """Return the SHA-256 of a regular file of any size, hexadecimal. Links are followed.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".

    Raises:
        SourceError: it is not a regular file.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    # hashlib.file_digest is not in Python 3.10.
    digest = hashlib.sha256()
    piece = memoryview(bytearray(PIECE))
    with open_regular(path, what) as file:
        while count := os.readv(file.fileno(), [piece]):
            digest.update(piece[:count])
    return digest.hexdigest()


def refuse_pointer(data: bytes, what: str) -> None:
    """Refuse a file that a clone without git-lfs has left as a pointer.

    Args:
        data: the file's contents, or at least its first 64 bytes.
        what: name of the file in the message.

    Raises:
        SourceError: it is a pointer.
    """
    if data.startswith(_POINTER):
        raise SourceError(f"{what} is a pointer of git-lfs, not the file itself", "fetch the files: git lfs pull")


def read_small(path: Path, what: str, limit: int = MAX_SMALL) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes. Links are followed.

    Args:
        path: the file.
        what: name of the file in messages, such as "config.json".
        limit: largest size in bytes.

    Raises:
        SourceError: it is not a regular file, larger than that, a pointer of git-lfs, or `path` is no possible path.
        OSError: it is missing or cannot be read. Callers convert it with `readable()` or `output_errors()`.
    """
    with open_regular(path, what) as file:
        data = file.read(limit + 1)

    if len(data) > limit:
        raise SourceError(f"{what} is larger than {limit:,} bytes", _DAMAGED)
    refuse_pointer(data, what)
    return data


def parse_json(data: bytes, what: str) -> Any:
    """Parse a JSON text in UTF-8 without a byte-order mark, as engines do.

    Args:
        data: the text.
        what: name of the file in messages.

    Returns:
        The parsed value: dict, list, str, int, float, bool or None.

    Raises:
        SourceError: it is not JSON.
    """
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError(
            f"{what} begins with a byte-order mark, which engines do not read", "save it again as UTF-8 without a mark"
        )
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not valid JSON: {error}", _DAMAGED) from None


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened for a message.

    Args:
        value: any value, such as one from a JSON file.
    """
    if not isinstance(value, str):
        return reprlib.repr(value)
    if len(value) > _MAX_SHOWN:
        value = f"{value[:_MAX_SHOWN]}..."
    return repr(value)
