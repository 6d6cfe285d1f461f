"""What verbs print: the plan and its weights, the summary of a run, and what the other verbs found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.tokenizer import FILES as TOKENIZER_FILES
from ..data.tokenizer import SETTINGS
from ..diagnosis.result import MODEL, Diagnosis, LayerDiagnosis, activations, measured_kl
from ..files.destination import DiskSpace
from ..formats.schemes import SCHEMES
from ..patterns import collapse, list_first
from ..plan import summary
from ..plan.decisions import rounded_bytes
from ..plan.layout import PlanLine
from ..plan.plan import Plan, has_fp8_cache, ignored_layers
from ..plan.serving import CACHED, Serving
from ..plan.summary import Explanation, ModuleExplanation, RankSplit, Tensor
from ..result import Result, zero_notes
from ..verification.headers import Report
from . import card
from .cells import (
    NOTHING,
    count_of,
    gigabytes,
    join_lines,
    optional,
    paragraphs,
    shorten,
    table,
    task_rows,
    terminal,
    verdict_meaning,
)

# Characters of a reason in the plan's table: a pattern may name a hundred layers, which the line names too.
_LONGEST_REASON = 80
# How many problems of a verification are printed: those of a wrong source are hundreds.
MOST_PROBLEMS = 20


def plan_text(
    plan: Plan,
    model: str,
    output: Path,
    download: tuple[int, int],
    space: DiskSpace | None = None,
    width: int | None = None,
) -> str:
    """Format a plan for a terminal: sizes and where it fits, a table of layers, and notes.

    Args:
        plan: the plan.
        model: the source's name.
        output: the output directory.
        download: bytes that are fetched from the Hub, and the most shards of them on disk with --stream.
        space: the disk space that the run needs, with notes on it; None if it is not known.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    copied = [line for line in plan.lines if not line.quantized and not line.decoded]
    shown = [line for line in plan.lines if line.quantized]
    shown += [line for line in plan.lines if line.decoded]
    shown += [line for line in copied if len(line.shape) >= 2]
    shown += [line for line in copied if line.why == CACHED]
    rows = [("", "before", "after", ""), *_layer_rows(shown)]

    small = [line for line in copied if len(line.shape) < 2 and line.why != CACHED]
    if small:
        count = sum(len(line.names) for line in small)
        size = gigabytes(sum(line.bytes_before for line in small))
        rows.append(("keep", size, size, f"{count} vectors and scalars: norm, bias or the like"))

    heading = [f"{model} -> {output}", f"{plan.model.name}, {summary.description(plan)}", ""]
    last = [f"note: {note}" for note in (*plan.notes, *(space.notes if space else ()))]
    if any(
        weight.format is not None and not weight.is_stored_as(scheme.format) and not weight.divides_into(scheme.format)
        for weight, scheme in plan.decisions.quantized
    ):
        last.insert(0, "note: the source is quantized already, and is rounded a second time (docs/sources.md)")
    if plan.decoded.left_out:
        last.insert(0, f"left out: {', '.join(plan.decoded.left_out)}")
    return join_lines(
        [
            *paragraphs([*heading, *_facts(plan, download, space), ""], width),
            *table(rows, left=(0, 3), width=width),
            *paragraphs(["", *last] if last else [], width),
        ]
    )


def _layer_rows(lines: Iterable[PlanLine]) -> list[tuple[str, str, str, str]]:
    """Make a row for all layers of one module that become the same: "model.layers.{0..3}.mlp.{down,up}_proj"."""
    groups: dict[tuple[str, str, str], list[tuple[str, PlanLine]]] = {}
    for line in lines:
        names = ", ".join(collapse(line.names))
        parent, last = names, ""
        if found := re.fullmatch(r"([^,]*\.)(\w+)", names):
            parent, last = found[1], found[2]
        groups.setdefault((_becomes(line), parent, line.why), []).append((last, line))

    rows = []
    for (becomes, parent, why), members in groups.items():
        lasts = list(dict.fromkeys(last for last, _ in members))
        names = f"{parent}{_braced(lasts)}{optional(': {}', shorten(why, _LONGEST_REASON))}"
        before = sum(line.bytes_before for _, line in members)
        after = sum(line.bytes_after for _, line in members)
        rows.append((becomes, gigabytes(before), gigabytes(after), names))
    return rows


