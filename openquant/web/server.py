"""`openquant web`: serves the page on this machine.

serve_page(Roots((Path.cwd(),)), 7860, ready=print)

Who may ask the server for what: only pages of this server, on this machine.

A foreign page may send requests to localhost, or give its own name the address 127.0.0.1 (DNS rebinding). Browsers then
send a foreign Origin or Host, which is refused. Paths that the page does not use are refused too, such as uploads.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
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
.gradio-container { max-width: 70rem !important; margin: 0 auto !important; overflow: clip !important; }
.gradio-container h1 { font-size: 1.6rem; margin: 0; }
.gradio-container h2 { font-size: 1.3rem; margin: 0; }
#runs label { overflow-wrap: anywhere; }
/* Errors can be seen wherever the page is scrolled to. */
#problem:has(.oq-problem) { position: sticky; top: 0; bottom: 0; z-index: 10; background: var(--body-background-fill); }
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

    # Where commands work, and where plans look for outputs.
    os.chdir(roots.paths[0])
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
            _application(runs, roots, port),
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
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from .page import Page, build

    def send_report(request: Request) -> Response:
        run = runs.find(request.path_params["name"])
        if run is None or run.report is None or not run.report.is_file():
            return PlainTextResponse("there is no such report", 404)
        return FileResponse(run.report, media_type="text/html")

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        reason = refusal(request.method, path, request.headers, port)
        if reason is not None:
            return PlainTextResponse(f"refused: {reason}\n", 403)
        response = await answer(request)
        response.headers.update(headers_for(path))
        return response

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(guard)
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
        theme=theme.set(layout_gap="*spacing_lg", **_COLOURS),
        css=style() + _LOOK,
    )
    return app


# What the page asks for, by method.
_PATHS = {
    "GET": re.compile(
        r"/|/(assets|static|report)/[\w./-]+|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)"
        r"|/gradio_api/(heartbeat/\w+|startup-events|theme\.css)",
        re.ASCII,
    ),
    "POST": re.compile(r"/gradio_api/run/predict", re.ASCII),
}
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


def refusal(method: str, path: str, headers: Mapping[str, str], port: int) -> str | None:
    """Return why a request is refused; None if it is not.

    Args:
        method: its method, such as "GET".
        path: its path.
        headers: its headers, by names in lower case.
        port: the port of this server.
    """
    host = headers.get("host")
    if host not in (f"{HOST}:{port}", f"localhost:{port}"):
        return f"the Host header is not that of this page: open http://{HOST}:{port}"

    is_foreign = headers.get("origin", f"http://{host}") != f"http://{host}"
    is_cross_site = headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and path != "/"
    if is_foreign or is_cross_site:
        return "the request comes from another page"

    pattern = _PATHS.get("GET" if method == "HEAD" else method)
    if pattern is None or not pattern.fullmatch(path) or ".." in path:
        return "this page does not have that"

    return None


def headers_for(path: str) -> dict[str, str]:
    """Return the headers that are added to the answer for a path."""
    return {
        "content-security-policy": _REPORT_POLICY if path.startswith("/report/") else _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
    }
