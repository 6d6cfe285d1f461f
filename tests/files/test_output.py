"""What somebody else may have put into an output directory: nothing outside of it is touched, and nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Run, change_json, tree
from openquant import compress
from openquant.errors import OutputError
from openquant.files.claim import Claim, OutputContents
from openquant.files.journal import WeightFacts, facts_in, finished_files, read_journal
from support import small_checkpoints
from support.rows import for_each

JOURNAL = ".openquant.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = small_checkpoints.write(tmp_path / "source", shards=2)
    (root / "assets").mkdir()
    (root / "assets" / "vocab.txt").write_text("the model's")
    return root


@pytest.fixture
def out(tmp_path: Path, source: Path) -> Path:
    compress(source, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's directory, which nothing here may change."""
    root = tmp_path / "home"
    (root / "d").mkdir(parents=True)
    (root / "d" / "credentials.json").write_text("mine")
    (root / "model.safetensors.partial").write_text("mine")
    return root


def rewrite(out: Path, **changed: object) -> None:
    journal = json.loads((out / JOURNAL).read_text())
    (out / JOURNAL).write_text(json.dumps(journal | changed))


def planned(out: Path, *names: str) -> None:
    """Have the journal name further files."""
    rewrite(out, files=[*json.loads((out / JOURNAL).read_text())["files"], *names])


Plant = Callable[[Path, Path], object]


def link(name: str, to: str, *named: str) -> Plant:
    """A link to what is in somebody's directory; the journal names more files."""

    def plant(out: Path, home: Path) -> None:
        place = out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(home / to)
        planned(out, *named)

    return plant


def pipe(name: str) -> Plant:
    def plant(out: Path, _: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).unlink(missing_ok=True)
        os.mkfifo(out / name)

    return plant


def directory(name: str, *named: str) -> Plant:
    def plant(out: Path, _: Path) -> None:
        (out / name).mkdir(parents=True)
        planned(out, *named)

    return plant


def file(name: str) -> Plant:
    def plant(out: Path, _: Path) -> None:
        (out / name).parent.mkdir()
        (out / name).write_text("")

    return plant


CREDENTIALS = "d/credentials.json"
# What is planted, under the name that is told; all but the first are found by a push too.
AMONG_FILES: list[tuple[str, Plant]] = [
    ("d", link("d", "d", "d", CREDENTIALS)),
    ("assets/d", link("assets/d", "d", "assets/d/credentials.json")),
    ("config.json", pipe("config.json")),
    ("mine", directory("mine", "mine")),
]
BY_A_PUSH: list[tuple[str, Plant]] = [
    ("assets", link("assets", "d")),
    ("config.json", link("config.json", CREDENTIALS)),
    ("config.json", link("config.json", "new")),
    (".openquant/lock", link(".openquant/lock", "lock")),
    (".openquant/lock", pipe(".openquant/lock")),
    (".openquant", link(".openquant", "")),
    (".openquant/pushed", link(".openquant/pushed", "d")),
    (".openquant/pushed/0", link(".openquant/pushed/0", CREDENTIALS)),
    (".openquant/source-0", link(".openquant/source-0", "")),
    (".openquant/source-0/model.safetensors.partial",
     link(".openquant/source-0/model.safetensors.partial", "model.safetensors.partial")),
    (".openquant/source-0", file(".openquant/source-0")),
    (".openquant/0.partial", directory(".openquant/0.partial")),
]  # fmt: skip


def test_nothing_planted_is_followed(subtests, source, out, home, tmp_path):
    before, listed = tree(home), sorted(os.listdir(home))
    for number, (name, plant) in enumerate([*AMONG_FILES, *BY_A_PUSH]):
        with subtests.test(name, number=number):
            planted = shutil.copytree(out, tmp_path / str(number))
            plant(planted, home)
            if (name, plant) in BY_A_PUSH:
                lacks = f"{planted} lacks assets/vocab.txt"
                told = {f"{planted / name} is a link", f"{planted / name} was not made by openquant"}
                with pytest.raises(OutputError) as caught:
                    finished_files(planted)
                assert caught.value.message in ({lacks} if name == "assets" else told)

            rewrite(planted, done=False)
            weights = {path: path.stat().st_mtime_ns for path in planted.glob("*.safetensors")}
            for overwrite in (False, True):
                with pytest.raises(OutputError) as caught:
                    compress(source, planted, overwrite=overwrite)
                assert caught.value.message == f"{planted / name} was not made by openquant and will not be overwritten"
                assert caught.value.hint == "move it away, or choose another directory with output"
                assert (tree(home), sorted(os.listdir(home))) == (before, listed)
                assert {path: path.stat().st_mtime_ns for path in planted.glob("*.safetensors")} == weights