def _braced(names: Sequence[str]) -> str:
    """Join names as a pattern does: "{down,up}_proj"."""
    if len(names) == 1:
        return names[0]
    endings = {name[name.rfind("_") :] if "_" in name else "" for name in names}
    ending = endings.pop() if len(endings) == 1 else ""
    return f"{{{','.join(name.removesuffix(ending) for name in names)}}}{ending}"


def _becomes(line: PlanLine) -> str:
    if line.scheme:
        return line.scheme.format.number.title
    if line.decoded:
        return "BF16"
    if line.why == CACHED:
        return "scale"
    return "keep"


def _facts(plan: Plan, download: tuple[int, int], space: DiskSpace | None) -> list[str]:
    after = summary.output_bytes(plan)
    weights = f"weights:  {gigabytes(summary.source_bytes(plan))} -> {gigabytes(after)}, {_share(plan)}"
    if plan.scheme is not None or not plan.quantization_config:
        weights += f" ({summary.quantized_tensors(plan) or summary.decoded_tensors(plan)} layers)"

    lines = [weights, _disk_line(plan, after, space)]
    if download[0]:
        lines.append(_download_line(*download, space))

    serving = summary.serving(plan)
    fewest = serving and serving[1].fewest
    if serving:
        lines.append(serving_line(*serving, has_fp8_cache(plan)))
    lines.append(f"engines:  {card.engines_that_read(plan)}")

    if plan.quantization_config and (plan.options.tp or fewest is None or fewest.gpus != 1):
        sizes = ", ".join(map(str, summary.parallel_sizes(plan))) or "none"
        lines.append(f"tensor parallel sizes that can serve it: {sizes}")
        lines += [f"  not {size}: {problem}" for size, problem in plan.parallel.items() if problem]
    return lines


def _disk_line(plan: Plan, weights: int, space: DiskSpace | None) -> str:
    """Say what an output takes on the disk, and what a run takes meanwhile."""
    shards = count_of(len(plan.layout.shards), "shard")
    line = f"disk:     {gigabytes(weights + sum(plan.files.values()))} in {shards} and "
    line += count_of(len(plan.files), "other file")
    if plan.gptq_rounded:
        line += f", and {gigabytes(rounded_bytes(plan.gptq_rounded))} meanwhile for rounded layers"
    if space and space.needed not in (0, space.output):
        line += f"; the run needs {gigabytes(space.needed)} at a time"
    return line


def _download_line(nbytes: int, at_a_time: int, space: DiskSpace | None) -> str:
    """Say how much is downloaded, and where it goes."""
    line = f"download: {gigabytes(nbytes)}"
    streamed = at_a_time and f"{gigabytes(at_a_time)} at a time"
    if space and space.streamed:
        return line + optional(", of which {}", streamed)
    return f"{line} to the Hub's cache{optional(', or with --stream {}', streamed)}"


def serving_line(source: Serving, output: Serving, fp8: bool = False) -> str:
    """Say which GPUs serve an output: "serving:  one 24 GB GPU: 105k tokens, 12 sequences of 8,192 at once".

    Args:
        source: the source's size and the GPUs that serve it, for each GPU size.
        output: the output's size and the GPUs that serve it, for each GPU size.
        fp8: whether the output's KV cache is FP8 rather than bfloat16.
    """
    line = f"serving:  {card.memory_text(output, fp8)}"
    if output.fewest is None:
        return line

    if source.fewest is not None and card.gpus_text(source.fewest) != card.gpus_text(output.fewest):
        line += f"; the source needs {card.gpus_text(source.fewest)}"
    return f"{line}. By card: openquant fit MODEL --gpu 4090"


