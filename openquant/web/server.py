"""`openquant web`: serves the page on this machine.

serve_page(Roots((Path.cwd(),)), 7860, ready=print)

Who may ask the server for what: only pages of this server, on this machine.

A foreign page may send requests to localhost, or give its own name the address 127.0.0.1 (DNS rebinding). Browsers then
send a foreign Origin or Host, which is refused. Paths that the page does not use are refused too, such as uploads.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..version import install_hint
from .choices import Roots
from .runs import Runs
from .view import style

HOST = "127.0.0.1"
# Gradio would ask its own server for these.
_SETTINGS = {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_RUN_HISTORY": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
_LOOK = """
.gradio-container { max-width: 70rem !important; margin: 0 auto !important; }
.gradio-container h1 { font-size: 1.6rem; margin: 0.5rem 0; }
.gradio-container h2 { font-size: 1.3rem; margin: 1rem 0 0.3rem; }
footer { display: none !important; }
"""

# Gradio's own are too faint to read: labels, hints and the main button.
_COLOURS = {
    **dict.fromkeys(("body_text_color_subdued", "block_info_text_color", "block_label_text_color"), "*neutral_700"),
    **dict.fromkeys(
        ("body_text_color_subdued_dark", "block_info_text_color_dark", "block_label_text_color_dark"), "*neutral_300"
    ),
    **dict.fromkeys(("block_title_text_color", "input_placeholder_color"), "*neutral_700"),
    **dict.fromkeys(("block_title_text_color_dark", "input_placeholder_color_dark"), "*neutral_300"),
    **dict.fromkeys(("button_primary_background_fill", "button_primary_background_fill_dark"), "*primary_700"),
}


def require_gradio() -> None:
    """Require the extra `web`.

    Raises:
        UsageError: it is not installed.
    """
    os.environ.update(_SETTINGS)
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise UsageError(f"openquant web needs {error.name}, which is not installed", install_hint("web")) from None


def find_roots(names: tuple[str, ...]) -> Roots:
    """Find the directories that the page may read and write.

    Args:
        names: as the user named them; none for the working directory.

    Raises:
        UsageError: one is no directory.
    """
    paths = [Path(os.path.realpath(name)) for name in names or (".",)]
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"--root {path} is no directory", "name one that exists")
    return Roots(tuple(paths))


def serve_page(roots: Roots, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted.

    Args:
        roots: directories that the page may read; runs and outputs go into the first.
        port: the port; 0 for any that is free.
        ready: called with the page's address once it answers.

    Raises:
        UsageError: the extra `web` is not installed, or the port is taken.
    """
    require_gradio()

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"port {port} cannot be used: {error.strerror}", "give another --port") from None

    runs = Runs(roots.paths[0])
    try:
        _serve(runs, roots, listener, ready)
    finally:
        runs.close()
        listener.close()


def _serve(runs: Runs, roots: Roots, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve the page on a socket that is bound."""
    import uvicorn

    port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            Guard(_application(runs, roots, port), port),
            # uvicorn has a traceback for each page that is open when the server ends.
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets)
        ready(f"http://{HOST}:{port}")

    server.startup = startup
    server.run([listener])


def _application(runs: Runs, roots: Roots, port: int) -> Any:
    """The page, and the reports that it has in frames."""
    import gradio
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    from .page import Page, build

    def send_report(request: Request) -> Response:
        run = runs.find(request.headers[OWNER], request.path_params["name"])
        if run is None or run.report is None or not run.report.is_file():
            return Response("there is no such report", 404)
        return FileResponse(run.report, media_type="text/html")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.append(Route("/report/{name}", send_report))
    theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gradio.mount_gradio_app(
        app,
        build(Page(runs, roots)),
        path="/",
        server_name=HOST,
        server_port=port,
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size=0,
        theme=theme.set(**_COLOURS),
        css=style() + _LOOK,
    )
    return app


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
        self._app = app
        self._port = port
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
        known = self._find_secret(headers.get("cookie", ""))
        if reason is None and known is None and scope["path"] != "/":
            reason = "open the page first"
        if reason is not None:
            await _refuse(send, reason)
            return

        # The page knows the browser by a digest of its cookie.
        secret = known or secrets.token_hex(32)
        owner = hashlib.sha256(secret.encode()).hexdigest()
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != OWNER.encode()]
        scope = {**scope, "headers": [*kept, (OWNER.encode(), owner.encode())]}

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", ()), *self._headers_for(scope["path"], secret)],
                }
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

        if not _is_allowed(scope["method"], scope["path"]):
            return "this page does not have that"

        # Of a body in chunks nobody knows the length.
        length = headers.get("content-length", "0")
        is_short = length.isdecimal() and int(length) <= MOST_BODY
        if scope["method"] == "POST" and (not is_short or "transfer-encoding" in headers):
            return "the request is too large"
        return None

    @staticmethod
    def _origin(headers: dict[str, str]) -> str:
        """The origin of the page itself."""
        return f"http://{headers['host']}"

    def _find_secret(self, cookies: str) -> str | None:
        """The secret of a browser that was here before."""
        try:
            found = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return None
        if found is None or not _COOKIE.fullmatch(found.value):
            return None
        return found.value

    def _headers_for(self, path: str, secret: str) -> list[tuple[bytes, bytes]]:
        """The headers that are added to an answer."""
        added = {
            "content-security-policy": _REPORT_POLICY if path.startswith("/report/") else _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
        }
        if path == "/":
            # Lax, so that a link to the page does not make a new browser of this one.
            added["set-cookie"] = f"{self._cookie}={secret}; Path=/; Max-Age={_AGE}; HttpOnly; SameSite=Lax"
        return [(name.encode(), value.encode()) for name, value in added.items()]


def _is_allowed(method: str, path: str) -> bool:
    """Whether the page asks for a path."""
    pattern = _PATHS.get("GET" if method == "HEAD" else method)
    return pattern is not None and pattern.fullmatch(path) is not None and ".." not in path


async def _refuse(send: Send, reason: str) -> None:
    """Answer with 403 and the reason."""
    body = f"refused: {reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
