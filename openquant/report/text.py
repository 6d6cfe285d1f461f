"""The plan, the summary of a run and the result of verify, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files.destination import DiskSpace
from ..hub.fetch import Download
from ..patterns import collapse
from ..plan import summary
from ..plan.config import ignored_layers
from ..plan.gptq import rounded_bytes
from ..plan.kv_cache import CACHED
from ..plan.plan import Plan
from ..plan.printed import PlanLine
from ..plan.serving import GPU_GB, Serving
from ..result import Place, Preview, Result
from ..verification.outcome import Report
from .card import engines_that_read, serve_commands
from .cells import gigabytes, paragraphs, short, shortened, table
from .escape import join_lines, terminal

# Characters of a reason in the plan's table: a pattern may name a hundred layers, which the line names too.
_LONGEST_REASON = 80


def plan_text(
    plan: Plan,
    model: str,
    output: Path,
    download: Download,
    notes: Sequence[str],
    space: DiskSpace | None = None,
    width: int | None = None,
) -> str:
    """Format a plan for a terminal: a table with a line for each group of layers that are alike, then sizes and notes.

    Args:
        plan: the plan.
        model: the source's name.
        output: the output directory.
        download: sizes of the files that are fetched from the Hub.
        notes: notes on the download and the disk.
        space: the disk space that the run needs; None if it is not known.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    rows = [("", "layers", "shape", "before", "after", "")]
    rows += [_row(line) for line in plan.lines if line.quantized]
    rows += [_row(line) for line in plan.lines if line.decoded]
    copied = [line for line in plan.lines if not line.quantized and not line.decoded]
    rows += [_row(line) for line in copied if len(line.shape) >= 2]
    rows += [("scale", *_row(line)[1:]) for line in copied if line.why == CACHED]
    small = [line for line in copied if len(line.shape) < 2 and line.why != CACHED]
    if small:
        count = sum(len(line.names) for line in small)
        size = gigabytes(sum(line.bytes_before for line in small))
        rows.append(("keep", f"{count} tensors of fewer than two axes", "", size, size, "norm, bias or the like"))
    heading = [f"{model} -> {output}", f"{plan.model.name}, {summary.description(plan)}", ""]
    lines = table(rows, left=(0, 1, 5), width=width, keys=2)
    return join_lines([*paragraphs(heading, width), *lines, "", *_facts(plan, download, notes, space, width)])


def _row(line: PlanLine) -> tuple[str, str, str, str, str, str]:
    return (
        line.scheme.format.number.title if line.scheme else "BF16" if line.decoded else "keep",
        ", ".join(collapse(line.names)),
        " x ".join(map(str, line.shape)),
        gigabytes(line.bytes_before),
        gigabytes(line.bytes_after),
        shortened(line.why, _LONGEST_REASON),
    )


def _facts(
    plan: Plan, download: Download, notes: Sequence[str], space: DiskSpace | None, width: int | None
) -> list[str]:
    unchanged = plan.scheme is None and plan.quantization_config
    layers = "" if unchanged else f" ({summary.quantized_tensors(plan) or summary.decoded_tensors(plan)} layers)"
    before, after = summary.source_bytes(plan), summary.output_bytes(plan)
    at_a_time = gigabytes(space.needed) if space and space.needed not in (0, space.output) else None
    lines = [
        f"weights:  {gigabytes(before)} -> {gigabytes(after)}, {_share(plan)}{layers}",
        f"disk:     {gigabytes(after + sum(plan.files.values()))} in "
        f"{_count(len(plan.layout.shards), 'shard')} and {_count(len(plan.files), 'other file')}"
        + (
            f", and {gigabytes(rounded_bytes(plan.gptq_rounded))} meanwhile for rounded layers"
            if plan.gptq_rounded
            else ""
        )
        + (f"; the run needs {at_a_time} at a time" if at_a_time else ""),
    ]
    if download.nbytes:
        other_files = (
            f" ({gigabytes(download.file_bytes)} in {_count(download.files, 'other file')})" if download.files else ""
        )
        streamed = f"{gigabytes(download.streamed)} at a time" if download.streamed else None
        if space and space.streamed:
            where = f", of which {streamed}" if streamed else ""
        else:
            where = " to the Hub's cache" + (f", or with --stream {streamed}" if streamed else "")
        lines.append(f"download: {gigabytes(download.nbytes)}{other_files}{where}")
    if plan.quantization_config:
        sizes = ", ".join(map(str, summary.parallel_sizes(plan))) or "none"
        lines.append(f"tensor parallel sizes that can serve it: {sizes}")
    lines += [f"  not {entry.size}: {entry.problem}" for entry in plan.parallel if entry.problem]
    serving = summary.serving(plan)
    table_lines = serving_lines(*serving, width) if serving else []
    last = [f"left out: {', '.join(plan.decoded.left_out)}"] if plan.decoded.left_out else []
    last += [f"note: {note}" for note in (*plan.notes, *notes)]
    return [*paragraphs(lines, width), *table_lines, *paragraphs(last, width)]


