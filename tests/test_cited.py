"""One table says which versions of engines comments, documents and messages speak of: CITED in openquant/version.py."""

import re

from packaging.requirements import Requirement

from conftest import ROOT
from openquant.version import CITED

NAMED = re.compile(
    "|".join(
        # "from transformers 5.24 on" stays true.
        rf"\b{name}(?:'s)?[\s#]+{re.escape(version)}(?![\d.]*\d| on\b| and later)"
        for name, version in CITED.items()
    )
)
SPEAKING = sorted([*(ROOT / "openquant").rglob("*.py"), *(ROOT / "docs").glob("*.md")])


def test_nothing_else_names_a_version_of_the_table() -> None:
    """Else it would speak of an older one after the next release, and nobody would have looked at it."""
    assert {path.name: found for path in SPEAKING if (found := NAMED.findall(path.read_text()))} == {}


def test_a_version_is_found_after_a_name_and_across_lines() -> None:
    named = f"vLLM {CITED['vLLM']}, # vLLM\n# {CITED['vLLM']}; SGLang {CITED['SGLang']}.1, transformers 4.23"
    assert NAMED.findall(named) == [f"vLLM {CITED['vLLM']}", f"vLLM\n# {CITED['vLLM']}"]


def test_the_readme_says_which_versions_it_means() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("vLLM", "SGLang"):
        assert re.findall(rf"\b{name} ([\d.]+\d)", text) == [CITED[name]]


def test_the_engine_is_one_that_the_extra_installs() -> None:
    extra = re.search(r'^serve = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra
    assert CITED["vLLM"] in Requirement(extra[1]).specifier
