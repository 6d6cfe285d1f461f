"""The picture for a model card, of one evaluation or of several."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..evaluation.types import kl_text
from ..files.evaluation import evaluation_digest
from ..version import __version__
from .cells import gigabytes, per_cent
from .charts import STYLE, chart_name, draw_distribution, quiet_fonts
from .comparison import by_kl, draw_comparison
from .recovery import draw_recovery, recovery_height, recovery_rows
from .tasks import recovery_text
from .words import texts_origin

# Colour of what is not a figure, size of the small print, and characters of the names of texts.
_FAINT, _SMALL, _LONGEST_ORIGIN = "#444444", 8.5, 60


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
    kl, sizes, perplexity = evaluation["kl"], evaluation["sizes"], evaluation["perplexity"]
    _set_title(figure, f"{chart_name(evaluation['output']['name'], 60)}: {chart_name(evaluation['verdict'])}")
    _set_caption(figure, evaluation, f"compared with {chart_name(evaluation['source']['name'], 60)}\n")
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1.0))
    draw_distribution(left, evaluation["kl_histogram"])
    right.set_axis_off()
    interval, floor = kl["interval"], evaluation["floor"]
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
