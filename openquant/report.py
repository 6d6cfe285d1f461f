"""The plan and the summary as text for a terminal."""

from __future__ import annotations

from pathlib import Path

from .api import Result
from .card import gigabytes, readers, serve_commands
from .patterns import collapse
from .plan import Group, Plan


def plan_text(plan: Plan, model: str, output: Path, download: int) -> str:
    """What a run will do, a line per group of layers; `download` bytes of shards are not here yet."""
    rows = [("", "layers", "shape", "before", "after", "")]
    rows += [_row(group) for group in plan.groups if group.quantized]
    rows += [_row(group) for group in plan.groups if not group.quantized and len(group.shape) >= 2]
    small = [group for group in plan.groups if not group.quantized and len(group.shape) < 2]
    if small:
        count = sum(len(group.names) for group in small)
        size = gigabytes(sum(group.bytes_before for group in small))
        rows.append(("keep", f"{count} tensors of fewer than two axes", "", size, size, "norm, bias or the like"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [f"{model} -> {output}", f"{plan.architecture}, float8_e4m3fn, {plan.scheme.title}", ""]
    for kind, layers, shape, before, after, why in rows:
        cells = (
            kind.ljust(widths[0]),
            layers.ljust(widths[1]),
            shape.rjust(widths[2]),
            before.rjust(widths[3]),
            after.rjust(widths[4]),
            why,
        )
        lines.append("  ".join(cells).rstrip())
    lines += ["", *_facts(plan, download)]
    return "\n".join(lines)


def _row(group: Group) -> tuple[str, str, str, str, str, str]:
    return (
        "FP8" if group.quantized else "keep",
        ", ".join(collapse(group.names)),
        " x ".join(map(str, group.shape)),
        gigabytes(group.bytes_before),
        gigabytes(group.bytes_after),
        group.why,
    )


def _facts(plan: Plan, download: int) -> list[str]:
    share = 100 * plan.source_weight_bytes_quantized / plan.source_bytes
    lines = [
        f"weights:  {gigabytes(plan.source_bytes)} -> {gigabytes(plan.output_bytes)}, "
        f"{share:.1f} % of the bytes quantized ({plan.quantized_tensors} layers)",
        f"disk:     {gigabytes(plan.output_bytes + sum(plan.files.values()))} in "
        f"{len(plan.shards)} {'shard' if len(plan.shards) == 1 else 'shards'} and {len(plan.files)} other files",
    ]
    if download:
        lines.append(f"download: {gigabytes(download)}, with --stream a few shards at a time")
    sizes = ", ".join(map(str, plan.parallel_sizes)) or "none"
    lines.append(f"tensor parallel sizes that can serve it: {sizes}")
    lines += [f"  not {entry.size}: {entry.problem}" for entry in plan.parallel if entry.problem]
    if plan.left_out:
        lines.append(f"left out: {', '.join(plan.left_out)}")
    lines += [f"note: {note}" for note in plan.notes]
    return lines


def details_text(plan: Plan) -> str:
    """For -v: every layer that stays unquantized, and every other file."""
    lines = [f"not quantized: {name}" for name in plan.ignored_layers]
    return "\n".join(lines + [f"copied: {name}" for name in plan.files])


def summary_text(plan: Plan, result: Result, already_complete: bool) -> str:
    """What a run did, and the commands to type next."""
    share = 100 * plan.source_weight_bytes_quantized / plan.source_bytes
    done = (
        f"{result.output} is already complete; nothing was written"
        if already_complete
        else f"{result.output}: {gigabytes(result.source_bytes)} -> {gigabytes(result.output_bytes)}, "
        f"{share:.1f} % of the bytes quantized, in {result.seconds:.1f} s, "
        f"peak memory {gigabytes(result.peak_rss_bytes)}"
    )
    published = [] if result.pushed_to is None else [f"pushed to {result.pushed_to}"]
    return "\n".join(
        [
            done,
            *published,
            readers(plan),
            "",
            *[f"  {command}" for command in serve_commands(plan, result.output)],
        ]
    )