def _indented_table(rows: Sequence[Sequence[str]], width: int | None, left: Sequence[int] = (0,)) -> list[str]:
    """Make a table that stands two columns to the right."""
    if width is not None:
        width -= 2
    return [f"  {line}".rstrip() for line in table(rows, left, width)]


def _share(plan: Plan) -> str:
    """Say how much of the source a run quantizes: "84.2 % of the bytes quantized"."""
    if not plan.quantization_config:
        return "all weights in bfloat16"
    if plan.scheme is None:
        return f"all {summary.title(plan)}"
    return f"{100 * summary.quantized_bytes(plan) / summary.source_bytes(plan):.1f} % of the bytes quantized"


def details_text(plan: Plan, width: int | None = None) -> str:
    """List the ignore list and every copied file, for -v.

    Args:
        plan: the plan.
        width: the most characters of a line; None for any number.

    Returns:
        A text with a line for each file, and for each unquantized layer under every name that engines look up.
    """
    lines = [f"not quantized: {name}" for name in ignored_layers(plan)]
    return join_lines(paragraphs(lines + [f"copied: {name}" for name in plan.files], width))


def summary_text(plan: Plan, result: Result, already_complete: bool, width: int | None = None) -> str:
    """Summarize a finished run, with the commands that serve its output.

    Args:
        plan: the plan of the run.
        result: what the run did.
        already_complete: whether an earlier run had left nothing to do.
        width: the most characters of a line; None for any number.

    Returns:
        The text for a terminal, lines separated by newlines.
    """
    said = [
        f"{result.output}: {gigabytes(result.source_bytes)} -> {gigabytes(result.output_bytes)}, {_share(plan)}, "
        f"in {result.seconds:.1f} s, peak memory {gigabytes(result.peak_rss_bytes)}"
    ]
    if already_complete:
        said = [
            f"{result.output} is already complete; nothing was written (headers, index and config were checked, codes "
            "were not; openquant verify reads them, and --overwrite converts again)"
        ]
    if result.pushed_to is not None:
        said.append(f"pushed to {result.pushed_to}")
    # Warnings are said again, because a table may stand between: what is served is not the whole model.
    said += [*(f"note: {terminal(note)}" for note in plan.warnings), *closing_notes(plan, result)]
    commands = card.serve_commands(plan, result.repository or result.output, result.pushed_revision)

    return join_lines([*paragraphs(said, width), "", *[f"  {command}" for command in commands]])


def closing_notes(plan: Plan, result: Result) -> list[str]:
    """Write notes on faults of a source that are known only once it was read. A run with -q prints them too.

    Args:
        plan: the plan of the run.
        result: what the run did.

    Returns:
        Lines that begin with "note: "; none if there is nothing to say.
    """
    notes = not_finite_notes(result.not_finite, result.unread_shards)
    if not {*TOKENIZER_FILES}.difference(SETTINGS).intersection(plan.files):
        notes.append("note: the source has no tokenizer, which engines need: copy its files into the output")
    return notes


# Most tensors that a note names.
NAMED = 3


def not_finite_notes(not_finite: Mapping[str, str], unread: int = 0) -> list[str]:
    """Write notes on unquantized tensors that hold NaN or infinity.

    Args:
        not_finite: what each such tensor holds, by tensor name, such as "NaN (3 values)".
        unread: number of shards that were not checked.

    Returns:
        Lines that begin with "note: "; none if there is nothing to say.
    """
    notes = []
    if not_finite:
        tensors = [f"{name} holds {values}" for name, values in not_finite.items()]
        listed = list_first(tensors, NAMED, "more hold NaN or infinity")
        remark = "with NaN, or infinity in a weight, a model answers NaN"
        notes.append(f"note: of the tensors that are not quantized {listed}: {remark}")
    if unread:
        notes.append(
            f"note: {count_of(unread, 'shard')} of an earlier run, not looked at for NaN, infinity and lost "
            "weights: `openquant verify --full --source MODEL` looks at them"
        )
    return [terminal(note) for note in notes]


