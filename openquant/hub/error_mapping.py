"""Turns exceptions of huggingface_hub into OpenQuantErrors that have the server's reason and a hint.

The client's messages have several lines, of which only the last are the server's, and some say only that something
failed. Downloads and uploads both use these functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import unquote

from ..errors import OpenQuantError, OutputError, SourceError, UsageError

# A URL with a query, which may contain a signature.
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
# Characters of a reason. Enough for every field of a model card that can be wrong.
_LONGEST = 1000
_LOG_IN_HINT = "log in with a token that may (hf auth login), or push to a repository of your own"
WRITE_TOKEN_HINT = "use a token with write permission (https://huggingface.co/settings/tokens): hf auth login"

# The server's reason when an account is full, which no login changes.
_FULL = re.compile(r"storage.{0,40}limit|limit.{0,40}storage|storage.{0,40}quota", re.IGNORECASE)
_FULL_HINT = (
    "make room in that account or get it more storage (https://huggingface.co/settings/billing), then run the same "
    "command again: what is converted and uploaded is kept"
)


class Unreachable(SourceError):
    """The Hub could not be reached or was too busy. A retry may help."""


class NotFound(SourceError):
    """There is no such directory or repository."""


class PushError(OutputError):
    """The model could not be published; what is converted and uploaded so far is kept."""


def root_cause(error: BaseException) -> BaseException:
    """Return the cause of an exception of huggingface_hub that only says that something failed; else the exception.

    Args:
        error: an exception that the client raised.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    # A failed metadata request is raised as LocalEntryNotFoundError, a failed upload as RuntimeError.
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)) and error.__cause__ is not None:
        return root_cause(error.__cause__)
    return error


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the server's response, such as 404; None if there was no response.

    Args:
        error: an exception that huggingface_hub raised.
    """
    from huggingface_hub.errors import HfHubHTTPError

    cause = root_cause(error)
    if not isinstance(cause, HfHubHTTPError):
        return None
    return cause.response.status_code


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may help.

    It may for status 408, 429 or 5xx, for an error of the HTTP library, such as a lost connection or a timeout, for a
    download of the wrong size, and for Unreachable. It does not for an address that is not valid, nor if HF_HUB_OFFLINE
    is set.

    Args:
        error: an exception that huggingface_hub, its HTTP library or this room raised; its cause counts if it only says
            that something failed.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = root_cause(error)
    if isinstance(error, Unreachable):
        return True
    if isinstance(error, OfflineModeIsEnabled) or type(error).__name__ in ("UnsupportedProtocol", "InvalidURL"):
        return False
    status = status_of(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    # The client does not wrap the errors of its HTTP library (httpx in huggingface_hub 1.x, httpx2 since).
    return type(error).__module__.startswith("httpx") or "Consistency check failed" in str(error)


def is_offline(error: BaseException) -> bool:
    """Return whether an error means that the Hub cannot be reached, or that HF_HUB_OFFLINE is set.

    Args:
        error: an exception that huggingface_hub or its HTTP library raised; its cause is not looked at.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled) or type(error).__module__.startswith("httpx")


def without_queries(text: str) -> str:
    """Return a text without the queries ("?..") of its URLs, which may contain signatures.

    Args:
        text: any text, such as an error's message.
    """
    return _QUERY.sub(r"\1", text)


