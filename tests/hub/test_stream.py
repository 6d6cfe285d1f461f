"""From the Hub while it downloads: faults on the way, and what is on disk meanwhile."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import tree
from openquant import compress
from openquant.hub.source import HubFile, Source, memory_needed
from support import small_checkpoints
from support.hub_site import TOKEN, Site, without_origin
from support.loopback_hub import COMMIT, Fault
from support.starting import Command, finish

SHARDS = 6
INDEX = "model.safetensors.index.json"
MODES = {"cached": (), "streamed": ("--stream",)}
# Shard 3 of 6, where it is downloaded; headers are read by range before.
THIRD = "model-00003-of-00006.safetensors"
SHARD = rf"resolve/.*{THIRD}$"


class Here(Site):
    """A site whose Hub has the source as org/name, to everybody."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(root, model, token=None)
        self.hub.repositories["org/name"] = self.source

    def run(self, *more: object) -> list[object]:
        return ["compress", "-m", "org/name", "-o", self.out, *more]

    def same(self, local: Mapping[str, bytes]) -> bool:
        """Whether the output is what was written from the files themselves."""
        return without_origin(tree(self.out)) == without_origin(local)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = small_checkpoints.write(tmp_path_factory.mktemp("model") / "m", "Qwen3MoeForCausalLM", shards=SHARDS)
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return root