def preview_text(preview: Mapping[str, Any], width: int | None = None) -> str:
    """Format what `push --dry-run` says for a terminal.

    Args:
        preview: what would be read, done and written: the result of preview_push().
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    rows = [("reads", _place_text(place)) for place in preview["reads"]]
    rows += [("does", text) for text in preview["does"]]
    rows += [("writes", _place_text(place)) for place in preview["writes"]]
    rows += [("note", note) for note in preview["notes"]]
    return join_lines([*table(rows, left=(0, 1), width=width), "nothing was written"])


def _place_text(place: Mapping[str, Any]) -> str:
    if place["bytes"] is None:
        return f"{place['path']} ({place['what']})"
    return f"{place['path']} ({place['what']}, {gigabytes(place['bytes'])})"


def verification_text(report: Report, width: int | None = None) -> str:
    """Format the result of verify for a terminal.

    Args:
        report: the result of verify.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    count = count_of(len(report.problems) or "no", "problem")
    lines = [f"{count}: {report.directory}, {report.description}, {report.seconds:.1f} s"]
    lines += [f"problem: {problem}" for problem in report.problems[:MOST_PROBLEMS]]
    more = len(report.problems) - MOST_PROBLEMS
    if more > 0:
        lines.append(f"and {count_of(more, 'more problem')}: --json has them all")
    if report.problems:
        lines += [f"hint: {hint}" for hint in report.hints]

    if report.architecture is not None:
        lines.append(f"{report.architecture}, quant_method {report.format.partition(',')[0]}")
        lines.append(
            f"{gigabytes(report.nbytes)} in {count_of(report.shards, 'shard')}: {count_of(report.tensors, 'tensor')}, "
            f"{count_of(report.quantized, 'quantized layer')}"
        )
        if report.source is not None:
            lines.append(
                f"equal to {report.source}: {count_of(report.equal_tensors, 'tensor')}, "
                f"{count_of(report.equal_files, 'other file')}"
            )

    lines += [f"note: {note}" for note in report.notes]
    lines = paragraphs(lines, width)
    if report.errors:
        lines += ["", *_errors_table(report, width)]
    return join_lines(lines)


def _errors_table(report: Report, width: int | None) -> list[str]:
    rows = [("worst layers", "shape", "error", "SQNR", "largest error")]
    rows += [
        (
            error.module,
            " x ".join(map(str, error.shape)),
            f"{100 * error.relative:.3f} %",
            "exact" if error.sqnr_db is None else f"{error.sqnr_db:.1f} dB",
            f"{error.largest:.3g}",
        )
        for error in report.worst
    ]

    mean = sum(error.relative for error in report.errors) / len(report.errors)
    layers = count_of(report.quantized, "layer")
    if len(report.errors) < report.quantized:
        layers = f"{len(report.errors)} of {layers}"
    said = [f"{layers} decoded: relative error {100 * mean:.3f} % on average"]

    share = report.equal_share
    if share is not None and report.recomputed:
        said.append(f"quantizing the source again gives {_percent(share)} of the codes")
    elif share is not None:
        said.append(f"{_percent(share)} of the codes are the nearest to the source under their scales")

    return [*table(rows, width=width), *paragraphs(said, width)]


def _percent(share: float) -> str:
    """Format a share: "97.1 %"; "100 %" only for exactly 1."""
    if share == 1:
        return "100 %"
    return f"{min(100 * share, 99.99):.4g} %"


# Number of prompts whose answers are shown, and characters of each answer.
SHOWN_PROMPTS = 2
SHOWN_CHARACTERS = 300


