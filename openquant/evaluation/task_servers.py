"""Has running servers generate the answers to tasks, by OpenAI's API, as `vllm serve` offers it.

Each model is served by a server of its own, which says at /v1/models what it serves. Answers are greedy.

    served = find_servers(["http://127.0.0.1:8000", "http://127.0.0.1:8001"], [source, output])
    generate_texts(served, tasks.generations, advanced=print)      # the texts of source and output
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import BaseHandler, HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from ..data.questions import GenerationRequest
from ..errors import SourceError, UsageError
from ..files.small_files import parse_json, short_repr
from ..hub.source import Source
from ..threads import in_parallel

# Requests that a server has at a time, as a batch.
CONCURRENT = 32
# Seconds for a list of models, and for an answer; bytes of either.
_LIST_SECONDS, _ANSWER_SECONDS, _MAX_BYTES = 30.0, 1800.0, 16 << 20
# Seconds before a request is sent again, if the connection breaks or the server is busy; and the statuses that say so.
_WAITS, _BUSY = (1.0, 2.0, 4.0), (429, 502, 503, 504)
# The environment variable with the key of the servers.
KEY_VARIABLE = "OPENAI_API_KEY"
# Models of a server that a message names.
_NAMED = 5
_SERVER_HINT = "see the log of that server"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ModelOnServer:
    """A model that a server has.

    Attributes:
        url: the server's URL, without /v1.
        name: the model's name in requests.
        root: the directory or repository that the server loaded; the same as the name if the server does not say it.
    """

    url: str
    name: str
    root: str


def find_servers(urls: Sequence[str], models: Sequence[Source]) -> list[ModelOnServer]:
    """Ask servers what they serve, and find the server of each model.

    Args:
        urls: URLs of the servers, as `Evaluate.server` has them.
        models: the source and the outputs.

    Returns:
        For each model what serves it.

    Raises:
        SourceError: a server cannot be reached, or its answer is none of OpenAI's API.
        UsageError: a model is served by none or by several of the servers, or a server serves none of the models.
    """
    served = {url: _list_models(url) for url in urls}
    found = [_find(model, [model for of_url in served.values() for model in of_url]) for model in models]
    listed = "; ".join(f"{url} serves {_names(of_url)}" for url, of_url in served.items())
    for model, matching in zip(models, found, strict=True):
        name = model.repo or model.name
        if not matching:
            raise UsageError(
                f"no --server serves {name}: {listed}", f"start `vllm serve` for {name} too, and give its URL"
            )
        if len({entry.url for entry in matching}) > 1:
            raise UsageError(f"several servers serve {name}: {listed}", "give one server for each model")
    # A server may have a model under several names.
    chosen = [matching[0] for matching in found]
    for number, entry in enumerate(chosen):
        if entry in chosen[:number]:
            first, second = models[chosen.index(entry)], models[number]
            raise UsageError(
                f"{entry.url} serves {short_repr(entry.root)}, which may be both {first.root} and {second.root}",
                "serve them under different names with --served-model-name of vLLM",
            )
    for url, of_url in served.items():
        if not any(entry in of_url for entry in chosen):
            raise UsageError(
                f"{url} serves {_names(of_url)}, which is neither the source nor an output", "leave that --server out"
            )
    return chosen


def _names(entries: Sequence[ModelOnServer]) -> str:
    shown = [short_repr(entry.name) for entry in entries[:_NAMED]]
    return ", ".join(shown) + (f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else "") or "nothing"


def _list_models(url: str) -> list[ModelOnServer]:
    """Return the models of a server."""
    where = f"{url}/v1/models"
    value = _parse(_fetch(where, None, _LIST_SECONDS), where)
    entries = value.get("data") if isinstance(value, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
    ):
        raise SourceError(f"{where} is no list of models", "give the URL of a server with OpenAI's API: `vllm serve`")
    return [
        ModelOnServer(url, entry["id"], root if isinstance(root := entry.get("root"), str) else entry["id"])
        for entry in entries
    ]


def _find(model: Source, served: Sequence[ModelOnServer]) -> list[ModelOnServer]:
    """Return the entries that are a model: by repository or directory, or else by the last part of a name."""
    exact = [entry for entry in served if any(_is_same(model, name) for name in (entry.name, entry.root))]
    last = Path(model.repo or model.name).name
    return exact or [entry for entry in served if last in (Path(entry.name).name, Path(entry.root).name)]


def _is_same(model: Source, name: str) -> bool:
    # Names of repositories could be relative paths.
    return name == model.repo or (os.path.isabs(name) and os.path.realpath(name) == os.path.realpath(model.root))  # noqa: PTH117


def generate_texts(
    served: Sequence[ModelOnServer], requests: Sequence[GenerationRequest], advanced: Callable[[int], None]
) -> list[list[str]]:
    """Have each model answer each request, greedily.

    Args:
        served: the models.
        requests: the requests.
        advanced: called for each answer, with the most tokens that it may have.

    Returns:
        For each model the text of each request.

    Raises:
        SourceError: a server fails, or its answer is no text.
    """
    texts: list[list[str]] = [[] for _ in served]
    asked = [(number, request) for request in requests for number in range(len(served))]
    answers: Iterator[str] = in_parallel(
        lambda pair: _complete(served[pair[0]], pair[1]), asked, CONCURRENT * len(served)
    )
    for (number, request), text in zip(asked, answers, strict=True):
        texts[number].append(text)
        advanced(request.max_tokens)
    return texts


def _complete(served: ModelOnServer, request: GenerationRequest) -> str:
    """Return a model's answer to a request."""
    body: Mapping[str, Any] = {
        **request.settings,
        "model": served.name,
        "messages" if request.is_chat else "prompt": request.prompt,
        "stop": list(request.stop),
        "max_tokens": request.max_tokens,
        "temperature": 0,
    }
    where = f"{served.url}/v1/{'chat/' if request.is_chat else ''}completions"
    value = _parse(_fetch(where, json.dumps(body, default=str).encode(), _ANSWER_SECONDS), where)
    choices = value.get("choices") if isinstance(value, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if request.is_chat and isinstance(choice, dict):
        choice = choice.get("message")
    text = choice.get("content" if request.is_chat else "text") if isinstance(choice, dict) else None
    if request.is_chat and isinstance(choice, dict) and "content" in choice and text is None:
        # It was stopped while it was thinking.
        text = ""
    if not isinstance(text, str):
        raise SourceError(f"{where} answers without a text: {short_repr(value)}", _SERVER_HINT)
    # JSON may have halves of surrogate pairs.
    return text.encode(errors="replace").decode()


def _parse(data: bytes, where: str) -> Any:
    try:
        return parse_json(data, where)
    except SourceError as error:
        raise SourceError(error.message, _SERVER_HINT) from None


class _NoRedirects(HTTPRedirectHandler):
    """Makes a redirect an error: prompts go to no server that the user did not name."""

    def redirect_request(self, *request: Any) -> None:
        del request


def _key() -> str:
    """Return the key that servers are sent, from where lm-eval takes it; empty if there is none."""
    key = os.environ.get(KEY_VARIABLE, "")
    # The errors of http.client show a header that they refuse.
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"{KEY_VARIABLE} is no key of a server", "it has a line end or another character than ASCII's")
    return key


