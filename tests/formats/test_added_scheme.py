"""A scheme that is added as ARCHITECTURE.md says, an entry in schemes.py: INT8 weights with zero points, as a toy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conftest import EXAMPLE
from openquant import compress, diagnose, verify
from openquant.formats import quantization, schemes
from openquant.formats.schemes import ASYMMETRIC, INT8_W8A16, SCHEMES, ZERO_POINT


def test_it_is_written_verified_and_diagnosed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toy = replace(
        INT8_W8A16,
        format=replace(INT8_W8A16.format, zero_point=ZERO_POINT),
        suffix="-toy",
        settings=schemes._compressed_tensors(
            {"strategy": "channel", "symmetric": False}, None, "pack-quantized", "int"
        ),
        searches_scales=True,
        clip_ratios=(1.0, 0.99, 0.98),
    )
    for module in (schemes, quantization):
        monkeypatch.setattr(module, "ASYMMETRIC", (*ASYMMETRIC, toy))
    compress(EXAMPLE, tmp_path / "out", "int8-weights", asymmetric=True)
    report = verify(tmp_path / "out", EXAMPLE, full=True)
    assert (report.problems, report.notes, report.equal_share) == ((), (), 1)
    # As a scheme of its own name it is measured beside all others.
    monkeypatch.setitem(SCHEMES, "toy", replace(toy, name="toy"))
    diagnosed = {layer.module: layer.errors["toy"] for layer in diagnose(EXAMPLE).layers}
    assert diagnosed == {error.module: pytest.approx(error.relative, rel=0.03) for error in report.errors}
