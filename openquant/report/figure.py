"""Pictures of evaluations: the picture for a model card, and the recovery of tasks.

Recovery is the output's accuracy as a share of the source's. Each row has the mean as a diamond with its 95 % interval,
and a small circle for each task. The line at 100 % is the source.

    figure = Figure((8.0, 2.4), layout="constrained")
    draw_recovery(figure.add_subplot(), recovery_rows(evaluations))
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..evaluation.types import kl_text
from ..files.evaluation import evaluation_digest
from ..version import __version__
from .cells import gigabytes, per_cent
from .charts import (
    OUTPUT,
    STYLE,
    by_kl,
    chart_name,
    draw_comparison,
    draw_distribution,
    draw_svg,
    names_in_picture,
    quiet_fonts,
)
from .words import recovery_text, texts_origin

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Colour of what is not a figure, size of the small print, and characters of the names of texts.
_FAINT = "#444444"
_SMALL = 8.5
_LONGEST_ORIGIN = 60


def draw_picture(evaluations: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw evaluations as a PNG, 1600 pixels wide and legible at 800.

    Args:
        evaluations: for each output the checked content of its eval.json. Of one output the picture shows the KL of
            its positions and a table of figures; of several it shows size against KL, and recovery if they were asked
            tasks.

    Returns:
        The bytes of the PNG. Its metadata name the evaluations by their digests (`evaluation_digest`).
    """
    with matplotlib.rc_context({**STYLE, "font.size": 10.5}):
        rows = recovery_rows(by_kl(evaluations)) if len(evaluations) > 1 else []
        heights = [4.2, recovery_height(rows)] if rows else [4.2]

        figure = Figure((8.0, sum(heights)), layout="constrained", facecolor="white")
        target = io.BytesIO()
        metadata: dict[str, Any] = {
            "Software": f"openquant {__version__}",
            "Description": " ".join(evaluation_digest(evaluation) for evaluation in evaluations),
        }

        with quiet_fonts():
            if len(evaluations) == 1:
                _draw_one(figure, evaluations[0])
            else:
                name = chart_name(evaluations[0]["source"]["name"], 60)
                _set_title(figure, f"{len(evaluations)} outputs of {name}")
                _set_caption(figure, evaluations[0], "bars are 95 % intervals; ")
                axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
                if rows:
                    draw_recovery(axes[1], rows)
                # Last, since it fixes the layout.
                draw_comparison(axes[0], evaluations)
            figure.savefig(target, format="png", dpi=200, metadata=metadata)

    return target.getvalue()


def _draw_one(figure: Figure, evaluation: Mapping[str, Any]) -> None:
    kl = evaluation["kl"]
    sizes = evaluation["sizes"]
    perplexity = evaluation["perplexity"]

    _set_title(figure, f"{chart_name(evaluation['output']['name'], 60)}: {chart_name(evaluation['verdict'])}")
    _set_caption(figure, evaluation, f"compared with {chart_name(evaluation['source']['name'], 60)}\n")

    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1.0))
    draw_distribution(left, evaluation["kl_histogram"])
    right.set_axis_off()

    interval = kl["interval"]
    floor = evaluation["floor"]
    share = per_cent(sizes["output"], sizes["source"])

    # Name, value, and what stands below them.
    rows = [
        ("size", gigabytes(sizes["output"]), f"{share} of the source's {gigabytes(sizes['source'])}"),
        (
            "mean KL",
            f"{kl_text(kl['mean'], floor['kl'])} nats",
            f"95 % interval: {interval[0]:.3g} to {interval[1]:.3g}"
            if interval
            else "of one text, so without interval",
        ),
        ("floor", f"{floor['kl']:.3g} nats", "the source with bfloat16's noise"),
        ("same top token", f"{100 * evaluation['top1']:.2f} %", f"floor: {100 * floor['top1']:.2f} %"),
        ("perplexity", f"{perplexity['output']:.4g}", f"source: {perplexity['source']:.4g}"),
    ]

    if "tasks" in evaluation:
        rows.append(("recovery in tasks", recovery_text(evaluation["tasks"]["mean"][0]), "of the source's accuracy"))

    for number, (name, value, below) in enumerate(rows):
        height = 0.95 - 0.95 * number / (len(rows) - 0.4)
        right.text(0.0, height, name, color=_FAINT)
        right.text(1.0, height, value, ha="right", fontweight="bold")
        right.text(1.0, height - 0.055, below, ha="right", color=_FAINT, fontsize=_SMALL)


def _set_caption(figure: Figure, evaluation: Mapping[str, Any], start: str) -> None:
    """Write below a figure which texts the outputs were compared on."""
    text = evaluation["text"]
    origin = chart_name(texts_origin(text), _LONGEST_ORIGIN)
    texts = f"{text['positions']:,} tokens of {text['documents']:,} texts{f' ({origin})' if origin else ''}"
    figure.supxlabel(f"{start}measured on {texts}", fontsize=_SMALL, color=_FAINT)


def _set_title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=15, fontweight="bold")


