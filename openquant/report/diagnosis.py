"""What diagnose found, as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..diagnosis.result import FLAGS, Advice, Diagnosis, LayerDiagnosis
from ..formats.schemes import SCHEMES
from ..patterns import collapse
from .card import gigabytes
from .escape import join_lines, terminal
from .text import not_finite_notes

# Layers in a table, unless all are wanted.
WORST = 10


def diagnosis_text(found: Diagnosis, every: bool) -> str:
    """What diagnose found.

    Args:
        found: that.
        every: list every layer, in the order of the checkpoint; else the worst.
    """
    layers = found.layers if every else found.worst[:WORST]
    name = f"{found.model}@{found.revision}" if found.revision else found.model
    rows = (
        "all their rows"
        if found.rows_read == 1
        else f"{100 * found.rows_read:.2g} % of their rows, spread evenly; the largest weight and scales from all"
    )
    lines = [
        terminal(f"{name}: {found.architecture}, --scheme {found.scheme}"),
        f"{len(found.layers)} layers, measured on {rows}",
        "",
    ]
    shown = "layers" if every else f"{len(layers)} layers of the largest row error"
    lines += _table(
        (shown, "shape", "max", "mean", "std", "max/mean", "range", "to zero", "subnormal", "error", "flags"),
        [_figures(layer, found.scheme) for layer in layers],
        ragged=True,
    )
    lines.append("")
    lines += _table(
        ("row error", *SCHEMES),
        [(layer.module, *(_percent(layer.row_errors[scheme]) for scheme in SCHEMES)) for layer in layers],
    )
    lines += ["", *not_finite_notes(found.not_finite), *_flags(found.layers), *_advice(found)]
    return join_lines(lines)


def _figures(layer: LayerDiagnosis, scheme: str) -> tuple[str, ...]:
    return (
        layer.module,
        " x ".join(map(str, layer.shape)),
        *(f"{value:.3g}" for value in (layer.max, layer.mean, layer.std)),
        *(f"{value:.3g}" for value in (layer.outlier_ratio, layer.dynamic_range)),
        _percent(layer.zero_shares[scheme]),
        _percent(layer.subnormal_shares[scheme]),
        _percent(layer.errors[scheme]),
        ", ".join(layer.flags),
    )


def _percent(share: float | None) -> str:
    """A share for people: "2.64 %"; "-" of what cannot be stored."""
    return "-" if share is None else f"{100 * share:.3g} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], ragged: bool = False) -> list[str]:
    """Columns, the first and with `ragged` the last of them to the left."""
    cells = [[terminal(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        placed = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        if ragged:
            placed[-1] = row[-1]
        lines.append("  ".join(placed).rstrip())
    return lines


def _flags(layers: Sequence[LayerDiagnosis]) -> list[str]:
    lines = []
    for flag, meaning in FLAGS.items():
        raised = [layer.module for layer in layers if flag in layer.flags]
        if raised:
            lines.append(f"{flag}: {len(raised)} of {len(layers)} layers: {meaning}: {_names(raised)}")
    return lines or ["no layer is out of the ordinary"]


def _names(modules: Sequence[str]) -> str:
    names = collapse(modules)
    more = f" and {len(names) - WORST} more" if len(names) > WORST else ""
    return terminal(", ".join(names[:WORST]) + more)


def _advice(found: Diagnosis) -> list[str]:
    notes = [f"note: {note}" for note in found.notes]
    if not found.advice:
        return ["no other scheme that can be mixed in halves the error of a layer", *notes]
    lines = [_remedy(one) for one in found.advice[:WORST]]
    if len(found.advice) > WORST:
        lines.append(f"and {len(found.advice) - WORST} more, see --json")
    return [
        *lines,
        *notes,
        "",
        f"all of it: {gigabytes(found.bytes_before)} {_grown(found.bytes_after - found.bytes_before)}",
        "",
        f"  {terminal(shlex.join(['openquant', 'compress', '-m', found.model, *found.options]))}",
    ]


def _remedy(one: Advice) -> str:
    before = _percent(one.error_before) if one.error_before is not None else "cannot be stored"
    return terminal(
        f"{_names(one.layers)}: {before} -> {_percent(one.error_after) if one.scheme else 'as it is'}, "
        f"{_grown(one.bytes)}: {one.option}"
    )


def _grown(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'} {gigabytes(abs(nbytes))}"
