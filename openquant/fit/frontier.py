"""Size and KL divergence of mixtures and single schemes, for tables, pages and cards."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..options import Recipe, Search
from .menu import BestMixtures, Menu
from .result import Point
from .units import Mixture, bits_per_weight

# Bits of a weight between two mixtures.
STEP = 0.5


def whole_and_half_bits(menu: Menu) -> list[float]:
    """Return whole and half bits a weight between the smallest and the largest single scheme."""
    weights = sum(unit.elements for unit in menu.units)
    sizes = [menu.size(menu.uniform(name)) - menu.fixed for name in menu.plans]
    first, last = (8 * size / weights / STEP for size in (min(sizes), max(sizes)))
    return [STEP * number for number in range(math.ceil(first), math.floor(last) + 1)]


def mixtures_of_sizes(menu: Menu, best: BestMixtures) -> dict[str, Mixture]:
    """Return the single schemes, and the best mixture of each whole and half bit, by name: "int5", "5.5bits"."""
    named = {name: menu.uniform(name) for name in menu.plans}
    bits = whole_and_half_bits(menu)
    return named | {f"{each:g}bits": best.best(menu.bytes_of_bits(each)) for each in bits}


@dataclass(frozen=True)
class Asked:
    """What was asked for, which commands repeat.

    Attributes:
        model: the model as it was named.
        options: options of the output.
        budget: the value of --fit, or of --gpu; None if there is none.
        context: tokens of the KV cache.
        engines: "vllm", "sglang" or "both"; None for the default.
        candidates: schemes that may be chosen; empty for the default.
        text: files of texts.
        dataset: a dataset with texts, or None.
    """

    model: str | os.PathLike[str]
    options: Recipe | Search
    budget: str | None
    context: int
    engines: str | None
    candidates: Sequence[str]
    text: Sequence[str | os.PathLike[str]]
    dataset: str | None

    def command(self, name: str, is_scheme: bool) -> str:
        """Return the command that makes a point: a scheme, "5.5bits", or by any other name what fits the budget."""
        options = self.options
        words = ["openquant", "compress", "-m", os.fspath(self.model)]
        words += [word for pattern in options.ignore for word in ("--ignore", pattern)]
        words += ["--quantize-lm-head"] if options.quantize_lm_head else []
        words += ["--quantize-embeddings"] if options.quantize_embeddings else []
        words += ["--kv-cache", "fp8"] if options.kv_cache == "fp8" else []
        words += ["--architecture", options.architecture] if options.architecture else []
        if is_scheme:
            return shlex.join([*words, "--scheme", name])
        of_bits = name.endswith("bits") and not name.startswith("-")
        words += ["--fit", name if of_bits else str(self.budget)]
        words += ["--context", str(self.context)] if not of_bits and self.context != 8192 else []
        words += ["--for", self.engines] if self.engines else []
        words += ["--candidates", ",".join(self.candidates)] if self.candidates else []
        words += [word for path in self.text for word in ("--text", os.fspath(path))]
        words += ["--dataset", self.dataset] if self.dataset else []
        return shlex.join(words)


@dataclass(frozen=True, eq=False)
class Points:
    """Makes points.

    Attributes:
        best: the scores of the units.
        asked: what the commands repeat.
        limit: bytes of all weights that fit; None if no GPUs are named.
        ratio: measured over predicted KL divergence, for points that were not measured.
    """

    best: BestMixtures
    asked: Asked
    limit: int | None
    ratio: float = 1.0

    def point(
        self, name: str, mixture: Mixture, records: Sequence[DocumentRecord] | None, written: bool = False
    ) -> Point:
        """Make the point of a mixture, or of a single scheme.

        Args:
            name: the scheme, or another name for a mixture.
            mixture: the choice of each unit.
            records: figures of each document; None if it was not measured.
            written: whether it is the output of this run.
        """
        menu = self.best.menu
        nbytes, predicted = menu.size(mixture), self.best.predicted(mixture)
        weights: dict[str, int] = {}
        for number, unit in enumerate(menu.units):
            scheme = unit.choices[mixture[number]].scheme_name
            weights[scheme] = weights.get(scheme, 0) + unit.elements
        whole = sum(weights.values())
        return Point(
            name=name,
            scheme=name if name in menu.plans else None,
            bytes=nbytes,
            bits=bits_per_weight(menu.units, nbytes - menu.fixed),
            predicted=predicted,
            kl=predicted * self.ratio if records is None else mean_kl(records),
            interval=None if records is None else bootstrap_interval([record.kl for record in records], 0),
            measured=records is not None,
            shares={scheme: part / whole for scheme, part in sorted(weights.items())},
            fits=None if self.limit is None else nbytes <= self.limit,
            written=written,
            command=self.asked.command(name, name in menu.plans),
        )


def sorted_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Sort points, the smallest first."""
    return tuple(sorted(points, key=lambda point: (point.bytes, point.kl)))
