"""To the Hub, through the real client: what is uploaded, what a commit holds, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import ROOT, tree
from openquant import OpenQuantError, compress, dequantize
from openquant.api import push
from openquant.files.evaluation import evaluation_digest
from openquant.hub.publish import Publisher
from openquant.options import Push
from openquant.report.cells import gigabytes
from support import forked_ranks, small_checkpoints
from support.evaluation_files import evaluate
from support.forked_ranks import COMMANDS, Rank, finish, forked
from support.loopback_hub import Fault, LoopbackHub

SHARDS = 5
INDEX = "model.safetensors.index.json"
TOKEN = "hf_secretsecret"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as server:
        yield server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "openquant", place]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def write(root: Path) -> Path:
    small_checkpoints.write(root, "Qwen3MoeForCausalLM", shards=SHARDS)
    (root / "tokenizer.json").write_text("{}")
    (root / "LICENSE").write_text("Do as you like.\n")
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source")


@pytest.fixture(scope="module")
def unpublished(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What a local run writes of such a source."""
    root = tmp_path_factory.mktemp("unpublished")
    compress(write(root / "source"), root / "expected")
    return MappingProxyType(published(tree(root / "expected")))


@pytest.fixture
def expected(unpublished: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a repository should hold of that: its card tells how to serve the repository."""
    return served_as(unpublished, "user/name")


def served_as(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    card = files["README.md"]
    assert card.count(b" DIR\n") == 3
    title = name.partition(" ")[0].rpartition("/")[2]
    card = card.replace(b"\n# DIR\n", f"\n# {title}\n".encode())
    return {**files, "README.md": card.replace(b" DIR\n", f" {name}\n".encode())}


def published(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != ".openquant.json"}


def held(hub: LoopbackHub, repo: str = "user/name", revision: str = "main") -> dict[str, bytes]:
    """What the repository holds beside the .gitattributes it was made with."""
    return {name: path.read_bytes() for name, path in hub.files(repo, revision).items() if name != ".gitattributes"}


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with forked_ranks.forks(preloaded=COMMANDS):
        yield


def begin(hub: LoopbackHub, tmp_path: Path, *arguments: object, **environment: str) -> Rank:
    """An openquant verb against the loopback Hub, started."""
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    everything = {**os.environ, **settings, "HF_TOKEN": TOKEN, **environment}
    return forked(ROOT / "openquant" / "__main__.py", *arguments, cwd=ROOT, environment=everything)


def ask(hub: LoopbackHub, tmp_path: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return finish(begin(hub, tmp_path, *arguments, **environment))


def push_of(source: Path, tmp_path: Path, *more: object) -> list[object]:
    return ["compress", "-m", source, "-o", tmp_path / "out", "--push-to-hub", "user/name", *more]


def test_a_run_is_published_with_one_commit(
    hub: LoopbackHub, source: Path, unpublished: Mapping[str, bytes], expected: dict[str, bytes], tmp_path: Path
) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--json"))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert published(tree(tmp_path / "out")) == unpublished
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
    hub.faults.append(Fault(last, "GET", after=1, call=lambda: waited.append(uploaded.wait(8))))
    done = ask(hub, tmp_path, *push_of(Path("org/name"), tmp_path, "-w", "128"))
    assert done.returncode == 0, done.stderr
    assert waited == [True]


def test_options_of_the_commit(hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--private", "--commit-message", "Mine"))
    assert done.returncode == 0, done.stderr
    assert hub.stored["user/name"]["private"]
    assert hub.commits("user/name")[-1][0] == "Mine"


@pytest.fixture
def in_request(unpublished: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the first pull request should hold."""
    return served_as(unpublished, "user/name --revision refs/pr/1")


def test_a_pull_request(hub: LoopbackHub, source: Path, in_request: dict[str, bytes], tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--json"))
    assert done.returncode == 0, done.stderr
    assert held(hub) == {}
    assert held(hub, revision="refs/pr/1") == in_request
    found = json.loads(done.stdout)
    assert found["pushed_to"] == f"{hub.endpoint}/user/name/discussions/1"
    assert (found["repository"], found["pushed_revision"]) == ("user/name", "refs/pr/1")
    # The Hub merges no draft.
    assert hub.stored["user/name"]["requests"][0]["status"] == "open"


def test_a_pull_request_that_stays_a_draft_has_the_model(
    hub: LoopbackHub, source: Path, in_request: dict[str, bytes], tmp_path: Path
) -> None:
    hub.faults.append(Fault(r"/discussions/1/status", "POST", times=None, status=403))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr"))
    assert done.returncode == 0, done.stderr
    assert hub.faults[0].seen and hub.stored["user/name"]["requests"][0]["status"] == "draft"
    assert held(hub, revision="refs/pr/1") == in_request


def test_push_of_a_directory_made_earlier(
    hub: LoopbackHub, source: Path, unpublished: Mapping[str, bytes], expected: dict[str, bytes], tmp_path: Path
) -> None:
    compress(source, tmp_path / "out")
    done = ask(hub, tmp_path, "push", tmp_path / "out", "name")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"pushed to {hub.endpoint}/user/name/commit/")
    assert held(hub) == expected
    assert published(tree(tmp_path / "out")) == unpublished


def test_an_evaluation_goes_along_and_into_the_card(
    hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    compress(source, tmp_path / "out")
    found = evaluate(tmp_path / "out")
    (tmp_path / "out" / "eval.html").write_text(f"<meta name=evaluation content={evaluation_digest(found)}>")
    (tmp_path / "out" / "eval.png").write_text("of another evaluation")
    added = {name: (tmp_path / "out" / name).read_bytes() for name in ("eval.json", "eval.html")}
    again = ("compress", "-m", source, "-o", tmp_path / "out", "--push-to-hub", "other")
    for repo, command in (("name", ("push", tmp_path / "out", "name")), ("other", again)):
        done = ask(hub, tmp_path, *command)
        assert done.returncode == 0, done.stderr
        shown = held(hub, f"user/{repo}")
        card = shown.pop("README.md").decode()
        assert "| mean KL to the source | 0.00129 nats [0.00121, 0.00137] (" in card
        # The picture is of another evaluation, and is not published.
        assert "eval.png" not in card
        assert f"\nopenquant eval user/{repo} --source org/tiny --text prose.txt --samples 8 --length 512\n" in card
        assert shown == {name: data for name, data in {**expected, **added}.items() if name != "README.md"}
    (tmp_path / "out" / "eval.png").write_text(f"drawn of {evaluation_digest(found)}")
    done = ask(hub, tmp_path, "push", tmp_path / "out", "third")
    assert done.returncode == 0, done.stderr
    assert b"](eval.png)\n" in held(hub, "user/third")["README.md"] and "eval.png" in held(hub, "user/third")
    # The picture of an earlier evaluation goes.
    (tmp_path / "out" / "eval.png").unlink()
    done = ask(hub, tmp_path, "push", tmp_path / "out", "third")
    assert done.returncode == 0, done.stderr
    assert b"eval.png" not in held(hub, "user/third")["README.md"] and "eval.png" not in held(hub, "user/third")


def test_an_evaluation_of_another_model_is_not_pushed(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out")
    evaluate(tmp_path / "out", output={"name": "x", "digest": "0" * 64})
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/name")
    assert done.returncode == 2
    assert done.stderr == (
        "error: eval.json is of another model, or of an earlier version of this one\n"
        "hint: run openquant eval again, or remove it; if you changed nothing, openquant verify --source MODEL --full "
        "finds what is damaged\n"
    )
    assert not hub.requests


@pytest.fixture
def evaluated(hub: LoopbackHub, source: Path, tmp_path: Path) -> Path:
    """An evaluation of a model that is in user/name; all other local files of that are gone."""
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    found = evaluate(tmp_path / "out")
    (tmp_path / "later").mkdir()
    shutil.move(tmp_path / "out" / "eval.json", tmp_path / "later" / "figures.json")
    (tmp_path / "later" / "eval.png").write_text(f"drawn of {evaluation_digest(found)}")
    shutil.rmtree(tmp_path / "out")
    return tmp_path / "later" / "figures.json"


@pytest.mark.parametrize("more", [[], ["--push-only"]])
def test_a_push_of_the_same_weights_keeps_the_figures(
    hub: LoopbackHub, source: Path, evaluated: Path, tmp_path: Path, more: list[str]
) -> None:
    assert ask(hub, tmp_path, "push", evaluated, "name").returncode == 0
    before = held(hub)
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    assert held(hub) == before and b"## Measured against the source" in before["README.md"]


def test_a_push_of_other_weights_removes_the_figures(
    hub: LoopbackHub, source: Path, evaluated: Path, tmp_path: Path
) -> None:
    assert ask(hub, tmp_path, "push", evaluated, "name").returncode == 0
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--scheme", "channel"))
    assert done.returncode == 0, done.stderr
    shown = held(hub)
    assert not {"eval.json", "eval.png"} & {*shown} and b"Measured against" not in shown["README.md"]
    # Files of these names without openquant's figures in the card are somebody else's.
    hub.commit("user/name", "main", "by hand", {"eval.json": hub.store(b"mine")}, [])
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--overwrite"))
    assert done.returncode == 0, done.stderr
    assert held(hub)["eval.json"] == b"mine"


@pytest.mark.parametrize("request_number", [None, 1])
def test_an_evaluation_is_added_to_a_published_model(
    hub: LoopbackHub, evaluated: Path, tmp_path: Path, request_number: int | None
) -> None:
    before, commits = held(hub), len(hub.commits("user/name"))
    hand_edited = before["README.md"] + b"\nServed on an L4.\n"
    hub.commit("user/name", "main", "by hand", {"README.md": hub.store(hand_edited)}, [])
    more = ["--create-pr"] if request_number else []
    previewed = ask(hub, tmp_path, "push", evaluated, "name", *more, "--dry-run")
    assert "does    README.md, eval.json, eval.png are uploaded, " in previewed.stdout, previewed.stderr
    assert len(hub.commits("user/name")) == commits + 1
    for _ in range(2):
        done = ask(hub, tmp_path, "push", evaluated, "name", *more)
        assert (done.returncode, done.stderr) == (0, "")
    where = "one commit to pull request 1, which is open" if request_number else "one commit to main"
    previewed = ask(hub, tmp_path, "push", evaluated, "name", *more, "--dry-run")
    assert f"; {where}\n" in previewed.stdout, previewed.stderr
    revision = "refs/pr/1" if request_number else "main"
    shown = held(hub, revision=revision)
    # The second push commits nothing.
    assert b"openquant verify user/name --source org/tiny --full\nopenquant eval user/name --s" in shown["README.md"]
    assert hub.commits("user/name", revision)[commits + 1 :] == [
        ("Evaluation by openquant", ["README.md", "eval.json", "eval.png"])
    ]
    card = shown.pop("README.md").decode()
    assert shown.pop("eval.json") == evaluated.read_bytes()
    assert shown.pop("eval.png") == (evaluated.parent / "eval.png").read_bytes()
    assert shown == {name: data for name, data in before.items() if name != "README.md"}
    start, end = card.index("## Measured against the source\n"), card.index("## How it was made\n")
    assert "| mean KL to the source | 0.00129 nats" in card[start:end] and "](eval.png)\n" in card[start:end]
    assert (card[:start] + card[end:]).encode() == hand_edited
    if not request_number:
        # Later figures replace them.
        later = json.loads(evaluated.read_bytes())
        later["kl"]["mean"] = 0.00777
        evaluated.write_text(json.dumps(later))
        done = ask(hub, tmp_path, "push", evaluated, "name")
        assert done.returncode == 0, done.stderr
        card = held(hub)["README.md"].decode()
        assert "0.00777 nats" in card and "0.00129 nats" not in card and "eval.png" not in card


def test_an_evaluation_is_added_to_an_open_pull_request(
    hub: LoopbackHub, source: Path, evaluated: Path, tmp_path: Path
) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--overwrite"))
    assert done.returncode == 0, done.stderr
    before, main = held(hub, revision="refs/pr/1"), hub.commits("user/name")
    previewed = ask(hub, tmp_path, "push", evaluated, "name@refs/pr/1", "--dry-run")
    assert "; one commit to refs/pr/1\n" in previewed.stdout, previewed.stderr
    done = ask(hub, tmp_path, "push", evaluated, "name@refs/pr/1")
    assert done.returncode == 0, done.stderr
    shown = held(hub, revision="refs/pr/1")
    assert shown["eval.json"] == evaluated.read_bytes() and b"Measured against" in shown["README.md"]
    assert shown.keys() == before.keys() | {"eval.json", "eval.png"} and hub.commits("user/name") == main
    checks = "openquant verify user/name{0} --source org/tiny --full\nopenquant eval user/name{0} --source org/tiny "
    assert checks.format("@refs/pr/1").encode() in shown["README.md"]
    for name, more, says in (
        ("name@", (), "name@ names no revision after the @"),
        ("name@refs/pr/1", ("--create-pr",), "name@refs/pr/1 names a revision to commit to, --create-pr opens a "),
        ("name@refs/pr/2", (), "user/name has no revision refs/pr/2"),
    ):
        done = ask(hub, tmp_path, "push", evaluated, name, *more)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {says}"), done.stderr


def test_a_merged_card_names_the_pull_request_no_more(
    hub: LoopbackHub, source: Path, evaluated: Path, tmp_path: Path
) -> None:
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr")).returncode == 0
    assert ask(hub, tmp_path, "push", evaluated, "name@refs/pr/1").returncode == 0
    in_request = hub.files("user/name", "refs/pr/1")
    assert b"eval user/name@refs/pr/1 " in in_request["README.md"].read_bytes()
    hub.commit(
        "user/name", "main", "merged", {name: hub.store(in_request[name].read_bytes()) for name in in_request}, []
    )
    done = ask(hub, tmp_path, "push", tmp_path / "out", "name")
    assert done.returncode == 0, done.stderr
    card = held(hub)["README.md"]
    assert b"eval user/name --source" in card and b"refs/pr" not in card


@pytest.mark.parametrize("case", ["another model", "no repository", "no evaluation", "several", "private", "replace"])
def test_an_evaluation_that_cannot_be_added(hub: LoopbackHub, evaluated: Path, tmp_path: Path, case: str) -> None:
    words, name = {"private": ["--private"], "replace": ["--replace-weights"]}.get(case, []), "user/name"
    says = f"{evaluated} is a file: an evaluation goes into a repository that exists, and replaces no weights"
    if case == "another model":
        found = json.loads(evaluated.read_bytes())
        evaluated.write_text(json.dumps(found | {"output": {"name": "x", "digest": "0" * 64}}))
        says = f"{evaluated} is not of the model in user/name@"
    elif case == "no repository":
        name, says = "other", "user/other does not exist, so nothing in it was evaluated"
    elif case == "no evaluation":
        evaluated.write_text("{}")
        says = "eval.json has no kl"
    elif case == "several":
        evaluated.write_text(json.dumps({"outputs": [json.loads(evaluated.read_bytes())] * 2}))
        says = f"{evaluated} has the figures of 2 outputs, and a repository holds one\nhint: measure that one alone: "
    before = hub.commits("user/name")
    done = ask(hub, tmp_path, "push", evaluated, name, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}"), done.stderr
    assert hub.commits("user/name") == before and "user/other" not in hub.stored


@pytest.mark.parametrize("state", ["foreign", "missing", "unfinished", "incomplete"])
def test_push_of_what_is_no_finished_output(hub: LoopbackHub, source: Path, tmp_path: Path, state: str) -> None:
    out = tmp_path / "out"
    compress(source, out)
    journal = json.loads((out / ".openquant.json").read_text())
    if state == "foreign":
        (out / ".openquant.json").unlink()
    elif state == "unfinished":
        (out / ".openquant.json").write_text(json.dumps(journal | {"done": False}))
        (out / "README.md").unlink()
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
    "truncated": (FIRST, cut, f"{FIRST} is truncated: it has "),
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
    assert done.stderr.splitlines()[-2].startswith(
        f"error: {tmp_path / 'out'} is damaged: {tmp_path / 'out'}/config.json is not valid "
    )
    assert "user/name" not in hub.stored


def test_a_card_of_any_size_is_not_pushed(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "out")
    card = tmp_path / "out" / "README.md"
    with card.open("r+b") as file:
        file.truncate(1 << 30)
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/name")
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        2,
        [f"error: {card} is larger than 16,777,216 bytes", "hint: download or copy it again"],
    )
    assert "user/name" not in hub.stored


def test_push_of_a_dequantized_directory(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "fp8")
    dequantize(tmp_path / "fp8", tmp_path / "out")
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/name")
    assert done.returncode == 0, done.stderr
    assert held(hub).keys() == published(tree(tmp_path / "out")).keys()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--stream",),
        ("--push-to-hub", "user/name", "--push-only"),
        ("--stream", "--push-to-hub", "user/name", "--push-only"),
    ],
    ids=["plain", "streamed", "deleted", "both"],
)
def test_a_dry_run_says_how_much_disk_the_run_needs(
    hub: LoopbackHub, tmp_path: Path, small_disk: Path, options: tuple[str, ...]
) -> None:
    source = hub.repositories["org/name"] = small_checkpoints.write(
        tmp_path / "source", "Qwen3MoeForCausalLM", shards=14
    )
    (source / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    command = ["compress", "-m", "org/name", "-o", small_disk / "out", "--scheme", "channel", *options]
    plan = ask(hub, tmp_path, *command, "--dry-run", COLUMNS="200")
    planned = ask(hub, tmp_path, *command, "--dry-run", "--json")
    assert (plan.returncode, planned.returncode) == (0, 0), plan.stderr + planned.stderr
    found = json.loads(planned.stdout)
    assert "user/name" not in hub.stored
    done = ask(hub, tmp_path, *command)
    free = shutil.disk_usage(small_disk).free
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2] == (
        f"error: {small_disk}/out needs {found['disk_bytes']:,} bytes, its disk has {free:,} free"
    )
    note = f"the run needs {gigabytes(found['disk_bytes'])} on the disk of {small_disk}/out, which has {gigabytes(free)} free"
    assert f"\nnote: {note}\n" in plan.stdout and note in found["notes"]
    # Where it has room, it needs that much: the output or three shards of it, and five of the source.
    compress(source, tmp_path / "whole", "channel")
    outputs = sorted(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))
    inputs = sorted(path.stat().st_size for path in source.glob("*.safetensors"))
    expected = sum(outputs[-3:] if "--push-only" in options else outputs) + sum(
        inputs[-5:] if "--stream" in options else ()
    )
    others = sum(path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.suffix != ".safetensors")
    assert 0.6 * expected < found["disk_bytes"] < expected + others
    said = f"; the run needs {gigabytes(found['disk_bytes'])} at a time\n"
    assert (said in plan.stdout) == bool(options)
    streamed = re.search(r"\ndownload: .*, of which \S+ MB at a time\n", plan.stdout)
    assert bool(streamed) == ("--stream" in options)


