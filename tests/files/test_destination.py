"""What a file that a verb writes may replace."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from openquant.errors import OutputError, UsageError
from openquant.files.destination import Destination, FileKind, Taken, output_errors, require_all, taken_by
from openquant.weights.statistics import Calibration, calibrations

NOTE = b"a note of ours"


KIND = FileKind("a note", lambda file: file.read() == NOTE, "note.txt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "tokenizer").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer/vocab.txt", "note.txt"):
        (root / name).write_bytes(NOTE)
    return root


def refused(path: Path, taken: Taken, beside: Path | None = None) -> str:
    """What is said of a file that is not written."""
    before = path.read_bytes() if path.exists() else None
    file = Destination(path, "--report", KIND, taken, beside)
    with pytest.raises(UsageError) as caught:
        file.require()
    with pytest.raises(UsageError, match=r"."):
        file.write(b"new")
    assert (path.read_bytes() if path.exists() else None) == before
    return caught.value.message.replace(str(path), "FILE", 1)


def test_nothing_in_the_directory_of_a_model_is_written(model: Path, tmp_path: Path) -> None:
    taken = taken_by(models=(model,))
    (tmp_path / "link").symlink_to(model)
    for path in (
        model / "config.json",
        model / "new.html",
        model / "tokenizer" / "vocab.txt",
        model / "new" / "deeper.html",
        model / ".." / "model" / "config.json",
        tmp_path / "link" / "config.json",
        tmp_path / "link" / "tokenizer" / "new.html",
    ):
        assert refused(path, taken) == f"--report FILE lies in the model {model}"


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    assert refused(tmp_path / "mine.txt", ()) == "--report FILE exists and is not a note that openquant wrote"
    (tmp_path / "empty").write_bytes(b"")
    for name in ("empty", "empty", "new/one"):
        Destination(tmp_path / name, "--report", KIND).write(NOTE)
        assert (tmp_path / name).read_bytes() == NOTE


def test_what_a_run_writes_is_written_once(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    taken = taken_by(outputs=(out,))
    assert refused(out, taken) == f"--report FILE is {out}, which this run writes"
    assert refused(out / "a.html", taken) == f"--report FILE lies in {out}, which this run writes"
    one = Destination(tmp_path / "a" / ".." / "b", "--out", KIND)
    other = Destination(tmp_path / "b", "--figure", KIND)
    with pytest.raises(UsageError, match="^--out and --figure name one file, "):
        require_all([one, other])
    assert list(tmp_path.iterdir()) == []


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


def test_what_a_run_reads_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    taken = taken_by(inputs=((tmp_path / "data", "the dataset"),))
    assert refused(tmp_path / "data" / "new", taken) == "--report FILE lies in the dataset that this run reads"


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
