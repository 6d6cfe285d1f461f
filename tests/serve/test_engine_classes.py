"""The committed list of what vLLM serves, which the quick tests go by, is the installed engine's."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from engine_client import find_engine

from support.published_checkpoints import lines_of

pytestmark = pytest.mark.serve

TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
# Found without running anything of it: importing vLLM takes half a minute.
WHERE = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"


def registered(source: str) -> list[str]:
    """The names in those tables of a registry's source, sorted."""
    found = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id in TABLES
    }
    return sorted({name for table in TABLES for name in found[table]})


def test_the_list_is_the_engines() -> None:
    ran = subprocess.run([find_engine().python, "-c", WHERE], capture_output=True, text=True, check=True)
    registry = Path(ran.stdout.strip()).parent / "model_executor" / "models" / "registry.py"
    assert lines_of("engine_classes.txt") == registered(registry.read_text())
