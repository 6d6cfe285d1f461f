"""To the Hub, through the real client: what is uploaded, what a commit holds, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from conftest import ROOT, heed_ctrl_c, tree
from loopback_hub import Fault, LoopbackHub
from openquant import OpenQuantError, compress, dequantize
from openquant.api import push
from openquant.publish import Push

SHARDS = 5
INDEX = "model.safetensors.index.json"
TOKEN = "hf_secretsecret"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as server:
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tiny.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=SHARDS)
    (root / "tokenizer.json").write_text("{}")
    (root / "LICENSE").write_text("Do as you like.\n")
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return root


@pytest.fixture
def unpublished(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a local run writes."""
    compress(source, tmp_path / "expected")
    return published(tree(tmp_path / "expected"))


@pytest.fixture
def expected(source: Path, unpublished: dict[str, bytes]) -> dict[str, bytes]:
    """What a run writes that publishes it, and a repository should hold: the card tells how to serve that."""
    card = unpublished["README.md"]
    assert card.count(b" source-FP8\n") == 2
    return unpublished | {"README.md": card.replace(b" source-FP8\n", b" user/name\n")}


def published(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != ".openquant.json"}


def held(hub: LoopbackHub, repo: str = "user/name", revision: str = "main") -> dict[str, bytes]:
    """What the repository holds beside the .gitattributes it was made with."""
    return {name: path.read_bytes() for name, path in hub.files(repo, revision).items() if name != ".gitattributes"}


