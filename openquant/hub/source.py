"""Finds the source that the user named: a local directory, a GGUF file, or a repository on the Hub.

Of a repository, the files that a plan needs are downloaded into the Hub's cache at once, the other files before the
conversion (`Source.fetch_files`), and shards in the order they are needed. All of them come from the commit that was
found at the start.

Several shards are downloaded at a time, each by huggingface_hub. A scratch directory (`--stream`) has only those that
are read or come next; each is removed after its last use. One whose download was interrupted starts anew.
"""

from __future__ import annotations

import concurrent.futures
import glob
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import SourceError, UsageError
from ..files import model_files
from ..files.checkpoint import (
    Checkpoint,
    Fingerprint,
    Stamp,
    open_checkpoint,
    read_json,
    readable,
    refuse_other_weights,
    refuse_without_weights,
    stamps_of,
)
from ..files.destination import output_errors
from ..gguf.source import SUFFIX, OpenedGguf, open_gguf
from ..threads import FirstFailure, in_thread
from ..weights.find import TOOL_CONFIG_FILES
from .error_mapping import NotFound, Unreachable, is_offline, is_transient, source_errors, without_queries

# A snapshot in the Hub's cache: models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"^models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")

# Seconds between tries, in addition to the retries of huggingface_hub. Fewer for the first request, whose repository
# may not exist.
WAITS = (1, 2, 4, 8, 16)
FIRST_WAITS = (1, 2)


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: a local directory, or a snapshot in the Hub's cache that may lack files.

    Attributes:
        root: the directory.
        name: last part of its name, from which the output's name is made.
        repo: its repository on the Hub; None for a local directory.
        revision: the commit on the Hub; None for a local directory.
        remote: shards that are still to be downloaded, by name.
        absent: sizes in bytes of other files that are still to be downloaded, by name.
        gguf: the GGUF file that the directory was made from; None for others.
    """

    root: Path
    name: str
    repo: str | None
    revision: str | None
    remote: Mapping[str, HubFile] = field(default_factory=dict)
    absent: Mapping[str, int] = field(default_factory=dict)
    gguf: OpenedGguf | None = None

    def open(self, copy: Collection[str] = ()) -> Checkpoint:
        """Read and check config, index and headers. Of a repository, files that decide which others belong are fetched.

        Args:
            copy: patterns of further files that belong to it.

        Returns:
            Config, files, and name, dtype, shape and offset of each tensor.

        Raises:
            SourceError: something is missing, damaged or contradictory.
        """
        if self.gguf:
            return self.gguf.checkpoint
        self.fetch_files(model_files.deciding(self.absent))
        return open_checkpoint(self.root, self.remote, self.absent, copy)

    @property
    def place(self) -> str:
        """What the user named, for messages: the repository and commit, the directory or the GGUF file."""
        return self.identity or str(self.gguf.checkpoint.file if self.gguf else self.root)

    def remote_bytes(self, names: Iterable[str]) -> int:
        """Return the size in bytes of those of the named shards and files that are still to be downloaded."""
        sizes = {**self.absent, **{name: file.size for name, file in self.remote.items()}}
        return sum(sizes.get(name, 0) for name in names)

    def fetch_files(self, names: Iterable[str]) -> None:
        """Download those of the named files that are not there into the Hub's cache.

        Raises:
            SourceError: they cannot be downloaded.
        """
        repo = self.repo
        patterns = [glob.escape(name) for name in names if name in self.absent or name in self.remote]
        if repo is None or not patterns:
            return

        # Importing it takes as long as converting a small model.
        from huggingface_hub import snapshot_download

        def fetch() -> None:
            with source_errors(repo, self.revision):
                snapshot_download(repo, revision=self.revision, allow_patterns=patterns)

        with silent():
            interruptible(lambda: with_retries(fetch))

    def require_cache_space(self, needs: Mapping[str, Iterable[str]]) -> None:
        """Check that the disk of the Hub's cache has space for shards.

        Args:
            needs: file names of the shards that each step needs, by the name of the step.

        Raises:
            SourceError: it has not.
        """
        from huggingface_hub import constants

        with readable():
            free = shutil.disk_usage(self.root).free
        needed = self.remote_bytes({name for names in needs.values() for name in names})
        if needed > free:
            raise SourceError(
                f"{constants.HF_HUB_CACHE} needs {needed:,} bytes for {self.repo}, its disk has {free:,} free",
                "use --stream, which keeps only a few shards on disk, or set HF_HOME to a larger one",
            )

    def default_path(self, name: str) -> Path:
        """Return the default path of an output or a calibration: `name` in the working directory, as a relative path.

        If the working directory is the source or lies in it, the path is beside the source.
        """
        working_directory = Path.cwd().resolve()
        root = self.root.resolve()
        if root in (working_directory, *working_directory.parents):
            return root.parent / name
        return Path(name)

    @property
    def identity(self) -> str:
        """The repository and commit, "org/name@commit"; "" for a local directory."""
        if self.revision is None:
            return ""
        return f"{self.repo}@{self.revision}"

    def stamps(self, checkpoint: Checkpoint) -> dict[str, Stamp]:
        """Return the stamps of a local source's shards, by name; {} for a repository, whose commit fixes them.

        Raises:
            SourceError: a shard cannot be read.
        """
        if self.revision is not None:
            return {}
        return stamps_of(self.root, checkpoint.shards)

    def fingerprint(self, checkpoint: Checkpoint, stamps: Mapping[str, Stamp] | None = None) -> Fingerprint:
        """Return the fingerprint of a checkpoint of this source.

        Args:
            checkpoint: the checkpoint.
            stamps: stamps of local shards when it was opened; taken now if None.

        Raises:
            SourceError: a shard cannot be read.
        """
        return Fingerprint(checkpoint, self.remote, self.identity, stamps)

    def digests(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return the SHA-256 of a local source's files other than shards, by name; {} for a repository.

        Raises:
            SourceError: a file cannot be read.
        """
        if self.revision is not None:
            return {}
        with readable():
            return {name: model_files.file_sha256(self.root / name, name) for name in checkpoint.files}


