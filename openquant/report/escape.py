"""What others wrote (names, prompts, a model's answers) put where something would obey it instead of showing it.

One function for each such place. What cannot be seen is written out as Python does, in all of them:

    terminal("a\\x1b[31mb")              # "a\\\\x1b[31mb"
    markdown("a|b")                     # "a&#124;b"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# What joins letters into one sign, as Persian and families of emoji need it: invisible, and it moves nothing.
_JOINERS = "\u200c\u200d"
# All but what every terminal shows: of a long text, few characters have to be looked at one by one.
_UNCOMMON = re.compile(r"[^ -~]")
# Whatever Markdown gives a meaning to inside of a line, GitHub's and the Hub's dialects too: links, emoji, formulas.
_MARKED = re.compile(r"[\\`*_{}\[\]<>()#!|~&:@$^\"']|(?<=www)\.", re.IGNORECASE)
# What would open a list, a heading or a rule at the beginning of one.
_OPENING = re.compile(r"^(\d*)([-+=.])")


def terminal(text: str, kept: str = "") -> str:
    """The text with whatever a terminal obeys, or cannot show, as an escape: control characters, marks that turn the
    direction of writing, halves of surrogate pairs, what no Unicode has assigned.

    Args:
        text: any text.
        kept: characters to leave as they are, such as a newline.
    """

    def replacement(match: re.Match[str]) -> str:
        letter = match[0]
        return letter if _shown(letter) or letter in kept else _escape(letter)

    return _UNCOMMON.sub(replacement, text)


def join_lines(lines: Iterable[str]) -> str:
    """A text of these lines as a terminal shows it: a newline that a line has, from a name say, is escaped too."""
    return "\n".join(map(terminal, lines))


def markdown(text: str) -> str:
    """The text as one line of Markdown that says it and does nothing else, in a paragraph or in a cell of a table."""
    return "<br>".join(map(_markdown_line, terminal(text, kept="\n\t").split("\n")))


def _shown(letter: str) -> bool:
    return letter.isprintable() or letter in _JOINERS or unicodedata.category(letter) == "Zs"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _markdown_line(line: str) -> str:
    whole = line.expandtabs(4)
    text = whole.lstrip()
    indent = whole[: len(whole) - len(text)]
    text = _OPENING.sub(lambda found: found[1] + _entity(found[2]), _MARKED.sub(lambda found: _entity(found[0]), text))
    # Four spaces would make a block of code of it.
    return indent.replace(" ", "&nbsp;") + text


def _entity(letter: str) -> str:
    return f"&#{ord(letter)};"