def evaluation_text(evaluation: Mapping[str, Any], notes: Sequence[str], width: int | None = None) -> str:
    """Format an evaluation for a terminal: the verdicts, a table of all outputs, then reasons and answers of each.

    Args:
        evaluation: what `eval --json` prints: `source`, `floor`, and `outputs`, the eval.json of one output or
            more.
        notes: remarks for the user.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    floor = evaluation["floor"]
    outputs = evaluation["outputs"]

    verdicts = [f"{output['output']['name']}: {output['verdict']}: {verdict_meaning(output)}" for output in outputs]
    lines = paragraphs([*verdicts, ""], width)

    rows = [("", "size", "KL, nats", "95 %", "same token", "perplexity")]
    size = gigabytes(outputs[0]["sizes"]["source"])
    perplexity = _number(outputs[0]["perplexity"]["source"])
    rows.append((f"{terminal(evaluation['source']['name'])} (source)", size, "", "", "", perplexity))
    rows.append(("  noise: the floor", "", *_kl(floor), card.percent(floor["top1"]), _number(floor["perplexity"])))

    for output in outputs:
        kl = {"kl": output["kl"]["mean"], **output["kl"]}
        name = terminal(output["output"]["name"])
        size = gigabytes(output["sizes"]["output"])
        rows.append((name, size, *_kl(kl), card.percent(output["top1"]), _number(output["perplexity"]["output"])))

        weights_only = output["weights_only"]
        if weights_only["kl"] != output["kl"]["mean"]:
            cells = card.percent(weights_only["top1"]), _number(weights_only["perplexity"])
            rows.append(("  its weights alone", "", *_kl(weights_only), *cells))

    lines += table(rows, width=width)

    for output in outputs:
        said = ["", f"{output['output']['name']}:", *(f"  {reason}" for reason in output["reasons"])]
        if output["verdict"] == "same":
            said.append("  so near the floor, KL does not predict which output does better in benchmarks")
        lines += paragraphs([*said, *(f"  {line}" for line in _layer_lines(output))], width)

        if "tasks" in output:
            lines += ["", *_indented_table(task_rows(output["tasks"]), width)]
            lines += paragraphs([f"  {output['tasks']['reading']}"], width)

        for text in output["texts"][:SHOWN_PROMPTS]:
            lines += ["", *_answers(text, width)]

    text = outputs[0]["text"]
    last = [
        f"{text['positions']:,} positions of {text['documents']} texts, SHA-256 of the tokens {text['sha256'][:16]}"
    ]
    lines += ["", *paragraphs([*last, *(f"note: {note}" for note in notes)], width)]

    return join_lines(lines)


def _layer_lines(output: Mapping[str, Any]) -> list[str]:
    """Summarize the distances of hidden states and the routing of tokens, in at most two lines."""
    layers = output["layers"]
    if not layers:
        return []
    first = layers[0]
    last = layers[-1]
    lines = [
        f"relative distance of hidden states: {first['distance']:.3g} after {terminal(first['layer'])}, "
        f"{last['distance']:.3g} after {terminal(last['layer'])} (floor {last['floor']:.3g})"
    ]
    routed = [layer["routed_otherwise"] for layer in layers if "routed_otherwise" in layer]
    if routed:
        lines.append(
            f"tokens routed to other experts: {card.percent(min(routed))} to {card.percent(max(routed))}, by layer"
        )
    return lines


def _answers(text: Mapping[str, Any], width: int | None) -> list[str]:
    """Return a prompt and both answers, and a line that says where they differ."""
    rows = [(f"  {name}", str(text[name])[:SHOWN_CHARACTERS]) for name in card.SIDES]
    return [*table(rows, left=(0, 1), width=width), *paragraphs([f"  {card.difference_text(text)}"], width)]


def _kl(figures: Mapping[str, Any]) -> tuple[str, str]:
    interval = "..".join(f"{edge:.2g}" for edge in figures["interval"] or ())
    return f"{figures['kl']:.3g}", interval


def _number(value: float) -> str:
    return f"{value:.5g}"


_AXES = {"out": "rows (column parallel)", "in": "columns (row parallel)"}


def explanation_text(explanation: Explanation, width: int | None = None) -> str:
    """Format an explanation for a terminal.

    Args:
        explanation: the result of explain.
        width: the most characters of a line; None for any number.

    Returns:
        The text: for each group of layers that are alike a heading and a line for each fact.
    """
    return "\n\n".join(_paragraph(layer, explanation.architecture, width) for layer in explanation.layers)


def _paragraph(layer: ModuleExplanation, architecture: str, width: int | None) -> str:
    becomes = "stays as it is"
    if layer.scheme is not None:
        becomes = f"quantized, --scheme {layer.scheme}"

    rule = "no rule: it has fewer than two axes, or --ignore names it"
    if layer.rule is not None:
        rule = f"{layer.rule.field}{optional(': {}', layer.rule.pattern)} ({architecture})"

    ranks = ""
    if len(layer.shape) > 1:
        ranks = _rank_text(layer.ranks)

    rows = [
        ("becomes", f"{becomes}{optional(': {}', layer.why)}"),
        ("rule", rule),
        ("source", f"{_tensors(layer.source) or 'nothing'}, in {layer.shard}"),
        ("output", _tensors(layer.output)),
        ("fused with", ", ".join(name for name in layer.joined if name != layer.module)),
        ("experts", layer.experts or ""),
        ("ranks", ranks),
        *[(engine, ", ".join(names)) for engine, names in layer.engines.items()],
        ("ignore list", optional("as {}", layer.listed) or "not in it"),
    ]

    heading = ", ".join(collapse(layer.modules))
    if len(layer.modules) > 1:
        heading += f" ({len(layer.modules)} alike; below {layer.module})"
    lines = _indented_table([row for row in rows if row[1]], width, left=(0, 1))

    return join_lines([*paragraphs([heading], width), *lines])


def _tensors(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def _rank_text(ranks: RankSplit | None) -> str:
    if ranks is None:
        return "each has all of it"
    heads = ""
    if ranks.heads:
        copied = ", replicated if there are fewer heads than ranks" * ranks.replicated
        heads = f", by heads ({ranks.heads}{copied})"
    sizes = ", ".join(map(str, ranks.sizes)) or "none"
    problem = next((f"; not {size}: {why}" for size, why in ranks.problems.items()), "")
    return f"each has a part of its {_AXES[ranks.axis]}{heads}; sizes {sizes}{problem}"


def environment_text(found: Mapping[str, Any], width: int | None = None) -> str:
    """Format what `describe_environment()` returns: a line for each fact.

    Args:
        found: its result.
        width: the most characters of a line; None for any number.
    """
    gpus = found["gpus"]
    if not isinstance(gpus, str):
        described = (f"{gpu['name']}, {gigabytes(gpu['memory'])}, capability {gpu['capability']}" for gpu in gpus)
        gpus = "; ".join(described) or "none"

    loops = found["loops"]
    if loops == "numba":
        loops = "numba, for large models"

    rows = [
        ("openquant", f"{found['openquant']}{optional(' ({})', found['commit'])}"),
        ("Python", f"{found['python']}, {found['system']}"),
        ("CPU", f"{found['cpus']} of {found['cpu'] or 'unknown'}: {', '.join(found['instructions'])}"),
        ("memory", f"{gigabytes(found['memory'])} available"),
        ("GPUs", gpus),
        ("loops", loops),
        *((name, version or "not installed") for name, version in {**found["libraries"], **found["engines"]}.items()),
        *found["settings"].items(),
    ]
    return join_lines(table(rows, left=(0, 1), width=width))


# Layers in a table, unless the user wants all; and most names in a line.
WORST = 10


def diagnosis_text(diagnosis: Diagnosis, every: bool, width: int | None = None) -> str:
    """Format a diagnosis for a terminal: the errors of layers, and what was measured to lose less.

    Args:
        diagnosis: the result of diagnose.
        every: whether to list every layer in the order of the checkpoint; else only the worst.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    layers: Sequence[LayerDiagnosis] = diagnosis.layers
    shown = "row error of weights"
    if not every:
        layers = diagnosis.worst[:WORST]
        shown += f", {len(layers)} largest"

    rows = "all their rows"
    if diagnosis.rows_read != 1:
        rows = f"{100 * diagnosis.rows_read:.2g} % of their rows, spread evenly; scales from all"

    # All schemes would make a line of two hundred letters.
    schemes = [name for name in SCHEMES if name == diagnosis.scheme or measured_kl(SCHEMES[name]) is not None]

    errors = [
        (terminal(layer.module), *(_in_percent(layer.row_errors[scheme]) for scheme in schemes)) for layer in layers
    ]
    normal = ("normally distributed weights", *(_in_percent(diagnosis.normal[scheme]) for scheme in schemes))

    heading = [
        f"{diagnosis.model}{optional('@{}', diagnosis.revision)}: {diagnosis.architecture}, "
        f"--scheme {diagnosis.scheme}",
        f"{len(diagnosis.layers)} layers, measured on {rows}",
    ]

    zero = [layer.module for layer in diagnosis.layers if layer.is_zero]
    said = [
        "activations, which most schemes round too, are not counted",
        *not_finite_notes(diagnosis.not_finite),
        *(f"note: {terminal(note)}" for note in zero_notes(zero)),
        *_conspicuous(diagnosis),
    ]

    lines = [
        *paragraphs(heading, width),
        "",
        *table([(shown, *schemes), *errors, normal], width=width),
        "",
        *paragraphs(said, width),
        *_choices(diagnosis, width),
    ]
    return join_lines(lines)