@cache
def _opener(is_local: bool) -> OpenerDirector:
    """Return what opens URLs; those of this machine without a proxy, which would not reach it."""
    handlers: list[BaseHandler] = [_NoRedirects()]
    if is_local:
        handlers.append(ProxyHandler({}))
    return build_opener(*handlers)


def _fetch(url: str, body: bytes | None, seconds: float) -> bytes:
    """Send a request, once more if the connection breaks or the server is busy; return the body of the answer.

    Args:
        url: the address.
        body: JSON to post; None to get.
        seconds: the longest that an answer may take.

    Raises:
        SourceError: there is no answer, or one with an error.
    """
    for wait in (*_WAITS, None):
        try:
            return _fetch_once(url, body, seconds)
        except TimeoutError:
            raise SourceError(f"{url} has not answered for {seconds:,.0f} seconds", _SERVER_HINT) from None
        except HTTPError as error:
            with error:
                if error.code not in _BUSY or wait is None:
                    raise _http_error(url, error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise SourceError(f"{url} has not answered for {seconds:,.0f} seconds", _SERVER_HINT) from None
            if wait is None or body is None:
                text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
                raise SourceError(
                    f"{url} does not answer: {short_repr(text)}", "see that the server runs, and that its URL is right"
                ) from None
        time.sleep(wait)
    raise AssertionError


def _fetch_once(url: str, body: bytes | None, seconds: float) -> bytes:
    end = time.monotonic() + seconds
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key := _key():
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, body, headers)
    parts: list[bytes] = []
    left = _MAX_BYTES
    with _opener(urlsplit(url).hostname in _LOOPBACK).open(request, timeout=seconds) as response:
        while part := response.read1(min(left, 1 << 16)):
            parts.append(part)
            left -= len(part)
            if time.monotonic() > end:
                raise TimeoutError
            if left <= 0:
                raise SourceError(f"{url} answers with more than {_MAX_BYTES:,} bytes", _SERVER_HINT)
        if response.length:
            raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _http_error(url: str, error: HTTPError) -> SourceError:
    """Return the error for an HTTP status, with the message of the server if there is one."""
    status = f"HTTP {error.code}"
    if 300 <= error.code < 400:
        return SourceError(f"{url} redirects elsewhere ({status})", "give the URL of the server itself")
    if error.code in (401, 403):
        if _key():
            return SourceError(f"{url} refuses the key in {KEY_VARIABLE} ({status})", "set it to that server's key")
        return SourceError(f"{url} asks for a key ({status})", f"set the environment variable {KEY_VARIABLE} to it")
    try:
        value: Any = parse_json(error.read(1 << 16), url)
        detail = value.get("error", value)
        message = detail.get("message") if isinstance(detail, dict) else None
    except (SourceError, OSError, http.client.HTTPException, AttributeError):
        message = None
    if _key() and _key() in str(message):
        message = None
    if error.code == 404 and url.endswith("/models"):
        return SourceError(f"{url} is not there ({status})", "give the URL of `vllm serve`, such as http://host:8000")
    return SourceError(f"{url} fails: {status}{f', {short_repr(message)}' if message else ''}", _SERVER_HINT)
