"""README.md of an output: the base model's card, corrected where it would be wrong, and a section of our own.

It holds what changes the bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..files.cards import COMMANDS, QUANTIZED, SECTION, served, split_card
from ..models import SGLANG
from ..patterns import collapse
from ..plan.plan import Plan
from ..version import __version__


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
    kept, entries, text = split_card(base or "")
    text = SECTION.sub("", text)
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
    package = [plan.scheme.package] if plan.scheme and plan.scheme.package else []
    # What was true of a quantized source.
    known = [
        tag for tag in known if not re.match(r"fp8|mxfp|int[48]|w[48]a|quantized|compressed-tensors|[48]-bit", tag)
    ]
    schemes = [scheme.tag for scheme in plan.schemes]
    numbers = [scheme.format.number.title.lower() for scheme in plan.schemes]
    added = [*numbers, "vllm", "quantized", *package, *schemes] if plan.quantization_config else []
    ours["tags"] = list(dict.fromkeys([*known, *added]))
    front = kept + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)
    section = _section(plan, name, repo, revision, directory)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def gigabytes(nbytes: int) -> str:
    """A size for people: "1.24 GB", "8.4 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def unquantized(plan: Plan) -> list[str]:
    """What stayed unquantized and why, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for line in plan.lines:
        if not line.quantized and len(line.shape) >= 2:
            reasons.setdefault(line.why, []).extend(line.names)
    return [f"{', '.join(collapse(names))} ({why})" for why, names in reasons.items()]


def readers(plan: Plan) -> str:
    """Which programs read this output right."""
    engines = f"This output is for {' and '.join(plan.engines)}"
    unread = plan.unread_by_sglang
    if unread is not None:
        engines += f" ({SGLANG} does not load it: {unread.why})"
    of_experts = (found.transformers_experts for found in plan.expert_schemes.values())
    problem = (plan.scheme and plan.scheme.transformers) or next(filter(None, of_experts), None)
    if problem is None and plan.quantization_config and not plan.model.transformers_reads_blocks:
        problem = "finds no weights for experts stored one by one"
    if problem is not None:
        return f"{engines}. Do not load it with transformers, which {problem}."
    package = plan.scheme and plan.scheme.package
    return f"{engines}; transformers loads it too{f', with {package} installed' if package else ''}."


def serve_commands(plan: Plan, output: str, revision: str | None = None) -> list[str]:
    """What starts each engine on an output directory, or on a revision of a repository (main if None)."""
    return [f"{COMMANDS[engine]} {served(output, revision)}" for engine in plan.engines]


def _section(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    commands = serve_commands(plan, directory)
    settings = plan.quantization_config
    activations = plan.scheme.activations if plan.scheme else ""
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    left = ["Not quantized: norms and biases, and", "", *[f"- {line}" for line in unquantized(plan)], ""]
    left = left if settings else []
    # Neither may break the heading or the table it stands in.
    name = " ".join(name.split()).replace("|", "\\|")
    origin = f"[{repo}](https://huggingface.co/{repo})" if repo else name
    # Where codes pass through, or were made of decoded ones, the unquantized model does not make the same.
    origin += QUANTIZED if settings and plan.decodes else ""
    lines = [
        f"# {name}: {plan.numbers} weights",
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
