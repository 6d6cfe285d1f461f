"""Escapes untrusted text (names, prompts, answers), so that a terminal or Markdown shows it and obeys nothing.

There is one function for each place. Invisible characters are written as Python's escapes:

    terminal("a\\x1b[31mb")              # "a\\\\x1b[31mb"
    markdown("a|b")                     # "a&#124;b"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# Joiners of letters, which Persian and families of emoji need: invisible, but harmless.
_JOINERS = "\u200c\u200d"
# Everything but printable ASCII. Only these characters are checked one by one.
_UNCOMMON = re.compile(r"[^ -~]")
# Characters with a meaning inside of a line of Markdown, also in GitHub's and the Hub's dialects (emoji, formulas).
_MARKED = re.compile(r"[\\`*_{}\[\]<>()#!|~&:@$^\"']|(?<=www)\.", re.IGNORECASE)
# Characters that open a list, a heading or a rule at the beginning of a line; a point does so after a number.
_OPENING = re.compile(r"^(\d+(?=\.(?:\s|$))|(?=[-+=]))(.)")


def terminal(text: str, kept: str = "") -> str:
    """Escape whatever a terminal obeys or cannot show.

    These are control characters, marks that change the direction of writing, halves of surrogate pairs, and unassigned
    code points.

    Args:
        text: any text.
        kept: characters that are not escaped, such as a newline.

    Returns:
        The text, with Python's escapes in place of these characters.
    """

    def replacement(match: re.Match[str]) -> str:
        character = match[0]
        return character if _is_visible(character) or character in kept else _escape(character)

    return _UNCOMMON.sub(replacement, text)


def join_lines(lines: Iterable[str]) -> str:
    """Join lines into a text that is safe for a terminal.

    Args:
        lines: lines without newlines at their ends; a newline inside of one, such as in a name, is escaped.

    Returns:
        The lines, separated by newlines, with whatever a terminal obeys or cannot show escaped.
    """
    return "\n".join(map(terminal, lines))


def markdown(text: str) -> str:
    """Escape a text for one line of Markdown, in a paragraph or in a cell of a table.

    Args:
        text: any text, such as a model's answer.

    Returns:
        One line of Markdown that shows the text; newlines become `<br>`.
    """
    return "<br>".join(map(_markdown_line, terminal(text, kept="\n\t").split("\n")))


def _is_visible(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _markdown_line(line: str) -> str:
    expanded = line.expandtabs(4)
    text = expanded.lstrip()
    indent = expanded[: len(expanded) - len(text)]
    text = _OPENING.sub(lambda match: match[1] + _entity(match[2]), _MARKED.sub(lambda match: _entity(match[0]), text))
    # Four plain spaces would begin a block of code.
    return indent.replace(" ", "&nbsp;") + text


def _entity(character: str) -> str:
    return f"&#{ord(character)};"
