"""Finds the source that the user named: a local directory, a GGUF file, or a repository on the Hub.

Of a repository, the files that a plan needs are downloaded into the Hub's cache at once, the other files before the
conversion (`Source.fetch_files`), and shards as they are needed (hub/fetch.py). All of them come from the commit that
was found at the start.
"""

from __future__ import annotations

import concurrent.futures
import glob
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..errors import SourceError, UsageError
from ..files.checkpoint import (
    Checkpoint,
    Stamp,
    header_digest,
    open_checkpoint,
    read_json,
    readable,
    refuse_other_weights,
    refuse_without_weights,
    stamps_of,
)
from ..files.gguf import read_gguf_header
from ..files.model_files import INDEX_FILE, SINGLE_FILE, deciding, file_sha256, left_out_part, read_small, similar_path
from ..formats.format import ggml_types
from ..gguf.source import SUFFIX, OpenedGguf, open_gguf
from ..threads import in_thread
from ..weights.find import TOOL_CONFIG_FILES
from .error_mapping import NotFound, Unreachable, is_offline, is_transient, source_errors, without_queries

# A snapshot in the Hub's cache: models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"^models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
_COMMIT = re.compile("[0-9a-f]{40}")

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
        self.fetch_files(deciding(self.absent))
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

    def require_header(self, checkpoint: Checkpoint, shard: str) -> None:
        """Refuse a local shard that was replaced by one with another header, whose tensors may lie elsewhere.

        Raises:
            SourceError: the header is not the one that `checkpoint` was opened with, or cannot be read.
        """
        path = self.root / shard
        try:
            if self.gguf is not None:
                # The shard is a link to the file that the user named.
                path = path.resolve()
                header = read_gguf_header(path, path.name, ggml_types()).digest
            else:
                header = header_digest(path)
        except SourceError:
            header = None

        if header != checkpoint.headers[shard]:
            raise SourceError(
                f"{path} was replaced while it was being converted: its header is not the one that was planned",
                "let nothing write to the model, and run the same command again with --overwrite",
            )

    def digests(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return the SHA-256 of a local source's files other than shards, by name; {} for a repository.

        Raises:
            SourceError: a file cannot be read.
        """
        if self.revision is not None:
            return {}
        with readable():
            return {name: file_sha256(self.root / name, name) for name in checkpoint.files}

    def downloaded_commit(self) -> str | None:
        """Return the commit that `hf download --local-dir` recorded in a local directory; None if there is no record.

        The record does not name the repository.
        """
        record = self.root / ".cache" / "huggingface" / "download" / "config.json.metadata"
        try:
            commit = read_small(record, record.name).split(b"\n", 1)[0].decode()
        except (OSError, SourceError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
        return commit


def model_folder(model: str | os.PathLike[str]) -> Path:
    """Return the directory of a model: a local directory, or that of its repository in the Hub's cache.

    Args:
        model: a directory, "org/name" or "org/name@revision".

    Returns:
        The directory; that of a repository may be missing.

    Raises:
        SourceError: the path cannot be looked up.
    """
    path = Path(model)
    with readable():
        if _exists(path):
            return path
    from huggingface_hub import constants

    repo = os.fspath(model).partition("@")[0]
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def find_source(model: str, revision: str | None = None) -> Source:
    """Find a local directory or GGUF file, or else a repository on the Hub, and download the files that a plan needs.

    Args:
        model: a directory, a GGUF file, "org/name" or "org/name@revision".
        revision: branch, tag or commit of a repository; None for the default branch.

    Returns:
        Where the files lie: `root` is the directory, `remote` has the shards that are on the Hub only.

    Raises:
        SourceError: there is no such directory or repository, or it cannot be downloaded.
        UsageError: `model` is empty or has no revision after its @, or `revision` is given for a local directory or
            contradicts that of `model`.
    """
    path = Path(model)
    if not model:
        raise UsageError("-m is empty", "give a directory or a Hub repository such as Qwen/Qwen3-0.6B")

    with readable():
        exists = _exists(path)
    if exists and revision is not None:
        kind = "directory" if path.is_dir() else "file"
        raise UsageError(f"{model} is a local {kind}, which has no revision {revision}", "leave --revision out")
    if exists:
        return local_source(path)

    repo, at_sign, pinned = model.partition("@")
    if at_sign and revision is not None and revision != pinned:
        raise UsageError(f"{model} and --revision {revision} name two revisions", "give one of them")
    if at_sign and not pinned:
        raise UsageError(f"{model} names no revision after the @", "write org/name@revision")

    try:
        return repository_source(repo, pinned or revision)
    except NotFound as error:
        sibling = similar_path(path)
        if sibling is None:
            raise
        raise NotFound(error.message, f"did you mean {sibling}? {error.hint}") from None


def _exists(path: Path) -> bool:
    """Whether a path exists. Unlike Path.exists() in Python 3.14, raises if that cannot be looked up."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


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
            needed = ["config.json", INDEX_FILE, *TOOL_CONFIG_FILES]
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
    if all_shards and sizes and all(map(left_out_part, missing_sizes)):
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
    if not {INDEX_FILE, SINGLE_FILE} & names and "config.json" in names:
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
        return set(read_json(root / INDEX_FILE, INDEX_FILE)["weight_map"].values())
    except (OSError, SourceError, KeyError, TypeError, AttributeError):
        return {SINGLE_FILE}


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

    def hasher(self) -> hashlib._Hash:
        """Return a hash object that gives `digest` after an update with the contents."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size)

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
    record.msg, record.args = without_queries(record.getMessage()), ()
    return not str(record.msg).startswith(_NOTHING_NEW)
