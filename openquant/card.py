"""README.md of an output: the base model's card, corrected where it would be wrong, and a section of our own.

It holds what changes the bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from . import __version__
from .models import SGLANG
from .patterns import collapse
from .plan import Plan

# Entries that describe the base model and would be wrong here, or that this program sets itself.
_REPLACED = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "model-index", "new_version")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# The section that this program adds, of an earlier run.
_SECTION = re.compile(
    r"^# [^\n]*: (FP8|BF16) weights\n\n\| \| \|\n\|---\|---\|\n\| source \|.*\Z", re.DOTALL | re.MULTILINE
)
# The commands in it, and how each engine is started.
_BLOCK = re.compile(r"^```\n.*?^```$", re.DOTALL | re.MULTILINE)
_COMMANDS = {"vLLM": "vllm serve", "SGLang": "python -m sglang.launch_server --model-path"}
# What a card adds to the name of a source that is quantized itself.
QUANTIZED = ", which is quantized already"
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


def model_card(base: str | None, plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    """The output's README.md.

    Args:
        base: the source's README.md, None if it has none.
        plan: what was done.
        name: the source's name.
        repo: the source's Hub repository, None if unknown.
        revision: the source's commit, None if unknown.
        directory: the name of the output directory.
    """
    kept, entries, text = _split(base or "")
    text = _SECTION.sub("", text)
    tags = entries.get("tags", [])
    ours: dict[str, Any] = {}
    if repo is not None:
        ours["base_model"] = repo
        if plan.quantization_config:
            ours["base_model_relation"] = "quantized"
    # What loads it; to transformers a per-tensor output is garbage.
    ours["library_name"] = "vllm" if plan.quantization_config else "transformers"
    task = "image-text-to-text" if plan.model.text_config else "text-generation"
    told = entries.get("pipeline_tag")
    ours["pipeline_tag"] = told if told and isinstance(told, str) else task
    # An entry without a value is no tag.
    known = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag and isinstance(tag, str)]
    # Compressed-tensors directories are searched for by that tag.
    package = [plan.scheme.package] if plan.scheme.package else []
    # What was true of a quantized source.
    known = [tag for tag in known if not re.match(r"fp8|mxfp|int4|quantized|compressed-tensors|[48]-bit", tag)]
    schemes = [f"fp8-{scheme.name}" for scheme in plan.schemes]
    added = ["fp8", "vllm", "quantized", *package, *schemes] if plan.quantization_config else []
    ours["tags"] = list(dict.fromkeys([*known, *added]))
    front = kept + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)
    section = _section(plan, name, repo, revision, directory)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def source_of(card: str) -> str | None:
    """What a card that this program wrote for an FP8 output says of the source; None if it wrote none there."""
    found = _SECTION.search(card)
    if found is None or found.group(1) != "FP8":
        return None
    return next(line for line in found.group().splitlines() if line.startswith("| source |"))


def _split(card: str) -> tuple[str, dict[str, Any], str]:
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
    pairs = [(key, value) for key, value in mapping.value if key.value not in _REPLACED]
    if not pairs:
        return ""
    starts = [(key.start_mark.index, key.value) for key, _ in mapping.value]
    kept = metadata[: starts[0][0]]
    for (start, key), (end, _) in zip(starts, [*starts[1:], (len(metadata), "")], strict=True):
        if key not in _REPLACED:
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
    """A path as it must be typed: quoted if need be, and never taken for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def gigabytes(nbytes: int) -> str:
    """A size for people: "1.24 GB", "8.4 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def unquantized(plan: Plan) -> list[str]:
    """What stayed unquantized and why, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for group in plan.groups:
        if not group.quantized and len(group.shape) >= 2:
            reasons.setdefault(group.why, []).extend(group.names)
    return [f"{', '.join(collapse(names))} ({why})" for why, names in reasons.items()]


def readers(plan: Plan) -> str:
    """Which programs read this output right."""
    scheme = plan.scheme
    engines = f"This output is for {' and '.join(plan.engines)}"
    unread = plan.unread_by_sglang
    if unread is not None:
        engines += f" ({SGLANG} does not load it: {unread.why})"
    of_experts = (found.transformers_experts for found in plan.expert_schemes.values())
    problem = scheme.transformers or next(filter(None, of_experts), None)
    if problem is None and plan.quantization_config and not plan.model.transformers_reads_blocks:
        problem = "finds no weights for experts stored one by one"
    if problem is not None:
        return f"{engines}. Do not load it with transformers, which {problem}."
    return f"{engines}; transformers loads it too{f', with {scheme.package} installed' if scheme.package else ''}."


def serve_commands(plan: Plan, output: str, revision: str | None = None) -> list[str]:
    """What starts each engine on an output directory, or on a revision of a repository (main if None)."""
    return [f"{_COMMANDS[engine]} {_served(output, revision)}" for engine in plan.engines]


def published_card(card: str, repo: str, revision: str | None) -> str:
    """The README.md of an output directory as it is published: its commands serve that revision of the repository.

    Args:
        card: the directory's.
        repo: the repository.
        revision: a pull request's, such as "refs/pr/1"; None for main.
    """
    section = _SECTION.search(card)
    block = section and _BLOCK.search(card, section.start())
    if not block:
        return card
    written = f"(?m)^({'|'.join(map(re.escape, _COMMANDS.values()))}) .*$"
    commands = re.sub(written, lambda found: f"{found[1]} {_served(repo, revision)}", block[0])
    return card[: block.start()] + commands + card[block.end() :]


def _served(output: str, revision: str | None) -> str:
    return shell_word(output) + (f" --revision {shell_word(revision)}" if revision else "")


def base_models(card: str) -> list[str]:
    """The repositories that a card names as those its model is made from."""
    named = _split(card)[1].get("base_model", [])
    return [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]


def _section(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    commands = serve_commands(plan, directory)
    settings = plan.quantization_config
    activations = "" if plan.scheme.static else ", dynamic activations"
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    number = "FP8" if settings else "BF16"
    left = ["Not quantized: norms and biases, and", "", *[f"- {line}" for line in unquantized(plan)], ""]
    left = left if settings else []
    # Neither may break the heading or the table it stands in.
    name = " ".join(name.split()).replace("|", "\\|")
    origin = f"[{repo}](https://huggingface.co/{repo})" if repo else name
    # Where codes pass through, or were made of decoded ones, the unquantized model does not make the same.
    origin += QUANTIZED if settings and plan.decodes else ""
    lines = [
        f"# {name}: {number} weights",
        "",
        f"| | |\n|---|---|\n| source | {origin} |",
        *([f"| revision | `{revision}` |"] if revision else []),
        f"| format | {plan.description}{serialized} |",
        f"| size | {gigabytes(plan.source_bytes)} -> {gigabytes(plan.output_bytes)} |",
        f"| made with | openquant {__version__} |",
        "",
        *left,
        readers(plan),
        "",
        "```",
        *commands,
        "```",
        "",
    ]
    return "\n".join(lines)
