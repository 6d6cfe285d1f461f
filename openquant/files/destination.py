"""Where a verb may write: what a file must not replace, whole or not at all, room on disks; and the journal of a run.

A page, a picture, a calibration or an evaluation replaces only an empty file or one of its kind.

    page = Destination(Path("report.html"), "--report", PAGE)
    page.require()          # before hours of work
    page.write(data)        # after them: checked again, then written whole

    require_space([(Path("out"), 5_000_000_000), (Path("."), 1_000_000)])       # added up if on one disk

The journal, `.openquant.json` in an output directory, names the digest of the plan and all files that the run writes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from ..errors import OutputError, SourceError, UsageError
from .model_files import JOURNAL_FILE as JOURNAL
from .model_files import parse_json, read_small

# Directories, which may be missing, each with the bytes that will be written there at the same time.
Needs = Sequence[tuple[Path, int]]


@dataclass(frozen=True)
class FileKind:
    """A kind of file that openquant writes.

    Attributes:
        title: name in messages, such as "a calibration".
        recognizes: returns whether an open file is of this kind. It may raise a UsageError with a better reason.
    """

    title: str
    recognizes: Callable[[BinaryIO], bool]


@dataclass(frozen=True)
class Destination:
    """A file that a run will write.

    Attributes:
        path: the file.
        option: command-line option that gave the path, "--report"; empty for a default.
        kind: kind of the file. An existing file is replaced only if it is empty or of this kind.
        elsewhere: hint that says how to give another path.
    """

    path: Path
    option: str
    kind: FileKind
    elsewhere: str = "give another place"

    @property
    def title(self) -> str:
        """Name in messages: "--report report.html"."""
        return f"{self.option} {self.path}" if self.option else str(self.path)

    def require(self) -> None:
        """Refuse a path that must not, or cannot, be written. Nothing is written.

        Raises:
            UsageError: the path is refused.
        """
        require_place(self.path, self.title, self.elsewhere)
        if not self.path.exists():
            return

        try:
            with self.path.open("rb") as file:
                replaceable = not os.fstat(file.fileno()).st_size or self.kind.recognizes(file)
        except OSError as error:
            raise UsageError(f"{self.title} cannot be read: {error.strerror}", self.elsewhere) from None

        if not replaceable:
            raise UsageError(
                f"{self.title} exists and is not {self.kind.title} that openquant wrote",
                f"{self.elsewhere}, or remove that file",
            )

    def write(self, *parts: bytes | memoryview) -> None:
        """Check the path again, and write the file whole or not at all.

        Args:
            parts: contents of the file, written one after the other.

        Raises:
            UsageError: the path must not be written.
            OutputError: the file cannot be written.
        """
        self.require()
        write_atomic(self.path, *parts, elsewhere=self.elsewhere)


def require_place(path: Path, title: str, elsewhere: str = "give another place") -> None:
    """Refuse a path at which no file can be written.

    Args:
        path: the file; it and its directory may be missing.
        title: name of the file in messages, such as "--report report.html".
        elsewhere: hint that says how to give another path.

    Raises:
        UsageError: it is a directory, a link, a pipe or a device, or its directory can hold no file.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        raise UsageError(f"{title} cannot be written: {_reason(error)}", elsewhere) from None

    if stat.S_ISDIR(mode):
        raise UsageError(f"{title} is a directory", "give the name of a file")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{title} is a link, a pipe or a device", elsewhere)

    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise UsageError(f"{title}: {parent} is no directory", elsewhere)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{title}: {parent} cannot be written to", f"check its permissions, or {elsewhere}")