def test_a_dry_run_says_that_the_cache_is_too_small(hub: LoopbackHub, tmp_path: Path, small_disk: Path) -> None:
    source = hub.repositories["org/name"] = write(tmp_path / "source")
    command = ["compress", "-m", "org/name", "-o", tmp_path / "out"]
    planned = ask(hub, tmp_path, *command, "--dry-run", "--json", HF_HOME=str(small_disk))
    assert planned.returncode == 0, planned.stderr
    done = ask(hub, tmp_path, *command, HF_HOME=str(small_disk))
    needed = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert done.returncode == 2
    assert f" needs {needed:,} bytes for org/name, its disk has " in done.stderr
    (note,) = json.loads(planned.stdout)["notes"]
    assert re.fullmatch(
        rf"the run needs {gigabytes(needed)} on the disk of the Hub's cache, which has [45]\d\d kB free", note
    )
    streamed = ask(hub, tmp_path, *command, "--stream", "--dry-run", "--json", HF_HOME=str(small_disk))
    assert json.loads(streamed.stdout)["notes"] == []


@pytest.mark.parametrize("more", [(), ("--activation-scheme", "static", "--samples", 2, "--length", 16)], ids=str)
def test_a_dry_run_refuses_foreign_weights(
    hub: LoopbackHub, source: Path, tmp_path: Path, more: tuple[object, ...]
) -> None:
    """Before a calibration the names of the shards are known too."""
    hub.create("user/name", private=False)
    digest = hashlib.sha256(b"weights").hexdigest()
    (hub.blobs / digest).write_bytes(b"weights")
    hub.commit("user/name", "main", "old", {"model-00001-of-00002.safetensors": digest}, deleted=[])
    said = []
    for dry_run in (["--dry-run"], []):
        done = ask(hub, tmp_path, *push_of(source, tmp_path, *more, *dry_run))
        assert done.returncode == 2
        assert "calibrat" not in done.stderr
        said.append(done.stderr.splitlines()[-2:])
    assert said[0] == said[1]
    assert said[0][0].startswith("error: user/name already holds model-00001-of-00002.safetensors, ")
    assert not (tmp_path / "out").exists()


