"""What may lie in an output directory already, and what a run makes of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from conftest import change_json, tree
from openquant import compress
from openquant.errors import OutputError
from openquant.files.destination import finished_files
from openquant.files.output import Claim, OutputContents
from support import small_checkpoints


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


def test_what_was_uploaded_of_another_source_is_not_finished(tmp_path: Path) -> None:
    root = tmp_path / "out"
    begin(root)
    with claim(root, {"a": "1"}) as claimed:
        assert claimed.is_finished("model.safetensors")
    begin(root)
    with claim(root, {"a": "2"}) as claimed:
        assert claimed.changed_sources == {"a"}
        assert not claimed.is_finished("model.safetensors")


def test_an_output_may_not_hold_the_source(tmp_path: Path, source: Path) -> None:
    with pytest.raises(OutputError) as caught:
        compress(source, tmp_path, overwrite=True)
    assert caught.value.message == f"the output {tmp_path} holds the source {source}"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with claim(tmp_path / "out") as claimed, pytest.raises(OutputError) as caught:
        claimed.directory.copy(tmp_path / "missing", "README.md")
    assert caught.value.message == f"{tmp_path / 'missing'} cannot be read: No such file or directory"


def test_an_output_is_replaced_config_json_first_and_nothing_outside_of_it(
    source: Path, out: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is killed, nothing takes the rest for a model."""
    mine, gone, unlink = home / "d" / "credentials.json", [], Path.unlink
    change_json(out / ".openquant.json", lambda journal: journal["files"].append(os.path.relpath(mine, out)))
    monkeypatch.setattr(Path, "unlink", lambda path, **more: (gone.append(path.name), unlink(path, **more)))
    compress(source, out, "block", overwrite=True)
    assert mine.read_text() == "mine"
    assert gone.index("config.json") < gone.index("model-00001-of-00002.safetensors") < gone.index(".openquant.json")


def test_records_of_uploads_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "out"
    begin(root)
    (root / ".openquant" / "pushed").mkdir()
    (root / ".openquant" / "pushed" / "record").write_text("kept")
    with claim(root, {"a": "1"}) as claimed:
        assert claimed.resumed
        assert (root / ".openquant" / "pushed" / "record").read_text() == "kept"


def test_the_output_itself_may_be_a_link(tmp_path: Path, source: Path, out: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    compress(source, tmp_path / "link")
    assert tree(tmp_path / "disk") == tree(out)
    compress(source, tmp_path / "link", "block", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert finished_files(tmp_path / "link")[1] == {name for name in tree(out) if name != ".openquant.json"}
