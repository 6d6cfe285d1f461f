"""The picture of an evaluation for a model card."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..version import __version__
from .card import gigabytes
from .charts import STYLE, chart_name, draw_distribution, quiet_fonts


def draw_picture(evaluation: Mapping[str, Any], title: str, identity: str) -> bytes:
    """Draw an evaluation as a PNG, 1600 pixels wide and legible at 800.

    Args:
        evaluation: the checked content of an eval.json.
        title: name of the output.
        identity: digest of the evaluation (`evaluation_digest`), for the picture's metadata.

    Returns:
        The bytes of the PNG.
    """
    kl, sizes, perplexity = evaluation["kl"], evaluation["sizes"], evaluation["perplexity"]
    with matplotlib.rc_context({**STYLE, "font.size": 10.5}):
        figure = Figure((8.0, 4.2), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(1.45, 1.0))
        figure.suptitle(f"{chart_name(title, 60)}: {chart_name(evaluation['verdict'])}", fontsize=15, fontweight="bold")
        draw_distribution(left, evaluation["kl_histogram"])
        right.set_axis_off()
        interval = kl["interval"]
        rows = [
            ("mean KL", f"{kl['mean']:.3g} nats"),
            ("", f"{interval[0]:.3g} to {interval[1]:.3g}" if interval else ""),
            ("floor", f"{evaluation['floor']['kl']:.3g} nats"),
            ("same top token", f"{100 * evaluation['top1']:.2f} %"),
            ("perplexity", f"{perplexity['source']:.4g} to {perplexity['output']:.4g}"),
            ("size", f"{gigabytes(sizes['source'])} to"),
            ("", gigabytes(sizes["output"])),
        ]
        for number, (name, value) in enumerate(rows):
            height = 0.95 - 0.125 * number
            right.text(0.0, height, name, color="#444444")
            right.text(1.0, height, value, ha="right", fontweight="bold")
        target = io.BytesIO()
        metadata: dict[str, Any] = {"Software": f"openquant {__version__}", "Description": identity}
        with quiet_fonts():
            figure.savefig(target, format="png", dpi=200, metadata=metadata)
    return target.getvalue()
