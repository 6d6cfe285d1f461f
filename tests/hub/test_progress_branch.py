"""A run whose machine is gone continues from a branch of the target repository."""

from __future__ import annotations

import json

import pytest

from conftest import tree
from openquant import compress
from support import forked_ranks, small_checkpoints
from support.forked_ranks import COMMANDS, finish
from support.hub_site import Site
from support.loopback_hub import Fault, LoopbackHub

SHARDS = 5
# Without this, what was uploaded is committed once a minute.
EACH_SHARD = "import openquant.hub.publish as publish; publish.SAVE_EVERY = 0.0"
STREAM = ("compress", "-m", "org/name", "--stream", "--push-only", "--workers", "1", "--push-to-hub", "name-FP8")


@pytest.fixture(scope="module", autouse=True)
def forks():
    with forked_ranks.forks(preloaded=COMMANDS):
        yield


@pytest.fixture
def site(tmp_path):
    with Site(tmp_path / "site") as found:
        source = small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=SHARDS)
        found.hub.repositories["org/name"] = source
        yield found


@pytest.fixture
def hub(site):
    return site.hub


def run(site: Site, machine: str, *more: str, before: str = EACH_SHARD):
    """compress on a machine of its own: nothing on disk is shared with others."""
    place = site.root / machine
    return finish(site.begin(*STREAM, "-o", place / "out", *more, before=before, HF_HOME=str(place / "hf")))


def branches(hub: LoopbackHub, repo: str = "user/name-FP8") -> list[str]:
    return sorted(name for name in hub.stored[repo]["refs"] if name != "main")


def shards(hub: LoopbackHub, repo: str = "user/name-FP8", rev: str = "main") -> dict[str, bytes]:
    files = hub.files(repo, rev)
    return {name: path.read_bytes() for name, path in files.items() if name.endswith(".safetensors")}


def completed(site: Site, *words: str, **options: str) -> str:
    """What is printed of a run that ends well."""
    done = run(site, *words, **options)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def planned_disk(site: Site) -> int:
    """The disk space that a dry run says another machine needs."""
    return int(json.loads(completed(site, "second", "--dry-run", "--json").splitlines()[-1])["disk_bytes"])


def stopped(site: Site, after: int = 3, *more: str) -> None:
    """Run it until uploads fail for good; the machine is then gone."""
    site.hub.faults.append(Fault(r"/lfs/", "PUT", after=after, times=None, status=403))
    done = run(site, "first", *more)
    assert done.returncode == 2, done.stderr
    assert "403" in done.stderr, done.stderr
    site.hub.faults.clear()


def test_another_machine_continues(site, hub, tmp_path):
    compress(tmp_path / "source", tmp_path / "expected")
    whole = planned_disk(site)
    stopped(site)
    (branch,) = branches(hub)
    assert list(shards(hub, rev=branch)) == [f"model-0000{number}-of-00005.safetensors" for number in (1, 2, 3)]
    assert shards(hub) == {}
    # Two shards are left, of which three would be there at a time.
    assert planned_disk(site) < whole - 100_000
    assert "continuing: 6" in completed(site, "second")
    # Nothing was uploaded twice.
    assert set(hub.uploads.values()) == {1}
    expected = {name: data for name, data in tree(tmp_path / "expected").items() if name.endswith(".safetensors")}
    assert shards(hub) == expected
    assert branches(hub) == []
    assert len(hub.commits("user/name-FP8")) == 2


def test_other_options_take_nothing_of_it(site, hub, tmp_path):
    stopped(site)
    assert "continuing" not in completed(site, "second", "--scheme", "channel")
    compress(tmp_path / "source", tmp_path / "expected", "channel")
    expected = {name: data for name, data in tree(tmp_path / "expected").items() if name.endswith(".safetensors")}
    assert shards(hub) == expected
    assert len(branches(hub)) == 1  # that of the first run


FIRST = "model-00001-of-00005.safetensors"


@pytest.mark.parametrize(
    "record",
    [
        "not JSON",
        json.dumps({FIRST: {"size": 1, "sha256": "../x", "sample": ""}}),
        json.dumps({FIRST: {"size": 1, "sha256": "0" * 64, "sample": "x"}}),
    ],
)
def test_a_branch_that_says_something_else_counts_for_nothing(site, hub, record):
    stopped(site)
    (branch,) = branches(hub)
    hub.commit("user/name-FP8", branch, "x", {"openquant-progress.json": hub.store(record.encode())}, [])
    assert "continuing" not in completed(site, "second")
    assert len(shards(hub)) == SHARDS


def test_uploads_that_the_hub_has_lost_are_made_again(site, hub, tmp_path):
    stopped(site)
    first = hub.files("user/name-FP8", branches(hub)[0])["model-00001-of-00005.safetensors"]
    first.unlink()
    lost = run(site, "second")
    assert lost.returncode == 2
    assert "no longer has the upload" in lost.stderr
    assert branches(hub) == []
    completed(site, "third")
    assert len(shards(hub)) == SHARDS


def test_overwrite_begins_anew(site, hub, tmp_path):
    stopped(site)
    assert "continuing" not in completed(site, "second", "--overwrite")
    assert len(shards(hub)) == SHARDS


def test_a_pull_request_needs_no_branch(site, hub, tmp_path):
    """Who opens one may have no right to make branches."""
    completed(site, "first", "--create-pr")
    assert branches(hub) == ["refs/pr/1"]


def test_a_push_goes_on_where_no_branch_may_be_made(site, hub, tmp_path):
    hub.faults.append(Fault(r"/branch/", "POST", times=None, status=403))
    completed(site, "first")
    assert len(shards(hub)) == SHARDS
    assert branches(hub) == []


def test_a_short_run_makes_no_branch(site, hub, tmp_path):
    completed(site, "first", before="")
    assert not [path for path in hub.requests if "/branch/" in path]