def begin(hub: LoopbackHub, tmp_path: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """An openquant verb against the loopback Hub, started."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "openquant", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings, "HF_TOKEN": TOKEN, **environment},
        cwd=ROOT,
        preexec_fn=heed_ctrl_c,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ask(hub: LoopbackHub, tmp_path: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return finish(begin(hub, tmp_path, *arguments, **environment))


def push_of(source: Path, tmp_path: Path, *more: object) -> list[object]:
    return ["compress", "-m", source, "-o", tmp_path / "out", "--push-to-hub", "user/name", *more]


def test_a_run_is_published_with_one_commit(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--json"))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert published(tree(tmp_path / "out")) == expected
    (_, first), (title, added) = hub.commits("user/name")
    assert first == [".gitattributes"]
    assert title == "source in FP8 (one scale per tensor)"
    assert set(added) == set(expected)
    assert json.loads(done.stdout)["pushed_to"].startswith(f"{hub.endpoint}/user/name/commit/")
    assert not hub.stored["user/name"]["private"]
    assert set(hub.uploads.values()) == {1}
    assert not (tmp_path / "out" / ".openquant").exists()
    # Again, there is nothing to do, and no empty commit is made.
    again = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert again.returncode == 0, again.stderr
    assert len(hub.commits("user/name")) == 2
    assert set(hub.uploads.values()) == {1}


def test_shards_are_uploaded_while_others_are_fetched_and_converted(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    """The last shard of the source does not come before the first one of the output is uploaded."""
    hub.repositories["org/name"] = source
    uploaded = threading.Event()
    hub.faults.append(Fault(r"", "PUT", call=uploaded.set))
    waited: list[bool] = []
    last = r"resolve/.*model-00005-of-00005\.safetensors$"
    hub.faults.append(Fault(last, "GET", after=2, call=lambda: waited.append(uploaded.wait(8))))
    done = ask(hub, tmp_path, *push_of(Path("org/name"), tmp_path, "-w", "128"))
    assert done.returncode == 0, done.stderr
    assert waited == [True]


def test_options_of_the_commit(hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--private", "--commit-message", "Mine"))
    assert done.returncode == 0, done.stderr
    assert hub.stored["user/name"]["private"]
    assert hub.commits("user/name")[-1][0] == "Mine"


def test_a_pull_request(hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--json"))
    assert done.returncode == 0, done.stderr
    assert held(hub) == {}
    assert held(hub, revision="refs/pr/1") == expected
    assert json.loads(done.stdout)["pushed_to"] == f"{hub.endpoint}/user/name/discussions/1"


def test_push_of_a_directory_made_earlier(
    hub: LoopbackHub, source: Path, unpublished: dict[str, bytes], tmp_path: Path
) -> None:
    compress(source, tmp_path / "out")
    done = ask(hub, tmp_path, "push", tmp_path / "out", "name")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"pushed to {hub.endpoint}/user/name/commit/")
    assert held(hub) == unpublished
    assert published(tree(tmp_path / "out")) == unpublished


@pytest.mark.parametrize("state", ["foreign", "missing", "unfinished", "incomplete"])
def test_push_of_what_is_no_finished_output(hub: LoopbackHub, source: Path, tmp_path: Path, state: str) -> None:
    out = tmp_path / "out"
    compress(source, out)
    journal = json.loads((out / ".openquant.json").read_text())
    if state == "foreign":
        (out / ".openquant.json").unlink()
    elif state == "unfinished":
        (out / ".openquant.json").write_text(json.dumps(journal | {"done": False}))
    elif state == "missing":
        shutil.rmtree(out)
    else:
        (out / "model-00002-of-00005.safetensors").unlink()
    done = ask(hub, tmp_path, "push", out, "user/name")
    assert done.returncode == 2
    says = {
        "foreign": "was not made by openquant",
        "missing": "is not a directory",
        "unfinished": "is not finished",
        "incomplete": "lacks model-00002-of-00005.safetensors",
    }
    assert done.stderr.splitlines()[0] == f"error: {out} {says[state]}"
    assert not hub.stored


FIRST = "model-00001-of-00005.safetensors"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def without_quantization(path: Path) -> None:
    config = json.loads(path.read_bytes())
    del config["quantization_config"]
    path.write_text(json.dumps(config))


def without_a_tensor(path: Path) -> None:
    index = json.loads(path.read_bytes())
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))


def listing_a_quantized_layer(path: Path) -> None:
    config = json.loads(path.read_bytes())
    config["quantization_config"]["ignored_layers"].append("model.layers.1.self_attn.o_proj")
    path.write_text(json.dumps(config))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (FIRST, cut, f"{FIRST} is truncated: its tensors end at byte "),
    "empty shard": (FIRST, lambda path: path.write_bytes(b""), f"{FIRST} is 0 bytes long"),
    "no shard": (FIRST, lambda path: path.write_bytes(b"x" * 5000), f"{FIRST} claims a header of "),
    "config": ("config.json", lambda path: path.write_text("{"), "config.json is not valid JSON: "),
    "empty config": ("config.json", lambda path: path.write_text("{}"), "config.json names no architecture "),
    "index": (INDEX, lambda path: path.write_text("[]"), f"{INDEX} has no weight_map "),
    "short index": (INDEX, without_a_tensor, "lm_head.weight, which"),
}
QUANTIZED_DAMAGE = DAMAGE | {
    "no quantization": ("config.json", without_quantization, " is F8_E4M3, but config.json has no quantization_config"),
    "listed": ("config.json", listing_a_quantized_layer, "config.json: ignored_layers lists model.layers.1."),
}


@pytest.mark.parametrize(
    ("verb", "damage"), [*(("compress", d) for d in QUANTIZED_DAMAGE), *(("dequantize", d) for d in DAMAGE)]
)
def test_push_of_a_damaged_directory(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, verb: str, damage: str
) -> None:
    # Nothing may be asked of a Hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / verb
    compress(source, tmp_path / "compress")
    if verb == "dequantize":
        dequantize(tmp_path / "compress", out)
    name, harm, message = QUANTIZED_DAMAGE[damage]
    harm(out / name)
    with pytest.raises(OpenQuantError) as raised:
        push(out, Push("user/name"))
    assert raised.value.message.startswith(f"{out} is damaged: ")
    assert message in raised.value.message
    assert raised.value.hint == (
        "run the command that made it again with --overwrite, or copy it again from where it is whole"
    )


@pytest.mark.parametrize("verb", ["compress", "dequantize"])
def test_a_shard_that_no_run_wrote_is_not_pushed(source: Path, tmp_path: Path, verb: str) -> None:
    out = tmp_path / verb
    compress(source, tmp_path / "compress")
    if verb == "dequantize":
        dequantize(tmp_path / "compress", out)
    other = "model-00006-of-00005.safetensors"
    save_file({"another.weight": np.zeros(3, np.float32)}, out / other)
    index = json.loads((out / INDEX).read_bytes())
    index["weight_map"]["another.weight"] = other
    del index["metadata"]
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(OpenQuantError, match=f"{other} holds tensors, and no run wrote it"):
        push(out, Push("user/name"))


def test_an_index_that_leaves_a_shard_out_is_not_pushed(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "fp8")
    out = tmp_path / "out"
    dequantize(tmp_path / "fp8", out)
    index = json.loads((out / INDEX).read_bytes())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != FIRST}
    (out / INDEX).write_text(json.dumps(index))
    with pytest.raises(OpenQuantError, match=f"{INDEX} does not name {FIRST}"):
        push(out, Push("user/name"))


def test_what_was_damaged_since_is_not_pushed_by_a_run_that_finds_it_complete(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    compress(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{")
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith(f"error: {tmp_path / 'out'} is damaged: config.json is not valid ")
    assert held(hub) == {}


def test_push_of_a_dequantized_directory(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "fp8")
    dequantize(tmp_path / "fp8", tmp_path / "out")
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/name")
    assert done.returncode == 0, done.stderr
    assert held(hub).keys() == published(tree(tmp_path / "out")).keys()


def test_push_only_keeps_few_shards_on_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    """From one repository to another; neither the source nor the output is ever whole on this disk."""
    source = hub.repositories["org/name"] = tiny.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=14)
    compress(source, tmp_path / "expected", "block")
    expected = published(tree(tmp_path / "expected"))
    out = tmp_path / "out"
    most: list[tuple[int, int]] = []

    def measure() -> None:
        most.append((len(list(out.glob("*.safetensors"))), len(list((out / ".openquant").rglob("*.safetensors*")))))

    hub.faults.append(Fault(r"", "PUT", times=None, call=measure, delay=0.3))
    command = ["compress", "-m", "org/name", "-o", out, "--stream", "--push-to-hub", "user/name", "--push-only"]
    command += ["-w", "128"]
    done = ask(hub, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert max(shards for shards, _ in most) <= 3  # publish.AT_ONCE
    assert max(shards for _, shards in most) <= 5  # those, and fetch.AHEAD
    assert len(most) == 14
    assert {name: data for name, data in held(hub).items() if name != "README.md"} == {
        name: data for name, data in expected.items() if name != "README.md"
    }
    assert not list(out.glob("*.safetensors"))
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    # Again, everything is known to be there.
    requests = dict(hub.requests)
    again = ask(hub, tmp_path, *command)
    assert again.returncode == 0, again.stderr
    assert set(hub.uploads.values()) == {1}
    assert len(hub.commits("user/name")) == 2
    fetched = [path for path in hub.requests if "resolve" in path and hub.requests[path] - requests.get(path, 0) > 2]
    assert not [path for path in fetched if path.startswith("GET") and ".safetensors" in path and "index" not in path]


@pytest.mark.parametrize("only", [(), ("--push-only",)], ids=["kept", "deleted"])
@pytest.mark.parametrize("moment", [0, 2, 4, "commit"])
def test_a_killed_push_continues_without_repeating_anything(
    hub: LoopbackHub,
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    only: tuple[str, ...],
    moment: int | str,
) -> None:
    processes: list[subprocess.Popen[str]] = []
    ready = threading.Event()

    def kill() -> None:
        ready.wait(60)
        processes[0].kill()

    if moment == "commit":
        hub.faults.append(Fault(r"/commit/", "POST", call=kill, cut_upload=0))
    else:
        hub.faults.append(Fault(r"", "PUT", after=int(moment), call=kill, cut_upload=100))
    processes.append(begin(hub, tmp_path, *push_of(source, tmp_path, *only)))
    ready.set()
    assert finish(processes[0]).returncode == -signal.SIGKILL
    assert held(hub) == {}
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert set(hub.uploads.values()) == {1}
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.safetensors")}
    assert after == ({} if only else {**after, **before})


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"", "PUT", after=1, status=500),
        Fault(r"", "PUT", after=1, status=429, headers={"Retry-After": "0"}),
        Fault(r"", "PUT", after=1, cut_upload=1000),
        Fault(r"", "PUT", after=1, cut_upload=1000, reset=True),
        Fault(r"/objects/batch", "POST", after=1, status=503),
        Fault(r"/preupload/", "POST", after=1, status=502),
        Fault(r"/commit/", "POST", status=503),
        Fault(r"/commit/", "POST", times=2, status=409),
        Fault(r"/commit/", "POST", status=412, message="A commit has happened since. Please refresh and try again."),
        Fault(r"/commit/", "POST", cut_upload=0),
        Fault(r"/commit/", "POST", cut=0),
        Fault(r"/repos/create", "POST", status=500),
    ],
    ids=[
        "500",
        "429",
        "cut",
        "reset",
        "batch",
        "preupload",
        "commit",
        "409",
        "412",
        "commit lost",
        "answer lost",
        "create",
    ],
)
def test_what_goes_wrong_once_does_not_show(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path, fault: Fault
) -> None:
    hub.faults.append(Fault(**{**vars(fault), "seen": 0}))
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    assert hub.faults[0].seen > fault.after
    assert held(hub) == expected
    assert len(hub.commits("user/name")) == 2


def test_a_restarted_server_does_not_show(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    reached = threading.Event()
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as hub:
        hub.faults.append(Fault(r"", "PUT", after=2, call=reached.set, cut_upload=10))
        process = begin(hub, tmp_path, *push_of(source, tmp_path))
        assert reached.wait(60)
    with LoopbackHub(tmp_path / "hub", hub.port, token=TOKEN) as hub:
        done = finish(process)
        assert done.returncode == 0, done.stderr
        assert held(hub) == expected


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        (r"/repos/create", 403, "the Hub does not let you write to user/name: "),
        (r"/preupload/", 403, "the Hub does not let you write to user/name: "),
        (r"/commit/", 400, "user/name refuses what is sent: "),
    ],
)
def test_refusals_are_explained_and_nothing_is_lost(
    hub: LoopbackHub,
    source: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    path: str,
    status: int,
    message: str,
) -> None:
    hub.faults.append(Fault(path, "POST", times=None, status=status))
    if path == r"/repos/create":
        hub.faults.append(Fault(r"/api/models/user/name$", "GET", times=None, status=404, code="RepoNotFound"))
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith(f"error: {message}"), done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert held(hub) == {} if "user/name" in hub.stored else True
    hub.faults.clear()
    assert ask(hub, tmp_path, *push_of(source, tmp_path)).returncode == 0
    assert held(hub) == expected


@pytest.mark.parametrize("only", [(), ("--push-only",)], ids=["kept", "deleted"])
def test_a_refused_commit_forgets_no_upload(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path, only: tuple[str, ...]
) -> None:
    reason = "You have exceeded your storage limit; README.md is not found wanting."
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=400, message=reason))
    for _ in range(2):
        done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-2:] == [
            f"error: user/name refuses what is sent: 400 for /api/models/user/name/commit/main: {reason}",
            "hint: make room in that account or get it more storage (https://huggingface.co/settings/billing), then run "
            "the same command again: what is converted and uploaded is kept",
        ]
    asked = {path: count for path, count in hub.requests.items() if "preupload" in path or "batch" in path}
    hub.faults.clear()
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert set(hub.uploads.values()) == {1}
    # The other files are asked about before each commit, the shards no more.
    assert {path: count for path, count in hub.requests.items() if path in asked} == {
        path: count + ("preupload" in path) for path, count in asked.items()
    }


@pytest.mark.parametrize("only", [(), ("--push-only",)], ids=["kept", "deleted"])
def test_uploads_of_a_source_that_moved_are_made_again(
    hub: LoopbackHub, source: Path, tmp_path: Path, only: tuple[str, ...]
) -> None:
    """What was deleted cannot be held against it."""
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    assert ask(hub, tmp_path, *push_of(source, tmp_path, *only)).returncode == 2
    hub.faults.clear()
    shard = source / "model-00003-of-00005.safetensors"
    data, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(data[:-1000] + bytes(1000))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    if not only:
        assert done.returncode == 2
        assert " changed since " in done.stderr
        assert held(hub) == {}
        shard.write_bytes(data)
        done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    compress(source, tmp_path / "fresh")
    fresh = published(tree(tmp_path / "fresh"))
    assert {name for name, data in held(hub).items() if data != fresh[name]} == {"README.md"}


@pytest.mark.parametrize("only", [(), ("--push-only",)], ids=["kept", "deleted"])
@pytest.mark.parametrize("names", [True, False])
def test_what_the_hub_lost_is_uploaded_again(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path, only: tuple[str, ...], names: bool
) -> None:
    """It drops uploads that no commit names after a while."""
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    assert ask(hub, tmp_path, *push_of(source, tmp_path, *only)).returncode == 2
    hub.faults.clear()
    name = "model-00003-of-00005.safetensors"
    digest = hashlib.sha256(expected[name]).hexdigest()
    (hub.blobs / digest).unlink()
    if not names:
        message = "Your push was rejected because an LFS pointer pointed to a file that does not exist."
        hub.faults.append(Fault(r"/commit/", "POST", status=400, message=message))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()[-2:]
    lost = name if names else "model-00001-of-00005.safetensors"
    assert error.startswith(f"error: user/name no longer has what was uploaded of {lost}: 400 for ")
    assert hint == "hint: run the same command again: what the Hub lost is made and uploaded again"
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert {oid: count for oid, count in hub.uploads.items() if count > 1} == {digest: 2}


def test_without_a_token(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path), HF_TOKEN="")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: the Hub does not let you write to user/name: ")
    assert hint == "hint: log in with a token that may: hf auth login"
    # Before anything was converted.
    assert not (tmp_path / "out").exists()


def test_foreign_weights_in_the_repository_are_refused(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.create("user/name", private=False)
    digest = hashlib.sha256(b"weights").hexdigest()
    (hub.blobs / digest).write_bytes(b"weights")
    hub.commit("user/name", "main", "old", {"model-00001-of-00002.safetensors": digest}, deleted=[])
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: user/name already holds model-00001-of-00002.safetensors, which this model would not replace",
        "hint: push to another repository, or delete that file from this one first",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--private", ()), ("--create-pr", ()), ("--commit-message", ("x",)), ("--push-only", ())],
)
def test_options_of_a_push_need_one(
    hub: LoopbackHub, source: Path, tmp_path: Path, option: str, value: tuple[str, ...]
) -> None:
    done = ask(hub, tmp_path, "compress", "-m", source, option, *value)
    assert done.returncode == 2
    assert done.stderr == f"error: {option} goes with --push-to-hub\nhint: say where to push\n"


def test_the_token_is_written_nowhere(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0
    assert TOKEN not in done.stdout + done.stderr
    for root in (tmp_path / "out", tmp_path / "hub"):
        assert not [name for name, data in tree(root).items() if TOKEN.encode() in data]


def test_what_was_pushed_downloads_as_it_was_made(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    from huggingface_hub import HfApi, close_session, constants

    hub.repositories["org/name"] = source
    done = ask(hub, tmp_path, "compress", "-m", "org/name", "-o", tmp_path / "out", "--push-to-hub", "user/name")
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        api = HfApi(endpoint=hub.endpoint, token=TOKEN)
        api.snapshot_download("user/name", local_dir=tmp_path / "again")
        close_session()
    found = {name: data for name, data in tree(tmp_path / "again").items() if not name.startswith((".cache", ".git"))}
    assert found == published(tree(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {"README.md"}


def test_a_run_that_is_refused_leaves_the_records_of_the_running_one(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    reached, release = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        release.wait(60)

    hub.faults.append(Fault(r"", "PUT", after=4, call=hang))
    process = begin(hub, tmp_path, *push_of(source, tmp_path, "--push-only"))
    assert reached.wait(60)
    second = ask(hub, tmp_path, *push_of(source, tmp_path, "--push-only", "--overwrite"))
    release.set()
    assert second.stderr.splitlines()[0] == f"error: another run is writing to {tmp_path / 'out'}"
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert set(hub.uploads.values()) == {1}


def test_overwrite_uploads_and_converts_again(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    for more in ((), ("--overwrite",)):
        done = ask(hub, tmp_path, *push_of(source, tmp_path, "--push-only", *more))
        assert done.returncode == 0, done.stderr
        assert held(hub) == expected


def test_the_source_s_own_repository_is_not_replaced(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.create("user/name", private=False)
    added = {}
    for name, data in tree(source).items():
        digest = hashlib.sha256(data).hexdigest()
        (hub.blobs / digest).write_bytes(data)
        added[name] = digest
    hub.commit("user/name", "main", "bf16", added, deleted=[])
    done = ask(hub, tmp_path, *push_of(Path("user/name"), tmp_path))
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-2] == "error: user/name is what the model is made from, and would be replaced by it"
    )
    assert not (tmp_path / "out").exists()
    done = ask(hub, tmp_path, *push_of(Path("user/name"), tmp_path, "--create-pr"))
    assert done.returncode == 0, done.stderr
    assert len(hub.commits("user/name")) == 2


@pytest.mark.parametrize("status", [403, 413])
def test_a_refused_upload_says_why(hub: LoopbackHub, source: Path, tmp_path: Path, status: int) -> None:
    hub.faults.append(Fault(r"", "PUT", times=None, status=status))
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 2
    error = done.stderr.splitlines()[-2]
    assert str(status) in error
    assert "size=" not in error
    assert ("does not let you write" in error) == (status == 403)


def test_an_outage_longer_than_the_client_s_patience(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    hub.faults.append(Fault(r"/preupload/", "POST", times=7, status=503))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "-q"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert held(hub) == expected


def test_a_pull_request_that_was_removed_is_opened_again(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr")).returncode == 2
    hub.faults.clear()
    hub.faults.append(Fault(r"/discussions/1", "GET", times=None, status=404))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed_to"].endswith("/discussions/2")
    assert held(hub, revision="refs/pr/2") == expected


def test_a_git_file_is_left_out(hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """What a worktree or a submodule has instead of a directory; the Hub takes no such file."""
    (source / ".git").write_text("gitdir: elsewhere\n")
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected


def test_push_of_what_push_only_left(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--push-only")).returncode == 0
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/other")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {tmp_path / 'out'} lacks model-00001-of-00005.safetensors",
        "hint: run the command that made it again, without --push-only",
    ]