def test_push_only_keeps_few_shards_on_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    """From one repository to another; neither the source nor the output is ever whole on this disk."""
    source = hub.repositories["org/name"] = small_checkpoints.write(
        tmp_path / "source", "Qwen3MoeForCausalLM", shards=14
    )
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
    planned = ask(hub, tmp_path, *command, "--dry-run", "--json")
    assert json.loads(planned.stdout)["disk_bytes"] == 0
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
    processes: list[Rank] = []
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
    assert error.startswith(f"error: user/name no longer has the upload of {lost}: 400 for ")
    assert hint == "hint: run the same command again: what the Hub lost is made and uploaded again"
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *only))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected
    assert {oid: count for oid, count in hub.uploads.items() if count > 1} == {digest: 2}


def test_a_directory_goes_into_its_pull_request_again_by_create_pr(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    compress(source, tmp_path / "out")
    hints = {"name@refs/pr/1": "write org/name with --create-pr: the same push continues its pull request"}
    for name, hint in {**hints, "name@branch": "write org/name"}.items():
        done = ask(hub, tmp_path, "push", tmp_path / "out", f"user/{name}")
        assert done.returncode == 2
        error, hinted = done.stderr.splitlines()
        assert error.startswith(f"error: user/{name} is no repository id: ") and hinted == f"hint: {hint}"


def test_without_a_token(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, *push_of(source, tmp_path), HF_TOKEN="")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: the Hub does not let you write to user/name: no token was found",
        "hint: log in with a token that may (hf auth login), or push to a repository of your own",
    ]
    # Before anything was converted.
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--dry-run"], ["--gptq", "--scheme", "int4"], ["--fit", "5bits"]])
def test_a_push_is_checked_before_hours_of_work(
    hub: LoopbackHub, source: Path, tmp_path: Path, more: list[str]
) -> None:
    words = ["compress", "-m", source, "-o", tmp_path / "out", *more, "--push-to-hub"]
    done = ask(hub, tmp_path, *words, "others/name")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "error: others/name cannot be created: user is no member of others",
            "hint: push to user/name, or log in as somebody who may",
        ],
    )
    hub.role = "read"
    done = ask(hub, tmp_path, *words, "name")
    assert done.returncode == 2 and "the token of user is read-only" in done.stderr
    assert not hub.stored and not (tmp_path / "out").exists()


