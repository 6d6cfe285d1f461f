"""The journal of a run, `.openquant.json` in its output directory, and the files that may lie beside it.

The journal names the digest of the plan and all files that the run writes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import OutputError, SourceError
from .model_files import JOURNAL_FILE as JOURNAL
from .small_files import parse_json, read_small, similar_path

WORK = ".openquant"
LOCK = f"{WORK}/lock"
# Directory in WORK with the records of uploads.
PUSHED = "pushed"
# Directories in WORK with streamed shards of the source, with the rank's number as suffix.
SOURCE = "source-"
FORMAT = 1
# Largest journal in bytes: enough for hundreds of thousands of files.
MAX_JOURNAL = 64 << 20
ELSEWHERE = "choose another directory with -o"
_DAMAGED = "delete it and openquant verify checks the weights; to convert again choose another directory with -o"


class WeightFacts(NamedTuple):
    """What a run does to weights, as `verify` must know it. The journal of the output records it.

    Attributes:
        gptq: whether GPTQ rounds layers.
        smoothed: whether SmoothQuant or AWQ divides inputs of layers.
        weighed: whether the search for scales weights errors by the layers' inputs.
        keeps_codes: whether all codes and scales are those of a quantized source.
        from_quantized: whether any weight of the source is quantized.
        static_scales: the scales of activations and of the KV cache that the run chose, by tensor name; of layers that
            share one, only the first.
    """

    gptq: bool = False
    smoothed: bool = False
    weighed: bool = False
    keeps_codes: bool = False
    from_quantized: bool = False
    static_scales: Mapping[str, float] = MappingProxyType({})


class Provenance(NamedTuple):
    """How an output was made. Its journal records all but the second.

    Attributes:
        recipe: options of the run; None if they are not recorded.
        frontier: sizes and KL divergences that `--fit` chose from, for the card and the page; None without it.
        copy: patterns of files that the user named (`--copy`).
    """

    recipe: Mapping[str, Any] | None = None
    frontier: Mapping[str, Any] | None = None
    copy: Sequence[str] = ()


@contextmanager
def output_errors(path: Path | str, doing: str = "written") -> Iterator[None]:
    """Turn an OSError into an OutputError with a hint, in a `with` block.

    Args:
        path: path that the message names.
        doing: what cannot be done, for the message: "written", "read", "removed".
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            hint = "raise the limit of file sizes (ulimit -f), and run the same command again: finished shards are kept"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space (or choose another -o) and run the same command again: finished shards are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check the permissions, or choose another directory with -o"
        else:
            hint = "run the same command again once that is solved: finished shards are kept"
        raise OutputError(f"{path} cannot be {doing}: {error.strerror or error}", hint) from error


def read_journal(directory: Path) -> dict[str, Any] | None:
    """Read the journal of an output directory, `.openquant.json`, which says what the run has written.

    Args:
        directory: the output directory.

    Returns:
        The parsed journal: "digest" (of the plan), "done" (whether the run is finished), "files" (names of the files
        that the run wrote), and more; None if there is none.

    Raises:
        OutputError: it cannot be read, or is not a journal.
    """
    path = directory / JOURNAL
    with output_errors(path, "read"):
        try:
            journal = parse_json(read_small(path, JOURNAL, MAX_JOURNAL), JOURNAL)
        except FileNotFoundError:
            return None
        except SourceError:
            journal = None

    if not _is_journal(journal):
        raise OutputError(f"{path} is not a journal that this version of openquant wrote", _DAMAGED)
    return dict(journal)


def _is_journal(journal: Any) -> bool:
    """Return whether a JSON value is a journal of this version."""
    try:
        return (
            journal["format"] == FORMAT
            and isinstance(journal["digest"], str)
            and isinstance(journal["done"], bool)
            and isinstance(journal["files"], list)
            and isinstance(journal.get("sources", {}), dict)
            and isinstance(journal.get("recipe", {}), dict)
            and all(isinstance(name, str) for name in journal["files"])
            and all(isinstance(pattern, str) for pattern in journal.get("copy", []))
            and _has_facts(journal.get("weights"))
        )
    except (TypeError, KeyError):
        return False


def facts_in(journal: Mapping[str, Any]) -> WeightFacts | None:
    """Return what a journal records about weights; None if an earlier version wrote it, which recorded nothing."""
    facts = journal.get("weights")
    return None if facts is None else WeightFacts(**facts)


def list_output(directory: Path) -> dict[str, os.stat_result]:
    """Return what lies in an output directory.

    Args:
        directory: the output directory, which may itself be a link.

    Returns:
        Status of each file and folder, by path relative to the directory. Folders that cannot be read count as empty,
        such as the lost+found of a disk.

    Raises:
        OutputError: a link lies in it, which could lead a write elsewhere; or it cannot be read.
    """
    found = {}
    with output_errors(directory, "read"):
        for folder, folders, files in os.walk(directory):
            for name in sorted([*folders, *files]):
                path = Path(folder, name)
                status = path.lstat()
                if stat.S_ISLNK(status.st_mode):
                    raise OutputError(f"{path} is a link", "put the file itself there, or move the link away")
                found[path.relative_to(directory).as_posix()] = status
    return found


def finished_files(directory: Path) -> tuple[str, set[str]]:
    """Read from the journal of a finished output which files the run wrote.

    Args:
        directory: the output directory.

    Returns:
        The plan's digest, hexadecimal, and the paths of all files that the run wrote, relative to the directory.

    Raises:
        OutputError: the directory was not made by openquant, is not finished, has a link, or lacks a file.
    """
    if not directory.is_dir():
        sibling = None if directory.exists() else similar_path(directory)
        near = f"did you mean {sibling}? " if sibling else ""
        raise OutputError(f"{directory} is not a directory", f"{near}check the path")

    found = list_output(directory)
    journal = read_journal(directory)
    if journal is None:
        raise OutputError(f"{directory} was not made by openquant", "give a directory that compress wrote")

    missing = sorted(name for name in journal["files"] if name not in found or not stat.S_ISREG(found[name].st_mode))
    if not journal["done"] or missing:
        problem = f"lacks {missing[0]}" if journal["done"] else "is not finished"
        raise OutputError(
            f"{directory} {problem}", "run the command that made it again; with --push-only nothing is left to push"
        )
    return journal["digest"], set(journal["files"])


def _has_facts(facts: object) -> bool:
    """Return whether a journal's "weights" are WeightFacts, or None."""
    if not isinstance(facts, dict):
        return facts is None
    scales = facts.get("static_scales")
    return (
        facts.keys() == WeightFacts._field_defaults.keys()
        and all(type(fact) is bool for name, fact in facts.items() if name != "static_scales")
        and isinstance(scales, dict)
        and all(type(scale) is float for scale in scales.values())
    )


def short_name(name: str) -> str:
    """Return the name of a file while it is unfinished in WORK, where its own name with a suffix may be too long.

    Args:
        name: path of the file, relative to the output directory.

    Returns:
        24 hexadecimal digits.
    """
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:24]


def is_work(name: str) -> bool:
    """Return whether a path is WORK, the directory of unfinished files in an output directory, or lies in it.

    Args:
        name: path relative to the output directory.
    """
    return name == WORK or name.startswith(f"{WORK}/")
