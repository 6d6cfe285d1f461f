"""A run whose machine is gone continues from a branch of the target repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conftest import tree
from openquant import compress
from support import forked_ranks, small_checkpoints
from support.forked_ranks import COMMANDS, Rank, finish
from support.loopback_hub import Fault, LoopbackHub

TOKEN = "hf_secretsecret"
SHARDS = 5
# Without the first line, what was uploaded is committed once a minute.
EACH_SHARD = """
import openquant.hub.publish as publish; publish.SAVE_EVERY = 0.0
"""
OPENQUANT = """
import os, sys
from openquant.cli.start import main
os.chdir({folder!r})
sys.exit(main())
"""


@pytest.fixture(scope="module", autouse=True)
def forks():
    with forked_ranks.forks(preloaded=COMMANDS):
        yield


@pytest.fixture
def hub(tmp_path):
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as server:
        server.repositories["org/name"] = small_checkpoints.write(
            tmp_path / "source", "Qwen3MoeForCausalLM", shards=SHARDS
        )
        yield server


def run(hub: LoopbackHub, tmp_path: Path, machine: str, *more: str, before: str = EACH_SHARD):
    """compress on a machine of its own: nothing on disk is shared with others."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / machine / "hf"), "HF_HUB_DISABLE_XET": "1"}
    words = [
        "compress",
        "-m",
        "org/name",
        "-o",
        tmp_path / machine / "out",
        "--stream",
        "--push-only",
        "--workers",
        "1",
    ]
    words = [str(word) for word in (*words, "--push-to-hub", "name-FP8", *more)]
    environment = {**os.environ, **settings, "HF_TOKEN": TOKEN}
    return finish(Rank(words, environment, before + OPENQUANT.format(folder=str(tmp_path))))


def branches(hub: LoopbackHub, repo: str = "user/name-FP8") -> list[str]:
    return sorted(name for name in hub.stored[repo]["refs"] if name != "main")


def shards(hub: LoopbackHub, repo: str = "user/name-FP8", rev: str = "main") -> dict[str, bytes]:
    files = hub.files(repo, rev)
    return {name: path.read_bytes() for name, path in files.items() if name.endswith(".safetensors")}


def planned_disk(hub: LoopbackHub, tmp_path: Path) -> int:
    """The disk space that a dry run says another machine needs."""
    done = run(hub, tmp_path, "second", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["disk_bytes"])


def stopped(hub: LoopbackHub, tmp_path: Path, after: int = 3, *more: str) -> None:
    """Run it until uploads fail for good; the machine is then gone."""
    hub.faults.append(Fault(r"/lfs/", "PUT", after=after, times=None, status=403))
    done = run(hub, tmp_path, "first", *more)
    assert done.returncode == 2, done.stderr
    assert "403" in done.stderr, done.stderr
    hub.faults.clear()


def test_another_machine_continues(hub, tmp_path):
    compress(tmp_path / "source", tmp_path / "expected")
    whole = planned_disk(hub, tmp_path)
    stopped(hub, tmp_path)
    (branch,) = branches(hub)
    assert list(shards(hub, rev=branch)) == [f"model-0000{number}-of-00005.safetensors" for number in (1, 2, 3)]
    assert shards(hub) == {}
    # Two shards are left, of which three would be there at a time.
    assert planned_disk(hub, tmp_path) < whole - 100_000
    done = run(hub, tmp_path, "second")
    assert done.returncode == 0, done.stderr
    assert "continuing: 6" in done.stderr
    # Nothing was uploaded twice.
    assert set(hub.uploads.values()) == {1}
    expected = {name: data for name, data in tree(tmp_path / "expected").items() if name.endswith(".safetensors")}
    assert shards(hub) == expected
    assert branches(hub) == []
    assert len(hub.commits("user/name-FP8")) == 2


def test_other_options_take_nothing_of_it(hub, tmp_path):
    stopped(hub, tmp_path)
    done = run(hub, tmp_path, "second", "--scheme", "channel")
    assert done.returncode == 0, done.stderr
    assert "continuing" not in done.stderr
    compress(tmp_path / "source", tmp_path / "expected", "channel")
    expected = {name: data for name, data in tree(tmp_path / "expected").items() if name.endswith(".safetensors")}
    assert shards(hub) == expected
    assert len(branches(hub)) == 1  # that of the first run


@pytest.mark.parametrize(
    "record",
    [
        "not JSON",
        json.dumps({"model-00001-of-00005.safetensors": {"size": 1, "sha256": "../x", "sample": ""}}),
        json.dumps({"model-00001-of-00005.safetensors": {"size": 1, "sha256": "0" * 64, "sample": "x"}}),
    ],
)
def test_a_branch_that_says_something_else_counts_for_nothing(hub, tmp_path, record):
    stopped(hub, tmp_path)
    (branch,) = branches(hub)
    hub.commit("user/name-FP8", branch, "x", {"openquant-progress.json": hub.store(record.encode())}, [])
    done = run(hub, tmp_path, "second")
    assert done.returncode == 0, done.stderr
    assert "continuing" not in done.stderr
    assert len(shards(hub)) == SHARDS


def test_uploads_that_the_hub_has_lost_are_made_again(hub, tmp_path):
    stopped(hub, tmp_path)
    first = hub.files("user/name-FP8", branches(hub)[0])["model-00001-of-00005.safetensors"]
    first.unlink()
    lost = run(hub, tmp_path, "second")
    assert lost.returncode == 2
    assert "no longer has the upload" in lost.stderr
    assert branches(hub) == []
    assert run(hub, tmp_path, "third").returncode == 0
    assert len(shards(hub)) == SHARDS


def test_overwrite_begins_anew(hub, tmp_path):
    stopped(hub, tmp_path)
    done = run(hub, tmp_path, "second", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "continuing" not in done.stderr
    assert len(shards(hub)) == SHARDS


def test_a_pull_request_needs_no_branch(hub, tmp_path):
    """Who opens one may have no right to make branches."""
    done = run(hub, tmp_path, "first", "--create-pr")
    assert done.returncode == 0, done.stderr
    assert branches(hub) == ["refs/pr/1"]


def test_a_push_goes_on_where_no_branch_may_be_made(hub, tmp_path):
    hub.faults.append(Fault(r"/branch/", "POST", times=None, status=403))
    done = run(hub, tmp_path, "first")
    assert done.returncode == 0, done.stderr
    assert len(shards(hub)) == SHARDS
    assert branches(hub) == []


def test_a_short_run_makes_no_branch(hub, tmp_path):
    done = run(hub, tmp_path, "first", before="")
    assert done.returncode == 0, done.stderr
    assert not [path for path in hub.requests if "/branch/" in path]
