"""What the report of each verb shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OpenQuantError, SourceError
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.destination import Destination
from ..files.evaluation import evaluation_digest, find_evaluation
from ..plan import summary
from ..plan.as_stored import stored_serving
from ..plan.plan import Plan
from ..plan.serving import serving_to_json
from ..result import Result
from ..verification.outcome import Report
from .card import serve_commands
from .html import ReportPage, render_page


def planned_page(plan: Plan, result: Result) -> ReportPage:
    """Of compress: what became of the weights, what that saves, and what was found of it if it was evaluated before."""
    lines = [
        {
            "names": line.names,
            "scheme": line.scheme.name if line.scheme else None,
            "decoded": line.decoded,
            "shape": line.shape,
            "bytes_before": line.bytes_before,
            "bytes_after": line.bytes_after,
            "why": line.why,
        }
        for line in plan.lines
    ]
    return ReportPage(
        Path(result.output).name,
        f"{plan.model.name}, {summary.description(plan)}, made of {result.model}",
        _evaluations(None if result.dry_run else Path(result.output)),
        lines=lines,
        notes=plan.notes,
        serving=result.serving,
        commands=serve_commands(plan, result.repository or result.output, result.pushed_revision),
    )


def verified_page(report: Report, directory: Path) -> ReportPage:
    """Of verify: what is wrong with a directory, and what was found of it if it was evaluated."""
    return ReportPage(
        directory.resolve().name,
        evaluations=_evaluations(directory),
        verified=report.to_json(),
        serving=_serving(directory, Path(report.source) if report.source else None),
    )


def write_evaluated(
    evaluations: Sequence[Mapping[str, Any]],
    models: Sequence[str | os.PathLike[str]],
    page: Destination | None,
    figure: Destination | None,
) -> None:
    """Write what eval found as a page, and the first output's as a picture.

    Args:
        evaluations: of each output, what its eval.json holds.
        models: the source, and each output; of directories the page says what it takes to serve them.
        page: where to; None for nowhere.
        figure: likewise.

    Raises:
        OutputError: it cannot be written.
    """
    if page is not None:
        page.write(render_page(evaluated_page(evaluations, [Path(model) for model in models])).encode())
    if figure is not None:
        from .figure import draw_picture

        first = evaluations[0]
        figure.write(draw_picture(first, first["output"]["name"], evaluation_digest(first)))


def evaluated_page(evaluations: Sequence[Mapping[str, Any]], models: Sequence[Path]) -> ReportPage:
    """Of eval: what was found of outputs; arguments as of write_evaluated."""
    local = len(models) == 2 and all(model.is_dir() for model in models)
    return ReportPage(
        ", ".join(one["output"]["name"] for one in evaluations),
        f"held against {evaluations[0]['source']['name']}",
        evaluations,
        serving=_serving(models[1], models[0]) if local else None,
    )


def diagnosed_page(found: Mapping[str, Any]) -> ReportPage:
    """Of diagnose: what each scheme does to each layer.

    Args:
        found: what `--json` prints.
    """
    return ReportPage(found["model"], found["architecture"], diagnosis=found)


def _evaluations(directory: Path | None) -> list[Mapping[str, Any]]:
    """The evaluation that lies beside a model; nothing where it is damaged, which verify says in a note."""
    if directory is None:
        return []
    try:
        found = find_evaluation(open_checkpoint(directory))
    except SourceError:
        return []
    return [found.evaluation] if found else []


def _serving(output: Path, source: Path | None) -> Mapping[str, Any] | None:
    try:
        return _both(open_checkpoint(source or output), open_checkpoint(output))
    except SourceError:
        return None


def _both(source: Checkpoint, output: Checkpoint) -> Mapping[str, Any] | None:
    try:
        return serving_to_json(stored_serving(source), stored_serving(output))
    except OpenQuantError:
        # Stored in a way that is not known.
        return None
