"""Publishes an output on the Hub: checks before, uploads shards as they are finished, and commits all files at the end.

The checks are those that may end a push: the user's token and permissions, the repository's name, and what it already
holds. They run before anything is converted, and change nothing on the Hub.

Until the commit the repository shows none of the files, so it never holds half a model. A push that is run again
uploads
only what the Hub does not have. With --push-only an uploaded shard is deleted, and a record of its upload in the
output's work directory takes its place, so that it need not be made again for the commit.

All that ask the Hub try again after an error that may pass (`with_retries`). Besides the errors that are named, they
raise those of huggingface_hub, which callers convert with `push_errors`.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..files import model_files
from ..files.cards import base_models, published_card
from ..files.checkpoint import read_json
from ..files.destination import PUSHED, WORK, output_errors
from ..formats.quantization import quantization_places
from ..options import Push
from ..threads import FirstFailure
from ..version import __version__
from .error_mapping import WRITE_TOKEN_HINT, PushError, error_reason, is_transient, push_errors, status_of
from .source import interruptible, with_retries

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo
    from huggingface_hub.lfs import UploadInfo


# With --push-only, the number of output shards that are on disk at a time, being made or uploaded.
AT_ONCE = 3
# "Your push was rejected because an LFS pointer pointed to a file that does not exist. Offending file: - NAME"
_LOST = re.compile(r"\b(LFS|object)\b.*\b(not exist|missing|not found)\b", re.IGNORECASE | re.DOTALL)
# Characters that the title of a pull request may have.
LONGEST_TITLE = 200


def _hub() -> HfApi:
    """The Hub. Its client takes as long to import as converting a small model."""
    from huggingface_hub import HfApi

    return HfApi()


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
        complete: makes the published model card from the directory's card and the repository's name, "org/name" or
            "org/name@refs/pr/1"; None to publish the directory's card.
        private: whether a repository that is created is private, as asked for or as a base model of the card is; known
            after `prepare`.
    """

    def __init__(
        self, push: Push, directory: Path, digest: str, shards: Iterable[str], revision: str | None = None
    ) -> None:
        from huggingface_hub.utils import validate_repo_id

        self.push = push
        self.private = push.private
        self.revision = revision
        self.complete: Callable[[str, str], str] | None = None
        self.directory = directory
        self.digest = digest
        self.shards = list(shards)
        self.repo = push.name
        with push_errors(self.repo):
            validate_repo_id(self.repo)
        self.records = directory / WORK / PUSHED

        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # With --push-only, the shards that are being made or uploaded. Shards that wait for their upload or are in it.
        self._in_progress: set[str] = set()
        self._pending: set[str] = set()
        # Size and digest of each shard that is uploaded, without those that the Hub wants as part of the commit.
        self._uploaded: dict[str, UploadInfo] = {}

        self._changed = threading.Condition()
        self._failure = FirstFailure(self._changed)
        self._thread = threading.Thread(target=self._upload_all, name="openquant-upload", daemon=True)

    def prepare(self, card: bytes, creates: bool = True) -> list[str] | None:
        """Run the preflight checks, and create the repository if there is none. `repo` is then its current full name.

        Args:
            card: the output's README.md; empty while it is not known.
            creates: False to change nothing on the Hub, before hours of work.

        Returns:
            The names of the repository's files; None if there was none.

        Raises:
            PushError: the user may not write there, or the repository holds weights that the model would not replace,
                or that it must not replace.
            UsageError: the repository's name is not valid.
            SourceError: weights of the repository cannot be read.
        """
        text = card.decode("utf-8", "replace")
        repository = self.find()
        with push_errors(self.repo):
            if repository is not None and self.push.private and repository.private is False:
                raise PushError(
                    f"{self.repo} exists and is public, so what --private asks for is not the case",
                    "make it private in its settings on the Hub, or leave --private out",
                )
            if repository is None:
                self.private = self.push.private or has_private_base(text)
                if not creates:
                    return None

                # If it need not be private, the organization's default counts.
                private = self.private or None
                created = with_retries(lambda: _hub().create_repo(self.repo, private=private, exist_ok=True))
                self.repo = created.repo_id

            # A pull request also takes commits of its author.
            is_request = self.push.create_pr or (self.revision or "").startswith("refs/pr/")
            with_retries(lambda: _hub().auth_check(self.repo, write=not is_request))
            if self.push.create_pr:
                # This fails if discussions, and so pull requests, are disabled.
                with_retries(lambda: next(iter(_hub().get_repo_discussions(self.repo)), None))

            if repository is not None and self.shards:
                refuse_foreign_weights(repository, self.shards)
                if not (self.push.create_pr or self.push.replace_weights):
                    if repository.id.lower() in map(str.lower, base_models(text)):
                        raise PushError(
                            f"{repository.id} is what the model is made from, and would be replaced by it",
                            OTHER_REPOSITORY_HINT,
                        )
                    protect_unquantized(repository, self.shards, self._is_ours)

        if repository is None:
            return None
        return [file.rfilename for file in repository.siblings or ()]

    def find(self) -> ModelInfo | None:
        """Look for the repository; `repo` is then its current full name.

        Returns:
            The Hub's information on it; None if there is none.

        Raises:
            PushError: the user is not logged in, or may not read it.
            UsageError: its name is not valid.
        """
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with push_errors(self.repo):
            user = user_name(self.repo)
            if "/" not in self.repo:
                self.repo = f"{user}/{self.repo}"
            try:
                repository = with_retries(lambda: _hub().model_info(self.repo, files_metadata=True))
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None

        # The current name, if it was renamed or has other capital letters.
        self.repo = repository.id
        return repository

    def _is_ours(self, name: str, sha256: str) -> bool:
        """Whether a shard on the Hub with this digest is the one to push."""
        path = self.directory / name
        if path.is_file():
            with output_errors(path, "read"):
                return model_files.file_sha256(path, name) == sha256
        record = self._record(name)
        return record is not None and record.sha256.hex() == sha256

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.put(None)
        # After a failure or Ctrl-C, do not wait for the current upload. The next run repeats it.
        self._thread.join(None if exception[0] is None else 0.1)

    def uploaded_shards(self) -> set[str]:
        """Return the shards that are uploaded and need not be on disk; none without --push-only."""
        if not self.push.only:
            return set()
        return {name for name in self.shards if self._record(name) is not None}

    def begin_upload(self, name: str) -> None:
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

    def wait_for_uploads(self) -> None:
        """Wait until all uploads are done.

        Raises:
            OutputError: an upload failed (PushError), or the record of one cannot be written.
        """
        with self._changed:
            while self._pending and not self._failure:
                self._changed.wait(0.2)
            self._failure.check()

    def commit(self, others: Iterable[str], title: str) -> Published:
        """Upload the remaining shards and commit all files. Call it inside the context, after `prepare`.

        Args:
            others: names of all files to publish that are not shards, relative to the directory.
            title: the message of the commit or pull request, unless the user gave one.

        Returns:
            Where the model was published.

        Raises:
            OutputError: an upload or the commit failed (PushError), or a file cannot be read.
        """
        for name in self.shards:
            self.begin_upload(name)
        self.wait_for_uploads()

        title = self.push.message or title
        names = list(others)
        with push_errors(self.repo):
            if self.push.create_pr:
                return self._commit_to_request(names, title)
            address = self._commit(names, title, self.revision)
        return Published(self.repo, address, self.revision)

    def _commit_to_request(self, others: list[str], title: str) -> Published:
        """Open a pull request, and commit all files to it."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError

        title_on_hub = title.strip()[:LONGEST_TITLE]
        description = f"Made with openquant {__version__}."
        request = with_retries(lambda: _hub().create_pull_request(self.repo, title_on_hub, description=description))
        revision = f"refs/pr/{request.num}"
        self._commit(others, title, revision)

        # It is a draft, which the Hub does not merge. If this is refused, the request's page has a button for it.
        with suppress(HfHubHTTPError):
            _hub().change_discussion_status(self.repo, request.num, "open")
        return Published(self.repo, f"{constants.ENDPOINT}/{self.repo}/discussions/{request.num}", revision)

    def _commit(self, others: list[str], title: str, revision: str | None) -> str:
        """Commit all files, except shards that the revision already has, and return the commit's URL."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import BadRequestError

        def try_commit() -> str:
            # If only the response to the first try was lost, the second leaves out the shards that it committed.
            missing = self._missing_shards(revision)
            operations: list[Any] = [CommitOperationAdd(name, self._content(name, revision)) for name in others]
            operations += map(CommitOperationDelete, self._outdated_evaluation(others, missing, revision))
            operations += [self._shard_operation(name) for name in missing]
            return str(_hub().create_commit(self.repo, operations, commit_message=title, revision=revision).commit_url)

        try:
            return interruptible(lambda: with_retries(try_commit, is_retryable=_is_retryable))
        except BadRequestError as error:
            # After a while the Hub drops uploads that no commit uses.
            if not self.shards or not _LOST.search(error.server_message or ""):
                raise
            self.forget_uploads()
            raise PushError(
                f"{self.repo} no longer has all uploads: {error_reason(error)}",
                "run the same command again: what the Hub lost is made and uploaded again",
            ) from None

    def _outdated_evaluation(self, others: Sequence[str], missing: list[str], revision: str | None) -> list[str]:
        """Files that an earlier evaluation left in a revision, and that do not measure what is committed now."""
        if not self.shards or not (missing or model_files.EVAL_FILE in others):
            return []
        names = [name for name in model_files.EVALUATION_FILES if name not in others]
        return sorted(entry.path for entry in _hub().get_paths_info(self.repo, names, revision=revision))

    def _content(self, name: str, revision: str | None) -> str | bytes:
        """The path of a file to commit, or the contents of the model card."""
        path = self.directory / name
        if name != model_files.CARD_FILE:
            return str(path)

        with output_errors(path, "read"):
            card = model_files.read_small(path, name)
        try:
            text = card.decode()
        except UnicodeDecodeError:
            return card

        # Figures alone in a pull request of their own are of the model on main.
        branch = revision if self.shards else self.revision
        named = "@".join(filter(None, [self.repo, branch]))
        if self.shards:
            text = published_card(text, self.repo, revision)
        if self.complete:
            text = self.complete(text, named)
        return text.encode()

    def _missing_shards(self, revision: str | None) -> list[str]:
        """The shards that a revision lacks, or has with other contents."""
        from huggingface_hub.hf_api import RepoFile

        if not self.shards:
            return []

        entries = _hub().get_paths_info(self.repo, self.shards, revision=revision)
        present = {entry.path: entry.lfs.sha256 for entry in entries if isinstance(entry, RepoFile) and entry.lfs}
        uploaded = {name: info.sha256.hex() for name, info in self._uploaded.items()}
        return [name for name in self.shards if name not in uploaded or present.get(name) != uploaded[name]]

    def _shard_operation(self, name: str) -> CommitOperationAdd:
        """The operation that commits a shard. An uploaded one need not be on disk."""
        from huggingface_hub import CommitOperationAdd

        info = self._uploaded.get(name)
        if info is None:
            return CommitOperationAdd(name, str(self.directory / name))

        # The fields that preupload_lfs_files sets (huggingface_hub 2.4, hf_api.py:5415). There is no public way.
        operation = CommitOperationAdd(name, b"")
        operation.upload_info = info
        operation._upload_mode = "lfs"
        operation._is_uploaded = True
        return operation

    def _upload_all(self) -> None:
        with self._failure.catch():
            while (name := self._queue.get()) is not None:
                self._upload(name)
                with self._changed:
                    self._pending.discard(name)
                    self._in_progress.discard(name)
                    self._changed.notify_all()

    def _upload(self, name: str) -> None:
        """Upload a shard; with --push-only, write a record of that and delete the shard."""
        from huggingface_hub import CommitOperationAdd

        if name in self._uploaded:
            return
        path = self.directory / name
        record = self._record(name)
        if record is not None and not path.exists():
            self._uploaded[name] = record
            return

        with push_errors(self.repo):
            operation = CommitOperationAdd(name, str(path))
            with_retries(lambda: _hub().preupload_lfs_files(self.repo, [operation], create_pr=self.push.create_pr))
        if not operation._is_uploaded:
            # The Hub wants a small file to be part of the commit.
            return

        self._uploaded[name] = operation.upload_info
        if self.push.only:
            self._write_record(name, operation.upload_info)
            with output_errors(path, "removed"):
                path.unlink(missing_ok=True)

    def _record_path(self, name: str) -> Path:
        return self.records / hashlib.sha256(f"{self.digest} {self.push.name} {name}".encode()).hexdigest()[:24]

    def _record(self, name: str) -> UploadInfo | None:
        """The record of the upload of a shard; None if there is none, or it is damaged."""
        from huggingface_hub.lfs import UploadInfo

        try:
            record = model_files.parse_json(model_files.read_small(self._record_path(name), name), name)
            digest = bytes.fromhex(record["sha256"])
            return UploadInfo(sha256=digest, size=record["size"], sample=bytes.fromhex(record["sample"]))
        except (FileNotFoundError, SourceError, KeyError, TypeError, ValueError):
            return None

    def _write_record(self, name: str, info: UploadInfo) -> None:
        record = {"size": info.size, "sha256": info.sha256.hex(), "sample": info.sample.hex()}
        path = self._record_path(name)
        with output_errors(path):
            self.records.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(record))
            partial.replace(path)

    def forget_uploads(self) -> None:
        """Remove all records of uploads, so that every shard that is not on disk counts as not made."""
        if self.records.exists():
            with output_errors(self.records, "removed"):
                shutil.rmtree(self.records)
            with suppress(OSError):
                # It is not empty if a run still uses it.
                self.records.parent.rmdir()