def test_foreign_weights_in_the_repository_are_refused(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.create("user/name", private=False)
    digest = hashlib.sha256(b"weights").hexdigest()
    (hub.blobs / digest).write_bytes(b"weights")
    hub.commit("user/name", "main", "old", {"model-00001-of-00002.safetensors": digest}, deleted=[])
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: user/name already holds model-00001-of-00002.safetensors, which would be left beside this model's shards",
        "hint: push to another repository, or delete that file from this one first",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--private", ()),
        ("--create-pr", ()),
        ("--replace-weights", ()),
        ("--commit-message", ("x",)),
        ("--push-only", ()),
    ],
)
def test_options_of_a_push_need_one(
    hub: LoopbackHub, source: Path, tmp_path: Path, option: str, value: tuple[str, ...]
) -> None:
    done = ask(hub, tmp_path, "compress", "-m", source, option, *value)
    assert done.returncode == 2
    assert done.stderr == f"error: {option} goes with --push-to-hub\nhint: say where to push\n"


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_private_is_refused_for_a_public_repository(
    hub: LoopbackHub, source: Path, tmp_path: Path, dry: list[str]
) -> None:
    compress(source, tmp_path / "out")
    for name, private in (("hidden", True), ("seen", False)):
        hub.create(f"user/{name}", private=private)
        done = ask(hub, tmp_path, "push", tmp_path / "out", name, "--private", *dry)
        assert done.returncode == (0 if private else 2), done.stderr
    assert done.stderr == (
        "error: user/seen exists and is public, so what --private asks for is not the case\n"
        "hint: make it private in its settings on the Hub, or leave --private out\n"
    )
    assert held(hub, "user/seen") == {}


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
    assert found == served_as(published(tree(tmp_path / "out")), "user/name")
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