# Marks beyond these limits lie at the edge: of a source with one right answer a recovery may be 500 %.
LEAST = 0.0
MOST = 2.0
# Tasks that a picture shows in rows of their own.
MOST_TASKS = 40
# Width in inches on a screen, on a phone, and beside other charts; height of a row, and of all else.
_ON_SCREEN = 10.5
_ON_PHONE = 4.4
_IN_DETAILS = 4.4
_ROW = 0.42
_REST = 1.15
# Where the mean lies in a row, and the first and the last task, from the row's middle downward.
_MEAN = -0.18
_FIRST = 0.06
_LAST = 0.36


@dataclass(frozen=True)
class RecoveryRow:
    """A row of the picture. Recoveries are fractions of 1, and None if the source has no right answer.

    Attributes:
        name: name of the output, or of the task.
        recovery: of the mean over tasks, or of the task.
        interval: its 95 % interval.
        tasks: the recovery of each task.
    """

    name: str
    recovery: float | None
    interval: Sequence[float] | None
    tasks: Sequence[float | None] = ()


def recovery_rows(evaluations: Sequence[Mapping[str, Any]]) -> list[RecoveryRow]:
    """Make a row for each output that was asked tasks.

    Args:
        evaluations: for each output the content of its eval.json.
    """
    names, _ = names_in_picture([evaluation["output"]["name"] for evaluation in evaluations])
    rows = []
    for name, evaluation in zip(names, evaluations, strict=True):
        if "tasks" in evaluation:
            tasks = evaluation["tasks"]
            mean = tasks["mean"][0]
            of_tasks = [figures["metrics"][0]["recovery"] for figures in tasks["tasks"]]
            dots = of_tasks if len(of_tasks) > 1 else ()
            rows.append(RecoveryRow(name, mean["recovery"], mean["recovery_interval"], dots))
    return rows


def draw_recovery(axes: Axes, rows: Sequence[RecoveryRow]) -> None:
    """Draw recoveries into axes, the first row at the top.

    Args:
        axes: matplotlib's axes.
        rows: the rows.
    """
    drawn = [1.0]
    beyond = False

    def at(recovery: float) -> float:
        nonlocal beyond
        limited = min(max(recovery, LEAST), MOST)
        beyond = beyond or limited != recovery
        drawn.append(limited)
        return 100 * limited

    color: Any = matplotlib.rcParams["text.color"]
    handles: dict[str, Any] = {}
    for number, row in enumerate(rows):
        step = (_LAST - _FIRST) / max(1, len(row.tasks) - 1)
        dots = [(at(one), number + _FIRST + step * place) for place, one in enumerate(row.tasks) if one is not None]
        if dots:
            [handles["a task"]] = axes.plot(
                *zip(*dots, strict=True), "o", markersize=4, color=OUTPUT, markerfacecolor="none"
            )
        height = number + (_MEAN if row.tasks else 0)
        if row.interval:
            axes.plot([at(edge) for edge in row.interval], [height] * 2, color=OUTPUT, linewidth=2.5, alpha=0.5)
        if row.recovery is not None:
            [mark] = axes.plot(at(row.recovery), height, "D", markersize=7, color=OUTPUT)
            if row.tasks:
                handles["mean of the tasks, 95 % interval"] = mark
    axes.axvline(100, color=color, linestyle="--", linewidth=1)
    margin = 5 * (max(drawn) - min(drawn)) or 5.0
    axes.set_xlim(100 * min(drawn) - margin, 100 * max(drawn) + margin)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.set_xlabel("recovery, % of the source's accuracy" + ("\n(beyond 200: at the edge)" if beyond else ""))
    if handles:
        axes.legend(
            handles.values(), handles, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, ncols=2
        )


def recovery_of_outputs(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Draw the recovery of several outputs.

    Args:
        evaluations: for each output the content of its eval.json, in the order of the rows.

    Returns:
        Two SVG elements with the same content, for a screen and for a phone.
    """
    rows = recovery_rows(evaluations)
    return _svg(rows, _ON_SCREEN, -3), _svg(rows, _ON_PHONE, -4)


def recovery_of_tasks(evaluation: Mapping[str, Any], number: int = 0) -> str:
    """Draw the recovery of one output in each task, and the mean of all.

    Args:
        evaluation: the content of an eval.json, with tasks.
        number: number of the evaluation on its page.

    Returns:
        An SVG element, "<svg ..>..</svg>".
    """
    tasks = evaluation["tasks"]
    named = [(chart_name(figures["task"]), figures["metrics"][0]) for figures in tasks["tasks"]]
    if len(named) > 1:
        named = [("mean of tasks", tasks["mean"][0]), *named[:MOST_TASKS]]
    rows = [RecoveryRow(name, metric["recovery"], metric["recovery_interval"]) for name, metric in named]
    return _svg(rows, _IN_DETAILS, number)


def _svg(rows: Sequence[RecoveryRow], width: float, number: int) -> str:
    return draw_svg(lambda axes: draw_recovery(axes, rows), (width, recovery_height(rows)), number)


def recovery_height(rows: Sequence[RecoveryRow]) -> float:
    """Return the height in inches that a picture of these rows needs."""
    return _REST + _ROW * max(1, len(rows)) * (1.4 if any(row.tasks for row in rows) else 1.0)
