"""README.md of an output: the base model's card, corrected where it would be wrong, and a section of our own.

It holds what changes the bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from . import __version__
from .patterns import collapse
from .plan import Plan

# Entries that describe the base model and would be wrong here, or that this program sets itself.
_REPLACED = ("base_model", "base_model_relation", "tags", "model-index", "new_version")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:^|\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_TOP_LEVEL_KEY = re.compile(r"^([^\s#\-][^:]*?)[ \t]*:", re.MULTILINE)


def model_card(base: str | None, plan: Plan, name: str, repo: str | None, revision: str | None) -> str:
    """The output's README.md.

    Args:
        base: the source's README.md, None if it has none.
        plan: what was done.
        name: the source's name.
        repo: the source's Hub repository, None if unknown.
        revision: the source's commit, None if unknown.
    """
    metadata, text = _split(base or "")
    tags = _strings(_load(metadata).get("tags"))
    kept = _without(metadata, _REPLACED)
    ours: dict[str, Any] = {}
    if repo is not None:
        ours["base_model"] = repo
        ours["base_model_relation"] = "quantized"
    ours["tags"] = list(dict.fromkeys([*tags, "fp8", "vllm", "quantized"]))
    front = kept + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)
    section = _section(plan, name, repo, revision)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def _split(card: str) -> tuple[str, str]:
    """Metadata and text; metadata that is not a YAML mapping counts as text."""
    found = _FRONT_MATTER.match(card)
    if not found:
        return "", card
    metadata = found.group(1).replace("\r\n", "\n").strip("\n")
    try:
        if not isinstance(yaml.safe_load(metadata), dict):
            return "", card
    except yaml.YAMLError:
        return "", card
    return metadata + "\n", card[found.end() :]


def _load(metadata: str) -> dict[str, Any]:
    # BaseLoader takes every value as text: to YAML the language code "no" would be a boolean.
    found = yaml.load(metadata, Loader=yaml.BaseLoader)
    return found if isinstance(found, dict) else {}


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [tag for tag in value if isinstance(tag, str)] if isinstance(value, list) else []


def _without(metadata: str, keys: tuple[str, ...]) -> str:
    """The metadata's own text without some of its top-level entries; the rest is not rewritten."""
    starts = [found.start() for found in _TOP_LEVEL_KEY.finditer(metadata)]
    names = [found.group(1).strip("\"'") for found in _TOP_LEVEL_KEY.finditer(metadata)]
    kept = metadata[: starts[0]] if starts else metadata
    for name, start, end in zip(names, starts, [*starts[1:], len(metadata)], strict=False):
        if name not in keys:
            kept += metadata[start:end]
    return kept


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
    if plan.scheme.block is None:
        return (
            "This output is for vLLM and SGLang. Do not load it with transformers, "
            "which misreads per-tensor `fp8` checkpoints without an error."
        )
    if not plan.model.transformers_reads_blocks:
        return (
            "This output is for vLLM and SGLang. Do not load it with transformers, "
            "which finds no weights for experts stored one by one."
        )
    return "This output is for vLLM and SGLang; transformers loads it too."


def _section(plan: Plan, name: str, repo: str | None, revision: str | None) -> str:
    title = repo or name
    lines = [
        f"# {name}: FP8 weights",
        "",
        f"| | |\n|---|---|\n| source | {f'[{repo}](https://huggingface.co/{repo})' if repo else name} |",
        *([f"| revision | `{revision}` |"] if revision else []),
        f"| format | float8_e4m3fn weights, {plan.scheme.title}, dynamic activations (`quant_method: fp8`) |",
        f"| size | {gigabytes(plan.source_bytes)} -> {gigabytes(plan.output_bytes)} |",
        f"| made with | openquant {__version__} |",
        "",
        "Not quantized: norms and biases, and",
        "",
        *[f"- {line}" for line in unquantized(plan)],
        "",
        readers(plan),
        "",
        "```",
        f"vllm serve {title.rsplit('/', 1)[-1]}{plan.scheme.suffix}",
        f"python -m sglang.launch_server --model-path {title.rsplit('/', 1)[-1]}{plan.scheme.suffix}",
        "```",
        "",
    ]
    return "\n".join(lines)