def error_reason(error: BaseException) -> str:
    """Return an error's reason in one line, without the queries of URLs.

    Args:
        error: an exception that huggingface_hub raised.

    Returns:
        For an HTTP error the status, the path of the request, and the server's reason; else the error's message.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        path = unquote(error.response.request.url.path)
        # The standard phrase for the status if the server gave no reason.
        reason = error.server_message or error.response.reason_phrase or "no reason given"
        text = f"{error.response.status_code} for {path}: {reason}"
    else:
        text = str(error).strip() or type(error).__name__
    text = without_queries(text)
    # Control characters could change the terminal.
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if len(line) > _LONGEST:
        return f"{line[:_LONGEST]}..."
    return line


@contextmanager
def _raised_as(explain: Callable[[Exception], OpenQuantError | None]) -> Iterator[None]:
    """In the `with` block, raise what `explain` makes of an exception; where that is None, the exception itself."""
    try:
        yield
    except OpenQuantError:
        raise
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from None


def source_errors(repo: str, revision: str | None) -> AbstractContextManager[None]:
    """Raise exceptions of huggingface_hub in the `with` block as SourceError with a hint.

    Args:
        repo: the repository.
        revision: the branch, tag or commit; None for the main branch.

    Raises:
        NotFound: there is no such repository.
        Unreachable: the Hub cannot be reached, or is too busy.
        SourceError: anything else went wrong.
    """
    return _raised_as(lambda error: _missing(error, repo, revision) or _source_error(error, repo, revision))


def push_errors(repo: str) -> AbstractContextManager[None]:
    """Raise exceptions of huggingface_hub in the `with` block as PushError with a hint.

    Args:
        repo: the repository.

    Raises:
        PushError: the client or the server refused something.
        UsageError: the repository has no valid id.
    """
    return _raised_as(lambda error: _push_error(error, repo))


def _missing(error: Exception, repo: str, revision: str | None) -> SourceError | None:
    """What to raise if the client knows that there is no such repository or revision, or no access; else None."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, HFValidationError):
        address = re.search(r"(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/|api/)([\w.-]+/[\w.-]+)", repo)
        hint = f"did you mean {address[1]}?" if address else "check the path"
        return NotFound(f"{repo} does not exist, and is no Hub repository id either", hint)

    if isinstance(root_cause(error), GatedRepoError):
        return SourceError(
            f"{repo} is gated", f"accept its licence at https://huggingface.co/{repo}, then run: hf auth login"
        )

    if isinstance(error, RevisionNotFoundError):
        return SourceError(f"{repo} has no revision {revision}", "check the branch, tag or commit")

    if isinstance(error, RepositoryNotFoundError):
        return NotFound(
            f"{repo} is neither a local directory nor a repository on the Hub",
            "check the name; for a private repository run: hf auth login",
        )
    return None


def _source_error(error: Exception, repo: str, revision: str | None) -> SourceError:
    """What to raise if a download failed in another way."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    name = f"{repo}@{revision}" if revision else repo
    cause = root_cause(error)
    status = status_of(cause)
    if status in (401, 403):
        return SourceError(
            f"the Hub refuses access to {name}: {error_reason(cause)}",
            "log in with a token that may read it: hf auth login",
        )

    unreachable = isinstance(error, LocalEntryNotFoundError) and status is None
    if unreachable or isinstance(error, OfflineModeIsEnabled):
        raised = Unreachable if is_transient(error) else SourceError
        return raised(
            f"{name} is not a local directory, and the Hub cannot be reached for it",
            "check the path and the network; HF_HUB_OFFLINE=1 uses only what is in the cache",
        )

    reason = error_reason(cause)
    if is_transient(cause) or (status is None and isinstance(cause, OSError)):
        raised = Unreachable if is_transient(cause) else SourceError
        return raised(f"{name} could not be downloaded: {reason}", "run the same command again: it continues")

    kind = f"{type(cause).__name__}: "
    if status is not None:
        kind = ""
    return SourceError(
        f"{name} could not be downloaded: {kind}{reason}",
        "check HF_ENDPOINT, if it is set, and whether the repository is sound",
    )


def _push_error(error: Exception, repo: str) -> OpenQuantError | None:
    """What to raise if a push failed; None if the exception is none of the client's."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, HFValidationError):
        return UsageError(f"{repo} is no repository id: {error_reason(error)}", "write org/name")
    if isinstance(error, LocalTokenNotFoundError):
        return PushError(f"the Hub does not let you write to {repo}: no token was found", _LOG_IN_HINT)
    if isinstance(error, OfflineModeIsEnabled):
        return PushError(f"{repo} cannot be reached: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")

    cause = root_cause(error)
    status = status_of(cause)
    reason = error_reason(cause)
    kept = "run the same command again: what is converted and uploaded is kept"

    hint = None
    if _FULL.search(reason):
        hint = _FULL_HINT

    if isinstance(cause, RepositoryNotFoundError) or status in (401, 402, 403):
        return PushError(f"the Hub does not let you write to {repo}: {reason}", hint or _LOG_IN_HINT)
    if status == 400:
        return PushError(f"{repo} refuses what is sent: {reason}", hint or f"see what the Hub says, then {kept}")
    if is_offline(cause):
        return PushError(f"the Hub cannot be reached for {repo}: {reason}", f"check the network, then {kept}")
    if is_transient(cause) or isinstance(cause, (OSError, ValueError, KeyError, TypeError, RuntimeError)):
        return PushError(f"{repo} could not be pushed to: {reason}", hint or kept)
    return None
