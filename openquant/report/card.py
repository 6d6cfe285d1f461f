"""The model card (README.md) of an output: the source's card, corrected, with a section about the quantization.

It says what changes the output's bytes, and nothing about the machine that made them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..files.cards import (
    COMMANDS,
    KEPT_CODES,
    QUANTIZED,
    ROUNDED_BY_GPTQ,
    SECTION,
    serve_argument,
    shell_word,
    split_card,
)
from ..formats.kv_cache import FLAG
from ..patterns import collapse
from ..plan import summary
from ..plan.config import has_fp8_cache, required_package
from ..plan.engines import sglang_refusal
from ..plan.gptq import tokens_of
from ..plan.plan import Plan
from ..recipes import recipe_command
from ..registry.rules import is_embedding
from ..version import SGLANG, __version__
from .cells import gigabytes, shortened
from .escape import join_lines, markdown
from .tasks import task_summary
from .words import verdict_meaning

# Repository names that are safe in a Markdown link.
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
# Rows of the card are bytes of an output, which stay as they are.
WEIGHED = "searched for by what goes into each column of {} layers"


def model_card(base: str | None, plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    """Write the model card of an output.

    Args:
        base: text of the source's README.md; None if it has none.
        plan: the plan that made the output.
        name: the source's name.
        repo: the source's Hub repository, such as "org/name"; None if unknown.
        revision: the source's commit on the Hub; None if unknown.
        directory: name of the output directory, for the commands.

    Returns:
        The text of README.md, with YAML metadata.
    """
    kept, metadata, text = split_card(base or "")
    text = SECTION.sub("", text)
    tags = metadata.get("tags", [])
    entries: dict[str, Any] = {}
    if repo is not None:
        entries["base_model"] = repo
        if plan.quantization_config:
            entries["base_model_relation"] = "quantized"
    # The library that loads it: transformers computes nonsense with per-tensor outputs.
    entries["library_name"] = "vllm" if plan.quantization_config else "transformers"
    task = "image-text-to-text" if plan.model.text_config else "text-generation"
    pipeline_tag = metadata.get("pipeline_tag")
    entries["pipeline_tag"] = pipeline_tag if pipeline_tag and isinstance(pipeline_tag, str) else task
    # YAML entries without a value are None.
    source_tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag and isinstance(tag, str)]
    # Users search for compressed-tensors directories by that tag.
    package = required_package(plan)
    # Tags of a quantized source do not describe the output.
    source_tags = [
        tag
        for tag in source_tags
        if not re.match(r"fp8|mxfp|int[48]|w[48]a|quantized|compressed-tensors|[48]-bit", tag)
    ]
    schemes = [scheme.tag for scheme in plan.decisions.schemes]
    numbers = [scheme.format.number.title.lower() for scheme in plan.decisions.schemes]
    added = (
        [*numbers, "vllm", "quantized", *([package] if package else []), *schemes] if plan.quantization_config else []
    )
    entries["tags"] = list(dict.fromkeys([*source_tags, *added]))
    printable = all(value.isprintable() for value in (repo or "", entries["pipeline_tag"], *entries["tags"]))
    front = kept + yaml.safe_dump(entries, sort_keys=False, allow_unicode=printable)
    section = _section(plan, name, repo, revision, directory)
    body = f"{text.strip()}\n\n{section}" if text.strip() else section
    return f"---\n{front}---\n\n{body}"


def evaluated_card(card: str, repo: str, evaluation: Mapping[str, Any]) -> str:
    """Append the figures of an evaluation to a model card.

    Args:
        card: the text of README.md.
        repo: the Hub repository that the output is published in, for the command that repeats the evaluation.
        evaluation: the checked content of an eval.json.

    Returns:
        The text of the new README.md.
    """
    kl, floor, perplexity = evaluation["kl"], evaluation["floor"], evaluation["perplexity"]
    text, source = evaluation["text"], evaluation["source"]["name"]
    reasons = "; ".join([verdict_meaning(evaluation), *evaluation["reasons"]])
    rows = [
        ("verdict", f"{markdown(evaluation['verdict'])}: {markdown(reasons)}"),
        ("KL to the source, mean", f"{kl['mean']:.3g} nats{_interval(kl['interval'])}"),
        ("floor, bfloat16's own noise", f"{floor['kl']:.3g} nats"),
        ("same most probable token", f"{percent(evaluation['top1'])} (floor {percent(floor['top1'])})"),
        (
            "perplexity",
            f"{perplexity['source']:.4g} -> {perplexity['output']:.4g}, "
            f"times {perplexity['ratio']:.4f}{_interval(perplexity['interval'], '.4f')}",
        ),
        *([("accuracy on tasks", task_summary(evaluation["tasks"]))] if "tasks" in evaluation else []),
        (
            "measured on",
            f"{text['positions']:,} tokens of {text['documents']:,} texts, SHA-256 {markdown(text['sha256'][:12])}",
        ),
    ]
    lines = ["", "## Measured against the source", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if evaluation["texts"]:
        lines += ["", *_answer_table(evaluation["texts"][0])]
    lines += [
        "",
        "Intervals are of 95 %, over texts. Again:",
        "",
        "```",
        _eval_command(repo, source, evaluation),
        "```",
        "",
    ]
    return card.rstrip("\n") + "\n" + join_lines(lines)


# Characters of each text in a card.
_TEXT_LENGTH = 400


def _answer_table(text: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of a prompt and both answers."""
    cells = [(name, markdown(shortened(text[name], _TEXT_LENGTH))) for name in SIDES if name in text]
    difference = difference_text(text)
    return [
        "| | |",
        "|---|---|",
        *[f"| {name} | {cell} |" for name, cell in cells],
        "",
        f"{difference[0].upper()}{difference[1:]}.",
    ]