def find_source(model: str, revision: str | None = None) -> Source:
    """Find a local directory or GGUF file, or else a repository on the Hub, and download the files that a plan needs.

    Args:
        model: a directory, a GGUF file, "org/name" or "org/name@revision".
        revision: branch, tag or commit of a repository; None for the default branch.

    Returns:
        Where the files lie: `root` is the directory, `remote` has the shards that are on the Hub only.

    Raises:
        SourceError: there is no such directory or repository, or it cannot be downloaded.
        UsageError: `model` has no revision after its @, or `revision` is given for a local directory or
            contradicts that of `model`.
    """
    path = Path(model)
    with readable():
        exists = path.exists()
    if exists and revision is not None:
        kind = "directory" if path.is_dir() else "file"
        raise UsageError(f"{model} is a local {kind}, which has no revision {revision}", "leave --revision out")
    if exists:
        return local_source(path)
    if path.suffix.lower() == SUFFIX:
        raise NotFound(f"{model} is no file", "check the path; GGUF files of a repository are downloaded first")

    repo, at_sign, pinned = model.partition("@")
    if at_sign and revision is not None and revision != pinned:
        raise UsageError(f"{model} and --revision {revision} name two revisions", "give one of them")
    if at_sign and not pinned:
        raise UsageError(f"{model} names no revision after the @", "write org/name@revision")

    return repository_source(repo, pinned or revision)


