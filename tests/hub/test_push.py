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
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import change_json, tree
from openquant import OpenQuantError, compress
from openquant.api import push
from openquant.files.cards import evaluation_digest
from openquant.hub.publish import Publisher
from openquant.options import Push
from openquant.report.cells import gigabytes
from support import small_checkpoints
from support.evaluation_files import evaluate
from support.hub_site import SHORT_WAITS, TOKEN, Site
from support.loopback_hub import Fault
from support.starting import Command, finish

SHARDS = 5
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00005.safetensors"
FOREIGN = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose card says nothing of where it is from."""
    root = tmp_path_factory.mktemp("model") / "source"
    small_checkpoints.write(root, "Qwen3MoeForCausalLM", shards=SHARDS)
    (root / "tokenizer.json").write_text("{}")
    (root / "LICENSE").write_text("Do as you like.\n")
    (root / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return root


NewSite = Callable[..., Site]


@pytest.fixture
def new_site(model: Path, tmp_path: Path) -> NewSite:
    """A Hub of its own with a copy of the model for each name."""
    return lambda *name: Site(tmp_path / "-".join(map(str, name)), model)


@pytest.fixture
def site(new_site: NewSite) -> Iterator[Site]:
    with new_site("site") as found:
        yield found


@pytest.fixture(scope="module")
def unpublished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """What a local run writes of the model."""
    root = tmp_path_factory.mktemp("unpublished")
    compress(model, root / "expected")
    return MappingProxyType(published(tree(root / "expected")))


@pytest.fixture
def expected(unpublished: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a repository should hold of that: its card tells how to serve the repository."""
    return served_as(unpublished, "user/name")


