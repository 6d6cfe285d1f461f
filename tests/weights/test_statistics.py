"""A calibration's file: what was written comes back, and what somebody else made of it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from openquant.errors import SourceError
from openquant.formats.schemes import NVFP4_W4A4, TENSOR_STATIC
from openquant.plan.decisions import tokens_of
from openquant.weights.statistics import Calibration, InputStatistics, read_calibration

KIND = "openquant calibration"
CACHED = {0: (21.5, 0.1), 2: (900.0, 0.0)}


def some() -> Calibration:
    absmax, mean, square = (np.array([value, 0], np.float32) for value in (1.5, 0.5, 0.75))
    first = InputStatistics(("a.weight", "b.weight"), absmax, mean, 7, square, (4, 0, 3))
    unseen = InputStatistics(("c.weight",), np.zeros(3, np.float32), np.zeros(3, np.float32), 0)
    return Calibration((first, unseen), "5f", {"files": ["a.txt"], "documents": 2, "length": 16}, CACHED, "a0")


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.calibration.safetensors"
    path.write_bytes(some().to_bytes())
    found = read_calibration(path)
    assert found.to_bytes() == some().to_bytes()
    assert (found.model, found.stamp, tokens_of(found.texts), found.cached) == ("5f", "a0", "2 x 16 tokens", CACHED)
    for tensor in ("a.weight", "b.weight"):
        seen = found.of(tensor)
        assert seen is not None
        assert (seen.largest, seen.tokens) == (1.5, 7)
        assert seen.mean.tolist() == [0.5, 0]
        assert seen.square is not None
        assert seen.square.tolist() == [0.75, 0]
        assert seen.routed == (4, 0, 3)
    # Earlier ones have no squares.
    assert found.inputs[1].square is None
    assert found.inputs[1].routed is None
    assert found.of("c.weight") is None
    assert found.of("d.weight") is None


INPUT = {"tensors": ["a.weight"], "tokens": 7}
FACTS = {"model": "5f", "stamp": "a0", "texts": {}, "inputs": [INPUT], "cached": {}}
NONE_OF_OURS = "{path} is no calibration"
WRONG = "{path}: magnitudes of a.weight are negative or not finite"
# What a file says instead of FACTS, which arrays it has instead of others, and the message.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((facts, {}, NONE_OF_OURS) for facts in ({}, [], 7, {**FACTS, "inputs": [7]}, {**FACTS, "cached": {"a": [1.0]}})),
    (FACTS, {"0_absmax": None}, NONE_OF_OURS),
    *((FACTS, {name: np.array([1, value], np.float32)}, WRONG) for name, value in (("0_absmax", -1), ("0_mean", np.nan), ("0_absmax", np.inf), ("0_square", -1), ("0_square", np.inf))),
]  # fmt: skip


def test_what_no_calibration_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.calibration.safetensors"
    path.write_bytes(some().to_bytes())
    sound = load_file(path)
    for facts, tensors, message in REFUSED:
        arrays = {**sound, **{name.replace("_", "."): value for name, value in tensors.items()}}
        held = {name: value for name, value in arrays.items() if value is not None}
        save_file(held, path, {KIND: json.dumps(facts)})
        with pytest.raises(SourceError) as caught:
            read_calibration(path)
        assert caught.value.message == message.format(path=path), (facts, tensors)
        assert caught.value.hint == "make it again: openquant calibrate MODEL -o FILE"


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        read_calibration(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(SourceError, match=f"^{path} is no safetensors file: "):
        read_calibration(path)
    save_file({"a": np.zeros(1, np.float32)}, path)
    with pytest.raises(SourceError, match=f"^{path} is no calibration"):
        read_calibration(path)
    save_file({"a": np.zeros(1, np.float32)}, path, {KIND: "{"})
    with pytest.raises(SourceError, match=f"^{path} is not valid JSON: "):
        read_calibration(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="is not a regular file"):
        read_calibration(tmp_path / "pipe")


def test_scales_leave_room() -> None:
    assert TENSOR_STATIC.format.scale_inputs(7.0) == 2 * 7 / 448
    assert NVFP4_W4A4.format.scale_inputs(7.0) == pytest.approx(2688 / 14)
    # Whatever comes where nothing came yet is kept up to the largest code.
    for nothing in (0.0, 1e-38):
        assert TENSOR_STATIC.format.scale_inputs(nothing) == NVFP4_W4A4.format.scale_inputs(nothing) == 1.0
