"""README.md of an output: the base model's card, corrected where it would be wrong, and a section of our own.

It holds what changes the bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..files.cards import COMMANDS, QUANTIZED, ROUNDED_BY_GPTQ, SECTION, serve_argument, shell_word, split_card
from ..formats.kv_cache import FLAG
from ..patterns import collapse
from ..plan import summary
from ..plan.config import has_fp8_cache, required_package
from ..plan.engines import sglang_refusal
from ..plan.gptq import tokens_of
from ..plan.plan import Plan
from ..recipes import recipe_command
from ..version import SGLANG, __version__
from .escape import join_lines, markdown

# What may stand in a link.
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
WEIGHED = "searched for by what goes into each column of {} layers"


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
    package = required_package(plan)
    # What was true of a quantized source.
    known = [
        tag for tag in known if not re.match(r"fp8|mxfp|int[48]|w[48]a|quantized|compressed-tensors|[48]-bit", tag)
    ]
    schemes = [scheme.tag for scheme in plan.decisions.schemes]
    numbers = [scheme.format.number.title.lower() for scheme in plan.decisions.schemes]
    added = (
        [*numbers, "vllm", "quantized", *([package] if package else []), *schemes] if plan.quantization_config else []
    )
    ours["tags"] = list(dict.fromkeys([*known, *added]))
    plain = all(text.isprintable() for text in (repo or "", ours["pipeline_tag"], *ours["tags"]))
    front = kept + yaml.safe_dump(ours, sort_keys=False, allow_unicode=plain)
    section = _section(plan, name, repo, revision, directory)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def evaluated_card(card: str, repo: str, evaluation: Mapping[str, Any]) -> str:
    """A card with the figures of an evaluation behind it.

    Args:
        card: README.md as it is published.
        repo: the repository.
        evaluation: what an eval.json holds, checked.
    """
    kl, floor, perplexity = evaluation["kl"], evaluation["floor"], evaluation["perplexity"]
    text, source = evaluation["text"], evaluation["source"]["name"]
    rows = [
        ("verdict", f"{markdown(evaluation['verdict'])}: {markdown('; '.join(evaluation['reasons']))}"),
        ("KL to the source, mean", f"{kl['mean']:.3g} nats{_between(kl['interval'])}"),
        ("floor, bfloat16's own noise", f"{floor['kl']:.3g} nats"),
        ("same most probable token", f"{_percent(evaluation['top1'])} (floor {_percent(floor['top1'])})"),
        (
            "perplexity",
            f"{perplexity['source']:.4g} -> {perplexity['output']:.4g}, "
            f"times {perplexity['ratio']:.4f}{_between(perplexity['interval'], '.4f')}",
        ),
        (
            "measured on",
            f"{text['positions']:,} tokens of {text['documents']:,} texts, SHA-256 {markdown(text['sha256'][:12])}",
        ),
    ]
    lines = ["", "## Measured against the source", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if evaluation["texts"]:
        lines += ["", *_told(evaluation["texts"][0])]
    lines += ["", "Intervals are of 95 %, over texts. Again:", "", "```", _again(repo, source, text), "```", ""]
    return card.rstrip("\n") + "\n" + join_lines(lines)


# Letters of each text in a card.
_TOLD = 400


def _told(text: Mapping[str, Any]) -> list[str]:
    """One prompt and both answers."""
    cells = [(name, markdown(shortened(text[name], _TOLD))) for name in SIDES if name in text]
    said = difference_text(text)
    return [
        "| | |",
        "|---|---|",
        *[f"| {name} | {cell} |" for name, cell in cells],
        "",
        f"{said[0].upper()}{said[1:]}.",
    ]


# What is shown of a text, in this order: `text` is what follows the prompt where models go along it.
SIDES = ("prompt", "text", "source", "output")


def difference_text(text: Mapping[str, Any]) -> str:
    """How the two sides of a text compare: "they differ from token 13 on"."""
    at = text["differs_at"]
    if "text" in text:
        same = "they are the same" if at is None else f"the first that differs is token {at + 1}"
        return f"at each place of the text, the token that each finds most likely: {same}"
    return "both answer alike" if at is None else f"they differ from token {at + 1} on"


def shortened(text: str, most: int) -> str:
    """The beginning of a text, with dots if there is more."""
    return text if len(text) <= most else f"{text[:most]}..."


def _again(repo: str, source: str, text: Mapping[str, Any]) -> str:
    """The command that repeats an evaluation, on one line."""
    words = [("openquant eval", repo), ("--source", source)]
    words += [("--text", name) for name in text.get("files", ())]
    words += [("--dataset", text["dataset"])] if text.get("dataset") else []
    words += [("--samples", str(text["documents"])), ("--length", str(text["length"]))]
    return " ".join(f"{flag} {shell_word(value)}" for flag, value in words)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _between(interval: Sequence[float] | None, form: str = ".3g") -> str:
    return f" [{', '.join(format(edge, form) for edge in interval)}]" if interval else ""


def gigabytes(nbytes: int) -> str:
    """A size for people: "1.24 GB", "8.4 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 1000 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes} B"


