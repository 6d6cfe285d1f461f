"""The model card (README.md) of an output: what it is, how to serve it and how it was made; then the source's card.

It says what changes the output's bytes, and nothing about the machine that made them.

The source's card stands as it is below a heading, in another repository. Nothing is rendered: lines are read as far as
CommonMark's blocks decide what a heading is. Whatever the text leaves open, such as a fence or `<details>`, closes at
its end, and nothing of ours follows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any
from urllib.parse import quote, unquote

import yaml

from ..evaluation.types import CHANGED, CLOSE, ENOUGH_TEXTS, SIMILAR, kl_text
from ..files.cards import (
    COMMANDS,
    CONTEXT,
    EVALUATION_HEADING,
    KEPT_CODES,
    MADE_HEADING,
    POOLING,
    QUANTIZED,
    QUANTIZED_FROM,
    ROUNDED_BY_GPTQ,
    SOURCE_HEADING,
    WEIGHTS_OF,
    serve_argument,
    shell_word,
    source_commit,
    source_text,
    split_card,
    with_evaluation,
)
from ..formats.hardware import GENERATIONS, HARDWARE, arithmetic_on, find_kernel
from ..formats.numbers import FLAG
from ..patterns import collapse
from ..plan import summary
from ..plan.completeness import NOT_CHECKED
from ..plan.decisions import tokens_of
from ..plan.engines import sglang_refusal
from ..plan.plan import Plan, has_fp8_cache, required_package
from ..recipes import recipe_command
from ..registry.architecture import TASK_HEAD, Architecture, is_embedding
from ..version import CITED, DISTRIBUTION, SGLANG, __version__
from .cells import gigabytes, join_lines, markdown, shorten
from .words import task_summary, texts_origin, verdict_meaning

# Names that are safe in a Markdown link.
_SAFE = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
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
    kept, metadata, _ = split_card(base or "")

    tags = metadata.get("tags", [])
    entries: dict[str, Any] = {}
    if repo is not None:
        entries["base_model"] = repo
        if plan.quantization_config:
            entries["base_model_relation"] = "quantized"

    # The library that loads it: transformers computes nonsense with per-tensor outputs.
    entries["library_name"] = "vllm" if plan.quantization_config else "transformers"
    pipeline_tag = metadata.get("pipeline_tag")
    entries["pipeline_tag"] = pipeline_tag if pipeline_tag and isinstance(pipeline_tag, str) else _task(plan.model)

    # YAML entries without a value are None.
    source_tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag and isinstance(tag, str)]

    # Users search for compressed-tensors directories by that tag.
    package = required_package(plan)

    # Tags of a quantized source do not describe the output.
    source_tags = [
        tag
        for tag in source_tags
        if not re.match(r"fp8|mxfp|nvfp|int[2-8]|w[2-8]a|quantized|compressed-tensors|[2-8]-bit", tag)
    ]

    entries["tags"] = source_tags
    if plan.quantization_config:
        schemes = [scheme.tag for scheme in plan.decisions.schemes]
        numbers = [scheme.format.number.title.lower() for scheme in plan.decisions.schemes]
        entries["tags"] += [*numbers, "vllm", "quantized", *([package] if package else []), *schemes]
    entries["tags"] = list(dict.fromkeys(entries["tags"]))

    printable = all(value.isprintable() for value in (repo or "", entries["pipeline_tag"], *entries["tags"]))
    front = kept + yaml.safe_dump(entries, sort_keys=False, allow_unicode=printable)
    where = repo if repo and _SAFE.fullmatch(repo) else None
    lines = _own_part(plan, name, where, revision, directory)
    text = source_section(source_text(base or ""), 3, where, revision, plan.files)

    # join_lines escapes newlines in values.
    return f"---\n{front}---\n\n{join_lines(lines)}" + (f"\n{SOURCE_HEADING}\n\n{text}\n" if text else "")


def _task(model: Architecture) -> str:
    """What the Hub calls the task of a model whose card does not say it."""
    if TASK_HEAD in model.keep:
        return "text-classification"
    if not model.has_head:
        return "feature-extraction"
    return "image-text-to-text" if model.text_config else "text-generation"


def with_notes(card: str, notes: Sequence[str]) -> str:
    """Put notes on the weights into a model card.

    Args:
        card: the text of README.md, as `model_card` returns it.
        notes: one line each.

    Returns:
        The text of the new README.md.
    """
    lines = "".join(f"{_note(note)}\n\n" for note in notes)
    return card.replace(f"{MADE_HEADING}\n", f"{lines}{MADE_HEADING}\n", 1)


def _note(note: str) -> str:
    return f"> Note: {markdown(note)}"


def evaluated_card(card: str, repo: str, evaluation: Mapping[str, Any], picture: str | None = None) -> str:
    """Put the figures of an evaluation into a model card, in place of earlier ones.

    Args:
        card: the text of README.md.
        repo: the Hub repository that the output is published in, or "org/name@refs/pr/1", for the commands that check
            it and repeat the evaluation.
        evaluation: the checked content of an eval.json.
        picture: name of the file with its picture, which is published too; None if there is none.

    Returns:
        The text of the new README.md.
    """
    shown = [f"![KL divergence of each position from the source]({picture})", ""] if picture else []
    lines = [EVALUATION_HEADING, "", *shown, "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _evaluation_rows(evaluation)]

    few = " So few texts say little about others." if evaluation["text"]["documents"] < ENOUGH_TEXTS else ""
    lines += [
        "",
        "KL says how far the probabilities of the next token are from the source's: 0 if they are equal, `same` if as "
        f"near as bfloat16's own noise, `close` up to {CLOSE} nats, `similar` up to {SIMILAR}, `changed` up to "
        f"{CHANGED}, `broken` above. Intervals are of 95 %, over texts.{few}",
        "",
    ]

    answered = answers(evaluation)
    if answered:
        lines += ["<details><summary>The beginning of an answer of each</summary>", "", *_answer_table(answered[0])]
        lines += ["", "</details>", ""]

    source = evaluation["source"]["name"]
    commit = source_commit(card, source)
    source = f"{source}@{commit}" if commit else source
    install = f"pip install {DISTRIBUTION}"
    lines += [
        f"To check and to measure it (`{install}`):",
        "",
        "```",
        f"openquant verify {shell_word(repo)} --source {shell_word(source)} --full",
        _eval_command(repo, source, evaluation),
        "```",
        "",
    ]

    return with_evaluation(card, join_lines(lines))


def _evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table of an evaluation: name and value of each row."""
    kl = evaluation["kl"]
    floor = evaluation["floor"]
    perplexity = evaluation["perplexity"]

    mean = kl_text(kl["mean"], floor["kl"])
    text = evaluation["text"]

    rows = [
        ("verdict", f"{markdown(evaluation['verdict'])}: {markdown(verdict_meaning(evaluation))}"),
        ("mean KL to the source", f"{mean} nats{_interval(kl['interval'])} (bfloat16's own noise {floor['kl']:.3g})"),
        (
            "same most probable token",
            f"{percent(evaluation['top1'])} (with bfloat16's own noise {percent(floor['top1'])})",
        ),
        (
            "perplexity",
            f"{perplexity['source']:.4g} -> {perplexity['output']:.4g}, "
            f"times {perplexity['ratio']:.4f}{_interval(perplexity['interval'], '.4f')}",
        ),
        *([("accuracy on tasks", task_summary(evaluation["tasks"]))] if "tasks" in evaluation else []),
        (
            "measured on",
            f"{text['positions']:,} tokens of {text['documents']:,} texts{_texts_from(text)}, "
            f"SHA-256 of the tokens {markdown(text['sha256'][:12])}",
        ),
    ]
    suspects = ", ".join(map(markdown, evaluation["suspects"][:_SUSPECTS]))
    if suspects:
        rows.append(("suspect layers", suspects))
    return rows


