"""Every word on a page that is no household word has its line there."""

from __future__ import annotations

import re

import pytest

from openquant.report.cells import verdict_meaning
from openquant.report.html import render_page
from support.evaluation_files import evaluation


def terms(text: str) -> set[str]:
    return set(re.findall(r"<dt>(.*?)</dt>", text.replace("&#39;", "'")))


def test_words_that_a_page_does_not_use_are_not_listed() -> None:
    one = terms(render_page([evaluation()]))
    assert not {"frontier", "recovery", "routed otherwise", "suspects", "flags"} & one


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
