"""The documents: short enough to be read, and every link of theirs leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import docs_site
import openquant
from conftest import ROOT
from openquant.cli.arguments import verb_parser
from openquant.formats.hardware import SCHEME_NAMES

DOCUMENTS = sorted(
    path for place in (".", "docs", "docs/*", "benchmarks", "tests/*") for path in ROOT.glob(f"{place}/*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """The headings as links name them: '## What stays, and why' is 'what-stays-and-why'."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    for document in DOCUMENTS:
        with subtests.test(document=document):
            for link in LINK.findall(document.read_text()):
                if link.startswith("https://"):
                    continue
                path, _, anchor = link.partition("#")
                target = (document.parent / path).resolve() if path else document
                assert target.exists(), link
                assert not anchor or anchor in anchors(target), link


def linked(document: Path) -> set[Path]:
    """What a document leads to."""
    links = LINK.findall(document.read_text())
    return {(document.parent / link.partition("#")[0]).resolve() for link in links if "://" not in link}


def words(document: Path) -> int:
    """The words of a document, without blocks of code."""
    return len(re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL).split())


def cells(document: Path) -> int:
    """The lines between the cells of its tables, which `words` counts."""
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL).split().count("|")


def test_the_documents_are_short() -> None:
    assert words(ROOT / "README.md") <= 520
    assert sum(words(path) for path in ROOT.glob("docs/**/*.md")) <= 32_000
    # Of a table its words count, and not the lines between its cells.
    long = {path.name for path in ROOT.glob("docs/**/*.md") if words(path) - cells(path) > 1500}
    assert long == set()


def test_the_readme_is_short_and_leads_to_all_other_documents() -> None:
    """By itself, by the first page of the site, or by the list of all pages that this links to."""
    readme, home, pages = ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "pages.md"
    assert len(readme.read_text().splitlines()) < 120
    assert home in linked(readme) and pages in linked(home)
    others = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")} - {readme, home}
    assert others <= linked(readme) | linked(home) | linked(pages)


def test_the_site_has_every_document() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = set(re.findall(r"[\w/.-]+\.md\b", nav))
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    elsewhere = {f"project/{name}" for name in docs_site.ELSEWHERE}
    assert named == documents | elsewhere | {"reference/command-line.md", "reference/python.md"}
    assert all((ROOT / name).is_file() for name in docs_site.ELSEWHERE)


def test_links_of_the_site_lead_to_pages() -> None:
    text = "[a](../formats.md#int4) ![b](../results.png) [c](../../README.md#more) [d](../../tests/conftest.py)"
    text += " [e](https://x.y/z.md) [f](#here)\n```\n[g](../formats.md)\n```\n[h](../decisions.md)"
    assert docs_site.rewrite(text, "how-to/serve.md") == (
        "[a](../formats.md#int4) ![b](../results.png) [c](../project/README.md#more) d"
        " [e](https://x.y/z.md) [f](#here)\n```\n[g](../formats.md)\n```\n[h](../decisions.md)"
    )
    text = "[a](docs/fit.md) [b](benchmarks/README.md)"
    assert docs_site.rewrite(text, "project/README.md") == "[a](../fit.md) [b](benchmarks/README.md)"


def test_the_reference_of_the_site_has_every_option_and_name() -> None:
    text = docs_site.command_line()
    (verbs,) = (action for action in verb_parser()._actions if action.dest == "verb")
    sections = dict(zip(*[iter(re.split(r"^## (\w+)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert sections.keys() == verbs.choices.keys()
    for name, parser in verbs.choices.items():
        assert [flag for flag in parser._option_string_actions if f"`{flag}" not in sections[name]] in (
            [],
            ["--help-all"],
        )
    # All of the help, and the default, which --help shows after the first sentence.
    assert re.search(r"^\| `--length N` \| .*\(default: 512\) \|$", text, re.MULTILINE)
    assert "Each file is one domain." in sections["eval"]
    assert set(re.findall(r"^::: openquant\.(\w+)$", docs_site.python(), re.MULTILINE)) == {
        name for name in openquant.__all__ if not name.startswith("__")
    }


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {
        name
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
        for name in row[1:-1].split("`, `")
    }
    package = ROOT / "openquant"
    found = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    # A build writes _version.
    assert found - {"__init__", "__main__", "_version"} == rooms


def test_the_readme_has_the_commands_that_ci_types() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "pip install -e . && python compress_fp8.py -m examples/tiny-qwen3" in lines
    assert "pip install -e '.[test]' && python -m pytest" in lines


def test_who_chooses_is_told_what_was_measured() -> None:
    """The table to choose by has every scheme, with the divergence of the table that benchmarks/schemes.py printed."""

    def rows(name: str) -> dict[str, str]:
        return dict(
            re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d+\.\d+)", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        )

    measured = {scheme: f"{float(kl):.4f}" for scheme, kl in rows("results.md").items()}
    assert rows("formats.md") == measured
    assert set(measured) == set(SCHEME_NAMES)