def _texts_from(text: Mapping[str, Any]) -> str:
    """Say where texts come from: " (prose.txt, code.jsonl)"; "" if that is not known."""
    origin = texts_origin(text)
    return f" ({markdown(origin)})" if origin else ""


# Characters of each text in a card, and suspect layers that it names.
_TEXT_LENGTH = 400
_SUSPECTS = 5


def _answer_table(text: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of a prompt and both answers."""
    cells = [(name, markdown(shorten(text[name], _TEXT_LENGTH))) for name in SIDES]
    difference = difference_text(text)
    return [
        "| | |",
        "|---|---|",
        *[f"| {name} | {cell} |" for name, cell in cells],
        "",
        f"{difference[0].upper()}{difference[1:]}.",
    ]


# Keys of eval.json's `texts` in the order in which they are shown.
SIDES = ("prompt", "source", "output")


def answers(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the answers to prompts in an evaluation's `texts`, without predictions along a text, which are no answers.

    Args:
        evaluation: the content of an eval.json.
    """
    return [text for text in evaluation["texts"] if "text" not in text]


def difference_text(text: Mapping[str, Any]) -> str:
    """Say where both answers begin to differ: "they differ from token 13 on".

    Args:
        text: one of `answers`. `differs_at` is the index of the first token that differs, None if all are equal.
    """
    at = text["differs_at"]
    return "both answer alike" if at is None else f"they differ from token {at + 1} on"


def _eval_command(repo: str, source: str, evaluation: Mapping[str, Any]) -> str:
    """Return the command that repeats an evaluation, on one line."""
    text = evaluation["text"]
    tasks = evaluation.get("tasks")
    words = [("openquant eval", repo), ("--source", source)]
    words += [("--text", name) for name in text.get("files", ())]
    words += [("--dataset", text["dataset"])] if text.get("dataset") else []
    words += [("--tasks", name) for name in tasks["named"]] if tasks else []
    words += [("--limit", str(tasks["limit"]))] if tasks and tasks["limit"] is not None else []
    words += [("--samples", str(text["documents"])), ("--length", str(text["length"]))]
    command = [f"{flag} {shell_word(value)}" for flag, value in words]
    # The card shows no answers then, and they can take longer than all else.
    command += [] if answers(evaluation) else ["--no-prompts"]
    return " ".join(command)


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
        One line for each reason, with the tensors' names; those of equal layers as one name with ranges. Of more than
        three names it has what they are below, or the first three: "layers of model.vision_tower (vision tower)".
    """
    reasons: dict[str, list[str]] = {}
    for line in plan.lines:
        if not line.quantized and len(line.shape) >= 2:
            reasons.setdefault(line.why, []).extend(line.names)
    quantized = [weight.module for weight, _ in plan.decisions.kinds]
    return [f"{_join_shortened(collapse(names), quantized)} ({why})" for why, names in reasons.items()]


# Names of layers, or of what they are below, that a line of the card has.
_NAMES = 3


def _join_shortened(names: Sequence[str], quantized: Sequence[str]) -> str:
    """Join names, or what many names are below if no quantized layer is below that."""
    if len(names) <= _NAMES:
        return ", ".join(names)
    parts = [re.findall(r"(?:\{[^}]*\}|[^.{])+", name) for name in names]
    common = [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*parts, strict=False))]
    towers = dict.fromkeys(re.findall(r"^(?:model\.)?[^.]+", name)[0] for name in names)
    for above in ([".".join(common)] if common else [], list(towers)):
        below = tuple(f"{name}." for name in above)
        if 0 < len(above) <= _NAMES and not any(module.startswith(below) for module in quantized):
            return f"layers of {_join_names(above)}"
    return f"{', '.join(names[:_NAMES])} and {len(names) - _NAMES} more"


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
    loaded, text = _transformers(plan)
    return f"{engines}; {text}." if loaded else f"{engines}. {text}."


def _transformers(plan: Plan) -> tuple[bool, str]:
    """Return whether transformers loads an output, and say it: "transformers loads it too"."""
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
        return False, f"Do not load it with transformers, which {problem}"
    package = required_package(plan)
    return True, f"transformers loads it too{f', with {package} installed' if package else ''}"


def serve_commands(plan: Plan, output: str, revision: str | None = None) -> list[str]:
    """Return the command that starts each engine on an output.

    Args:
        plan: the plan that made the output.
        output: the output's directory or Hub repository.
        revision: revision of the repository; None for main.

    Returns:
        A line for a shell for each engine that loads the output, such as "vllm serve Qwen3-8B-FP8", after one that
        installs what vLLM does not bring. After `--fit GPU`
        it has the context that there is room for, if the model allows more.
    """
    flags = {engine: "" if plan.model.has_head else f" {option}" for engine, option in POOLING.items()}
    if has_fp8_cache(plan) and plan.quantization_config["quant_method"] == "fp8":
        flags["vLLM"] += f" {FLAG}"
    context = _context(plan)
    return [
        *(f"pip install {package}" for package in _packages(plan)),
        *(
            f"{COMMANDS[engine]} {serve_argument(output, revision)}{flags[engine]}"
            + ("" if context is None else f" {CONTEXT[engine]} {context}")
            for engine in summary.engines(plan)
        ),
    ]


def _packages(plan: Plan) -> list[str]:
    """Return what vLLM on NVIDIA GPUs needs for an output and does not bring: ["humming-kernels"]."""
    kinds = {(scheme.name, bool(plan.entry.experts(weight.module))) for weight, scheme in plan.decisions.kinds}
    kernels = [find_kernel("vLLM", name, "Ampere", experts) for name, experts in sorted(kinds)]
    return list(dict.fromkeys(kernel.needs for kernel in kernels if kernel and kernel.needs))


def _context(plan: Plan) -> int | None:
    """Return the tokens that `--fit GPU` made room for; None if that is all that the model allows, or without --fit."""
    found = plan.provenance.frontier
    serving = summary.serving(plan)
    if found is None or found["gpu"] is None or serving is None or serving[1].cache is None:
        return None
    context = int(found["context"])
    longest = serving[1].cache.length
    return context if longest is None or context < longest else None


# Widest bar in a card, in characters, and characters that are an eighth of one to seven eighths wide.
_BAR = 24
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def _frontier(found: Mapping[str, Any], is_gptq: bool) -> list[str]:
    """Draw size and KL of what `--fit` chose from: a line with a bar for each, the smallest output first."""
    # The sizes are compared without GPTQ, after which this output is closer to its source.
    this = "this output before GPTQ" if is_gptq else "this output"
    most = max(point["kl"] for point in found["points"]) or 1.0
    lines = ["## Other sizes", "", "| | bits | size | KL, nats | |", "|---|---|---|---|---|"]
    for point in found["points"]:
        name = f"**{markdown(point['name'])}, {this}**" if point["written"] else markdown(point["name"])
        kl = f"{point['kl']:.3g}{_interval(point['interval'])}" if point["measured"] else f"about {point['kl']:.2g}"
        eighths = round(8 * _BAR * point["kl"] / most)
        bar = "\u2588" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"| {name} | {point['bits']:.2f} | {gigabytes(point['bytes'])} | {kl} | {bar} |")
    texts = found["texts"].partition(":")[0]
    on = ""
    if any(point["measured"] for point in found["points"]):
        on = f" Measured on {texts}, SHA-256 of the tokens {found['texts_sha256'][:12]}."
    return [*lines, "", f'Weights rounded to nearest. "About": estimated from scores of single layers.{on}', ""]


def _computed_on(plan: Plan) -> dict[str, dict[str, list[str]]]:
    """Return `arithmetic_on` of each engine that loads an output; empty if nothing is quantized."""
    kinds = [(weight.module, scheme.name) for weight, scheme in plan.decisions.kinds if not is_embedding(weight.module)]
    layers = dict.fromkeys((name, bool(plan.entry.experts(module))) for module, name in kinds)
    return {engine: arithmetic_on(engine, layers) for engine in summary.engines(plan)} if layers else {}


def _item(line: str) -> str:
    """Return an item of a list; patterns in it, such as "**.o_proj", are no emphasis."""
    return f"- {re.sub(r'[*<`[]', lambda match: chr(92) + match[0], line)}"


def _title(name: str) -> str:
    """Return a name as one line of Markdown without HTML."""
    return name if _SAFE.fullmatch(name) else markdown(" ".join(name.split()))


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _range(names: Sequence[str]) -> str:
    """Name generations of NVIDIA, in their order: "Ada, Hopper and Blackwell", "Turing to Blackwell"."""
    order = list(GENERATIONS)
    first = order.index(names[0])
    last = order.index(names[-1])
    return f"{names[0]} to {names[-1]}" if len(names) == last - first + 1 > 3 else _join_names(names)


def _devices(names: Sequence[str]) -> str:
    """Name hardware, in its order: "NVIDIA Turing to Blackwell, AMD MI300 and CPUs"."""
    nvidia = [name for name in names if name in GENERATIONS]
    others = [{"MI300": "AMD MI300", "CPU": "CPUs"}[name] for name in names if name not in GENERATIONS]
    return _join_names([*([f"NVIDIA {_range(nvidia)}"] if nvidia else []), *others])


def _hardware(places: Mapping[str, list[str]]) -> str:
    """Say where an engine computes: "in FP8 on NVIDIA Ada, Hopper and Blackwell and AMD MI300, emulated on CPUs"."""
    parts = []
    for numbers, names in places.items():
        parts.append(f"{'' if numbers.startswith('emulated') else 'in '}{numbers} on {_devices(names)}")
    return "; ".join(parts)


def _what_it_is(plan: Plan, origin: str, computed: Mapping[str, Mapping[str, list[str]]]) -> str:
    """Say in a sentence what an output is."""
    if not plan.quantization_config:
        what = ", its weights decoded to bfloat16"
    elif plan.scheme is None:
        what = " with its weights as they are and scales for an FP8 KV cache"
    else:
        rounded = {scheme.rounds_activations for scheme in plan.decisions.schemes}
        what = f" with {summary.numbers(plan)} weights"
        if rounded == {True}:
            what += " and activations"
        elif True not in rounded:
            what += "; activations stay in 16 bits"

    on: dict[str, list[str]] = {}
    for engine, places in computed.items():
        if names := [name for name in HARDWARE if any(name in names for names in places.values())]:
            on.setdefault(_devices(names), []).append(engine)
    # "vLLM and SGLang on NVIDIA Ampere", or "vLLM on NVIDIA Turing to Blackwell and CPUs, and SGLang on NVIDIA Ampere".

    served = ", and ".join(f"{_join_names(engines)} on {devices}" for devices, engines in on.items())
    served = f" For {served}." if served else ""

    before = gigabytes(summary.source_bytes(plan))
    after = gigabytes(summary.output_bytes(plan))
    return f"{origin}{what}.{served} {before if before == after else f'{before} became {after}'}."


def _own_part(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str) -> list[str]:
    """Return the lines of a card before the source's text."""
    settings = plan.quantization_config
    transforms = plan.options.transforms
    computed = _computed_on(plan)
    calibration = plan.options.calibration
    has_use = transforms or plan.decisions.input_absmax or has_fp8_cache(plan)

    origin = commit = _title(name)
    if repo:
        origin = commit = f"[{repo}](https://huggingface.co/{repo})"
        if revision and _SAFE.fullmatch(revision):
            commit = f"[{repo}](https://huggingface.co/{repo}/tree/{revision}) at `{revision[:12]}`"

    # If the source is quantized, quantizing the unquantized model does not give the same bytes.
    commit += QUANTIZED if settings and summary.has_quantized_source(plan) else ""

    activations = plan.scheme.activations if plan.scheme else ""
    serialized = f"{activations} (`quant_method: {settings['quant_method']}`)" if settings else ""
    cache = f"FP8, one scale for keys and one for values in each of {summary.cache_layers(plan)} layers"

    engines = [f"- {engine} {CITED[engine]}: {_hardware(places)}" for engine, places in computed.items() if places]
    if engines:
        unread = sglang_refusal(plan.entry, plan.decisions)
        engines += [f"- {SGLANG} does not load it: {unread.why}"] if unread is not None else []
        engines = ["Where it runs, by the source code of these versions:", "", *engines, f"- {_transformers(plan)[1]}"]

    unquantized = ["Not quantized:", "", "- norms and biases", *map(_item, unquantized_lines(plan)), ""]
    command = _made_with(plan, repo or name, revision if repo else None)

    return [
        f"# {_title(directory)}",
        "",
        _what_it_is(plan, origin, computed),
        "",
        "## Use",
        "",
        "```",
        *serve_commands(plan, directory),
        "```",
        "",
        *(engines or [engines_that_read(plan)]),
        "",
        *(line for note in plan.source_notes if not note.startswith(NOT_CHECKED) for line in (_note(note), "")),
        MADE_HEADING,
        "",
        "| | |",
        "|---|---|",
        f"| {QUANTIZED_FROM if plan.scheme else WEIGHTS_OF} | {commit} |",
        f"| format | {summary.description(plan)}{serialized} |",
        *([f"| rounded by | {ROUNDED_BY_GPTQ}, {_size_and_origin(plan.options.gptq)} |"] if plan.options.gptq else []),
        *([f"| codes | {KEPT_CODES} |"] if plan.decisions.keeps else []),
        *([f"| KV cache | {cache} |"] if has_fp8_cache(plan) else []),
        *([f"| folded | {transforms.title} |"] if transforms and transforms.title else []),
        *([f"| scales | {WEIGHED.format(transforms.weighed)} |"] if transforms and transforms.weighed else []),
        *([f"| calibrated on | {_size_and_origin(calibration.texts)} |"] if calibration and has_use else []),
        "",
        *(unquantized if plan.scheme else []),
        f"Made with openquant {__version__}{':' if command else '.'}",
        "",
        *(["```", command, "```", ""] if command else []),
        *(_frontier(plan.provenance.frontier, plan.options.gptq is not None) if plan.provenance.frontier else []),
    ]


def _size_and_origin(texts: Mapping[str, Any]) -> str:
    """Say how many calibration texts there were, and which: "128 x 512 tokens (prose.txt)"."""
    return f"{markdown(tokens_of(texts))}{_texts_from(texts)}"


def _made_with(plan: Plan, model: str, revision: str | None) -> str | None:
    """Return the command that made an output, without paths of the machine; None if the plan has no recipe."""
    at = f" --revision {shell_word(revision)}" if revision else ""
    if not plan.quantization_config:
        return f"openquant dequantize {shell_word(model)}{at}"
    recipe = plan.provenance.recipe
    return f"openquant compress -m {shell_word(model)}{at} {recipe_command(recipe['options'])}" if recipe else None


# Markers of quotes and list items before a heading.
_MARKERS = r"(?:(?: {0,3}>)|(?: {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]))* {0,3}"
_HEADING = re.compile(rf"^({_MARKERS})(#{{1,6}})(?=[ \t]|$)")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
# Lines that are no paragraph, so that an underline below them makes no heading: quotes, rows of tables, items of lists,
# and indented code.
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[>|]|[-*+][ \t]|\d{1,9}[.)][ \t])| {4}|\t")
# HTML that runs to the next empty line: tags of blocks, and any tag alone on a line.
_HTML = re.compile(
    r" {0,3}</?(?:(?:article|aside|blockquote|center|dd|details|div|dl|dt|figcaption|figure|footer|form|h[1-6]"
    r"|header|hr|iframe|li|main|nav|ol|p|section|source|summary|table|tbody|td|tfoot|th|thead|tr|ul)(?=[ \t/>]|$)"
    r"|[^<>]*>[ \t]*$)",
    re.IGNORECASE,
)
# HTML blocks in which a line of text begins nothing: how they begin and end.
_RAW = (
    (
        re.compile(r" {0,3}<(?:pre|script|style|textarea)(?=[ \t>]|$)", re.IGNORECASE),
        re.compile(r"</(?:pre|script|style|textarea)>", re.IGNORECASE),
    ),
    (re.compile(r" {0,3}<!--"), re.compile("-->")),
)
_HTML_HEADING = re.compile(r"(</?h)([1-6])(?=[ \t/>]|$)", re.IGNORECASE)
# Targets: of a link or picture, in the definition of a reference, and in HTML. Code is skipped.
_TARGETS = re.compile(
    r"(?P<code>`[^`]*`)"
    r"|(?P<link>\]\(\s{0,9}<?)(?P<target>[^\s()<>]+)(?=[>)]|[ \t]{1,9}[\"'(])"
    r"|(?P<definition>^ {0,3}\[[^\[\]]+\]:[ \t]{0,9}<?)(?P<defined>[^\s<>]+)"
    r"""|(?P<attribute>\b(?:src|href|poster)=["'])(?P<value>[^"'<>]*)""",
    re.IGNORECASE,
)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|[/#?]", re.IGNORECASE)
_MEDIA = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".avif", ".bmp", ".mp4", ".webm", ".mov", ".mp3", ".wav")


