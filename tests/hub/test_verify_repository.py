"""`verify` of repositories on the Hub: it says what it says of the same files in a directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from openquant import compress
from support import small_checkpoints
from support.evaluation_files import evaluate
from support.loopback_hub import COMMIT, LoopbackHub


def verify(hub: LoopbackHub, tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-m", "openquant", "verify", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        cwd=tmp_path,
    )


def test_repositories_are_verified_as_directories_are(tmp_path: Path) -> None:
    source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=3)
    compress(source, tmp_path / "out", "channel")
    # A repository has one too. Files in the Hub's cache are links.
    (tmp_path / "out" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    evaluate(tmp_path / "out")
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories |= {"org/source": source, "org/out": tmp_path / "out"}
        told = verify(hub, tmp_path, "org/out", "--source", "org/source", "--full", "--json", "--report", "page.html")
        here = verify(hub, tmp_path, "out", "--source", "source", "--full", "--json")
        again = verify(hub, tmp_path, f"org/out@{COMMIT}", "--report", "page.html")
    assert told.returncode == 0, told.stdout
    found, expected = json.loads(told.stdout), json.loads(here.stdout)
    assert (found["problems"], found["notes"]) == ([], [])
    same = {key: value for key, value in expected.items() if key not in ("directory", "source", "seconds")}
    assert {key: value for key, value in found.items() if key in same} == same
    assert (found["directory"], found["source"]) == ("org/out", "org/source")
    assert "org/out" not in here.stdout
    # All of it lies in the cache now.
    assert (again.returncode, again.stderr) == (0, "")
    assert f"<title>out@{COMMIT}" in (tmp_path / "page.html").read_text()


def test_it_says_what_it_downloads_and_finds_what_is_wrong(tmp_path: Path) -> None:
    compress(small_checkpoints.write(tmp_path / "source"), tmp_path / "out")
    with open(tmp_path / "out" / "config.json") as file:
        config = json.load(file)
    config["quantization_config"]["activation_scheme"] = "static"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/out"] = tmp_path / "out"
        done = verify(hub, tmp_path, "org/out")
        absent = verify(hub, tmp_path, "org/absent")
    assert done.returncode == 1
    assert "static" in done.stdout
    line = done.stderr.splitlines()[0]
    assert line.startswith("downloading ") and line.endswith(f" bytes of org/out@{COMMIT} to the Hub's cache")
    assert absent.returncode == 2
    assert absent.stderr.startswith("error: ")


def test_a_name_that_is_neither(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, name in enumerate(["nowhere/at/all", "a b"]):
        with subtests.test(name=name):
            here = tmp_path / str(number)
            here.mkdir()
            with LoopbackHub(here / "hub") as hub:
                done = verify(hub, here, name)
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: {name} does not exist, and is no Hub repository id either\n")


def test_a_repository_whose_model_is_in_a_pull_request_has_none_on_main(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories["org/empty"] = tmp_path / "empty"
        told = verify(hub, tmp_path, "org/empty")
    assert told.returncode == 2
    assert told.stderr.endswith(
        "error: org/empty holds no model: it has no config.json\n"
        "hint: check the name; that of an open pull request is org/empty@refs/pr/1\n"
    )
