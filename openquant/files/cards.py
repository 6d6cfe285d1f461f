"""README.md of a model's directory, read: its metadata, and the section that this program adds to it."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

import yaml

from .checkpoint import Checkpoint, readable
from .names import CARD_FILE
from .small_files import MAX_SMALL, read_small

# Entries that describe the base model and would be wrong here, or that this program sets itself.
REPLACED = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "model-index", "new_version")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# The section that this program adds, of an earlier run.
SECTION = re.compile(
    r"^# [^\n]*: ([A-Z0-9]+(?: and [A-Z0-9]+)*) weights\n\n\| \| \|\n\|---\|---\|\n\| source \|.*\Z",
    re.DOTALL | re.MULTILINE,
)
# The commands in it, and how each engine is started.
_BLOCK = re.compile(r"^```\n.*?^```$", re.DOTALL | re.MULTILINE)
# What may stand behind them (formats/kv_cache.py).
_FLAGS = r"(?: --kv-cache-dtype fp8)?"
COMMANDS = {"vLLM": "vllm serve", "SGLang": "python -m sglang.launch_server --model-path"}
# What a card adds to the name of a source that is quantized itself.
QUANTIZED = ", which is quantized already"
# What a card says of weights that are not rounded to nearest.
ROUNDED_BY_GPTQ = "GPTQ"
# Of metadata; that of models with results of many benchmarks has a few hundred kilobytes.
_MOST_METADATA = 1 << 20
# Collections within each other, and letters of a number or a date; all else is no card but an attack on its readers.
_DEEPEST = 64
_LONGEST_NUMBER = 64
# libyaml's parser is ten times as fast, and not everywhere.
_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_TYPED = tuple(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "timestamp"))
# What PyYAML raises for text that is no YAML.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


def card_of(checkpoint: Checkpoint) -> str:
    """A directory's README.md; empty if there is none of a usual size, or it lies elsewhere."""
    if not 0 < checkpoint.files.get(CARD_FILE, 0) <= MAX_SMALL or not (checkpoint.root / CARD_FILE).is_file():
        return ""
    with readable():
        return read_small(checkpoint.root / CARD_FILE, CARD_FILE).decode(errors="replace")


def source_of(card: str) -> str | None:
    """What a card that this program wrote for a quantized output says of the source; None if it wrote none there."""
    found = SECTION.search(card)
    if found is None or found.group(1) == "BF16":
        return None
    return next(line for line in found.group().splitlines() if line.startswith("| source |"))


def says_folds(card: str) -> bool:
    """Whether the section of ours in a card says that inputs of layers are divided in norms before them."""
    found = SECTION.search(card)
    return found is not None and any(line.startswith("| folded |") for line in found.group().splitlines())


def says_weighed(card: str) -> bool:
    """Whether the section of ours in a card says that a calibration weighed errors in the search for scales."""
    found = SECTION.search(card)
    return found is not None and any(line.startswith("| scales |") for line in found.group().splitlines())


def is_rounded_by_gptq(card: str) -> bool:
    """Whether a card that this program wrote says so of the weights."""
    found = SECTION.search(card)
    return found is not None and f"\n| rounded by | {ROUNDED_BY_GPTQ}, " in found.group()


def split_card(card: str) -> tuple[str, dict[str, Any], str]:
    """Metadata without the entries that are replaced, all of its entries, and the text.

    Metadata that is no YAML mapping, or not one that every reader makes the same of in no time, counts as text.
    """
    found = _FRONT_MATTER.match(card)
    if not found:
        return "", {}, card
    if not found.group(1).strip():
        return "", {}, card[found.end() :]
    metadata = found.group(1).replace("\r\n", "\n").strip("\n") + "\n"
    mapping = _compose(metadata, _LOADER)
    kept = None if mapping is None else _without(metadata, mapping)
    if mapping is None or kept is None:
        return "", {}, card
    return kept, _text_of(mapping), card[found.end() :]