# Keys of eval.json's `texts` in the order in which they are shown. Only teacher-forced ones have `text`.
SIDES = ("prompt", "text", "source", "output")


def difference_text(text: Mapping[str, Any]) -> str:
    """Say where both answers begin to differ: "they differ from token 13 on".

    Args:
        text: one of eval.json's `texts`. `differs_at` is the index of the first token that differs, None if all are
            equal; with `text`, the tokens are predictions along that text instead of answers.
    """
    at = text["differs_at"]
    if "text" in text:
        same = "they are the same" if at is None else f"the first that differs is token {at + 1}"
        return f"the most probable token of each model at each position of the text: {same}"
    return "both answer alike" if at is None else f"they differ from token {at + 1} on"


def _eval_command(repo: str, source: str, evaluation: Mapping[str, Any]) -> str:
    """Return the command that repeats an evaluation, on one line."""
    text, tasks = evaluation["text"], evaluation.get("tasks")
    words = [("openquant eval", repo), ("--source", source)]
    words += [("--text", name) for name in text.get("files", ())]
    words += [("--dataset", text["dataset"])] if text.get("dataset") else []
    words += [("--tasks", name) for name in tasks["named"]] if tasks else []
    if tasks and any(figures["kl"] is None for figures in tasks["tasks"]):
        # One server for the source and one for the output.
        words += [("--server", "URL"), ("--server", "URL")]
    words += [("--limit", str(tasks["limit"]))] if tasks and tasks["limit"] is not None else []
    words += [("--samples", str(text["documents"])), ("--length", str(text["length"]))]
    command = " ".join(f"{flag} {shell_word(value)}" for flag, value in words)
    return f"{command} --apply-chat-template" if tasks and tasks.get("chat") else command


def percent(share: float) -> str:
    """Format a share with two digits: "98.71 %".

    Args:
        share: the share, of 1.
    """
    return f"{100 * share:.2f} %"


def _interval(interval: Sequence[float] | None, format_spec: str = ".3g") -> str:
    return f" [{', '.join(format(edge, format_spec) for edge in interval)}]" if interval else ""


def unquantized_lines(plan: Plan) -> list[str]:
    """List the matrices that stay unquantized, a line for each reason: "lm_head (output head)".

    Args:
        plan: the plan that makes the output.

    Returns:
        One line for each reason, with the tensors' names; those of equal layers as one name with ranges.
    """
    reasons: dict[str, list[str]] = {}
    for line in plan.lines:
        if not line.quantized and len(line.shape) >= 2:
            reasons.setdefault(line.why, []).extend(line.names)
    return [f"{', '.join(collapse(names))} ({why})" for why, names in reasons.items()]


def engines_that_read(plan: Plan) -> str:
    """Say which engines load an output, and whether transformers loads it too.

    Args:
        plan: the plan that makes the output.

    Returns:
        One sentence or two, in plain text.
    """
    engines = f"This output is for {' and '.join(summary.engines(plan))}"
    unread = sglang_refusal(plan.entry, plan.decisions)
    if unread is not None:
        engines += f" ({SGLANG} does not load it: {unread.why})"
    expert_schemes = [scheme for weight, scheme in plan.decisions.kinds if plan.entry.experts(weight.module)]
    problems = [scheme.transformers for scheme in plan.decisions.schemes]
    problems += [scheme.transformers_experts for scheme in expert_schemes]
    if any(is_embedding(weight.module) for weight, _ in plan.decisions.kinds):
        problems.append("does not read its quantized embedding")
    problem = next(filter(None, problems), None)
    split = expert_schemes and not all(experts.transformers for experts in plan.model.experts)
    if problem is None and plan.scheme and (split or not plan.model.transformers_reads_blocks):
        problem = "does not find all of its weights under these names"
    if problem is not None:
        return f"{engines}. Do not load it with transformers, which {problem}."
    package = required_package(plan)
    return f"{engines}; transformers loads it too{f', with {package} installed' if package else ''}."


