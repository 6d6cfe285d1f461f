"""What lies below a directory, reached without following a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import tree
from openquant.files.folder import Folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with links that lead out of it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    root = tmp_path / "here"
    root.mkdir()
    (root / "d").symlink_to(tmp_path / "elsewhere")
    (root / "file").symlink_to(tmp_path / "elsewhere" / "file")
    (root / "own").write_text("ours")
    return root


USES: list[Callable[[Folder], object]] = [
    lambda folder: os.close(folder.open("file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)),
    lambda folder: os.close(folder.open("d/new", os.O_WRONLY | os.O_CREAT)),
    lambda folder: folder.read("file", 100),
    lambda folder: folder.read("d/file", 100),
    lambda folder: folder.make("d/new"),
    lambda folder: folder.make("d"),
    lambda folder: folder.rename("own", "d/own"),
    lambda folder: folder.rename("d/file", "taken"),
    lambda folder: folder.remove_folder("d"),
    lambda folder: folder.names("d"),
]


def test_nothing_is_reached_through_a_link(here: Path) -> None:
    before = tree(here.parent)
    for number, use in enumerate(USES):
        with Folder(here) as folder, pytest.raises(OSError):
            use(folder)
        assert tree(here.parent) == before, number


def test_a_link_is_nothing_but_a_link(here: Path) -> None:
    mine = here.parent / "elsewhere" / "file"
    os.mkfifo(here / "pipe")
    with Folder(here) as folder:
        assert not folder.is_file("file")
        assert folder.stat("d/file") is None
        folder.remove("d/file")
        assert mine.read_text() == "mine"
        folder.remove("file")
        # What is no file or too long is not read.
        assert folder.read("pipe", 100) is folder.read("own", 3) is None
        assert folder.read("own", 4) == b"ours"
        folder.remove("pipe")
        folder.rename("own", "d2/own")
        assert [name for name, _ in folder.walk()] == ["d", "d2", "d2/own"]
    assert mine.read_text() == "mine"
    assert not (here / "file").is_symlink()


def test_a_directory_that_is_moved_stays_the_one_written_to(here: Path) -> None:
    """And a file in the place of a link is what a rename leaves."""
    with Folder(here) as folder:
        here.rename(here.parent / "moved")
        here.symlink_to("elsewhere")
        folder.rename("own", "file")
    moved = here.parent / "moved" / "file"
    assert moved.read_text() == "ours" and not moved.is_symlink()
    assert (here.parent / "elsewhere" / "file").read_text() == "mine"