def _compose(metadata: str, loader: type[Any]) -> yaml.MappingNode | None:
    """The mapping that a YAML text is; None if it is another thing or not to be read.

    References to collections elsewhere in it are not: a few lines of them stand for gigabytes.
    """
    if len(metadata) > _MOST_METADATA:
        return None
    try:
        depth, scalars = 0, set()
        for event in yaml.parse(metadata, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # No anchor can be given twice.
            if isinstance(event, yaml.ScalarEvent):
                scalars.add(event.anchor)
            if depth > _DEEPEST or (isinstance(event, yaml.AliasEvent) and event.anchor not in scalars):
                return None
        found = yaml.compose(metadata, Loader=loader)
    except _NOT_YAML:
        return None
    return found if isinstance(found, yaml.MappingNode) and found.value and _is_readable(found) else None


def _is_readable(node: yaml.Node) -> bool:
    """Whether what reads the card next, such as the Hub, makes a value of it, without a number as long as a book."""
    if isinstance(node, yaml.MappingNode):
        pairs = node.value
        return node.tag == f"{_TAG}map" and all(
            isinstance(key, yaml.ScalarNode) and _is_readable(key) and _is_readable(value) for key, value in pairs
        )
    if isinstance(node, yaml.SequenceNode):
        return node.tag == f"{_TAG}seq" and all(map(_is_readable, node.value))
    if node.tag == f"{_TAG}str":
        return True
    if node.tag not in _TYPED or len(node.value) > _LONGEST_NUMBER:
        return False
    try:
        yaml.SafeLoader.yaml_constructors[node.tag](yaml.constructor.SafeConstructor(), node)
    except (LookupError, ValueError, ArithmeticError, AttributeError, TypeError):
        # What its constructors raise for a tag that the text does not fit.
        return False
    return True


def _text_of(node: yaml.Node) -> Any:
    """A node's value with every scalar as text: to YAML's own rules the language code "no" is a boolean."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _text_of(value) for key, value in node.value}
    return [_text_of(value) for value in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def _without(metadata: str, mapping: yaml.MappingNode) -> str | None:
    """The metadata without the entries that are replaced, in its own words where that is possible.

    None if it is not possible in others either.
    """
    pairs = [(key, value) for key, value in mapping.value if key.value not in REPLACED]
    if not pairs:
        return ""
    starts = [(key.start_mark.index, key.value) for key, _ in mapping.value]
    kept = metadata[: starts[0][0]]
    for (start, key), (end, _) in zip(starts, [*starts[1:], (len(metadata), "")], strict=True):
        if key not in REPLACED:
            kept += metadata[start:end]
    kept = kept if kept.endswith("\n") else kept + "\n"
    # Braces around it all, or a marker of the document's end: then the entries are written anew.
    expected = {**_text_of(yaml.MappingNode(mapping.tag, pairs)), "openquant": "x"}
    for front in (kept, yaml.serialize(yaml.MappingNode(mapping.tag, pairs, flow_style=False), allow_unicode=True)):
        # libyaml takes some tabs and the like that other readers refuse.
        with_another = _compose(f"{front}openquant: x\n", yaml.SafeLoader)
        if with_another is not None and _text_of(with_another) == expected:
            return front
    return None


def shell_word(path: str) -> str:
    """A path as it must be typed: quoted if need be, on one line, and never taken for an option."""
    word = f"./{path}" if path.startswith("-") else path
    if word.isprintable():
        return shlex.quote(word)
    # As bash and zsh have it: $'a\x0ab'.
    return f"$'{''.join(map(_typed, word))}'"


def _typed(letter: str) -> str:
    if letter in "'\\":
        return f"\\{letter}"
    return letter if letter.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def published_card(card: str, repo: str, revision: str | None) -> str:
    """The README.md of an output directory as it is published: its commands serve that revision of the repository.

    Args:
        card: the directory's.
        repo: the repository.
        revision: a pull request's, such as "refs/pr/1"; None for main.
    """
    section = SECTION.search(card)
    block = section and _BLOCK.search(card, section.start())
    if not block:
        return card
    written = f"(?m)^({'|'.join(map(re.escape, COMMANDS.values()))}) .*?({_FLAGS})$"
    commands = re.sub(written, lambda found: f"{found[1]} {serve_argument(repo, revision)}{found[2]}", block[0])
    return card[: block.start()] + commands + card[block.end() :]


def serve_argument(output: str, revision: str | None) -> str:
    """What is typed behind an engine's command: "Qwen3-8B-FP8", "'./my model'", "org/name --revision refs/pr/1"."""
    return shell_word(output) + (f" --revision {shell_word(revision)}" if revision else "")


def base_models(card: str) -> list[str]:
    """The repositories that a card names as those its model is made from."""
    named = split_card(card)[1].get("base_model", [])
    return [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
