"""The figures of tasks, as text for a terminal and as rows of a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.types import counted_questions
from .escape import markdown, terminal


def task_rows(tasks: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Make a table of an output's figures on tasks.

    Args:
        tasks: `tasks` of its eval.json.

    Returns:
        The rows, with the same number of cells: a title, then each metric of each task, and those of all tasks.
    """
    rows: list[tuple[str, ...]] = [
        ("", "questions", "source", "output", "difference", "95 %", "p", "recovery", "lost", "gained", "other", "KL")
    ]
    several = len(tasks["tasks"]) > 1
    for figures in [*tasks["tasks"], *([tasks["pooled"]] if several else [])]:
        for number, metric in enumerate(figures["metrics"]):
            first = number == 0
            rows.append(
                (
                    f"{terminal(figures['task'])}, {terminal(metric['metric'])}",
                    f"{figures['questions']:,}" if first else "",
                    _percent(metric["source"]),
                    _percent(metric["output"]),
                    *_difference(metric),
                    f"{metric['p']:.2g}",
                    recovery_text(metric),
                    str(metric["lost"]),
                    str(metric["gained"]),
                    _percent(figures["answered_otherwise"]) if first else "",
                    f"{figures['kl']:.3g}" if first else "",
                )
            )
    for mean in tasks["mean"] if several else ():
        name = f"mean of {mean['tasks']} tasks, {terminal(mean['metric'])}"
        scores = _percent(mean["source"]), _percent(mean["output"])
        rows.append((name, "", *scores, *_difference(mean), "", recovery_text(mean), "", "", "", ""))
    return rows


def recovery_text(metric: Mapping[str, Any]) -> str:
    """Format the recovery of a metric: "98.7 %", or "-" if the source has no right answer."""
    return "-" if metric["recovery"] is None else f"{100 * metric['recovery']:.1f} %"


def task_summary(tasks: Mapping[str, Any]) -> str:
    """Summarize an output's figures on tasks in a line of Markdown: accuracy of both, recovery, and the questions.

    Args:
        tasks: `tasks` of its eval.json.
    """
    mean, pooled = tasks["mean"][0], tasks["pooled"]
    interval = mean["recovery_interval"]
    between = "" if interval is None else f" [{', '.join(f'{100 * edge:.1f}' for edge in interval)}]"
    names = [markdown(figures["task"]) for figures in tasks["tasks"]]
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more tasks" if len(names) > _NAMED else "")
    return (
        f"{_percent(mean['source'])} -> {_percent(mean['output'])}, recovery {recovery_text(mean)}{between}, "
        f"{counted_questions(pooled['questions'])} of {shown} ({markdown(mean['metric'])})"
    )


# Tasks that a summary names.
_NAMED = 6


def _difference(metric: Mapping[str, Any]) -> Sequence[str]:
    """Return difference and interval in points: ("-0.5", "[-2.6, +1.5]")."""
    edges = ", ".join(f"{100 * edge:+.1f}" for edge in metric["difference_interval"])
    return f"{100 * metric['difference']:+.1f}", f"[{edges}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
