"""What a file that a verb writes may replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import pytest

from openquant.errors import UsageError
from openquant.files.cards import EVALUATION
from openquant.files.destination import Destination, FileKind, Taken, require_all, taken_by
from openquant.report.charts import draw_picture
from openquant.report.html import PAGE, PICTURE, PageContent, render_page
from openquant.weights.statistics import Calibration, calibrations
from support.evaluation_files import evaluation

NOTE = b"a note of ours"


def is_note(file: BinaryIO) -> bool:
    return file.read() == NOTE


KIND = FileKind("a note", is_note, "note.txt")


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


def test_an_output_has_a_place_for_an_evaluation(model: Path, tmp_path: Path) -> None:
    taken = taken_by(models=(model,))
    Destination(model / "note.txt", "--out", KIND, taken, model).write(b"new")
    assert (model / "note.txt").read_bytes() == b"new"
    with pytest.raises(UsageError) as caught:
        Destination(model / "other.txt", "--out", KIND, taken, model).require()
    assert caught.value.hint == f"give another place, or {model / 'note.txt'}"
    (tmp_path / "other").mkdir()
    assert "lies in the model" in refused(model / "config.json", taken, model)
    assert "lies in the model" in refused(model / "tokenizer" / "note.txt", taken, model)
    assert "lies in the model" in refused(model / "note.txt", taken, tmp_path / "other")


def test_what_a_run_reads_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(NOTE)
    (tmp_path / "data").mkdir()
    taken = taken_by(inputs=((tmp_path / "text", "a text"), (tmp_path / "data", "the dataset")))
    for name in ("text", "data/../text"):
        assert refused(tmp_path / name, taken) == "--report FILE is a text that this run reads"
    assert refused(tmp_path / "data" / "new", taken) == "--report FILE lies in the dataset that this run reads"


def test_what_a_run_writes_is_written_once(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    taken = taken_by(outputs=(out,))
    assert refused(out, taken) == f"--report FILE is {out}, which this run writes"
    assert refused(out / "a.html", taken) == f"--report FILE lies in {out}, which this run writes"
    assert refused(tmp_path / "new", taken) == f"--report FILE holds {out}, which this run writes"
    one = Destination(tmp_path / "a" / ".." / "b", "--out", KIND)
    other = Destination(tmp_path / "b", "--figure", KIND)
    with pytest.raises(UsageError, match="^--out and --figure name one file, "):
        require_all([one, other])
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(b"mine")
    assert refused(tmp_path / "mine.txt", ()) == "--report FILE exists and is not a note that openquant wrote"
    (tmp_path / "empty").write_bytes(b"")
    for name in ("empty", "empty", "new/one"):
        Destination(tmp_path / name, "--report", KIND).write(NOTE)
        assert (tmp_path / name).read_bytes() == NOTE


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    file = Destination(tmp_path / "a", "--report", KIND)
    file.require()
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists and is not a note"):
        file.write(NOTE)
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_what_openquant_writes_is_recognized_as_its_kind_alone(tmp_path: Path) -> None:
    found = evaluation()
    several = {"source": found["source"], "floor": found["floor"], "outputs": [found]}
    kinds = {
        "calibration": (calibrations(), Calibration((), "0" * 64, {}).to_bytes()),
        "evaluation": (EVALUATION, json.dumps(found).encode()),
        "several": (EVALUATION, json.dumps(several, indent=1).encode()),
        "page": (PAGE, render_page(PageContent("x" * 5000, evaluations=[found] * 2)).encode()),
        "picture": (PICTURE, draw_picture([found])),
    }
    for name, (_, data) in kinds.items():
        (tmp_path / name).write_bytes(data)
    for data in (
        b"{}",
        b"[]",
        b'{"outputs": []}',
        b'{"versions": 1}',
        b"\xff" * 9,
        b"\2" + b"\0" * 7 + b"[]",
        b"\x89PNG",
    ):
        (tmp_path / f"strange {data[:20]!r}").write_bytes(data)
    for path in tmp_path.iterdir():
        for kind in (calibrations(), EVALUATION, PAGE, PICTURE):
            with path.open("rb") as file:
                assert kind.recognizes(file) == (path.name in kinds and kinds[path.name][0].title == kind.title), path


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