def local_source(path: Path) -> Source:
    """Return the source of a local directory or GGUF file.

    Raises:
        SourceError: it is a GGUF file that cannot be read.
        UsageError: it is a GGUF file, and a package for that is missing or too old.
    """
    with readable():
        is_gguf = path.suffix.lower() == SUFFIX and path.is_file()
    if is_gguf:
        opened = open_gguf(path)
        name = os.fsencode(path.stem).decode("utf-8", "replace")
        return Source(opened.checkpoint.root, name, None, None, gguf=opened)

    root = path.resolve()
    snapshot = _SNAPSHOT.match("/".join(root.parts[-3:]))
    if snapshot:
        repo = snapshot["repo"].replace("--", "/", 1)
        return Source(path, repo.rsplit("/", 1)[-1], repo, snapshot["commit"])

    # The model card is UTF-8, so the name must be.
    return Source(path, os.fsencode(root.name).decode("utf-8", "replace"), None, None)


def repository_source(repo: str, revision: str | None = None) -> Source:
    """Find a repository on the Hub, whatever lies in the working directory, and download the files that a plan needs.

    Args:
        repo: the repository, "org/name".
        revision: branch, tag or commit; None for the default branch.

    Returns:
        As `find_source`.

    Raises:
        SourceError: there is no such repository, or it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    def find() -> Source:
        with source_errors(repo, revision):
            needed = ["config.json", model_files.INDEX_FILE, *TOOL_CONFIG_FILES]
            root = Path(snapshot_download(repo, revision=revision, allow_patterns=needed))
            found = Source(root, repo.rsplit("/", 1)[-1], repo, root.name, *_missing(repo, root))
        if not (root / "config.json").exists() and not found.remote:
            refuse_other_weights(repo, [name for name in found.absent if "/" not in name])
            raise SourceError(
                f"{'@'.join(filter(None, [repo, revision]))} holds no model: it has no config.json",
                f"check the name; that of an open pull request is {repo}@refs/pr/1",
            )
        return found

    with silent():
        return interruptible(lambda: with_retries(find, FIRST_WAITS))


def _missing(repo: str, root: Path) -> tuple[dict[str, HubFile], dict[str, int]]:
    """Find the files of a repository that its snapshot lacks.

    Args:
        repo: the repository.
        root: the snapshot, a directory named by the commit.

    Returns:
        The missing shards, and the sizes in bytes of the other missing files, by name.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    def is_cached(name: str) -> bool:
        return (root / name).exists()

    # The list that the client has cached tells whether anything is missing.
    all_shards = all(map(is_cached, _indexed_shards(root)))
    try:
        sizes = {entry.path: entry.size for entry in get_cached_repo_tree(repo, revision=root.name)}
    except CachedRepoTreeNotFoundError:
        sizes = {}
    missing_sizes = {name: size for name, size in sizes.items() if not is_cached(name)}
    if all_shards and sizes and all(map(model_files.left_out_part, missing_sizes)):
        return {}, missing_sizes

    # It has no digests, so the Hub's list is needed.
    try:
        tree = HfApi().list_repo_tree(repo, recursive=True, revision=root.name)
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
    except Exception as error:
        if all_shards and not sizes and is_offline(error):
            # Another program filled the cache, and it has all shards.
            return {}, {}
        raise

    names = {entry.path for entry in entries}
    if not {model_files.INDEX_FILE, model_files.SINGLE_FILE} & names and "config.json" in names:
        refuse_without_weights(repo, [name for name in names if "/" not in name])

    remote: dict[str, HubFile] = {}
    absent: dict[str, int] = {}
    for entry in entries:
        if is_cached(entry.path):
            continue
        if re.fullmatch(r"[^/]+\.safetensors", entry.path):
            digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
            remote[entry.path] = HubFile(repo, root.name, entry.path, entry.size, digest)
        else:
            absent[entry.path] = entry.size
    return remote, absent


def _indexed_shards(root: Path) -> set[str]:
    """The shards that a snapshot's index names; model.safetensors if there is no readable index."""
    try:
        return set(read_json(root / model_files.INDEX_FILE, model_files.INDEX_FILE)["weight_map"].values())
    except (OSError, SourceError, KeyError, TypeError, AttributeError):
        return {model_files.SINGLE_FILE}


