"""The result of diagnose, as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..diagnosis.result import FLAGS, Advice, Diagnosis, LayerDiagnosis
from ..formats.schemes import SCHEMES
from ..patterns import collapse
from .card import gigabytes
from .escape import join_lines, terminal
from .text import not_finite_notes, table

# Layers in a table, unless the user wants all; and most names in a line.
WORST = 10


def diagnosis_text(diagnosis: Diagnosis, every: bool) -> str:
    """Format a diagnosis for a terminal: two tables of layers, flags, and suggestions.

    Args:
        diagnosis: the result of diagnose.
        every: whether to list every layer in the order of the checkpoint; else only the worst.

    Returns:
        The text, lines separated by newlines.
    """
    layers = diagnosis.layers if every else diagnosis.worst[:WORST]
    name = f"{diagnosis.model}@{diagnosis.revision}" if diagnosis.revision else diagnosis.model
    rows = (
        "all their rows"
        if diagnosis.rows_read == 1
        else f"{100 * diagnosis.rows_read:.2g} % of their rows, spread evenly; the largest weight and scales from all"
    )
    lines = [
        terminal(f"{name}: {diagnosis.architecture}, --scheme {diagnosis.scheme}"),
        f"{len(diagnosis.layers)} layers, measured on {rows}",
        "",
    ]
    shown = "layers" if every else f"{len(layers)} layers of the largest row error"
    head = (shown, "shape", "max", "mean", "std", "max/mean", "range", "to zero", "subnormal", "error", "flags")
    lines += table([head, *(_figures(layer, diagnosis.scheme) for layer in layers)], left=(0, len(head) - 1))
    lines.append("")
    row_errors = [
        (terminal(layer.module), *(_percent(layer.row_errors[scheme]) for scheme in SCHEMES)) for layer in layers
    ]
    lines += table([("row error", *SCHEMES), *row_errors])
    lines += ["", *not_finite_notes(diagnosis.not_finite), *_flags(diagnosis.layers), *_advice(diagnosis)]
    return join_lines(lines)


def _figures(layer: LayerDiagnosis, scheme: str) -> tuple[str, ...]:
    return (
        terminal(layer.module),
        " x ".join(map(str, layer.shape)),
        *(f"{value:.3g}" for value in (layer.max, layer.mean, layer.std)),
        *(f"{value:.3g}" for value in (layer.outlier_ratio, layer.dynamic_range)),
        _percent(layer.zero_shares[scheme]),
        _percent(layer.subnormal_shares[scheme]),
        _percent(layer.errors[scheme]),
        ", ".join(layer.flags),
    )


def _percent(share: float | None) -> str:
    """Format a share: "2.64 %"; "-" for None, an error in a scheme that cannot store the layer."""
    return "-" if share is None else f"{100 * share:.3g} %"


def _flags(layers: Sequence[LayerDiagnosis]) -> list[str]:
    lines = []
    for flag, meaning in FLAGS.items():
        flagged = [layer.module for layer in layers if flag in layer.flags]
        if flagged:
            lines.append(f"{flag}: {len(flagged)} of {len(layers)} layers: {meaning}: {_names(flagged)}")
    return lines or ["no layer is out of the ordinary"]


def _names(modules: Sequence[str]) -> str:
    names = collapse(modules)
    more = f" and {len(names) - WORST} more" if len(names) > WORST else ""
    return terminal(", ".join(names[:WORST]) + more)


def _advice(diagnosis: Diagnosis) -> list[str]:
    notes = [f"note: {note}" for note in diagnosis.notes]
    if not diagnosis.advice:
        return ["no other scheme that can be mixed in halves the error of a layer", *notes]
    lines = [_advice_line(advice) for advice in diagnosis.advice[:WORST]]
    if len(diagnosis.advice) > WORST:
        lines.append(f"and {len(diagnosis.advice) - WORST} more, see --json")
    change = _size_change(diagnosis.bytes_after - diagnosis.bytes_before)
    return [
        *lines,
        *notes,
        "",
        f"all of it: {gigabytes(diagnosis.bytes_before)} {change}",
        "",
        f"  {terminal(shlex.join(['openquant', 'compress', '-m', diagnosis.model, *diagnosis.options]))}",
    ]


def _advice_line(advice: Advice) -> str:
    before = _percent(advice.error_before) if advice.error_before is not None else "cannot be stored"
    return terminal(
        f"{_names(advice.layers)}: {before} -> {_percent(advice.error_after) if advice.scheme else 'as it is'}, "
        f"{_size_change(advice.bytes)}: {advice.option}"
    )


def _size_change(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else '+'} {gigabytes(abs(nbytes))}"