@pytest.fixture
def in_request(unpublished: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the first pull request should hold."""
    return served_as(unpublished, "user/name --revision refs/pr/1")


def served_as(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    card = files["README.md"]
    assert card.count(b" DIR\n") == 3
    title = name.partition(" ")[0].rpartition("/")[2]
    card = card.replace(b"\n# DIR\n", f"\n# {title}\n".encode())
    return {**files, "README.md": card.replace(b" DIR\n", f" {name}\n".encode())}


def published(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != ".openquant.json"}


def without_card(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in published(files).items() if name != "README.md"}


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


def test_a_run_is_published_with_one_commit(site, unpublished, expected):
    hub = site.hub
    done = site.works(*site.push("--json"))
    assert site.held() == expected
    assert published(tree(site.out)) == unpublished
    (_, first), (title, added) = hub.commits("user/name")
    assert first == [".gitattributes"]
    assert title == "source in FP8 (one scale per tensor)"
    assert set(added) == set(expected)
    assert json.loads(done.stdout)["pushed_to"].startswith(f"{hub.endpoint}/user/name/commit/")
    assert not hub.stored["user/name"]["private"]
    assert set(hub.uploads.values()) == {1}
    assert not (site.out / ".openquant").exists()
    # Again, there is nothing to do, and no empty commit is made.
    again = site.works(*site.push())
    assert len(hub.commits("user/name")) == 2
    assert set(hub.uploads.values()) == {1}
    # The token is written nowhere.
    assert TOKEN not in done.stdout + done.stderr + again.stdout + again.stderr
    for root in (site.out, site.root / "hub"):
        assert not [name for name, data in tree(root).items() if TOKEN.encode() in data]
    # The directory can be pushed elsewhere, with other words and to a private repository.
    done = site.works("push", site.out, "other", "--private", "--commit-message", "Mine")
    assert done.stdout.startswith(f"pushed to {hub.endpoint}/user/other/commit/")
    assert site.held("user/other") == served_as(unpublished, "user/other")
    assert published(tree(site.out)) == unpublished
    assert hub.stored["user/other"]["private"]
    assert hub.commits("user/other")[-1][0] == "Mine"
    # A run has the same options, and uploads and converts all again if it is to.
    site.works("compress", "-m", site.source, "-o", site.out, "--push-to-hub", "third", "--private",
               "--commit-message", "Mine", "--overwrite", "--push-only")  # fmt: skip
    assert site.held("user/third") == served_as(unpublished, "user/third")
    assert hub.stored["user/third"]["private"]
    assert hub.commits("user/third")[-1][0] == "Mine"


def test_shards_are_uploaded_while_others_are_fetched_and_converted(site: Site) -> None:
    """The last shard of the source does not come before the first one of the output is uploaded."""
    hub = site.hub
    hub.repositories["org/name"] = site.source
    uploaded = threading.Event()
    hub.faults.append(Fault(r"", "PUT", call=uploaded.set))
    waited: list[bool] = []
    last = r"resolve/.*model-00005-of-00005\.safetensors$"
    hub.faults.append(Fault(last, "GET", after=1, call=lambda: waited.append(uploaded.wait(8))))
    site.works("compress", "-m", "org/name", "-o", site.out, "--push-to-hub", "user/name", "-w", "128")
    assert waited == [True]


def test_a_pull_request(site: Site, in_request: dict[str, bytes]) -> None:
    found = json.loads(site.works(*site.push("--create-pr", "--json")).stdout)
    assert site.held() == {}
    assert site.held(revision="refs/pr/1") == in_request
    assert found["pushed_to"] == f"{site.hub.endpoint}/user/name/discussions/1"
    assert (found["repository"], found["pushed_revision"]) == ("user/name", "refs/pr/1")
    assert site.hub.stored["user/name"]["requests"][0]["status"] == "open"


def test_an_evaluation_goes_along_and_into_the_card(site: Site, expected: dict[str, bytes]) -> None:
    compress(site.source, site.out)
    found = evaluate(site.out)
    (site.out / "eval.html").write_text(f"<meta name=evaluation content={evaluation_digest(found)}>")
    (site.out / "eval.png").write_text("of another evaluation")
    added = {name: (site.out / name).read_bytes() for name in ("eval.json", "eval.html")}
    again = ("compress", "-m", site.source, "-o", site.out, "--push-to-hub", "other")
    for repo, command in (("name", ("push", site.out, "name")), ("other", again)):
        site.works(*command)
        shown = site.held(f"user/{repo}")
        card = shown.pop("README.md").decode()
        assert "| mean KL to the source | 0.00129 nats [0.00121, 0.00137] (" in card
        # The picture is of another evaluation, and is not published.
        assert "eval.png" not in card
        assert f"\nopenquant eval user/{repo} --source org/tiny --samples 8 --length 512\n" in card
        assert shown == without_card(expected | added)

    (site.out / "eval.png").write_text(f"drawn of {evaluation_digest(found)}")
    site.works("push", site.out, "third")
    assert b"](eval.png)\n" in site.held("user/third")["README.md"] and "eval.png" in site.held("user/third")

    # The picture of an earlier evaluation goes.
    (site.out / "eval.png").unlink()
    site.works("push", site.out, "third")
    assert b"eval.png" not in site.held("user/third")["README.md"] and "eval.png" not in site.held("user/third")

    # Figures of another model are not pushed.
    evaluate(site.out, output={"name": "x", "digest": "0" * 64})
    site.hub.requests.clear()
    done = site.ask("push", site.out, "user/name")
    assert (done.returncode, done.stderr) == (
        2,
        "error: eval.json is of another model, or of an earlier version of this one\n"
        "hint: run openquant eval again, or remove it; if you changed nothing, openquant verify --source MODEL --full "
        "finds what is damaged\n",
    )
    assert not site.hub.requests


@pytest.fixture
def evaluated(site: Site) -> Path:
    """An evaluation of a model that is in user/name; all other local files of that are gone."""
    site.works(*site.push())
    found = evaluate(site.out)
    (site.root / "later").mkdir()
    shutil.move(site.out / "eval.json", site.root / "later" / "figures.json")
    (site.root / "later" / "eval.png").write_text(f"drawn of {evaluation_digest(found)}")
    shutil.rmtree(site.out)
    return site.root / "later" / "figures.json"


def test_other_weights_remove_an_evaluation(site: Site, evaluated: Path) -> None:
    site.works("push", evaluated, "name")
    assert b"## Measured against the source" in site.held()["README.md"]
    site.works(*site.push("--scheme", "channel"))
    shown = site.held()
    assert not {"eval.json", "eval.png"} & {*shown} and b"Measured against" not in shown["README.md"]


def test_an_evaluation_is_added_to_a_published_model(site: Site, evaluated: Path, subtests: pytest.Subtests) -> None:
    before, commits = site.held(), len(site.hub.commits("user/name"))
    hand_edited = before["README.md"] + b"\nServed on an L4.\n"
    site.hub.commit("user/name", "main", "by hand", {"README.md": site.hub.store(hand_edited)}, [])
    for more, revision, where in (
        (["--create-pr"], "refs/pr/1", "a pull request is opened"),
        ([], "main", "one commit to main"),
    ):
        with subtests.test(revision=revision):
            previewed = site.works("push", evaluated, "name", *more, "--dry-run")
            assert "does    README.md, eval.json, eval.png are uploaded, " in previewed.stdout, previewed.stderr
            assert f"; {where}\n" in previewed.stdout, previewed.stderr
            assert len(site.hub.commits("user/name")) == commits + 1
            # To main a second push commits nothing.
            for _ in range(1 if more else 2):
                assert site.works("push", evaluated, "name", *more).stderr == ""
            shown = site.held(revision=revision)
            checks = b"openquant verify user/name --source org/tiny --full\nopenquant eval user/name --s"
            assert checks in shown["README.md"]
            assert site.hub.commits("user/name", revision)[commits + 1 :] == [
                ("Evaluation by openquant", ["README.md", "eval.json", "eval.png"])
            ]
            card = shown.pop("README.md").decode()
            assert shown.pop("eval.json") == evaluated.read_bytes()
            assert shown.pop("eval.png") == (evaluated.parent / "eval.png").read_bytes()
            assert shown == without_card(before)
            start, end = card.index("## Measured against the source\n"), card.index("## Model card of the source\n")
            assert "| mean KL to the source | 0.00129 nats" in card[start:end] and "](eval.png)\n" in card[start:end]
            assert (card[:start] + card[end:]).encode() == hand_edited

    # Later figures replace them.
    change_json(evaluated, lambda found: found["kl"].update(mean=0.00777))
    site.works("push", evaluated, "name")
    card = site.held()["README.md"].decode()
    assert "0.00777 nats" in card and "0.00129 nats" not in card and "eval.png" not in card


def test_an_evaluation_is_added_to_an_open_pull_request(site: Site, evaluated: Path) -> None:
    site.works(*site.push("--create-pr", "--overwrite"))
    before, main = site.held(revision="refs/pr/1"), site.hub.commits("user/name")
    previewed = site.works("push", evaluated, "name@refs/pr/1", "--dry-run")
    assert "; one commit to refs/pr/1\n" in previewed.stdout, previewed.stderr
    site.works("push", evaluated, "name@refs/pr/1")
    shown = site.held(revision="refs/pr/1")
    assert shown["eval.json"] == evaluated.read_bytes() and b"Measured against" in shown["README.md"]
    assert shown.keys() == before.keys() | {"eval.json", "eval.png"} and site.hub.commits("user/name") == main
    checks = "openquant verify user/name{0} --source org/tiny --full\nopenquant eval user/name{0} --source org/tiny "
    assert checks.format("@refs/pr/1").encode() in shown["README.md"]
    for name, more, says in (
        ("name@", (), "name@ names no revision after the @"),
        ("name@refs/pr/1", ("--create-pr",), "name@refs/pr/1 names a revision to commit to, --create-pr opens a "),
        ("name@refs/pr/2", (), "user/name has no revision refs/pr/2"),
    ):
        error, *_ = site.refused("push", evaluated, name, *more)
        assert error.startswith(f"error: {says}"), error


def test_an_evaluation_that_cannot_be_added(site: Site, evaluated: Path, subtests: pytest.Subtests) -> None:
    found = json.loads(evaluated.read_bytes())
    several = f"{evaluated} has the figures of 2 outputs, and a repository holds one"
    before = site.hub.commits("user/name")
    for words, figures, says in (
        (["user/name"], found | {"output": {"name": "x", "digest": "0" * 64}},
         f"{evaluated} is not of the model in user/name@"),
        (["other"], found, "user/other does not exist, so nothing in it was evaluated"),
        (["user/name"], {}, "eval.json has no kl"),
        (["user/name"], {"outputs": [found] * 2}, several),
    ):  # fmt: skip
        with subtests.test(words=words, says=says):
            evaluated.write_text(json.dumps(figures))
            error, hint = site.refused("push", evaluated, *words)
            assert error.startswith(f"error: {says}")
            assert hint.startswith("hint: measure that one alone: ") == (says == several)
            assert site.hub.commits("user/name") == before and "user/other" not in site.hub.stored


def unfinished(out: Path) -> None:
    change_json(out / ".openquant.json", lambda journal: journal.update(done=False))
    (out / "README.md").unlink()


def test_push_of_what_is_no_finished_output(monkeypatch, model, tmp_path, subtests):
    # Nothing may be asked of a Hub.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    compress(model, tmp_path / "whole")
    for says, harm in {
        "was not made by openquant": lambda out: (out / ".openquant.json").unlink(),
        "is not finished": unfinished,
        "is not a directory": shutil.rmtree,
        "lacks model-00002-of-00005.safetensors": lambda out: (out / "model-00002-of-00005.safetensors").unlink(),
    }.items():
        with subtests.test(says):
            out = shutil.copytree(tmp_path / "whole", tmp_path / says)
            harm(out)
            with pytest.raises(OpenQuantError) as raised:
                push(out, Push("user/name"))
            assert raised.value.message == f"{out} {says}"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda path: change_json(path, change)


LISTED = "model.layers.1.self_attn.o_proj"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (FIRST, cut, f"{FIRST} is truncated: it has "),
    "config": ("config.json", lambda path: path.write_text("{"), "config.json is not valid JSON: "),
    "index": (INDEX, lambda path: path.write_text("[]"), f"{INDEX} has no weight_map "),
    "short index": (INDEX, changed(lambda index: index["weight_map"].pop("lm_head.weight")), "lm_head.weight, which"),
    "no quantization": ("config.json", changed(lambda config: config.pop("quantization_config")),
                        " is F8_E4M3, but config.json has no quantization_config"),
    "listed": ("config.json", changed(lambda config: config["quantization_config"]["ignored_layers"].append(LISTED)),
               " is F8_E4M3, but ignored_layers lists model.layers.1."),
}  # fmt: skip


def test_push_of_a_damaged_directory(monkeypatch, model, tmp_path, subtests):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "out"
    compress(model, out)
    for damage, (name, harm, message) in DAMAGE.items():
        with subtests.test(damage=damage):
            whole = (out / name).read_bytes()
            harm(out / name)
            with pytest.raises(OpenQuantError) as raised:
                push(out, Push("user/name"))
            (out / name).write_bytes(whole)
            assert raised.value.message.startswith(f"{out} is damaged: ")
            assert message in raised.value.message
            assert raised.value.hint == (
                "run the command that made it again with --overwrite, or copy it again from where it is whole"
            )

    # Neither is a shard that no run wrote.
    index, other = json.loads((out / INDEX).read_bytes()), "model-00006-of-00005.safetensors"
    save_file({"another.weight": np.zeros(3, np.float32)}, out / other)
    placed = index["weight_map"]
    (out / INDEX).write_text(json.dumps({"weight_map": {**placed, "another.weight": other}}))
    with pytest.raises(OpenQuantError, match=f"{other} holds tensors, and no run wrote it"):
        push(out, Push("user/name"))
    (out / other).unlink()


def test_what_was_damaged_since_is_not_pushed_by_a_run_that_finds_it_complete(site: Site) -> None:
    compress(site.source, site.out)
    (site.out / "config.json").write_text("{")
    error, _ = site.refused(*site.push())
    assert error.startswith(f"error: {site.out} is damaged: {site.out}/config.json is not valid ")
    assert "user/name" not in site.hub.stored


def test_a_dry_run_says_how_much_disk_the_run_needs(site, small_disk, tmp_path, subtests):
    source = site.hub.repositories["org/name"] = small_checkpoints.write(
        tmp_path / "source", "Qwen3MoeForCausalLM", shards=14
    )
    (source / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    compress(source, tmp_path / "whole", "channel")
    outputs = sorted(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))
    inputs = sorted(path.stat().st_size for path in source.glob("*.safetensors"))
    others = sum(path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.suffix != ".safetensors")
    out = small_disk / "out"
    for options in ((), ("--stream", "--push-to-hub", "user/name", "--push-only")):
        with subtests.test(options=options):
            command = ["compress", "-m", "org/name", "-o", out, "--scheme", "channel", *options]
            plan = site.works(*command, "--dry-run", COLUMNS="200")
            found = json.loads(site.works(*command, "--dry-run", "--json").stdout)
            assert "user/name" not in site.hub.stored
            needed = found["disk_bytes"]
            error, _ = site.refused(*command)
            free = shutil.disk_usage(small_disk).free
            assert error == f"error: {out} needs {needed:,} bytes, its disk has {free:,} free"
            note = error.removeprefix("error: ")
            assert f"\nnote: {note}\n" in plan.stdout and note in found["notes"]
            # Where it has room, it needs that much: the output or three shards of it, and five of the source.
            expected = sum(outputs[-3:] if "--push-only" in options else outputs)
            expected += sum(inputs[-5:] if "--stream" in options else ())
            assert 0.6 * expected < needed < expected + others
            assert (f"; the run needs {gigabytes(needed)} at a time\n" in plan.stdout) == bool(options)
            streamed = re.search(r"\ndownload: .*, of which \S+ MB at a time\n", plan.stdout)
            assert bool(streamed) == ("--stream" in options)


def test_foreign_weights_in_the_repository_are_refused(site: Site) -> None:
    site.hub.create("user/name", private=False)
    site.hub.commit("user/name", "main", "old", {FOREIGN: site.hub.store(b"weights")}, deleted=[])
    # Before a calibration the names of the shards are known too.
    for more in (["--dry-run"], ["--activation-scheme", "static", "--samples", 2, "--length", 16]):
        assert site.refused(*site.push(*more)) == [
            f"error: user/name already holds {FOREIGN}, which would be left beside this model's shards",
            "hint: push to another repository, or delete that file from this one first",
        ], more
        assert not site.out.exists()


def test_push_only_keeps_few_shards_on_disk(site: Site, tmp_path: Path) -> None:
    """From one repository to another; neither the source nor the output is ever whole on this disk."""
    hub, out = site.hub, site.out
    source = hub.repositories["org/name"] = small_checkpoints.write(
        tmp_path / "source", "Qwen3MoeForCausalLM", shards=14
    )
    compress(source, tmp_path / "expected", "block")
    most: list[tuple[int, int]] = []

    def measure() -> None:
        sources = [path for path in (out / ".openquant").rglob("*") if path.suffix in (".safetensors", ".incomplete")]
        most.append((len(list(out.glob("*.safetensors"))), len(sources)))

    hub.faults.append(Fault(r"", "PUT", times=None, call=measure, delay=0.3))
    command = ["compress", "-m", "org/name", "-o", out, "--stream", "--push-to-hub", "user/name", "--push-only"]
    command += ["-w", "128"]
    site.works(*command)
    assert max(shards for shards, _ in most) <= 3  # publish.AT_ONCE
    assert max(shards for _, shards in most) <= 5  # those, and fetch.AHEAD
    assert len(most) == 14
    assert without_card(site.held()) == without_card(tree(tmp_path / "expected"))
    assert not list(out.glob("*.safetensors"))
    assert not list((site.root / "hf").rglob("*.safetensors"))

    # Again, everything is known to be there.
    assert json.loads(site.works(*command, "--dry-run", "--json").stdout)["disk_bytes"] == 0
    requests = dict(hub.requests)
    site.works(*command)
    assert set(hub.uploads.values()) == {1}
    assert len(hub.commits("user/name")) == 2
    fetched = [path for path in hub.requests if "resolve" in path and hub.requests[path] - requests.get(path, 0) > 2]
    assert not [path for path in fetched if path.startswith("GET") and ".safetensors" in path and "index" not in path]

    # Nothing is left to push from here.
    assert site.refused("push", out, "user/other") == [
        f"error: {out} lacks model-00001-of-00014.safetensors",
        "hint: run the command that made it again; with --push-only nothing is left to push",
    ]


def test_a_killed_push_continues_without_repeating_anything(site: Site, expected: dict[str, bytes]) -> None:
    processes: list[Command] = []
    ready = threading.Event()

    def kill() -> None:
        ready.wait(60)
        processes[0].kill()

    site.hub.faults.append(Fault(r"", "PUT", after=2, call=kill, cut_upload=100))
    processes.append(site.begin(*site.push()))
    ready.set()
    assert finish(processes[0]).returncode == -signal.SIGKILL
    assert site.held() == {}

    before = {path.name: path.stat().st_mtime_ns for path in site.out.glob("*.safetensors")}
    site.works(*site.push())
    assert site.held() == expected
    assert set(site.hub.uploads.values()) == {1}
    after = {path.name: path.stat().st_mtime_ns for path in site.out.glob("*.safetensors")}
    assert after == {**after, **before}


ONCE = {
    "409": Fault(r"/commit/", "POST", times=2, status=409),
    "answer lost": Fault(r"/commit/", "POST", cut=0),
    # An outage longer than the client's patience.
    "outage": Fault(r"/preupload/", "POST", times=7, status=503),
}


def test_what_goes_wrong_once_does_not_show(new_site, expected, subtests):
    for name, fault in ONCE.items():
        with subtests.test(name), new_site(name) as site:
            site.hub.faults.append(replace(fault))
            if name == "outage":
                done = site.fresh(*site.push("-q"), before=SHORT_WAITS)
                assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            else:
                site.works(*site.push(), before=SHORT_WAITS)
            assert site.hub.faults[0].seen > fault.after
            assert site.held() == expected
            assert len(site.hub.commits("user/name")) == 2


def test_refusals_are_explained_and_nothing_is_lost(new_site, expected, subtests):
    does_not_let = "the Hub does not let you write to user/name: "
    for method, path, status, message in (
        ("POST", r"/repos/create", 403, does_not_let),
        ("POST", r"/commit/", 400, "user/name refuses what is sent: "),
        ("PUT", r"", 403, does_not_let),
    ):
        with subtests.test(path=path, status=status), new_site(path.replace("/", "."), status) as site:
            site.hub.faults.append(Fault(path, method, times=None, status=status))
            if path == r"/repos/create":
                gone = Fault(r"/api/models/user/name$", "GET", times=None, status=404, code="RepoNotFound")
                site.hub.faults.append(gone)
            done = site.ask(*site.push())
            assert done.returncode == 2
            error = done.stderr.splitlines()[-2]
            assert error.startswith(f"error: {message}") and str(status) in error, error
            assert ("does not let you write" in error) == (status == 403)
            assert "size=" not in error
            assert TOKEN not in done.stdout + done.stderr
            assert "user/name" not in site.hub.stored or site.held() == {}
            site.hub.faults.clear()
            site.works(*site.push())
            assert site.held() == expected


def test_a_refused_commit_forgets_no_upload(site: Site, expected: dict[str, bytes]) -> None:
    hub, reason = site.hub, "You have exceeded your storage limit; README.md is not found wanting."
    hub.faults.append(Fault(r"/commit/", "POST", times=None, status=400, message=reason))
    for _ in range(2):
        assert site.refused(*site.push("--push-only")) == [
            f"error: user/name refuses what is sent: 400 for /api/models/user/name/commit/main: {reason}",
            "hint: make room in that account or get it more storage (https://huggingface.co/settings/billing), then run "
            "the same command again: what is converted and uploaded is kept",
        ]
    hub.faults.clear()
    site.works(*site.push("--push-only"))
    assert site.held() == expected
    assert set(hub.uploads.values()) == {1}


def uploaded_but_not_committed(site: Site, *more: str) -> None:
    """The state after a run whose commit alone was refused."""
    site.hub.faults.append(Fault(r"/commit/", "POST", times=None, status=403))
    site.refused(*site.push(*more))
    site.hub.faults.clear()


def test_uploads_of_a_source_that_moved_are_made_again(site: Site) -> None:
    uploaded_but_not_committed(site, "--push-only")
    shard = site.source / "model-00003-of-00005.safetensors"
    data, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(data[:-1000] + bytes(1000))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    site.works(*site.push("--push-only"))
    compress(site.source, site.root / "fresh")
    assert without_card(site.held()) == without_card(tree(site.root / "fresh"))


def test_a_shard_that_changed_after_its_upload_is_uploaded_again(site: Site, expected: dict[str, bytes]) -> None:
    name = "model-00003-of-00005.safetensors"
    uploaded_but_not_committed(site)
    changed = expected[name][:-1] + bytes([expected[name][-1] ^ 1])
    (site.out / name).write_bytes(changed)
    site.works("push", site.out, "user/name")
    assert site.held()[name] == changed


def test_what_the_hub_lost_is_uploaded_again(site: Site, expected: dict[str, bytes]) -> None:
    """It drops uploads that no commit names after a while."""
    digest = hashlib.sha256(expected["model-00003-of-00005.safetensors"]).hexdigest()
    lost = "Your push was rejected because an LFS pointer pointed to a file that does not exist."
    uploaded_but_not_committed(site, "--push-only")
    (site.hub.blobs / digest).unlink()
    site.hub.faults.append(Fault(r"/commit/", "POST", status=400, message=lost))
    error, hint = site.refused(*site.push("--push-only"))
    assert error.startswith("error: user/name no longer has all uploads: 400 for ")
    assert hint == "hint: run the same command again: what the Hub lost is made and uploaded again"
    site.works(*site.push("--push-only"))
    assert site.held() == expected
    assert {oid: count for oid, count in site.hub.uploads.items() if count > 1} == {digest: 2}


MAY_NOT = "log in with a token that may (hf auth login), or push to a repository of your own"
REFUSED_BEFORE = [
    (Fault(r"/auth-check/write", "GET", times=None, status=403, message="Not yours"), (),
     "the Hub does not let you write to user/name: 403 for /api/models/user/name/auth-check/write: Not yours", MAY_NOT),
]  # fmt: skip


def test_what_will_be_refused_is_known_before_anything_is_converted(site: Site, subtests: pytest.Subtests) -> None:
    assert site.refused(*site.push(), HF_TOKEN="") == [
        "error: the Hub does not let you write to user/name: no token was found",
        f"hint: {MAY_NOT}",
    ]
    assert site.refused("compress", "-m", site.source, "--create-pr") == [
        "error: --create-pr goes with --push-to-hub",
        "hint: say where to push",
    ]

    # Before hours of work too.
    for more in (["--dry-run"], ["--fit", "5bits"]):
        with subtests.test(more=more):
            words = ["compress", "-m", site.source, "-o", site.out, *more, "--push-to-hub", "name"]
            site.hub.role = "read"
            assert "the token of user is read-only" in site.refused(*words)[0]
    assert site.refused(*site.push("--create-pr")) == [
        "error: user/name cannot be written to: the token of user is read-only",
        "hint: use a token with write permission (https://huggingface.co/settings/tokens): hf auth login",
    ]
    site.hub.role = "write"
    assert not site.hub.stored

    site.hub.create("user/name", private=False)
    for fault, words, error, hint in REFUSED_BEFORE:
        with subtests.test(error=error):
            site.hub.faults[:] = [replace(fault)]
            assert site.refused(*site.push(*words)) == [f"error: {error}", f"hint: {hint}"]
    assert not site.out.exists()


def test_private_is_refused_for_a_public_repository(site: Site) -> None:
    compress(site.source, site.out)
    for name, private in (("hidden", True), ("seen", False)):
        site.hub.create(f"user/{name}", private=private)
    for dry in (["--dry-run"], []):
        site.works("push", site.out, "hidden", "--private", *dry)
        assert site.refused("push", site.out, "seen", "--private", *dry) == [
            "error: user/seen exists and is public, so what --private asks for is not the case",
            "hint: make it private in its settings on the Hub, or leave --private out",
        ]
    assert site.held("user/seen") == {}


def test_without_a_token_a_dry_run_lists_what_would_be_uploaded(site: Site) -> None:
    site.works("compress", "-m", site.source, "-o", site.out)
    said = site.works("push", site.out, "user/name", "--dry-run", "--json", HF_TOKEN="").stdout
    previewed = json.loads(said)
    assert previewed["notes"][-1] == "no token was found (hf auth login), so what the repository holds is not known"
    assert {Path(read["path"]).name for read in previewed["reads"]} > {"config.json", FIRST}
    for name in ("no name!", "me/x/y"):
        said = site.refused("push", site.out, name, "--dry-run", HF_TOKEN="")
        assert said[0].startswith(f"error: {name} is no repository id")


def test_what_is_made_from_a_private_model_is_private(site: Site) -> None:
    site.hub.create("user/hidden", private=True)
    site.publish(site.source, "user/hidden")
    site.works("compress", "-m", "user/hidden", "-o", site.out, "--push-to-hub", "user/run")
    previewed = site.works("push", site.out, "user/later", "--dry-run").stdout
    assert "user/later (a repository that is created, private)" in previewed
    site.works("push", site.out, "user/later")
    assert site.hub.stored["user/run"]["private"] and site.hub.stored["user/later"]["private"]


IS_SOURCE = "error: user/name is what the model is made from, and would be replaced by it"
IS_PLAIN = f"error: user/name holds unquantized weights ({FIRST}), which this model would replace"
INSIST = "hint: push to another repository, open a pull request with --create-pr, or insist with --replace-weights"


def test_the_source_s_own_repository_is_not_replaced(site: Site) -> None:
    site.publish(site.source)
    command = ["compress", "-o", site.out]
    assert site.refused(*command, "-m", "user/name", "--push-to-hub", "user/name") == [IS_SOURCE, INSIST]
    assert not site.out.exists()
    site.works("compress", "-o", site.root / "1", "-m", "user/name", "--push-to-hub", "user/name", "--create-pr")
    assert len(site.hub.commits("user/name")) == 2
    assert len(site.hub.commits("user/name", "refs/pr/1")) == 3

    # Unless that is insisted on.
    insists = (*command, "-m", "user/name", "--push-to-hub", "user/name", "--replace-weights")
    site.works(*insists)
    assert [title for title, _ in site.hub.commits("user/name")][-1] == "name in FP8 (one scale per tensor)"


def test_push_of_a_directory_does_not_replace_what_its_card_names(site: Site) -> None:
    compress(site.source, site.root / "fp8")
    site.publish(site.root / "fp8")
    site.works("dequantize", "user/name", "-o", site.out)
    assert site.refused("push", site.out, "name") == [IS_SOURCE, INSIST]
    site.works("push", site.out, "user/other")
    assert site.held("user/other").keys() == published(tree(site.out)).keys() - {".gitattributes"}


def test_unquantized_weights_are_not_replaced(site: Site) -> None:
    site.publish(site.source)
    assert site.refused(*site.push()) == [IS_PLAIN, INSIST]
    assert not site.out.exists()
    site.works(*site.push("--replace-weights"))
    # What has replaced them is quantized.
    site.works(*site.push())
    assert len(site.hub.commits("user/name")) == 3


def test_what_another_plan_uploaded_counts_for_nothing(site: Site) -> None:
    uploaded_but_not_committed(site, "--push-only")
    digest = json.loads((site.out / ".openquant.json").read_text())["digest"]
    shards = [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    only = Push("user/name", only=True)
    assert Publisher(only, site.out, digest, shards).uploaded_shards() == set(shards)
    assert Publisher(only, site.out, digest[::-1], shards).uploaded_shards() == set()
    assert Publisher(replace(only, name="user/other"), site.out, digest, shards).uploaded_shards() == set()


def test_a_damaged_record_of_an_upload_counts_for_nothing(site: Site, expected: dict[str, bytes]) -> None:
    uploaded_but_not_committed(site, "--push-only")
    records = [path for path in (site.out / ".openquant" / "pushed").iterdir() if path.is_file()]
    for path, text in zip(records, ("{}", "[]", "{", '{"size": 1, "sha256": 7, "sample": ""}', ""), strict=True):
        path.write_text(text)
    site.works(*site.push("--push-only"))
    assert site.held() == expected


def test_the_title_of_a_commit_is_readable_whatever_a_directory_s_name_has(site: Site) -> None:
    # A git file, which a worktree has instead of a directory, is left out; the Hub takes no such file.
    (site.source / ".git").write_text("gitdir: elsewhere\n")
    site.source = site.source.rename(site.root / "a\x1b[31m\nb")
    site.works(*site.push())
    title, _ = site.hub.commits("user/name")[-1]
    assert title.startswith("a\\x1b[31m\\nb in FP8") and title.isprintable()
    assert site.held().keys() == published(tree(site.out)).keys()
