"""`compress --fit`: finds the mixture of a size, and says it as options of compress.

Scores come from a few short texts. The chosen mixture and the best single scheme that fits are then compared on other
texts, and the single scheme is taken unless the mixture is closer to the source by more than chance.

`openquant fit --search`: size and KL divergence of mixtures and of single schemes, measured on the model itself.

    found = search_mixtures("Qwen/Qwen3-32B", "4090")
    [(point.name, point.bytes, point.kl) for point in found.points]

Tables, pages and cards show these points.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..calibration.run import texts_steps
from ..distributed import Ranks
from ..errors import PlanError
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean_kl
from ..fields import values_for, verb
from ..job import open_source, prepare
from ..options import FitOptions, Recipe, Run, Search, Texts
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..recipes import Request
from ..result import Reporter, default_reporter
from ..streaming.memory import memory_left
from .budget import Budget, read_budget, read_gpus, weights_on_gpus
from .menu import UNQUANTIZED, BestMixtures, Menu, Mixture, bits_per_weight, make_menu
from .session import Session
from .table import Point, SearchResult, words_of_options

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..hub.source import Source


# How often a mixture is chosen anew for a KL divergence.
ROUNDS = 3
# A mixture that loses between this share of the allowed KL divergence and all of it is taken.
CLOSE_ENOUGH = 0.9
# KL divergences below are taken as this one, in nats.
SMALLEST = 1e-9


def choose_mixture(request: Request, ranks: Ranks, reporter: Reporter) -> tuple[Recipe, SearchResult]:
    """Find the mixture of schemes for a budget.

    All ranks call this together, share what is measured, and find the same.

    Args:
        request: the checked options of compress(), with `fit`; the scheme of the recipe is replaced.
        ranks: the processes of this run.
        reporter: receives notes and progress.

    Returns:
        The recipe with the schemes of the mixture: `scheme`, `scheme_for` and `ignore`. And what they were chosen from.

    Raises:
        UsageError: options contradict --fit.
        PlanError: nothing fits, or no scheme of the menu can be used for this model.
        SourceError: the model or a text cannot be read, or ranks read different ones.
        OutputError: hidden states or scores cannot be written, or another rank has failed.
    """
    run = request.run
    recipe = request.recipe
    fit = request.fit
    assert fit.fit is not None
    budget = read_budget(fit.fit)

    opened = open_source(run, ranks, reporter)
    menu = make_menu(opened, request.options, fit.candidates, fit.engines, budget.gpu, recipe.architecture)
    limit = _limit(budget, menu, fit, request.options)
    session = Session(opened, menu, request.texts, opened.output_directory("").absolute().parent)

    # Memory of all steps, so that none is refused hours later.
    steps = session.steps(1 if limit is None else 2)
    prepare(opened, menu.plan, [*steps, *texts_steps(opened, menu.plan, request.texts.length)])

    mixtures = BestMixtures(menu, session.scores(keeps_only=run.dry_run))
    choice = _Choice(session, mixtures)
    if run.dry_run:
        mixture = mixtures.smallest(budget.value) if limit is None else mixtures.best(limit)
        reporter.on_note("--fit: this mixture follows from the scores; nothing is compared on other texts")
    elif limit is None:
        mixture = choice.smallest(budget.value)
    else:
        mixture = choice.within(limit)
    on_gpus = budget.kind == "gpu"
    asked = {**vars(run), **vars(recipe), **vars(fit), **vars(request.texts)}
    points = Points(mixtures, asked, fit.fit, limit if on_gpus else None, choice.ratio)
    found = points.result(
        choice.points(points, mixture),
        opened.source,
        choice.corpus if choice.measured else session.scored,
        fit.engines,
        fit.fit if on_gpus else None,
    )
    return as_options(recipe, menu, mixture), found


class _Choice:
    """Chooses a mixture by its figures on texts that no score is from."""

    def __init__(self, session: Session, mixtures: BestMixtures) -> None:
        self.session, self.mixtures = session, mixtures
        self.menu, self.reporter = session.menu, session.opened.reporter
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
    sizes: Counter[str] = Counter()
    patterns: dict[str, list[str]] = {}
    for number, unit in enumerate(menu.units):
        name = unit.choices[mixture[number]].scheme_name
        sizes[name] += unit.elements
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


@verb(Search, positional=("model", "gpu"))
def search_mixtures(request: Search, reporter: Reporter | None = None) -> SearchResult:
    """Measure mixtures of all sizes, and the single schemes, on texts that no score is from.

    The scores are kept beside the default output in `NAME.scores.json`, where `compress --fit` finds them. Nothing else
    is written. Weights are rounded to nearest.

    Args:
        model: Model directory, GGUF file, or Hub org/name[@rev].
        reporter: receives notes and progress; nothing is reported if None.

    Returns:
        The measured points, the smallest first.

    Raises:
        OpenQuantError: no scheme can be used for this model, there is no such GPU, or something else that the caller
            can fix.
    """
    reporter = reporter or default_reporter()
    budget = None if request.gpu is None else read_gpus(request.gpu)
    opened = open_source(Run(**values_for(Run, vars(request))), Ranks(), reporter)

    options = PlanOptions(tuple(request.ignore), head=request.quantize_lm_head, embedding=request.quantize_embeddings)
    wanted_engines = request.engines or "both"
    gpu_type = None if budget is None else budget.gpu
    menu = make_menu(opened, options, request.candidates, wanted_engines, gpu_type, request.architecture)

    limit = None
    # How much memory a CPU has for weights is not known.
    if budget is not None and budget.value:
        limit = weights_on_gpus(budget, menu.plan, request.context, request.kv_cache == "fp8")

    texts = Texts(request.text, dataset=request.dataset)
    session = Session(opened, menu, texts, opened.output_directory("").absolute().parent)
    fills = limit is not None and menu.smallest <= limit < menu.largest
    compared = len(menu.plans) + len(whole_and_half_bits(menu)) + fills
    memory_left(request.max_memory, session.steps(compared))

    best = BestMixtures(menu, session.scores())
    named = mixtures_of_sizes(menu, best)
    if limit is not None and fills:
        named[f"fits {request.gpu}"] = best.best(limit)

    corpus = session.corpus()
    reporter.on_note(f"--search: comparing {len(named)} outputs on {corpus.described}")
    records = session.measure(corpus, list(named.values()))
    points = Points(best, vars(request), request.gpu, limit)
    return points.result(
        [points.point(name, mixture, found) for (name, mixture), found in zip(named.items(), records, strict=True)],
        opened.source,
        corpus,
        wanted_engines,
        request.gpu,
    )


# Bits of a weight between two mixtures.
STEP = 0.5


def whole_and_half_bits(menu: Menu) -> list[float]:
    """Return whole and half bits a weight between the smallest and the largest single scheme."""
    bits = [bits_per_weight(menu.units, menu.size(menu.uniform(name)) - menu.fixed) for name in menu.plans]
    return [STEP * number for number in range(math.ceil(min(bits) / STEP), math.floor(max(bits) / STEP) + 1)]


def mixtures_of_sizes(menu: Menu, best: BestMixtures) -> dict[str, Mixture]:
    """Return the single schemes, and the best mixture of each whole and half bit, by name: "int5", "5.5bits"."""
    named = {name: menu.uniform(name) for name in menu.plans}
    bits = whole_and_half_bits(menu)
    return named | {f"{each:g}bits": best.best(menu.bytes_of_bits(each)) for each in bits}


# Options that every command repeats, and those that commands with --fit repeat.
_OUTPUT = ("ignore", "quantize_lm_head", "quantize_embeddings", "kv_cache", "architecture")
_MIXTURE = ("engines", "candidates", "text", "dataset")


@dataclass(frozen=True, eq=False)
class Points:
    """Makes points.

    Attributes:
        best: the scores of the units.
        asked: values of options by name, which commands repeat.
        budget: the value of --fit, or of --gpu; None if there is none.
        limit: bytes of all weights that fit; None if no GPUs are named.
        ratio: measured over predicted KL divergence, for points that were not measured.
    """

    best: BestMixtures
    asked: Mapping[str, Any]
    budget: str | None
    limit: int | None
    ratio: float = 1.0

    def command(self, name: str, is_scheme: bool) -> str:
        """Return the command that makes a point: a scheme, "5.5bits", or by any other name what fits the budget."""
        words = ["openquant", "compress", "-m", os.fspath(self.asked["model"]), *words_of_options(self.asked, _OUTPUT)]
        if is_scheme:
            return shlex.join([*words, "--scheme", name])

        if name.endswith("bits") and not name.startswith("-"):
            words += ["--fit", name]
        else:
            words += ["--fit", str(self.budget), *words_of_options(self.asked, ["context"])]
        return shlex.join([*words, *words_of_options(self.asked, _MIXTURE)])

    def result(
        self, points: Iterable[Point], source: Source, corpus: Corpus, engines: str, gpu: str | None
    ) -> SearchResult:
        """Return the result with these points, the smallest first.

        Args:
            points: the points.
            source: where the model comes from.
            corpus: the texts that they were measured on.
            engines: "vllm", "sglang" or "both".
            gpu: the GPUs as they were named; None if none were.
        """
        plan = self.best.menu.plan
        return SearchResult(
            model=os.fspath(self.asked["model"]),
            revision=source.revision,
            architecture=plan.model.name,
            source_bytes=summary.source_bytes(plan),
            texts=corpus.described,
            texts_sha256=corpus.sha256,
            engines=engines,
            gpu=gpu,
            context=self.asked["context"],
            limit=self.limit,
            points=tuple(sorted(points, key=lambda point: (point.bytes, point.kl))),
        )

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
        nbytes = menu.size(mixture)
        predicted = self.best.predict(mixture)
        kl = predicted * self.ratio
        interval = None
        if records is not None:
            kl = mean_kl(records)
            interval = bootstrap_interval([record.kl for record in records], 0)

        weights: Counter[str] = Counter()
        for number, unit in enumerate(menu.units):
            weights[unit.choices[mixture[number]].scheme_name] += unit.elements
        return Point(
            name=name,
            scheme=name if name in menu.plans else None,
            bytes=nbytes,
            bits=bits_per_weight(menu.units, nbytes - menu.fixed),
            predicted=predicted,
            kl=kl,
            interval=interval,
            measured=records is not None,
            shares={scheme: part / weights.total() for scheme, part in sorted(weights.items())},
            fits=None if self.limit is None else nbytes <= self.limit,
            written=written,
            command=self.command(name, name in menu.plans),
        )
