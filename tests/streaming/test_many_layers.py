"""Models of many small layers: work grows as their number does, and no faster."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from openquant import compress, diagnose, verify
from support import small_checkpoints


def calls_of(work: Callable[[Path], None], root: Path) -> int:
    """How many functions a verb calls for a model, in all threads."""
    counts: dict[int, int] = {}

    def count(frame: object, event: str, argument: object) -> None:
        del frame, argument
        if event in ("call", "c_call"):
            thread = threading.get_ident()
            counts[thread] = counts.get(thread, 0) + 1

    before = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        work(root)
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return sum(counts.values())


def convert_and_verify(root: Path) -> None:
    output = root.with_name(f"{root.name}-FP8")
    compress(root, output, workers=1)
    assert not verify(output, source=root, full=True).problems


def diagnose_and_print(root: Path) -> None:
    json.dumps(diagnose(root, workers=1).to_json())


@pytest.mark.parametrize("work", [convert_and_verify, diagnose_and_print])
def test_work_grows_as_the_number_of_layers(tmp_path: Path, work: Callable[[Path], None]) -> None:
    # What is imported and made once is not counted.
    work(small_checkpoints.write_layers(tmp_path / "1", 1))
    few, some, many = (
        calls_of(work, small_checkpoints.write_layers(tmp_path / str(layers), layers)) for layers in (2, 4, 8)
    )
    # Twice as many layers are added, and take twice the calls.
    assert many - some < 2.05 * (some - few)
