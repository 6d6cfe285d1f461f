"""The model card (README.md) of an output: what it is, how to serve it and how it was made; then the source's card.

It says what changes the output's bytes, and nothing about the machine that made them.

Of the source's card a link stands below a heading, or its text if its repository is not known. Whatever that leaves
open, such as a fence or `<details>`, closes at its end, and nothing of ours follows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..evaluation import verdict
from ..files import cards
from ..formats.hardware import AMD, GENERATIONS, arithmetic_on, find_kernel
from ..formats.numbers import FLAG
from ..options import CalibrationTexts
from ..patterns import collapse, join_words, list_first
from ..plan import summary
from ..plan.decisions import tokens_of
from ..plan.engines import sglang_refusal
from ..plan.plan import Plan, has_fp8_cache, required_package
from ..plan.serving import FEWEST_TOKENS, Fit, Serving
from ..recipes import recipe_command
from ..registry.architecture import TASK_HEAD, Architecture, is_embedding
from ..version import CITED, SGLANG, __version__
from ..weights.statistics import Calibration
from .cells import (
    count_of,
    dataset_value,
    fill_template,
    gigabytes,
    markdown,
    optional,
    short,
    shorten,
    task_summary,
    terminal,
    texts_origin,
    verdict_meaning,
)

# Names that are safe in a Markdown link.
_SAFE = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def model_card(
    base: str | None,
    plan: Plan,
    name: str,
    repo: str | None,
    revision: str | None,
    directory: str,
    has_template: bool = False,
) -> str:
    """Write the model card of an output.

    Args:
        base: text of the source's README.md; None if it has none.
        plan: the plan that made the output.
        name: the source's name.
        repo: the source's Hub repository, such as "org/name"; None if unknown.
        revision: the source's commit on the Hub; None if unknown.
        directory: name of the output directory, for the commands.
        has_template: whether the model has a chat template.

    Returns:
        The text of README.md, with YAML metadata.
    """
    base = base or ""
    kept, metadata, _ = cards.split_card(base)
    entries = _metadata(plan, repo, metadata)
    printable = all(value.isprintable() for value in (repo or "", entries["pipeline_tag"], *entries["tags"]))
    front = kept + yaml.safe_dump(entries, sort_keys=False, allow_unicode=printable)

    # Only a plain name is put into links.
    linked = repo
    if repo and not _SAFE.fullmatch(repo):
        linked = None
    card = f"---\n{front}---\n\n{_own_part(plan, name, linked, revision, directory, has_template)}"

    text = cards.source_text(base).strip()
    if text and linked:
        text = f"[The card of {linked}](https://huggingface.co/{linked}) says more of the model."
    if text:
        card += f"\n{cards.SOURCE_HEADING}\n\n{text}\n"
    return card


# Tags of a quantized source, which do not describe the output.
_QUANTIZED_TAG = re.compile(r"fp8|mxfp|nvfp|int[2-8]|w[2-8]a|quantized|compressed-tensors|[2-8]-bit")


def _metadata(plan: Plan, repo: str | None, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a card's metadata say of the output itself, given those of the source's card."""
    schemes = plan.decisions.schemes
    entries: dict[str, Any] = {}
    if repo is not None:
        entries["base_model"] = repo
        if plan.quantization_config:
            entries["base_model_relation"] = "quantized"

    # YAML entries without a value are None.
    tags = source.get("tags", [])
    if isinstance(tags, str):
        tags = [tags]
    tags = [tag for tag in tags if tag and isinstance(tag, str) and not _QUANTIZED_TAG.match(tag)]

    # The library that loads it: transformers computes nonsense with per-tensor outputs.
    entries["library_name"] = "transformers"
    if plan.quantization_config:
        entries["library_name"] = "vllm"
        tags += [scheme.format.number.title.lower() for scheme in schemes]
        # Users search for compressed-tensors directories by that tag.
        tags += filter(None, ["vllm", "quantized", required_package(plan)])
        tags += [scheme.tag for scheme in schemes]

    task = source.get("pipeline_tag")
    if not task or not isinstance(task, str):
        task = _task(plan.model)
    entries["pipeline_tag"] = task
    entries["tags"] = list(dict.fromkeys(tags))
    return entries


