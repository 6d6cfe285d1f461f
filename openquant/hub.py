"""From what the user typed to a directory on disk: a local one as it is, a Hub repository through the Hub's cache."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import LEFT_OUT_DIRECTORIES, LEFT_OUT_FILES, Checkpoint, readable
from .errors import OpenQuantError, SourceError, UsageError

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
    """

    root: Path
    name: str
    repo: str | None
    revision: str | None

    def identity(self, checkpoint: Checkpoint) -> str:
        """What tells this source from another one with the same headers: the commit, or its files' times."""
        if self.revision is not None:
            return f"{self.repo}@{self.revision}"
        names = [*checkpoint.shards, *checkpoint.files]
        with readable():
            return json.dumps({name: (self.root / name).stat().st_mtime_ns for name in names}, sort_keys=True)


def find_source(model: str, revision: str | None = None) -> Source:
    """The local directory of that name, or else a snapshot of that Hub repository (downloaded if need be).

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
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    other_formats = [name for name in LEFT_OUT_FILES if name not in ("*.safetensors", "*.index.json")]
    unwanted = [*other_formats, *(f"{name}/*" for name in LEFT_OUT_DIRECTORIES)]
    at = f"{repo}@{revision}" if revision else repo
    try:
        root = Path(snapshot_download(repo, revision=revision, ignore_patterns=unwanted))
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
    except HfHubHTTPError as error:
        raise _failed(at, error) from None
    except OSError as error:
        raise _failed(at, error) from None
    return Source(root, repo.rsplit("/", 1)[-1], repo, root.name)


def _failed(what: str, error: Exception) -> OpenQuantError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return SourceError(f"{what} could not be downloaded: {first}", "run the same command again: the download resumes")
