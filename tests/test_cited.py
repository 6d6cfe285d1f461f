"""One table says which versions of engines comments, documents and messages speak of: CITED in openquant/version.py."""

import re
import subprocess
from pathlib import Path

import pytest
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


def test_the_name_that_the_engine_asks_for_has_its_version() -> None:
    """`vllm serve` looks for a package vllm, which the CPU build's wheel is not called."""
    (found,) = (ROOT / "tests" / "serve" / "metadata").iterdir()
    assert found.name == f"vllm-{CITED['vLLM']}+cpu.dist-info"
    assert f"Version: {CITED['vLLM']}+cpu\n" in (found / "METADATA").read_text()


def test_the_script_installs_that_version(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Its first lines, before it makes an environment."""
    for name in ("vLLM", "SGLang"):
        with subtests.test(name):
            path = ROOT / "tests" / "serve" / f"install_{name.lower()}.sh"
            head = path.read_text().split("\n\n")[0]
            script = f"{head.replace('$0', str(path))}\necho $version"
            command = ["bash", "-c", script, "bash", str(tmp_path / name)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            assert ran.stdout == f"{CITED[name]}\n"