def serving_lines(source: Serving, output: Serving, width: int | None = None) -> list[str]:
    """Make a table of the fewest GPUs that serve source and output, and of the tokens that they then hold.

    Args:
        source: the source's size and the GPUs that serve it, for each GPU size.
        output: the output's size and the GPUs that serve it, for each GPU size.
        width: the most characters of a line; None for any number.

    Returns:
        The lines of the table, for a terminal.
    """
    cache = output.cache
    legend = f"the fewest GPUs; how many tokens they hold is not known: {output.unknown}"
    if cache is not None:
        sequence = f" and {gigabytes(cache.per_sequence(False))} a sequence" if cache.per_sequence(False) else ""
        token = gigabytes(cache.per_token(False))
        gpus = "GPUs that are needed: tokens of all sequences together, cached in bfloat16, in FP8"
        legend = f"KV cache {token} a token{sequence}; {gpus}"
    rows = [["", *(f"{size} GB" for size in GPU_GB)]]
    for name, serving in (("source", source), ("output", output)):
        rows.append([name])
        for fit in serving.fits:
            tokens = [short(count) for count in (fit.tokens_bf16, fit.tokens_fp8) if count is not None]
            rows[-1].append("-" if fit.gpus is None else ": ".join(filter(None, (str(fit.gpus), ", ".join(tokens)))))
    lines = [f"  {line}".rstrip() for line in table(rows, width=None if width is None else width - 2)]
    more = "  by a card's exact memory: openquant fit MODEL --gpu 4090"
    return [*paragraphs([f"serving:  {legend}"], width), *lines, more]


def _share(plan: Plan) -> str:
    """Say how much of the source a run quantizes: "84.2 % of the bytes quantized"."""
    if plan.scheme is None:
        return f"all {summary.title(plan)}" if plan.quantization_config else "all weights in bfloat16"
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
    headline = (
        f"{result.output} is already complete; nothing was written (headers, index and config were checked, codes were "
        "not: openquant verify reads them, and --overwrite converts again)"
        if already_complete
        else f"{result.output}: {gigabytes(result.source_bytes)} -> {gigabytes(result.output_bytes)}, "
        f"{_share(plan)}, in {result.seconds:.1f} s, "
        f"peak memory {gigabytes(result.peak_rss_bytes)}"
    )
    commands = serve_commands(plan, result.repository or result.output, result.pushed_revision)
    published = [] if result.pushed_to is None else [f"pushed to {result.pushed_to}"]
    said = [
        headline,
        *published,
        *not_finite_notes(result.not_finite, result.unread_shards),
        engines_that_read(plan),
    ]
    return join_lines([*paragraphs(said, width), "", *[f"  {command}" for command in commands]])


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
        names = [f"{name} holds {values}" for name, values in list(not_finite.items())[:NAMED]]
        more = f" and {len(not_finite) - NAMED} more hold NaN or infinity" if len(not_finite) > NAMED else ""
        notes.append(
            f"note: of the tensors that are not quantized {', '.join(names)}{more}: with NaN, or infinity in a weight, "
            "a model answers NaN"
        )
    if unread:
        notes.append(
            f"note: {_count(unread, 'shard')} of an earlier run, on the Hub already, not looked at for NaN and infinity"
        )
    return [terminal(note) for note in notes]


def preview_text(preview: Preview, width: int | None = None) -> str:
    """Format what a dry run says for a terminal.

    Args:
        preview: what would be read, done and written.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    rows = [
        *(("reads", _place_text(place)) for place in preview.reads),
        *([("downloads", gigabytes(preview.download_bytes))] if preview.download_bytes else []),
        *(("does", text) for text in preview.does),
        *(("writes", _place_text(place)) for place in preview.writes),
        *(("note", note) for note in preview.notes),
    ]
    return join_lines([*table(rows, left=(0, 1), width=width), "nothing was written"])


def _place_text(place: Place) -> str:
    size = "" if place.bytes is None else f", {gigabytes(place.bytes)}"
    return f"{place.path} ({place.what}{size})"


def verification_text(report: Report, width: int | None = None) -> str:
    """Format the result of verify for a terminal.

    Args:
        report: the result of verify.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    lines = [f"{report.directory}: {', '.join(filter(None, [report.architecture, report.format]))}"]
    if report.architecture is not None:
        lines.append(
            f"{gigabytes(report.nbytes)} in {_count(report.shards, 'shard')}: {_count(report.tensors, 'tensor')}, "
            f"{_count(report.quantized, 'quantized layer')}"
        )
        if report.source is not None:
            lines.append(
                f"equal to {report.source}: {_count(report.equal_tensors, 'tensor')}, "
                f"{_count(report.equal_files, 'other file')}"
            )
    errors = ["", *_errors_table(report, width), ""] if report.errors else []
    last = [f"note: {note}" for note in report.notes]
    last += [f"problem: {problem}" for problem in report.problems]
    problems = _count(len(report.problems), "problem") if report.problems else "no problems"
    last.append(f"{problems}, {report.seconds:.1f} s")
    if report.problems:
        last += [f"hint: {hint}" for hint in report.hints]
    return join_lines([*paragraphs(lines, width), *errors, *paragraphs(last, width)])


def _errors_table(report: Report, width: int | None) -> list[str]:
    rows = [("worst layers", "shape", "relative error", "SQNR", "largest error")]
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
    count = len(report.errors)
    some = f"{count} of " if count < report.quantized else ""
    said = [f"{some}{_count(report.quantized, 'layer')} decoded: relative error {100 * mean:.3f} % on average"]
    share = report.equal_share
    if share is not None and report.recomputed:
        said.append(f"quantizing the source again gives {_percent(share)} of the codes")
    elif share is not None:
        said.append(f"{_percent(share)} of the codes are the nearest to the source under their scales")
    return [*table(rows, width=width), *paragraphs(said, width)]


def _percent(share: float) -> str:
    """Format a share: "97.1 %"; "100 %" only for exactly 1."""
    return "100 %" if share == 1 else f"{min(100 * share, 99.99):.4g} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
