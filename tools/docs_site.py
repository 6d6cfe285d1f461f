"""What `mkdocs build` adds to docs/: documents that lie elsewhere, and reference pages that are made from the code.

mkdocs.yml names this module as a hook. The documents are written for readers of the repository, so their links lead to
files. A link to a document becomes one to its page; a link to code or tests becomes plain text.
"""

from __future__ import annotations

import functools
import posixpath
import re
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Documents outside of docs/, which stand under project/ in the site.
ELSEWHERE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SKILL.md", "benchmarks/README.md")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents that lie elsewhere, and the pages that are made."""
    from mkdocs.structure.files import File

    for name in ELSEWHERE:
        files.append(File.generated(config, f"project/{name}", abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    files.append(File.generated(config, "reference/python.md", content=python()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages of the site."""
    return rewrite(markdown, page.file.src_uri)


def rewrite(markdown: str, uri: str) -> str:
    """Rewrite the links of a page, but for those in blocks of code.

    Args:
        markdown: its text.
        uri: the page, as the site has it: "how-to/serve.md", "project/README.md".
    """
    document = document_of(uri)

    def led(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, mark, anchor = link.partition("#")
        if not path or "://" in link or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
        page = page_of(target)
        if page is None:
            return text
        return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{mark}{anchor})"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(led, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(led, markdown[end:])])


def document_of(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return uri.removeprefix("project/") if uri.startswith("project/") else f"docs/{uri}"


def page_of(document: str) -> str | None:
    """The page or image of the site for a path in the repository; None if it has none."""
    if document in ELSEWHERE:
        return f"project/{document}"
    return document.removeprefix("docs/") if document.startswith("docs/") else None


def command_line() -> str:
    """The page of all commands and options, from their parsers."""
    import argparse

    from openquant.cli.arguments import verb_parser

    lines = ["# Command line", "", "Every command and option. [Commands and options](../options.md) explains them.", ""]
    (verbs,) = (action for action in verb_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in verbs.choices.items():
        lines += [f"## {name}", "", parser.description or "", "", "```"]
        lines += [parser.format_usage().removeprefix("usage: ").strip(), "```", ""]
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            if actions:
                lines += [f"| {group.title} | |", "|---|---|", *map(option_row, actions), ""]
        if parser.epilog:
            lines += ["```", parser.epilog, "```", ""]
    return "\n".join(lines)


def option_row(action: Any) -> str:
    """A row of a table: the names and value of an option, and its help."""
    value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
    names = ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{value.strip()}`"
    text = whole_helps().get(action.help, action.help)
    parts = re.split("(`[^`]*`)", text)
    text = "".join(part if part.startswith("`") else re.sub(r"([*_\[<|])", r"\\\1", part) for part in parts)
    return f"| {names} | {text} |"


@functools.cache
def whole_helps() -> dict[str, str]:
    """The whole text of each option, by the sentence that --help shows."""
    from openquant import fields, options
    from openquant.cli import arguments

    kinds = [
        kind for kind in (vars(options) | vars(arguments)).values() if isinstance(kind, type) and is_dataclass(kind)
    ]
    return {
        option.summary: option.help + (default and f" (default: {default}")
        for kind in kinds
        for option in fields.options_of(kind).values()
        for default in [option.summary.partition(" (default: ")[2] if "default" not in option.help else ""]
    }


def python() -> str:
    """The page of all public names, which mkdocstrings fills from their docstrings."""
    import openquant

    functions = [name for name in openquant.__all__ if name[0].islower()]
    classes = [name for name in openquant.__all__ if name[0].isupper()]
    lines = ["# Python", "", "```python", "import openquant", "```", ""]
    return "\n".join([*lines, *(f"::: openquant.{name}\n" for name in functions + classes)])
