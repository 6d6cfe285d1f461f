"""What is said of a file of passes that is none; tests/calibration/test_observers.py has damaged and sound ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from openquant.errors import SourceError
from openquant.streaming.pass_checkpoint import PassCheckpoint

AGAIN = "remove it to begin again"


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
