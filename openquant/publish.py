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
from typing import Any

from .errors import SourceError
from .hub import interruptible, patiently
from .inputs import parse_json, read_small
from .output import PUSHED, WORK, explained
from .refusals import PushError, explained_push, is_transient, status_of, told

# Output shards that are on disk at a time, being made or uploaded, when they are deleted after it.
AT_ONCE = 3
# "Your push was rejected because an LFS pointer pointed to a file that does not exist. Offending file: - NAME"
_LOST = re.compile(r"\b(LFS|object)\b.*\b(not exist|missing|not found)\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Push:
    """Where a model is to be published.

    Attributes:
        name: the repository, `org/name`, or `name` in the user's own namespace.
        private: make the repository private if it is made now.
        create_pr: open a pull request instead of committing to main.
        message: of the commit; one that names the model if None.
        only: delete each shard of the output once it is uploaded.
    """

    name: str
    private: bool = False
    create_pr: bool = False
    message: str | None = None
    only: bool = False


class Publisher:
    """Uploads an output directory; use as a context manager.

    Args:
        push: where to.
        directory: the output directory.
        digest: of the plan, so that an upload is never taken for another run's.
        shards: names of the output shards.
    """

    def __init__(self, push: Push, directory: Path, digest: str, shards: Iterable[str]) -> None:
        self.push = push
        self.directory = directory
        self.digest = digest
        self.shards = list(shards)
        self.repo = push.name
        self.records = directory / WORK / PUSHED
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._begun: set[str] = set()
        self._waiting: set[str] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._upload_all, name="openquant-upload", daemon=True)

    def prepare(self, source: str | None) -> None:
        """Make the repository if there is none, and make sure that we may write to it.

        Args:
            source: the repository that the model comes from, if it is known.

        Raises:
            PushError: we may not, or it holds weights that this model would not replace, or that it is made from.
        """
        from huggingface_hub import HfApi

        api = HfApi()
        with explained_push(self.repo):
            self.repo = patiently(
                lambda: api.create_repo(self.push.name, private=self.push.private or None, exist_ok=True).repo_id
            )
            patiently(lambda: api.auth_check(self.repo, write=not self.push.create_pr))
            present = patiently(lambda: api.list_repo_files(self.repo))
        if source is not None and self.repo.lower() == source.lower() and not self.push.create_pr:
            raise PushError(
                f"{self.repo} is what the model is made from, and would be replaced by it",
                "push to another repository, or open a pull request with --create-pr",
            )
        weights = (name for name in present if "/" not in name and name.endswith((".safetensors", ".index.json")))
        foreign = [name for name in weights if name not in {*self.shards, "model.safetensors.index.json"}]
        if self.shards == ["model.safetensors"] and "model.safetensors.index.json" in present:
            foreign.append("model.safetensors.index.json")
        if foreign:
            raise PushError(
                f"{self.repo} already holds {foreign[0]}, which this model would not replace",
                "push to another repository, or delete that file from this one first",
            )

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
        """Have a shard uploaded that stands under its final name."""
        with self._changed:
            if name in self._waiting:
                return
            self._waiting.add(name)
        self._queue.put(name)

    def wait_for_room(self, name: str, stopped: Callable[[], bool]) -> None:
        """Until an output shard may be begun, or the work has stopped.

        Raises:
            PushError: an upload failed.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
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
            while self._waiting and self._failure is None:
                self._changed.wait(0.2)
            if self._failure is not None:
                raise self._failure

    def finish(self, others: Iterable[str], title: str) -> str:
        """Upload what is left and commit everything; the address of the commit or pull request.

        Args:
            others: every file of the directory that is not a shard.
            title: the commit message, unless the user gave one.

        Raises:
            PushError: it could not be done.
        """
        for name in self.shards:
            self.finished(name)
        self.drain()
        title = self.push.message or title
        with explained_push(self.repo):
            revision = self._pull_request(title) if self.push.create_pr else None
            address = interruptible(
                lambda: patiently(lambda: self._commit(list(others), title, revision), passes=_passes)
            )
        if not self.push.only:
            self.forget()
        return address

    def _commit(self, others: list[str], title: str, revision: str | None) -> str:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import BadRequestError
        from huggingface_hub.hf_api import RepoFile

        api = HfApi()
        found = api.get_paths_info(self.repo, self.shards, revision=revision)
        present = {entry.path: entry.lfs.sha256 for entry in found if isinstance(entry, RepoFile) and entry.lfs}
        operations = [CommitOperationAdd(name, str(self.directory / name)) for name in others]
        for name in self.shards:
            record = self._record(name)
            if record is None:
                operations.append(CommitOperationAdd(name, str(self.directory / name)))
            elif present.get(name) != record["sha256"]:
                operations.append(_uploaded(name, record))
        try:
            # A second try leaves out what the first one committed, should only its answer have been lost.
            made = api.create_commit(self.repo, operations, commit_message=title, revision=revision)
        except BadRequestError as error:
            lost = self._lost(error.server_message or "")
            if not lost:
                raise
            for name in lost:
                self._record_path(name).unlink(missing_ok=True)
            raise PushError(
                f"{self.repo} no longer has what was uploaded of {lost[0]}: {told(error)}",
                "run the same command again: what the Hub lost is made and uploaded again",
            ) from None
        if revision is None:
            return str(made.commit_url)
        return f"{api.endpoint}/{self.repo}/discussions/{revision.rsplit('/', 1)[1]}"

    def _lost(self, why: str) -> list[str]:
        """The uploaded shards that the Hub has not, going by the reason it gives for refusing a commit.

        It drops uploads that no commit names after a while. No other reason is one to upload anything again.
        """
        if not _LOST.search(why):
            return []
        records = {name: record for name in self.shards if (record := self._record(name))}
        named = [name for name, record in records.items() if name in why or record["sha256"] in why]
        return named or list(records)

    def _pull_request(self, title: str) -> str:
        """The pull request's revision; opened once however often a push is taken up again, unless it was closed."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        api, record = HfApi(), self._record("")
        if record is not None:
            try:
                if api.get_discussion_details(self.repo, record["number"]).status not in ("open", "draft"):
                    record = None
            except HfHubHTTPError as error:
                if error.response.status_code != 404:
                    raise
                record = None
        if record is None:
            record = {"number": api.create_pull_request(self.repo, title).num}
            self._remember("", record)
        return f"refs/pr/{record['number']}"

    def _upload_all(self) -> None:
        try:
            while (name := self._queue.get()) is not None:
                self._upload(name)
                with self._changed:
                    self._waiting.discard(name)
                    self._begun.discard(name)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _upload(self, name: str) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        path = self.directory / name
        if self._record(name) is None:
            with explained_push(self.repo):
                operation = CommitOperationAdd(name, str(path))
                patiently(lambda: HfApi().preupload_lfs_files(self.repo, [operation], create_pr=self.push.create_pr))
                if not operation._is_uploaded:
                    return  # the Hub wants it as part of the commit
            info = operation.upload_info
            self._remember(name, {"size": info.size, "sha256": info.sha256.hex(), "sample": info.sample.hex()})
        if self.push.only:
            with explained(path, "removed"):
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
        with explained(path):
            self.records.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(record))
            os.replace(partial, path)

    def forget(self) -> None:
        """Take nothing for uploaded any more."""
        if self.records.exists():
            with explained(self.records, "removed"):
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
