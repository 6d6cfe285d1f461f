"""A repository is calibrated through a few shards of disk, and gives the bytes that a directory does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import EXAMPLE, ROOT
from loopback_hub import LoopbackHub
from openquant import calibrate, compress

WORDS = ("--samples", "2", "--length", "32")


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_repository_gives_the_bytes_of_a_directory(tmp_path: Path, stream: tuple[str, ...]) -> None:
    expected = calibrate(EXAMPLE, tmp_path / "expected", samples=2, length=32)
    here = tmp_path / "here"
    here.mkdir()
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = EXAMPLE
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}

        def run(*words: object) -> None:
            command = [sys.executable, "-m", "openquant", *map(str, words)]
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, env=environment)
            assert done.returncode == 0, done.stderr

        run("calibrate", "org/name", *WORDS, *stream, "--scratch", tmp_path)
        assert [path.name for path in here.iterdir()] == ["name.calibration.safetensors"]
        assert (here / "name.calibration.safetensors").read_bytes() == expected.read_bytes()
        # What is converted from there is the model that was calibrated.
        static = ("--activation-scheme", "static", "--calibration", "name.calibration.safetensors")
        run("compress", "-m", "org/name", "-o", "out", *static, *stream)
    assert bool(list((tmp_path / "hf").rglob("*.safetensors"))) == (not stream)
    assert not list(tmp_path.glob(".openquant-*"))
    compress(EXAMPLE, tmp_path / "local", activation_scheme="static", calibration=expected)
    for path in (tmp_path / "local").glob("*.safetensors"):
        assert path.read_bytes() == (here / "out" / path.name).read_bytes()
