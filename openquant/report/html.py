"""The HTML report of an evaluation, or of a search: one file that loads nothing from the network.

The template escapes all text (names, prompts, answers) except the charts and the marks that are made here. A
Content-Security-Policy lets no script run but the page's own.

    page = render_page([evaluation])
    Destination(Path("report.html"), "--report", PAGE).write(page.encode())
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import UsageError
from ..files.cards import evaluation_digest
from ..files.destination import Destination, FileKind
from ..version import __version__, install_hint
from .cells import fill_template, gigabytes, per_cent, read_part, share_text, shorten, terminal, verdict_meaning

if TYPE_CHECKING:
    from ..fit.table import SearchResult


# Most texts, and most characters of each.
MOST_TEXTS = 50
MOST_LETTERS = 4000
# Marks of pages and pictures that openquant wrote, which are in their first bytes.
_BEGINNING = 1024
_GENERATOR = b'<meta name="generator" content="openquant '
_PNG = b"\x89PNG\r\n\x1a\n"
_SOFTWARE = b"tEXtSoftware\0openquant "


def _is_picture(file: BinaryIO) -> bool:
    data = file.read(_BEGINNING)
    return data.startswith(_PNG) and _SOFTWARE in data


PAGE = FileKind("a page", lambda file: _GENERATOR in file.read(_BEGINNING))
PICTURE = FileKind("a picture", _is_picture)


def require_tools(option: str) -> None:
    """Require what draws reports, before anything is computed.

    Args:
        option: the option that needs them, such as "--report", for the message.

    Raises:
        UsageError: the extra `report` is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{option} needs {error.name}, which is not installed", install_hint("report")) from None


def render_page(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Render the page of eval as HTML, for which `require_tools` must succeed. The same content gives the same text.

    Args:
        evaluations: the eval.json of each output of one source, one or more.

    Returns:
        The page as one file, without a reference to the network.
    """
    from . import charts

    evaluations = charts.by_kl(evaluations)
    first = evaluations[0]
    source = first["source"]["name"]
    title = first["output"]["name"] if len(evaluations) == 1 else f"{len(evaluations)} outputs of {source}"
    text = first["text"]
    about = f"compared with {source}, on {text['positions']:,} positions of {text['documents']:,} texts"
    return _render(title, about, evaluations, None)


def render_frontier(found: SearchResult) -> str:
    """Render the page of `fit --search`, size against KL of its mixtures, as `render_page` does.

    Args:
        found: the result of search_mixtures().

    Returns:
        The page as one file, without a reference to the network.
    """
    about = f"{found.architecture}, weights rounded to nearest, on {found.texts}"
    return _render(Path(found.model).name or found.model, about, (), found.to_json())


def _render(
    title: str, about: str, evaluations: Sequence[Mapping[str, Any]], frontier: Mapping[str, Any] | None
) -> str:
    from markupsafe import Markup

    from . import charts

    filters: dict[str, Callable[..., Any]] = {
        "size": gigabytes,
        "number": "{:.4g}".format,
        "of": per_cent,
        "percent": lambda share: f"{100 * share:.4g} %",
        "interval": lambda edges: " to ".join(f"{edge:.4g}" for edge in edges or ()),
        "points": lambda difference: f"{100 * difference:+.1f}",
        "share": share_text,
        "cut": lambda text: shorten(text, MOST_LETTERS),
        "verdict_meaning": verdict_meaning,
        "drawn": Markup,
    }
    script = read_part("page.js")
    values = {
        "title": title,
        "about": about,
        "evaluations": evaluations,
        "frontier": frontier,
        "charts": charts,
        "identity": evaluation_digest,
        "most_texts": MOST_TEXTS,
        "version": __version__,
        "style": Markup(read_part("page.css")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return fill_template("page.html", values, filters, autoescape=True, finalize=_escape_invisible)


def _escape_invisible(value: Any) -> Any:
    """Escape characters that move or hide other text in a value that the template puts into the page."""
    if type(value) is not str:
        return value
    return terminal(value, kept="\n\t")


def write_evaluated(
    evaluations: Sequence[Mapping[str, Any]], page: Destination | None, figure: Destination | None
) -> None:
    """Write the HTML page of eval, and its picture.

    Args:
        evaluations: the results of each output.
        page: where the page goes; None for none.
        figure: where the picture goes; None for none.

    Raises:
        OutputError: the disk is full, or a file cannot be written.
    """
    if page is not None:
        page.write(render_page(evaluations).encode())
    if figure is not None:
        from .charts import draw_picture

        figure.write(draw_picture(evaluations))
