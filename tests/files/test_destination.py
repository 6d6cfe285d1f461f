"""What a file that a verb writes may replace."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from openquant.errors import OutputError, UsageError
from openquant.files.destination import Destination, FileKind, output_errors
from openquant.weights.statistics import Calibration, calibrations

NOTE = b"a note of ours"


KIND = FileKind("a note", lambda file: file.read() == NOTE)


def refused(path: Path) -> str:
    """What is said of a file that is not written."""
    before = path.read_bytes()
    file = Destination(path, "--report", KIND)
    with pytest.raises(UsageError) as caught:
        file.require()
    with pytest.raises(UsageError, match=r"."):
        file.write(b"new")
    assert path.read_bytes() == before
    return caught.value.message.replace(str(path), "FILE", 1)


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    assert refused(tmp_path / "mine.txt") == "--report FILE exists and is not a note that openquant wrote"
    (tmp_path / "empty").write_bytes(b"")
    for name in ("empty", "empty", "new/one"):
        Destination(tmp_path / name, "--report", KIND).write(NOTE)
        assert (tmp_path / name).read_bytes() == NOTE


def test_a_calibration_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(Calibration((), "1" * 64, {}).to_bytes())
    Destination(path, "-o", calibrations(lambda digest, stamp: (digest, stamp) == ("1" * 64, ""))).require()
    with pytest.raises(UsageError) as caught:
        Destination(path, "-o", calibrations(lambda *_: False)).require()
    assert (caught.value.message, caught.value.hint) == (
        f"{path} is a calibration of another model",
        "name another file with -o, or give --overwrite",
    )


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    file = Destination(tmp_path / "a", "--report", KIND)
    file.require()
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists and is not a note"):
        file.write(NOTE)
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_an_error_of_the_system_says_what_to_do() -> None:
    for number, hint in (
        (errno.EDQUOT, "free some space, or choose another disk with -o or --scratch, and run the same command again"),
        (errno.EROFS, "check the permissions, or choose another directory with -o or --scratch"),
        (errno.EIO, "run the same command again once that is solved: finished shards are kept"),
    ):
        with pytest.raises(OutputError) as caught, output_errors("out"):
            raise OSError(number, "why")
        assert (caught.value.message, caught.value.hint) == ("out cannot be written: why", hint)