def serve_commands(plan: Plan, output: str, revision: str | None = None) -> list[str]:
    """Return the command that starts each engine on an output.

    Args:
        plan: the plan that made the output.
        output: the output's directory or Hub repository.
        revision: revision of the repository; None for main.

    Returns:
        A line for a shell for each engine that loads the output, such as "vllm serve Qwen3-8B-FP8".
    """
    flags = {"vLLM": f" {FLAG}"} if has_fp8_cache(plan) and plan.quantization_config["quant_method"] == "fp8" else {}
    return [
        f"{COMMANDS[engine]} {serve_argument(output, revision)}{flags.get(engine, '')}"
        for engine in summary.engines(plan)
    ]


# Widest bar in a card, in characters, and characters that are an eighth of one to seven eighths wide.
_BAR, _EIGHTHS = 24, " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def _frontier(found: Mapping[str, Any]) -> list[str]:
    """Draw size and KL of what `--fit` chose from: a line with a bar for each, the smallest output first."""
    most = max(point["kl"] for point in found["points"]) or 1.0
    lines = ["## Other sizes", "", "| | bits | size | KL, nats | |", "|---|---|---|---|---|"]
    for point in found["points"]:
        name = f"**{markdown(point['name'])}, this output**" if point["written"] else markdown(point["name"])
        kl = f"{point['kl']:.3g}{_interval(point['interval'])}" if point["measured"] else f"about {point['kl']:.2g}"
        eighths = round(8 * _BAR * point["kl"] / most)
        bar = "\u2588" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"| {name} | {point['bits']:.2f} | {gigabytes(point['bytes'])} | {kl} | {bar} |")
    texts, on = found["texts"].partition(":")[0], ""
    if any(point["measured"] for point in found["points"]):
        on = f" Measured on {texts}, SHA-256 {found['texts_sha256'][:12]}."
    return [*lines, "", f'Weights rounded to nearest. "About": estimated from scores of single layers.{on}', ""]


def _section(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> str:
    commands = serve_commands(plan, directory)
    settings, transforms, recipe = plan.quantization_config, plan.options.transforms, plan.provenance.recipe
    activations = plan.scheme.activations if plan.scheme else ""
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    unquantized = ["Not quantized: norms and biases, and", "", *[f"- {line}" for line in unquantized_lines(plan)], ""]
    unquantized = unquantized if plan.scheme else []
    # No character of the name may break the heading or the table.
    name = re.sub(r"[<\[]", lambda match: f"&#{ord(match[0])};", " ".join(name.split()).replace("|", "\\|"))
    origin = f"[{repo}](https://huggingface.co/{repo})" if repo and _REPOSITORY.fullmatch(repo) else name
    # If the source is quantized, quantizing the unquantized model does not give the same bytes.
    origin += QUANTIZED if settings and summary.has_quantized_source(plan) else ""
    cache = f"FP8, one scale for keys and one for values in each of {summary.cache_layers(plan)} layers"
    lines = [
        f"# {name}: {summary.numbers(plan)} weights",
        "",
        "| | |",
        "|---|---|",
        f"| source | {origin} |",
        *([f"| revision | `{revision}` |"] if revision else []),
        f"| format | {summary.description(plan)}{serialized} |",
        *([f"| rounded by | {ROUNDED_BY_GPTQ}, {tokens_of(plan.options.gptq)} |"] if plan.options.gptq else []),
        *([f"| codes | {KEPT_CODES} |"] if plan.decisions.keeps else []),
        *([f"| KV cache | {cache} |"] if has_fp8_cache(plan) else []),
        *([f"| folded | {transforms.title} |"] if transforms and transforms.title else []),
        *([f"| scales | {WEIGHED.format(transforms.weighed)} |"] if transforms and transforms.weighed else []),
        f"| size | {gigabytes(summary.source_bytes(plan))} -> {gigabytes(summary.output_bytes(plan))} |",
        f"| made with | openquant {__version__} |",
        *([f"| recipe | {markdown(recipe_command(recipe['options']))} |"] if recipe else []),
        "",
        *unquantized,
        engines_that_read(plan),
        "",
        "```",
        *commands,
        "```",
        "",
        *(_frontier(plan.provenance.frontier) if plan.provenance.frontier else []),
    ]
    # join_lines escapes newlines in values.
    return join_lines(lines)
