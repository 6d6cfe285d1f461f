"""Which files beside the weights belong to a model. Others lie in its directory: texts, keys, logs, scripts.

belonging(["vocab.txt", "train.py", ".env"], read)    # {"vocab.txt"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from ..errors import SourceError
from .names import CARD_FILE, INDEX_FILE, MODEL_FILES, is_adapter, left_out_part

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
    known = {name for name in names if _is_known(name)}
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


def _is_known(name: str) -> bool:
    return _matches(name.rsplit("/", 1)[-1].lower(), MODEL_FILES)


def _may_be_copied(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and ("/" in name or left_out_part(name) is None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _code(names: Collection[str], known: Iterable[str], read: Read) -> set[str]:
    """Modules that `auto_map` of a config names, and what they import from beside them."""
    modules = {name for name in names if name.endswith(".py")}
    configs = (name for name in known if "/" not in name and name.endswith("config.json")) if modules else ()
    left = [f"{module}.py" for name in configs for module in _auto_map(_parsed(read(name)))] + [_GENERATE]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name not in modules or name in found:
            continue
        found.add(name)
        folder = name[: name.rfind("/") + 1]
        left += [f"{folder}{module}.py" for module in _imported(read(name).decode(errors="replace"))]
    return found


def _auto_map(config: Any) -> Iterator[str]:
    """Modules of this repository, of "modeling_x.Model" or ["tokenization_x.Slow", null]."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key != "auto_map":
            yield from _auto_map(value)
        elif isinstance(value, dict):
            classes = [each for entry in value.values() for each in (entry if isinstance(entry, list) else [entry])]
            yield from (str(each).rpartition(".")[0] for each in classes)


def _imported(code: str) -> Iterator[str]:
    """Modules that relative imports name: `from .a import b`, `from . import a, b`, `import .a`."""
    for module, members in re.findall(r"^\s*(?:from|import)\s+\.(\w*)(?:\s+import\s+([\w, ]+))?", code, re.MULTILINE):
        yield from [module] if module else re.findall(r"\w+", members)


def _module_weights(names: Collection[str], read: Read) -> set[str]:
    """Weights in the folders that modules.json names."""
    modules = _parsed(read("modules.json")) if "modules.json" in names else None
    found: set[str] = set()
    for module in modules if isinstance(modules, list) else ():
        folder = module.get("path") if isinstance(module, dict) else None
        if not folder:
            continue
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
    config = _parsed(read("config.json"))
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
    card = read(CARD_FILE).decode(errors="replace") if shown and CARD_FILE in names else ""
    return {name for name in shown if name in card}


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
