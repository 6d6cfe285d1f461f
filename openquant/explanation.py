"""explain(): what becomes of a layer, asked of the plan of a run that writes nothing."""

from __future__ import annotations

import os
from typing import Any

from .api import compress
from .formats.names import SchemeName
from .options import Explain, ModelSource, Recipe, documented
from .plan.explain import Explanation, explain_modules
from .plan.plan import Plan
from .reporter import Reporter


class _Planned(Reporter):
    """Keeps the plan."""

    def planned(self, plan: Plan, *_: object) -> None:
        self.plan = plan


@documented(ModelSource, Explain, Recipe)
def explain(
    model: str | os.PathLike[str],
    layer: str,
    scheme: SchemeName = "tensor",
    *,
    revision: str | None = None,
    **options: Any,
) -> Explanation:
    """Say what compress() makes of a layer, and why; of a model only config, index and headers are read.

    Args:
        options: other options of compress() that say how the weights are quantized.

    Returns:
        An answer for all layers that are alike; `to_json()` is what `--json` prints.

    Raises:
        OpenQuantError: there is no such layer, or compress() would refuse the model or the options.
    """
    reporter = _Planned()
    result = compress(model, None, scheme, revision=revision, dry_run=True, reporter=reporter, **options)
    return Explanation(
        model=result.model,
        revision=result.revision,
        architecture=result.architecture,
        scheme=result.scheme,
        layers=explain_modules(reporter.plan, layer),
    )