def write_atomic(path: Path, *parts: bytes | memoryview, elsewhere: str = "give another place") -> None:
    """Write a file whole or not at all. Its directory is made if it is missing.

    Args:
        path: the file; an existing one is replaced.
        parts: its contents, written one after the other.
        elsewhere: hint that says how to give another path.

    Raises:
        OutputError: it cannot be written, or is a link.
    """
    # A random name, because two runs may write the same file.
    write_pieces(path, parts, path.with_name(f".openquant-{secrets.token_hex(8)}.partial"), elsewhere)


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], partial: Path, elsewhere: str = "give another place"
) -> None:
    """Write a file whole or not at all, as `write_atomic` does, of contents that are made while it is written.

    Args:
        path: the file; an existing one is replaced.
        pieces: its contents.
        partial: a file beside it that has them until they are complete.
        elsewhere: hint that says how to give another path.

    Raises:
        OutputError: it cannot be written, or is a link.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)

        if path.is_symlink():
            raise OutputError(f"{path} is a link", f"{elsewhere}, or remove it")
        partial.unlink(missing_ok=True)

        try:
            with partial.open("xb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {_reason(error)}", f"free some space, or {elsewhere}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


@dataclass(frozen=True)
class DiskSpace:
    """The disk space of a run.

    Attributes:
        needed: the most bytes at a time that the run has still to write to the disk of its output; 0 if it is complete.
        output: bytes of the whole output.
        streamed: whether source shards are streamed, so that `needed` includes them.
        notes: for a dry run, a text for each disk that has too little room.
    """

    needed: int
    output: int
    streamed: bool
    notes: tuple[str, ...] = ()


def existing_parent(path: Path) -> Path:
    """Return a directory itself if it exists, else its nearest parent that does, as an absolute path without links.

    Args:
        path: the directory, absolute or relative to the working directory. If it is a file, so is the result.
    """
    absolute = Path(os.path.realpath(path))
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def require_space(needs: Needs, freed: int = 0) -> None:
    """Refuse to begin a run whose files do not fit on their disks.

    Args:
        needs: directories, which may be missing, each with the bytes that will be written there; added up for each file
            system.
        freed: bytes that are removed from each file system first.

    Raises:
        OutputError: a file system has too little room, or cannot be examined. The message names the first of its
            directories.
    """
    disks: dict[int, list[tuple[Path, int]]] = {}
    for path, nbytes in needs:
        with output_errors(path, "examined"):
            disks.setdefault(existing_parent(path).stat().st_dev, []).append((path, nbytes))

    for writes in disks.values():
        path = writes[0][0]
        needed = sum(nbytes for _, nbytes in writes)
        with output_errors(path, "examined"):
            free = shutil.disk_usage(existing_parent(path)).free + freed

        if needed > free:
            raise OutputError(
                f"{path} needs {needed:,} bytes, its disk has {free:,} free",
                "free some space, or choose another disk with -o",
            )


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
        tuned: whether their scales then move.
        smoothed: whether SmoothQuant or AWQ divides inputs of layers.
        weighed: whether the search for scales weights errors by the layers' inputs.
        keeps_codes: whether all codes and scales are those of a quantized source.
        from_quantized: whether any weight of the source is quantized.
        static_scales: the scales of activations and of the KV cache that the run chose, by tensor name; of layers that
            share one, only the first.
    """

    gptq: bool = False
    tuned: bool = False
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
        smoothing: the scale of each smooth_layer, a letter for each channel; empty without smoothing.
    """

    recipe: Mapping[str, Any] | None = None
    frontier: Mapping[str, Any] | None = None
    copy: Sequence[str] = ()
    smoothing: Mapping[str, str] = MappingProxyType({})


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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space, or choose another disk with -o or --scratch, and run the same command again"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "check the permissions, or choose another directory with -o or --scratch"
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
            and all(isfinite(scale) for scale in WeightFacts(**journal["weights"]).static_scales.values())
        )
    except (TypeError, KeyError, AttributeError, OverflowError):
        return False


def stated_facts(directory: Path) -> WeightFacts:
    """Return what was done to the weights of an output, by its journal; nothing is known of any other directory.

    Args:
        directory: the directory of a checkpoint.

    Raises:
        OutputError: the journal cannot be read, or is not a journal.
    """
    journal = read_journal(directory) or {}
    return WeightFacts(**journal.get("weights", {}))


def list_output(directory: Path) -> dict[str, os.stat_result]:
    """Return what lies in an output directory.

    Args:
        directory: the output directory, which may itself be a link.

    Returns:
        Status of each file and folder, by path relative to the directory. Folders that cannot be read count as empty,
        such as the lost+found of a disk.

    Raises:
        OutputError: it cannot be read.
    """
    found = {}
    with output_errors(directory, "read"):
        for folder, folders, files in os.walk(directory):
            for name in sorted([*folders, *files]):
                path = Path(folder, name)
                found[path.relative_to(directory).as_posix()] = path.lstat()
    return found


def finished_files(directory: Path) -> tuple[str, set[str]]:
    """Read from the journal of a finished output which files the run wrote.

    Args:
        directory: the output directory.

    Returns:
        The plan's digest, hexadecimal, and the paths of all files that the run wrote, relative to the directory.

    Raises:
        OutputError: the directory was not made by openquant, is not finished, or lacks a file.
    """
    if not directory.is_dir():
        raise OutputError(f"{directory} is not a directory", "check the path")

    found = list_output(directory)
    journal = read_journal(directory)
    if journal is None:
        raise OutputError(f"{directory} was not made by openquant", "give a directory that compress wrote")

    missing = sorted(name for name in journal["files"] if name not in found or not stat.S_ISREG(found[name].st_mode))
    if not journal["done"] or missing:
        problem = "is not finished"
        if journal["done"]:
            problem = f"lacks {missing[0]}"
        raise OutputError(
            f"{directory} {problem}", "run the command that made it again; with --push-only nothing is left to push"
        )
    return journal["digest"], set(journal["files"])


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
