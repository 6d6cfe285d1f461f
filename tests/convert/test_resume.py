"""Killed, interrupted and repeated runs; what may be in an output directory; full disks."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, tree
from openquant import compress
from openquant import run as running
from openquant.errors import OutputError, SourceError, UsageError
from openquant.files.checkpoint import open_checkpoint
from openquant.hub.source import Source
from support import small_checkpoints
from support.starting import compressing, finish

SHARDS = 5

# Runs the command, and dies or stops at the nth time a file gets its final name (0-based), or in mid-shard.
KILLED = """
import os, signal, sys, threading
from openquant.files import shardfile
from openquant.cli.commands import compress_main

how, moment, count = sys.argv[1], sys.argv[2].split("-"), int(sys.argv[3])
calls = iter(range(10**6))

def strike():
    if how == "KILL":
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), getattr(signal, "SIG" + how))
    threading.Event().wait(0.3)

owner, name = {
    "rename": (os, "replace"),
    "write": (shardfile.ShardFile, "write"),
    "held": (shardfile.ShardFile, "_write_pending"),
    "unlink": (os, "unlink"),
}[moment[1]]
real = getattr(owner, name)

def wrapped(*arguments, **options):
    if moment[0] == "before" and next(calls) == count:
        strike()
    result = real(*arguments, **options)
    if moment[0] == "after" and next(calls) == count:
        strike()
    return result