@pytest.fixture(scope="module")
def local(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run on the files themselves writes."""
    root = tmp_path_factory.mktemp("local")
    compress(model, root / "local")
    return tree(root / "local")


NewSite = Callable[..., Here]


@pytest.fixture
def new_site(model: Path, tmp_path: Path) -> NewSite:
    return lambda *name: Here(tmp_path / "-".join(map(str, name)), model)


@pytest.fixture
def site(new_site: NewSite) -> Iterator[Here]:
    with new_site("site") as found:
        yield found


def compressed(source: Path, to: Path, *words: str, **options: str) -> dict[str, bytes]:
    compress(source, to, *words, **options)  # type: ignore[arg-type]
    return tree(to)


def test_the_bytes_are_those_of_a_local_run(new_site: NewSite, subtests: pytest.Subtests) -> None:
    # Of nvfp4 one scale belongs to joined layers of several shards.
    for scheme, modes in (("tensor", [*MODES]), ("nvfp4", ["streamed"])):
        for mode, words in [(mode, MODES[mode]) for mode in modes]:
            with subtests.test(scheme=scheme, mode=mode), new_site(scheme, mode) as site:
                source = site.source
                found = json.loads(site.works(*site.run("--scheme", scheme, "--json", *words)).stdout)
                assert found["revision"] == COMMIT
                others = [*source.glob("*.safetensors"), source / "generation_config.json", source / "README.md"]
                assert found["download_bytes"] == sum(path.stat().st_size for path in others)
                assert site.same(compressed(source, site.root / "local", scheme))
                cached = list((site.root / "hf").rglob("snapshots/*/*.safetensors"))
                assert len(cached) == (0 if words else SHARDS)
                if scheme == "tensor" and not words:
                    # What the cache holds is not fetched again.
                    site.hub.requests.clear()
                    blocks = ("-w", "128", "-o", site.root / "blocks", "--stream", "--json")
                    assert json.loads(site.works(*site.run(*blocks)).stdout)["download_bytes"] == 0
                    assert not [path for path in site.hub.requests if ".safetensors" in path and "index" not in path]


def test_a_quantized_repository(site: Here, tmp_path: Path, subtests: pytest.Subtests) -> None:
    compress(site.source, tmp_path / "fp8", "block")
    weights = small_checkpoints.read(tmp_path / "fp8")
    root = small_checkpoints.write(tmp_path / "quantized", shards=SHARDS + 1, weights=weights)
    shutil.copy(tmp_path / "fp8" / "config.json", root)
    site.hub.repositories["org/name"] = root
    local = compressed(root, tmp_path / "local", "channel")
    for mode, words in MODES.items():
        with subtests.test(mode):
            site.out = site.root / mode
            site.works(*site.run("--scheme", "channel", *words))
            assert site.same(local)


def test_a_streamed_model_needs_a_few_shards_of_disk(site: Here, tmp_path: Path) -> None:
    """Whatever the number of shards: six of them, those of three outputs and two more (fetch.AT_ONCE and fetch.AHEAD)."""
    parts = ("up", "gate")
    weights = {f"model.layers.{n}.mlp.{part}_proj.weight": torch.ones(256, 256) for n in range(24) for part in parts}
    root = small_checkpoints.write(tmp_path / "repository", "Qwen3ForCausalLM", shards=24, weights=weights)
    site.hub.repositories["org/name"] = root
    largest = max(path.stat().st_size for path in root.glob("*.safetensors"))
    marks: list[int] = []

    def measure() -> None:
        """Files in that directory may be changing."""
        total = 0
        with suppress(FileNotFoundError):
            for path in (site.out / ".openquant" / "source-0").rglob("*"):
                with suppress(FileNotFoundError):
                    total += path.stat().st_size if path.is_file() else 0
        marks.append(total)

    site.hub.faults.append(Fault(r"\.safetensors$", "GET", times=None, call=measure))
    site.works(*site.run("--stream"))
    # Beside them lie small records of the client.
    assert 2 * largest < max(marks) <= 6 * largest + 10_000
    assert len(marks) >= 24
    assert not (site.out / ".openquant").exists()


ONCE = {"cut": Fault(SHARD, "GET", after=1, cut=1000), "short": Fault(SHARD, "GET", after=1, short=1000)}


def test_what_goes_wrong_once_does_not_show(new_site, local, subtests):
    for mode, (name, fault) in zip(MODES, ONCE.items(), strict=True):
        with subtests.test(mode=mode, fault=name), new_site(mode, name) as site:
            site.hub.faults.append(replace(fault))
            site.works(*site.run(*MODES[mode]))
            assert site.hub.faults[0].seen > fault.after
            assert site.same(local)

    # Nor does the client say what it tries again, where all is to be quiet.
    with new_site("quiet") as site:
        site.hub.faults.append(Fault(SHARD, "GET", status=503))
        done = site.fresh(*site.run("-q"))
        tokenizer = "note: the source has no tokenizer, which engines need: copy its files into the output\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, "", tokenizer)


def test_a_file_that_is_not_what_the_hub_says_is_named(new_site, model, monkeypatch, subtests):
    other = b"x" * (model / THIRD).stat().st_size
    faults = {
        "flipped": Fault(SHARD, "GET", after=1, times=None, flip=5000),
        "changed": Fault(SHARD, "GET", after=1, times=None, content=other),
    }
    said = f"error: {THIRD} did not arrive as org/name@{COMMIT} has it"
    for mode, (name, fault) in zip(MODES, faults.items(), strict=True):
        with subtests.test(mode=mode, fault=name), new_site(mode, name) as site:
            site.hub.faults.append(fault)
            error, _ = site.refused(*site.run(*MODES[mode]))
            assert error == said
            assert not (site.out / "config.json").exists()


def test_access_that_ends_on_the_way(new_site: NewSite, subtests: pytest.Subtests) -> None:
    gated = "accept its licence at https://huggingface.co/org/name, then run: hf auth login"
    log_in = "log in with a token that may read it: hf auth login"
    for mode, status, code, message, hint in (
        ("cached", 403, "GatedRepo", "org/name is gated", gated),
        ("streamed", 401, "", "the Hub refuses access to org/name", log_in),
    ):
        with subtests.test(mode=mode, status=status, code=code), new_site(mode, status, code) as site:
            site.hub.faults.append(Fault(SHARD, after=2, times=None, status=status, code=code))
            done = site.ask(*site.run(*MODES[mode]), HF_TOKEN=TOKEN)
            assert done.returncode == 2
            error, found = done.stderr.splitlines()[-2:]
            assert error.startswith(f"error: {message}")
            assert found == f"hint: {hint}"
            assert TOKEN not in done.stdout + done.stderr
            assert not [name for name, data in tree(site.out).items() if b"secret" in data]


def test_a_killed_run_continues(new_site: NewSite, local: dict[str, bytes], subtests: pytest.Subtests) -> None:
    for mode, words in MODES.items():
        with subtests.test(mode), new_site(mode) as site:
            processes: list[Command] = []
            begun = threading.Semaphore(0)

            def kill(begun: threading.Semaphore = begun, processes: list[Command] = processes) -> None:
                begun.acquire(timeout=60)
                processes[-1].kill()

            # The first run may have whole shards that it was not yet asked for.
            for number in (2, 6 if mode == "streamed" else 4):
                path = rf"resolve/.*model-0000{number}-of-00006\.safetensors$"
                site.hub.faults[:] = [Fault(path, "GET", after=1, cut=20_000, call=kill)]
                # Its shards arrive together, and the second kill needs one that did not arrive before the first.
                if number == 2:
                    later = r"resolve/.*model-00004-of-00006\.safetensors$"
                    site.hub.faults.append(Fault(later, "GET", after=1, cut=20_000, times=None))
                processes.append(site.begin(*site.run(*words)))
                begun.release()
                assert finish(processes[-1]).returncode == -signal.SIGKILL
                assert not (site.out / "config.json").exists()
            site.hub.faults.clear()
            site.works(*site.run(*words))
            assert site.same(local)
            assert not (site.out / ".openquant").exists()


def interrupted(site: Here, fault: Fault, *words: str) -> None:
    """A run that Ctrl-C ends while a request is being answered."""
    reached, release = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        release.wait(60)

    site.hub.faults.append(replace(fault, call=hang))
    process = site.begin(*site.run(*words))
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    stopped = finish(process)
    # The client itself gives up after ten seconds.
    assert time.monotonic() - begun < 9
    release.set()
    site.hub.faults.clear()
    assert stopped.returncode == 130
    assert stopped.stderr.splitlines()[-2:] == ["error: interrupted", "hint: run the same command again to continue"]


def test_ctrl_c_does_not_wait_for_a_download(new_site, local, subtests):
    moments = {
        "small file": Fault(r"resolve/.*/config\.json$", "GET"),
        "header": Fault(SHARD, "GET"),
        "shard": Fault(SHARD, "GET", after=1),
    }
    for mode, (moment, fault) in zip(["cached", "cached", "streamed"], moments.items(), strict=True):
        with subtests.test(mode=mode, moment=moment), new_site(mode, moment) as site:
            interrupted(site, fault, *MODES[mode])
            left = site.out / ".openquant" / "source-0"
            assert not (moment == "shard" and mode == "streamed") or list(left.iterdir())
            # What is left of one mode goes when the other finishes.
            site.works(*site.run())
            assert site.same(local)
            assert not (site.out / ".openquant").exists()


def test_shards_of_another_repository_are_not_taken_for_this_one_s(site: Here, local: dict[str, bytes]) -> None:
    """A model and its fine-tune have the same names and headers; a run of the one left shards behind."""
    other = site.root / "other"
    site.hub.repositories["org/other"] = small_checkpoints.write(other, "Qwen3MoeForCausalLM", shards=SHARDS, seed=7)
    interrupted(site, Fault(rf"org/other/{SHARD}", "GET", after=1), "-m", "org/other", "--stream")
    assert list((site.out / ".openquant" / "source-0").iterdir())
    site.works(*site.run("--stream", "--overwrite"))
    assert site.same(local)


def test_a_whole_shard_of_an_earlier_run_is_used_again(new_site, local, subtests):
    for state in ("whole", "zeros"):
        with subtests.test(state), new_site(state) as site:
            whole = (site.source / THIRD).read_bytes()
            scratch = site.out / ".openquant" / "source-0"
            unfinished = scratch / ".cache" / "huggingface" / "download" / "x.incomplete"
            unfinished.parent.mkdir(parents=True)
            unfinished.write_bytes(b"x" * 1000)
            (scratch / "another.safetensors").write_bytes(b"x")
            (scratch / THIRD).write_bytes(whole if state == "whole" else bytes(len(whole)))
            journal = {"format": 1, "digest": "", "done": False, "files": [], "weights": {}}
            (site.out / ".openquant.json").write_text(json.dumps(journal))

            site.works(*site.run("--stream"))
            assert site.same(local)
            assert not (site.out / ".openquant").exists()
            # The first request is for the header.
            requests = site.hub.requests[f"GET /org/name/resolve/{COMMIT}/{THIRD}"]
            assert requests == (1 if state == "whole" else 2)


def test_the_plan_tells_the_download(site: Here) -> None:
    done = site.works(*site.run("--dry-run", "-w", "128"))
    sizes = [path.stat().st_size for path in sorted(site.source.glob("*.safetensors"))]
    at_a_time = max(sum(sizes[first : first + 5]) for first in range(2))
    others = sum((site.source / name).stat().st_size for name in ("README.md", "generation_config.json"))
    cached, streamed = f"{(sum(sizes) + others) / 1e6:.3g} MB", f"{at_a_time / 1e6:.3g} MB"
    assert f"\ndownload: {cached} to the Hub's cache, or with --stream {streamed} at a time\n" in done.stdout


def test_what_cannot_be_read_is_told(site: Here, new_site: NewSite, subtests: pytest.Subtests) -> None:
    source = site.source
    assert site.refused(*site.run("--stream", "-m", source)) == [
        f"error: {source} is a local directory, nothing of it can be streamed",
        "hint: leave --stream out",
    ]

    with subtests.test("an endpoint that is no Hub"):
        site.hub.faults.append(Fault(r"", times=None, content=b"<html>Log in</html>", status=200))
        done = site.ask(*site.run("--json"))
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"].startswith("org/name could not be downloaded: ")
        assert "Traceback" not in done.stderr
        _, hint = site.refused(*site.run(), HF_ENDPOINT="localhost:1")
        assert hint == "hint: check HF_ENDPOINT, if it is set, and whether the repository is sound"
    site.hub.faults.clear()

    with subtests.test("a shard that is missing"):
        (source / "model-00002-of-00006.safetensors").unlink()
        error, _ = site.refused(*site.run(), HF_HOME=str(site.root / "missing"))
        assert error == (f"error: model-00002-of-00006.safetensors is named by {INDEX} and missing from the repository")

    # The first one may still be sending shards to a command that has ended.
    with subtests.test("pickled weights"), new_site("pickled") as other:
        for path in (other.source / INDEX, *other.source.glob("*.safetensors")):
            path.unlink()
        (other.source / "pytorch_model.bin").write_bytes(b"never fetched")
        assert other.refused(*other.run("--dry-run")) == [
            "error: org/name holds pickled weights (pytorch_model.bin); only safetensors are read",
            "hint: convert them first: load with transformers and save_pretrained, model and tokenizer",
        ]


def test_addresses_elsewhere_get_no_token(site: Here, local: dict[str, bytes]) -> None:
    site.hub.storage = f"http://localhost:{site.hub.port}"
    done = site.works(*site.run("--stream"), HF_TOKEN=TOKEN)
    assert site.same(local)
    assert not site.hub.leaked
    assert "Signature" not in done.stdout + done.stderr

    # A server there refuses.
    site.hub.faults.append(Fault("^/storage/", "GET", after=SHARDS, times=None, status=403))
    done = site.ask(*site.run("-o", site.root / "again", "--stream"), HF_HOME=str(site.root / "other"))
    assert done.returncode == 2
    assert f"error: the Hub refuses access to org/name@{COMMIT}: " in done.stderr
    assert "Signature" not in done.stderr


def test_several_shards_come_at_once(new_site: NewSite, local: dict[str, bytes], subtests: pytest.Subtests) -> None:
    for mode, words in MODES.items():
        with subtests.test(mode), new_site(mode) as site:
            both = threading.Barrier(2, timeout=60)
            for number in (1, 2):
                path = rf"resolve/.*model-0000{number}-of-00006\.safetensors$"
                site.hub.faults.append(Fault(path, "GET", after=1, call=both.wait))
            site.works(*site.run(*words))
            assert site.same(local)


def test_what_downloads_hold_counts_for_the_memory(tmp_path: Path) -> None:
    def source(*sizes: int) -> Source:
        files = {str(size): HubFile("org/name", COMMIT, str(size), size, "0" * 64) for size in sizes}
        return Source(tmp_path, "name", "org/name", COMMIT, files)

    assert memory_needed(source()) == 0
    assert memory_needed(source(1000, 2000)) == 12_000
    large = source(*(5_000_000_000 + number for number in range(20)))
    assert memory_needed(large) == 8 * 40 << 20
