"""`openquant web`: serves the page on this machine.

serve_page(Roots((Path.cwd(),)), 7860, ready=print)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

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
        UsageError: the extra `web` is not installed, the port is taken, or another server has the directory.
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
    import gradio
    import uvicorn
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response
    from starlette.routing import Route

    from .guard import OWNER, Guard
    from .page import Page, build

    port = listener.getsockname()[1]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def report(request: Request) -> Response:
        run = runs.find(request.headers[OWNER], request.path_params["name"])
        path = None if run is None else runs.report(run)
        return Response("there is no such report", 404) if path is None else FileResponse(path, media_type="text/html")

    app.router.routes.append(Route("/report/{name}", report))
    fonts = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    theme = gradio.themes.Base(font=fonts[0], font_mono=fonts[1]).set(**_COLOURS)
    page = build(Page(runs, roots))
    gradio.mount_gradio_app(
        app,
        page,
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
        theme=theme,
        css=style() + _LOOK,
    )
    settings = uvicorn.Config(
        Guard(app, port), log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(settings)
    started = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await started(sockets)
        ready(f"http://{HOST}:{port}")

    server.startup = startup
    server.run([listener])
