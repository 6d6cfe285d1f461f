"""What figures of an evaluation are in words: verdicts, tasks, and where the texts come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.types import counted_questions
from .cells import NOTHING, list_first, markdown, optional, terminal


def verdict_meaning(evaluation: Mapping[str, Any]) -> str:
    """Return what an output's verdict stands for: "one token in 31 differs".

    Args:
        evaluation: the content of an eval.json.

    Returns:
        How many tokens differ, and, if it answered questions, whether its accuracy differs by more than chance.
    """
    differing = 1 - evaluation["top1"]
    if differing == 0:
        meaning = "no token differs"
    elif differing < 2 / 3:
        meaning = f"one token in {round(1 / differing):,} differs"
    else:
        meaning = f"{100 * differing:.0f} % of tokens differ"
    if "tasks" in evaluation:
        pooled = evaluation["tasks"]["pooled"]
        metric = pooled["metrics"][0]
        low, high = metric["difference_interval"]
        change = f"{100 * metric['difference']:+.1f} points"
        if low <= 0 <= high:
            change = "no change beyond chance"
        meaning += f"; {change} in accuracy on {counted_questions(pooled['questions'])}"
    return meaning


def texts_origin(text: Mapping[str, Any]) -> str:
    """Say where texts come from, without directories: "prose.txt, code.jsonl"; "" if that is not known.

    Args:
        text: `text` of an eval.json, or `texts` of a calibration.
    """
    names = [name.rpartition("/")[2] for name in text.get("files", ())]
    dataset = text.get("dataset") or ""
    builtin = text.get("builtin")
    # "org/name:split" is on the Hub.
    if dataset and not re.match(r"[^/.][^/]*(/[^/]*)?$", dataset):
        dataset = dataset.rpartition("/")[2]
    if dataset:
        names.append(dataset)
    if builtin and not names:
        names.append(f"standard library of {builtin}")
    return ", ".join(names)


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

    shown = tasks["tasks"]
    means = []
    if len(shown) > 1:
        shown = [*shown, tasks["pooled"]]
        means = tasks["mean"]

    for figures in shown:
        # What is the same for all metrics stands beside the first.
        questions = f"{figures['questions']:,}"
        of_task = (share_text(figures["answered_otherwise"]), f"{figures['kl']:.3g}")
        for metric in figures["metrics"]:
            rows.append(
                (
                    f"{terminal(figures['task'])}, {terminal(metric['metric'])}",
                    questions,
                    share_text(metric["source"]),
                    share_text(metric["output"]),
                    *_difference(metric),
                    f"{metric['p']:.2g}",
                    recovery_text(metric),
                    str(metric["lost"]),
                    str(metric["gained"]),
                    *of_task,
                )
            )
            questions = ""
            of_task = ("", "")

    for mean in means:
        name = f"mean of {mean['tasks']} tasks, {terminal(mean['metric'])}"
        scores = share_text(mean["source"]), share_text(mean["output"])
        rows.append((name, "", *scores, *_difference(mean), "", recovery_text(mean), "", "", "", ""))

    return rows


def recovery_text(metric: Mapping[str, Any]) -> str:
    """Format the recovery of a metric: "98.7 %", or "-" if the source has no right answer."""
    return share_text(metric["recovery"])


def share_text(share: float | None) -> str:
    """Format a share: "98.7 %"; "-" if it is not known."""
    if share is None:
        return NOTHING
    return f"{100 * share:.1f} %"


def task_summary(tasks: Mapping[str, Any]) -> str:
    """Summarize an output's figures on tasks in a line of Markdown: accuracy of both, recovery, and the questions.

    Args:
        tasks: `tasks` of its eval.json.
    """
    mean = tasks["mean"][0]
    pooled = tasks["pooled"]
    interval = ", ".join(f"{100 * edge:.1f}" for edge in mean["recovery_interval"] or ())
    names = [markdown(figures["task"]) for figures in tasks["tasks"]]
    recovery = f"recovery {recovery_text(mean)}{optional(' [{}]', interval)}"
    asked = f"{counted_questions(pooled['questions'])} of {list_first(names, _NAMED, 'more tasks')}"
    accuracy = f"{share_text(mean['source'])} -> {share_text(mean['output'])}"
    return f"{accuracy}, {recovery}, {asked} ({markdown(mean['metric'])})"


# Tasks that a summary names.
_NAMED = 6


def _difference(metric: Mapping[str, Any]) -> Sequence[str]:
    """Return difference and interval in points: ("-0.5", "[-2.6, +1.5]")."""
    edges = ", ".join(f"{100 * edge:+.1f}" for edge in metric["difference_interval"])
    return f"{100 * metric['difference']:+.1f}", f"[{edges}]"
