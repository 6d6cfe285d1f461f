"""What the words and figures on a page mean: a line for each term that is no household word, and the figures of tasks.

The page lists those terms that occur on it. `tests/report/test_words.py` checks that headings have a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..evaluation.types import counted_questions
from ..formats.schemes import SCHEMES
from .cells import NOTHING, list_first, markdown, optional, terminal

_SEVERAL = {
    "frontier": (
        "The outputs that no other one given beats. One output beats another if it is smaller or closer to the "
        "source, and neither larger nor farther."
    )
}
_DIVERGENCE = {
    "KL, mean KL": (
        "Kullback-Leibler divergence: how far the output's probabilities of all possible next tokens are from the "
        "source's. It is 0 where they are equal. The mean is over all positions."
    ),
    "nats": "The unit of KL, which is computed with natural logarithms. 1 nat is 1.44 bits.",
}
_EVALUATED = {
    "position": "A place in a text at which both models predict the next token. All figures are of the same positions.",
    **_DIVERGENCE,
    "floor": (
        "The same figures of the source itself, with noise as large as rounding to bfloat16 in each layer. Two "
        "programs that run the same weights differ by about as much, so a difference below the floor means nothing."
    ),
    "95 % interval": (
        "Other texts of the same kind would give another mean. It lies in this interval with a probability of about "
        "95 %; found by drawing anew from the texts. If the intervals of two outputs overlap much, more texts are "
        "needed to tell which is closer."
    ),
    "verdict": (
        "What the mean KL and the floor say, in a word: same, close, similar, changed or broken. Beside it stands how "
        "many tokens differ: positions at which the two models find other tokens the most probable."
    ),
    "same top token": "The share of positions at which both models find the same token the most probable.",
    "source's top token among the output's five": (
        "The share of positions at which the token that the source finds the most probable is one of the five that "
        "the output finds the most probable."
    ),
    "perplexity": (
        "How surprised a model is by the texts: e to the power of the mean of -ln p, where p is its probability of the "
        "token that follows. Lower is better. The ratio is the output's to the source's."
    ),
    "weights alone": (
        "The output with its weights decoded and activations not rounded. What it loses beyond that is lost by "
        "activations and the KV cache."
    ),
    "RMS change of the next token's probability": (
        "Square root of the mean over positions of the squared change of the probability of the token that follows."
    ),
    "median, 90 %, 99 %, 99.9 %": "Half of the positions, or so many of a hundred, have at most this KL.",
    "source's largest probability": "How sure the source is: the probability of the token that it finds the likeliest.",
    "domain": "The file or the part of a dataset that a text comes from.",
    "relative distance": (
        "The length of the difference of both models' hidden states (the vectors that a layer passes on), by the "
        "length of the source's; the mean over tokens. Times the floor: by the same distance of the floor."
    ),
}
_TASKS = {
    "source right, output right": (
        "The share of a task's questions that the model answers rightly. Its answer is the choice that it finds the "
        "most probable: by the whole choice (acc), or by each of its characters (acc_norm)."
    ),
    "recovery": (
        "The output's share of right answers by the source's. It may be above 100 % by chance. If the source guesses, "
        "it means nothing."
    ),
    "difference": (
        "The output's share of right answers less the source's, in percentage points. Its interval, and that of "
        "recovery, is found by drawing anew from the questions. If it includes 0 there may be no difference, or one "
        "too small to show at this number of questions."
    ),
    "flips: right to wrong, wrong to right": (
        "The number of questions that only the source answers rightly, and that only the output does. Many of both "
        "leave the share of right answers as it is, although the output behaves otherwise."
    ),
    "McNemar's p": (
        "McNemar's test: the probability that the flips are so unequally divided, if both directions are equally "
        "likely. Below 0.05 the difference is more than chance."
    ),
    "answered otherwise": (
        "The share of questions to which both give other answers. It moves before the share of right answers does, "
        "since a wrong answer may become another wrong one."
    ),
    "KL at answers": "The mean KL at the tokens of the choices.",
}
_SEARCHED = {
    **_SEVERAL,
    **_DIVERGENCE,
    "bits a weight": "Of the weights that may be quantized, with their scales, on average.",
    "predicted KL": (
        "The sum of what each group of layers loses alone, measured on a few other texts. It ranks mixtures, and is "
        "usually too large."
    ),
}
_SUSPECTS = {"suspects": "Layers, modules or files that differ by more than their formats explain, or than others do."}
_ROUTED = {
    "routed otherwise": "The share of tokens that the layer's router sends to another expert than the source's does."
}
_SERVED = {
    "KV cache": "What an engine keeps of each token that it has read: keys and values of its layers.",
    "a sequence": "Memory that each sequence takes at once, whatever its length.",
    "GPU": "The fewest GPUs of that memory that hold the weights; below it, how many tokens of all sequences then fit.",
}


def words_on_page(
    evaluations: Sequence[Mapping[str, Any]], served: Mapping[str, Any] | None, frontier: Mapping[str, Any] | None
) -> dict[str, str]:
    """Choose the terms that a page needs.

    Args:
        evaluations: evaluations on the page, each the content of an eval.json.
        served: GPUs and memory to serve the model, if they are on the page.
        frontier: what `fit --search --json` prints, if it is on the page.

    Returns:
        The meaning of each term, in the order in which they are listed.
    """
    points = (frontier or {}).get("points", ())
    shown = [
        (_SEVERAL, len(evaluations) > 1),
        (_SEARCHED, frontier),
        (_EVALUATED, evaluations),
        (_TASKS, any("tasks" in one for one in evaluations)),
        (_SUSPECTS, any(one["suspects"] for one in evaluations)),
        (_ROUTED, any("routed_otherwise" in layer for one in evaluations for layer in one["layers"])),
        (_scheme_words(name for point in points for name in point["shares"]), True),
        (_SERVED, served),
    ]
    return {term: meaning for words, is_shown in shown if is_shown for term, meaning in words.items()}


def _scheme_words(names: Iterable[str | None]) -> dict[str, str]:
    """Describe schemes: {"channel": "float8_e4m3fn, one scale per output row"}."""
    schemes = [SCHEMES[name] for name in dict.fromkeys(names) if name in SCHEMES]
    return {scheme.name: f"{scheme.format.number.name}, {scheme.title}." for scheme in schemes}


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
