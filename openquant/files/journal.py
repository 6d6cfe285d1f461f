"""`.openquant.json`: what a run wrote down in its output directory, and what may lie beside it.

It names the plan's digest and every file the run writes. It may be somebody else's: names in it that no run of ours
would write are refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OutputError, SourceError
from .folder import Folder, is_plain
from .names import JOURNAL_FILE as JOURNAL
from .small_files import parse_json

WORK = ".openquant"
LOCK = f"{WORK}/lock"
# Records of uploads, and shards that are streamed (with a rank's number behind it).
PUSHED, SOURCE = "pushed", "source-"
FORMAT = 1
# Bytes of a journal: hundreds of thousands of files.
MAX_JOURNAL = 64 << 20
ELSEWHERE = "choose another directory with -o"


class Provenance(NamedTuple):
    """How an output was asked for, as its journal has it.

    Attributes:
        recipe: the options that it was made with; None if nobody asks for them again.
        entry: the entry that it was planned by; None where that is the registry's.
    """

    recipe: Mapping[str, Any] | None = None
    entry: Mapping[str, Any] | None = None


@contextmanager
def output_errors(path: Path | str, doing: str = "written") -> Iterator[None]:
    """Turn an OSError about an output file into an OutputError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "free some space (or choose another -o) and run the same command again: finished shards are kept"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check the permissions, or choose another directory with -o"
        else:
            hint = "run the same command again once that is solved: finished shards are kept"
        raise OutputError(f"{path} cannot be {doing}: {error.strerror or error}", hint) from error


def read_journal(directory: Path) -> dict[str, Any] | None:
    """What a run wrote down in its directory; None if no run did.

    Raises:
        OutputError: something else is there.
    """
    with output_errors(directory, "read"):
        folder = Folder(directory)
    with folder:
        return journal_in(folder)


def journal_in(folder: Folder) -> dict[str, Any] | None:
    """What a run wrote down in an open directory; None if no run did.

    Raises:
        OutputError: something else is there.
    """
    path = folder.path / JOURNAL
    with output_errors(path, "read"):
        if folder.stat(JOURNAL) is None:
            return None
        data = folder.read(JOURNAL, MAX_JOURNAL) if folder.is_file(JOURNAL) else None
    try:
        journal = parse_json(data or b"", JOURNAL)
        sound = (
            journal["format"] == FORMAT
            and isinstance(journal["digest"], str)
            and isinstance(journal["done"], bool)
            and isinstance(journal["files"], list)
            and isinstance(journal.get("sources", {}), dict)
            and isinstance(journal.get("recipe", {}), dict)
            and isinstance(journal.get("entry", {}), dict)
            and all(_is_ours(name) for name in journal["files"])
        )
    except (SourceError, TypeError, KeyError):
        sound = False
    if not sound:
        raise OutputError(f"{path} is not a journal that this version of openquant wrote", ELSEWHERE)
    return dict(journal)


def finished_files(directory: Path) -> tuple[str, set[str]]:
    """The digest of the plan a directory was made by, and the names of its files.

    Raises:
        OutputError: it was not made by us, not finished, has lost a file, or has a link instead of one.
    """
    if not directory.is_dir():
        raise OutputError(f"{directory} is not a directory", "check the path")
    with output_errors(directory, "read"):
        folder = Folder(directory)
    with folder:
        journal = journal_in(folder)
        if journal is None:
            raise OutputError(f"{directory} was not made by openquant", "give a directory that compress wrote")
        with output_errors(directory, "read"):
            there = {name: what.st_mode for name, what in folder.walk()}
    for name, mode in there.items():
        if is_work(name) and not is_sound_work(name, mode):
            raise OutputError(f"{directory / name} was not made by openquant", "move it away")
    missing = sorted(name for name in journal["files"] if not stat.S_ISREG(there.get(name, 0)))
    if not journal["done"] or missing:
        linked = [name for name in missing if stat.S_ISLNK(there.get(name, 0))]
        if linked:
            raise OutputError(f"{directory / linked[0]} is a link", "put the file itself there")
        what = f"lacks {missing[0]}" if missing else "is not finished"
        raise OutputError(f"{directory} {what}", "run the command that made it again, without --push-only")
    return journal["digest"], set(journal["files"])


def _is_ours(name: object) -> bool:
    """Whether a journal's entry can be a file that a run wrote; of those in subdirectories only what was copied."""
    if not is_plain(name):
        return False
    *folders, last = str(name).split("/")
    # files/checkpoint.py leaves out hidden directories, and weights and indexes that are not at the top.
    hidden = any(folder.startswith(".") for folder in folders)
    return not hidden and name != JOURNAL and last != WORK and not (folders and last.endswith(_AT_THE_TOP))


_AT_THE_TOP = (".safetensors", ".index.json")


def short_name(name: str) -> str:
    """24 hexadecimal digits that a file's name below WORK begins with: its own, with an ending, may be too long."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:24]


def is_work(name: str) -> bool:
    """Whether a name is that of the directory for what is being written, or lies in it."""
    return name == WORK or name.startswith(f"{WORK}/")


def is_sound_work(name: str, mode: int) -> bool:
    """Whether something in WORK is what runs put there: files, and two kinds of directories with files in them."""
    _, *inner = name.split("/")
    if not inner:
        return stat.S_ISDIR(mode)
    is_folder = inner[0] == PUSHED or inner[0].startswith(SOURCE)
    if len(inner) == 1 and is_folder:
        return stat.S_ISDIR(mode)
    return len(inner) <= 1 + is_folder and stat.S_ISREG(mode)


def _is_early(name: str, mode: int) -> bool:
    """Whether something below WORK may be there before the journal is."""
    if name == WORK:
        return stat.S_ISDIR(mode)
    partial = name.startswith(f"{WORK}/{short_name(JOURNAL)}.") and name.endswith(".partial")
    return stat.S_ISREG(mode) and (name == LOCK or partial)


def foreign_files(folder: Folder) -> Iterator[str]:
    """What a directory without a journal holds, but for what a run leaves that died before writing it; empty
    directories count for nothing.
    """
    for name, what in folder.walk():
        if not stat.S_ISDIR(what.st_mode) and not _is_early(name, what.st_mode):
            yield name
