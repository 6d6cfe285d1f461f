"""What huggingface_hub raises, as errors that keep the server's own reason and say what to do about it.

The client's texts have several lines, of which the last ones are the server's, and some of its errors only say that
something failed. Both sides, downloads and uploads, go through the same few functions here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from ..errors import OpenQuantError, OutputError, SourceError, UsageError

# An address and its query, which may be a signature.
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
# Of an error in XML, as object stores answer; the rest of it may hold what was signed.
_XML = re.compile(
    r"(<\?xml[^>]*>\s*)?<Error>.*?<Code>(?P<code>[^<]*)</Code>(?:.*?<Message>(?P<message>[^<]*)</Message>)?.*",
    re.DOTALL,
)
# Enough for every field that a card can have wrong.
_LONGEST = 1000
_LOG_IN = "log in with a token that may: hf auth login"
USE_A_TOKEN = "use a token with write permission (https://huggingface.co/settings/tokens): hf auth login"
MEND_THE_CARD = "correct these entries at the top of README.md, of the source if the model is still to be converted"

# What the server's own words call for, whatever the status; the first that matches counts.
_ADVICE = tuple(
    (re.compile(words, re.IGNORECASE | re.DOTALL), hint)
    for words, hint in (
        (
            r"storage.{0,40}(limit|quota|exceed|pattern|full)|(limit|quota|exceed).{0,40}storage|payment required",
            "make room in that account or get it more storage (https://huggingface.co/settings/billing), then run the "
            "same command again: what is converted and uploaded is kept",
        ),
        (
            r"(discussions?|pull requests?).{0,40}disabled",
            "turn discussions on in the repository's settings, or push without --create-pr",
        ),
        (
            r"read[- ]?only token|token.{0,40}read[- ]?only|write token|token.{0,80}(permission|scope)|"
            r"(required|necessary|sufficient) permissions",
            USE_A_TOKEN,
        ),
        (
            r"metadata.{0,40}README|README.{0,40}metadata",
            MEND_THE_CARD,
        ),
    )
)


class Unreachable(SourceError):
    """The Hub could not be reached or was too busy: worth another try."""


class PushError(OutputError):
    """The model could not be published; what is converted and uploaded so far is kept."""


def reason(error: BaseException) -> BaseException:
    """The error that caused one of huggingface_hub's which only says that something failed; else that one itself."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Trouble with the first question about a file comes as "not in the cache", that with an upload as a RuntimeError.
    if isinstance(error, (LocalEntryNotFoundError, RuntimeError)) and error.__cause__ is not None:
        return reason(error.__cause__)
    return error


def status_of(error: BaseException) -> int | None:
    """The status of the server's answer, None if it gave none."""
    from huggingface_hub.errors import HfHubHTTPError

    cause = reason(error)
    return cause.response.status_code if isinstance(cause, HfHubHTTPError) else None


def is_transient(error: BaseException) -> bool:
    """Whether an error may be gone a moment later: no connection, a timeout, 408, 429, 5xx."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = reason(error)
    if isinstance(error, Unreachable):
        return True
    if isinstance(error, OfflineModeIsEnabled) or type(error).__name__ in ("UnsupportedProtocol", "InvalidURL"):
        return False
    status = status_of(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    # The client's HTTP library (httpx in huggingface_hub 1.x, httpx2 since) lets its own errors through.
    return type(error).__module__.startswith("httpx") or "Consistency check failed" in str(error)


def is_offline(error: BaseException) -> bool:
    """Whether an error says that the Hub cannot be reached, or must not."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled) or type(error).__module__.startswith("httpx")


def without_queries(text: str) -> str:
    """A text whose addresses have lost their queries, which may hold signatures."""
    return _QUERY.sub(r"\1", text)


def error_reason(error: BaseException) -> str:
    """What an error says, in one line: of the server's answer its status, what was asked for and the server's reason.

    Addresses have no queries.
    """
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        asked = unquote(error.response.request.url.path)
        text = f"{error.response.status_code} for {asked}: {_server_s(error)}"
    else:
        text = str(error).strip() or type(error).__name__
    text = without_queries(_XML.sub(_from_xml, text))
    # What a terminal would obey is no reason.
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _server_s(error: BaseException) -> str:
    """The reason that a server gave; what the client makes of the status if it gave none."""
    given = getattr(error, "server_message", None)
    if given:
        return str(given)
    response = getattr(error, "response", None)
    return getattr(response, "reason_phrase", "") or "no reason given"


def _from_xml(found: re.Match[str]) -> str:
    return ": ".join(filter(None, (found["code"], found["message"])))


def advice(error: BaseException, otherwise: str) -> str:
    """What to do about an error: what the server's words call for, else `otherwise`."""
    # The client's own words guess at permissions whatever the reason is.
    words = str(error) if status_of(error) is None else _server_s(error)
    return next((hint for pattern, hint in _ADVICE if pattern.search(words)), otherwise)


@contextmanager
def source_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises about a source into a SourceError that says what to do."""
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
    except OpenQuantError:
        raise
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
        cause = reason(error)
        status = status_of(cause)
        if isinstance(cause, GatedRepoError) or status in (401, 403):
            raise SourceError(
                f"the Hub refuses access to {at}: {error_reason(cause)}",
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
                f"{at} could not be downloaded: {error_reason(cause)}", "run the same command again: it continues"
            ) from None
        if status is not None:
            raise SourceError(
                f"{at} could not be downloaded: {error_reason(cause)}",
                advice(cause, "check HF_ENDPOINT, if it is set, and whether the repository is sound"),
            ) from None
        if isinstance(cause, OSError):
            raise SourceError(
                f"{at} could not be downloaded: {error_reason(cause)}", "run the same command again: it continues"
            ) from None
        raise SourceError(
            f"{at} could not be downloaded: {type(cause).__name__}: {error_reason(cause)}",
            "check HF_ENDPOINT, if it is set, and whether the repository is sound",
        ) from None


@contextmanager
def push_errors(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises about a repository to push to into a PushError that says what to do."""
    from huggingface_hub.errors import (
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    kept = "run the same command again: what is converted and uploaded is kept"
    try:
        yield
    except OpenQuantError:
        raise
    except HFValidationError as error:
        raise UsageError(f"{repo} is no repository id: {error_reason(error)}", "write org/name") from None
    except LocalTokenNotFoundError:
        raise PushError(f"the Hub does not let you write to {repo}: no token was found", _LOG_IN) from None
    except OfflineModeIsEnabled:
        raise PushError(f"{repo} cannot be reached: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE") from None
    except Exception as error:
        cause = reason(error)
        status = status_of(cause)
        if isinstance(cause, RepositoryNotFoundError) or status in (401, 402, 403):
            raise PushError(
                f"the Hub does not let you write to {repo}: {error_reason(cause)}",
                advice(cause, _LOG_IN),
            ) from None
        if status == 400:
            raise PushError(
                f"{repo} refuses what is sent: {error_reason(cause)}",
                advice(cause, f"see what the Hub says, then {kept}"),
            ) from None
        if is_transient(cause) or isinstance(cause, (OSError, ValueError, KeyError, TypeError, RuntimeError)):
            raise PushError(f"{repo} could not be pushed to: {error_reason(cause)}", advice(cause, kept)) from None
        raise
