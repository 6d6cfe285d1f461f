"""The source's text in the card of an output."""

from __future__ import annotations

import pytest

from openquant.report.card import source_section

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lowered(text: str) -> str:
    return source_section(text, 3, None, None, ())


HEADINGS = [
    ("# A\n\n## B\n\n#### C\n\n##### D", "### A\n\n#### B\n\n###### C\n\n###### D"),
    ("### A\n###### B", "### A\n###### B"),
    ("#\n#tag\n####### seven", "###\n#tag\n####### seven"),
    ("\r\n# A\r\n\r\ntext\r\n", "### A\n\ntext"),
    ('<h1 align="center">A</h1>\n<H2>B</H2>\n<hr>', '<h3 align="center">A</h3>\n<H4>B</H4>\n<hr>'),
    # Code has no headings.
    ("# A\n```sh\n# b\n~~~\n```\n# C", "### A\n```sh\n# b\n~~~\n```\n### C"),
    ("# A\n``` a`b\n# C\n\n    # d\n", "### A\n``` a`b\n### C\n\n    # d"),
    ("# A\n```\n# not closed", "### A\n```\n# not closed"),
    ("text only", "text only"),
    ("", ""),
]


def test_headings_are_below_ours(subtests: pytest.Subtests) -> None:
    for text, expected in HEADINGS:
        with subtests.test(text):
            assert lowered(text) == expected
            assert lowered(expected) == expected


LINKS = [
    ("![x](figures/a.PNG)", "resolve", "figures/a.PNG"),
    ("[x](./docs/more.md#part)", "blob", "docs/more.md#part"),
    ("[x](docs/)", "tree", "docs/"),
    ('[![x](a.svg "title")](https://x.y)', "resolve", "a.svg"),
    ("[x]: a%20b.jpg", "resolve", "a%20b.jpg"),
    ('<img width="1" src="a.webp">', "resolve", "a.webp"),
    ("<a href='LICENSE?x=1'>x</a>", "blob", "LICENSE?x=1"),
]


def test_relative_links_lead_to_the_source(subtests: pytest.Subtests) -> None:
    for text, kind, name in LINKS:
        with subtests.test(text=text, kind=kind, name=name):
            address = f"https://huggingface.co/org/name/{kind}/{COMMIT}/{name}"
            expected = text.replace(f"./{name}", name).replace(name, address)
            assert source_section(text, 3, "org/name", COMMIT, ()) == expected
            assert source_section(expected, 3, "org/another", None, ()) == expected
            assert source_section(text, 3, "org/name", None, ()) == expected.replace(COMMIT, "main")
            # Nobody knows where to.
            assert source_section(text, 3, None, COMMIT, ()) == text


OTHER_LINKS = [
    "[x](https://x.y/z) [x](mailto:a@b.c) [x](//x.y) [x](/org/other) [x](#part) [x](?a) [x](../other) [x]()",
    "`[x](a.md)` and `src='a.md'`",
    "```\n[x](a.md)\n```",
    # The output has these.
    "![x](here.png) [x](./LICENSE#a)",
    "f[x](y z) [x]",
]


def test_other_links_stay(subtests: pytest.Subtests) -> None:
    for text in OTHER_LINKS:
        with subtests.test(text=text):
            assert source_section(text, 3, "org/name", COMMIT, {"here.png", "LICENSE"}) == text


PIECES = ["[", "](", "- - ", "<", "<p", "`", "# ", "<h1", "src='", "> ", "<!--", "```\n", "[x]: a\n"]  # fmt: skip


def test_a_text_of_any_size_takes_no_longer_than_its_size(subtests: pytest.Subtests) -> None:
    for piece in PIECES:
        with subtests.test(piece=piece):
            text = piece * (50_000 // len(piece))
            assert len(source_section(text, 3, "org/name", None, ())) >= len(text.strip().replace("\n", "")) // 2
