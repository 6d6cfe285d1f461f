"""Who may ask the server for what: only pages of this server, on this machine.

A foreign page may send requests to localhost, or give its own name the address 127.0.0.1 (DNS rebinding). Browsers then
send a foreign Origin or Host, which is refused. Paths that the page does not use are refused too, such as uploads.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The header by which the page knows a browser. What clients send under this name is dropped.
OWNER = "x-openquant-owner"
# What the page asks for, by method.
_PATHS = {
    "GET": re.compile(
        r"/|/(assets|static|report)/[\w./-]+|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)"
        r"|/gradio_api/(heartbeat/\w+|startup-events|theme\.css)",
        re.ASCII,
    ),
    "POST": re.compile(r"/gradio_api/run/predict", re.ASCII),
}
_COOKIE = re.compile(r"[0-9a-f]{64}")
# Bytes of a request's body.
MOST_BODY = 1 << 20
_AGE = 30 * 24 * 3600
# Gradio's page has inline scripts and styles, and compiles templates.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'self'"
)
_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)


class Guard:
    """Wraps the server's application.

    Args:
        app: the application.
        port: the port that it is served on.
    """

    def __init__(self, app: App, port: int) -> None:
        self._app, self._port = app, port
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"openquant-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        given = [(name.lower().decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(given)
        reason = self._refusal(scope, headers, [name for name, _ in given])
        known = self._known(headers.get("cookie", ""))
        if reason is None and known is None and scope["path"] != "/":
            reason = "open the page first"
        if reason is not None:
            await _refuse(send, reason)
            return
        secret = known or secrets.token_hex(32)
        owner = hashlib.sha256(secret.encode()).hexdigest()
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != OWNER.encode()]
        scope = {**scope, "headers": [*kept, (OWNER.encode(), owner.encode())]}

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._added(scope["path"], secret)]}
            await send(message)

        await self._app(scope, receive, answer)

    def _refusal(self, scope: Scope, headers: dict[str, str], names: list[str]) -> str | None:
        """Why a request is refused; None if it is not."""
        if names.count("host") != 1 or headers["host"] not in self._hosts:
            return f"the Host header is not that of this page: open http://127.0.0.1:{self._port}"
        if names.count("origin") > 1 or headers.get("origin", self._origin(headers)) != self._origin(headers):
            return "the request comes from another page"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and scope["path"] != "/":
            return "the request comes from another page"
        if not _allowed(scope["method"], scope["path"]):
            return "this page does not have that"
        length = headers.get("content-length", "0")
        is_short = length.isdecimal() and int(length) <= MOST_BODY
        # Of a body in chunks nobody knows the length.
        if scope["method"] == "POST" and (not is_short or "transfer-encoding" in headers):
            return "the request is too large"
        return None

    @staticmethod
    def _origin(headers: dict[str, str]) -> str:
        return f"http://{headers['host']}"

    def _known(self, cookies: str) -> str | None:
        """The secret of a browser that was here before."""
        try:
            found = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return None
        return found.value if found is not None and _COOKIE.fullmatch(found.value) else None

    def _added(self, path: str, secret: str) -> list[tuple[bytes, bytes]]:
        policy = _REPORT_POLICY if path.startswith("/report/") else _POLICY
        added = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
        }
        if path == "/":
            # Lax, so that a link to the page does not make a new browser of this one.
            added["set-cookie"] = f"{self._cookie}={secret}; Path=/; Max-Age={_AGE}; HttpOnly; SameSite=Lax"
        return [(name.encode(), value.encode()) for name, value in added.items()]


def _allowed(method: str, path: str) -> bool:
    pattern = _PATHS.get("GET" if method == "HEAD" else method)
    return pattern is not None and pattern.fullmatch(path) is not None and ".." not in path


async def _refuse(send: Send, reason: str) -> None:
    body = f"refused: {reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
