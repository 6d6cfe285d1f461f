"""eval.json, read: what `openquant eval` found of a model, which may have been written or changed by anybody since.

evaluation = read_evaluation(Path("Qwen3-8B-FP8"))
evaluation["kl"]["mean"]            # 0.00129: a finite number, whatever the file held
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ..errors import SourceError
from .checkpoint import Checkpoint, readable
from .destination import FileKind
from .fingerprint import Fingerprint
from .folder import Folder
from .names import EVAL_FILE, EVAL_PAGE, EVAL_PICTURE
from .small_files import MAX_SMALL, parse_json, read_small, short_repr

AGAIN = "run openquant eval again, or remove it"
# Of a list, and letters of a text.
MOST, LONGEST = 100_000, 1 << 20


class Maybe(NamedTuple):
    """A value that may be null."""

    kind: Any


class _Finite:
    """A number that is not drawn, of any finite size."""


# What is drawn is below 1e100: with numbers near the largest that there are matplotlib overflows.
NUMBER, FINITE, COUNT, TEXT = float, _Finite, int, str
_LARGEST = 1e100
INTERVAL = Maybe((NUMBER, NUMBER))
# What is read of it, by kind: a number, a count, a text, a list of one kind, an object. A key that ends in "?" may be
# missing, and keys that are not here are not read. A tuple is a list of so many.
SHAPE: dict[str, Any] = {
    "kl": {
        "mean": NUMBER,
        "interval": INTERVAL,
        "median": NUMBER,
        "p90": NUMBER,
        "p99": NUMBER,
        "p999": NUMBER,
        "max": NUMBER,
        "share_above_0.1": NUMBER,
    },
    "kl_by_confidence": [{"from": NUMBER, "to": NUMBER, "positions": COUNT, "kl": Maybe(NUMBER)}],
    "kl_by_position": [{"from": NUMBER, "to": NUMBER, "kl": Maybe(NUMBER)}],
    "kl_by_domain": [{"domain": TEXT, "positions": COUNT, "kl": NUMBER, "interval": INTERVAL}],
    "kl_histogram": {"edges": [NUMBER], "output": [NUMBER], "floor": [NUMBER]},
    "top1": NUMBER,
    "top5": NUMBER,
    "perplexity": {"source": FINITE, "output": FINITE, "ratio": FINITE, "interval": Maybe((FINITE, FINITE))},
    "rms_dp": NUMBER,
    "weights_only": {"kl": NUMBER, "top1": NUMBER},
    "floor": {"kl": NUMBER, "top1": NUMBER},
    "layers": [{"layer": TEXT, "distance": NUMBER, "floor?": Maybe(NUMBER), "routed_otherwise?": Maybe(NUMBER)}],
    # With `text` where both tell what they find most likely along one, without it where they answer a prompt.
    "texts": [{"prompt": TEXT, "source": TEXT, "output": TEXT, "text?": TEXT, "differs_at": Maybe(COUNT)}],
    "verdict": TEXT,
    "reasons": [TEXT],
    "suspects": [TEXT],
    "sizes": {"source": COUNT, "output": COUNT},
    "text": {
        "files?": [TEXT],
        "dataset?": Maybe(TEXT),
        "sha256": TEXT,
        "documents": COUNT,
        "length": COUNT,
        "positions": COUNT,
    },
    "source": {"name": TEXT, "digest": TEXT, "stamp?": TEXT},
    "output": {"name": TEXT, "digest": TEXT, "stamp?": TEXT},
}


def read_evaluation(directory: Path) -> dict[str, Any]:
    """The eval.json of a directory.

    Raises:
        SourceError: it is damaged, or too large, or holds something else.
        OSError: there is none; `readable()` tells the user.
    """
    data = read_small(directory / EVAL_FILE, EVAL_FILE)
    return check_evaluation(parse_json(data, EVAL_FILE))


def check_evaluation(value: Any) -> dict[str, Any]:
    """The same, if it is what an eval.json holds.

    Raises:
        SourceError: it is not; the message names the key.
    """
    _check(value, SHAPE, "")
    _check_histogram(value["kl_histogram"])
    found: dict[str, Any] = value
    return found


def _check(value: Any, kind: Any, where: str) -> None:
    if isinstance(kind, Maybe):
        if value is not None:
            _check(value, kind.kind, where)
        return
    if isinstance(kind, dict) and isinstance(value, dict):
        for name, inner in kind.items():
            key = name.removesuffix("?")
            if key in value:
                _check(value[key], inner, f"{where}.{key}" if where else key)
            elif key == name:
                raise SourceError(f"{EVAL_FILE} has no {f'{where}.' if where else ''}{key}", AGAIN)
        return
    if isinstance(kind, tuple) and isinstance(value, list) and len(value) == len(kind):
        for number, one in enumerate(value):
            _check(one, kind[number], f"{where}[{number}]")
        return
    if isinstance(kind, list) and isinstance(value, list) and len(value) <= MOST:
        for number, one in enumerate(value):
            _check(one, kind[0], f"{where}[{number}]")
        return
    if not _is_plain(value, kind):
        _refuse(value, where)


def _refuse(value: Any, where: str) -> NoReturn:
    raise SourceError(
        f"{EVAL_FILE}: {where or 'it'} is {short_repr(value)}, which is not what eval writes there", AGAIN
    )


def _check_histogram(histogram: Mapping[str, list[float]]) -> None:
    """Refuse edges of bins that do not ascend from above zero, and shares of other than all bins."""
    edges = histogram["edges"]
    if len(edges) < 2 or edges[0] <= 0 or any(low >= high for low, high in pairwise(edges)):
        _refuse(edges, "kl_histogram.edges")
    for name in ("output", "floor"):
        if len(histogram[name]) != len(edges) - 1:
            _refuse(histogram[name], f"kl_histogram.{name}")


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is TEXT:
        return isinstance(value, str) and len(value) <= LONGEST
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if kind is COUNT:
        return isinstance(value, int) and 0 <= value < 1 << 63
    if isinstance(value, int):
        return kind in (NUMBER, FINITE) and abs(value) < 1 << 63
    return abs(value) < _LARGEST if kind is NUMBER else kind is FINITE and math.isfinite(value)


def _is_evaluation(file: BinaryIO) -> bool:
    """Whether a file has the figures of one output, or of several."""
    try:
        value = parse_json(file.read(MAX_SMALL + 1), EVAL_FILE)
        if "outputs" in value:
            value = value["outputs"][0]
        return "openquant" in value["versions"] and "kl" in value
    except (SourceError, LookupError, TypeError):
        return False


EVALUATION = FileKind("an evaluation", _is_evaluation, EVAL_FILE)


def evaluation_digest(evaluation: Mapping[str, Any]) -> str:
    """What a page and a picture name the evaluation by that they show: SHA-256 of its values, hexadecimal."""
    return hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()


class FoundEvaluation(NamedTuple):
    """What lies beside a model of an evaluation.

    Attributes:
        evaluation: its figures.
        files: names of the files that hold or show them.
    """

    evaluation: dict[str, Any]
    files: list[str]


def find_evaluation(checkpoint: Checkpoint) -> FoundEvaluation | None:
    """The evaluation that lies beside a model, and the page and the picture that show this one; None without any.

    Raises:
        SourceError: it is damaged, a link, or of another model, or of what this one was before.
    """
    with readable(), Folder(checkpoint.root) as folder:
        if folder.stat(EVAL_FILE) is None:
            return None
        if not folder.is_file(EVAL_FILE):
            raise SourceError(f"{EVAL_FILE} is not a regular file", AGAIN)
        evaluation = read_evaluation(checkpoint.root)
        of = evaluation["output"]
        if not Fingerprint(checkpoint).matches(of["digest"], of.get("stamp", "")):
            raise SourceError(f"{EVAL_FILE} is of another model, or of what this one was before", AGAIN)
        name = evaluation_digest(evaluation).encode()
        shows = (one for one in (EVAL_PAGE, EVAL_PICTURE) if folder.is_file(one))
        return FoundEvaluation(
            evaluation, [EVAL_FILE, *(one for one in shows if name in (folder.read(one, MAX_SMALL) or b""))]
        )