def unquantized_lines(plan: Plan) -> list[str]:
    """What stayed unquantized and why, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for line in plan.lines:
        if not line.quantized and len(line.shape) >= 2:
            reasons.setdefault(line.why, []).extend(line.names)
    return [f"{', '.join(collapse(names))} ({why})" for why, names in reasons.items()]


def engines_that_read(plan: Plan) -> str:
    """Which programs read this output right."""
    engines = f"This output is for {' and '.join(summary.engines(plan))}"
    unread = sglang_refusal(plan.entry, plan.decisions)
    if unread is not None:
        engines += f" ({SGLANG} does not load it: {unread.why})"
    of_experts = [scheme for weight, scheme in plan.decisions.kinds if plan.entry.experts(weight.module)]
    problems = [scheme.transformers for scheme in plan.decisions.schemes]
    problems += [scheme.transformers_experts for scheme in of_experts]
    problem = next(filter(None, problems), None)
    split = of_experts and not all(experts.transformers for experts in plan.model.experts)
    if problem is None and plan.scheme and (split or not plan.model.transformers_reads_blocks):
        problem = "does not find all of its weights under these names"
    if problem is not None:
        return f"{engines}. Do not load it with transformers, which {problem}."
    package = required_package(plan)
    return f"{engines}; transformers loads it too{f', with {package} installed' if package else ''}."


def serve_commands(plan: Plan, output: str, revision: str | None = None) -> list[str]:
    """What starts each engine on an output directory, or on a revision of a repository (main if None)."""
    flags = {"vLLM": f" {FLAG}"} if has_fp8_cache(plan) and plan.quantization_config["quant_method"] == "fp8" else {}
    return [
        f"{COMMANDS[engine]} {serve_argument(output, revision)}{flags.get(engine, '')}"
        for engine in summary.engines(plan)
    ]


def kv_cache_text(plan: Plan) -> str:
    """The scales of an FP8 cache: "one scale for keys and one for values in each of 28 layers"."""
    return f"one scale for keys and one for values in each of {summary.cache_layers(plan)} layers"


def _section(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    commands = serve_commands(plan, directory)
    settings, transforms, recipe = plan.quantization_config, plan.options.transforms, plan.provenance.recipe
    activations = plan.scheme.activations if plan.scheme else ""
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    left = ["Not quantized: norms and biases, and", "", *[f"- {line}" for line in unquantized_lines(plan)], ""]
    left = left if plan.scheme else []
    # Neither may break the heading or the table it stands in.
    name = re.sub(r"[<\[]", lambda found: f"&#{ord(found[0])};", " ".join(name.split()).replace("|", "\\|"))
    origin = f"[{repo}](https://huggingface.co/{repo})" if repo and _REPOSITORY.fullmatch(repo) else name
    # Where codes pass through, or were made of decoded ones, the unquantized model does not make the same.
    origin += QUANTIZED if settings and summary.has_quantized_source(plan) else ""
    lines = [
        f"# {name}: {summary.numbers(plan)} weights",
        "",
        "| | |",
        "|---|---|",
        f"| source | {origin} |",
        *([f"| revision | `{revision}` |"] if revision else []),
        f"| format | {summary.description(plan)}{serialized} |",
        *([f"| rounded by | {ROUNDED_BY_GPTQ}, {tokens_of(plan.options.gptq)} |"] if plan.options.gptq else []),
        *([f"| KV cache | FP8, {kv_cache_text(plan)} |"] if has_fp8_cache(plan) else []),
        *([f"| folded | {transforms.title} |"] if transforms and transforms.title else []),
        *([f"| scales | {WEIGHED.format(transforms.weighed)} |"] if transforms and transforms.weighed else []),
        f"| size | {gigabytes(summary.source_bytes(plan))} -> {gigabytes(summary.output_bytes(plan))} |",
        f"| made with | openquant {__version__} |",
        *([f"| recipe | {markdown(recipe_command(recipe['options']))} |"] if recipe else []),
        "",
        *left,
        engines_that_read(plan),
        "",
        "```",
        *commands,
        "```",
        "",
    ]
    # No value may end its line.
    return join_lines(lines)
