"""The documents: short enough to be read, and every link of theirs leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import ROOT
from openquant.formats.names import SCHEME_NAMES

DOCUMENTS = sorted(
    path for place in (".", "docs", "docs/decisions", "benchmarks", "tests/*") for path in ROOT.glob(f"{place}/*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """The headings as links name them: '## What stays, and why' is 'what-stays-and-why'."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short_and_leads_to_all_other_documents() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    linked = {link.partition("#")[0] for link in LINK.findall(text)}
    others = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert {str(path.relative_to(ROOT)) for path in others} - {"README.md"} <= linked


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {
        name
        for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
        for name in row[1:-1].split("`, `")
    }
    package = ROOT / "openquant"
    found = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    assert found - {"__init__", "__main__"} == rooms


def test_the_readme_has_the_commands_that_ci_types() -> None:
    """`.ci/run` reads the second out of it; without it nothing is tested, and it fails."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "pip install -e . && python compress_fp8.py -m examples/tiny-qwen3" in lines
    assert "pip install -e '.[test]' && python -m pytest" in lines


def test_who_chooses_is_told_what_was_measured() -> None:
    """The table to choose by has every scheme, with the divergence of the table that benchmarks/schemes.py printed."""

    def rows(name: str) -> dict[str, str]:
        return dict(
            re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d+\.\d+)", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        )

    measured = {scheme: f"{float(kl):.4f}" for scheme, kl in rows("evaluation.md").items()}
    assert rows("formats.md") == measured
    assert set(measured) == set(SCHEME_NAMES)
