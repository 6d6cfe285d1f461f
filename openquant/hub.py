"""From what the user typed to a source: a local directory, or a Hub repository whose shards may still be there.

Of a repository everything but the shards goes to the Hub's cache at once; shards are fetched as they are needed
(fetch.py). The commit found at the start is used for everything after.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .checkpoint import (
    INDEX_FILE,
    LEFT_OUT_DIRECTORIES,
    LEFT_OUT_FILES,
    SINGLE_FILE,
    Checkpoint,
    RemoteFile,
    read_json,
    readable,
    refuse_other_weights,
)
from .errors import SourceError, UsageError
from .inputs import read_small
from .refusals import explained_source, is_transient, without_queries

# A snapshot in the Hub's cache: models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"^models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


_COMMIT = re.compile("[0-9a-f]{40}")

# Seconds between tries, beyond those of huggingface_hub itself; fewer before anything is known to be there.
WAITS = (1, 2, 4, 8, 16)
FIRST_WAITS = (1, 2)

# Of a file: size, times of its last modification and change (ns), inode. Where they are the same, so are the bytes.
Stamp = list[int]


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies and what it is called.

    Attributes:
        root: its directory.
        name: last part of its name, from which the output's is made.
        repo: its Hub repository, None for a local folder whose origin is unknown.
        revision: the commit on the Hub, None likewise.
        remote: shards that are on the Hub and not in its cache here, by name.
    """

    root: Path
    name: str
    repo: str | None
    revision: str | None
    remote: Mapping[str, RemoteFile] = field(default_factory=dict)

    def remote_bytes(self, shards: Iterable[str]) -> int:
        """Size of those of these shards that are on the Hub."""
        return sum(self.remote[name].size for name in shards if name in self.remote)

    def require_cache_space(self, shards: Iterable[str]) -> None:
        """Refuse to start downloading what the cache's disk cannot hold.

        Raises:
            SourceError: it cannot.
        """
        from huggingface_hub import constants

        with readable():
            free, needed = shutil.disk_usage(self.root).free, self.remote_bytes(shards)
        if needed > free:
            raise SourceError(
                f"{constants.HF_HUB_CACHE} needs {needed:,} bytes for {self.repo}, its disk has {free:,} free",
                "use --stream, which keeps only a few shards on disk, or set HF_HOME to a larger one",
            )

    @property
    def identity(self) -> str:
        """What tells this source from any other: the commit; nothing of a local one."""
        return "" if self.revision is None else f"{self.repo}@{self.revision}"

    def stamps(self, checkpoint: Checkpoint) -> dict[str, Stamp]:
        """What the shards of a local source look like now; those of a repository are what its commit says."""
        if self.revision is not None:
            return {}
        with readable():
            found = {name: (self.root / name).stat() for name in checkpoint.shards}
        return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in found.items()}

    def digests(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The SHA-256 of each other file of a local source; of a repository nothing, likewise."""
        return {} if self.revision is not None else {name: self._digest(name) for name in checkpoint.files}

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with readable(), (self.root / name).open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
        return digest.hexdigest()

    def downloaded_commit(self) -> str | None:
        """The commit that a folder came from which `hf download --local-dir` filled; None if none is recorded.

        The record names no repository.
        """
        record = self.root / ".cache" / "huggingface" / "download" / "config.json.metadata"
        try:
            commit = read_small(record, record.name).split(b"\n", 1)[0].decode()
        except (OSError, SourceError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None


def find_source(model: str, revision: str | None = None) -> Source:
    """The local directory of that name, or else that Hub repository; all of it but shards is then in the Hub's cache.

    Args:
        model: a directory, `org/name` or `org/name@revision`.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        SourceError: there is no such directory or repository, or it cannot be had.
        UsageError: a revision that contradicts the model, or belongs to a directory.
    """
    path = Path(model)
    if not model:
        raise UsageError("-m is empty", "give a directory or a Hub repository such as Qwen/Qwen3-0.6B")
    with readable():
        exists = path.exists()
    if exists:
        if revision is not None:
            raise UsageError(f"{model} is a local directory, which has no revision {revision}", "leave --revision out")
        return _local(path)
    repo, at, pinned = model.partition("@")
    if at and revision is not None and revision != pinned:
        raise UsageError(f"{model} and --revision {revision} name two revisions", "give one of them")
    if at and not pinned:
        raise UsageError(f"{model} names no revision after the @", "write org/name@revision")
    return _download(repo, pinned or revision)


def _local(path: Path) -> Source:
    root = path.resolve()
    snapshot = _SNAPSHOT.match("/".join(root.parts[-3:]))
    if snapshot:
        repo = snapshot["repo"].replace("--", "/", 1)
        return Source(path, repo.rsplit("/", 1)[-1], repo, snapshot["commit"])
    # A name that is no UTF-8 could not be written into the card.
    return Source(path, os.fsencode(root.name).decode("utf-8", "replace"), None, None)


def _download(repo: str, revision: str | None) -> Source:
    from huggingface_hub import snapshot_download

    unwanted = [*(name for name in LEFT_OUT_FILES if name != "*.index.json"), *(f"{d}/*" for d in LEFT_OUT_DIRECTORIES)]

    def find() -> Source:
        with explained_source(repo, revision):
            root = Path(snapshot_download(repo, revision=revision, ignore_patterns=unwanted))
            return Source(root, repo.rsplit("/", 1)[-1], repo, root.name, _remote_shards(repo, root))

    with silent():
        return interruptible(lambda: patiently(find, FIRST_WAITS))


def _remote_shards(repo: str, root: Path) -> dict[str, RemoteFile]:
    """The repository's safetensors files that its snapshot (a directory named by the commit) does not hold."""
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.hf_api import RepoFile

    if all((root / name).exists() for name in _indexed(root)):
        return {}
    files = HfFileSystem()

    def reader(name: str) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            # Without the read-ahead that is meant for whole files.
            with explained_source(repo, root.name), files.open(f"{repo}@{root.name}/{name}", cache_type="none") as file:
                file.seek(offset)
                return bytes(file.read(length))

        return read

    entries = [entry for entry in HfApi().list_repo_tree(repo, revision=root.name) if isinstance(entry, RepoFile)]
    shards = [entry for entry in entries if entry.path.endswith(".safetensors")]
    if not shards:
        refuse_other_weights(repo, [entry.path for entry in entries])
    return {
        entry.path: RemoteFile(entry.size, reader(entry.path), entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in shards
        if not (root / entry.path).exists()
    }


def _indexed(root: Path) -> set[str]:
    """The shards that a snapshot's index names; model.safetensors without an index that can be read."""
    try:
        return set(read_json(root / INDEX_FILE, INDEX_FILE)["weight_map"].values())
    except (OSError, SourceError, KeyError, TypeError, AttributeError):
        return {SINGLE_FILE}


Made = TypeVar("Made")


def patiently(
    do: Callable[[], Made],
    waits: Sequence[float] = WAITS,
    sleep: Callable[[float], None] = time.sleep,
    passes: Callable[[BaseException], bool] = is_transient,
) -> Made:
    """Do something again while it fails for a reason that may pass, after ever longer waits."""
    for wait in waits:
        try:
            return do()
        except Exception as error:
            if not passes(error):
                raise
            sleep(wait)
    return do()


def interruptible(do: Callable[[], Made]) -> Made:
    """Do something in a thread, so that Ctrl-C need not wait for it.

    huggingface_hub downloads and uploads several files in a pool of threads, which ends only when all of them do.
    """
    made: list[Made] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(do())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="openquant-hub", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failed:
        raise failed[0]
    return made[0]


@contextmanager
def silent() -> Iterator[None]:
    """Without huggingface_hub's own progress bars, unless the environment asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_without_queries)
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        with disable_progress_bars():
            yield
    else:
        yield


def _without_queries(record: logging.LogRecord) -> bool:
    """Takes the queries out of the addresses that the client logs when it tries again."""
    record.msg, record.args = without_queries(record.getMessage()), ()
    return True
