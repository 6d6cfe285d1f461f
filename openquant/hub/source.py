"""From what the user typed to a source: a local directory, or a Hub repository of which most may still be there.

Of a repository, what a plan is made from goes to the Hub's cache at once, its other files before anything is converted
(`Source.fetch_files`), and shards as they are needed (hub/fetch.py). The commit found at the start is used for
everything after.
"""

from __future__ import annotations

import concurrent.futures
import glob
import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from ..errors import SourceError, UsageError
from ..files.checkpoint import Checkpoint, read_json, readable, refuse_without_weights
from ..files.fingerprint import Stamp, stamps_of
from ..files.names import INDEX_FILE, SINGLE_FILE, left_out_part
from ..files.small_files import open_regular, read_small
from ..threads import in_thread
from ..weights.find import OWN_FILES
from .error_mapping import Unreachable, is_offline, is_transient, source_errors, without_queries

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub.errors import HfHubHTTPError

# A snapshot in the Hub's cache: models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"^models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


_COMMIT = re.compile("[0-9a-f]{40}")

# Seconds between tries, beyond those of huggingface_hub itself; fewer before anything is known to be there.
WAITS = (1, 2, 4, 8, 16)
FIRST_WAITS = (1, 2)
# Answers that an address gives once its signature has expired.
_EXPIRED = (400, 401, 403, 410)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies and what it is called.

    Attributes:
        root: its directory.
        name: last part of its name, from which the output's is made.
        repo: its Hub repository, None for a local folder whose origin is unknown.
        revision: the commit on the Hub, None where `repo` is.
        remote: shards that are on the Hub and not in its cache here, by name.
        absent: other files that are on the Hub and not in its cache here, with sizes in bytes, by name.
    """

    root: Path
    name: str
    repo: str | None
    revision: str | None
    remote: Mapping[str, HubFile] = field(default_factory=dict)
    absent: Mapping[str, int] = field(default_factory=dict)

    def remote_bytes(self, names: Iterable[str]) -> int:
        """Bytes of those of these shards and other files that are on the Hub and not in its cache."""
        sizes = {**self.absent, **{name: file.size for name, file in self.remote.items()}}
        return sum(sizes.get(name, 0) for name in names)

    @property
    def notes(self) -> list[str]:
        """What the user should know of how the source comes: that a proxy ignores ranges, say."""
        if any(file.only_whole for file in self.remote.values()):
            return [
                "the Hub, or a proxy before it, sends files from their beginning when a part is asked for (it ignores "
                "Range): each shard comes over one connection, and one that breaks off is sent again from its beginning"
            ]
        return []

    def fetch_files(self, names: Iterable[str]) -> None:
        """Put those of these files that are on the Hub into its cache.

        Raises:
            SourceError: they cannot be had.
        """
        repo, wanted = self.repo, [glob.escape(name) for name in names if name in self.absent]
        if repo is None or not wanted:
            return
        # Importing it takes as long as converting a small model.
        from huggingface_hub import snapshot_download

        def fetch() -> None:
            with source_errors(repo, self.revision):
                snapshot_download(repo, revision=self.revision, allow_patterns=wanted)

        with silent():
            interruptible(lambda: patiently(fetch))

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

    def beside(self, name: str) -> Path:
        """A name in the working directory; beside the source where that is the source, or lies in it."""
        here, root = Path.cwd().resolve(), self.root.resolve()
        return root.parent / name if root in (here, *here.parents) else Path(name)

    @property
    def identity(self) -> str:
        """What tells this source from any other: the commit; nothing of a local one."""
        return "" if self.revision is None else f"{self.repo}@{self.revision}"

    def stamps(self, checkpoint: Checkpoint) -> dict[str, Stamp]:
        """What the shards of a local source look like now; those of a repository are what its commit says."""
        return {} if self.revision is not None else stamps_of(self.root, checkpoint.shards)

    def digests(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The SHA-256 of each file of a local source that is no shard; of a repository nothing, its commit says it."""
        return {} if self.revision is not None else {name: self._digest(name) for name in checkpoint.files}

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        with readable(), open_regular(self.root / name, name) as file:
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


def model_folder(model: str | os.PathLike[str]) -> Path:
    """The directory that holds the files of a model: its own, or that of its repository in the Hub's cache."""
    path = Path(model)
    with readable():
        if path.exists():
            return path
    from huggingface_hub import constants

    repo = os.fspath(model).partition("@")[0]
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def find_source(model: str, revision: str | None = None) -> Source:
    """The local directory of that name, or else that Hub repository, of which the cache then holds what a plan needs.

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

    def find() -> Source:
        with source_errors(repo, revision):
            needed = ["config.json", INDEX_FILE, *OWN_FILES]
            root = Path(snapshot_download(repo, revision=revision, allow_patterns=needed))
            return Source(root, repo.rsplit("/", 1)[-1], repo, root.name, *_missing(repo, root))

    with silent():
        return interruptible(lambda: patiently(find, FIRST_WAITS))


def _missing(repo: str, root: Path) -> tuple[dict[str, HubFile], dict[str, int]]:
    """What of a repository its snapshot (a directory named by the commit) lacks: shards, and sizes of other files."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    def is_here(name: str) -> bool:
        return (root / name).exists()

    all_shards = all(map(is_here, _indexed(root)))
    try:
        listed = {entry.path: entry.size for entry in get_cached_repo_tree(repo, revision=root.name)}
    except CachedRepoTreeNotFoundError:
        listed = {}
    lacking = {name: size for name, size in listed.items() if not is_here(name)}
    if all_shards and listed and all(map(left_out_part, lacking)):
        return {}, lacking
    # The cached list lacks digests.
    try:
        tree = HfApi().list_repo_tree(repo, recursive=True, revision=root.name)
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
    except Exception as error:
        if all_shards and not listed and is_offline(error):
            # A cache that another program filled, and nothing that says that it lacks anything.
            return {}, {}
        raise
    names = {entry.path for entry in entries}
    if not {INDEX_FILE, SINGLE_FILE} & names and "config.json" in names:
        refuse_without_weights(repo, [name for name in names if "/" not in name])
    lacking_entries = [entry for entry in entries if not is_here(entry.path)]
    shards = [entry for entry in lacking_entries if re.fullmatch(r"[^/]+\.safetensors", entry.path)]
    digests = {entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in shards}
    remote = {entry.path: HubFile(repo, root.name, entry.path, entry.size, digests[entry.path]) for entry in shards}
    return remote, {entry.path: entry.size for entry in lacking_entries if entry.path not in remote}