def publish(hub: LoopbackHub, root: Path, repo: str = "user/name") -> str:
    """Put a directory's files into a new repository; the commit."""
    if repo not in hub.stored:
        hub.create(repo, private=False)
    added = {name: hub.store(data) for name, data in tree(root).items() if not name.startswith(".")}
    return hub.commit(repo, "main", "weights", added, deleted=[])


IS_SOURCE = "error: user/name is what the model is made from, and would be replaced by it"
IS_PLAIN = (
    "error: user/name holds unquantized weights (model-00001-of-00005.safetensors), which this model would replace"
)
INSIST = "hint: push to another repository, open a pull request with --create-pr, or insist with --replace-weights"


@pytest.mark.parametrize("named", ["user/name", "User/Name", "user/before"])
def test_the_source_s_own_repository_is_not_replaced(
    hub: LoopbackHub, source: Path, tmp_path: Path, named: str
) -> None:
    publish(hub, source)
    hub.renamed |= {"user/before": "user/name", "User/Name": "user/name"}
    for model, target in ((named, "user/name"), ("user/name", named), (named, named)):
        command = ["compress", "-m", model, "-o", tmp_path / "out", "--push-to-hub", target]
        done = ask(hub, tmp_path, *command)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-2:] == [IS_SOURCE, INSIST]
        assert not (tmp_path / "out").exists()
    assert len(hub.commits("user/name")) == 2
    done = ask(hub, tmp_path, *command, "--create-pr")
    assert done.returncode == 0, done.stderr
    assert len(hub.commits("user/name")) == 2
    assert len(hub.commits("user/name", "refs/pr/1")) == 3


