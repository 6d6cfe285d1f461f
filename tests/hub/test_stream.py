"""From the Hub while it downloads: faults on the way, and what is on disk meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file

from conftest import ROOT, tree
from openquant import compress
from openquant.hub.fetch import memory_needed
from openquant.hub.source import HubFile, Source
from support import forked_ranks, small_checkpoints
from support.forked_ranks import COMMANDS, Rank, finish, forked
from support.loopback_hub import COMMIT, Fault, LoopbackHub
from support.quantized_checkpoints import PER_TENSOR, STATIC, by_tensor, store

SHARDS = 6


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as server:
        yield server


def write(root: Path) -> Path:
    small_checkpoints.write(root, "Qwen3MoeForCausalLM", shards=SHARDS)
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return root


@pytest.fixture
def source(hub: LoopbackHub, tmp_path: Path) -> Path:
    root = write(tmp_path / "repository")
    hub.repositories["org/name"] = root
    return root


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What a run on the files themselves writes, but the two files that name the repository and its commit."""
    root = tmp_path_factory.mktemp("local")
    compress(write(root / "repository"), root / "local")
    return MappingProxyType(without_origin(tree(root / "local")))


def without_origin(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in ("README.md", ".openquant.json")}


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with forked_ranks.forks(preloaded=COMMANDS):
        yield


