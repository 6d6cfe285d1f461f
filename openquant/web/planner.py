"""Makes a plan and the table of schemes for the page, in a process of its own: `python -m openquant.web.planner`.

The process has the visitor's token in its environment, and ends with it. Headers are read, and no weights.

    stdin     {"compress": arguments of openquant.compress or null, "fit": arguments of openquant.fit_table}
    stdout    {"html": the sections, "scheme": of the plan, "shards": .., "refused": whether}

Without a `scheme` in `compress`, the plan has the best that fits the GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OpenQuantError
from ..result import Reporter
from .view import fit_html, plan_html, problem_html

if TYPE_CHECKING:
    from ..hub.source import Source
    from ..plan.plan import Plan


class _Planned(Reporter):
    """Keeps the plan as HTML."""

    def __init__(self, model: str) -> None:
        self.model, self.html = model, ""

    def planned(self, plan: Plan, source: Source, output: Path) -> None:  # noqa: ARG002
        """Keep the plan."""
        self.html = plan_html(plan, self.model)


def planned(request: dict[str, Any]) -> dict[str, Any]:
    """Make what the page shows of a model.

    Args:
        request: what stdin has.

    Returns:
        What is printed. `refused` is True if the command would be refused; the HTML then has its error.
    """
    from ..api import compress
    from ..fit.table import fit_table

    answer: dict[str, Any] = {"html": "", "scheme": "", "shards": 0, "refused": False}
    chosen, table, best = request["compress"], "", None
    try:
        found = fit_table(**request["fit"])
        table, best = fit_html(found), found.best
        if chosen is not None:
            chosen = {**chosen, "scheme": chosen.get("scheme") or best or "tensor"}
            reporter = _Planned(str(chosen["model"]))
            result = compress(**chosen, dry_run=True, reporter=reporter)
            answer |= {"html": reporter.html, "scheme": chosen["scheme"], "shards": result.shards}
    except OpenQuantError as problem:
        answer |= {"html": problem_html(problem), "refused": True}
    return {**answer, "html": answer["html"] + table}


if __name__ == "__main__":
    print(json.dumps(planned(json.load(sys.stdin))))