def _indexed(root: Path) -> set[str]:
    """The shards that a snapshot's index names; model.safetensors without an index that can be read."""
    try:
        return set(read_json(root / INDEX_FILE, INDEX_FILE)["weight_map"].values())
    except (OSError, SourceError, KeyError, TypeError, AttributeError):
        return {SINGLE_FILE}


class HubFile:
    """A file of a repository, read over HTTP by the client's own session.

    The Hub is asked once where it lies; that address serves until it is refused. Calls may come from any thread.

    Attributes:
        size: in bytes.
        digest: of its contents, in hexadecimal digits: the SHA-256 of an LFS file, else its git object id.
        only_whole: whether all of it was sent where a part was asked for.
    """

    def __init__(self, repo: str, revision: str, name: str, size: int, digest: str) -> None:
        self.repo = repo
        self.revision = revision
        self.name = name
        self.size = size
        self.digest = digest
        self.only_whole = False
        self._address: str | None = None
        self._resolving = threading.Lock()

    def hasher(self) -> hashlib._Hash:
        """A hash that gives `digest` once it is fed with the contents."""
        return hashlib.sha256() if len(self.digest) == 64 else hashlib.sha1(b"blob %d\0" % self.size)

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on.

        Raises:
            SourceError: they cannot be had.
        """
        return patiently(lambda: b"".join(self.stream(offset, offset + length)))

    def stream(self, start: int, end: int) -> Generator[bytes, None, None]:
        """The bytes from `start` to `end` as they come, and nothing is read beyond; close it if not all are wanted.

        Raises:
            SourceError: they cannot be had; an Unreachable if that may pass.
        """
        with source_errors(self.repo, self.revision), self._ask(start, end) as response:
            self.only_whole |= response.status_code == 200 and end - start < self.size
            at = 0 if response.status_code == 200 else start
            for data in response.iter_bytes():
                wanted = data[max(0, start - at) : max(0, end - at)]
                at += len(data)
                if wanted:
                    yield wanted
                # Read to its end, an answer leaves a connection for the next one; but not the rest of a shard.
                if at > end or (at == end and response.status_code == 200 and end < self.size):
                    return
            if at < end:
                raise Unreachable(f"{self.name} ended at byte {at:,} of {self.size:,}", "run the same command again")

    @contextmanager
    def _ask(self, start: int, end: int) -> Iterator[Response]:
        """The answer to a request for these bytes."""
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        for attempt in range(3):
            address, trusted = self._resolve()
            # The token is for the Hub; an address elsewhere is signed instead.
            headers = build_hf_headers() if trusted else {}
            headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            with http_stream_backoff(
                "GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(), retry_on_status_codes=(408, 429),
            ) as response:  # fmt: skip
                if response.status_code in _EXPIRED and not trusted and attempt < 2:
                    self._forget(address)
                    continue
                hf_raise_for_status(response)
                given = response.headers.get("Content-Range", "")
                if response.status_code != 200 and not given.startswith(f"bytes {start}-"):
                    raise SourceError(
                        f"{self.name}: bytes from {start:,} on were asked for, and {given or 'no range'} came",
                        "what answers for the Hub is broken: check HF_ENDPOINT and proxies",
                    )
                yield response
                return

    def _resolve(self) -> tuple[str, bool]:
        """The address where it lies, and whether that is the Hub's own."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repo, self.name, revision=self.revision)
        with self._resolving:
            if self._address is None:
                self._address = get_hf_file_metadata(url).location
            return self._address, _origin(self._address) == _origin(url)

    def _forget(self, address: str) -> None:
        with self._resolving:
            if self._address == address:
                self._address = None


def is_refused_elsewhere(error: HfHubHTTPError) -> bool:
    """Whether it was not the Hub that refused, but the place it had pointed to: then the signature has expired."""
    from huggingface_hub import constants

    response = error.response
    elsewhere = _origin(str(response.request.url)) != _origin(constants.ENDPOINT)
    return elsewhere and response.status_code in _EXPIRED and not response.headers.get("X-Error-Code")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


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
    future = in_thread(do)
    while not concurrent.futures.wait([future], 0.2).done:
        pass
    return future.result()


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