def begin(hub: LoopbackHub, tmp_path: Path, *arguments: str, **environment: str) -> Rank:
    """The command against the loopback Hub, with a cache of its own, started."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    words = ("-m", "org/name", "-o", tmp_path / "out", *arguments)
    everything = {**os.environ, **settings, **environment}
    return forked(ROOT / "compress_fp8.py", *words, cwd=Path.cwd(), environment=everything)


def ask(hub: LoopbackHub, tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return finish(begin(hub, tmp_path, *arguments, **environment))


MODES = pytest.mark.parametrize("mode", [(), ("--stream",)], ids=["cached", "streamed"])


@MODES
# Of nvfp4 one scale belongs to joined layers of several shards.
@pytest.mark.parametrize("scheme", ["tensor", "block", "nvfp4"])
def test_the_bytes_are_those_of_a_local_run(
    hub: LoopbackHub, source: Path, tmp_path: Path, mode: tuple[str, ...], scheme: str
) -> None:
    done = ask(hub, tmp_path, "--scheme", scheme, "--json", *mode)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["revision"] == COMMIT
    others = [*source.glob("*.safetensors"), source / "generation_config.json", source / "README.md"]
    assert found["download_bytes"] == sum(path.stat().st_size for path in others)
    compress(source, tmp_path / "local", scheme)
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))
    cached = list((tmp_path / "hf").rglob("snapshots/*/*.safetensors"))
    assert len(cached) == (0 if mode else SHARDS)


@MODES
@pytest.mark.parametrize("options", [("--scheme", "channel"), ("-w", "128", "--format", "compressed-tensors")])
def test_a_quantized_repository(
    hub: LoopbackHub, source: Path, tmp_path: Path, mode: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """Its scales lie in other shards than their codes."""
    compress(source, tmp_path / "fp8", "block")
    root = small_checkpoints.write(
        tmp_path / "quantized", shards=SHARDS + 1, weights=small_checkpoints.read(tmp_path / "fp8")
    )
    shutil.copy(tmp_path / "fp8" / "config.json", root)
    hub.repositories["org/name"] = root
    done = ask(hub, tmp_path, *options, *mode)
    assert done.returncode == 0, done.stderr
    scheme = "channel" if "channel" in options else "block"
    compress(root, tmp_path / "local", scheme, format="compressed-tensors")
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))


@MODES
def test_the_scales_of_activations_in_a_shard_of_their_own(
    hub: LoopbackHub, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """Nothing else of that shard is used, so nothing else fetches it."""
    root = store(tmp_path / "static", by_tensor(**STATIC), PER_TENSOR)
    weights = small_checkpoints.read(root)
    (root / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": {n: t for n, t in weights.items() if not n.endswith("input_scale")},
        "model-00002-of-00002.safetensors": {n: t for n, t in weights.items() if n.endswith("input_scale")},
    }
    for name, part in parts.items():
        save_file(part, root / name, {"format": "pt"})
    placed = {tensor: name for name, part in parts.items() for tensor in part}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    hub.repositories["org/name"] = root
    done = ask(hub, tmp_path, "--activation-scheme", "static", *mode)
    assert done.returncode == 0, done.stderr
    found = small_checkpoints.read(tmp_path / "out")
    scales = {name: scale for name, scale in found.items() if name.endswith("input_scale")}
    assert len(scales) == 14
    assert all(torch.equal(scale, weights[name]) for name, scale in scales.items())
    compress(root, tmp_path / "local", activation_scheme="static")
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))


def test_a_repository_of_pickled_weights(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    for path in source.glob("*.safetensors*"):
        path.unlink()
    (source / "pytorch_model.bin").write_bytes(b"never fetched")
    done = ask(hub, tmp_path, "--dry-run")
    assert (done.returncode, done.stderr) == (
        2,
        "error: org/name holds pickled weights (pytorch_model.bin); only safetensors are read\n"
        "hint: convert them first: load with transformers and save_pretrained, model and tokenizer\n",
    )


def test_what_the_cache_holds_is_not_fetched_again(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    assert ask(hub, tmp_path).returncode == 0
    hub.requests.clear()
    done = ask(hub, tmp_path, "-w", "128", "-o", str(tmp_path / "blocks"), "--stream", "--json")
    assert json.loads(done.stdout)["download_bytes"] == 0
    assert not [path for path in hub.requests if ".safetensors" in path and "index" not in path]


def test_a_streamed_model_needs_a_few_shards_of_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    """Whatever the number of shards: six of them, those of three outputs and two more (fetch.AT_ONCE and fetch.AHEAD)."""
    weights = {f"model.layers.{n}.mlp.{part}_proj.weight": torch.ones(256, 256) for n in range(24) for part in "uv"}
    weights = {name.replace("u_proj", "up_proj").replace("v_proj", "gate_proj"): w for name, w in weights.items()}
    root = small_checkpoints.write(tmp_path / "repository", "Qwen3ForCausalLM", shards=24, weights=weights)
    hub.repositories["org/name"] = root
    largest = max(path.stat().st_size for path in root.glob("*.safetensors"))
    marks: list[int] = []

    def measure() -> None:
        marks.append(size_of(tmp_path / "out" / ".openquant" / "source-0"))

    hub.faults.append(Fault(r"\.safetensors$", "GET", times=None, call=measure))
    done = ask(hub, tmp_path, "--stream")
    assert done.returncode == 0, done.stderr
    # On its way each is longer by what says which parts are there.
    assert 2 * largest < max(marks) <= 6 * (largest + 1)
    assert len(marks) >= 24
    assert not (tmp_path / "out" / ".openquant").exists()


def size_of(directory: Path) -> int:
    """Of the files in a directory that may be changing."""
    total = 0
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


# Shard 3 of 6, where it is downloaded; headers are read by range before.
SHARD = r"resolve/.*model-00003-of-00006\.safetensors$"


@MODES
@pytest.mark.parametrize(
    "fault",
    [
        Fault(SHARD, "GET", after=1, cut=1000),
        Fault(SHARD, "GET", after=1, cut=1000, reset=True),
        Fault(SHARD, "GET", after=1, status=429, headers={"Retry-After": "0"}),
        Fault(SHARD, "GET", after=1, status=503),
        Fault(SHARD, "GET", after=1, status=500, times=2),
        Fault(SHARD, "GET", after=1, short=1000),
        Fault(SHARD, "GET", after=1, flip=5000),
    ],
    ids=["cut", "reset", "429", "503", "500 twice", "short", "flipped"],
)
def test_what_goes_wrong_once_does_not_show(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...], fault: Fault
) -> None:
    hub.faults.append(Fault(**{**vars(fault), "seen": 0}))
    done = ask(hub, tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    assert hub.faults[0].seen > fault.after
    assert without_origin(tree(tmp_path / "out")) == local


@MODES
@pytest.mark.parametrize("other", [{"flip": 5000}, {"content": b"x" * 100_000}], ids=["flipped", "changed"])
def test_a_file_that_is_not_what_the_hub_says_is_named(
    hub: LoopbackHub, source: Path, tmp_path: Path, mode: tuple[str, ...], other: dict[str, object]
) -> None:
    if "content" in other:
        size = (source / "model-00003-of-00006.safetensors").stat().st_size
        other = {"content": b"x" * size}
    hub.faults.append(Fault(SHARD, "GET", after=1, times=None, **other))  # type: ignore[arg-type]
    done = ask(hub, tmp_path, *mode)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2] == (
        f"error: model-00003-of-00006.safetensors did not arrive as org/name@{COMMIT} has it: its size or digest differs"
    )
    assert not (tmp_path / "out" / "config.json").exists()


@MODES
@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        (403, "GatedRepo", "org/name is gated",
         "accept its licence at https://huggingface.co/org/name, then run: hf auth login"),
        (401, "", "the Hub refuses access to org/name", "log in with a token that may read it: hf auth login"),
        (403, "", "the Hub refuses access to org/name", "log in with a token that may read it: hf auth login"),
    ],
)  # fmt: skip
def test_access_that_ends_on_the_way(
    hub: LoopbackHub,
    source: Path,
    tmp_path: Path,
    mode: tuple[str, ...],
    status: int,
    code: str,
    message: str,
    hint: str,
) -> None:
    hub.faults.append(Fault(SHARD, after=2, times=None, status=status, code=code))
    done = ask(hub, tmp_path, *mode, HF_TOKEN="hf_secretsecret")
    assert done.returncode == 2
    error, found = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: {message}")
    assert found == f"hint: {hint}"
    assert "hf_secretsecret" not in done.stdout + done.stderr
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@MODES
def test_a_killed_run_continues(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    processes: list[Rank] = []
    begun = threading.Semaphore(0)

    def kill() -> None:
        begun.acquire(timeout=60)
        processes[-1].kill()

    for number in (2, 4):
        path = rf"resolve/.*model-0000{number}-of-00006\.safetensors$"
        hub.faults[:] = [Fault(path, "GET", after=1, cut=20_000, call=kill)]
        processes.append(begin(hub, tmp_path, *mode))
        begun.release()
        assert finish(processes[-1]).returncode == -signal.SIGKILL
        assert not (tmp_path / "out" / "config.json").exists()
    hub.faults.clear()
    done = ask(hub, tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    assert without_origin(tree(tmp_path / "out")) == local
    assert not (tmp_path / "out" / ".openquant").exists()


def test_a_streamed_file_continues_where_it_stopped(hub: LoopbackHub, tmp_path: Path) -> None:
    """Not at its beginning, unlike a download to the cache; whichever of its parts had arrived."""
    weights = {
        f"model.layers.{n}.mlp.{part}_proj.weight": torch.ones(1024, 1024) for n in (0, 1) for part in ("up", "gate")
    }
    root = small_checkpoints.write(tmp_path / "repository", "Qwen3ForCausalLM", weights=weights)
    hub.repositories["org/name"] = root
    size = (root / "model.safetensors").stat().st_size
    release = threading.Event()
    # After the header it comes in parts of four mebibytes at most, of which one hangs.
    hub.faults.append(Fault(r"model\.safetensors$", "GET", after=2, cut=0, call=lambda: release.wait(60)))
    process = begin(hub, tmp_path, "--stream", HF_HUB_DOWNLOAD_TIMEOUT="120")
    scratch = tmp_path / "out" / ".openquant" / "source-0"
    while process.poll() is None:
        here = next(iter(scratch.glob("*.partial")), None)
        # What is behind its contents says which units of a mebibyte are there.
        if here is not None and here.read_bytes()[size:].count(1) >= 13:
            break
        time.sleep(0.05)
    process.kill()
    finish(process)
    release.set()
    (left,) = scratch.glob("*.partial")
    lacking = left.read_bytes()[size:].count(0)
    assert 0 < lacking <= 4
    hub.faults.clear()
    hub.sent = 0
    done = ask(hub, tmp_path, "--stream")
    assert done.returncode == 0, done.stderr
    compress(root, tmp_path / "local")
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))
    assert hub.sent < (lacking << 20) + 150_000


@MODES
@pytest.mark.parametrize("after", [0, 1], ids=["header", "shard"])
def test_ctrl_c_does_not_wait_for_a_download(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...], after: int
) -> None:
    reached, release = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        release.wait(60)

    hub.faults.append(Fault(SHARD, "GET", after=after, call=hang))
    process = begin(hub, tmp_path, *mode)
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    stopped = finish(process)
    waited = time.monotonic() - begun
    release.set()
    assert stopped.returncode == 130
    assert stopped.stderr.splitlines()[-2:] == ["error: interrupted", "hint: run the same command again to continue"]
    # The client itself gives up after ten seconds.
    assert waited < 9
    assert ask(hub, tmp_path, *mode).returncode == 0
    assert without_origin(tree(tmp_path / "out")) == local


def test_a_local_directory_cannot_be_streamed(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, "-m", str(source), "--stream")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {source} is a local directory, nothing of it can be streamed\nhint: leave --stream out\n"
    )


def test_the_plan_tells_the_download(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, "--dry-run", "-w", "128")
    sizes = [path.stat().st_size for path in sorted(source.glob("*.safetensors"))]
    at_a_time = max(sum(sizes[first : first + 5]) for first in range(2))
    others = sum((source / name).stat().st_size for name in ("README.md", "generation_config.json"))
    cached, streamed = f"{(sum(sizes) + others) / 1e6:.3g} MB", f"{at_a_time / 1e6:.3g} MB"
    assert (
        f"\ndownload: {cached} ({others} B in 2 other files) to the Hub's cache, or with --stream {streamed} at a time\n"
    ) in done.stdout


def test_index_names_cannot_leave_the_directory(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    index = json.loads((source / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = "../../evil.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    for mode in ((), ("--stream",)):
        done = ask(hub, tmp_path, *mode)
        assert done.returncode == 2
        assert re.search(
            r"error: \S+index.json places \S+ in '../../evil.safetensors', which is not a plain", done.stderr
        )


def interrupted(hub: LoopbackHub, tmp_path: Path, fault: Fault, *arguments: str) -> None:
    """A run that Ctrl-C ends while a request is being answered."""
    reached, release = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        release.wait(60)

    fault.call = hang
    hub.faults.append(fault)
    process = begin(hub, tmp_path, *arguments)
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    assert finish(process).returncode == 130
    assert time.monotonic() - begun < 9
    release.set()
    hub.faults.clear()


def test_ctrl_c_does_not_wait_for_the_small_files(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    interrupted(hub, tmp_path, Fault(r"resolve/.*/config\.json$", "GET"))


def test_shards_of_another_repository_are_not_taken_for_this_one_s(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A model and its fine-tune have the same names and headers; a run of the one left shards behind."""
    hub.repositories["org/other"] = small_checkpoints.write(
        tmp_path / "other", "Qwen3MoeForCausalLM", shards=SHARDS, seed=7
    )
    path = r"org/other/resolve/.*model-00003-of-00006\.safetensors$"
    interrupted(hub, tmp_path, Fault(path, "GET", after=1), "-m", "org/other", "--stream")
    assert list((tmp_path / "out" / ".openquant" / "source-0").iterdir())
    done = ask(hub, tmp_path, "--stream", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert without_origin(tree(tmp_path / "out")) == local


@pytest.mark.parametrize("damage", ["empty", "zeros", "partial"])
def test_a_damaged_scratch_file_is_fetched_again(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, damage: str
) -> None:
    name = "model-00001-of-00006.safetensors"
    scratch = tmp_path / "out" / ".openquant" / "source-0"
    scratch.mkdir(parents=True)
    size = (source / name).stat().st_size
    if damage == "partial":
        (scratch / f"{name}.partial").write_bytes(b"x" * 1000)
    else:
        (scratch / name).write_bytes(b"" if damage == "empty" else bytes(size))
    (tmp_path / "out" / ".openquant.json").write_text(
        json.dumps({"format": 1, "digest": "", "done": False, "files": []})
    )
    done = ask(hub, tmp_path, "--stream")
    assert done.returncode == 0, done.stderr
    assert without_origin(tree(tmp_path / "out")) == local


def test_scratch_left_behind_goes_when_another_mode_finishes(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path
) -> None:
    interrupted(hub, tmp_path, Fault(SHARD, "GET", after=1), "--stream")
    assert list((tmp_path / "out" / ".openquant" / "source-0").iterdir())
    assert ask(hub, tmp_path).returncode == 0
    assert without_origin(tree(tmp_path / "out")) == local
    assert not (tmp_path / "out" / ".openquant").exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"^/api/models/org/name", "GET", status=503),
        Fault(r"^/api/models/org/name", "GET", cut_upload=0),
        Fault(r"resolve/.*/config\.json$", "GET", status=503),
        Fault(r"/tree/", "GET", status=503),
    ],
    ids=["info", "info cut", "config", "tree"],
)
def test_trouble_with_the_first_requests_does_not_show(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, fault: Fault
) -> None:
    hub.faults.append(Fault(**{**vars(fault), "seen": 0}))
    done = ask(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.faults[0].seen
    assert without_origin(tree(tmp_path / "out")) == local


@MODES
def test_files_that_git_holds_are_checked_too(
    hub: LoopbackHub, source: Path, tmp_path: Path, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small repositories need no LFS: the tree then has git's object ids."""
    monkeypatch.setattr("support.loopback_hub.is_lfs", lambda _: False)
    assert ask(hub, tmp_path, *mode).returncode == 0
    hub.faults.append(Fault(SHARD, "GET", after=1, times=None, flip=5000))
    done = ask(hub, tmp_path, *mode, "-o", str(tmp_path / "again"), HF_HOME=str(tmp_path / "hf2"))
    assert done.returncode == 2
    assert "model-00003-of-00006.safetensors did not arrive as" in done.stderr


def test_an_endpoint_that_is_no_hub(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault(r"", times=None, content=b"<html>Log in</html>", status=200))
    done = ask(hub, tmp_path, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"].startswith("org/name could not be downloaded: ")
    assert "Traceback" not in done.stderr
    hub.faults.clear()
    done = ask(hub, tmp_path, HF_ENDPOINT="localhost:1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "hint: check HF_ENDPOINT, if it is set, and whether the repository is sound"
    )


def test_a_shard_that_the_repository_lacks(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    (source / "model-00002-of-00006.safetensors").unlink()
    done = ask(hub, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2] == (
        "error: model-00002-of-00006.safetensors is named by model.safetensors.index.json and missing from the repository"
    )


def test_quiet_is_quiet_about_what_the_client_tries_again(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault(SHARD, "GET", status=503))
    done = ask(hub, tmp_path, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@MODES
def test_addresses_elsewhere_get_no_token_and_serve_until_they_expire(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    hub.storage = f"http://localhost:{hub.port}"

    def expire() -> None:
        hub.signature = "second"

    # After all headers.
    hub.faults.append(Fault("^/storage/", "GET", after=SHARDS, call=expire))
    done = ask(hub, tmp_path, *mode, HF_TOKEN="hf_secretsecret")
    assert done.returncode == 0, done.stderr
    assert without_origin(tree(tmp_path / "out")) == local
    assert hub.signature == "second"
    assert not hub.leaked
    assert "Signature" not in done.stdout + done.stderr


def test_a_streamed_shard_takes_three_requests(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    """Where it lies, its header, and all of it."""
    hub.storage = f"http://localhost:{hub.port}"
    assert ask(hub, tmp_path, "--stream").returncode == 0
    for path in source.glob("*.safetensors"):
        assert hub.requests[f"HEAD /org/name/resolve/{COMMIT}/{path.name}"] == 1
        assert hub.requests[f"GET /storage/org/name/{COMMIT}/{path.name}"] == 2


def test_an_address_that_is_refused_for_good(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.storage = f"http://localhost:{hub.port}"
    hub.faults.append(Fault("^/storage/", "GET", after=SHARDS, times=None, status=403))
    done = ask(hub, tmp_path, "--stream")
    assert done.returncode == 2
    assert f"error: the Hub refuses access to org/name@{COMMIT}: " in done.stderr
    assert "Signature" not in done.stderr


@MODES
def test_several_shards_come_at_once(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    both = threading.Barrier(2, timeout=60)
    for number in (1, 2):
        path = rf"resolve/.*model-0000{number}-of-00006\.safetensors$"
        hub.faults.append(Fault(path, "GET", after=1, call=both.wait))
    done = ask(hub, tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    assert without_origin(tree(tmp_path / "out")) == local


@MODES
def test_a_server_that_ignores_ranges(
    hub: LoopbackHub, source: Path, local: Mapping[str, bytes], tmp_path: Path, mode: tuple[str, ...]
) -> None:
    hub.ignores_range = True
    done = ask(hub, tmp_path, *mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "\nnote: the Hub, or a proxy before it, ignores Range and sends files from their beginning: each shard is "
        "downloaded over one connection, and starts again from its beginning if the connection breaks\n"
    ) in done.stdout
    assert without_origin(tree(tmp_path / "out")) == local


def test_no_more_is_read_than_was_asked_for(hub: LoopbackHub, tmp_path: Path) -> None:
    """What a server sends that ignores ranges is left where it is."""
    weights = {f"model.layers.0.mlp.{part}_proj.weight": torch.ones(8192, 4096) for part in ("up", "gate")}
    hub.repositories["org/name"] = small_checkpoints.write(tmp_path / "repository", "Qwen3ForCausalLM", weights=weights)
    hub.ignores_range = True
    done = ask(hub, tmp_path, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    # What fits into the buffers of a connection.
    assert hub.sent < 32 << 20
    assert json.loads(done.stdout)["peak_rss_bytes"] < 200e6


def test_a_streamed_file_continues_without_ranges(hub: LoopbackHub, tmp_path: Path) -> None:
    weights = {f"model.layers.0.mlp.{part}_proj.weight": torch.ones(1024, 1024) for part in ("up", "gate")}
    root = small_checkpoints.write(tmp_path / "repository", "Qwen3ForCausalLM", weights=weights)
    hub.repositories["org/name"] = root
    hub.ignores_range = True
    hub.faults.append(Fault(r"model\.safetensors$", "GET", after=1, cut=5_000_000))
    done = ask(hub, tmp_path, "--stream")
    assert done.returncode == 0, done.stderr
    compress(root, tmp_path / "local")
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))


def test_other_bytes_than_were_asked_for(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault(SHARD, "GET", times=None, status=206, headers={"Content-Range": "bytes 5-9/10"}))
    done = ask(hub, tmp_path, "--dry-run")
    assert (done.returncode, done.stderr) == (
        2,
        "error: model-00003-of-00006.safetensors: bytes from 0 on were requested, the response has bytes 5-9/10\n"
        "hint: the server or a proxy is broken: check HF_ENDPOINT and proxies\n",
    )


@MODES
def test_long_names(hub: LoopbackHub, source: Path, tmp_path: Path, mode: tuple[str, ...]) -> None:
    """As long as a file system takes them, so that nothing can be added."""
    index = source / "model.safetensors.index.json"
    for path in list(source.glob("*.safetensors")):
        name = f"{path.stem}-{'x' * (240 - len(path.stem))}x.safetensors"
        assert len(name) > 252
        path.rename(source / name)
        index.write_text(index.read_text().replace(path.name, name))
    done = ask(hub, tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    compress(source, tmp_path / "local")
    assert without_origin(tree(tmp_path / "out")) == without_origin(tree(tmp_path / "local"))


def test_a_repository_without_an_index_is_told_as_a_directory_is(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    (source / "model.safetensors.index.json").unlink()
    what = "holds model-00001-of-00006.safetensors but neither model.safetensors nor model.safetensors.index.json"
    for model, place in (("org/name", "org/name"), (str(source), str(source))):
        done = ask(hub, tmp_path, "-m", model)
        assert (done.returncode, done.stderr) == (
            2,
            f"error: {place} {what}\nhint: copy the index too, or rename a single file to model.safetensors\n",
        )


def test_what_downloads_hold_counts_for_the_memory(tmp_path: Path) -> None:
    def source(*sizes: int) -> Source:
        files = {str(size): HubFile("org/name", COMMIT, str(size), size, "0" * 64) for size in sizes}
        return Source(tmp_path, "name", "org/name", COMMIT, files)

    assert [memory_needed(source(), stream) for stream in (False, True)] == [0, 0]
    assert memory_needed(source(1000, 2000), stream=False) == 12_000
    large = source(*(5_000_000_000 + number for number in range(20)))
    assert memory_needed(large, stream=False) == 8 * 40 << 20
    assert memory_needed(large, stream=True) == 13 << 20
