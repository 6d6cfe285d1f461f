"""A diagnosis of a repository: what is on disk meanwhile, and that it says what it says of the files themselves."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from openquant import diagnose
from openquant.distributed import Ranks
from openquant.errors import OutputError, SourceError, UsageError
from openquant.files.checkpoint import Checkpoint, Fingerprint
from openquant.hub.error_mapping import Unreachable
from openquant.hub.source import ShardSupply, Source, supply_shards
from openquant.streaming.session import ArrivingShards
from support import small_checkpoints
from support.hub_site import Site
from support.loopback_hub import COMMIT

SHARDS = 6


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A Hub with a repository, whose commands run in an empty directory."""
    with Site(tmp_path / "site", token=None) as found:
        small_checkpoints.write(found.source, "Qwen3MoeForCausalLM", shards=SHARDS)
        found.hub.repositories["org/name"] = found.source
        found.cwd = tmp_path / "here"
        found.cwd.mkdir()
        yield found


def test_it_says_what_it_says_of_the_files(site: Site) -> None:
    expected = json.loads(json.dumps(diagnose(site.source).to_json()))
    for mode in ((), ("--stream",)):
        home = site.root / f"hf{len(mode)}"
        done = site.works("diagnose", "org/name", "--json", *mode, HF_HOME=str(home))
        assert done.stderr == ""
        assert json.loads(done.stdout) == {**expected, "model": "org/name", "revision": COMMIT}
        assert len(list(home.rglob("snapshots/*/*.safetensors"))) == (0 if mode else SHARDS)
        assert list(site.cwd.iterdir()) == []


def test_no_space_for_shards(tmp_path: Path) -> None:
    class Shard:
        size = 10**18

    source = Source(tmp_path, "name", "org/name", COMMIT, {"a": Shard()})  # type: ignore[dict-item]
    with pytest.raises(UsageError) as caught, supply_shards([(source, {"a": ["a"]})], True, tmp_path):
        pass
    assert caught.value.message.startswith(f"{tmp_path} needs 1,000,000,000,000,000,000 bytes for shards that come and")
    assert caught.value.hint == "name a directory on a larger one with --scratch"
    assert list(tmp_path.iterdir()) == []


class Shard:
    """A shard that the client downloads once it may."""

    def __init__(self, data: bytes, held: bool = False) -> None:
        self.data, self.size, self.digest = data, len(data), sha256(data).hexdigest()
        self.may, self.asked = threading.Event(), threading.Event()
        if not held:
            self.may.set()


NewSource = Callable[[dict[str, Shard]], Source]


@pytest.fixture
def new_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewSource:
    """Makes a repository of shards."""

    def make(shards: dict[str, Shard]) -> Source:
        def download(_: str, name: str, *, local_dir: Path, **__: object) -> str:
            shard = shards[name]
            shard.asked.set()
            assert shard.may.wait(30)
            (local_dir / name).write_bytes(shard.data)
            return str(local_dir / name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return Source(tmp_path, "name", "org/name", COMMIT, shards)  # type: ignore[arg-type]

    return make


def arriving(supply: ShardSupply, ranks: Ranks | None = None) -> ArrivingShards:
    checkpoint = Checkpoint(Path(), {}, "", {}, {}, {}, {}, False, {}, ())
    fingerprint = Fingerprint(checkpoint, commit=f"org/name@{COMMIT}")
    return ArrivingShards(supply, supply.needs, "org/name", fingerprint, ranks or Ranks(), hashes=False)


def test_units_of_a_tower_are_passed_over_and_none_comes_twice(new_source: NewSource, tmp_path: Path) -> None:
    names = ["rest", "embedding", *(f"tower {number}" for number in range(6)), "layer 0", "layer 1"]
    shards = {name: Shard(name.encode()) for name in names}
    source = new_source(shards)
    with supply_shards([(source, {name: [name] for name in names})], True, tmp_path) as [supply]:
        traffic = arriving(supply)
        for name in ("rest", "embedding", "layer 0"):
            traffic.wait_for(name, lambda: False)
            assert traffic.path(name).read_bytes() == name.encode()
            traffic.release(name)
            # As at the end, when all is given back once more.
            traffic.release(name)
        for name in ("embedding", "tower 0", "layer 0"):
            with pytest.raises(SourceError) as caught:
                traffic.wait_for(name, lambda: False)
            message = f"org/name computes {name} twice or out of order, and its shards were deleted"
            assert (caught.value.message, caught.value.hint) == (message, "leave --stream out")
        traffic.wait_for("layer 1", lambda: False)
    assert not any(shards[f"tower {number}"].asked.is_set() for number in range(2, 6))


def test_downloads_end_with_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, calls = threading.Event(), []
    source = Source(tmp_path, "name", "org/name", COMMIT, {"a": Shard(b"a")})  # type: ignore[dict-item]

    def advance(*_: object, tqdm_class: Any, **__: object) -> str:
        bar = tqdm_class(total=1000)
        for _ in range(1000):
            bar.update(1)
            calls.append("advance")
            begun.set()
            time.sleep(0.01)
        raise AssertionError("it went on")

    def fail(*_: object, **__: object) -> str:
        calls.append("fail")
        begun.set()
        raise Unreachable("the Hub cannot be reached", "check the network")

    for download, most in ((advance, 100), (fail, 1)):
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        with supply_shards([(source, {"a": ["a"]})], True, tmp_path):
            assert begun.wait(30)
        assert 1 <= len(calls) <= most, calls[0]
        begun.clear()
        calls.clear()


def test_several_sources_share_a_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    half = SimpleNamespace(size=free // 2 + (1 << 30))
    source = Source(tmp_path, "name", "org/name", COMMIT, {"a": half})  # type: ignore[dict-item]
    sources = [(source, {"a": ["a"]})] * 2
    with pytest.raises(UsageError, match="bytes for shards that come and go"), supply_shards(sources, True, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


class Broken(Ranks):
    """Ranks of which another has died."""

    def check(self) -> None:
        raise OutputError("rank 1 died", "run the same command again")


def test_who_waits_for_a_shard_hears_of_other_ranks(new_source: NewSource, tmp_path: Path) -> None:
    shard = Shard(b"a", held=True)
    source = new_source({"a": shard})
    with supply_shards([(source, {"a": ["a"]})], True, tmp_path) as [supply]:
        with pytest.raises(OutputError) as caught:
            arriving(supply, Broken()).wait_for("a", lambda: False)
        shard.may.set()
    assert (caught.value.message, caught.value.hint) == ("rank 1 died", "run the same command again")
