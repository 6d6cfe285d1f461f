"""What the Hub and its client say when something fails, as the user is told of it: one line, and what to do."""

from __future__ import annotations

import json

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import hf_raise_for_status

from openquant.errors import OpenQuantError
from openquant.hub.error_mapping import push_errors, source_errors

COMMIT = "/api/models/org/name/commit/main"
AGAIN = "run the same command again: what is converted and uploaded is kept"
STORAGE = (
    "make room in that account or get it more storage (https://huggingface.co/settings/billing), then run the same "
    "command again: what is converted and uploaded is kept"
)
LOG_IN = "log in with a token that may (hf auth login), or push to a repository of your own"
PROXY = "<html><body>Blocked by the proxy</body></html>"


def refusal(status: int, body: str, path: str = COMMIT, kind: str = "application/json", **headers: str) -> Exception:
    """What the client makes of an answer."""
    request = httpx2.Request("POST", f"https://huggingface.co{path}?X-Amz-Signature=secret")
    named = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        hf_raise_for_status(httpx2.Response(status, headers=named, content=body.encode(), request=request), "commit")
    except HfHubHTTPError as error:
        return error
    raise AssertionError("it was no refusal")


def said(*messages: str) -> str:
    return json.dumps({"error": messages[0]} if len(messages) == 1 else {"errors": [{"message": m} for m in messages]})


PUSHES = [
    (refusal(400, said("storage limit reached")),
     f"org/name refuses what is sent: 400 for {COMMIT}: storage limit reached", STORAGE),
    (refusal(403, said("Private repository storage limit reached, please upgrade your plan.")),
     f"the Hub does not let you write to org/name: 403 for {COMMIT}: Private repository storage limit reached, "
     "please upgrade your plan.", STORAGE),
    (refusal(403, said("Forbidden: you must use a write token to upload to a repository.")),
     f"the Hub does not let you write to org/name: 403 for {COMMIT}: Forbidden: you must use a write token to "
     "upload to a repository.", LOG_IN),
    (refusal(401, said("Invalid username or password.")),
     f"the Hub does not let you write to org/name: 401 for {COMMIT}: Invalid username or password.", LOG_IN),
    (refusal(400, said('"license" must be one of [mit]', '"base_model[0]" is not a repository'),
             "/api/validate-yaml"),
     'org/name refuses what is sent: 400 for /api/validate-yaml: "license" must be one of [mit] "base_model[0]" is '
     "not a repository", f"see what the Hub says, then {AGAIN}"),
    (ValueError('Invalid metadata in README.md.\n- "license" must be one of [mit]'),
     'org/name could not be pushed to: Invalid metadata in README.md. - "license" must be one of [mit]',
     AGAIN),
    (refusal(503, "try\n\tlater \x1b[2J", kind="text/plain"),
     f"org/name could not be pushed to: 503 for {COMMIT}: try later [2J", AGAIN),
    (refusal(400, said("no" * 2000)),
     f"org/name refuses what is sent: {f'400 for {COMMIT}: ' + 'no' * 2000:.1000}...",
     f"see what the Hub says, then {AGAIN}"),
    (httpx2.ConnectError("refused: https://huggingface.co/lfs/0a1b?X-Amz-Signature=secret"),
     "the Hub cannot be reached for org/name: refused: https://huggingface.co/lfs/0a1b", f"check the network, then {AGAIN}"),
    (LocalTokenNotFoundError("Token is required"),
     "the Hub does not let you write to org/name: no token was found", LOG_IN),
    (OfflineModeIsEnabled("offline"), "org/name cannot be reached: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
]  # fmt: skip


def test_what_a_push_meets(subtests: pytest.Subtests) -> None:
    for error, message, hint in PUSHES:
        with subtests.test(error=error, message=message, hint=hint):
            with pytest.raises(OpenQuantError) as raised, push_errors("org/name"):
                raise error
            assert (raised.value.message, raised.value.hint) == (message, hint)
            assert "secret" not in message


def test_what_an_upload_meets_is_its_cause() -> None:
    with pytest.raises(OpenQuantError) as raised, push_errors("org/name"):
        raise RuntimeError("Error while uploading 'a.safetensors' to the Hub.") from refusal(413, said("Too large"))
    assert raised.value.message == f"org/name could not be pushed to: 413 for {COMMIT}: Too large"


FILE = "/org/name/resolve/0a1b/model-00001-of-00002.safetensors"


DOWNLOADS = [
    (refusal(404, "Entry not found", FILE, "text/plain", X_Error_Code="EntryNotFound"),
     f"org/name@main could not be downloaded: 404 for {FILE}: Entry not found"),
    (refusal(404, PROXY, FILE, "text/html"), f"org/name@main could not be downloaded: 404 for {FILE}: Not Found"),
    (refusal(403, said("The account is suspended"), FILE),
     f"the Hub refuses access to org/name@main: 403 for {FILE}: The account is suspended"),
    (refusal(503, "", FILE), f"org/name@main could not be downloaded: 503 for {FILE}: Service Unavailable"),
]  # fmt: skip


def test_what_a_download_meets(subtests: pytest.Subtests) -> None:
    for error, message in DOWNLOADS:
        with subtests.test(error=error, message=message):
            with pytest.raises(OpenQuantError) as raised, source_errors("org/name", "main"):
                raise error
            assert raised.value.message == message


def test_an_error_of_ours_stays_what_it_is() -> None:
    ours = OpenQuantError("what", "why")
    for explained in (push_errors("org/name"), source_errors("org/name", None)):
        with pytest.raises(OpenQuantError) as raised, explained:
            raise ours
        assert raised.value is ours
