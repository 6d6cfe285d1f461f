"""The HTML report of each verb: one file that loads nothing from the network.

The template escapes all text (names, prompts, answers) except the charts and the marks that are made here. A
Content-Security-Policy lets no script run but the page's own.

    page = render_page(PageContent("Qwen3-8B-FP8", evaluations=[evaluation]))
    Destination(Path("report.html"), "--report", PAGE).write(page.encode())
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import OpenQuantError, UsageError
from ..evaluation.types import kl_text
from ..files.cards import evaluation_digest
from ..files.checkpoint import open_checkpoint
from ..files.destination import Destination, FileKind
from ..files.model_files import EVAL_PAGE, EVAL_PICTURE
from ..fit.table import SearchResult
from ..formats.schemes import SCHEMES
from ..hub.source import local_source
from ..plan.serving import serving_to_json, stored_serving
from ..version import __version__, install_hint
from .cells import fill_template, gigabytes, per_cent, read_part, share_text, short, shorten, terminal, verdict_meaning

if TYPE_CHECKING:
    from markupsafe import Markup


# Most texts, and most characters of each.
MOST_TEXTS = 50
MOST_LETTERS = 4000
# Marks of pages and pictures that openquant wrote, which are in their first bytes.
_BEGINNING = 1024
_GENERATOR = b'<meta name="generator" content="openquant '
_PNG = b"\x89PNG\r\n\x1a\n"
_SOFTWARE = b"tEXtSoftware\0openquant "


def _is_page(file: BinaryIO) -> bool:
    return _GENERATOR in file.read(_BEGINNING)


def _is_picture(file: BinaryIO) -> bool:
    data = file.read(_BEGINNING)
    return data.startswith(_PNG) and _SOFTWARE in data


PAGE = FileKind("a page", _is_page, EVAL_PAGE)
PICTURE = FileKind("a picture", _is_picture, EVAL_PICTURE)


@dataclass(frozen=True)
class PageContent:
    """What an HTML report shows. Sections whose field is empty are left out.

    Attributes:
        title: name of the model, such as "Qwen3-8B-FP8".
        about: a line below the title.
        evaluations: evaluations of outputs, each the content of an eval.json.
        serving: GPUs and memory to serve the model, as `compress --json` prints them.
        commands: commands that the user may type next.
        frontier: what `fit --search --json` prints.
    """

    title: str
    about: str = ""
    evaluations: Sequence[Mapping[str, Any]] = ()
    serving: Mapping[str, Any] | None = None
    commands: Sequence[str] = ()
    frontier: Mapping[str, Any] | None = None


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


def render_page(page: PageContent) -> str:
    """Render a page as HTML, for which `require_tools` must succeed. The same content gives the same text.

    Args:
        page: the content: title, evaluations, tables and notes.

    Returns:
        The text of an HTML file that needs no others.
    """
    from markupsafe import Markup

    from . import charts

    filters: dict[str, Callable[..., Any]] = {
        "size": gigabytes,
        "short": short,
        "number": _number,
        "mean_kl": lambda evaluation: kl_text(evaluation["kl"]["mean"], evaluation["floor"]["kl"]),
        "of": per_cent,
        "percent": lambda share: f"{100 * share:.4g} %",
        "interval": lambda edges: " to ".join(map(_number, edges or ())),
        "points": lambda difference: f"{100 * difference:+.1f}",
        "share": share_text,
        "cut": lambda text: shorten(text, MOST_LETTERS),
        "compared": _mark_differences,
        "verdict_meaning": verdict_meaning,
        "drawn": Markup,
    }
    evaluations = charts.by_kl(page.evaluations)
    points = (page.frontier or {}).get("points", ())
    schemes = dict.fromkeys(name for point in points for name in point["shares"])
    script = read_part("page.js")
    values = {
        "title": page.title,
        "about": page.about,
        "evaluations": evaluations,
        "frontier": page.frontier,
        "served": page.serving,
        "commands": page.commands,
        "schemes": [SCHEMES[name] for name in schemes if name in SCHEMES],
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


def _number(value: float) -> str:
    return f"{value:.4g}"


def _mark_differences(text: Mapping[str, Any]) -> tuple[Markup, Markup]:
    """Return the source's and the output's answer as HTML, with the words marked that only one of them has."""
    from markupsafe import Markup

    words = [
        re.findall(r"\s+|[^\s]+", terminal(shorten(text[name], MOST_LETTERS), kept="\n\t"))
        for name in ("source", "output")
    ]
    answers = (Markup(), Markup())
    mark = Markup("<mark>{}</mark>")
    same = Markup("{}")
    for kind, *spans in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        pieces = ("".join(words[0][spans[0] : spans[1]]), "".join(words[1][spans[2] : spans[3]]))
        answers = tuple(  # type: ignore[assignment]
            before + (same if kind == "equal" or not piece else mark).format(piece)
            for before, piece in zip(answers, pieces, strict=True)
        )
    return answers


def write_evaluated(
    evaluations: Sequence[Mapping[str, Any]],
    models: Sequence[str | os.PathLike[str]],
    page: Destination | None,
    figure: Destination | None,
) -> None:
    """Write the HTML page of eval, and its picture.

    Args:
        evaluations: for each output the content of its eval.json; at least one.
        models: names or directories of the source and then of each output. For one local output of a local source, the
            page shows what serving takes.
        page: file of the page; None to write none.
        figure: file of the picture; None to write none.

    Raises:
        OutputError: a file cannot be written.
        UsageError: a file must not be written, since something else came to lie there.
    """
    if page is not None:
        page.write(render_page(evaluated_page(evaluations, [Path(model) for model in models])).encode())
    if figure is not None:
        from .charts import draw_picture

        figure.write(draw_picture(evaluations))


def evaluated_page(evaluations: Sequence[Mapping[str, Any]], models: Sequence[Path]) -> PageContent:
    """Make the page of eval.

    Args:
        evaluations: for each output the content of its eval.json; at least one.
        models: directories of the source and then of each output; other names for those on the Hub.

    Returns:
        The page's content, for `render_page`.
    """
    local = len(models) == 2 and all(model.is_dir() for model in models)
    first = evaluations[0]
    source = evaluations[0]["source"]["name"]
    return PageContent(
        first["output"]["name"] if len(evaluations) == 1 else f"{len(evaluations)} outputs of {source}",
        f"compared with {source}, on {first['text']['positions']:,} positions of {first['text']['documents']:,} texts",
        evaluations,
        serving=_serving(models[1], models[0]) if local else None,
    )


def searched_page(found: SearchResult) -> PageContent:
    """Make the page of `fit --search`: size against KL of mixtures and single schemes.

    Args:
        found: the result of search_mixtures().

    Returns:
        The page's content, for `render_page`.
    """
    return PageContent(
        Path(found.model).name or found.model,
        f"{found.architecture}, weights rounded to nearest, on {found.texts}",
        frontier=found.to_json(),
        commands=[point.command for point in found.points],
    )


def _serving(output: Path, source: Path | None) -> Mapping[str, Any] | None:
    """Return what serving takes; None if one of them cannot be opened, or has a format that openquant does not read."""
    try:
        model = local_source(source or output)
        return serving_to_json(*map(stored_serving, (model.open(), open_checkpoint(output))))
    except OpenQuantError:
        return None
