"""Publishes an output on the Hub: uploads shards as they are finished, and commits all files at the end.

Until that commit the repository shows none of them, so it never holds half a model. Each upload is recorded in a file
in the output's work directory, so a push that was killed continues without uploading, hashing or converting anything
again. With --push-only the records lie in a branch of the repository too (`_save`), so that it continues on another
machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ..errors import SourceError
from ..files.cards import base_models, evaluation_in, published_card, with_evaluation, with_repository
from ..files.journal import PUSHED, WORK, output_errors
from ..files.model_files import CARD_FILE, EVAL_FILE, EVALUATION_FILES
from ..files.small_files import file_sha256, parse_json, read_small
from ..options import Push
from ..threads import FirstFailure
from ..version import __version__
from .error_mapping import PushError, error_reason, is_transient, push_errors, status_of
from .preflight import (
    find_repository,
    make_repository,
    refuse_foreign_weights,
    refuse_source,
    refuse_unquantized,
    require_namespace,
    require_permission,
    require_valid_card,
    user_name,
)
from .source import interruptible, with_retries

if TYPE_CHECKING:
    from huggingface_hub import Discussion, ModelInfo

# With --push-only, the number of output shards that are on disk at a time, being made or uploaded.
AT_ONCE = 3
# Seconds between commits to the branch that keeps the progress. The Hub limits how many there may be in an hour.
SAVE_EVERY = 60.0
# The file there with the record of each uploaded shard, and the most bytes that are read of it.
PROGRESS, MAX_PROGRESS = "openquant-progress.json", 64 << 20
# The most bytes that are read of a card in a repository.
MAX_CARD = 16 << 20
_SHA256 = re.compile("[0-9a-f]{64}")
# "Your push was rejected because an LFS pointer pointed to a file that does not exist. Offending file: - NAME"
_LOST = re.compile(r"\b(LFS|object)\b.*\b(not exist|missing|not found)\b", re.IGNORECASE | re.DOTALL)
# Characters that the title of a pull request may have.
LONGEST_TITLE = 200


@dataclass(frozen=True)
class Published:
    """Where a model was published.

    Attributes:
        repository: the repository's name on the Hub.
        address: URL of the commit or pull request.
        revision: the branch of an open pull request, such as "refs/pr/1"; None for main.
    """

    repository: str
    address: str
    revision: str | None


class Publisher:
    """Uploads an output directory to a repository. Use as a context manager.

    Args:
        push: the options of the push: repository, message, pull request.
        directory: the output directory.
        digest: the plan's digest, which tells the uploads of this plan from others.
        shards: names of the output shards; none if only other files are published, beside a model that is there.
        revision: the branch to commit to, such as "refs/pr/1"; None for main, or a pull request of its own.

    Attributes:
        open_request: number of the pull request of this model that is open; None if there is none, or before `prepare`.
        complete: makes the published model card from the directory's card and the repository's name, "org/name" or
            "org/name@refs/pr/1"; None to publish the directory's card.
    """

    def __init__(
        self, push: Push, directory: Path, digest: str, shards: Iterable[str], revision: str | None = None
    ) -> None:
        self.push = push
        self.revision = revision
        self.complete: Callable[[str, str], str] | None = None
        self.open_request: int | None = None
        self.directory = directory
        self.digest = digest
        self.shards = list(shards)
        self.repo = push.name
        self._user = ""
        self.records = directory / WORK / PUSHED
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._in_progress: set[str] = set()
        self._pending: set[str] = set()
        self._changed = threading.Condition()
        self._failure = FirstFailure(self._wake)
        # Records of uploads that another machine made, and the shards of those in the branch.
        self._earlier: dict[str, dict[str, Any]] = {}
        self._saved: set[str] = set()
        self._next_save = time.monotonic() + SAVE_EVERY
        self._thread = threading.Thread(target=self._upload_all, name="openquant-upload", daemon=True)

    def prepare(self, card: bytes, downloaded: str | None = None, creates: bool = True) -> bool:
        """Run the preflight checks, and create the repository if there is none. `repo` is then its current full name.

        Args:
            card: the output's README.md.
            downloaded: the commit at which the source was downloaded, if its repository is not known; else None.
            creates: False to change nothing on the Hub. Of a repository that is missing, permissions are not checked.

        Returns:
            Whether there was a repository.

        Raises:
            PushError: the user may not write there, the Hub refuses the card, or the repository holds weights that
                the model would not replace, or that it must not replace.
            UsageError: the repository's name is not valid.
            SourceError: weights of the repository cannot be read.
        """
        text = card.decode("utf-8", "replace")
        repository = self.find()
        with push_errors(self.repo):
            require_valid_card(self.repo, published_card(text, self.repo, None))
            if repository is not None and self.push.private and repository.private is False:
                raise PushError(
                    f"{self.repo} exists and is public, so what --private asks for is not the case",
                    "make it private in its settings on the Hub, or leave --private out",
                )
            if repository is None:
                if not creates:
                    return False
                self.repo = make_repository(self.repo, self.push.private)
            # A pull request also takes commits of its author.
            is_request = self.push.create_pr or (self.revision or "").startswith("refs/pr/")
            require_permission(self.repo, write=not is_request)
            if self.push.create_pr:
                # This fails if discussions, and so pull requests, are disabled.
                request = with_retries(self._find_request)
                self.open_request = None if request is None or request.status == "merged" else request.num
            if repository is not None and self.shards:
                refuse_foreign_weights(repository, self.shards)
                if not (self.push.create_pr or self.push.replace_weights):
                    refuse_source(repository, base_models(text), downloaded)
                    refuse_unquantized(repository, self.shards, self._is_ours)
        return repository is not None

    def require_writable(self) -> None:
        """Check the token and its permissions, before hours of work. Nothing is changed on the Hub.

        Raises:
            PushError: the user is not logged in, may not write there, may not create the repository, or it holds
                weights that would stay beside the shards.
            UsageError: the repository's name is not valid.
        """
        repository = self.find()
        with push_errors(self.repo):
            if repository is None:
                require_namespace(self.repo)
            else:
                require_permission(self.repo, write=not self.push.create_pr)
                if self.shards:
                    refuse_foreign_weights(repository, self.shards)

    def find(self) -> ModelInfo | None:
        """Look for the repository; `repo` is then its current full name.

        Returns:
            The Hub's information on it; None if there is none.

        Raises:
            PushError: the user is not logged in, or may not read it.
            UsageError: its name is not valid.
        """
        with push_errors(self.repo):
            self._user = user_name(self.repo)
            name = self.repo if "/" in self.repo else f"{self._user}/{self.repo}"
            repository = find_repository(name)
        # The current name, if it was renamed or has other capital letters.
        self.repo = name if repository is None else repository.id
        return repository

    def _is_ours(self, name: str, sha256: str) -> bool:
        """Whether a shard on the Hub with this digest is the one to push."""
        record, path = self._record(name), self.directory / name
        if record is not None:
            return bool(record["sha256"] == sha256)
        if not path.is_file():
            return False
        with output_errors(path, "read"):
            return file_sha256(path, name) == sha256

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.put(None)
        # After a failure or Ctrl-C, do not wait for the current upload. The next run repeats it.
        self._thread.join(None if exception[0] is None else 0.1)

    def elsewhere(self) -> set[str]:
        """Return the shards that are uploaded and need not be on disk; none without --push-only."""
        return {name for name in self.shards if self._record(name)} if self.push.only else set()

    def recall(self) -> None:
        """Find out what another machine uploaded of this plan; those shards are then `elsewhere`.

        Raises:
            PushError: the Hub cannot be reached, or refuses.
            UsageError: the repository's name is not valid.
        """
        if self._branch is not None:
            with push_errors(self.repo):
                self._earlier = self._find_earlier()
            self._saved = set(self._earlier)

    def finished(self, name: str) -> None:
        """Upload a shard in the background. It must be complete and have its final name, unless it is uploaded already.

        Args:
            name: file name of the shard.
        """
        with self._changed:
            if name in self._pending:
                return
            self._pending.add(name)
        self._queue.put(name)

    def wait_for_room(self, name: str, stopped: Callable[[], bool]) -> None:
        """Wait until there is disk space for one more output shard; without --push-only, return at once.

        Args:
            name: the shard that will be made.
            stopped: returns whether to give up waiting.

        Raises:
            OutputError: an upload failed (PushError), or a shard or the record of its upload cannot be written.
        """
        with self._changed:
            while True:
                self._failure.check()
                if not self.push.only or len(self._in_progress) < AT_ONCE or stopped():
                    self._in_progress.add(name)
                    return
                self._changed.wait(0.2)

    def drain(self) -> None:
        """Wait until all uploads are done.

        Raises:
            OutputError: an upload failed (PushError), or the record of one cannot be written.
        """
        with self._changed:
            while self._pending and not self._failure:
                self._changed.wait(0.2)
            self._failure.check()

    def finish(self, others: Iterable[str], title: str) -> Published:
        """Upload the remaining shards and commit all files. Call it inside the context, after `prepare`.

        Args:
            others: names of all files to publish that are not shards, relative to the directory.
            title: the message of the commit or pull request, unless the user gave one.

        Returns:
            Where the model was published.

        Raises:
            OutputError: an upload or the commit failed (PushError), or a file cannot be read.
        """
        from huggingface_hub import constants

        for name in self.shards:
            self.finished(name)
        self.drain()
        title, names = self.push.message or title, list(others)
        with push_errors(self.repo):
            if self.push.create_pr:
                request = with_retries(lambda: self._open_request(title))
                # The model of a merged pull request is on main.
                revision = None if request.status == "merged" else f"refs/pr/{request.num}"
                address = f"{constants.ENDPOINT}/{self.repo}/discussions/{request.num}"
                if revision is not None:
                    self._commit(names, title, revision)
                    self._open_draft(request)
                published = Published(self.repo, address, revision)
            else:
                published = Published(self.repo, self._commit(names, title, self.revision), self.revision)
        if not self.push.only:
            self.forget()
        elif self._saved:
            self._remove_branch()
        return published

    def _commit(self, others: list[str], title: str, revision: str | None) -> str:
        """Commit all files, except shards that the revision already has, and return the commit's URL."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
        from huggingface_hub.errors import BadRequestError

        def commit() -> str:
            # If only the response to the first try was lost, the second leaves out the shards that it committed.
            missing = self._missing_shards(revision)
            earlier, figures = self._earlier_evaluation(others, revision)
            is_stale = bool(missing) or EVAL_FILE in others
            kept = None if is_stale else figures
            operations: list[Any] = [CommitOperationAdd(name, self._content(name, revision, kept)) for name in others]
            operations += [CommitOperationDelete(name) for name in earlier] if is_stale else []
            for name in missing:
                record = self._record(name)
                path = str(self.directory / name)
                operations.append(
                    CommitOperationAdd(name, path) if record is None else _uploaded_operation(name, record)
                )
            return str(HfApi().create_commit(self.repo, operations, commit_message=title, revision=revision).commit_url)

        try:
            return interruptible(lambda: with_retries(commit, is_retryable=_is_retryable))
        except BadRequestError as error:
            lost = self._lost_shards(error.server_message or "")
            if not lost:
                raise
            for name in lost:
                self._record_path(name).unlink(missing_ok=True)
            if self._saved:
                self._remove_branch()
            raise PushError(
                f"{self.repo} no longer has the upload of {lost[0]}: {error_reason(error)}",
                "run the same command again: what the Hub lost is made and uploaded again",
            ) from None

    def _earlier_evaluation(self, others: Sequence[str], revision: str | None) -> tuple[list[str], str | None]:
        """Files of an evaluation that an earlier push of a model left in a revision, and its part of the card there.

        With other weights they are deleted: they would stand beside a model that they do not measure. With the same
        weights the card keeps its figures.
        """
        if not self.shards:
            return [], None
        from huggingface_hub import HfApi

        names = [CARD_FILE, *(name for name in EVALUATION_FILES if name not in others)]
        present = {entry.path for entry in HfApi().get_paths_info(self.repo, names, revision=revision)}
        earlier = sorted(present - {CARD_FILE})
        if not earlier or CARD_FILE not in present:
            return [], None
        try:
            card = self._download(self.repo, CARD_FILE, revision, MAX_CARD)
        except SourceError:
            return [], None
        # Files of these names in a repository without our figures are somebody else's.
        figures = evaluation_in(card.decode("utf-8", "replace"))
        return (earlier, figures) if figures else ([], None)

    @staticmethod
    def _download(repo: str, name: str, revision: str | None, most: int) -> bytes:
        """Read a small file of a repository; `most` is the largest number of bytes that is read."""
        from huggingface_hub import hf_hub_download

        def read() -> bytes:
            with tempfile.TemporaryDirectory() as folder:
                return read_small(Path(hf_hub_download(repo, name, revision=revision, local_dir=folder)), name, most)

        return with_retries(read)

    def _content(self, name: str, revision: str | None, figures: str | None) -> str | bytes:
        """The path of a file to commit, or the contents of the model card with figures that it had before."""
        path = self.directory / name
        if name != CARD_FILE:
            return str(path)
        with output_errors(path, "read"):
            card = read_small(path, name)
        try:
            text = published_card(card.decode(), self.repo, revision) if self.shards else card.decode()
            # Figures alone in a pull request of their own are of the model on main.
            branch = revision if self.shards else self.revision
            named = f"{self.repo}@{branch}" if branch else self.repo
            text = with_evaluation(text, with_repository(figures, named)) if figures else text
            return (self.complete(text, named) if self.complete else text).encode()
        except UnicodeDecodeError:
            return card

    def _missing_shards(self, revision: str | None) -> list[str]:
        """The shards that a revision lacks, or has with other contents."""
        if not self.shards:
            return []
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        entries = HfApi().get_paths_info(self.repo, self.shards, revision=revision)
        present = {entry.path: entry.lfs.sha256 for entry in entries if isinstance(entry, RepoFile) and entry.lfs}
        records = {name: self._record(name) for name in self.shards}
        return [name for name, record in records.items() if record is None or present.get(name) != record["sha256"]]

    def _lost_shards(self, reason: str) -> list[str]:
        """The uploaded shards that the Hub no longer has, by its reason for refusing a commit.

        After a while the Hub drops uploads that no commit uses. Only then must shards be uploaded again.
        """
        if not _LOST.search(reason):
            return []
        records = {name: record for name in self.shards if (record := self._record(name))}
        named = [name for name, record in records.items() if name in reason or record["sha256"] in reason]
        return named or list(records)

    def _open_request(self, title: str) -> Discussion:
        """The pull request for this model, opened if there is none."""
        from huggingface_hub import HfApi

        request = self._find_request()
        if request is None or (request.status == "merged" and self._missing_shards(None)):
            description = f"Made with openquant {__version__}. {self._marker}"
            request = HfApi().create_pull_request(self.repo, title.strip()[:LONGEST_TITLE], description=description)
        return request

    def _open_draft(self, request: Discussion) -> None:
        """Take a pull request out of draft: the Hub opens it as one, and merges no draft.

        If the Hub refuses, the model is in the request all the same, and its page has a button for this.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        if request.status == "draft":
            with suppress(HfHubHTTPError):
                HfApi().change_discussion_status(self.repo, request.num, "open")

    def _find_request(self) -> Discussion | None:
        """The pull request that an earlier try opened for this model; an open one rather than a merged one.

        Its description has the plan's digest. So none is opened twice, even if a response was lost or the directory
        was moved.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.community import DiscussionComment
        from huggingface_hub.errors import HfHubHTTPError

        api, merged = HfApi(), None
        for discussion in api.get_repo_discussions(self.repo, author=self._user, discussion_type="pull_request"):
            if discussion.status == "closed":
                continue
            try:
                details = api.get_discussion_details(self.repo, discussion.num)
            except HfHubHTTPError as error:
                if status_of(error) != 404:
                    raise
                continue
            first = next((event for event in details.events if isinstance(event, DiscussionComment)), None)
            if first is not None and self._marker in first.content:
                if details.status != "merged":
                    return details
                merged = details
        return merged

    @property
    def _marker(self) -> str:
        """The text in a pull request's description that names the plan."""
        return f"Plan: {self.digest}"

    def _upload_all(self) -> None:
        with self._failure.kept():
            while (name := self._queue.get()) is not None:
                self._upload(name)
                with self._changed:
                    self._pending.discard(name)
                    self._in_progress.discard(name)
                    self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _upload(self, name: str) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        path = self.directory / name
        if self._record(name) is None:
            stamp = _stamp(path)
            with push_errors(self.repo):
                operation = CommitOperationAdd(name, str(path))
                with_retries(lambda: HfApi().preupload_lfs_files(self.repo, [operation], create_pr=self.push.create_pr))
                if not operation._is_uploaded:
                    return  # The Hub wants a small file to be part of the commit.
            info = operation.upload_info
            uploaded = {"size": info.size, "sha256": info.sha256.hex(), "sample": info.sample.hex()}
            self._write_record(name, {**uploaded, "stamp": stamp})
            self._save()
        if self.push.only:
            with output_errors(path, "removed"):
                path.unlink(missing_ok=True)

    def _record_path(self, name: str) -> Path:
        return self.records / hashlib.sha256(f"{self.digest} {self.push.name} {name}".encode()).hexdigest()[:24]

    def _record(self, name: str) -> dict[str, Any] | None:
        """The record of a shard's upload, with size, sha256 and sample; None if it has none, or has changed since."""
        try:
            record = parse_json(read_small(self._record_path(name), name), name)
        except (FileNotFoundError, SourceError):
            return self._earlier.get(name)
        unchanged = _is_record(record) and _stamp(self.directory / name) in (record.get("stamp"), None)
        return record if unchanged else None

    def _write_record(self, name: str, record: dict[str, Any]) -> None:
        path = self._record_path(name)
        with output_errors(path):
            self.records.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(record))
            os.replace(partial, path)

    @property
    def _branch(self) -> str | None:
        """The branch that keeps the progress; None if there is none: a pull request needs no right to write.

        The plan's digest is in its name, so that nothing of another source, version or choice of options is taken.
        """
        return f"openquant-{self.digest[:32]}" if self.push.only and not self.push.create_pr else None

    def _save(self) -> None:
        """Commit the uploaded shards and their records to the branch, at most once in SAVE_EVERY seconds.

        The Hub then keeps the uploads, and another machine can continue. If the Hub refuses that, the push goes on.
        """
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError

        branch, api = self._branch, HfApi()
        if branch is None or time.monotonic() < self._next_save:
            return
        records = {name: record for name in self.shards if (record := self._record(name))}
        operations = [_uploaded_operation(name, record) for name, record in records.items() if name not in self._saved]
        operations.append(CommitOperationAdd(PROGRESS, json.dumps(records).encode()))

        def commit() -> None:
            if not self._saved:
                api.create_branch(self.repo, branch=branch, exist_ok=True)
            api.create_commit(self.repo, operations, commit_message="Shards so far", revision=branch)

        with suppress(HfHubHTTPError):
            with_retries(commit, is_retryable=_is_retryable)
            self._saved = set(records)
        self._next_save = time.monotonic() + SAVE_EVERY

    def _find_earlier(self) -> dict[str, dict[str, Any]]:
        """The records of uploads in the branch; none if there is no such branch."""
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

        name = self.repo if "/" in self.repo else f"{user_name(self.repo)}/{self.repo}"
        try:
            records = parse_json(self._download(name, PROGRESS, self._branch, MAX_PROGRESS), PROGRESS)
        except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, SourceError):
            return {}
        known = records if isinstance(records, dict) else {}
        return {name: record for name in self.shards if _is_record(record := known.get(name))}

    def _remove_branch(self) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        # If it stays, the next run of this plan finds all shards there.
        with suppress(HfHubHTTPError):
            HfApi().delete_branch(self.repo, branch=str(self._branch))
        self._saved, self._earlier = set(), {}

    def forget(self) -> None:
        """Remove all records of uploads, so that every shard counts as not uploaded."""
        self._earlier = {}
        if self.records.exists():
            with output_errors(self.records, "removed"):
                shutil.rmtree(self.records)
            with suppress(OSError):
                # It is not empty if a run still uses it.
                self.records.parent.rmdir()


def _is_record(record: object) -> TypeGuard[dict[str, Any]]:
    """Whether a record of the branch, which others may have written, can be that of an upload."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("size"), int)
        and isinstance(record.get("sha256"), str)
        and _SHA256.fullmatch(record["sha256"]) is not None
        and isinstance(record.get("sample"), str)
        and len(record["sample"]) <= 1024
        and re.fullmatch("([0-9a-f]{2})*", record["sample"]) is not None
    )


def _is_retryable(error: BaseException) -> bool:
    """Whether a refused commit may succeed on a retry: another commit was in progress, or came before it."""
    return status_of(error) in (409, 412) or is_transient(error)


def _stamp(path: Path) -> list[int] | None:
    """What changes with a file; None if it is not there, since its upload has taken its place."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None


def _uploaded_operation(name: str, record: dict[str, Any]) -> Any:
    """The operation that commits an uploaded shard, which need not be on disk.

    Its fields are those that preupload_lfs_files sets (huggingface_hub 2.4, hf_api.py:5415). There is no public way.
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
