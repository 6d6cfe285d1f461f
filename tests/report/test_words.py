"""Every word on a page that is no household word has its line there."""

from __future__ import annotations

import re

import pytest

from openquant.formats.schemes import TENSOR
from openquant.plan import summary
from openquant.plan.plan import make_plan
from openquant.plan.serving import serving_to_json
from openquant.report.cells import verdict_meaning
from openquant.report.html import PageContent, evaluated_page, render_page
from support.evaluation_files import evaluation, several, with_tasks
from support.published_checkpoints import published

# Words that need no line.
HOUSEHOLD = {
    "", "after", "before", "layer", "layers", "model", "of the source", "options", "output", "per cent", "questions",
    "shape", "size", "source", "task", "weights", "why", "largest", "in FP8",
}  # fmt: skip
# Headings whose term is listed under another name.
SAME = {
    "ratio of perplexities": "perplexity", "times the floor": "floor", "max": "max, mean", "mean": "max, mean",
    "max/mean": "max, mean", "mean KL": "KL, mean KL", "mean KL, nats": "nats", "positions above 0.1 nats": "nats",
    "source right": "source right, output right", "output right": "source right, output right",
    "difference, 95 % interval": "difference", "recovery, 95 % interval": "recovery",
    "right to wrong": "flips: right to wrong, wrong to right", "wrong to right": "flips: right to wrong, wrong to right",
    "KV cache a token": "KV cache", "KL: median, 90 %, 99 %, 99.9 %, largest": "median, 90 %, 99 %, 99.9 %",
}  # fmt: skip


def terms(text: str) -> set[str]:
    return set(re.findall(r"<dt>(.*?)</dt>", text.replace("&#39;", "'")))


def headings(text: str) -> set[str]:
    """Headings of columns, and of rows of the table of figures."""
    text = text.replace("&#39;", "'")
    found = re.findall(r"<th(?: class=\"number\")?>(?:<button type=\"button\">)?(.*?)<", text)
    for table in re.findall(r"<table class=\"figures.*?</table>", text, re.DOTALL):
        found += re.findall(r"<td class=\"name\">(.*?)</td>", table)
    return {name for name in found if not re.fullmatch(r"\d+( GB)?", name)}


def test_each_heading_has_its_line() -> None:
    plan = make_plan(published("Qwen3ForCausalLM"), TENSOR)
    routed = evaluation()
    routed["layers"][0]["routed_otherwise"] = 0.1
    routed["suspects"] = ["model.layers.0"]
    serving = serving_to_json(*summary.serving(plan))  # type: ignore[misc]
    pages = [
        PageContent("x", evaluations=[routed], serving=serving),
        evaluated_page([with_tasks(one) for one in several()], []),
    ]
    for page in pages:
        text = render_page(page)
        listed = terms(text)
        found = headings(text)
        assert len(found) > 5
        unexplained = {name for name in found if SAME.get(name, name) not in listed | HOUSEHOLD}
        assert {name for name in unexplained if not name.endswith(" GB")} == set()
    assert {"nats", "floor", "frontier", "verdict"} <= terms(render_page(pages[1]))
    assert {"routed otherwise", "suspects"} <= terms(render_page(pages[0]))


def test_words_that_a_page_does_not_use_are_not_listed() -> None:
    assert terms(render_page(PageContent("x"))) == set()
    one = terms(render_page(PageContent("x", evaluations=[evaluation()])))
    assert not {"frontier", "recovery", "routed otherwise", "suspects", "KV cache", "flags"} & one


def test_a_verdict_says_how_many_tokens_differ(subtests: pytest.Subtests) -> None:
    for top1, meaning in [
        (1.0, "no token differs"),
        (0.9999, "one token in 10,000 differs"),
        (0.968, "one token in 31 differs"),
        (0.34, "one token in 2 differs"),
        (0.2, "80 % of tokens differ"),
    ]:
        with subtests.test(top1=top1, meaning=meaning):
            assert verdict_meaning({"verdict": "close", "top1": top1}) == meaning


def test_a_verdict_says_whether_accuracy_changes(subtests: pytest.Subtests) -> None:
    for interval, change in [([-0.02, 0.0], "no change beyond chance"), ([-0.06, -0.01], "-3.0 points")]:
        with subtests.test(interval=interval, change=change):
            metrics = [
                {"difference": -0.03, "difference_interval": interval},
                {"difference": 1, "difference_interval": [1, 1]},
            ]
            evaluation = {
                "verdict": "changed",
                "top1": 0.75,
                "tasks": {"pooled": {"questions": 1520, "metrics": metrics}},
            }
            assert verdict_meaning(evaluation) == f"one token in 4 differs; {change} in accuracy on 1,520 questions"
