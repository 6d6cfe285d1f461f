"""The text of the source's card as it stands in the card of an output: below a heading, and in another repository.

Nothing is rendered: lines are read as far as CommonMark's blocks decide what a heading is, and everything else stays.
Whatever the text leaves open, such as a fence or `<details>`, closes at its end, and nothing of ours follows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container, Iterator
from urllib.parse import quote, unquote

# Markers of quotes and list items before a heading.
_MARKERS = r"(?:(?: {0,3}>)|(?: {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]))* {0,3}"
_HEADING = re.compile(rf"^({_MARKERS})(#{{1,6}})(?=[ \t]|$)")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$")
# Lines that are no paragraph, so that an underline below them makes no heading: quotes, rows of tables, items of lists,
# and indented code.
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[>|]|[-*+][ \t]|\d{1,9}[.)][ \t])| {4}|\t")
# HTML that runs to the next empty line: tags of blocks, and any tag alone on a line.
_HTML = re.compile(
    r" {0,3}</?(?:(?:article|aside|blockquote|center|dd|details|div|dl|dt|figcaption|figure|footer|form|h[1-6]"
    r"|header|hr|iframe|li|main|nav|ol|p|section|source|summary|table|tbody|td|tfoot|th|thead|tr|ul)(?=[ \t/>]|$)"
    r"|[^<>]*>[ \t]*$)",
    re.IGNORECASE,
)
# HTML blocks in which a line of text begins nothing: how they begin and end.
_RAW = (
    (
        re.compile(r" {0,3}<(?:pre|script|style|textarea)(?=[ \t>]|$)", re.IGNORECASE),
        re.compile(r"</(?:pre|script|style|textarea)>", re.IGNORECASE),
    ),
    (re.compile(r" {0,3}<!--"), re.compile("-->")),
)
_HTML_HEADING = re.compile(r"(</?h)([1-6])(?=[ \t/>]|$)", re.IGNORECASE)
# Targets: of a link or picture, in the definition of a reference, and in HTML. Code is skipped.
_TARGETS = re.compile(
    r"(?P<code>`[^`]*`)"
    r"|(?P<link>\]\(\s{0,9}<?)(?P<target>[^\s()<>]+)(?=[>)]|[ \t]{1,9}[\"'(])"
    r"|(?P<definition>^ {0,3}\[[^\[\]]+\]:[ \t]{0,9}<?)(?P<defined>[^\s<>]+)"
    r"""|(?P<attribute>\b(?:src|href|poster)=["'])(?P<value>[^"'<>]*)""",
    re.IGNORECASE,
)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|[/#?]", re.IGNORECASE)
_MEDIA = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".avif", ".bmp", ".mp4", ".webm", ".mov", ".mp3", ".wav")


def source_section(text: str, level: int, repo: str | None, revision: str | None, files: Container[str]) -> str:
    """Prepare the text of a source's card for the card of an output.

    Headings get a lower level, all by the same number, so that none is above `level`; a text that has been prepared
    before stays as it is. Relative links and pictures lead to the source's repository, except for files that the output
    has too.

    Args:
        text: the text of README.md without metadata.
        level: the highest level that a heading may have, such as 3 for "###".
        repo: the source's repository, such as "org/name"; None if it is not known. Then links stay.
        revision: the source's commit; None for main.
        files: names of the files that the output has, relative to its directory.

    Returns:
        The text, without empty lines around it.
    """
    lines = list(_lines(text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").rstrip()))
    levels = [int(found) for line, is_code in lines if not is_code for found in _levels(line)]
    down = max(0, level - min(levels, default=level))

    def link(target: str) -> str:
        return target if repo is None else _in_repository(target, repo, revision, files)

    return "\n".join(line if is_code else _linked(_lowered(line, down), link) for line, is_code in lines)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a block of code or raw HTML. Underlined headings become "# Title"."""
    fence: str | None = None
    raw: re.Pattern[str] | None = None
    paragraph: list[str] = []
    # Whether an underline of dashes below the paragraph makes a heading, and not the end of a list.
    top, html = True, False
    for line in text.split("\n"):
        opening = None if fence or raw or html else _FENCE.match(line)
        if not (fence or raw or html):
            raw = next((end for start, end in _RAW if start.match(line)), None)
        underline = None if fence or raw or opening else _UNDERLINE.match(line)
        if underline and paragraph and (top or "=" in underline[1]):
            yield f"{'#' if '=' in underline[1] else '##'} {' '.join(map(str.strip, paragraph))}", False
            paragraph, top = [], True
            continue
        is_code, heading = bool(fence or raw or opening), _HEADING.match(line)
        html = not is_code and bool(line.strip()) and (html or (not paragraph and bool(_HTML.match(line))))
        ends = is_code or heading or not line.strip() or _RULE.match(line)
        if not ends and not html and (paragraph or not _NO_PARAGRAPH.match(line)):
            top = top and (bool(paragraph) or not line.startswith(" "))
            paragraph.append(line)
            continue
        yield from ((waiting, False) for waiting in paragraph)
        yield line, is_code
        paragraph, top = [], bool(ends)
        if opening:
            fence = opening[1]
        elif fence and re.fullmatch(rf" {{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*", line):
            fence = None
        elif raw and raw.search(line):
            raw = None
    yield from ((waiting, False) for waiting in paragraph)


def _levels(line: str) -> list[int]:
    heading = _HEADING.match(line)
    return [*([len(heading[2])] if heading else []), *(int(found[2]) for found in _HTML_HEADING.finditer(line))]


def _lowered(line: str, down: int) -> str:
    """Return a line with its headings that many levels lower; 6 is the lowest."""
    line = _HTML_HEADING.sub(lambda match: f"{match[1]}{min(6, int(match[2]) + down)}", line)
    return _HEADING.sub(lambda match: match[1] + "#" * min(6, len(match[2]) + down), line, count=1) if down else line


def _linked(line: str, link: Callable[[str], str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        before = match["link"] or match["definition"] or match["attribute"]
        return before + link(match["target"] or match["defined"] or match["value"])

    return _TARGETS.sub(replacement, line)


def _in_repository(target: str, repo: str, revision: str | None, files: Container[str]) -> str:
    """Return the address of what a relative target names: "https://huggingface.co/org/name/blob/main/LICENSE"."""
    mark = re.search(r"[?#]", target)
    path = target[: mark.start()] if mark else target
    name = posixpath.normpath(unquote(path))
    if not path or _ABSOLUTE.match(target) or name in files or name.startswith(".."):
        return target
    kind = "resolve" if name.lower().endswith(_MEDIA) else "tree" if path.endswith("/") else "blob"
    where = f"https://huggingface.co/{repo}/{kind}/{quote(revision or 'main', safe='')}"
    return f"{where}/{path.removeprefix('./')}{target[len(path) :]}"