def _task(model: Architecture) -> str:
    """What the Hub calls the task of a model whose card does not say it."""
    if TASK_HEAD in model.keep:
        return "text-classification"
    if not model.has_head:
        return "feature-extraction"
    if model.text_config:
        return "image-text-to-text"
    return "text-generation"


def with_notes(card: str, notes: Sequence[str]) -> str:
    """Put notes on the weights into a model card.

    Args:
        card: the text of README.md, as `model_card` returns it.
        notes: one line each.

    Returns:
        The text of the new README.md.
    """
    lines = "".join(f"> Note: {markdown(note)}\n\n" for note in notes)
    return card.replace(f"{cards.MADE_HEADING}\n", f"{lines}{cards.MADE_HEADING}\n", 1)


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
    source = evaluation["source"]["name"]
    commit = cards.source_commit(card, source)
    if commit:
        source = f"{source}@{commit}"

    # A reader has lm-eval's tasks, not the files of whoever measured.
    named = evaluation.get("tasks", {}).get("named", ())

    figures = _fill(
        "evaluation.jinja",
        evaluation=evaluation,
        picture=picture,
        answer=next(iter(evaluation["texts"]), None),
        repo=repo,
        source=source,
        limits=verdict,
        verdict_meaning=verdict_meaning,
        task_summary=task_summary,
        difference_text=difference_text,
        known_tasks=[task for task in named if not task.endswith((".json", ".jsonl", ".yaml", ".yml"))],
    )
    return cards.with_evaluation(card, figures)


def _fill(name: str, **values: Any) -> str:
    """Fill a template. What a terminal obeys in a value is escaped, newlines too."""
    filters = {
        "markdown": markdown,
        # Patterns, such as "**.o_proj", are no emphasis.
        "literal": lambda line: re.sub(r"[*<`[]", r"\\\g<0>", line),
        "dataset_value": dataset_value,
        "shell_word": cards.shell_word,
        "size": gigabytes,
        "percent": percent,
        "interval": _interval,
        "texts_from": _texts_from,
        "size_and_origin": lambda texts: f"{markdown(tokens_of(texts))}{_texts_from(texts)}",
        "excerpt": lambda text: markdown(shorten(text.strip(), _TEXT_LENGTH)),
        "sentence": lambda text: f"{text[0].upper()}{text[1:]}.",
        "hardware": _hardware,
        "bar": _bar,
    }

    return fill_template(name, values, filters, trim_blocks=True, finalize=lambda value: terminal(str(value)))


# Characters of each text in a card.
_TEXT_LENGTH = 400


def _texts_from(text: Mapping[str, Any]) -> str:
    """Say where texts come from: " (prose.txt, code.jsonl)"; "" if that is not known."""
    return optional(" ({})", markdown(texts_origin(text)))


# Keys of eval.json's `texts` in the order in which they are shown.
SIDES = ("prompt", "source", "output")


def difference_text(text: Mapping[str, Any]) -> str:
    """Say where both answers begin to differ: "they differ from token 13 on".

    Args:
        text: one of an evaluation's `texts`. `differs_at` is the index of the first token that differs, or None.
    """
    at = text["differs_at"]
    if at is None:
        return "both answer alike"
    return f"they differ from token {at + 1} on"


def percent(share: float) -> str:
    """Format a share with two digits: "98.71 %".

    Args:
        share: the share, of 1.
    """
    return f"{100 * share:.2f} %"


def _interval(interval: Sequence[float] | None, format_spec: str = ".3g") -> str:
    return optional(" [{}]", ", ".join(format(edge, format_spec) for edge in interval or ()))


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
    return [f"{list_first(collapse(names), _NAMES)} ({why})" for why, names in reasons.items()]


