"""Scores of a model, kept beside its output in `NAME.scores.json`, so that another `--fit` of it starts from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import OpenQuantError
from ..files.destination import FileKind
from ..files.small_files import parse_json, read_small
from .units import UNQUANTIZED, Scores, Unit

SUFFIX = ".scores.json"
_KEY = "openquant_scores"
_VERSION = 1
# Bytes.
_MOST = 64 << 20


def _recognizes(file: BinaryIO) -> bool:
    return re.match(rb'\{\s*"openquant_scores"', file.read(64)) is not None


SCORES = FileKind("a file of scores", _recognizes)


def scores_json(scores: Scores, units: Sequence[Unit], conditions: dict[str, Any]) -> bytes:
    """Return the content of the file.

    Args:
        scores: the scores.
        units: the units that they are of.
        conditions: what they depend on: the model's stamp, the texts and versions.
    """
    measured = [
        {"modules": list(unit.modules), "kl": {name: kl for name, kl in found.items() if name != UNQUANTIZED}}
        for unit, found in zip(units, scores.kl, strict=True)
    ]
    return f"{json.dumps({_KEY: _VERSION, 'conditions': conditions, 'units': measured}, indent=1)}\n".encode()


def read_scores(path: Path, units: Sequence[Unit], conditions: dict[str, Any]) -> Scores | None:
    """Read scores of an earlier run.

    Args:
        path: the file, which may be missing.
        units: the units that scores are needed of.
        conditions: what the scores must have been measured under.

    Returns:
        The scores; None if there is no such file, it is of other conditions or units, or damaged.
    """
    try:
        content = parse_json(read_small(path, str(path), _MOST), str(path))
    except (OpenQuantError, OSError):
        return None
    if not isinstance(content, dict) or content.get(_KEY) != _VERSION or content.get("conditions") != conditions:
        return None
    kept = content.get("units")
    if not isinstance(kept, list) or len(kept) != len(units):
        return None
    scores = []
    for unit, found in zip(units, kept, strict=True):
        kl = found.get("kl") if isinstance(found, dict) else None
        names = unit.choices.keys() - {UNQUANTIZED}
        if not isinstance(kl, dict) or kl.keys() != names or found.get("modules") != list(unit.modules):
            return None
        if not all(isinstance(value, float) and math.isfinite(value) and value >= 0 for value in kl.values()):
            return None
        scores.append({UNQUANTIZED: 0.0, **kl})
    return Scores(tuple(scores))