def _in_percent(share: float | None) -> str:
    """Format a share: "2.64 %"; "-" for None, an error in a scheme that cannot store the layer."""
    if share is None:
        return NOTHING
    return f"{100 * share:.3g} %"


def _conspicuous(diagnosis: Diagnosis) -> list[str]:
    layers = diagnosis.conspicuous
    if not layers:
        return ["no layer loses more than twice what normally distributed weights do"]
    names = list_first(collapse([layer.module for layer in layers]), WORST)
    remedy = optional("; none does with --scheme {}", " or ".join(diagnosis.remedies))
    return [
        terminal(
            f"{len(layers)} of {len(diagnosis.layers)} layers lose more than twice what normally distributed weights "
            f"do, or cannot be stored: {names}{remedy}"
        )
    ]


def _choices(diagnosis: Diagnosis, width: int | None) -> list[str]:
    if diagnosis.kl is None:
        return paragraphs([f"--scheme {diagnosis.scheme} was not measured on {MODEL}"], width)

    if not diagnosis.choices:
        return paragraphs([f"nothing of about this size lost a tenth less on {MODEL}"], width)

    rows = [
        (
            choice.options,
            f"{choice.kl:.3g}",
            f"{100 * choice.gain:.0f} % less",
            gigabytes(choice.bytes),
            choice.activations,
            ("no", "once", "twice")[choice.readings],
        )
        for choice in diagnosis.choices
    ]

    requested = SCHEMES[diagnosis.scheme]
    size = gigabytes(diagnosis.bytes)
    first = (f"--scheme {requested.name}", f"{diagnosis.kl:.3g}", "", size, activations(requested), "no")

    return [
        "",
        *paragraphs([f"what lost less on {MODEL} at about the same size, and the size of this model:"], width),
        "",
        *table([("openquant compress", "KL, nats", "", "size", "activations", "texts"), first, *rows], width=width),
    ]
