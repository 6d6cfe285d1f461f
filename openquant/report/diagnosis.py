"""The result of diagnose, as text for a terminal."""

from __future__ import annotations

from ..diagnosis.measured import MODEL, activations, measured_kl
from ..diagnosis.result import Diagnosis
from ..formats.schemes import SCHEMES
from ..patterns import collapse
from ..result import zero_notes
from .cells import gigabytes, paragraphs, table
from .escape import join_lines, terminal
from .text import not_finite_notes

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
    layers = diagnosis.layers if every else diagnosis.worst[:WORST]
    name = f"{diagnosis.model}@{diagnosis.revision}" if diagnosis.revision else diagnosis.model
    rows = (
        "all their rows"
        if diagnosis.rows_read == 1
        else f"{100 * diagnosis.rows_read:.2g} % of their rows, spread evenly; scales from all"
    )
    shown = "row error of weights" if every else f"row error of weights, {len(layers)} largest"
    # All schemes would make a line of two hundred letters.
    schemes = [name for name in SCHEMES if name == diagnosis.scheme or measured_kl(SCHEMES[name]) is not None]
    errors = [(terminal(layer.module), *(_percent(layer.row_errors[scheme]) for scheme in schemes)) for layer in layers]
    normal = ("normally distributed weights", *(_percent(diagnosis.normal[scheme]) for scheme in schemes))
    heading = [
        f"{name}: {diagnosis.architecture}, --scheme {diagnosis.scheme}",
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


def _percent(share: float | None) -> str:
    """Format a share: "2.64 %"; "-" for None, an error in a scheme that cannot store the layer."""
    return "-" if share is None else f"{100 * share:.3g} %"


def _conspicuous(diagnosis: Diagnosis) -> list[str]:
    layers = diagnosis.conspicuous
    if not layers:
        return ["no layer loses more than twice what normally distributed weights do"]
    names = collapse([layer.module for layer in layers])
    more = f" and {len(names) - WORST} more" if len(names) > WORST else ""
    remedy = f"; none does with --scheme {' or '.join(diagnosis.remedies)}" if diagnosis.remedies else ""
    return [
        terminal(
            f"{len(layers)} of {len(diagnosis.layers)} layers lose more than twice what normally distributed weights "
            f"do, or cannot be stored: {', '.join(names[:WORST])}{more}{remedy}"
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
    requested, size = SCHEMES[diagnosis.scheme], gigabytes(diagnosis.bytes)
    first = (f"--scheme {requested.name}", f"{diagnosis.kl:.3g}", "", size, activations(requested), "no")
    return [
        "",
        *paragraphs([f"what lost less on {MODEL} at about the same size, and the size of this model:"], width),
        "",
        *table([("openquant compress", "KL, nats", "", "size", "activations", "texts run"), first, *rows], width=width),
    ]
