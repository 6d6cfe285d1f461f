"""An evaluation whose source is a repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import EXAMPLE, ROOT
from openquant import compress
from support.loopback_hub import LoopbackHub


def test_a_source_comes_from_the_hub(tmp_path: Path) -> None:
    output = compress(EXAMPLE, tmp_path / "out", "block").output
    (tmp_path / "prompts").write_text("import\n")
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/name"] = shutil.copytree(EXAMPLE, tmp_path / "repository")
        settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        words = ["eval", output, "--source", "org/name", "--samples", "2", "--length", "32", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "openquant", *words, "--prompts", str(tmp_path / "prompts")],
            cwd=tmp_path,
            env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert not re.search("error|warning|Traceback", done.stderr, re.IGNORECASE)
    found = json.loads(done.stdout)
    assert found["source"]["name"] == "org/name"
    assert (found["outputs"][0]["verdict"], found["outputs"][0]["suspects"]) == ("close", [])
