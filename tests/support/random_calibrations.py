"""Calibrations that no texts made, for models of random weights, and the plans that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from openquant import Reporter
from openquant.files.checkpoint import Fingerprint
from openquant.plan.plan import Plan
from openquant.weights.statistics import Calibration, InputStatistics


class Planned(Reporter):
    """Keeps the plan that is carried out."""

    def on_plan(self, plan: Plan, *_: Any) -> None:
        self.plan = plan


def skewed(plan: Plan, path: Path, spread: float = 2.0) -> Path:
    """The file of a calibration in which some inputs of each layer are far larger than others."""
    random, found = np.random.default_rng(3), dict[str, InputStatistics]()
    for weight in plan.layers.values():
        mean = np.exp(random.normal(0, spread, weight.shape[1])).astype(np.float32)
        found.setdefault(weight.source.name, InputStatistics((weight.source.name,), 4 * mean, mean, 9, 2 * mean**2))
    made = Calibration(tuple(found.values()), Fingerprint(plan.source).hexdigest(), {"documents": 1, "length": 9})
    path.write_bytes(made.to_bytes())
    return path
