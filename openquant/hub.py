"""From what the user typed to a source: a local directory, or a Hub repository whose shards may still be there.

Of a repository everything but the shards goes to the Hub's cache at once; shards are fetched as they are needed
(fetch.py). The commit found at the start is used for everything after.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint import INDEX_FILE, LEFT_OUT_DIRECTORIES, LEFT_OUT_FILES, SINGLE_FILE, Checkpoint, RemoteFile, readable
from .errors import SourceError, UsageError

# A snapshot in the Hub's cache: models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"^models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


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

    def identity(self, checkpoint: Checkpoint) -> str:
        """What tells this source from another one with the same headers: the commit, or its files' times."""
        if self.revision is not None:
            return f"{self.repo}@{self.revision}"
        names = [*checkpoint.shards, *checkpoint.files]
        with readable():
            return json.dumps({name: (self.root / name).stat().st_mtime_ns for name in names}, sort_keys=True)


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
    with explained_source(repo, revision), silent():
        root = Path(snapshot_download(repo, revision=revision, ignore_patterns=unwanted))
        return Source(root, repo.rsplit("/", 1)[-1], repo, root.name, _remote_shards(repo, root))


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

    return {
        entry.path: RemoteFile(entry.size, reader(entry.path), entry.lfs.sha256 if entry.lfs else None)
        for entry in HfApi().list_repo_tree(repo, revision=root.name)
        if isinstance(entry, RepoFile) and entry.path.endswith(".safetensors") and not (root / entry.path).exists()
    }


def _indexed(root: Path) -> set[str]:
    """The shards that a snapshot's index names; model.safetensors without an index that can be read."""
    try:
        return set(json.loads((root / INDEX_FILE).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {SINGLE_FILE}


class Unreachable(SourceError):
    """The Hub could not be reached or was too busy: worth another try."""


@contextmanager
def silent() -> Iterator[None]:
    """Without huggingface_hub's own progress bars, unless the environment asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        with disable_progress_bars():
            yield
    else:
        yield


def is_transient(error: BaseException | None) -> bool:
    """Whether an error of huggingface_hub's may be gone a moment later: no connection, a timeout, 408, 429, 5xx."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return False
    if isinstance(error, LocalEntryNotFoundError):
        return is_transient(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    # The client's HTTP library (httpx in huggingface_hub 1.x, httpx2 since) lets its own errors through.
    return type(error).__module__.startswith("httpx") or "Consistency check failed" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, addresses in it without their queries, which may hold signatures."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)


@contextmanager
def explained_source(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises about a source into a SourceError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except HFValidationError:
        raise SourceError(f"{repo} does not exist, and is no Hub repository id either", "check the path") from None
    except GatedRepoError:
        raise SourceError(
            f"{repo} is gated", f"accept its licence at https://huggingface.co/{repo}, then run: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise SourceError(f"{repo} has no revision {revision}", "check the branch, tag or commit") from None
    except RepositoryNotFoundError:
        raise SourceError(
            f"{repo} is neither a local directory nor a repository on the Hub",
            "check the name; for a private repository run: hf auth login",
        ) from None
    except Exception as error:
        # Trouble with the first question about a file comes as "not in the cache", with its cause.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if isinstance(cause, GatedRepoError) or status in (401, 403):
            raise SourceError(
                f"the Hub refuses access to {at}: {first_line(cause)}",
                "log in with a token that may read it: hf auth login",
            ) from None
        if isinstance(error, OfflineModeIsEnabled) or (isinstance(error, LocalEntryNotFoundError) and status is None):
            kind = Unreachable if is_transient(error) else SourceError
            raise kind(
                f"{at} is not a local directory, and the Hub cannot be reached for it",
                "check the path and the network; HF_HUB_OFFLINE=1 uses only what is in the cache",
            ) from None
        if is_transient(cause):
            raise Unreachable(
                f"{at} could not be downloaded: {first_line(cause)}", "run the same command again: it continues"
            ) from None
        if isinstance(cause, OSError):
            raise SourceError(
                f"{at} could not be downloaded: {first_line(cause)}", "run the same command again: it continues"
            ) from None
        raise
