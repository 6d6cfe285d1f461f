"""Sections of a page: a plan, the table of schemes that fit a GPU, and errors, as HTML without scripts.

All names and texts of a model are escaped here. Neither torch nor gradio is imported, so a browser can run it too.

    plan_html(make_plan(checkpoint, SCHEMES["int4"]), "Qwen/Qwen3-8B")
    fit_html(fit_table("Qwen/Qwen3-8B", "4090"))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from ..errors import OpenQuantError
from ..fit.table import FitTable
from ..formats.hardware import SCHEME_NAMES
from ..patterns import collapse
from ..plan import summary
from ..plan.engines import sglang_refusal
from ..plan.layout import PlanLine
from ..plan.plan import Plan
from ..report.cells import gigabytes, optional, per_cent, shorten, terminal
from ..report.fit import fit_advice, fit_caption, fit_notes, fit_rows

# Characters of the names and of the reason in a row of the weights.
MOST_LETTERS = 200


def style() -> str:
    """Return the style sheet of the sections. It goes by the colours of the page around them, light or dark."""
    return resources.files(__package__).joinpath("view.css").read_text(encoding="utf-8")


def text_html(text: str) -> str:
    """Escape a text of others for HTML, with characters that move or hide other text written out.

    Args:
        text: any text; newlines and tabs stay.
    """
    return escape(terminal(text, kept="\n\t"))


def problem_html(problem: OpenQuantError) -> str:
    """Show an error as the command line does: what is wrong, and what to do next.

    Args:
        problem: the error, with its hint.

    Returns:
        A `div` that screen readers announce.
    """
    # The page has few of the options.
    label = "hint, on the command line" if " --" in f" {problem.hint}" else "hint"
    return (
        f'<div class="oq oq-problem" role="alert"><p><strong>error:</strong> {text_html(problem.message)}</p>'
        f"<p><strong>{label}:</strong> {text_html(problem.hint)}</p></div>"
    )


def command_html(command: str) -> str:
    """Show a command to type.

    Args:
        command: the words of a shell's line.
    """
    return f'<pre class="oq-command"><code>{text_html(command)}</code></pre>'


def plan_html(plan: Plan, model: str) -> str:
    """Show a plan: architecture, sizes, engines and what becomes of the weights.

    Args:
        plan: the plan.
        model: the source as the user named it.

    Returns:
        A `section` with headings of the third level.
    """
    before = summary.source_bytes(plan)
    after = summary.output_bytes(plan)
    sizes = ", ".join(map(str, summary.parallel_sizes(plan))) or "none"

    facts = [
        ("Model", model),
        ("Architecture", plan.model.name),
        ("Size", f"{gigabytes(before)} before, {gigabytes(after)} after ({per_cent(after, before)})"),
        ("Quantized", _say_quantized(plan)),
    ]
    if plan.quantization_config:
        facts += [("Engines that load it", _engines(plan)), ("GPUs that can share it", sizes)]

    rows = "".join(f"<div><dt>{name}</dt><dd>{text_html(value)}</dd></div>" for name, value in facts)
    html = f'<section class="oq"><h3>Plan</h3><dl>{rows}</dl>{_notes(plan.notes)}'

    return f"{html}<details><summary>What becomes of the weights</summary>{_weights_table(plan)}</details></section>"


def fit_html(found: FitTable, chosen: str = "") -> str:
    """Show the table of schemes for a GPU, with the command for the best. A row's scheme is a button with its name.

    Args:
        found: the result of fit_table().
        chosen: the scheme whose button is pressed.

    Returns:
        A `section` with headings of the third level.
    """
    heads, *rows = fit_rows(found)
    parts = [
        '<section class="oq"><h3>Schemes</h3>',
        _table(fit_caption(found), ["scheme", *heads[1:]], rows, numbers=range(1, len(heads)), pressed=chosen),
        _advice(found),
        f"<details><summary>Notes on the table</summary>{_notes(fit_notes(found))}</details></section>",
    ]
    return "".join(parts)


def _advice(found: FitTable) -> str:
    """Say what to type: a paragraph for each sentence, and a fold for each command."""
    parts = []
    for about, command in fit_advice(found):
        said = text_html(about[0].upper() + about[1:])
        if command:
            parts.append(f"<details><summary>{said}</summary>{command_html(command)}</details>")
        else:
            parts.append(f"<p>{said}</p>")
    return "".join(parts)


def _say_quantized(plan: Plan) -> str:
    count = summary.quantized_tensors(plan)
    share = per_cent(summary.quantized_bytes(plan), summary.source_bytes(plan))
    if not count:
        return summary.description(plan)
    return f"{count} layers, {share} of the bytes: {summary.description(plan)}"


def _engines(plan: Plan) -> str:
    refusal = sglang_refusal(plan.entry, plan.decisions)
    names = " and ".join(summary.engines(plan))
    if refusal is None:
        return names
    return f"{names}; SGLang does not: {refusal.why}"


def _weights_table(plan: Plan) -> str:
    rows = [
        [
            shorten(", ".join(collapse(line.names)), MOST_LETTERS),
            gigabytes(line.bytes_before),
            gigabytes(line.bytes_after),
            _stored_in(line),
            " x ".join(map(str, line.shape)),
            shorten(line.why, MOST_LETTERS),
        ]
        for line in plan.lines
    ]

    heads = ["layers", "before", "after", "stored in", "shape", "why"]
    return _table("Layers that are alike share a row", heads, rows, numbers=(1, 2))


def _stored_in(line: PlanLine) -> str:
    if line.scheme:
        return line.scheme.name
    if line.decoded:
        return "bfloat16"
    return "as it is"


def _table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Sequence[int],
    pressed: str | None = None,
) -> str:
    """A table whose first column names the rows, by buttons if one may be pressed. A narrow screen scrolls it."""

    def kind(column: int) -> str:
        return ' class="oq-number"' if column in numbers else ""

    head = "".join(f'<th scope="col"{kind(column)}>{text_html(name)}</th>' for column, name in enumerate(heads))
    body = "".join(
        f'<tr><th scope="row">{_row_title(cells[0], pressed)}</th>'
        + "".join(f"<td{kind(column)}>{text_html(cell)}</td>" for column, cell in enumerate(cells[1:], 1))
        + "</tr>"
        for cells in rows
    )
    return (
        f'<div class="oq-table" tabindex="0"><table><caption>{text_html(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row_title(name: str, pressed: str | None) -> str:
    """The name of a row: a button for a scheme, if one may be pressed."""
    if pressed is None or name not in SCHEME_NAMES:
        return text_html(name)
    return f'<button type="button" value="{name}" aria-pressed="{str(name == pressed).lower()}">{name}</button>'


def _notes(notes: Iterable[str]) -> str:
    return optional("<ul>{}</ul>", "".join(f"<li>{text_html(note)}</li>" for note in notes))
