"""The pictures of tasks: where means and intervals lie, in which order, and what is left out."""

from __future__ import annotations

from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from openquant.report.charts import (
    STYLE,
    by_kl,
    draw_picture,
    draw_recovery,
    recovery_of_outputs,
    recovery_of_tasks,
    recovery_rows,
)
from openquant.report.html import render_page
from support.evaluation_files import evaluation, several, with_tasks

# Right shares of source and output in each task, of the outputs of `several`: INT4, FP8, INT8.
SCORES = [
    ((0.5, 0.4), (0.4, 0.37), (0.5, 0.45)),
    ((0.5, 0.48), (0.4, 0.42), (0.5, 0.5)),
    ((0.5, 0.5), (0.4, 0.4), (0.5, 0.49)),
]


def asked() -> list[dict[str, Any]]:
    return [with_tasks(one, scores) for one, scores in zip(several(), SCORES, strict=True)]


def drawn(of: list[dict[str, Any]]) -> Axes:
    with matplotlib.rc_context(STYLE):
        axes = Figure((8.0, 3.0), layout="constrained").add_subplot()
        draw_recovery(axes, recovery_rows(of))
    return axes


def marks(axes: Axes) -> list[tuple[float, float]]:
    """The marks of the rows, from above: recovery in per cent, and height."""
    return [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"]


def test_each_output_has_a_row_with_its_mean_and_its_interval() -> None:
    axes = drawn(asked())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tiny-INT4", "tiny-FP8", "tiny-INT8"]
    assert axes.yaxis_inverted()
    assert [point for point, _ in marks(axes)] == pytest.approx([100 * 1.22 / 1.4, 100, 100 * 1.39 / 1.4])
    assert [height for _, height in marks(axes)] == [0, 1, 2]
    intervals = [line.get_xdata().tolist() for line in axes.lines if line.get_linewidth() == 3]
    assert intervals[1] == pytest.approx([100 - 4 / 1.4 * 3, 100 + 4 / 1.4 * 3])
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [100]


def test_what_a_source_that_has_none_right_leaves_out_and_what_lies_beyond_the_edge() -> None:
    one, other = several()[:2]
    axes = drawn([with_tasks(one, [(0.0, 0.1), (0.02, 0.2)]), with_tasks(other, [(0.0, 0.1), (0.0, 0.0)])])
    assert marks(axes) == [(200, 0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tiny-INT4", "tiny-FP8"]


def test_the_page_has_the_picture_after_the_first_and_its_table_in_the_order_of_kl() -> None:
    of = asked()
    text = render_page(of)
    start, section, details = (text.index(part) for part in ("Size and distance", "Recovery in tasks", "<details"))
    assert start < section < details
    assert recovery_of_outputs(by_kl(of)) in text
    table = text[section:details]
    assert table.index(">tiny-INT8</td>") < table.index(">tiny-FP8</td>") < table.index(">tiny-INT4</td>")
    for cell in ("46.7 %", "40.7 %", "-6.0 (-10.0 to -2.0)", "87.1 % (78.6 to 95.7)", "0.77"):
        assert f">{cell}</td>" in table
    assert "tiny-INT4: of 150 questions 12 went from right to wrong or back" in table
    # Each output's details have its tasks.
    assert text.count('<td class="name">task-0, acc_norm</td>') == 3
    assert recovery_of_tasks(by_kl(of)[0], 0) in text


def test_the_page_of_one_output_has_a_row_for_each_task() -> None:
    [one] = [with_tasks(evaluation(), SCORES[0])]
    text = render_page([one])
    assert "Recovery in tasks" not in text
    svg = recovery_of_tasks(one)
    assert svg in text
    for name in ("mean of tasks", "task-0", "task-1", "task-2"):
        assert name in svg
    assert "of 150 questions 12 went from right to wrong or back" in text


def test_the_picture_has_nothing_in_large_letters_that_chance_may_give(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: said.extend(text.get_text() for text in figure.findobj(Text))
    )
    worse, alike = (with_tasks(evaluation(), scores) for scores in SCORES[:2])
    assert draw_picture([worse]) == b""
    assert "87.1 %" in said and "of the source's accuracy" in said
    said.clear()
    draw_picture([alike])
    assert "within chance" in said
    assert [text for text in said if text.endswith(" of 150 questions")] == ["100.0 % of 150 questions"]


def test_figures_that_make_no_sense_are_drawn_all_the_same() -> None:
    of = asked()[:2]
    for one, recovery in zip(of, (9e99, None), strict=True):
        interval = recovery and [recovery, -recovery]
        one["tasks"]["mean"][0] |= {"recovery": recovery, "recovery_interval": interval}
        one["tasks"]["tasks"] = []
    of[0]["tasks"]["mean"][0]["difference"] = 9e99
    assert render_page(of)
    assert recovery_of_tasks(of[0]) and recovery_of_tasks(of[1])
    assert draw_picture(of)