def _is_retryable(error: BaseException) -> bool:
    """Whether a refused commit may succeed on a retry: another commit was in progress, or came before it."""
    return status_of(error) in (409, 412) or is_transient(error)


OTHER_REPOSITORY_HINT = (
    "push to another repository, open a pull request with --create-pr, or insist with --replace-weights"
)


def user_name(repo: str) -> str:
    """Return the name of the user who is logged in to the Hub.

    Raises:
        PushError: the token is read-only; the message names the repository to push to.
    """
    user = with_retries(_hub().whoami)
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise PushError(f"{repo} cannot be written to: the token of {user['name']} is read-only", WRITE_TOKEN_HINT)
    return str(user["name"])


def has_private_base(card: str) -> bool:
    """Return whether the Hub has a base model of a card as a private repository.

    Args:
        card: the text of README.md.

    Raises:
        HfHubHTTPError: the Hub cannot be asked.
    """
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    for name in base_models(card):
        with suppress(HFValidationError, RepositoryNotFoundError):
            if with_retries(partial(_hub().model_info, name)).private:
                return True
    return False


def refuse_foreign_weights(repository: ModelInfo, shards: Sequence[str]) -> None:
    """Refuse a repository in which weight files of another model would stay beside the pushed shards.

    Only files outside of directories count. Nothing is asked of the Hub.

    Args:
        repository: the Hub's information on the repository to push to.
        shards: file names of the shards to push.

    Raises:
        PushError: such files exist.
    """
    present = [file.rfilename for file in repository.siblings or ()]
    weights = (name for name in present if "/" not in name and name.endswith((".safetensors", ".index.json")))
    # With an index engines tell an adapter of the model from its weights.
    beside_index = [name for name in present if model_files.INDEX_FILE in present and model_files.is_adapter(name)]
    foreign = [name for name in weights if name not in {*shards, model_files.INDEX_FILE, *beside_index}]
    if shards == [model_files.SINGLE_FILE] and model_files.INDEX_FILE in present:
        foreign.append(model_files.INDEX_FILE)
    if foreign:
        raise PushError(
            f"{repository.id} already holds {foreign[0]}, which would be left beside this model's shards",
            "push to another repository, or delete that file from this one first",
        )


def protect_unquantized(repository: ModelInfo, shards: Iterable[str], is_ours: Callable[[str, str], bool]) -> None:
    """Refuse a push that would replace an unquantized model.

    Args:
        repository: the Hub's information on the repository to push to.
        shards: file names of the shards to push.
        is_ours: given file name and digest (SHA-256, hexadecimal) of a shard in the repository, returns whether it is
            the shard to push.

    Raises:
        PushError: the config of the repository says nothing of quantization, and its shards are not those to push.
        SourceError: its config cannot be read.
    """
    from huggingface_hub import hf_hub_download

    present = {file.rfilename: file for file in repository.siblings or ()}
    replaced = [present[name] for name in shards if name in present]
    others = [file for file in replaced if not is_ours(file.rfilename, file.lfs.sha256 if file.lfs else "")]
    if not others or "config.json" not in present:
        return

    config = with_retries(lambda: hf_hub_download(repository.id, "config.json", revision=repository.sha))
    if not quantization_places(read_json(Path(config), "config.json")):
        raise PushError(
            f"{repository.id} holds unquantized weights ({others[0].rfilename}), which this model would replace",
            OTHER_REPOSITORY_HINT,
        )