def test_the_output_itself_may_be_a_link(tmp_path: Path, source: Path, out: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    compress(source, tmp_path / "link")
    assert tree(tmp_path / "disk") == tree(out)
    compress(source, tmp_path / "link", "block", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert finished_files(tmp_path / "link")[1] == {name for name in tree(out) if name != JOURNAL}


def test_a_user_s_own_links_beside_a_finished_output_stay(source: Path, out: Path, home: Path) -> None:
    (out / "notes").symlink_to(home)
    assert compress(source, out).resumed
    compress(source, out, "block", overwrite=True)
    assert (out / "notes" / "d" / "credentials.json").read_text() == "mine"


NAMES = ["n" * 300, "../mine", "/etc/passwd", "a/../b", "", ".", "a//b", "a/", "a\0", "\ud800", 7, ["a"], ".ssh/id",
         "a/.git/config", ".openquant", ".openquant/lock", ".openquant.json", "/".join(["ab"] * 2000)]  # fmt: skip


def test_a_journal_that_names_what_no_run_writes(subtests: pytest.Subtests, source: Path, out: Path) -> None:
    whole = (out / JOURNAL).read_bytes()
    for name in NAMES:
        with subtests.test(name=repr(name)[:30]):
            (out / JOURNAL).write_bytes(whole)
            planned(out, name)  # type: ignore[arg-type]
            before = tree(out)
            for use in (
                lambda: compress(source, out),
                lambda: compress(source, out, overwrite=True),
                lambda: finished_files(out),
            ):
                with pytest.raises(OutputError) as caught:
                    use()
                assert caught.value.message == f"{out / JOURNAL} is not a journal that this version of openquant wrote"
            assert tree(out) == before


NONE = {**WeightFacts()._asdict(), "static_scales": {}}
FACTS = [
    *([], 1, "gptq", {}, {"gptq": True}),
    {**NONE, "gptq": 1},
    {**NONE, "x": True},
    {**NONE, "static_scales": True},
    {**NONE, "static_scales": {"a": "1"}},
]


@for_each("facts", FACTS)
def test_a_journal_that_says_of_weights_what_none_says(out: Path, facts: Any) -> None:
    change_json(out / JOURNAL, lambda journal: journal.update(weights=facts))
    with pytest.raises(OutputError) as caught:
        read_journal(out)
    assert caught.value.message == f"{out / JOURNAL} is not a journal that this version of openquant wrote"


def test_a_journal_of_an_earlier_version_says_nothing_of_weights(out: Path) -> None:
    change_json(out / JOURNAL, lambda journal: journal.pop("weights"))
    journal = read_journal(out)
    assert journal is not None
    assert facts_in(journal) is None


def test_a_journal_that_is_a_link_or_a_pipe_or_endless(tmp_path: Path, source: Path, out: Path) -> None:
    (out / JOURNAL).rename(tmp_path / "journal")
    for plant in (lambda: (out / JOURNAL).symlink_to(tmp_path / "journal"), lambda: os.mkfifo(out / JOURNAL),
                  lambda: (out / JOURNAL).mkdir(), lambda: (out / JOURNAL).touch() or os.truncate(out / JOURNAL, 1 << 40)):  # fmt: skip
        plant()
        with pytest.raises(OutputError, match="is not a journal that this version of openquant wrote"):
            compress(source, out, overwrite=True)
        shutil.rmtree(out / JOURNAL) if (out / JOURNAL).is_dir() else (out / JOURNAL).unlink()


def test_a_journal_of_many_names_is_held_against_many_files_at_once(source: Path, out: Path) -> None:
    """Each against each would take minutes."""
    planned(out, *(f"a{number}/b" for number in range(20_000)))
    (out / "mine").mkdir()
    for number in range(2000):
        (out / "mine" / str(number)).touch()
    compress(source, out, "block", overwrite=True)
    assert len(os.listdir(out / "mine")) == 2000


def test_the_root_of_the_file_system_is_refused_before_anything_is_asked_for(run: Run) -> None:
    for model in ("org/name", "."):
        done = run("-m", model, "-o", "/", HF_ENDPOINT="http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr
            == "error: the output / is the root of the file system\nhint: choose another directory with -o\n"
        )


def test_an_output_may_not_hold_the_source(tmp_path: Path, source: Path) -> None:
    with pytest.raises(OutputError) as caught:
        compress(source, tmp_path, overwrite=True)
    assert caught.value.message == f"the output {tmp_path} holds the source {source}"


def test_a_run_that_lost_its_directory_to_another_finishes_nothing_more(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Claim(out, OutputContents("mine", {}, {"a": 1, "b": 1, "c": 1}), overwrite=False) as claimed:
        directory = claimed.directory
        directory.write("a", b"1")
        directory.write("b", b"1")
        # As a run does that takes this one for dead.
        (out / "new").write_text(json.dumps(json.loads((out / JOURNAL).read_text()) | {"digest": "another's"}))
        (out / "new").replace(out / JOURNAL)
        with pytest.raises(OutputError) as caught:
            directory.write("c", b"1")
    assert caught.value.message == f"{out / 'c'} was not finished: another run has claimed {out}"
    assert sorted(path.name for path in out.iterdir()) == [JOURNAL, "a", "b"]


# A directory that an earlier run left half-written.


def claim(root: Path, sources: dict[str, str] | None = None, overwrite: bool = False) -> Claim:
    """For a run that makes one shard and a card, and of which the shard is uploaded already."""
    shards, others = {"model.safetensors": 8}, {"README.md": 4}
    look = dict(sources or {})
    contents = OutputContents("digest", shards, others)
    return Claim(root, contents, overwrite, elsewhere=lambda: frozenset(shards), sources=lambda: look)


def begin(root: Path) -> None:
    """Begin a run, and leave what one leaves that is killed."""
    claimed = claim(root, {"a": "1"})
    claimed.__enter__()
    shutil.copytree(root, root.with_name("kept"))
    claimed.__exit__()
    shutil.rmtree(root, ignore_errors=True)
    root.with_name("kept").rename(root)


def test_records_of_uploads_and_streamed_shards_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "out"
    begin(root)
    for name in ("pushed/record", "source-0/model.safetensors"):
        (root / ".openquant" / name).parent.mkdir()
        (root / ".openquant" / name).write_text("kept")
    with claim(root, {"a": "1"}) as claimed:
        assert claimed.resumed
        assert (root / ".openquant" / "pushed" / "record").read_text() == "kept"
        assert (root / ".openquant" / "source-0" / "model.safetensors").read_text() == "kept"


def test_what_was_uploaded_of_another_source_is_not_finished(tmp_path: Path) -> None:
    root = tmp_path / "out"
    begin(root)
    with claim(root, {"a": "1"}) as claimed:
        assert claimed.is_finished("model.safetensors")
    begin(root)
    with claim(root, {"a": "2"}) as claimed:
        assert claimed.changed_sources == {"a"}
        assert not claimed.is_finished("model.safetensors")


def test_what_is_overwritten_counts_as_free(tmp_path, source, out, monkeypatch):
    before = tree(out)
    # What is not there any more gives nothing back.
    (out / "README.md").unlink()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    compress(source, out, overwrite=True)
    assert tree(out) == before


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    root = tmp_path / "out"
    with claim(root) as claimed, pytest.raises(OutputError) as caught:
        claimed.directory.copy(tmp_path / "missing", "README.md")
    assert (caught.value.message, caught.value.hint) == (
        f"{tmp_path / 'missing'} cannot be read: No such file or directory",
        "check the file and its permissions",
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        read_journal(tmp_path / "file")
    assert caught.value.message == f"{tmp_path / 'file'} cannot be read: Not a directory"
