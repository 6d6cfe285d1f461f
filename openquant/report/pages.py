"""The content of each verb's HTML report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OpenQuantError
from ..files.checkpoint import open_checkpoint
from ..files.destination import Destination
from ..fit.result import SearchResult
from ..hub.source import local_source
from ..plan.as_stored import stored_serving
from ..plan.serving import serving_to_json
from .html import PageContent, render_page


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
        from .figure import draw_picture

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
    first, source = evaluations[0], evaluations[0]["source"]["name"]
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
        checkpoints = model.open(), open_checkpoint(output)
        return serving_to_json(*map(stored_serving, checkpoints))
    except OpenQuantError:
        return None
