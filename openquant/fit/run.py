"""`compress --fit`: finds the mixture of a size, and says it as options of compress.

Scores come from a few short texts. The chosen mixture and the best single scheme that fits are then compared on other
texts, and the single scheme is taken unless the mixture is closer to the source by more than chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..convert.conversion import worth_compiling
from ..convert.devices import loops
from ..distributed import Ranks
from ..errors import PlanError, UsageError
from ..evaluation.kl import DocumentRecord, bootstrap_interval, mean
from ..files.destination import Destination, ProtectedPaths
from ..files.fingerprint import Fingerprint
from ..formats.schemes import find_scheme
from ..hub.shards import supply_shards
from ..hub.source import model_folder
from ..job import Opened, open_source
from ..options import CalibrationTexts, FitOptions, Recipe, Run, Texts, files_read, flags_of, options_of
from ..plan import summary
from ..plan.decisions import PlanOptions
from ..plan.engines import sglang_refusal
from ..plan.plan import Plan, make_plan
from ..plan.tensor_parallel import text_config
from ..registry.architecture import Architecture
from ..reporter import Reporter
from ..streaming.session import BUDGET, ArrivingShards, find_tokenizer, hidden_bytes, scratch_for, vocabulary_of
from ..version import __version__
from ..vllm_probe.choose import ArchitectureChoice
from .allocation import find_frontier
from .budget import Budget, read_budget, weights_on_gpus
from .kept_scores import SCORES, SUFFIX, read_scores, scores_json
from .units import UNQUANTIZED, Unit, bits_per_weight, units_of

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..streaming.model import StreamedModel
    from .scores import Mixture, Scores

# Weights only, of all sizes from four bits on, as compress writes them.
MENU = ("int4", "nvfp4", "int5", "int6", "int8-weights")
# Options of a recipe that --fit decides.
CHOSEN = (
    *("scheme", "scheme_for", "format", "scale_format", "activation_scheme", "group_size", "asymmetric", "no_search"),
    *("smooth", "awq"),
)
# Documents and tokens of each that scores are measured on, and of those that the choice is checked on.
SCORED = (3, 96)
CHECKED = (16, 256)
# How often a mixture is chosen anew for a KL divergence.
ROUNDS = 3
# A mixture that loses between this share of the allowed KL divergence and all of it is taken.
CLOSE_ENOUGH = 0.9
# KL divergences below are taken as this one, in nats.
SMALLEST = 1e-9


@dataclass(frozen=True, eq=False)
class _Menu:
    """What can be chosen: a plan for each scheme, and the units with their choices.

    Attributes:
        plans: by name of the scheme.
        units: the units.
        fixed: bytes of everything else in the output.
    """

    plans: Mapping[str, Plan]
    units: Sequence[Unit]
    fixed: int

    def size(self, mixture: Mixture) -> int:
        """Bytes of all weights of the output with a mixture."""
        return self.fixed + sum(unit.choices[mixture[number]].nbytes for number, unit in enumerate(self.units))

    def uniform(self, name: str) -> Mixture:
        """The mixture in which each unit has one scheme, as far as it can."""
        return {number: name if name in unit.choices else UNQUANTIZED for number, unit in enumerate(self.units)}


def choose_mixture(
    run: Run,
    recipe: Recipe,
    options: PlanOptions,
    fit: FitOptions,
    texts: CalibrationTexts,
    architecture: ArchitectureChoice,
    ranks: Ranks,
    reporter: Reporter,
) -> Recipe:
    """Find the mixture of schemes for a budget.

    Args:
        run: options of the run: the model, the output, memory and device.
        recipe: options of the output; its scheme is replaced.
        options: what the plan is made with besides the scheme.
        fit: the budget, the context and the engines.
        texts: options that say which texts are read.
        architecture: finds the registry's entry.
        ranks: the processes of this run.
        reporter: receives notes and progress.

    Returns:
        The recipe with the schemes of the mixture: `scheme`, `scheme_for` and `ignore`.

    Raises:
        UsageError: options contradict --fit, or there are several ranks.
        PlanError: nothing fits, or no scheme of the menu can be used for this model.
        SourceError: the model or a text cannot be read.
        OutputError: hidden states or scores cannot be written.
    """
    assert fit.fit is not None
    budget = read_budget(fit.fit)
    refuse_options(recipe, ranks)
    opened = open_source(run, ranks)
    menu = _menu(opened, options, fit, architecture.entry(opened.checkpoint, None))
    limit = _limit(budget, menu, fit, options)
    session = _Session(run, opened, menu, ranks, reporter)
    candidates = _Candidates(menu, session.scores(texts))
    if run.dry_run:
        mixture = candidates.smallest(budget.value) if limit is None else candidates.best(limit)
        reporter.calibrating("--fit: this mixture follows from the scores; nothing is compared on other texts")
    elif limit is None:
        mixture = session.smallest(budget.value, candidates, texts)
    else:
        mixture = session.checked(limit, candidates, texts)
    return _as_options(recipe, menu, mixture)


class _Candidates:
    """The best mixtures of all sizes, by their predicted KL divergence.

    Args:
        menu: the units and their choices.
        scores: KL divergence of each unit in each of its choices.
    """

    def __init__(self, menu: _Menu, scores: Scores) -> None:
        self.menu, self.scores = menu, scores
        self._names = [list(unit.choices) for unit in menu.units]
        self.frontier = find_frontier(
            [
                [(unit.choices[name].nbytes, kl[name]) for name in names]
                for unit, names, kl in zip(menu.units, self._names, scores.kl, strict=True)
            ]
        )

    def best(self, nbytes: int) -> Mixture:
        """Return the mixture with the least KL divergence of which all weights take at most so many bytes."""
        index = self.frontier.within(nbytes - self.menu.fixed)
        assert index is not None, "the smallest mixture is larger"
        return self._mixture(index)

    def smallest(self, kl: float) -> Mixture:
        """Return the smallest mixture with at most so large a KL divergence."""
        index = self.frontier.at_most(kl)
        assert index is not None, "unquantized weights lose nothing"
        return self._mixture(index)

    def _mixture(self, index: int) -> Mixture:
        chosen = self.frontier.choices(index)
        return {number: names[at] for number, (names, at) in enumerate(zip(self._names, chosen, strict=True))}

    def predicted(self, mixture: Mixture) -> float:
        """Return the predicted KL divergence of a mixture: the sum over its units."""
        return sum(self.scores.kl[number][name] for number, name in mixture.items())

    def best_uniform(self, nbytes: int) -> str | None:
        """Return the scheme with the least KL divergence that fits if all units have it; None if none fits."""
        mixtures = {name: self.menu.uniform(name) for name in self.menu.plans}
        fitting = [name for name, mixture in mixtures.items() if self.menu.size(mixture) <= nbytes]
        return min(fitting, key=lambda name: self.predicted(mixtures[name]), default=None)


def refuse_options(recipe: Recipe, ranks: Ranks) -> None:
    """Refuse options that --fit decides.

    Args:
        recipe: options of the output.
        ranks: the processes of the run.

    Raises:
        UsageError: one of CHOSEN is given, or there are several ranks.
    """
    if ranks.size > 1:
        raise UsageError("several ranks cannot share --fit", "run it in one process, and the others with its --recipe")
    given = [name for name in CHOSEN if getattr(recipe, name) != getattr(Recipe(), name)]
    flag = next((flags_of(name, options_of(Recipe)[name])[0] for name in given), None)
    if flag is not None:
        raise UsageError(f"--fit chooses the schemes, and {flag} is given", "leave one of them out")


def _menu(opened: Opened, options: PlanOptions, fit: FitOptions, entry: Architecture | str | None) -> _Menu:
    """Make a plan for each scheme that engines load for this model."""
    plans: dict[str, Plan] = {}
    problem: PlanError | None = None
    for name in MENU:
        try:
            plan = make_plan(opened.checkpoint, find_scheme(name), options, opened.source.identity, entry)
        except PlanError as error:
            problem = error
            continue
        if fit.engines == "vllm" or sglang_refusal(plan.entry, plan.decisions) is None:
            plans[name] = plan
    units = units_of(plans) if plans else []
    if not units:
        raise problem or PlanError("no scheme of weights alone fits this model", "choose one with --scheme")
    first = next(iter(plans))
    if plans[first].model.repeats:
        raise PlanError(
            f"{plans[first].model.name} runs its layers several times, and --fit measures a layer after its first pass",
            "choose a scheme with --scheme",
        )
    of_units = sum(unit.choices[first if first in unit.choices else UNQUANTIZED].nbytes for unit in units)
    return _Menu(plans, units, summary.output_bytes(plans[first]) - of_units)


def _limit(budget: Budget, menu: _Menu, fit: FitOptions, options: PlanOptions) -> int | None:
    """How many bytes all weights may take; None if a KL divergence decides.

    Raises:
        PlanError: even the smallest mixture is larger, or the unquantized model fits.
    """
    if budget.kind == "kl":
        return None
    first = next(iter(menu.plans.values()))
    if budget.kind == "bits":
        # Two decimals are meant: nvfp4 has a little more than 4.5 bits.
        limit = menu.fixed + int((budget.value + 0.005) * sum(unit.elements for unit in menu.units) / 8)
    elif budget.kind == "size":
        limit = int(budget.value)
    else:
        config = text_config(first.decoded, first.model)
        limit = weights_on_gpus(budget, first, config, fit.context, options.fp8_kv_cache)
    smallest = menu.fixed + sum(min(choice.nbytes for choice in unit.choices.values()) for unit in menu.units)
    largest = menu.fixed + sum(unit.choices[UNQUANTIZED].nbytes for unit in menu.units)
    if limit < smallest:
        raise PlanError(
            f"--fit {fit.fit} leaves {limit / 1e9:.3g} GB for weights, and the smallest mixture takes "
            f"{smallest / 1e9:.3g} GB ({bits_per_weight(menu.units, smallest - menu.fixed):.2f} bits a weight)",
            "give more, or quantize more layers, such as the output head by --quantize-lm-head",
        )
    if limit >= largest:
        raise PlanError(
            f"--fit {fit.fit} leaves {limit / 1e9:.3g} GB for weights, and the unquantized ones take "
            f"{largest / 1e9:.3g} GB",
            "serve the model as it is, or give a smaller budget",
        )
    return limit


class _Session:
    """Runs texts through the model for one choice."""

    def __init__(self, run: Run, opened: Opened, menu: _Menu, ranks: Ranks, reporter: Reporter) -> None:
        self.run, self.opened, self.menu, self.ranks, self.reporter = run, opened, menu, ranks, reporter
        source = opened.source
        self.directory = (
            Path(run.output).absolute().parent if run.output else source.default_path("x").absolute().parent
        )
        self.plan = next(iter(menu.plans.values()))

    def scores(self, texts: CalibrationTexts) -> Scores:
        """Measure the scores, or read those of an earlier run."""
        from .scores import find_variants, scores_of

        corpus = self._corpus(texts, SCORED, "calibration")
        opened = self.opened
        stamp = Fingerprint(opened.checkpoint, opened.source.remote, opened.source.identity, opened.stamps).stamp
        libraries = {name: version(name) for name in ("torch", "transformers")}
        conditions = {"model": stamp, "texts": corpus.sha256, "openquant": __version__, **libraries}
        folder, read = model_folder(self.run.model), files_read(vars(texts))
        protected = ProtectedPaths((folder,), read)
        target = Destination(self.directory / f"{opened.source.name}{SUFFIX}", "", SCORES, protected)
        target.require()
        kept = read_scores(target.path, self.menu.units, conditions)
        if kept is None and self.run.dry_run:
            raise UsageError(
                f"--dry-run writes nothing, and there are no scores of this model in {target.path}",
                "leave --dry-run out once: the scores are kept",
            )
        if kept is not None:
            self.reporter.calibrating(f"--fit: scores of {len(kept.kl)} units from {target.path}")
            return kept
        self.reporter.calibrating(
            f"--fit: scoring {len(self.menu.units)} units in {', '.join(self.menu.plans)} with {corpus.described}"
        )
        mixtures, changes = find_variants(self._model(), self.menu.units)
        records, changed = self._measure(corpus, mixtures, changes)
        scores = scores_of(self.menu.units, mixtures, changes, records, changed)
        target.write(scores_json(scores, self.menu.units, conditions))
        return scores

    def checked(self, nbytes: int, candidates: _Candidates, texts: CalibrationTexts) -> Mixture:
        """Return the best mixture of a size, or the single scheme that it is no better than on other texts."""
        named = {"the mixture": candidates.best(nbytes)}
        best = candidates.best_uniform(nbytes)
        if best is not None:
            named[f"--scheme {best}"] = self.menu.uniform(best)
        corpus = self._corpus(texts, CHECKED, "evaluation")
        self.reporter.calibrating(f"--fit: comparing {' and '.join(named)} on {corpus.described}")
        records, _ = self._measure(corpus, list(named.values()))
        for (name, mixture), found in zip(named.items(), records, strict=True):
            self._report(name, mixture, found)
        if best is None:
            return named["the mixture"]
        # By document; below zero where the mixture is closer to the source.
        differences = [mixed.kl - single.kl for mixed, single in zip(*records, strict=True)]
        interval = bootstrap_interval(differences, 0)
        if interval is not None and interval[1] < 0:
            return named["the mixture"]
        self.reporter.calibrating(f"--fit: the mixture is not better beyond chance, so --scheme {best} is taken")
        return named[f"--scheme {best}"]

    def smallest(self, kl: float, candidates: _Candidates, texts: CalibrationTexts) -> Mixture:
        """Return the smallest mixture that loses at most so much on other texts.

        Raises:
            PlanError: none was found.
        """
        corpus = self._corpus(texts, CHECKED, "evaluation")
        # Measured over predicted: it depends on the texts, and hardly on the mixture.
        factor, found = 1.0, None
        for _ in range(ROUNDS):
            mixture = candidates.smallest(kl / factor)
            [records], _ = self._measure(corpus, [mixture])
            measured = _mean(records)
            self._report("the mixture", mixture, records)
            if measured <= kl and (found is None or self.menu.size(mixture) < self.menu.size(found)):
                found = mixture
            if CLOSE_ENOUGH * kl <= measured <= kl:
                break
            factor = max(measured, SMALLEST) / max(candidates.predicted(mixture), SMALLEST)
        if found is None:
            raise PlanError(f"{ROUNDS} mixtures were measured, and none has a KL of {kl:g}", "give a larger kl=")
        return found

    def _report(self, name: str, mixture: Mixture, records: Sequence[DocumentRecord]) -> None:
        nbytes = self.menu.size(mixture)
        interval = bootstrap_interval([record.kl for record in records], 0)
        within = "" if interval is None else f" [{interval[0]:.4f}, {interval[1]:.4f}]"
        bits = bits_per_weight(self.menu.units, nbytes - self.menu.fixed)
        self.reporter.calibrating(
            f"--fit: {name}: KL {_mean(records):.4f}{within} nats, {nbytes / 1e9:.3g} GB, {bits:.2f} bits a weight"
        )

    def _corpus(self, texts: CalibrationTexts, amount: tuple[int, int], purpose: Any) -> Corpus:
        from ..data.corpus import read_corpus

        samples, length = amount
        wanted = Texts(texts.text, dataset=texts.dataset, samples=max(samples, len(texts.text)), length=length)
        opened = self.opened
        tokenizer = find_tokenizer(opened.source, opened.checkpoint)
        return read_corpus(wanted, tokenizer, purpose, vocabulary_of(opened.checkpoint))

    def _model(self) -> StreamedModel:
        from ..streaming.model import StreamedModel

        return StreamedModel(self.opened.checkpoint, device=self.opened.device)

    def _measure(
        self,
        corpus: Corpus,
        mixtures: Sequence[Mixture],
        changes: Mapping[int, Sequence[str]] | None = None,
    ) -> tuple[list[list[DocumentRecord]], dict[tuple[int, str], float]]:
        from ..streaming.model import shards_by_unit
        from .scores import measure_mixtures

        opened, reporter = self.opened, self.reporter
        streamed = self._model()
        shards = shards_by_unit(streamed)
        source = opened.source
        fingerprint = Fingerprint(opened.checkpoint, source.remote, source.identity, opened.stamps)
        tokens = (1 + len(mixtures)) * len(corpus.documents) * corpus.length
        hidden = hidden_bytes(opened.checkpoint, tokens)
        with ExitStack() as stack:
            offload = scratch_for(hidden, self.directory, BUDGET, may_be_in_memory=False)
            scratch = stack.enter_context(offload) if offload else None
            supplies = supply_shards([(source, shards)], self.run.stream, self.directory, hidden if offload else 0)
            [supply] = stack.enter_context(supplies)
            streamed.shard_provider = ArrivingShards(supply, shards, source.name, fingerprint, self.ranks, hashes=False)
            measured = measure_mixtures(
                streamed,
                self.menu.units,
                self.plan.decisions.fused,
                corpus,
                mixtures,
                loops(worth_compiling(self.plan)),
                changes=changes,
                scratch=scratch,
                progress=reporter.calibrated,
                remaining=reporter.remaining,
            )
        fingerprint.require_unchanged()
        return measured


def _mean(records: Sequence[DocumentRecord]) -> float:
    return mean(np.concatenate([record.kl for record in records]))


def _as_options(recipe: Recipe, menu: _Menu, mixture: Mixture) -> Recipe:
    """The options of compress that stand for a mixture."""
    sizes: dict[str, int] = {}
    patterns: dict[str, list[str]] = {}
    for number, unit in enumerate(menu.units):
        name = unit.choices[mixture[number]].scheme_name
        sizes[name] = sizes.get(name, 0) + unit.elements
        patterns.setdefault(name, []).extend(unit.patterns)
    ignored = (*recipe.ignore, *patterns.pop(UNQUANTIZED, ()))
    if not patterns:
        raise PlanError("only unquantized weights lose so little", "give a larger kl=, or serve the model as it is")
    base: Any = max(patterns, key=lambda name: sizes[name])
    scheme_for: Any = {pattern: name for name, named in patterns.items() if name != base for pattern in named}
    return replace(recipe, scheme=base, scheme_for=scheme_for or None, ignore=ignored)
