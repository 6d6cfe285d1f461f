"""What cells of tables say, how lines fit a terminal, and how names and texts of others are made safe to print.

A terminal or Markdown shows untrusted text (names, prompts, answers), and obeys nothing in it. There is one function
for each place. Invisible characters are written as Python's escapes:

    terminal("a\x1b[31mb")              # "a\\x1b[31mb"
    markdown("a|b")                     # "a&#124;b"

What figures of an evaluation are in words: verdicts, tasks, and where the texts come from.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..patterns import list_first

if TYPE_CHECKING:
    from jinja2 import Template

# The least width of a last column that is wrapped; where it would be narrower, cells go beneath their rows.
_LEAST = 24
# Cells beneath a row that is too long for one line begin so far to the right.
_BENEATH = 6


def gigabytes(nbytes: int) -> str:
    """Format a number of bytes with three digits: "1.24 GB", "8.4 MB".

    Args:
        nbytes: the number of bytes; units are powers of 1000.
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            figures = ",.0f" if nbytes >= 1000 * size else ".3g"
            return f"{nbytes / size:{figures}} {unit}"
    return f"{nbytes} B"


def fill_template(name: str, values: Mapping[str, Any], filters: Mapping[str, Any], **settings: Any) -> str:
    """Fill a template of this room.

    Args:
        name: name of its file.
        values: the variables of the template.
        filters: filters that the template uses, the same in every call.
        settings: more settings of jinja's environment, the same in every call.
    """
    # Only here: it takes 50 ms to import, and the page in the browser has none.
    from jinja2 import Environment, StrictUndefined

    if name not in _templates:
        environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, **settings)
        environment.filters.update(filters)
        _templates[name] = environment.from_string(read_part(name))
    return _templates[name].render(values)


# By name, those that were compiled: a run fills the card twice, and to compile it takes half of a small conversion.
_templates: dict[str, Template] = {}


@cache
def read_part(name: str) -> str:
    """Read a file that lies beside the modules of this room."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


# What a cell says where nothing is known or nothing fits.
NOTHING = "-"


def or_dash(form: str, value: object) -> str:
    """Format a value, such as with "{:.2f}"; "-" if it is None."""
    if value is None:
        return NOTHING
    return form.format(value)


def optional(form: str, value: object) -> str:
    """Format a value that may be missing: optional(" ({})", "Ampere") is " (Ampere)", and "" without a value."""
    if not value:
        return ""
    return form.format(value)


def count_of(number: int | str, noun: str) -> str:
    """Say how many there are: "1 shard", "2 shards", "no shards"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def spoken(seconds: float) -> str:
    """Format a duration in seconds, at least one second: "5 seconds", "3 minutes", "2.5 hours"."""
    if seconds < 1.5:
        return "1 second"
    if seconds < 90:
        return f"{round(seconds)} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def per_cent(part: int, whole: int) -> str:
    """Format a part of a whole: "62.5 %"; "-" if the whole is 0.

    Args:
        part: number of bytes, or of other things.
        whole: number of all of them.
    """
    if not whole:
        return NOTHING
    return f"{100 * part / whole:.3g} %"


def shorten(text: str, most: int) -> str:
    """Return the first characters of a text, with three dots if there are more.

    Args:
        text: any text.
        most: number of characters to keep, without the dots.
    """
    if len(text) <= most:
        return text
    return f"{text[:most]}..."


def short(count: int | None) -> str:
    """Format a count, rounded down: "831", "16k", "1.2M"; "-" for None.

    Args:
        count: a number of things, 0 or more; k is 1000.
    """
    if count is None:
        return NOTHING
    for unit, size in (("M", 10**6), ("k", 1000)):
        if count >= 10 * size:
            return f"{count // size}{unit}"
        if count >= size:
            return f"{count * 10 // size / 10:g}{unit}"
    return str(count)


def paragraphs(lines: Iterable[str], width: int | None = None) -> list[str]:
    """Wrap lines at spaces, and escape what a terminal obeys. No word is cut, such as a path, and no command.

    Args:
        lines: lines of prose. What begins a line with spaces is indented by two more where it goes on.
        width: the most characters of a line; None for any number.

    Returns:
        The lines; one with a longer word is longer.
    """
    glued = [COMMAND.sub(lambda match: match[0].replace(" ", _GLUE), terminal(line)) for line in lines]
    return [part.replace(_GLUE, " ") for line in glued for part in _wrap(line, width)]


