"""`compress --fit`: finds the mixture of a size, and says it as options of compress.

Scores come from a few short texts. The chosen mixture and the best single scheme that fits are then compared on other
texts, and the single scheme is taken unless the mixture is closer to the source by more than chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration.prepare import texts_steps
from ..distributed import Ranks
from ..errors import PlanError
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..job import open_source, output_directory, prepare
from ..options import FitOptions, Recipe
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..recipes import Request
from ..result import Reporter
from .budget import Budget, read_budget, refuse_ranks, weights_on_gpus
from .menu import UNQUANTIZED, BestMixtures, Menu, Mixture, bits_per_weight, make_menu
from .search import Points, mixtures_of_sizes
from .session import Session
from .table import Point, SearchResult

if TYPE_CHECKING:
    from ..data.corpus import Corpus

# How often a mixture is chosen anew for a KL divergence.
ROUNDS = 3
# A mixture that loses between this share of the allowed KL divergence and all of it is taken.
CLOSE_ENOUGH = 0.9
# KL divergences below are taken as this one, in nats.
SMALLEST = 1e-9


def choose_mixture(request: Request, ranks: Ranks, reporter: Reporter) -> tuple[Recipe, SearchResult]:
    """Find the mixture of schemes for a budget.

    Args:
        request: the checked options of compress(), with `fit`; the scheme of the recipe is replaced.
        ranks: the processes of this run.
        reporter: receives notes and progress.

    Returns:
        The recipe with the schemes of the mixture: `scheme`, `scheme_for` and `ignore`. And what they were chosen from.

    Raises:
        UsageError: options contradict --fit, or there are several ranks.
        PlanError: nothing fits, or no scheme of the menu can be used for this model.
        SourceError: the model or a text cannot be read.
        OutputError: hidden states or scores cannot be written.
    """
    run, recipe, texts, fit = request.run, request.recipe, request.texts, request.fit
    assert fit.fit is not None
    budget = read_budget(fit.fit)
    refuse_ranks(ranks)
    opened = open_source(run, ranks)
    menu = make_menu(opened, request.options, fit.candidates, fit.engines, budget.gpu, recipe.architecture)
    limit = _limit(budget, menu, fit, request.options)
    directory = Path(run.output).absolute().parent if run.output else opened.source.default_path("x").absolute().parent
    session = Session(opened, menu, texts, directory, run.stream, run.max_memory, reporter)
    compared = 1 if limit is None else 2
    target = output_directory(run, opened.source, summary.suffix(menu.plan))
    of_texts = texts_steps(run, texts.length, opened.source, opened.checkpoint, menu.plan, target)
    # Memory of all steps, so that none is refused hours later.
    prepare(run, opened, menu.plan, ranks, [*session.steps(compared), *of_texts])
    mixtures = BestMixtures(menu, session.scores(keeps_only=run.dry_run))
    choice = _Choice(session, mixtures)
    if run.dry_run:
        mixture = mixtures.smallest(budget.value) if limit is None else mixtures.best(limit)
        reporter.on_note("--fit: this mixture follows from the scores; nothing is compared on other texts")
    elif limit is None:
        mixture = choice.smallest(budget.value)
    else:
        mixture = choice.within(limit)
    for line in _chosen(mixtures, mixture):
        reporter.on_note(f"--fit: {line}")

    on_gpus = budget.kind == "gpu"
    asked = {**vars(run), **vars(recipe), **vars(fit), **vars(texts)}
    points = Points(mixtures, asked, fit.fit, limit if on_gpus else None, choice.ratio)
    found = points.result(
        choice.points(points, mixture),
        opened.source,
        choice.corpus if choice.measured else session.scored,
        fit.engines,
        fit.fit if on_gpus else None,
    )
    return as_options(recipe, menu, mixture), found


def _chosen(mixtures: BestMixtures, mixture: Mixture) -> Iterator[str]:
    """Say for units of one name what they get, and what part of the predicted KL and of the bytes is theirs."""
    by_name: dict[str, dict[str, int]] = {}
    kl: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for number, unit in enumerate(mixtures.menu.units):
        choice = mixture[number]
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", unit.patterns[0], count=1)
        chosen = by_name.setdefault(name, {})
        chosen[choice] = chosen.get(choice, 0) + 1
        kl[name] = kl.get(name, 0.0) + mixtures.scores[number][choice]
        sizes[name] = sizes.get(name, 0) + unit.choices[choice].nbytes
    all_kl, all_bytes = sum(kl.values()) or 1.0, sum(sizes.values())
    for name, chosen in by_name.items():
        counts = ", ".join(f"{choice} {count}" for choice, count in sorted(chosen.items()))
        share, part = 100 * kl[name] / all_kl, 100 * sizes[name] / all_bytes
        yield f"{name}: {counts}; {share:.0f} % of the predicted KL, {part:.0f} % of the bytes"


class _Choice:
    """Chooses a mixture by its figures on texts that no score is from."""

    def __init__(self, session: Session, mixtures: BestMixtures) -> None:
        self.session, self.mixtures = session, mixtures
        self.menu, self.reporter = session.menu, session.reporter
        # What was measured, the last mixture first in each pass.
        self.measured: list[tuple[Mixture, Sequence[DocumentRecord]]] = []

    @cached_property
    def corpus(self) -> Corpus:
        """The texts of the comparison."""
        return self.session.corpus()

    def within(self, nbytes: int) -> Mixture:
        """Return the best mixture of a size, or the single scheme that it is no better than."""
        named = {"the mixture": self.mixtures.best(nbytes)}
        best = self.mixtures.best_uniform(nbytes)
        if best is not None:
            named[f"--scheme {best}"] = self.menu.uniform(best)
        self.reporter.on_note(f"--fit: comparing {' and '.join(named)} on {self.corpus.described}")
        records = self.session.measure(self.corpus, list(named.values()))
        for (name, mixture), found in zip(named.items(), records, strict=True):
            self._report(name, mixture, found)
        if best is None:
            return named["the mixture"]
        # By document; below zero where the mixture is closer to the source.
        differences = [mixed.kl - single.kl for mixed, single in zip(*records, strict=True)]
        interval = bootstrap_interval(differences, 0)
        if interval is not None and interval[1] < 0:
            return named["the mixture"]
        self.reporter.on_note(f"--fit: the mixture is not better beyond chance, so --scheme {best} is taken")
        return named[f"--scheme {best}"]

    def smallest(self, kl: float) -> Mixture:
        """Return the smallest mixture that loses at most so much.

        Raises:
            PlanError: none was found.
        """
        # Measured over predicted: it depends on the texts, and hardly on the mixture.
        factor, found, aim = 1.0, None, kl
        for _ in range(ROUNDS):
            mixture = self.mixtures.smallest(aim / factor)
            [records] = self.session.measure(self.corpus, [mixture])
            measured = mean_kl(records)
            self._report("the mixture", mixture, records)
            if measured <= kl and (found is None or self.menu.size(mixture) < self.menu.size(found)):
                found = mixture
            if CLOSE_ENOUGH * kl <= measured <= kl:
                break
            factor = max(measured, SMALLEST) / max(self.mixtures.predict(mixture), SMALLEST)
            # In the middle of what is close enough: what aims at the limit misses it half the time.
            aim = (1 + CLOSE_ENOUGH) / 2 * kl
        if found is None:
            raise PlanError(f"{ROUNDS} mixtures were measured, and none has a KL of {kl:g}", "give a larger kl=")
        return found

    @property
    def ratio(self) -> float:
        """Measured over predicted KL divergence of the first mixture that was measured; 1 if none was."""
        if not self.measured:
            return 1.0
        mixture, records = self.measured[0]
        return max(mean_kl(records), SMALLEST) / max(self.mixtures.predict(mixture), SMALLEST)

    def points(self, make: Points, written: Mixture) -> Iterable[Point]:
        """Make the points of what was measured, and of the other sizes and schemes by their scores.

        Args:
            make: makes points.
            written: the mixture that was chosen.
        """
        named = {f"--fit {make.budget}": written}
        named |= mixtures_of_sizes(self.menu, self.mixtures)
        points = {}
        for name, mixture in named.items():
            records_of = next((records for measured, records in self.measured if measured == mixture), None)
            # A scheme's own name stays; two names of one mixture are one point.
            key = tuple(mixture.items())
            if key not in points or name in self.menu.plans:
                points[key] = make.point(name, mixture, records_of, written=mixture == written)
        return points.values()

    def _report(self, name: str, mixture: Mixture, records: Sequence[DocumentRecord]) -> None:
        self.measured.append((mixture, records))
        nbytes = self.menu.size(mixture)
        interval = bootstrap_interval([record.kl for record in records], 0)
        within = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
        bits = bits_per_weight(self.menu.units, nbytes - self.menu.fixed)
        self.reporter.on_note(
            f"--fit: {name}: KL {mean_kl(records):.4f}{within} nats, {nbytes / 1e9:.3g} GB, {bits:.2f} bits a weight"
        )


def _limit(budget: Budget, menu: Menu, fit: FitOptions, options: PlanOptions) -> int | None:
    """How many bytes all weights may take; None if a KL divergence decides.

    Raises:
        PlanError: even the smallest mixture is larger, or the unquantized model fits.
    """
    if budget.kind == "kl":
        return None
    if budget.kind == "bits":
        limit = menu.bytes_of_bits(budget.value)
    elif budget.kind == "size":
        limit = int(budget.value)
    else:
        limit = weights_on_gpus(budget, menu.plan, fit.context, options.fp8_kv_cache)
    smallest, largest = menu.smallest, menu.largest
    if limit < smallest:
        raise PlanError(
            f"--fit {fit.fit} leaves {limit / 1e9:.3g} GB for weights, and the smallest mixture takes "
            f"{smallest / 1e9:.3g} GB ({bits_per_weight(menu.units, smallest - menu.fixed):.2f} bits a weight)",
            "give more, name --candidates of fewer bits (int3), or add --quantize-lm-head, unless the head is tied",
        )
    if limit >= largest:
        raise PlanError(
            f"--fit {fit.fit} leaves {limit / 1e9:.3g} GB for weights, and the unquantized ones take "
            f"{largest / 1e9:.3g} GB",
            "serve the model as it is, or give a smaller budget, such as --fit 5.0bits",
        )
    return limit


def as_options(recipe: Recipe, menu: Menu, mixture: Mixture) -> Recipe:
    """Return the options of compress that stand for a mixture.

    Raises:
        PlanError: it leaves everything unquantized.
    """
    sizes: dict[str, int] = {}
    patterns: dict[str, list[str]] = {}
    for number, unit in enumerate(menu.units):
        name = unit.choices[mixture[number]].scheme_name
        sizes[name] = sizes.get(name, 0) + unit.elements
        patterns.setdefault(name, []).extend(unit.patterns)
    ignored = (*recipe.ignore, *joined_patterns(patterns.pop(UNQUANTIZED, ())))
    if not patterns:
        raise PlanError("only unquantized weights lose so little", "give a larger kl=, or serve the model as it is")
    base: Any = max(patterns, key=lambda name: sizes[name])
    others = {name: joined_patterns(named) for name, named in patterns.items() if name != base}
    scheme_for: Any = {pattern: name for name, named in others.items() for pattern in named}
    return replace(recipe, scheme=base, scheme_for=scheme_for or None, ignore=ignored)


def joined_patterns(patterns: Iterable[str]) -> list[str]:
    """Join patterns that differ in their first number alone, which is the layer's.

    Args:
        patterns: patterns of module names: "model.layers.0.mlp.down_proj".

    Returns:
        Patterns that match the same modules: "model.layers.{0,2,9}.mlp.down_proj".
    """
    by_rest: dict[tuple[str, str], list[str]] = {}
    for pattern in patterns:
        before, number, after = re.fullmatch(r"(?:(.*?\.)(\d+)(?=\.))?(.*)", pattern).groups("")  # type: ignore[union-attr]
        by_rest.setdefault((before, after), []).append(number)
    return [
        f"{before}{numbers[0] if len(numbers) == 1 else '{' + ','.join(sorted(numbers, key=int)) + '}'}{after}"
        for (before, after), numbers in by_rest.items()
    ]
