"""What an evaluation found, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .card import SIDES, difference_text, gigabytes
from .escape import join_lines, terminal

# Prompts whose answers are shown, and letters of each.
SHOWN, LETTERS = 2, 300


def evaluation_text(found: Mapping[str, Any], notes: Sequence[str]) -> str:
    """A table of all outputs, and of each what its verdict rests on.

    Args:
        found: as Evaluation.to_json has it.
        notes: what the user should know.
    """
    floor, outputs = found["floor"], found["outputs"]
    source = f"{terminal(found['source']['name'])} (source)"
    rows = [("", "size", "KL in nats", "95 %", "99th", "same token", "perplexity", "verdict")]
    rows.append((source, gigabytes(outputs[0]["sizes"]["source"]), "", "", "", "", _number(_before(outputs)), ""))
    rows.append(("  with noise: the floor", "", *_kl(floor), _percent(floor["top1"]), _number(floor["perplexity"]), ""))
    for output in outputs:
        kl = {"kl": output["kl"]["mean"], **output["kl"]}
        perplexity = _number(output["perplexity"]["output"])
        name, size = terminal(output["output"]["name"]), gigabytes(output["sizes"]["output"])
        rows.append((name, size, *_kl(kl), _percent(output["top1"]), perplexity, output["verdict"]))
        alone = output["weights_only"]
        if alone["kl"] != output["kl"]["mean"]:
            cells = _percent(alone["top1"]), _number(alone["perplexity"])
            rows.append(("  its weights alone", "", *_kl(alone), *cells, ""))
    lines = _table(rows)
    for output in outputs:
        lines += ["", f"{terminal(output['output']['name'])}: {output['verdict']}"]
        lines += [f"  {terminal(reason)}" for reason in output["reasons"]]
        if output["verdict"] == "same":
            lines.append("  so near the floor the KL does not rank outputs by what benchmarks find of them")
        lines += [f"  {line}" for line in _where(output)]
        for text in output["texts"][:SHOWN]:
            lines += ["", *_answers(text)]
    text = outputs[0]["text"]
    lines += ["", f"{text['positions']:,} positions of {text['documents']} texts, SHA-256 {text['sha256'][:16]}"]
    lines += [f"note: {terminal(note)}" for note in notes]
    return join_lines(lines)


def _before(outputs: Sequence[Mapping[str, Any]]) -> float:
    return float(outputs[0]["perplexity"]["source"])


def _where(output: Mapping[str, Any]) -> list[str]:
    """Where a difference comes from, in a line or two."""
    layers = output["layers"]
    if not layers:
        return []
    first, last = layers[0], layers[-1]
    lines = [
        f"hidden states are {first['distance']:.3g} off after {terminal(first['layer'])}, {last['distance']:.3g} after "
        f"{terminal(last['layer'])} (floor {last['floor']:.3g})"
    ]
    routed = [layer["routed_otherwise"] for layer in layers if "routed_otherwise" in layer]
    if routed:
        lines.append(f"of its tokens {_percent(min(routed))} to {_percent(max(routed))} go to other experts, by layer")
    return lines


def _answers(text: Mapping[str, Any]) -> list[str]:
    """A prompt and both answers, a line each."""
    rows = [(name, terminal(str(text[name])[:LETTERS])) for name in SIDES if name in text]
    return [*(f"  {name:<7} {shown}" for name, shown in rows), f"  {difference_text(text)}"]


def _kl(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    interval = figures["interval"]
    between = f"[{', '.join(f'{edge:.3g}' for edge in interval)}]" if interval else ""
    return f"{figures['kl']:.3g}", between, f"{figures['p99']:.3g}"


def _number(value: float) -> str:
    return f"{value:.5g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    made = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        made.append("  ".join(cells).rstrip())
    return made
