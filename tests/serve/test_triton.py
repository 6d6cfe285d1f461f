"""GPTQ's kernel for GPUs, where there is none: Triton's interpreter runs it, and its compiler takes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from engine_client import HERE, find_engine

from conftest import ROOT

pytestmark = pytest.mark.serve


@pytest.mark.parametrize("interpreted, count", [("1", 4), ("0", 2)])
def test_gptqs_kernel(tmp_path: Path, interpreted: str, count: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment |= {"TRITON_INTERPRET": interpreted}
    command = [find_engine().python, HERE / "triton_kernel.py"]
    printed = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
    assert [line.rpartition(" ")[2] for line in printed.splitlines()] == ["True"] * count
