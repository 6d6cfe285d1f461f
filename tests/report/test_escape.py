"""Text of others stays text, wherever it is put."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from hypothesis import example, given
from hypothesis import strategies as st

from openquant.report.cells import join_lines, markdown, terminal

PLANTED = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]>",
    "\x1b]8;;http://example.com\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x9b31m\x07\x00\r\b",
    "a\u202eb\u2066c\u200f",
    "| a | b |",
    "`code` ```",
    "[text](javascript:alert(1)) ![](http://example.com/x.png)",
    "http://example.com www.example.com",
    "&lt;b&gt; &#60;",
    "' onmouseover='alert(1)",
    '" onmouseover="alert(1)',
    "# heading\n- list\n1. item\n    code\n===\n---\n> quote\n+ list",
    "*bold* _it_ ~~no~~ $x$ :smile: @user",
    "half \ud800 of a pair",
    "\u2028\u2029",
]
anything = st.one_of(st.sampled_from(PLANTED), st.text(st.characters(codec=None, exclude_categories=())))


class Reader(HTMLParser):
    """The text of HTML, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags = "", []

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))

    handle_comment = handle_decl = handle_pi = unknown_decl = lambda self, data: self.tags.append((data, {}))


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


@given(anything)
def test_a_terminal_shows_everything_and_obeys_nothing(text: str) -> None:
    shown = terminal(text)
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 or letter in "\u202e\u2066\u200f" for letter in shown)
    shown.encode()


def test_what_a_terminal_shows() -> None:
    assert terminal("a\x1b[31m\u202e\ud800\n\x7f\u0378") == "a\\x1b[31m\\u202e\\ud800\\n\\x7f\\u0378"
    assert terminal("a\n\tb\r", kept="\n\t") == "a\n\tb\\r"
    sound = "naïve 語 \u3000 \xa0 \u05e0\u05bc \u0645\u06cc\u200c\u062e\u0648 👩\u200d👧"
    assert terminal(sound) == sound


def test_a_newline_ends_a_line_and_no_text_does() -> None:
    assert join_lines(["a\nb", "\x9bc", "d\te"]) == "a\\nb\n\\x9bc\nd\\te"


@example("\xa0")
@example("\u2003- one")
@given(anything)
def test_markdown_has_nothing_left_that_means_something(text: str) -> None:
    said = markdown(text)
    lines = said.split("<br>")
    assert [read(line.replace("&nbsp;", " ")).text for line in lines] == [
        line.expandtabs(4) for line in terminal(text, kept="\n\t").split("\n")
    ]
    for line in lines:
        assert not set("\\`*_{}[]<>()!|~:@$^\n") & set(line)
        assert "www." not in line.lower() and line[:1] not in tuple(" -+=")
        assert not re.match(r"\d+\.(\s|$)", line)


def test_what_markdown_looks_like() -> None:
    assert markdown("a|b `c`") == "a&#124;b &#96;c&#96;"
    assert markdown("def f():\n    pass") == "def f&#40;&#41;&#58;<br>&nbsp;&nbsp;&nbsp;&nbsp;pass"
    assert markdown("1. one\n- two\n0.5 - 3") == "1&#46; one<br>&#45; two<br>0.5 - 3"
    assert markdown(".\n...and\n2.") == ".<br>...and<br>2&#46;"
    assert markdown("Qwen/Qwen3-8B, 0.0013") == "Qwen/Qwen3-8B, 0.0013"