setattr(owner, name, wrapped)
sys.exit(compress_main(sys.argv[4:]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path / "source", "Qwen3MoeForCausalLM", shards=SHARDS)


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> dict[str, bytes]:
    compress(source, tmp_path / "whole")
    return tree(tmp_path / "whole")


def struck(
    source: Path, output: Path, how: str, moment: str, count: int, *more: str
) -> subprocess.CompletedProcess[str]:
    words = [how, moment, str(count), "-m", str(source), "-o", str(output), "--workers", "2", *more]
    return finish(compressing(words, os.environ, KILLED))


# Renames: the journal, five shards, generation_config.json, README.md, the index, config.json, the journal.
MOMENTS = [
    *(("before-rename", 0), ("after-rename", 3), ("before-rename", 9), ("after-rename", 10)),
    *(("before-write", 30), ("before-held", 4)),
]


def test_a_killed_run_continues_to_the_same_bytes(
    tmp_path: Path, source: Path, whole: dict[str, bytes], subtests: pytest.Subtests
) -> None:
    for moment, count in MOMENTS:
        out = tmp_path / f"{moment}-{count}"
        with subtests.test(moment=moment, count=count):
            assert struck(source, out, "KILL", moment, count).returncode == -signal.SIGKILL
            left = tree(out)
            shards = {name: (out / name).stat().st_mtime_ns for name in finished(out)}
            # What has its final name is whole; without the last file nothing takes the directory for a model.
            final = {name: data for name, data in left.items() if not name.startswith(".openquant")}
            assert final == {name: whole[name] for name in final}
            result = compress(source, out)
            if "config.json" not in left:
                assert result.resumed == (".openquant.json" in left and bool(final))
                assert {name: (out / name).stat().st_mtime_ns for name in shards} == shards
            assert tree(out) == whole


def test_a_killed_run_of_four_bits_continues_to_the_same_bytes(tmp_path: Path, source: Path) -> None:
    out, words = tmp_path / "out", ("--scheme", "int4", "--asymmetric")
    assert struck(source, out, "KILL", "after-rename", 3, *words).returncode == -signal.SIGKILL
    assert finished(out)
    assert not (out / "config.json").exists()
    assert compress(source, out, "int4", asymmetric=True).resumed
    compress(source, tmp_path / "whole", "int4", asymmetric=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_an_interrupted_run_exits_130_and_continues(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    for how, moment, count in (("INT", "before-rename", 3), ("TERM", "before-write", 30)):
        out = tmp_path / f"{how}-{moment}"
        stopped = struck(source, out, how, moment, count)
        assert stopped.returncode == 130, stopped.stderr
        assert stopped.stderr.splitlines()[-2:] == [
            "error: interrupted",
            "hint: run the same command again to continue",
        ]
        assert "Traceback" not in stopped.stderr
        assert not (out / "config.json").exists()
        compress(source, out)
        assert tree(out) == whole


def test_a_finished_run_says_so_and_writes_nothing(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "whole"
    (out / "notes.txt").write_text("mine")
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    again = finish(compressing(["-m", source, "-o", out], os.environ))
    assert again.returncode == 0
    assert (
        f"{out} is already complete; nothing was written (headers, index and config were checked, codes were not; openquant "
        "verify reads them, and --overwrite converts again)\n"
    ) in again.stdout
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert tree(out) == whole | {"notes.txt": b"mine"}


def test_a_finished_output_that_was_damaged_is_not_called_complete(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out, index = tmp_path / "whole", "model.safetensors.index.json"
    other = '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}'
    for name, damaged in (("config.json", "{"), ("config.json", other), (index, '{"weight_map": {}}')):
        (out / name).write_text(damaged)
        with pytest.raises(OutputError) as caught:
            compress(source, out)
        assert caught.value.message.startswith(f"{out} is damaged: ")
        assert "--overwrite" in caught.value.hint
        assert tree(out) == whole | {name: damaged.encode()}
        (out / name).write_bytes(whole[name])


def test_a_file_lost_from_a_finished_directory_is_made_again(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out, shard = tmp_path / "whole", "model-00003-of-00005.safetensors"
    data = whole[shard]
    (out / shard).unlink()
    for name, damaged in (
        (shard, data[:-1]),
        (shard, data + b"x"),
        (shard, data[:5]),
        ("README.md", b""),
        (shard, None),
    ):
        assert compress(source, out).resumed
        assert tree(out) == whole, name
        if damaged is not None:
            (out / name).write_bytes(damaged)


def test_what_was_changed_since_it_was_written_is_no_fault_of_ours(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "whole"
    (out / ".openquant.json").write_text(json.dumps({**json.loads(whole[".openquant.json"]), "done": False}))
    next(out.glob("*.safetensors")).unlink()
    (out / "config.json").write_text(json.dumps({**json.loads(whole["config.json"]), "model_type": "other"}))
    with pytest.raises(OutputError) as caught:
        compress(source, out)
    assert caught.value.message == (
        f'{out} was written wrongly: config.json: model_type is "other", the plan has "qwen3_moe"'
    )
    assert caught.value.hint == "replace it with --overwrite; if that changes nothing, it is a bug of openquant"


def test_other_options_or_another_source_are_refused(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    other = small_checkpoints.write(tmp_path / "other", "Qwen3MoeForCausalLM", shards=SHARDS, seed=1)
    message = "holds the output of another run: other options, another source or another version"
    for arguments in ({"scheme": "block"}, {"ignore": ["lm_head", "**.layers.0.**"]}):
        with pytest.raises(OutputError) as caught:
            compress(**({"model": source, "output": tmp_path / "whole"} | arguments))  # type: ignore[arg-type]
        assert caught.value.message == f"{tmp_path / 'whole'} {message}"
        assert caught.value.hint == (
            "choose another directory with -o, or replace that output with --overwrite; "
            f"--recipe {tmp_path / 'whole'}/.openquant.json takes its options, which helps if the source has not changed"
        )
    with pytest.raises(SourceError, match=f"^{other}/model-0000.* changed since {tmp_path / 'whole'} was made"):
        compress(other, tmp_path / "whole")
    assert tree(tmp_path / "whole") == whole
    # The number of workers changes no byte, so it is no other option.
    assert compress(source, tmp_path / "whole", workers=3).resumed


def test_overwrite_replaces_what_the_journal_names_and_nothing_else(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "whole"
    (out / "notes.txt").write_text("mine")
    single = small_checkpoints.write(tmp_path / "single", "Qwen3ForCausalLM")
    # Files that are not ours are in the way.
    for name in ("model.safetensors", "other.safetensors"):
        (out / name).write_text("mine")
        before = tree(out)
        with pytest.raises(OutputError) as caught:
            compress(single, out, overwrite=True)
        assert caught.value.message == f"{out / name} was not made by openquant and will not be overwritten"
        assert tree(out) == before
        (out / name).unlink()
    compress(single, out, "block", overwrite=True)
    compress(single, tmp_path / "fresh", "block")
    assert tree(out) == tree(tmp_path / "fresh") | {"notes.txt": b"mine"}


def test_what_is_overwritten_first_is_no_model_and_stays_ours(
    tmp_path: Path, source: Path, whole: dict[str, bytes], subtests: pytest.Subtests
) -> None:
    order = ["config.json", "generation_config.json", "model.safetensors.index.json", "README.md"]
    order += [*finished(tmp_path / "whole"), ".openquant.json"]
    assert set(order) == whole.keys()
    compress(source, tmp_path / "fresh", "block")
    for count in (0, 4):
        out = tmp_path / f"out{count}" / "whole"
        shutil.copytree(tmp_path / "whole", out)
        with subtests.test(count=count):
            done = struck(source, out, "KILL", "before-unlink", count, "--overwrite", "--scheme", "block")
            assert done.returncode == -signal.SIGKILL
            assert settled(out) == {name: whole[name] for name in order[count:]}
            compress(source, out, "block", overwrite=True)
            assert tree(out) == tree(tmp_path / "fresh")


# Runs the command, and writes down what reached the disk and what got its name, in order.
RECORDED = """
import json, os, sys
from openquant.cli.commands import compress_main

events, fsync, replace = [], os.fsync, os.replace

def noted_fsync(handle):
    fsync(handle)
    found = os.fstat(handle)
    events.append(["fsync", found.st_ino, found.st_mtime_ns])

def noted_replace(old, new):
    replace(old, new)
    found, folder = os.stat(new), os.stat(os.path.dirname(new))
    events.append(["rename", found.st_ino, found.st_mtime_ns, os.path.basename(new), folder.st_ino])

os.fsync, os.replace = noted_fsync, noted_replace
code = compress_main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(events, file)
sys.exit(code)
"""


def test_a_file_gets_its_name_when_it_is_on_disk_and_keeps_it(tmp_path: Path, source: Path) -> None:
    (source / "assets").mkdir()
    (source / "assets" / "vocab.txt").write_text("the model's")
    log, out = tmp_path / "events", tmp_path / "out"
    command = [sys.executable, "-c", RECORDED, log, "-m", source, "-o", out, "--workers", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    events = json.loads(log.read_text())
    names = []
    for number, (what, *found) in enumerate(events):
        if what == "rename":
            inode, modified, name, folder = found
            names.append(name)
            # Nothing was written to it after that.
            assert ["fsync", inode, modified] in events[:number], name
            assert events[number + 1][:2] == ["fsync", folder], name
    written = [path.name for path in out.rglob("*") if path.is_file()]
    assert sorted(names) == sorted([*written, ".openquant.json"])
    assert names[-2:] == ["config.json", ".openquant.json"]


def test_a_finished_directory_keeps_the_user_s_edits(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "whole"
    # Leftovers in the source make it no other one.
    (source / "optimizer.pt").write_text("new")
    assert compress(source, out).resumed
    assert tree(out) == whole
    (out / "README.md").write_text("mine")
    (out / "config.json").unlink()
    compress(source, out)
    assert tree(out) == whole | {"README.md": b"mine"}


def test_too_small_a_disk_is_found_before_the_first_byte(
    tmp_path: Path, source: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    # Nor is an earlier output thrown away for a run that cannot succeed.
    with pytest.raises(OutputError, match="bytes, its disk has"):
        compress(small_checkpoints.write(tmp_path / "larger", dtype="float32"), tmp_path / "whole", overwrite=True)
    assert tree(tmp_path / "whole") == whole
    with monkeypatch.context() as patch:
        patch.setattr(Source, "digests", lambda *_: pytest.fail("the files that do not fit are read"))
        with pytest.raises(OutputError, match=r"out needs [0-9,]+ bytes, its disk has 1,000 free"):
            compress(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()

    # A finished directory needs neither space nor permission.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    (tmp_path / "whole").chmod(0o555)
    before = (tmp_path / "whole").stat().st_mtime_ns
    assert compress(source, tmp_path / "whole").resumed
    assert (tmp_path / "whole").stat().st_mtime_ns == before
    assert tree(tmp_path / "whole") == whole


def change(source: Path, shard: str) -> None:
    """Turn the sign of a shard's last quantized weight; size and time of modification stay."""
    checkpoint = open_checkpoint(source)
    name = [name for name, place in checkpoint.where.items() if place.shard == shard and name.endswith("_proj.weight")][
        -1
    ]
    path, at = source / shard, checkpoint.where[name].offset + checkpoint.tensors[name].nbytes - 1
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        sign = file.read(1)[0] ^ 0x80
        file.seek(at)
        file.write(bytes([sign]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def settled(out: Path) -> dict[str, bytes]:
    """What has its final name."""
    return {name: data for name, data in tree(out).items() if not name.startswith(".openquant/")}


def finished(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.safetensors"))


def test_what_was_made_from_another_source_is_made_again(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    struck(source, out, "KILL", "after-rename", 3)
    change(source, finished(out)[0])
    assert compress(source, out).resumed
    compress(source, tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_other_files_may_not_change_either(tmp_path: Path, source: Path) -> None:
    out, path = tmp_path / "out", source / "generation_config.json"
    struck(source, out, "KILL", "after-rename", 3)
    times, data = path.stat(), path.read_bytes()
    # Of the same size, and JSON still.
    path.write_bytes(data.replace(b"0", b"1", 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    before = settled(out)
    with pytest.raises(SourceError) as caught:
        compress(source, out)
    assert caught.value.message == f"{path} changed since {out} was made"
    assert settled(out) == before


def test_a_finished_output_stays_that_of_its_source(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "whole"
    change(source, "model-00004-of-00005.safetensors")
    with pytest.raises(SourceError) as caught:
        compress(source, out)
    assert caught.value.message == f"{source / 'model-00004-of-00005.safetensors'} changed since {out} was made"
    assert tree(out) == whole


def during(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen once all shards are converted."""
    run = running.Conversion.run

    def then(conversion: running.Conversion, workers: int) -> Any:
        found = run(conversion, workers)
        monkeypatch.setattr(running.Conversion, "run", run)
        happens()
        return found

    monkeypatch.setattr(running.Conversion, "run", then)


def test_a_source_that_changes_under_way_is_not_called_finished(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, out, config = "model-00002-of-00005.safetensors", tmp_path / "out", source / "config.json"
    text = config.read_text()
    during(monkeypatch, lambda: config.write_text(text.replace("rms_norm_eps", "rms_norm_esp")))
    with pytest.raises(SourceError) as caught:
        compress(source, tmp_path / "other")
    assert caught.value.message == f"{config} changed while it was being converted"
    assert not (tmp_path / "other" / "config.json").exists()
    config.write_text(text)

    during(monkeypatch, lambda: change(source, shard))
    with pytest.raises(SourceError) as caught:
        compress(source, out)
    assert caught.value.message == f"{source / shard} changed while it was being read"
    assert caught.value.hint.startswith("let nothing write to the model or link its files meanwhile, and run the same")
    assert not (out / "config.json").exists()
    assert not json.loads((out / ".openquant.json").read_text())["done"]
    compress(source, out)
    compress(source, tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_impossible_output_names_are_explained(tmp_path: Path, source: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    told = "cannot be (read|written): (File name too long|Too many levels|File exists)"
    for output in ("n" * 300, "loop/x"):
        with pytest.raises((OutputError, UsageError), match=told):
            compress(source, tmp_path / output)


def test_a_directory_with_the_user_s_files_is_refused(tmp_path: Path, source: Path) -> None:
    out, unfinished = tmp_path / "out", tmp_path / "unfinished"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError) as caught:
            compress(source, out, overwrite=overwrite)
        assert caught.value.message == f"{out} is not empty and was not made by openquant: it holds notes.txt"
        assert tree(out) == {"notes.txt": b"mine"}
        assert not (out / ".openquant").exists()

    struck(source, unfinished, "KILL", "after-rename", 3)
    (unfinished / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="unfinished holds notes.txt, which this run did not write"):
        compress(source, unfinished)
    with pytest.raises(OutputError, match="notes.txt exists and is not a directory"):
        compress(source, out / "notes.txt")
    (tmp_path / "empty").mkdir()
    compress(source, tmp_path / "empty")


JOURNALS = [
    *("", "[]", '{"format": 99}', '{"format": 1}', "[" * 10**5),
    '{"format": 1, "digest": "", "done": true, "files": [], "weights": {"static_scales": {"a": "b"}}}',
]


def test_a_journal_we_cannot_read_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("mine")
    for journal in JOURNALS:
        (tmp_path / "out" / ".openquant.json").write_text(journal)
        with pytest.raises(OutputError, match="is not a journal that this version of openquant wrote"):
            compress(source, tmp_path / "out")


def test_the_output_may_not_be_or_lie_in_the_source(tmp_path: Path, source: Path) -> None:
    before = tree(source)
    (tmp_path / "link").symlink_to(source)
    for out, where in ((source, "is the source itself"), (source / "a" / "b", f"lies inside the source {source}"),
                       (tmp_path / "link", "is the source itself"), (tmp_path / "link" / "x", f"lies inside the source {source}")):  # fmt: skip
        with pytest.raises(OutputError) as caught:
            compress(source, out, overwrite=True)
        assert caught.value.message == f"the output {out} {where}"
    assert tree(source) == before


def test_two_runs_into_one_directory(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    (out / ".openquant").mkdir(parents=True)
    with (out / ".openquant" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError) as caught:
            compress(source, out)
        assert caught.value.message == f"another run is writing to {out}"
        assert set(tree(out)) == {".openquant/lock"}
    compress(source, out)
    assert tree(out) == whole

    # Nothing of the other run is removed, whatever this one may replace.
    (out / ".openquant").mkdir()
    (out / ".openquant" / "x.1.partial").write_text("of the running one")
    (out / "config.json").unlink()
    with (out / ".openquant" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = tree(out)
        for scheme, overwrite in (("tensor", False), ("block", True)):
            with pytest.raises(OutputError, match="another run is writing"):
                compress(source, out, scheme, overwrite=overwrite)
            assert tree(out) == before


def test_a_disk_that_fills_up_is_named_and_the_run_continues_later(
    tmp_path: Path, source: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    largest = max(len(data) for name, data in whole.items() if name.endswith(".safetensors"))

    def limit() -> None:
        # Writing beyond this size fails as a full disk does, in the middle of the largest shard.
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1000, largest - 1000))

    command = [sys.executable, str(ROOT / "compress_fp8.py"), "-m", str(source), "-o", str(out), "--workers", "1"]
    full = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert full.returncode == 2, full.stderr
    error, hint = full.stderr.splitlines()[-2:]
    assert error.startswith(f"error: {out}/model-0000")
    assert error.endswith("cannot be written: File too large")
    assert hint == "hint: run the same command again once that is solved: finished shards are kept"
    assert not (out / "config.json").exists()
    assert os.listdir(out)
    compress(source, out)
    assert tree(out) == whole


def test_a_working_directory_that_is_not_ours_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out" / ".openquant").mkdir(parents=True)
    (tmp_path / "out" / ".openquant" / "big.partial").write_text("mine")
    with pytest.raises(OutputError) as caught:
        compress(source, tmp_path / "out")
    held = f"{tmp_path / 'out'} is not empty and was not made by openquant: it holds .openquant/big.partial"
    assert caught.value.message == held
    assert (tmp_path / "out" / ".openquant" / "big.partial").read_text() == "mine"