# Names of layers that a line of the card has.
_NAMES = 3


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
    if loaded:
        return f"{engines}; {text}."
    return f"{engines}. {text}."


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
    return True, f"transformers loads it too{optional(', with {} installed', required_package(plan))}"


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
    # What vLLM on NVIDIA GPUs needs for it and does not bring.
    kinds = {(scheme.name, bool(plan.entry.experts(weight.module))) for weight, scheme in plan.decisions.kinds}
    kernels = [find_kernel("vLLM", name, "Ampere", experts) for name, experts in sorted(kinds)]
    needs = dict.fromkeys(kernel.needs for kernel in kernels if kernel and kernel.needs)
    lines = [f"pip install {package}" for package in needs]
    for engine in summary.engines(plan):
        command = f"{cards.COMMANDS[engine]} {cards.serve_argument(output, revision)}"
        lines.append(" ".join([command, *_flags(plan, engine)]))
    return lines


def _flags(plan: Plan, engine: str) -> list[str]:
    """Return the options of an engine that an output needs, each with its value: ["--max-model-len 8192"]."""
    flags = []
    if not plan.model.has_head:
        flags.append(cards.POOLING[engine])
    if engine == "vLLM" and has_fp8_cache(plan) and plan.quantization_config["quant_method"] == "fp8":
        flags.append(FLAG)
    context = _context(plan)
    if context is not None:
        flags.append(f"{cards.CONTEXT[engine]} {context}")
    return flags


_MESSAGES = '[{"role": "user", "content": "What is FP8?"}]'


def _request(model: Architecture, has_template: bool) -> tuple[str, ...] | None:
    """Return a request that a model answers; None for a classifier, of which each has its own inputs.

    It names no model: vLLM and SGLang then take the one that they serve.

    Returns:
        Its path and its body.
    """
    if TASK_HEAD in model.keep:
        return None
    if not model.has_head:
        return "embeddings", '{"input": "FP8"}'
    if has_template:
        return "chat/completions", f'{{"messages": {_MESSAGES}, "max_tokens": 200}}'
    return "completions", '{"prompt": "The number format FP8 is", "max_tokens": 200}'


def memory_text(output: Serving, fp8: bool) -> str:
    """Say which GPUs serve an output, and what they hold: "one 24 GB GPU: 105k tokens, 12 sequences of 8,192 at once".

    Args:
        output: the output's size and the GPUs that serve it, for each GPU size.
        fp8: whether the output's KV cache is FP8 rather than bfloat16.
    """
    fewest = output.fewest
    if fewest is None:
        return "8 GPUs of 192 GB are too few, or do not divide it"

    text = gpus_text(fewest)
    tokens = fewest.tokens_fp8 if fp8 else fewest.tokens_bf16
    if output.cache is None or tokens is None:
        return text + optional("; how many tokens they hold is not known: {}", output.unknown)

    context = min(FEWEST_TOKENS, output.cache.length or FEWEST_TOKENS)
    sequences = output.cache.at_once(tokens, context, fp8, fewest.gpus or 1)
    return f"{text}: {short(tokens)} tokens, {count_of(sequences, 'sequence')} of {context:,} at once"


def gpus_text(fit: Fit) -> str:
    """Name GPUs by number and size: "one 24 GB GPU", "2 GPUs of 48 GB"."""
    if fit.gpus == 1:
        return f"one {fit.gpu_gb} GB GPU"
    return f"{fit.gpus} GPUs of {fit.gpu_gb} GB"


def _context(plan: Plan) -> int | None:
    """Return the tokens that `--fit GPU` made room for; None if that is all that the model allows, or without --fit."""
    found = plan.provenance.frontier
    serving = summary.serving(plan)
    if found is None or found["gpu"] is None or serving is None or serving[1].cache is None:
        return None
    context = int(found["context"])
    longest = serving[1].cache.length
    if longest is not None and context >= longest:
        return None
    return context


# Widest bar in a card, in characters, and characters that are an eighth of one to seven eighths wide.
_BAR = 24
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"


