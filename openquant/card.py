"""README.md of an output: the base model's card, corrected where it would be wrong, and a section of our own.

It holds what changes the bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from . import __version__
from .patterns import collapse
from .plan import Plan

# Entries that describe the base model and would be wrong here, or that this program sets itself.
_REPLACED = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "model-index", "new_version")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
# The section that this program adds, of an earlier run.
_SECTION = re.compile(
    r"^# [^\n]*: (FP8|BF16) weights\n\n\| \| \|\n\|---\|---\|\n\| source \|.*\Z", re.DOTALL | re.MULTILINE
)
# What PyYAML raises for text that is no YAML, or YAML that no card holds; the last three from its constructors.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError)


def model_card(
    base: str | None, plan: Plan, name: str, repo: str | None, revision: str | None, published: str | None
) -> str:
    """The output's README.md.

    Args:
        base: the source's README.md, None if it has none.
        plan: what was done.
        name: the source's name.
        repo: the source's Hub repository, None if unknown.
        revision: the source's commit, None if unknown.
        published: the Hub repository that the output goes to, None if it stays here or that is unknown.
    """
    metadata, text = _split(base or "")
    text = _SECTION.sub("", text)
    entries = _entries(metadata)
    tags = entries.get("tags", [])
    ours: dict[str, Any] = {}
    if repo is not None:
        ours["base_model"] = repo
        if plan.quantization_config:
            ours["base_model_relation"] = "quantized"
    # What loads it; to transformers a per-tensor output is garbage.
    ours["library_name"] = "vllm" if plan.quantization_config else "transformers"
    task = "image-text-to-text" if plan.model.text_config else "text-generation"
    ours["pipeline_tag"] = entries.get("pipeline_tag") or task
    known = [tags] if isinstance(tags, str) else [tag for tag in tags if isinstance(tag, str)]
    # Compressed-tensors directories are searched for by that tag.
    package = [plan.scheme.package] if plan.scheme.package else []
    # What was true of a quantized source.
    known = [tag for tag in known if not re.match(r"fp8|mxfp|int4|quantized|compressed-tensors|[48]-bit", tag)]
    schemes = [f"fp8-{scheme.name}" for scheme in plan.schemes]
    added = ["fp8", "vllm", "quantized", *package, *schemes] if plan.quantization_config else []
    ours["tags"] = list(dict.fromkeys([*known, *added]))
    front = _without(metadata, _REPLACED) + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)
    section = _section(plan, name, repo, revision, published)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def _split(card: str) -> tuple[str, str]:
    """Metadata and text; metadata that is not a YAML mapping counts as text."""
    found = _FRONT_MATTER.match(card)
    if not found or not _entries(found.group(1)):
        return "", card[found.end() :] if found and not found.group(1).strip() else card
    return found.group(1).replace("\r\n", "\n").strip("\n") + "\n", card[found.end() :]


def _entries(metadata: str) -> dict[str, Any]:
    """Top-level entries, every value as text: to YAML's own rules the language code "no" is a boolean."""
    try:
        found = yaml.load(metadata, Loader=yaml.BaseLoader)
        # What the Hub will read must be sound too.
        yaml.safe_load(metadata)
    except _NOT_YAML:
        return {}
    return found if isinstance(found, dict) else {}


def _without(metadata: str, keys: tuple[str, ...]) -> str:
    """The metadata without some of its top-level entries, the rest in its own words where that is possible."""
    left = {key: value for key, value in _entries(metadata).items() if key not in keys}
    if not left:
        return ""
    mapping = yaml.compose(metadata, Loader=yaml.BaseLoader)
    assert mapping is not None
    starts = [(key.start_mark.index, key.value) for key, _ in mapping.value]
    kept = metadata[: starts[0][0]]
    for (start, key), (end, _) in zip(starts, [*starts[1:], (len(metadata), "")], strict=True):
        if key not in keys:
            kept += metadata[start:end]
    kept = kept if kept.endswith("\n") else kept + "\n"
    # An anchor, braces around it all, a marker of the document's end: then the entries are written anew.
    with_another = _entries(kept + "openquant: x\n")
    if with_another == {**left, "openquant": "x"}:
        return kept
    loaded = yaml.safe_load(metadata)
    return yaml.safe_dump(
        {key: value for key, value in loaded.items() if key not in keys}, sort_keys=False, allow_unicode=True
    )


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
    engines = f"This output is for {' and '.join(scheme.engines)}"
    of_experts = (found.transformers_experts for found in plan.expert_schemes.values())
    problem = scheme.transformers or next(filter(None, of_experts), None)
    if problem is None and plan.quantization_config and not plan.model.transformers_reads_blocks:
        problem = "finds no weights for experts stored one by one"
    if problem is not None:
        return f"{engines}. Do not load it with transformers, which {problem}."
    return f"{engines}; transformers loads it too{f', with {scheme.package} installed' if scheme.package else ''}."


def serve_commands(plan: Plan, output: str) -> list[str]:
    """What starts each engine on an output directory."""
    commands = {"vLLM": "vllm serve", "SGLang": "python -m sglang.launch_server --model-path"}
    return [f"{commands[engine]} {shell_word(output)}" for engine in plan.scheme.engines]


def _section(plan: Plan, name: str, repo: str | None, revision: str | None, published: str | None) -> str:
    commands = serve_commands(plan, published or name + plan.scheme.suffix)
    settings = plan.quantization_config
    activations = "" if plan.scheme.static else ", dynamic activations"
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    number = "FP8" if settings else "BF16"
    left = ["Not quantized: norms and biases, and", "", *[f"- {line}" for line in unquantized(plan)], ""]
    left = left if settings else []
    # Neither may break the heading or the table it stands in.
    name = " ".join(name.split()).replace("|", "\\|")
    lines = [
        f"# {name}: {number} weights",
        "",
        f"| | |\n|---|---|\n| source | {f'[{repo}](https://huggingface.co/{repo})' if repo else name} |",
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
