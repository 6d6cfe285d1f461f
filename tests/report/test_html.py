"""The report: one file, the same each time, in which nothing that others wrote is more than text."""

from __future__ import annotations

import base64
import functools
import hashlib
import html.parser
import re
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant import compress
from openquant.cli.commands import main
from openquant.files.cards import evaluation_digest, find_evaluation
from openquant.files.checkpoint import open_checkpoint
from openquant.report.charts import draw_picture
from openquant.report.html import render_page
from support.evaluation_files import evaluation, hostile, several

ALLOWED = {
    "html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "h3", "h4", "p", "span", "ul", "li", "code",
    "pre", "div", "table", "thead", "tbody", "tr", "th", "td", "button", "figure", "figcaption", "section", "details",
    "summary", "br", "mark", "script", "strong", "dl", "dt", "dd",
}  # fmt: skip


class Seen(html.parser.HTMLParser):
    """The elements of a page outside of its charts, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@functools.cache
def whole_page() -> str:
    return render_page([evaluation()])


def test_the_same_figures_give_the_same_bytes() -> None:
    assert render_page([evaluation()]) == whole_page()


def test_nothing_that_others_wrote_is_markup() -> None:
    text = render_page([hostile()])
    seen = Seen(text)
    assert seen.tags <= ALLOWED
    assert not {name for name in seen.attributes if name.startswith("on")} | (
        {"href", "src"} & seen.attributes - {"href"}
    )
    assert text.count("<script>") == text.count("</script>") == 1
    assert "<!--" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "{{ 7 * 7 }}" in "".join(seen.text)
    for chart in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert "<script" not in chart
        assert "onerror='" not in chart or "&lt;img" in chart


def test_the_policy_lets_only_the_page_s_own_script_run() -> None:
    text = whole_page()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy and script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1] == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    outside = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://", outside)
    # Names of vocabularies, which nothing fetches.
    assert set(re.findall(r'https?://[^"\s<]+', text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://purl.org/dc/elements/1.1/",
        "http://creativecommons.org/ns#", "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
        "http://purl.org/dc/dcmitype/StillImage", "https://matplotlib.org/",
    }  # fmt: skip


def test_what_an_evaluation_lacks_is_left_out() -> None:
    found = evaluation()
    for name in ("texts", "suspects", "layers", "kl_by_domain", "kl_by_position", "kl_by_confidence", "reasons"):
        found[name] = []
    found["kl"]["interval"] = found["perplexity"]["interval"] = None
    found["kl_histogram"] = {"edges": [1e-8, 1.0], "output": [0.0], "floor": [0.0]}
    text = render_page([found])
    assert text.count("<svg") == 4
    assert "Texts side by side" not in text
    assert "Suspects" not in text
    assert draw_picture([found])


def test_what_a_page_says_of_an_evaluation() -> None:
    text = whole_page()
    assert "there was a fox that lived" in text and "there was a fox that slept" in text
    assert "output, another from token 7 on" in text
    assert "output, the same" in text


def test_a_picture_names_the_evaluations_it_shows() -> None:
    named = [{**evaluation(), "output": {"name": name, "digest": "2" * 64}} for name in ("tiny $x$ \u6a21\u578b", "y")]
    text, found = render_page(named), draw_picture(named)
    assert found.startswith(b"\x89PNG")
    for one in named:
        assert evaluation_digest(one).encode() in found
        assert evaluation_digest(one) in text


def test_what_is_not_installed_is_said_before_anything_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["eval", str(EXAMPLE), "--source", str(EXAMPLE), "--report", "a.html"]) == 2
    message = "error: --report needs matplotlib, which is not installed\nhint: pip install 'openquant-llm[report]'\n"
    assert capsys.readouterr() == ("", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_answers")
def test_eval_writes_a_page_and_a_picture_that_a_push_takes_along(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(EXAMPLE, out)
    asked = ["eval", str(out), "--source", str(EXAMPLE), "--samples", "2", "--length", "48"]
    assert main([*asked, "--report", str(out / "eval.html"), "--figure", str(out / "eval.png")]) == 0
    found = find_evaluation(open_checkpoint(out))
    assert found is not None
    assert found.files == ["eval.json", "eval.html", "eval.png"]
    text = (out / "eval.html").read_text()
    assert text.count("<svg") == 4
    assert (out / "eval.png").read_bytes().startswith(b"\x89PNG")


def rows(text: str, table: int = 0) -> list[list[str]]:
    """The text of each cell of a table of a page, by row, without the heading."""
    body = re.findall(r"<tbody>(.*?)</tbody>", text, re.DOTALL)[table]
    return [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]


def test_several_outputs_come_in_the_order_of_their_kl_beside_source_and_floor() -> None:
    text = render_page(several())
    assert "<title>3 outputs of org/tiny</title>" in text
    assert [row[:4] for row in rows(text)] == [
        ["org/tiny (source)", "8.39 MB", "100 %", "0"],
        ["floor: the source with noise", "", "", "7e-05"],
        ["tiny-INT8", "5.3 MB", "63.1 %", "0.0004"],
        ["tiny-FP8", "5.25 MB", "62.5 %", "0.00129"],
        ["tiny-INT4", "3.7 MB", "44.1 %", "0.009"],
    ]
    details = re.findall(r"<details class=\"output\"( open)?><summary><h2>(.*?) beside", text)
    assert details == [("", "tiny-INT8"), ("", "tiny-FP8"), ("", "tiny-INT4")]
    # The picture is the first thing on the page, then the table, then details.
    assert text.index("<svg") < text.index("<tbody>") < text.index("<details")


def test_the_details_of_a_single_output_are_open() -> None:
    text = render_page([evaluation()])
    assert '<details class="output" open><summary><h2>tiny-FP8 beside org/tiny' in text
    assert rows(text)[0] == ["size", "8.39 MB", "", "", "5.25 MB, 62.5 %"]
