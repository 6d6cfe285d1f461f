"""What is said of a file of passes that is none; tests/calibration/test_observers.py has damaged and sound ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from openquant.errors import SourceError
from openquant.streaming.pass_checkpoint import PassCheckpoint, _pieces, dump
from support import starting

AGAIN = "remove it to begin again"


def file_of(root: Path, *parts: bytes | memoryview) -> Path:
    path = root / "x.passes"
    path.write_bytes(b"".join(_pieces(parts)))
    return path


def refused(path: Path) -> str:
    with pytest.raises(SourceError) as raised:
        PassCheckpoint(path, {"texts": "1"})
    assert raised.value.hint == AGAIN
    return raised.value.message


def test_a_file_of_another_kind_is_told_by_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "x.passes"
    data = b"what an earlier version wrote"
    path.write_bytes(data + hashlib.sha256(data).digest())
    assert refused(path) == f"{path} cannot be continued: another version of openquant has saved it"


def test_passes_of_other_texts_are_not_continued(tmp_path: Path) -> None:
    state = {"about": {"texts": "2", "weights": "b"}, "unit": "a", "outputs": {}, "measured": 7}
    path = file_of(tmp_path, dump(state))
    assert PassCheckpoint(path, {"texts": "2", "weights": "b"}).saved == 7
    for of, other in ({"texts": "1", "weights": "b"}, "texts"), ({"texts": "2", "weights": "c"}, "weights"):
        with pytest.raises(SourceError) as raised:
            PassCheckpoint(path, of)
        assert raised.value.message == f"{path} is from a run with other {other}"
        assert raised.value.hint == f"remove it to begin again, or use the same {other}"


def test_one_process_at_a_time_uses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.scores.json.part"
    code = f"from pathlib import Path; from {PassCheckpoint.__module__} import *; PassCheckpoint(Path({str(path)!r}), dict)"

    def opened_elsewhere() -> str:
        return starting.run(["-c", code], cwd=tmp_path, env=os.environ).stderr

    held = PassCheckpoint(path, {})
    assert opened_elsewhere().endswith(f"OutputError: another run is using {path}\n")

    # The same process may begin again, as after an error in a notebook.
    PassCheckpoint(path, {})
    del held
    assert opened_elsewhere() == ""
    assert not list(tmp_path.iterdir())
