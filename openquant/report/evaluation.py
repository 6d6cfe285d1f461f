"""The result of eval, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.types import kl_text
from .card import SIDES, answers, difference_text, percent
from .cells import gigabytes, paragraphs, table
from .escape import join_lines, terminal
from .tasks import task_rows
from .words import verdict_meaning

# Number of prompts whose answers are shown, and characters of each answer.
SHOWN_PROMPTS, SHOWN_CHARACTERS = 2, 300


def evaluation_text(evaluation: Mapping[str, Any], notes: Sequence[str], width: int | None = None) -> str:
    """Format an evaluation for a terminal: a table of all outputs, then the verdict on each with reasons and answers.

    Args:
        evaluation: what `eval --json` prints: `source`, `floor`, and `outputs`, the eval.json of one output or
            more.
        notes: remarks for the user.
        width: the most characters of a line; None for any number.

    Returns:
        The text, lines separated by newlines.
    """
    floor, outputs = evaluation["floor"], evaluation["outputs"]
    source = f"{terminal(evaluation['source']['name'])} (source)"
    rows = [("", "size", "KL in nats", "95 %", "99th", "same token", "perplexity", "verdict")]
    size, perplexity = gigabytes(outputs[0]["sizes"]["source"]), _number(outputs[0]["perplexity"]["source"])
    rows.append((source, size, "", "", "", "", perplexity, ""))
    rows.append(
        ("  with noise: the floor", "", *_kl(floor, floor), percent(floor["top1"]), _number(floor["perplexity"]), "")
    )
    for output in outputs:
        kl = {"kl": output["kl"]["mean"], **output["kl"]}
        perplexity = _number(output["perplexity"]["output"])
        name, size = terminal(output["output"]["name"]), gigabytes(output["sizes"]["output"])
        rows.append((name, size, *_kl(kl, floor), percent(output["top1"]), perplexity, output["verdict"]))
        weights_only = output["weights_only"]
        if weights_only["kl"] != output["kl"]["mean"]:
            cells = percent(weights_only["top1"]), _number(weights_only["perplexity"])
            rows.append(("  its weights alone", "", *_kl(weights_only, floor), *cells, ""))
    lines = table(rows, width=width)
    for output in outputs:
        said = ["", f"{output['output']['name']}: {output['verdict']}: {verdict_meaning(output)}"]
        said += [f"  {reason}" for reason in output["reasons"]]
        if output["verdict"] == "same":
            said.append("  so near the floor, KL does not predict which output does better in benchmarks")
        lines += paragraphs([*said, *(f"  {line}" for line in _layer_lines(output))], width)
        if "tasks" in output:
            figures = table(task_rows(output["tasks"]), width=None if width is None else width - 2)
            lines += ["", *(f"  {line}".rstrip() for line in figures)]
            lines += paragraphs([f"  {output['tasks']['reading']}"], width)
        for text in answers(output)[:SHOWN_PROMPTS]:
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
    first, last = layers[0], layers[-1]
    lines = [
        f"relative distance of hidden states: {first['distance']:.3g} after {terminal(first['layer'])}, "
        f"{last['distance']:.3g} after {terminal(last['layer'])} (floor {last['floor']:.3g})"
    ]
    routed = [layer["routed_otherwise"] for layer in layers if "routed_otherwise" in layer]
    if routed:
        lines.append(f"tokens routed to other experts: {percent(min(routed))} to {percent(max(routed))}, by layer")
    return lines


def _answers(text: Mapping[str, Any], width: int | None) -> list[str]:
    """Return a prompt and both answers, and a line that says where they differ."""
    rows = [(f"  {name}", str(text[name])[:SHOWN_CHARACTERS]) for name in SIDES]
    return [*table(rows, left=(0, 1), width=width), *paragraphs([f"  {difference_text(text)}"], width)]


def _kl(figures: Mapping[str, Any], floor: Mapping[str, Any]) -> tuple[str, str, str]:
    interval = figures["interval"]
    interval_text = f"[{', '.join(f'{edge:.3g}' for edge in interval)}]" if interval else ""
    return kl_text(figures["kl"], floor["kl"]), interval_text, f"{figures['p99']:.3g}"


def _number(value: float) -> str:
    return f"{value:.5g}"
