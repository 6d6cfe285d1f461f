"""To the Hub: shards are uploaded as they are finished, and one commit at the end makes them a model.

Until that commit the repository shows nothing of them, so it never holds half a model. What is uploaded is recorded
in the output's work directory, a file for each shard: a push that was killed goes on without uploading, hashing or
converting anything again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..files.atomic import make_directory
from ..files.cards import base_models, published_card
from ..files.journal import PUSHED, WORK, output_errors
from ..files.small_files import open_regular, parse_json, read_small
from ..options import Push
from ..threads import FirstFailure
from ..version import __version__
from .error_mapping import PushError, error_reason, is_transient, push_errors, status_of
from .preflight import (
    find_repository,
    make_repository,
    refuse_mixture,
    refuse_source,
    refuse_unquantized,
    require_permission,
    require_valid,
    user_name,
)
from .source import interruptible, patiently

if TYPE_CHECKING:
    from huggingface_hub import Discussion

# Output shards that are on disk at a time, being made or uploaded, when they are deleted after it.
AT_ONCE = 3
# "Your push was rejected because an LFS pointer pointed to a file that does not exist. Offending file: - NAME"
_LOST = re.compile(r"\b(LFS|object)\b.*\b(not exist|missing|not found)\b", re.IGNORECASE | re.DOTALL)
# Of a pull request, in characters.
LONGEST_TITLE = 200


@dataclass(frozen=True)
class Published:
    """Where a model was published.

    Attributes:
        repository: the repository, under the name the Hub has for it.
        address: of the commit or pull request.
        revision: what holds it while a pull request is open, such as "refs/pr/1"; None for main.
    """

    repository: str
    address: str
    revision: str | None


class Publisher:
    """Uploads an output directory; use as a context manager.

    Args:
        push: where to.
        directory: the output directory.
        digest: of the plan, so that an upload is never taken for another run's.
        shards: names of the output shards.

    Attributes:
        complete: makes the card that is published of the directory's and of the repository; None to leave it.
    """

    def __init__(self, push: Push, directory: Path, digest: str, shards: Iterable[str]) -> None:
        self.push = push
        self.complete: Callable[[str, str], str] | None = None
        self.directory = directory
        self.digest = digest
        self.shards = list(shards)
        self.repo = push.name
        self._user = ""
        self.records = directory / WORK / PUSHED
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._begun: set[str] = set()
        self._waiting: set[str] = set()
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._wake)
        self._thread = threading.Thread(target=self._upload_all, name="openquant-upload", daemon=True)

    def prepare(self, card: bytes, downloaded: str | None = None) -> None:
        """Make the repository if there is none, and find out beforehand what could keep the model from it.

        Args:
            card: the output's README.md.
            downloaded: the commit that the model was downloaded as, from a repository that is not known.

        Raises:
            PushError: we may not write there, the card is refused, or the repository holds weights that this model
                would not replace, or ought not to.
        """
        text = card.decode("utf-8", "replace")
        with push_errors(self.repo):
            self._user = user_name(self.repo)
            name = self.repo if "/" in self.repo else f"{self._user}/{self.repo}"
            found = find_repository(name)
            # Of one that was renamed or is spelled in other letters, the name it has now.
            self.repo = name if found is None else found.id
        with push_errors(self.repo):
            require_valid(self.repo, published_card(text, self.repo, None))
            if found is None:
                self.repo = make_repository(self.repo, self.push.private)
            require_permission(self.repo, write=not self.push.create_pr)
            if self.push.create_pr:
                # Where discussions are disabled there are no pull requests either.
                patiently(self._request)
            if found is not None:
                refuse_mixture(found, self.shards)
                if not (self.push.create_pr or self.push.replace_weights):
                    refuse_source(found, base_models(text), downloaded)
                    refuse_unquantized(found, self.shards, self._is_ours)

    def _is_ours(self, name: str, sha256: str) -> bool:
        """Whether what the Hub holds is the very shard that would be pushed."""
        record, path = self._record(name), self.directory / name
        if record is not None:
            return bool(record["sha256"] == sha256)
        if not path.is_file():
            return False
        with output_errors(path, "read"), open_regular(path, name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.put(None)
        # An upload under way is not waited for after a failure or Ctrl-C: the next run repeats it.
        self._thread.join(None if exception[0] is None else 0.1)

    def elsewhere(self) -> set[str]:
        """Shards that are uploaded and need not be here."""
        return {name for name in self.shards if self._record(name)} if self.push.only else set()

    def finished(self, name: str) -> None:
        """Is told that a shard has its final name: it is uploaded."""
        with self._changed:
            if name in self._waiting:
                return
            self._waiting.add(name)
        self._queue.put(name)

    def wait_for_room(self, name: str, stopped: Callable[[], bool]) -> None:
        """Wait until an output shard may be begun, or `stopped()` is true.

        Raises:
            PushError: an upload failed.
        """
        with self._changed:
            while True:
                self._failure.check()
                if not self.push.only or len(self._begun) < AT_ONCE or stopped():
                    self._begun.add(name)
                    return
                self._changed.wait(0.2)

    def drain(self) -> None:
        """Wait for the uploads that are under way.

        Raises:
            PushError: one of them failed.
        """
        with self._changed:
            while self._waiting and not self._failure:
                self._changed.wait(0.2)
            self._failure.check()

    def finish(self, others: Iterable[str], title: str) -> Published:
        """Upload what is left and commit everything; where it is then.

        Args:
            others: every file of the directory that is not a shard.
            title: the commit message, unless the user gave one.

        Raises:
            PushError: it could not be done.
        """
        from huggingface_hub import constants

        for name in self.shards:
            self.finished(name)
        self.drain()
        title = self.push.message or title
        with push_errors(self.repo):
            if self.push.create_pr:
                request = patiently(lambda: self._open_request(title))
                # What was merged is served from main.
                revision = None if request.status == "merged" else f"refs/pr/{request.num}"
                address = f"{constants.ENDPOINT}/{self.repo}/discussions/{request.num}"
                if revision is not None:
                    self._commit(list(others), title, revision)
                published = Published(self.repo, address, revision)
            else:
                published = Published(self.repo, self._commit(list(others), title, None), None)
        if not self.push.only:
            self.forget()
        return published

    def _commit(self, others: list[str], title: str, revision: str | None) -> str:
        """Commit everything that the revision has not; the commit's address."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import BadRequestError

        def commit() -> str:
            # A second try leaves out what the first one committed, should only its answer have been lost.
            operations = [CommitOperationAdd(name, self._content(name, revision)) for name in others]
            for name in self._absent(revision):
                record = self._record(name)
                path = str(self.directory / name)
                operations.append(CommitOperationAdd(name, path) if record is None else _uploaded(name, record))
            return str(HfApi().create_commit(self.repo, operations, commit_message=title, revision=revision).commit_url)

        try:
            return interruptible(lambda: patiently(commit, passes=_passes))
        except BadRequestError as error:
            lost = self._lost(error.server_message or "")
            if not lost:
                raise
            for name in lost:
                self._record_path(name).unlink(missing_ok=True)
            raise PushError(
                f"{self.repo} no longer has what was uploaded of {lost[0]}: {error_reason(error)}",
                "run the same command again: what the Hub lost is made and uploaded again",
            ) from None

    def _content(self, name: str, revision: str | None) -> str | bytes:
        """A file to be committed: its path, or what it is to hold."""
        path = self.directory / name
        if name != "README.md":
            return str(path)
        with output_errors(path, "read"):
            card = read_small(path, name)
        try:
            text = published_card(card.decode(), self.repo, revision)
            return (self.complete(text, self.repo) if self.complete else text).encode()
        except UnicodeDecodeError:
            return card

    def _absent(self, revision: str | None) -> list[str]:
        """The shards that a revision has not, or not as they are here."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        found = HfApi().get_paths_info(self.repo, self.shards, revision=revision)
        present = {entry.path: entry.lfs.sha256 for entry in found if isinstance(entry, RepoFile) and entry.lfs}
        records = {name: self._record(name) for name in self.shards}
        return [name for name, record in records.items() if record is None or present.get(name) != record["sha256"]]

    def _lost(self, why: str) -> list[str]:
        """The uploaded shards that the Hub has not, going by the reason it gives for refusing a commit.

        It drops uploads that no commit names after a while. No other reason is one to upload anything again.
        """
        if not _LOST.search(why):
            return []
        records = {name: record for name in self.shards if (record := self._record(name))}
        named = [name for name, record in records.items() if name in why or record["sha256"] in why]
        return named or list(records)

    def _open_request(self, title: str) -> Discussion:
        """The pull request for this model, opened if there is none."""
        from huggingface_hub import HfApi

        found = self._request()
        if found is None or (found.status == "merged" and self._absent(None)):
            about = f"Made with openquant {__version__}. {self._mark}"
            found = HfApi().create_pull_request(self.repo, title.strip()[:LONGEST_TITLE], description=about)
        return found

    def _request(self) -> Discussion | None:
        """The pull request that an earlier try opened for this model, an open one before a merged one.

        It is known by what it says, so none is opened twice, be the answer lost or the directory moved.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.community import DiscussionComment
        from huggingface_hub.errors import HfHubHTTPError

        api, merged = HfApi(), None
        for listed in api.get_repo_discussions(self.repo, author=self._user, discussion_type="pull_request"):
            if listed.status == "closed":
                continue
            try:
                details = api.get_discussion_details(self.repo, listed.num)
            except HfHubHTTPError as error:
                if status_of(error) != 404:
                    raise
                continue
            first = next((event for event in details.events if isinstance(event, DiscussionComment)), None)
            if first is not None and self._mark in first.content:
                if details.status != "merged":
                    return details
                merged = details
        return merged

    @property
    def _mark(self) -> str:
        """What tells a pull request of this plan from others of the same user."""
        return f"Plan: {self.digest}"

    def _upload_all(self) -> None:
        with self._failure.kept():
            while (name := self._queue.get()) is not None:
                self._upload(name)
                with self._changed:
                    self._waiting.discard(name)
                    self._begun.discard(name)
                    self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _upload(self, name: str) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        path = self.directory / name
        if self._record(name) is None:
            with push_errors(self.repo):
                operation = CommitOperationAdd(name, str(path))
                patiently(lambda: HfApi().preupload_lfs_files(self.repo, [operation], create_pr=self.push.create_pr))
                if not operation._is_uploaded:
                    return  # the Hub wants it as part of the commit
            info = operation.upload_info
            self._remember(name, {"size": info.size, "sha256": info.sha256.hex(), "sample": info.sample.hex()})
        if self.push.only:
            with output_errors(path, "removed"):
                path.unlink(missing_ok=True)

    def _record_path(self, name: str) -> Path:
        return self.records / hashlib.sha256(f"{self.digest} {self.push.name} {name}".encode()).hexdigest()[:24]

    def _record(self, name: str) -> dict[str, Any] | None:
        """What is known of a shard that is uploaded; None if it is not."""
        try:
            record = parse_json(read_small(self._record_path(name), name), name)
        except (FileNotFoundError, SourceError):
            return None
        return record if isinstance(record, dict) else None

    def _remember(self, name: str, record: dict[str, Any]) -> None:
        path = self._record_path(name)
        with output_errors(path):
            make_directory(self.records)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(record))
            os.replace(partial, path)

    def forget(self) -> None:
        """Remove all records of uploads: nothing counts as uploaded any more."""
        if self.records.exists():
            with output_errors(self.records, "removed"):
                shutil.rmtree(self.records)
            with suppress(OSError):
                # Unless a run still works there.
                self.records.parent.rmdir()


def _passes(error: BaseException) -> bool:
    """Whether a commit that is refused may be taken a moment later: another one was under way, or came before it."""
    return status_of(error) in (409, 412) or is_transient(error)


def _uploaded(name: str, record: dict[str, Any]) -> Any:
    """A commit's operation for a shard that is on the Hub and need not be here.

    As preupload_lfs_files leaves it behind; huggingface_hub has no other way to say this (2.4, hf_api.py:5415).
    """
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    operation = CommitOperationAdd(name, b"")
    operation.upload_info = UploadInfo(
        size=record["size"], sample=bytes.fromhex(record["sample"]), sha256=bytes.fromhex(record["sha256"])
    )
    operation._upload_mode = "lfs"
    operation._is_uploaded = True
    return operation
