"""What is said of a file of passes that is none; tests/calibration/test_observers.py has damaged and sound ones."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from openquant.errors import SourceError
from openquant.streaming.pass_checkpoint import PassCheckpoint

AGAIN = "remove it to begin again"


def file_of(root: Path, data: bytes) -> Path:
    """A file with these bytes and their digest."""
    path = root / "x.passes"
    path.write_bytes(data + hashlib.sha256(data).digest())
    return path


def refused(path: Path) -> str:
    with pytest.raises(SourceError) as raised:
        PassCheckpoint(path, lambda: {"texts": "1"})
    assert raised.value.hint == AGAIN
    return raised.value.message


def header(**metadata: str) -> bytes:
    data = json.dumps({"__metadata__": metadata, "sha256": {"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}})
    return len(data).to_bytes(8, "little") + data.encode()


def test_a_file_of_another_kind_is_told_by_its_header(tmp_path: Path) -> None:
    path = file_of(tmp_path, b"no header at all")
    assert refused(path).startswith(f"{path} cannot be continued: it ")
    assert "None" not in refused(path)
    path = file_of(tmp_path, header(kind="another"))
    assert refused(path) == f"{path} cannot be continued: 'openquant passes'"
    facts = {"about": ["texts"], "unit": "", "descriptions": [], "gave": {}, "calls": {}}
    path = file_of(tmp_path, header(**{"openquant passes": json.dumps(facts)}))
    assert refused(path) == f"{path} cannot be continued: its metadata are incomplete"


def test_passes_of_other_texts_are_not_continued(tmp_path: Path) -> None:
    facts = {"about": {"texts": "2", "weights": "b"}, "unit": "a", "descriptions": [], "gave": {}, "calls": {}}
    path = file_of(tmp_path, header(**{"openquant passes": json.dumps(facts)}))
    assert PassCheckpoint(path, lambda: {"texts": "2", "weights": "b"}).saved == b""
    for of, other in ({"texts": "1", "weights": "b"}, "texts"), ({"texts": "2", "weights": "c"}, "weights"):
        with pytest.raises(SourceError) as raised:
            PassCheckpoint(path, lambda of=of: of)
        assert raised.value.message == f"{path} is from a run with other {other}"
        assert raised.value.hint == f"remove it to begin again, or use the same {other}"


def test_one_process_at_a_time_uses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.scores.json.part"
    code = f"from pathlib import Path; from {PassCheckpoint.__module__} import *; PassCheckpoint(Path({str(path)!r}), dict)"
    other = [sys.executable, "-c", code]

    held = PassCheckpoint(path, dict)
    refused = subprocess.run(other, capture_output=True, text=True)
    assert refused.stderr.endswith(f"OutputError: another run is using {path}\n")

    # The same process may begin again, as after an error in a notebook.
    PassCheckpoint(path, dict)
    del held
    assert subprocess.run(other, capture_output=True, text=True).stderr == ""
    assert not list(tmp_path.iterdir())
