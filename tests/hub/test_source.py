"""Hub repositories, through the real client and a Hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import tree
from openquant import compress
from support import small_checkpoints
from support.hub_site import Site
from support.loopback_hub import COMMIT, LoopbackHub


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A Hub whose commands run in an empty directory."""
    with Site(tmp_path / "site", token=None) as found:
        found.cwd = tmp_path / "here"
        found.cwd.mkdir()
        yield found


@pytest.fixture
def hub(site: Site) -> LoopbackHub:
    return site.hub


@pytest.fixture
def repository(hub: LoopbackHub, tmp_path: Path) -> Path:
    root = small_checkpoints.write(tmp_path / "repository", shards=2)
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    (root / "tokenizer.json").write_text("{}")
    (root / "pytorch_model.bin").write_bytes(b"never downloaded")
    (root / "original").mkdir()
    (root / "original" / "params.json").write_text("{}")
    hub.repositories["org/name"] = root
    return root


def test_a_repository_converts_as_its_files_would(
    site: Site, hub: LoopbackHub, repository: Path, tmp_path: Path
) -> None:
    done = site.works("compress", "-m", "org/name@v1", "--json")
    found = json.loads(done.stdout)
    assert (found["model"], found["revision"], found["output"]) == ("org/name@v1", COMMIT, "name-FP8")
    compress(repository, tmp_path / "local")
    here, local = tree(tmp_path / "here" / "name-FP8"), tree(tmp_path / "local")
    assert set(here) == set(local)
    assert {name for name in here if here[name] != local[name]} == {"README.md", ".openquant.json"}
    assert b"license: mit\nbase_model: org/name\nbase_model_relation: quantized\n" in here["README.md"]
    assert COMMIT.encode() in here["README.md"]
    assert not [path for path in hub.requests if "pytorch_model.bin" in path or "original" in path]
    # The second time everything comes from the cache, also without a network.
    site.works("compress", "-m", "org/name@v1", "-o", "again", "--json", HF_HUB_OFFLINE="1")
    assert tree(tmp_path / "here" / "again") == here


def test_a_local_directory_wins_and_needs_no_network(site: Site, hub: LoopbackHub, tmp_path: Path) -> None:
    small_checkpoints.write(tmp_path / "here" / "org" / "name")
    done = site.works("compress", "-m", "org/name", "--json")
    assert json.loads(done.stdout)["revision"] is None
    assert not hub.requests


LOG_IN, TYPED = "check the name; for a private repository run: hf auth login", "check the branch, tag or commit"
REFUSED = [
    (["org/missing"], "org/missing is neither a local directory nor a repository on the Hub", LOG_IN),
    (["org/name@v9"], "org/name has no revision v9", TYPED),
    (["org/name", "--revision", "v9"], "org/name has no revision v9", TYPED),
    (["org/gated"], "org/gated is gated",
     "accept its licence at https://huggingface.co/org/gated, then run: hf auth login"),
    (["org/name.Q4_K_M.gguf"], "org/name.Q4_K_M.gguf is no file",
     "check the path; GGUF files of a repository are downloaded first"),
    (["a/b/c"], "a/b/c does not exist, and is no Hub repository id either", "check the path"),
    (["https://huggingface.co/org/name"], "https://huggingface.co/org/name does not exist, and is no Hub repository id "
     "either", "did you mean org/name?"),
    (["https://hf.co/datasets/org/name"], "https://hf.co/datasets/org/name does not exist, and is no Hub repository id "
     "either", "check the path"),
]  # fmt: skip


def test_what_the_hub_refuses(subtests, site, hub, repository):
    hub.refuse["org/gated"] = (403, "GatedRepo")
    for words, message, hint in REFUSED:
        with subtests.test(words=words):
            done = site.ask("compress", "-m", *words)
            assert done.returncode == 2
            assert done.stderr.splitlines()[-2:] == [f"error: {message}", f"hint: {hint}"]
            assert "Traceback" not in done.stderr


def test_the_hub_cannot_be_reached(site: Site, repository: Path) -> None:
    message = "org/name is not a local directory, and the Hub cannot be reached for it"
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        done = site.ask("compress", "-m", "org/name", **settings)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-2] == f"error: {message}"


def test_a_dry_run_reads_headers_only(site: Site, hub: LoopbackHub, repository: Path, tmp_path: Path) -> None:
    done = site.works("compress", "-m", "org/name", "--dry-run", "--json")
    found = json.loads(done.stdout)
    expected = compress(repository, tmp_path / "local", dry_run=True)
    assert found["source_bytes"] == expected.source_bytes
    assert found["output_bytes"] == expected.output_bytes
    assert found["ignored_layers"] == expected.ignored_layers
    assert found["revision"] == COMMIT
    largest = max(path.stat().st_size for path in repository.glob("*.safetensors"))
    assert hub.sent < largest / 4
    assert not list((site.root / "hf").rglob("*.safetensors"))
    assert not list((tmp_path / "here").iterdir())
    # The run itself then fetches the rest, and the next dry run needs no network for it.
    site.works("compress", "-m", "org/name")
    again = site.works("compress", "-m", "org/name", "--dry-run", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout)["output_bytes"] == expected.output_bytes


NEEDLESS = ["demo.mp4", "model.nemo", "events.out.tfevents.1.host", "openvino_model.xml", "imatrix.dat"]
NEEDLESS += ["all.tar.gz", "train.log"]


def test_a_dry_run_fetches_what_the_plan_is_made_from(site, hub, repository, tmp_path):
    for name in NEEDLESS:
        (repository / name).write_bytes(b"x" * 1000)
    (repository / "vocab.txt.gz").write_bytes(b"read by some tokenizers")
    (repository / "figures").mkdir()
    (repository / "figures" / "shown.png").write_bytes(b"by the card")
    (repository / "README.md").write_text("![Shown](figures/shown.png)")
    done = site.works("compress", "-m", "org/name", "--dry-run")
    asked = {path.rpartition("/")[2] for path in hub.requests if "/resolve/" in path}
    shards = {path.name for path in repository.glob("*.safetensors")}
    assert asked == {"config.json", "model.safetensors.index.json", "README.md", *shards}
    left = ", ".join(sorted([*NEEDLESS, "original/", "pytorch_model.bin"]))
    assert f"\nleft out: {left}\n" in done.stdout
    others = ["README.md", "generation_config.json", "tokenizer.json", "vocab.txt.gz", "figures/shown.png"]
    assert "\ndownload: " in done.stdout
    # The run itself fetches those, and says the same of the rest.
    done = site.works("compress", "-m", "org/name")
    assert f"\nleft out: {left}\n" in done.stdout
    assert not [path for path in hub.requests for name in NEEDLESS if path.endswith(f"/{name}")]
    out = tmp_path / "here" / "name-FP8"
    for name in set(others) - {"README.md"}:
        assert (out / name).read_bytes() == (repository / name).read_bytes()
    assert not [name for name in NEEDLESS if (out / name).exists()]
    # From the cache too.
    again = site.works("compress", "-m", "org/name", "--dry-run", HF_HUB_OFFLINE="1")
    assert f"\nleft out: {left}\n" in again.stdout
    assert "download:" not in again.stdout


def test_what_the_cache_lacks_is_not_left_out_without_a_network(site, hub, repository, tmp_path):
    site.works("compress", "-m", "org/name")
    (tokenizer,) = (site.root / "hf").rglob("snapshots/*/tokenizer.json")
    tokenizer.unlink()
    done = site.ask("compress", "-m", "org/name", "-o", "again", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: org/name is not a local directory, and the Hub cannot be reached for it\n")