def source_section(text: str, level: int, repo: str | None, revision: str | None, files: Container[str]) -> str:
    """Prepare the text of a source's card for the card of an output.

    Headings get a lower level, all by the same number, so that none is above `level`; a text that has been prepared
    before stays as it is. Relative links and pictures lead to the source's repository, except for files that the output
    has too.

    Args:
        text: the text of README.md without metadata.
        level: the highest level that a heading may have, such as 3 for "###".
        repo: the source's repository, such as "org/name"; None if it is not known. Then links stay.
        revision: the source's commit; None for main.
        files: names of the files that the output has, relative to its directory.

    Returns:
        The text, without empty lines around it.
    """
    lines = list(_lines(text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()))
    levels = [int(found) for line, is_code in lines if not is_code for found in _levels(line)]
    down = max(0, level - min(levels, default=level))

    def link(target: str) -> str:
        return target if repo is None else _in_repository(target, repo, revision, files)

    return "\n".join(line if is_code else _rewrite_links(_lower_headings(line, down), link) for line, is_code in lines)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a block of code or raw HTML. Underlined headings become "# Title"."""
    fence: str | None = None
    raw: re.Pattern[str] | None = None
    paragraph: list[str] = []
    # Whether an underline of dashes below the paragraph makes a heading, and not the end of a list.
    top = True
    html = False
    for line in text.split("\n"):
        opening = None if fence or raw or html else _FENCE.match(line)
        if not (fence or raw or html):
            raw = next((end for start, end in _RAW if start.match(line)), None)
        underline = None if fence or raw or opening else _UNDERLINE.match(line)

        if underline and paragraph and (top or "=" in underline[1]):
            yield f"{'#' if '=' in underline[1] else '##'} {' '.join(map(str.strip, paragraph))}", False
            paragraph = []
            top = True
            continue

        is_code = bool(fence or raw or opening)
        heading = _HEADING.match(line)
        html = not is_code and bool(line.strip()) and (html or (not paragraph and bool(_HTML.match(line))))
        ends = is_code or heading or not line.strip() or _RULE.match(line)

        if not ends and not html and (paragraph or not _NO_PARAGRAPH.match(line)):
            top = top and (bool(paragraph) or not line.startswith(" "))
            paragraph.append(line)
            continue

        yield from ((waiting, False) for waiting in paragraph)
        yield line, is_code
        paragraph = []
        top = bool(ends)

        if opening:
            fence = opening[1]
        elif fence and re.fullmatch(rf" {{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*", line):
            fence = None
        elif raw and raw.search(line):
            raw = None

    yield from ((waiting, False) for waiting in paragraph)


def _levels(line: str) -> list[int]:
    heading = _HEADING.match(line)
    return [*([len(heading[2])] if heading else []), *(int(found[2]) for found in _HTML_HEADING.finditer(line))]


def _lower_headings(line: str, down: int) -> str:
    """Return a line with its headings that many levels lower; 6 is the lowest."""
    line = _HTML_HEADING.sub(lambda match: f"{match[1]}{min(6, int(match[2]) + down)}", line)
    return _HEADING.sub(lambda match: match[1] + "#" * min(6, len(match[2]) + down), line, count=1) if down else line


def _rewrite_links(line: str, link: Callable[[str], str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        before = match["link"] or match["definition"] or match["attribute"]
        return before + link(match["target"] or match["defined"] or match["value"])

    return _TARGETS.sub(replacement, line)


def _in_repository(target: str, repo: str, revision: str | None, files: Container[str]) -> str:
    """Return the address of what a relative target names: "https://huggingface.co/org/name/blob/main/LICENSE"."""
    mark = re.search(r"[?#]", target)
    path = target[: mark.start()] if mark else target
    name = posixpath.normpath(unquote(path))
    if not path or _ABSOLUTE.match(target) or name in files or name.startswith(".."):
        return target
    kind = "tree" if path.endswith("/") else "blob"
    if name.lower().endswith(_MEDIA):
        kind = "resolve"
    where = f"https://huggingface.co/{repo}/{kind}/{quote(revision or 'main', safe='')}"
    return f"{where}/{path.removeprefix('./')}{target[len(path) :]}"