def _bar(kl: float, points: Sequence[Mapping[str, Any]]) -> str:
    """Draw a KL divergence as a bar, beside the largest of all points."""
    most = max(point["kl"] for point in points) or 1.0
    eighths = round(8 * _BAR * kl / most)
    return "\u2588" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _computed_on(plan: Plan) -> dict[str, dict[str, list[str]]]:
    """Return `arithmetic_on` of each engine that loads an output; empty if nothing is quantized."""
    kinds = [(weight.module, scheme.name) for weight, scheme in plan.decisions.kinds if not is_embedding(weight.module)]
    layers = dict.fromkeys((name, bool(plan.entry.experts(module))) for module, name in kinds)
    if not layers:
        return {}
    return {engine: arithmetic_on(engine, layers) for engine in summary.engines(plan)}


def _title(name: str) -> str:
    """Return a name as one line of Markdown without HTML."""
    if _SAFE.fullmatch(name):
        return name
    return markdown(" ".join(name.split()))


def _devices(names: Sequence[str]) -> str:
    """Name hardware, in its order: "NVIDIA Hopper and Blackwell, AMD MI300 and CPUs"."""
    nvidia = [name for name in names if name in GENERATIONS]
    shown = [f"AMD {name}" for name in names if name in AMD]
    if nvidia:
        shown.insert(0, f"NVIDIA {join_words(nvidia, 'and')}")
    if "CPU" in names:
        shown.append("CPUs")
    return join_words(shown, "and")


def _hardware(places: Mapping[str, list[str]]) -> str:
    """Say where an engine computes: "in FP8 on NVIDIA Ada, Hopper and Blackwell and AMD MI300, emulated on CPUs"."""
    parts = []
    for numbers, names in places.items():
        part = f"{numbers} on {_devices(names)}"
        if not numbers.startswith("emulated"):
            part = f"in {part}"
        parts.append(part)
    return "; ".join(parts)


def _own_part(plan: Plan, name: str, repo: str | None, revision: str | None, directory: str, has_template: bool) -> str:
    """Return the text of a card before the source's."""
    origin = commit = _title(name)
    if repo:
        origin = commit = f"[{repo}](https://huggingface.co/{repo})"
        if revision and _SAFE.fullmatch(revision):
            commit = f"[{repo}](https://huggingface.co/{repo}/tree/{revision}) at `{revision[:12]}`"

    return _fill(
        "card.jinja",
        plan=plan,
        summary=summary,
        title=_title(directory),
        origin=origin,
        commit=commit,
        rounded={scheme.rounds_activations for scheme in plan.decisions.schemes},
        before=gigabytes(summary.source_bytes(plan)),
        after=gigabytes(summary.output_bytes(plan)),
        commands=serve_commands(plan, directory),
        request=_request(plan.model, has_template),
        serving=summary.serving(plan),
        memory_text=memory_text,
        computed=_computed_on(plan),
        versions=CITED,
        sglang=SGLANG,
        sglang_refusal=sglang_refusal(plan.entry, plan.decisions),
        transformers=_transformers(plan)[1],
        engines_that_read=engines_that_read,
        notes=plan.warnings,
        has_cache=has_fp8_cache(plan),
        unquantized_lines=unquantized_lines,
        version=__version__,
        command=_made_with(plan, repo or name, repo and revision),
    )


def _made_with(plan: Plan, model: str, revision: str | None) -> str | None:
    """Return the command that made an output, without paths of the machine; None if the plan has no recipe."""
    source = cards.serve_argument(model, revision)
    if not plan.quantization_config:
        return f"openquant dequantize {source}"
    recipe = plan.provenance.recipe
    if not recipe:
        return None

    options = recipe["options"]
    calibration = plan.options.calibration
    # GPTQ has read texts of its own.
    if calibration is not None and "calibrate" in options and "gptq" not in options:
        texts = _texts_options(calibration)
        options = {**options, **{name: value for name, value in texts.items() if name not in options}}
    return f"openquant compress -m {source} {recipe_command(options)}"


def _texts_options(calibration: Calibration) -> dict[str, Any]:
    """Return the options of the texts that a calibration file was made with, other than the defaults."""
    texts = calibration.texts
    found = {
        "text": [posixpath.basename(name) for name in texts.get("files", ())],
        "samples": texts.get("documents"),
        "length": texts.get("length"),
    }
    defaults = vars(CalibrationTexts())
    return {name: value for name, value in found.items() if value and value != defaults[name]}