@dataclass
class HubFile:
    """A file of a repository. Methods may be called from any thread.

    Attributes:
        repo: the repository.
        revision: the commit.
        name: the file's name in the repository.
        size: size in bytes.
        digest: digest of its contents in hexadecimal: SHA-256 of an LFS file, else the git object id.
    """

    repo: str
    revision: str
    name: str
    size: int
    digest: str

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset` on, with retries.

        Raises:
            SourceError: they cannot be downloaded.
        """
        return with_retries(lambda: self._read(offset, length))

    def _read(self, offset: int, length: int) -> bytes:
        """Request a range of bytes. Not more than that is read, even if the server ignores the range."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        # The client follows redirects to an address elsewhere, and does not send the token there.
        url = hf_hub_url(self.repo, self.name, revision=self.revision)
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        request = http_stream_backoff(
            "GET",
            url,
            headers=build_hf_headers() | headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=(408, 429),
        )

        data = bytearray()
        with source_errors(self.repo, self.revision), request as response:
            hf_raise_for_status(response)
            # With status 200 the file comes from its beginning.
            at = 0 if response.status_code == 200 else offset
            for piece in response.iter_bytes():
                data += piece[max(0, offset - at) :]
                at += len(piece)
                if len(data) >= length:
                    break

        if len(data) < length:
            raise Unreachable(f"{self.name} ended at byte {at:,} of {self.size:,}", "run the same command again")
        return bytes(data[:length])


Result = TypeVar("Result")


def with_retries(
    call: Callable[[], Result],
    waits: Sequence[float] = WAITS,
    sleep: Callable[[float], None] = time.sleep,
    is_retryable: Callable[[BaseException], bool] = is_transient,
) -> Result:
    """Call a function, and again after each wait while it fails with a retryable error.

    Args:
        call: the function.
        waits: seconds to wait before each retry.
        sleep: the function that waits.
        is_retryable: returns whether an exception is worth a retry.

    Returns:
        What the function returns.

    Raises:
        Exception: that of the last try, or the first that is not retryable.
    """
    for wait in waits:
        try:
            return call()
        except Exception as error:
            if not is_retryable(error):
                raise
            sleep(wait)
    return call()


def interruptible(call: Callable[[], Result]) -> Result:
    """Call a function in a thread, so that Ctrl-C does not wait for it.

    huggingface_hub downloads and uploads files in a thread pool, which waits for all its threads.

    Args:
        call: the function, without arguments.

    Returns:
        What the function returns. What it raises is raised.
    """
    future = in_thread(call)
    while not concurrent.futures.wait([future], 0.2).done:
        pass
    return future.result()


@contextmanager
def silent() -> Iterator[None]:
    """In the `with` block, turn off huggingface_hub's progress bars, and remove from its log what users need not see.

    The bars stay if HF_HUB_DISABLE_PROGRESS_BARS is set to any value.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_shorten)
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        with disable_progress_bars():
            yield
    else:
        yield


# A push of what is there already is no reason to warn.
_NOTHING_NEW = "No files have been modified since last commit."


def _shorten(record: logging.LogRecord) -> bool:
    """A log filter: no queries of URLs, which the client logs when it retries, and no warning of an empty commit."""
    record.msg = without_queries(record.getMessage())
    record.args = ()
    return not str(record.msg).startswith(_NOTHING_NEW)


# The source shards that each step needs, by the name of the step, in order.
Needs = Mapping[str, Sequence[str]]

# Number of shards that are downloaded at a time, as in huggingface_hub.
CONNECTIONS = 8
# Number of shards that streaming downloads before they are requested.
AHEAD = 2
# Number of output shards that are made at a time when their sources are streamed.
AT_ONCE = 3
# Bytes of a file that the client reads at once, and how many copies of them it has in memory at a time
# (huggingface_hub 2.4, file_download.py: http_get).
PIECE = 10 << 20
COPIES = 4
# Where huggingface_hub keeps unfinished downloads and its records, in a directory that it downloads to.
_CLIENT_FOLDER = ".cache"
# Files that only outputs have, which are no part of a source.
_OF_OUTPUTS = (model_files.JOURNAL_FILE, model_files.EVAL_FILE)


def memory_needed(source: Source) -> int:
    """Return the most bytes of memory that downloading a source's shards needs; 0 if all shards are on disk."""
    largest = sorted((file.size for file in source.remote.values()), reverse=True)[:CONNECTIONS]
    return sum(COPIES * min(PIECE, size) for size in largest)


def scratch_bytes(source: Source, needs: Mapping[str, Iterable[str]]) -> int:
    """Return the most bytes of disk space that the shards of a source need at a time when they are streamed.

    Args:
        source: the source.
        needs: file names of the source shards that each step needs, by the name of the step, in order. When converting,
            a step is an output shard.

    Returns:
        Bytes; 0 if all shards are on disk.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, names in enumerate(needs.values()):
        for name in names:
            if name in source.remote:
                first.setdefault(name, number)
                last[name] = number

    most = 0
    for number in range(len(needs)):
        in_use = [name for name in first if first[name] <= number < last[name] + AT_ONCE]
        ahead = [name for name in first if first[name] > number][:AHEAD]
        most = max(most, sum(source.remote[name].size for name in (*in_use, *ahead)))
    return most


class ShardSupply:
    """Downloads the shards of a source in the background, in the order they are needed. Use as a context manager.

    Args:
        source: the source. Shards that it has on disk are used where they are.
        needs: for each output shard, or other step that reads shards, in order, the source shards that it is made from.
        scratch: the directory that keeps downloaded shards until their last use; None to keep them in the Hub's cache.
            It is made if it is missing. What another run left there is removed, but for whole shards of these names.
            At the end it is removed, unless an error or an interrupt ends the context: then the next run uses its
            shards.
    """

    def __init__(self, source: Source, needs: Mapping[str, Iterable[str]], scratch: Path | None) -> None:
        self.source = source
        self.needs = {output: list(names) for output, names in needs.items()}
        self.scratch = scratch

        uses = [name for names in self.needs.values() for name in names]
        self._uses = Counter(uses)
        # Shards whose download has not started, in the order they are needed.
        self._queue = deque(name for name in dict.fromkeys(uses) if name in source.remote)
        # Output shards that are not complete, with their numbers, in order.
        self._unfinished = {output: number for number, output in enumerate(self.needs)}
        # Source shards that an output shard waits for or has waited for.
        self._requested: set[str] = set()
        # Source shards whose download has begun and that are not removed, and where those lie that are complete.
        self._begun: set[str] = set()
        self._paths: dict[str, Path] = {}

        self._closed = False
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._changed)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ShardSupply:
        if self.scratch is not None:
            self._prepare_scratch(self.scratch)

        for _ in range(min(CONNECTIONS, len(self._queue))):
            thread = threading.Thread(target=self._download_all, name="openquant-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

        failed = exception[0] is not None
        end = time.monotonic() + 0.1
        for thread in self._threads:
            # After Ctrl-C, do not wait until an open request times out.
            thread.join(max(0, end - time.monotonic()) if failed else None)

        if self.scratch is not None and not failed:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Return the path of a source shard, which is on disk once `wait_for` has returned for an output made from it.

        Args:
            name: file name of the source shard.
        """
        return self._paths.get(name, self.source.root / name)

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        """Wait until all source shards of an output shard are on disk, or `stopped()` is true.

        Args:
            output: name of the output shard; one that `needs` does not have needs none.
            stopped: returns whether to give up waiting.

        Raises:
            SourceError: a shard cannot be downloaded.
            OutputError: the scratch directory cannot be written.
        """
        missing = {name for name in self.needs.get(output, ()) if name in self.source.remote}
        if not missing:
            return

        with self._changed:
            while not self._is_next(output) and not stopped():
                self._changed.wait(0.2)

            self._requested |= missing
            self._changed.notify_all()
            while not missing <= self._paths.keys() and not stopped():
                self._failure.check()
                self._changed.wait(0.2)

    def release(self, output: str) -> None:
        """Release the source shards of an output shard that is complete or not to be made. Call it once for each.

        Streamed source shards that no other output needs are removed, or not downloaded at all.

        Raises:
            OutputError: one cannot be removed.
        """
        with self._changed:
            self._unfinished.pop(output, None)
            for name in self.needs.get(output, ()):
                self._uses[name] -= 1
                self._remove_if_unused(name)
            self._changed.notify_all()

    def _is_next(self, output: str) -> bool:
        """Whether an output shard may be made: more than AT_ONCE would need more disk space than `scratch_bytes`."""
        if self.scratch is None:
            return True
        first = next(iter(self._unfinished.values()))
        return self._unfinished[output] < first + AT_ONCE

    def _remove_if_unused(self, name: str) -> None:
        """Remove a streamed shard after its last use. One that is being downloaded is removed when it is complete."""
        if self.scratch is None or self._uses[name] > 0:
            return

        if name in self._queue:
            self._queue.remove(name)
        if name in self._begun and name in self._paths:
            self._begun.remove(name)
            with output_errors(self._paths[name], "removed"):
                self._paths[name].unlink(missing_ok=True)

    def _prepare_scratch(self, scratch: Path) -> None:
        """Make the scratch directory, and remove what an earlier run left there but shards that this one needs."""
        with output_errors(scratch):
            scratch.mkdir(parents=True, exist_ok=True)

        shutil.rmtree(scratch / _CLIENT_FOLDER, ignore_errors=True)
        for path in scratch.iterdir():
            if path.name not in self._queue:
                with output_errors(path, "removed"):
                    path.unlink()

    def _is_stopped(self) -> bool:
        return self._closed or bool(self._failure)

    def _sleep(self, seconds: float) -> None:
        """Sleep between two tries of a download, until the supply is closed."""
        with self._changed:
            if self._changed.wait_for(self._is_stopped, seconds):
                raise _SupplyClosed

    def _download_all(self) -> None:
        """Download one shard after the other, until all are there; the work of a thread."""
        with self._failure.catch():
            while (name := self._next_download()) is not None:
                path = self._download(name)
                with self._changed:
                    self._paths[name] = path
                    self._remove_if_unused(name)
                    self._changed.notify_all()

    def _next_download(self) -> str | None:
        """Wait until the next shard may be downloaded, and return its name; None if there is none."""
        with self._changed:
            while self._queue and not self._is_stopped():
                name = self._queue[0]
                ahead = len(self._begun - self._requested)
                if self.scratch is None or name in self._requested or ahead < AHEAD:
                    self._begun.add(name)
                    return self._queue.popleft()
                self._changed.wait()
            return None

    def _download(self, name: str) -> Path:
        """Download a shard, and compare it with the SHA-256 that the Hub states of large files."""
        path = with_retries(lambda: self._download_once(name), sleep=self._sleep)
        expected = self.source.remote[name].digest
        with output_errors(path, "read"):
            if len(expected) == 64 and model_files.file_sha256(path, name) != expected:
                # Otherwise the client would return the damaged file again.
                path.resolve().unlink()
                raise SourceError(
                    f"{name} did not arrive as {self.source.repo}@{self.source.revision} has it",
                    "run the same command again; if that does not help, the repository is broken",
                )
        return path

    def _download_once(self, name: str) -> Path:
        """Have the client download a shard, or find it on disk."""
        from huggingface_hub import hf_hub_download

        repo = self.source.repo
        revision = self.source.revision
        assert repo is not None
        with source_errors(repo, revision):
            try:
                path = hf_hub_download(
                    repo, name, revision=revision, local_dir=self.scratch, tqdm_class=self._progress_class()
                )
            except OSError as error:
                # The client's own errors are OSErrors too, without a number.
                if self.scratch is None or error.errno is None:
                    raise
                with output_errors(self.scratch / name):
                    raise
        return Path(path)

    def _progress_class(self) -> type[Any]:
        """A progress bar class that shows nothing, and ends a download once the supply is closed."""
        from tqdm import tqdm

        supply = self

        class Watch(tqdm):  # type: ignore[type-arg]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*arguments, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                if supply._is_stopped():
                    raise _SupplyClosed
                return super().update(n)

        return Watch


class _SupplyClosed(Exception):
    """Raised in a download thread once the supply is closed."""


@contextmanager
def supply_shards(
    sources: Sequence[tuple[Source, Needs]],
    stream: bool,
    scratch: str | os.PathLike[str] | None,
    more: int = 0,
    times: int = 1,
) -> Iterator[list[ShardSupply]]:
    """Start supplies for a command that writes no shards, such as `calibrate` and `eval`.

    Args:
        sources: each source with file names of the shards that its steps need, by the name of the step, in order.
        stream: whether to keep downloaded shards below `scratch` until their last use, not in the Hub's cache.
        scratch: the directory in which to make a temporary directory; None for the working directory. The temporary
            directory is removed at the end.
        more: bytes that the caller will write to the same disk.
        times: number of processes that use the same disk, each with the same supplies.

    Returns:
        A context manager that gives one supply for each source, in the same order.

    Raises:
        SourceError: the disk of the Hub's cache has too little space.
        UsageError: the disk of `scratch` has too little space.
        OutputError: `scratch` cannot be written.
    """
    with ExitStack() as stack:
        directory = None
        if any(source.remote for source, _ in sources):
            stack.enter_context(silent())
            if stream:
                needed = times * (more + sum(scratch_bytes(source, needs) for source, needs in sources))
                directory = stack.enter_context(_temporary_directory(Path(scratch or "."), needed))

        supplies = []
        for number, (source, needs) in enumerate(sources):
            if source.remote and directory is None:
                source.require_cache_space(needs)
            folder = directory and directory / str(number)
            supplies.append(stack.enter_context(ShardSupply(source, needs if source.remote else {}, folder)))
        yield supplies


def find_whole(model: str, begun: Callable[[str], None] | None = None) -> Source:
    """Find a local directory or GGUF file, or else download a whole repository into the Hub's cache.

    Args:
        model: a directory, a GGUF file, "org/name" or "org/name@revision".
        begun: called with a line that says what is downloaded, if anything is.

    Returns:
        Where all of its files lie.

    Raises:
        SourceError: there is no such directory or repository, or it cannot be downloaded.
        UsageError: see find_source.
    """
    source = find_source(model)
    shards = list(source.remote)
    files = [name for name in source.absent if model_files.left_out_part(name) is None or name in _OF_OUTPUTS]

    nbytes = source.remote_bytes([*shards, *files])
    if begun is not None and nbytes > 0:
        begun(f"downloading {nbytes:,} bytes of {source.identity} to the Hub's cache")

    source.fetch_files(files)
    with supply_shards([(source, {"all": shards})], False, None) as (supply,):
        supply.wait_for("all", lambda: False)
    return source


@contextmanager
def _temporary_directory(parent: Path, needed: int) -> Iterator[Path]:
    """A directory in `parent` that is removed at the end, if `needed` bytes are free on its disk."""
    with output_errors(parent):
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise UsageError(
                f"{parent} needs {needed:,} bytes for shards that come and go, its disk has {free:,} free",
                "name a directory on a larger one with --scratch",
            )
        directory = tempfile.TemporaryDirectory(prefix=".openquant-", dir=parent, ignore_cleanup_errors=True)

    with directory as path:
        yield Path(path)
