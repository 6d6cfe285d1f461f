"""Plans, tables and errors as HTML: what they say, and that nothing of a model gets out of its cell."""

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from openquant import fit_table
from openquant.errors import PlanError
from openquant.files.checkpoint import open_checkpoint
from openquant.formats.schemes import SCHEMES
from openquant.plan.plan import make_plan
from openquant.web.view import fit_html, plan_html, problem_html, style

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b"


class Read(HTMLParser):
    """Tags and texts of HTML, which must be well-formed.

    Attributes:
        tags: names of all elements.
        rows: the texts of the cells of each table row.
    """

    def __init__(self, html):
        super().__init__()
        self.tags, self.rows, self.text, self._open, self._in_cell = [], [], "", [], False
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attributes)
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture
def plan(example):
    return make_plan(open_checkpoint(example), SCHEMES["int4"])


def test_a_plan_says_what_the_command_line_says(plan):
    read = Read(plan_html(replace(plan, notes=("a note",)), "org/model"))
    for text in ("Qwen3ForCausalLM", "8.39 MB before, 3.73 MB after (44.4 %)", "vLLM and SGLang", "a note"):
        assert text in read.text
    assert ["lm_head", "1.05 MB", "1.05 MB", "as it is", "2048 x 256", "output head"] in read.rows
    assert ["model.layers.{0..3}.mlp.up_proj", "1.57 MB", "406 kB", "int4", "768 x 256", ""] in read.rows


def test_a_table_has_the_command_for_the_best_scheme(example):
    found = fit_table(example, "4090")
    read = Read(fit_html(found))
    assert "1 RTX 4090 of 25.2 GB (Ada), for sequences of 2,048 tokens" in read.text
    assert found.command in read.text and found.fastest_command in read.text
    # Each scheme is a button, of which the chosen one is pressed.
    assert fit_html(found, "int4").count('<button type="button" value=') == len(found.schemes) - 1
    assert '<button type="button" value="int4" aria-pressed="true">int4</button>' in fit_html(found, "int4")
    assert "Fastest, 0.030 nats, computed in FP8" in read.text
    assert ["int4", "4.13", "3.73 MB", "1", "2,048", "5k", "16 bits", "both", "0.098*"] in read.rows
    # Without a GPU there is no best scheme.
    assert "Name your GPU" in Read(fit_html(fit_table(example))).text


def test_a_table_says_why_nothing_fits(example):
    found = replace(fit_table(example, "4090"), best=None, command=None, schemes=())
    assert "No scheme with a known KL fits 1 RTX 4090" in Read(fit_html(found)).text
    read = Read(fit_html(replace(found, instead="openquant compress -m X --kv-cache fp8")))
    assert "This fits, for sequences of" in read.text and "openquant compress -m X --kv-cache fp8" in read.text


def test_an_error_is_that_of_the_command_line():
    read = Read(problem_html(PlanError(f"{HOSTILE} is no model", "name another")))
    assert "script" not in read.tags
    assert read.text == ("error: <script>alert(1)</script>\"'&\\u202e\\x1b is no modelhint: name another")
    options = Read(problem_html(PlanError("too little", "give --max-memory 2GB or more")))
    assert options.text == "error: too littlehint, on the command line: give --max-memory 2GB or more"


def test_names_of_a_model_are_text(plan, example):
    hostile = replace(plan, notes=(HOSTILE,))
    vars(hostile)["lines"] = tuple(replace(line, names=(HOSTILE,), why=HOSTILE) for line in plan.lines)
    plain, found = Read(plan_html(plan, "x")), Read(plan_html(hostile, HOSTILE))
    assert set(found.tags) == set(plain.tags)
    assert found.text.count("<script>alert(1)</script>\"'&\\u202e\\x1b") > 10
    table = replace(fit_table(example, "4090"), command=HOSTILE, unknown=HOSTILE, refused={"int4": HOSTILE})
    assert "script" not in Read(fit_html(table)).tags


def test_sections_need_neither_torch_nor_gradio():
    code = "import sys, openquant.web.view; print({'torch', 'gradio', 'transformers', 'jinja2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_style_sheet_names_no_colour_of_its_own():
    assert "#" not in style() and "rgb(" not in style()