# A command within a sentence: after a colon up to the end of the phrase; elsewhere as far as its words show.
_VERB = "openquant (?:compress|fit|dequantize|push|diagnose|explain|calibrate|eval|verify|web|completion)"
COMMAND = re.compile(
    rf"(?<=: )(?:(?<!hint: ){_VERB}|pip|hf|python)\b[^,;\n]*[^,;\n ]"
    rf"|\b(?:{_VERB}|hf auth login)\b(?: (?:-[\w-]*\w|[A-Z]+\b|keep))*"
)
# Stands for a space at which no line ends. It is none of an escaped text.
_GLUE = "\0"


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,), width: int | None = None) -> list[str]:
    """Align the columns of a table, and escape what a terminal obeys. No word and no figure is cut.

    If a table is too wide, a last column of text is wrapped; where there is no room for that, all cells but the first
    one go beneath their rows, each with its heading.

    Args:
        rows: the cells of each row, all rows of equally many. The first row has the headings.
        left: indices of the columns of text, which are aligned to the left; the others are to the right.
        width: the most characters of a line; None for any number.

    Returns:
        The lines, without spaces at their ends; one with a longer word is longer.
    """
    rows = [[terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    start = sum(widths[:last]) + 2 * last

    lines = []
    for row in rows:
        cells = [cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        line = "  ".join(cells).rstrip()

        if width is None or start + widths[last] <= width:
            lines.append(line)
        elif last in left and width - start >= _LEAST:
            indent = len(line) - len(line.lstrip(" "))
            lines += _wrap(line, width, start - indent)
        else:
            lines += _stack_cells(rows[0], row, width)
    return lines


def _stack_cells(headings: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Write the cells of a row beneath its first one, each with its heading: "      bits 8.00, size 1.2 GB"."""
    lines = list(filter(None, _wrap(row[0], width)))
    if row is headings:
        return lines
    # No line ends between a heading and its figure.
    pairs = zip(headings[1:], row[1:], strict=True)
    below = [f"{heading} {cell}".strip().replace(" ", _GLUE) for heading, cell in pairs if cell]
    wrapped = _wrap(" " * _BENEATH + ", ".join(below), width, 0)
    return lines + [line.replace(_GLUE, " ") for line in wrapped]


def _wrap(text: str, width: int | None, hang: int = 2) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip(" ")) + hang)
    return textwrap.wrap(
        text,
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
    )


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
        if _is_visible(character) or character in kept:
            return character
        return character.encode("unicode_escape").decode("ascii")

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


def _markdown_line(line: str) -> str:
    expanded = line.expandtabs(4)
    text = expanded.lstrip()
    indent = expanded[: len(expanded) - len(text)]
    text = _OPENING.sub(lambda match: match[1] + _entity(match[2]), _MARKED.sub(lambda match: _entity(match[0]), text))
    # Four plain spaces would begin a block of code.
    return indent.replace(" ", "&nbsp;") + text


def _entity(character: str) -> str:
    return f"&#{ord(character)};"


def verdict_meaning(evaluation: Mapping[str, Any]) -> str:
    """Return what an output's verdict stands for: "one token in 31 differs".

    Args:
        evaluation: the content of an eval.json.

    Returns:
        How many tokens differ, and, if it answered questions, whether its accuracy differs by more than chance.
    """
    differing = 1 - evaluation["top1"]
    if differing == 0:
        meaning = "no token differs"
    elif differing < 2 / 3:
        meaning = f"one token in {round(1 / differing):,} differs"
    else:
        meaning = f"{100 * differing:.0f} % of tokens differ"
    if "tasks" in evaluation:
        # Only here, since `--help` imports this module.
        from ..evaluation.verdict import counted_questions

        pooled = evaluation["tasks"]["pooled"]
        metric = pooled["metrics"][0]
        low, high = metric["difference_interval"]
        change = f"{100 * metric['difference']:+.1f} points"
        if low <= 0 <= high:
            change = "no change beyond chance"
        meaning += f"; {change} in accuracy on {counted_questions(pooled['questions'])}"
    return meaning


def texts_origin(text: Mapping[str, Any]) -> str:
    """Say where texts come from, without directories: "prose.txt, code.jsonl"; "" if that is not known.

    Args:
        text: `text` of an eval.json, or `texts` of a calibration.
    """
    names = [name.rpartition("/")[2] for name in text.get("files", ())]
    dataset = text.get("dataset") or ""
    builtin = text.get("builtin")
    # "org/name:split" is on the Hub.
    if dataset and not re.match(r"[^/.][^/]*(/[^/]*)?$", dataset):
        dataset = dataset.rpartition("/")[2]
    if dataset:
        names.append(dataset)
    if builtin and not names:
        names.append(builtin)
    return ", ".join(names)


def dataset_value(dataset: str) -> str:
    """Return the value of --dataset for the name of one: "org/name:test", which has no subset, is "org/name::test"."""
    name, colon, rest = dataset.partition(":")
    return f"{name}::{rest}" if colon and ":" not in rest else dataset


def task_rows(tasks: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Make a table of an output's figures on tasks.

    Args:
        tasks: `tasks` of its eval.json.

    Returns:
        The rows, with the same number of cells: a title, then each metric of each task, and those of all tasks.
    """
    rows: list[tuple[str, ...]] = [
        ("", "questions", "source", "output", "difference", "95 %", "p", "recovery", "lost", "gained", "other", "KL")
    ]

    shown = tasks["tasks"]
    means = []
    if len(shown) > 1:
        shown = [*shown, tasks["pooled"]]
        means = tasks["mean"]

    for figures in shown:
        # What is the same for all metrics stands beside the first.
        questions = f"{figures['questions']:,}"
        of_task = (share_text(figures["answered_otherwise"]), f"{figures['kl']:.3g}")
        for metric in figures["metrics"]:
            rows.append(
                (
                    f"{terminal(figures['task'])}, {terminal(metric['metric'])}",
                    questions,
                    share_text(metric["source"]),
                    share_text(metric["output"]),
                    *_difference(metric),
                    f"{metric['p']:.2g}",
                    share_text(metric["recovery"]),
                    str(metric["lost"]),
                    str(metric["gained"]),
                    *of_task,
                )
            )
            questions = ""
            of_task = ("", "")

    for mean in means:
        name = f"mean of {mean['tasks']} tasks, {terminal(mean['metric'])}"
        scores = share_text(mean["source"]), share_text(mean["output"])
        rows.append((name, "", *scores, *_difference(mean), "", share_text(mean["recovery"]), "", "", "", ""))

    return rows


def share_text(share: float | None) -> str:
    """Format a share: "98.7 %"; "-" if it is not known."""
    if share is None:
        return NOTHING
    return f"{100 * share:.1f} %"


def task_summary(tasks: Mapping[str, Any]) -> str:
    """Summarize an output's figures on tasks in a line of Markdown: accuracy of both, recovery, and the questions.

    Args:
        tasks: `tasks` of its eval.json.
    """
    from ..evaluation.verdict import counted_questions

    mean = tasks["mean"][0]
    pooled = tasks["pooled"]
    interval = ", ".join(f"{100 * edge:.1f}" for edge in mean["recovery_interval"] or ())
    names = [markdown(figures["task"]) for figures in tasks["tasks"]]
    recovery = f"recovery {share_text(mean['recovery'])}{optional(' [{}]', interval)}"
    asked = f"{counted_questions(pooled['questions'])} of {list_first(names, _NAMED, 'more tasks')}"
    accuracy = f"{share_text(mean['source'])} -> {share_text(mean['output'])}"
    return f"{accuracy}, {recovery}, {asked} ({markdown(mean['metric'])})"


# Tasks that a summary names.
_NAMED = 6


def _difference(metric: Mapping[str, Any]) -> Sequence[str]:
    """Return difference and interval in points: ("-0.5", "[-2.6, +1.5]")."""
    edges = ", ".join(f"{100 * edge:+.1f}" for edge in metric["difference_interval"])
    return f"{100 * metric['difference']:+.1f}", f"[{edges}]"
