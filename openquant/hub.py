"""From what the user typed to a directory on disk: a local one as it is, a Hub repository through the Hub's cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
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
        remote: shards that were left on the Hub, by name.
    """

    root: Path
    name: str
    repo: str | None
    revision: str | None
    remote: Mapping[str, RemoteFile] = field(default_factory=dict)

    def identity(self, checkpoint: Checkpoint) -> str:
        """What tells this source from another one with the same headers: the commit, or its files' times."""
        if self.revision is not None:
            return f"{self.repo}@{self.revision}"
        names = [*checkpoint.shards, *checkpoint.files]
        with readable():
            return json.dumps({name: (self.root / name).stat().st_mtime_ns for name in names}, sort_keys=True)


def find_source(model: str, revision: str | None = None, headers_only: bool = False) -> Source:
    """The local directory of that name, or else a snapshot of that Hub repository (downloaded if need be).

    Args:
        model: a directory, `org/name` or `org/name@revision`.
        revision: branch, tag or commit of a Hub repository.
        headers_only: leave shards on the Hub that are not in the cache; their headers can be read from there.

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
    return _download(repo, pinned or revision, headers_only)


def _local(path: Path) -> Source:
    root = path.resolve()
    snapshot = _SNAPSHOT.match("/".join(root.parts[-3:]))
    if snapshot:
        repo = snapshot["repo"].replace("--", "/", 1)
        return Source(path, repo.rsplit("/", 1)[-1], repo, snapshot["commit"])
    # A name that is no UTF-8 could not be written into the card.
    return Source(path, os.fsencode(root.name).decode("utf-8", "replace"), None, None)


def _download(repo: str, revision: str | None, headers_only: bool) -> Source:
    from huggingface_hub import snapshot_download

    other_formats = [name for name in LEFT_OUT_FILES if name not in ("*.safetensors", "*.index.json")]
    unwanted = [*other_formats, *(f"{name}/*" for name in LEFT_OUT_DIRECTORIES)]
    if headers_only:
        unwanted.append("*.safetensors")
    with _explained(repo, revision):
        root = Path(snapshot_download(repo, revision=revision, ignore_patterns=unwanted))
        remote = _remote_shards(repo, root) if headers_only else {}
    return Source(root, repo.rsplit("/", 1)[-1], repo, root.name, remote)


def _remote_shards(repo: str, root: Path) -> dict[str, RemoteFile]:
    """The repository's safetensors files that its snapshot (a directory named by the commit) does not hold."""
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.hf_api import RepoFile

    files = HfFileSystem()

    def reader(name: str) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            # Without the read-ahead that is meant for whole files.
            with _explained(repo, root.name), files.open(f"{repo}@{root.name}/{name}", cache_type="none") as file:
                file.seek(offset)
                return bytes(file.read(length))

        return read

    if all((root / name).exists() for name in _indexed(root)):
        return {}
    return {
        entry.path: RemoteFile(entry.size, reader(entry.path))
        for entry in HfApi().list_repo_tree(repo, revision=root.name)
        if isinstance(entry, RepoFile) and entry.path.endswith(".safetensors") and not (root / entry.path).exists()
    }


def _indexed(root: Path) -> set[str]:
    """The shards that a snapshot's index names; model.safetensors without an index that can be read."""
    try:
        return set(json.loads((root / INDEX_FILE).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {SINGLE_FILE}


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a SourceError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise SourceError(
            f"{at} is not a local directory, and the Hub cannot be reached for it",
            "check the path and the network; HF_HUB_OFFLINE=1 uses only what is in the cache",
        ) from None
    except OSError as error:
        # HfHubHTTPError is one, and so is a full disk.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SourceError(
            f"{at} could not be downloaded: {first}", "run the same command again: the download resumes"
        ) from None