def test_its_own_repository_is_replaced_if_that_is_insisted_on(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    publish(hub, source)
    done = ask(hub, tmp_path, *push_of(Path("user/name"), tmp_path, "--replace-weights"))
    assert done.returncode == 0, done.stderr
    assert [title for title, _ in hub.commits("user/name")][-1] == "name in FP8 (one scale per tensor)"
    done = ask(hub, tmp_path, *push_of(Path("user/name"), tmp_path, "--replace-weights", "--create-pr"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --create-pr replaces nothing, --replace-weights does",
        "hint: give one of them",
    ]


def test_push_of_a_directory_does_not_replace_what_its_card_names(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    """Quantized or not: here the model that a quantized one is dequantized from."""
    compress(source, tmp_path / "fp8")
    publish(hub, tmp_path / "fp8")
    done = ask(hub, tmp_path, "dequantize", "user/name", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    hub.renamed["user/after"] = "user/name"
    for name in ("user/name", "name", "user/after"):
        done = ask(hub, tmp_path, "push", tmp_path / "out", name)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [IS_SOURCE, INSIST]


@pytest.mark.parametrize("answer", [(403, "GatedRepo"), (404, "RepoNotFound"), (403, ""), (401, "")])
def test_a_base_model_that_the_user_cannot_see_is_another_repository(
    hub: LoopbackHub, source: Path, tmp_path: Path, answer: tuple[int, str]
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(source, tmp_path / "models--org--base" / "snapshots" / commit)
    hub.create("user/name", private=False)
    hub.refuse["org/base"] = answer
    done = ask(hub, tmp_path, *push_of(snapshot, tmp_path))
    assert done.returncode == 0, done.stderr
    assert b"base_model: org/base\n" in held(hub)["README.md"]


def test_the_repository_that_a_folder_was_downloaded_from_is_not_replaced(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    """Of which `hf download --local-dir` records the commit."""
    from huggingface_hub import HfApi, close_session, constants

    compress(source, tmp_path / "fp8")
    publish(hub, tmp_path / "fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        HfApi(endpoint=hub.endpoint, token=TOKEN).snapshot_download("user/name", local_dir=tmp_path / "copy")
        close_session()
    # The repository has moved on since.
    hub.commit("user/name", "main", "later", {}, deleted=[])
    command = ["dequantize", tmp_path / "copy", "-o", tmp_path / "out", "--push-to-hub"]
    done = ask(hub, tmp_path, *command, "user/name")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [IS_SOURCE, INSIST]
    # Another repository does not know that commit.
    done = ask(hub, tmp_path, *command, "user/other")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["compress", "dequantize"])
def test_unquantized_weights_are_not_replaced(hub: LoopbackHub, source: Path, tmp_path: Path, verb: str) -> None:
    """Of whatever model they are: nothing here says that it is the source."""
    publish(hub, source)
    if verb == "compress":
        command = push_of(source, tmp_path)
    else:
        (tmp_path / "other").mkdir()
        other = small_checkpoints.write(tmp_path / "other" / "source", "Qwen3MoeForCausalLM", shards=SHARDS, seed=1)
        compress(other, tmp_path / "fp8")
        command = ["dequantize", tmp_path / "fp8", "-o", tmp_path / "out", "--push-to-hub", "user/name"]
    done = ask(hub, tmp_path, *command)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [IS_PLAIN, INSIST]
    assert not (tmp_path / "out").exists()
    done = ask(hub, tmp_path, *command, "--replace-weights")
    assert done.returncode == 0, done.stderr
    # What has replaced them is quantized, or is what is there already.
    done = ask(hub, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert len(hub.commits("user/name")) == 3


def test_unquantized_weights_are_known_to_be_so_by_whatever_server(
    hub: LoopbackHub, source: Path, tmp_path: Path
) -> None:
    publish(hub, source)
    hub.ignores_range = True
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.stderr.splitlines()[-2:] == [IS_PLAIN, INSIST]


def test_what_nobody_can_load_is_replaced(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(source, tmp_path / "broken")
    for number, shard in enumerate(sorted(broken.glob("*.safetensors"))):
        shard.write_bytes((b"", b"short", b"\xff" * 50, b"\x02" + bytes(7) + b"{}", b"\x00" * 5000)[number])
    publish(hub, broken)
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr


def test_quantized_weights_are_replaced(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "block", "block")
    publish(hub, tmp_path / "block")
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(hub.commits("user/name")) == 3


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


@pytest.mark.parametrize("gone", ["removed", "closed"])
def test_a_pull_request_that_is_gone_is_opened_again(
    hub: LoopbackHub, source: Path, unpublished: Mapping[str, bytes], tmp_path: Path, gone: str
) -> None:
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr")).returncode == 2
    hub.faults.clear()
    if gone == "removed":
        hub.faults.append(Fault(r"/discussions/1", "GET", times=None, status=404))
    else:
        hub.end_pull_request("user/name", 1, "closed")
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed_to"].endswith("/discussions/2")
    assert held(hub, revision="refs/pr/2") == served_as(unpublished, "user/name --revision refs/pr/2")


def test_no_second_pull_request_is_opened(
    hub: LoopbackHub, source: Path, in_request: dict[str, bytes], tmp_path: Path
) -> None:
    """After success, from another directory, with `push`, and once it was merged."""
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr"))
    assert done.returncode == 0, done.stderr
    serve = "\n  vllm serve user/name --revision refs/pr/1\n  python -m sglang.launch_server --model-path user/name "
    assert f"{serve}--revision refs/pr/1\n" in done.stdout
    # Others of the user's, more than a page of them, and one that somebody else opened for the same.
    hub.open_pull_request("user/name", "main", about=hub.stored["user/name"]["requests"][0]["about"], author="else")
    for _ in range(3):
        hub.open_pull_request("user/name", "main", "Another", "of mine")
    count = len(hub.stored["user/name"]["requests"])
    elsewhere = ["compress", "-m", source, "-o", tmp_path / "elsewhere", "--push-to-hub", "user/name", "--create-pr"]
    for command in (
        push_of(source, tmp_path, "--create-pr", "--commit-message", "Mine"),
        elsewhere,
        ["push", tmp_path / "out", "name", "--create-pr"],
    ):
        done = ask(hub, tmp_path, *command)
        assert done.returncode == 0, done.stderr
        assert f"pushed to {hub.endpoint}/user/name/discussions/1\n" in done.stdout
        assert len(hub.stored["user/name"]["requests"]) == count
    assert held(hub, revision="refs/pr/1") == in_request
    assert len(hub.commits("user/name", "refs/pr/1")) == 2
    hub.end_pull_request("user/name", 1, "merged")
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr"))
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.endpoint}/user/name/discussions/1\n" in done.stdout
    assert "\n  vllm serve user/name\n" in done.stdout
    assert len(hub.stored["user/name"]["requests"]) == count
    assert len(hub.commits("user/name")) == 2
    # Another plan is another matter.
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr", "--overwrite", "-w", "128"))
    assert done.returncode == 0, done.stderr
    assert len(hub.stored["user/name"]["requests"]) == count + 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"/discussions$", "POST", status=500),
        Fault(r"/discussions$", "POST", cut=0),
        Fault(r"/discussions/1$", "GET", status=500),
        Fault(r"/discussions$", "GET", status=500),
    ],
    ids=["refused", "answer lost", "opened", "looked for"],
)
def test_a_pull_request_is_opened_once_whatever_goes_wrong(
    hub: LoopbackHub, source: Path, in_request: dict[str, bytes], tmp_path: Path, fault: Fault
) -> None:
    hub.faults.append(Fault(**{**vars(fault), "seen": 0}))
    done = ask(hub, tmp_path, *push_of(source, tmp_path, "--create-pr"))
    assert done.returncode == 0, done.stderr
    assert hub.faults[0].seen
    assert len(hub.stored["user/name"]["requests"]) == 1
    assert held(hub, revision="refs/pr/1") == in_request


def test_a_git_file_is_left_out(hub: LoopbackHub, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """What a worktree or a submodule has instead of a directory; the Hub takes no such file."""
    (source / ".git").write_text("gitdir: elsewhere\n")
    done = ask(hub, tmp_path, *push_of(source, tmp_path))
    assert done.returncode == 0, done.stderr
    assert held(hub) == expected


CARD = {"errors": [{"message": '"license" must be one of [mit]'}, {"message": '"tags[0]" must be a string'}]}
PERMISSION = "use a token with write permission (https://huggingface.co/settings/tokens): hf auth login"


@pytest.mark.parametrize(
    ("fault", "more", "error", "hint"),
    [
        (Fault(r"/validate-yaml", "POST", times=None, status=400, body=CARD), (),
         'user/name refuses the model card: 400 for /api/validate-yaml: "license" must be one of [mit] "tags[0]" must be '
         "a string",
         "correct these entries at the top of README.md, of the source if the model is still to be converted"),
        (Fault(r"/auth-check/write", "GET", times=None, status=403, message="Not yours"), (),
         "the Hub does not let you write to user/name: 403 for /api/models/user/name/auth-check/write: Not yours",
         "log in with a token that may (hf auth login), or push to a repository of your own"),
        (Fault(r"/discussions", "GET", times=None, status=403, message="Discussions are disabled for this repo"),
         ("--create-pr",),
         "the Hub does not let you write to user/name: 403 for /api/models/user/name/discussions: Discussions are "
         "disabled for this repo", "turn discussions on in the repository's settings, or push without --create-pr"),
    ],
    ids=["card", "permission", "discussions"],
)  # fmt: skip
def test_what_will_be_refused_is_known_before_anything_is_converted(
    hub: LoopbackHub, source: Path, tmp_path: Path, fault: Fault, more: tuple[str, ...], error: str, hint: str
) -> None:
    hub.create("user/name", private=False)
    hub.faults.append(fault)
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *more))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [f"error: {error}", f"hint: {hint}"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [(), ("--create-pr",)])
def test_a_token_that_may_only_read(hub: LoopbackHub, source: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    hub.role = "read"
    done = ask(hub, tmp_path, *push_of(source, tmp_path, *more))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "error: user/name cannot be written to: the token of user is read-only",
        f"hint: {PERMISSION}",
    ]
    assert not (tmp_path / "out").exists()
    assert not hub.stored


def test_a_card_that_is_refused_makes_no_repository(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault(r"/validate-yaml", "POST", times=None, status=400, body=CARD))
    assert ask(hub, tmp_path, *push_of(source, tmp_path)).returncode == 2
    assert not hub.stored


def test_what_another_plan_uploaded_counts_for_nothing(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    """Nor what was uploaded to another repository."""
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--push-only")).returncode == 2
    digest = json.loads((tmp_path / "out" / ".openquant.json").read_text())["digest"]
    shards = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    only = Push("user/name", only=True)
    assert Publisher(only, tmp_path / "out", digest, shards).elsewhere() == set(shards)
    assert Publisher(only, tmp_path / "out", digest[::-1], shards).elsewhere() == set()
    assert Publisher(replace(only, name="user/other"), tmp_path / "out", digest, shards).elsewhere() == set()
    # A run of another plan that finds those records (of a directory copied together, say) uploads its own shards.
    hub.faults.clear()
    block = tmp_path / "block"
    hub.faults.append(Fault(r"", "PUT", status=403))
    command = ["compress", "-m", source, "-w", "128", "-o", block, "--push-to-hub", "user/name", "--push-only"]
    assert ask(hub, tmp_path, *command).returncode == 2
    shutil.copytree(tmp_path / "out" / ".openquant" / "pushed", block / ".openquant" / "pushed", dirs_exist_ok=True)
    done = ask(hub, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    compress(source, tmp_path / "again", "block")
    made = published(tree(tmp_path / "again"))
    assert {name: data for name, data in held(hub).items() if name != "README.md"} == {
        name: data for name, data in made.items() if name != "README.md"
    }


def test_push_of_what_push_only_left(hub: LoopbackHub, source: Path, tmp_path: Path) -> None:
    assert ask(hub, tmp_path, *push_of(source, tmp_path, "--push-only")).returncode == 0
    done = ask(hub, tmp_path, "push", tmp_path / "out", "user/other")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {tmp_path / 'out'} lacks model-00001-of-00005.safetensors",
        "hint: run the command that made it again; with --push-only nothing is left to push",
    ]


def test_the_title_of_a_commit_is_readable_whatever_a_directory_s_name_has(tmp_path: Path, hub: LoopbackHub) -> None:
    name = "a\x1b[31m\nb"
    assert ask(hub, tmp_path, *push_of(write(tmp_path / name), tmp_path)).returncode == 0
    title, _ = hub.commits("user/name")[-1]
    assert title.startswith("a\\x1b[31m\\nb in FP8") and title.isprintable()
    (tmp_path / "out").rename(tmp_path / f"out{name}")
    assert ask(hub, tmp_path, "push", tmp_path / f"out{name}", "user/other").returncode == 0
    assert hub.commits("user/other")[-1][0] == "other"
