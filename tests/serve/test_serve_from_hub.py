"""What was pushed is served by its repository's name, from the Hub it was pushed to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_client import complete, find_engine

from conftest import EXAMPLE, ROOT, tree
from support import starting
from support.loopback_hub import LoopbackHub

pytestmark = pytest.mark.serve


def test_a_pushed_repository_is_served_by_its_name(tmp_path: Path) -> None:
    engine = find_engine()
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/tiny-qwen3"] = EXAMPLE
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_x"}
        words = [
            ROOT / "compress_fp8.py",
            "-m",
            "org/tiny-qwen3",
            "-o",
            tmp_path / "out",
            "--stream",
            "--push-only",
            "-q",
        ]
        words += ["--push-to-hub", "user/tiny-qwen3-FP8"]
        environment = {**os.environ, **settings, "HF_HOME": str(tmp_path / "mine")}
        done = starting.run(words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert not list((tmp_path / "out").glob("*.safetensors"))
        theirs = {**settings, "HF_HOME": str(tmp_path / "theirs"), "HF_HUB_OFFLINE": "0"}
        with engine.serve("user/tiny-qwen3-FP8", tmp_path / "log", shim=True, **theirs) as address:
            answer = complete(address, "user/tiny-qwen3-FP8", "import os\n\ndef main(")
        assert answer["usage"]["completion_tokens"] == 8
        fetched = next((tmp_path / "theirs").rglob("snapshots/*"))
        pushed = {name: path.read_bytes() for name, path in hub.files("user/tiny-qwen3-FP8").items()}
    assert {name: data for name, data in tree(fetched).items() if name.endswith(".safetensors")} == {
        name: data for name, data in pushed.items() if name.endswith(".safetensors")
    }
