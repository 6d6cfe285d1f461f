"""Reads and checks eval.json, the result of `openquant eval`. Anybody may have written or changed it.

evaluation = read_evaluation(Path("Qwen3-8B-FP8"))
evaluation["kl"]["mean"]            # 0.00129: always a finite number
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ..errors import SourceError
from .cards import shell_word
from .checkpoint import Checkpoint, Fingerprint, readable
from .destination import FileKind
from .model_files import EVAL_FILE, EVAL_PAGE, EVAL_PICTURE, MAX_SMALL, parse_json, read_small, short_repr

AGAIN = "run openquant eval again, or remove it"
# Longest list, and characters of the longest text.
MAX_ITEMS = 100_000
MAX_CHARACTERS = 1 << 20


class Nullable(NamedTuple):
    """A value that may be null."""

    kind: Any


class _Finite:
    """Marks a number that may have any finite size, because it is not plotted."""


# Plotted numbers are below 1e100, because matplotlib overflows with numbers near the largest float.
NUMBER = float
FINITE = _Finite
COUNT = int
TEXT = str
_LARGEST = 1e100
INTERVAL = Nullable((NUMBER, NUMBER))
# Scores of source and output in one metric; and the figures of a task.
PAIR: dict[str, Any] = {
    "source": NUMBER,
    "output": NUMBER,
    "difference": NUMBER,
    "difference_interval": (NUMBER, NUMBER),
    "recovery": Nullable(NUMBER),
    "recovery_interval": INTERVAL,
}
TASK: dict[str, Any] = {
    "task": TEXT,
    "questions": COUNT,
    "metrics": [{"metric": TEXT, **PAIR, "p": NUMBER, "lost": COUNT, "gained": COUNT}],
    "answered_otherwise": NUMBER,
    "kl": NUMBER,
}
# The keys that are read, and the kind of each value: a number, count or text, a list of one kind, a tuple for a list of
# that length, or an object. Keys that end in "?" may be missing; other keys of the file are ignored.
SCHEMA: dict[str, Any] = {
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
    "kl_by_confidence": [{"from": NUMBER, "to": NUMBER, "positions": COUNT, "kl": Nullable(NUMBER)}],
    "kl_by_position": [{"from": NUMBER, "to": NUMBER, "kl": Nullable(NUMBER)}],
    "kl_by_domain": [{"domain": TEXT, "positions": COUNT, "kl": NUMBER, "interval": INTERVAL}],
    "kl_histogram": {"edges": [NUMBER], "output": [NUMBER], "floor": [NUMBER]},
    "top1": NUMBER,
    "top5": NUMBER,
    "perplexity": {"source": FINITE, "output": FINITE, "ratio": FINITE, "interval": Nullable((FINITE, FINITE))},
    "rms_dp": NUMBER,
    "weights_only": {"kl": NUMBER, "top1": NUMBER},
    "floor": {"kl": NUMBER, "top1": NUMBER, "interval?": INTERVAL, "perplexity?": FINITE},
    "layers": [{"layer": TEXT, "distance": NUMBER, "floor?": Nullable(NUMBER), "routed_otherwise?": Nullable(NUMBER)}],
    # With `text`: the most likely tokens of both along that text. Without it: their answers to a prompt.
    "texts": [{"prompt": TEXT, "source": TEXT, "output": TEXT, "text?": TEXT, "differs_at": Nullable(COUNT)}],
    "tasks?": {
        "named": [TEXT],
        "limit": Nullable(COUNT),
        "questions": COUNT,
        "tasks": [TASK],
        "pooled": TASK,
        "mean": [{"metric": TEXT, "tasks": COUNT, **PAIR}],
        "reading": TEXT,
    },
    "verdict": TEXT,
    "reasons": [TEXT],
    "suspects": [TEXT],
    "sizes": {"source": COUNT, "output": COUNT},
    "text": {
        "files?": [TEXT],
        "dataset?": Nullable(TEXT),
        "builtin?": TEXT,
        "sha256": TEXT,
        "documents": COUNT,
        "length": COUNT,
        "positions": COUNT,
    },
    "source": {"name": TEXT, "digest": TEXT, "stamp?": TEXT},
    "output": {"name": TEXT, "digest": TEXT, "stamp?": TEXT},
}


def read_evaluation(directory: Path) -> dict[str, Any]:
    """Read the eval.json of a directory.

    Args:
        directory: the directory of a model.

    Returns:
        The parsed JSON object, which has all keys of SCHEMA; `types.OutputEvaluation` has their types.

    Raises:
        SourceError: it is damaged, too large, or not an evaluation.
        OSError: it is missing or cannot be read. Callers convert it with `readable()`.
    """
    data = read_small(directory / EVAL_FILE, EVAL_FILE)
    return check_evaluation(parse_json(data, EVAL_FILE))


def check_evaluation(value: Any) -> dict[str, Any]:
    """Check a parsed eval.json against SCHEMA, the keys and types that `openquant eval` writes.

    Args:
        value: the parsed JSON.

    Returns:
        `value` itself.

    Raises:
        SourceError: it is no evaluation; the message names the key.
    """
    _check(value, SCHEMA, "")
    _check_histogram(value["kl_histogram"])
    if "tasks" in value:
        # Cards and pages show the first of each.
        tasks = value["tasks"]
        if not tasks["mean"]:
            _refuse([], "tasks.mean")
        if not all(figures["metrics"] for figures in [*tasks["tasks"], tasks["pooled"]]):
            _refuse([], "tasks.tasks[].metrics")
    evaluation: dict[str, Any] = value
    return evaluation


def _check(value: Any, kind: Any, where: str) -> None:
    """Refuse a value that is not of a kind of SCHEMA; `where` is its path, such as "kl.mean"."""
    if isinstance(kind, Nullable):
        if value is not None:
            _check(value, kind.kind, where)
        return

    if isinstance(kind, dict) and isinstance(value, dict):
        for name, inner in kind.items():
            key = name.removesuffix("?")
            if key in value:
                _check(value[key], inner, f"{where}.{key}".lstrip("."))
            elif key == name:
                raise SourceError(f"{EVAL_FILE} has no {f'{where}.{key}'.lstrip('.')}", AGAIN)
        return

    if isinstance(kind, tuple) and isinstance(value, list) and len(value) == len(kind):
        for number, item in enumerate(value):
            _check(item, kind[number], f"{where}[{number}]")
        return

    if isinstance(kind, list) and isinstance(value, list) and len(value) <= MAX_ITEMS:
        for number, item in enumerate(value):
            _check(item, kind[0], f"{where}[{number}]")
        return

    if not _is_plain(value, kind):
        _refuse(value, where)


def _refuse(value: Any, where: str) -> NoReturn:
    raise SourceError(
        f"{EVAL_FILE}: {where or 'it'} is {short_repr(value)}, which is not what eval writes there", AGAIN
    )


def _check_histogram(histogram: Mapping[str, list[float]]) -> None:
    """Refuse edges that are not positive and ascending, and shares that are not one for each bin."""
    edges = histogram["edges"]
    if len(edges) < 2 or edges[0] <= 0 or any(low >= high for low, high in pairwise(edges)):
        _refuse(edges, "kl_histogram.edges")
    for name in ("output", "floor"):
        if len(histogram[name]) != len(edges) - 1:
            _refuse(histogram[name], f"kl_histogram.{name}")


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is TEXT:
        return isinstance(value, str) and len(value) <= MAX_CHARACTERS
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if kind is COUNT:
        return isinstance(value, int) and 0 <= value < 1 << 63
    if isinstance(value, int):
        return kind in (NUMBER, FINITE) and abs(value) < 1 << 63
    if kind is NUMBER:
        return abs(value) < _LARGEST
    return kind is FINITE and math.isfinite(value)


def _is_evaluation(file: BinaryIO) -> bool:
    """Return whether a file is an evaluation of one output or of several."""
    try:
        value = parse_json(file.read(MAX_SMALL + 1), EVAL_FILE)
        if "outputs" in value:
            value = value["outputs"][0]
        return "openquant" in value["versions"] and "kl" in value
    except (SourceError, LookupError, TypeError):
        return False


EVALUATION = FileKind("an evaluation", _is_evaluation, EVAL_FILE)


def evaluation_digest(evaluation: Mapping[str, Any]) -> str:
    """Return the digest of an evaluation, by which its HTML page and its picture refer to it.

    Args:
        evaluation: the content of an eval.json.

    Returns:
        SHA-256 of the content as JSON with sorted keys, hexadecimal.
    """
    return hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()


class FoundEvaluation(NamedTuple):
    """The evaluation in a model's directory.

    Attributes:
        evaluation: the values of eval.json.
        files: names of its files: eval.json, and the page and picture that show it.
    """

    evaluation: dict[str, Any]
    files: list[str]


def evaluation_files(path: Path) -> dict[str, bytes]:
    """Read an evaluation that lies anywhere, and the picture beside it.

    Args:
        path: a file that `openquant eval` wrote, under any name.

    Returns:
        Contents of the files as they are published: eval.json, and eval.png if it is of this evaluation.

    Raises:
        SourceError: it is damaged, too large, or not an evaluation of one output.
    """
    with readable():
        data = read_small(path, EVAL_FILE)
        value = parse_json(data, EVAL_FILE)
        if isinstance(value, dict) and isinstance(value.get("outputs"), list):
            raise SourceError(
                f"{path} has the figures of {len(value['outputs'])} outputs, and a repository holds one",
                "measure that one alone: openquant eval NAME --source SOURCE --out eval.json",
            )

        digest = evaluation_digest(check_evaluation(value)).encode()
        picture_path = path.parent / EVAL_PICTURE
        picture = b""
        if picture_path.is_file():
            picture = read_small(picture_path, EVAL_PICTURE)

    if digest not in picture:
        return {EVAL_FILE: data}
    return {EVAL_FILE: data, EVAL_PICTURE: picture}


def find_evaluation(checkpoint: Checkpoint) -> FoundEvaluation | None:
    """Find the evaluation in a model's directory.

    Args:
        checkpoint: the opened directory.

    Returns:
        The content of its eval.json, and the names of the files that belong to it; None if there is no eval.json.

    Raises:
        SourceError: it is damaged, or of another model or an earlier version of this one; or a shard cannot be
            read.
    """
    with readable():
        if not (checkpoint.root / EVAL_FILE).exists():
            return None
        evaluation = read_evaluation(checkpoint.root)
        output = evaluation["output"]
        if not Fingerprint(checkpoint).matches(output["digest"], output.get("stamp", "")):
            raise SourceError(
                f"{EVAL_FILE} is of another model, or of an earlier version of this one",
                f"{AGAIN}; if you changed nothing, openquant verify --source MODEL --full finds what is damaged",
            )
        shown = _shown(checkpoint.root, evaluation)
        return FoundEvaluation(evaluation, [EVAL_FILE, *(name for name, is_shown in shown.items() if is_shown)])


def _shown(root: Path, evaluation: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether the page and the picture in a directory, if they are there, show an evaluation."""
    digest = evaluation_digest(evaluation).encode()
    present = [name for name in (EVAL_PAGE, EVAL_PICTURE) if (root / name).is_file()]
    return {name: digest in read_small(root / name, name) for name in present}


def evaluation_notes(root: Path) -> list[str]:
    """Say what of an evaluation is missing in a model's directory that is published.

    Args:
        root: the directory.

    Returns:
        One sentence if there is no eval.json, else one for each of page and picture that is of another evaluation.

    Raises:
        SourceError: a file cannot be read, or eval.json is damaged.
    """
    with readable():
        if not (root / EVAL_FILE).is_file():
            command = f"openquant eval {shell_word(os.fspath(root))} --source SOURCE"
            return [f"no figures are added to the card: {command}, then push again"]
        shown = _shown(root, read_evaluation(root))
    names = [name for name, is_shown in shown.items() if not is_shown]
    return [f"{name} is of another evaluation than {EVAL_FILE}, and is left out" for name in names]
