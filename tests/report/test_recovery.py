"""What page and picture say of tasks: in which order, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from openquant.report.charts import draw_picture
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


def test_the_page_has_a_table_in_the_order_of_kl() -> None:
    of = asked()
    text = render_page(of)
    start, section, details = (text.index(part) for part in ("Size and distance", "Recovery in tasks", "<details"))
    assert start < section < details
    table = text[section:details]
    assert table.index(">tiny-INT8</td>") < table.index(">tiny-FP8</td>") < table.index(">tiny-INT4</td>")
    for cell in ("46.7 %", "40.7 %", "-6.0 (-10.0 to -2.0)", "87.1 % (78.6 to 95.7)", "0.77"):
        assert f">{cell}</td>" in table
    assert "tiny-INT4: of 150 questions 12 went from right to wrong or back" in table
    # Each output's details have its tasks.
    assert text.count('<td class="name">task-0, acc_norm</td>') == 3


def test_the_page_of_one_output_has_a_row_for_each_task() -> None:
    [one] = [with_tasks(evaluation(), SCORES[0])]
    text = render_page([one])
    assert "Recovery in tasks" not in text
    for name in ("task-0", "task-1", "task-2", "mean of 3 tasks"):
        assert f'<td class="name">{name}, acc_norm</td>' in text
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
    assert draw_picture(of)
