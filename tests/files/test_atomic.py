"""Files of figures and pages: whole or not at all, and refused beforehand where they have no place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openquant.errors import OutputError, UsageError
from openquant.files.destination import require_place, write_atomic


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomic(tmp_path / "new" / "a.html", b"one")
    write_atomic(tmp_path / "new" / "a.html", b"two")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "new").iterdir()] == [("a.html", b"two")]
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "b.html").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(OutputError, match="is a link"):
        write_atomic(tmp_path / "b.html", b"x")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "c.html").mkdir()
    with pytest.raises(OutputError, match=r"c.html cannot be written: Is a directory"):
        write_atomic(tmp_path / "c.html", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.html", "c.html", "mine.txt", "new"]


def test_a_place_that_is_none_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    for path, why in (
        (tmp_path, "it is a directory"),
        (tmp_path / "link", "it is a link, a pipe or a device"),
        (tmp_path / "file" / "a", "it: .*file is no directory"),
        (tmp_path / ("a" * 256), "it cannot be written: File name too long"),
    ):
        with pytest.raises(UsageError, match=why):
            require_place(path, "it")
    # Nothing forbids root to write.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="it: .* cannot be written to"):
        require_place(tmp_path / "new" / "a", "it")
