"""The verbs as functions, each read from top to bottom: open, plan, calibrate, plan again, convert, publish.

Nothing is printed. `calibrate` and `evaluate` have modules of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibration.prepare import run_texts, texts_steps
from .diagnosis.diagnose import diagnose_layers, shards_to_read
from .diagnosis.result import Diagnosis
from .diagnosis.suggestions import with_advice
from .distributed import Ranks
from .errors import UsageError
from .files.cards import card_of, says_folds
from .files.fingerprint import Fingerprint
from .files.journal import Provenance, finished_files, output_errors
from .files.small_files import read_small
from .formats.names import UNCHANGED, ActivationScheme, CacheScheme, FormatName, GroupSize, ScaleFormat, SchemeName
from .formats.schemes import SCHEMES, Scheme, find_others, find_scheme
from .hub.publish import Publisher
from .hub.shards import supply_shards
from .hub.source import silent
from .job import (
    MOST_WORKERS,
    Prepared,
    connected,
    in_all_ranks,
    open_model,
    open_source,
    output_of,
    prepare,
    prepare_alike,
    without_collector,
)
from .machine import available_cpus, peak_rss
from .options import CalibrationTexts, Diagnose, Explain, ModelSource, Push, Recipe, Run, documented
from .plan import summary
from .plan.config import has_fp8_cache, ignored_layers
from .plan.decisions import PlanOptions
from .plan.explain import Explanation, explain_modules
from .plan.plain import make_plain_plan
from .plan.plan import Plan, make_plan
from .plan.serving import serving_to_json
from .plan.unchanged import make_unchanged_plan
from .recipes import recipe_of
from .report.escape import terminal
from .reporter import Reporter
from .result import Result
from .run import Outcome, carry_out, take_evaluation
from .verification.finished import require_sound
from .vllm_probe.choose import ArchitectureChoice
from .weights.statistics import read_calibration
from .weights.transform import UNDECIDED

if TYPE_CHECKING:
    from .data.corpus import Corpus

# Of what is decoded.
FOLDED = "norms stay as the output has them, folded with the weights: both together are the model, neither alone"


@documented(Run, Recipe, CalibrationTexts)
def compress(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    scheme: SchemeName = "tensor",
    *,
    format: FormatName | None = None,
    scale_format: ScaleFormat | None = None,
    activation_scheme: ActivationScheme = "dynamic",
    calibration: str | os.PathLike[str] | None = None,
    calibrate: bool = False,
    smooth: float | None = None,
    awq: bool = False,
    gptq: bool = False,
    kv_cache: CacheScheme = "auto",
    group_size: GroupSize | None = None,
    asymmetric: bool = False,
    no_search: bool = False,
    ignore: str | Sequence[str] = (),
    scheme_for: Mapping[str, SchemeName] | Sequence[tuple[str, SchemeName]] | None = None,
    tp: int | None = None,
    quantize_lm_head: bool = False,
    architecture: str | None = None,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    samples: int = 128,
    length: int = 512,
    dry_run: bool = False,
    device: str = "cpu",
    workers: int | None = None,
    max_memory: int | str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    stream: bool = False,
    push: Push | None = None,
    ranks: Ranks | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Turn a checkpoint into an FP8, INT8, INT4 or FP4 directory.

    A calibration that it makes is `NAME.calibration.safetensors` beside the output, where NAME is the model's. It is
    used again by whatever else is made there of this model with these texts.

    Args:
        ranks: this process among several that do the job together; on its own if None.
        reporter: is told the plan and the progress.

    Returns:
        What was done, or with `dry_run` would be.

    Raises:
        OpenQuantError: something the caller can fix; see errors.py for the kinds.
    """
    recipe = Recipe.parse(
        scheme=scheme,
        format=format,
        scale_format=scale_format,
        activation_scheme=activation_scheme,
        calibration=calibration,
        calibrate=calibrate,
        smooth=smooth,
        awq=awq,
        gptq=gptq,
        kv_cache=kv_cache,
        group_size=group_size,
        asymmetric=asymmetric,
        no_search=no_search,
        ignore=ignore,
        scheme_for=scheme_for,
        tp=tp,
        quantize_lm_head=quantize_lm_head,
        architecture=architecture,
    )
    texts = CalibrationTexts.parse(text=text, dataset=dataset, samples=samples, length=length)
    request = check_recipe(recipe, texts)
    run = Run.parse(
        model=model,
        output=output,
        dry_run=dry_run,
        device=device,
        workers=workers,
        max_memory=max_memory,
        revision=revision,
        overwrite=overwrite,
        stream=stream,
        push=push,
    )
    options = request.options
    if recipe.calibration is not None:
        options = replace(options, calibration=read_calibration(Path(recipe.calibration)))
    reporter, began = reporter or Reporter(), time.monotonic()
    with connected(ranks) as ranks:
        prepared = prepare_alike(ranks, lambda: _plan(run, request, options, ranks))
        _tell_plan(prepared, ranks, reporter)
        if run.dry_run:
            return _result(prepared, began, Outcome())
        corpus = None
        if prepared.plan.lacks:
            found, corpus = in_all_ranks(ranks, lambda: run_texts(prepared, recipe, texts, options, ranks, reporter))
            prepared = prepare_alike(ranks, lambda: _plan(run, request, found, ranks, again=True))
            reporter.planned(prepared.plan, prepared.source, prepared.target)
        return _write(prepared, corpus, ranks, reporter, began)


@dataclass(frozen=True)
class Request:
    """What compress() is asked for.

    Attributes:
        recipe: as it was asked for.
        texts: of a calibration, if the plan needs one.
        scheme: of all layers that have no other; None for weights as they are.
        options: for the plan, before anything is calibrated.
        architecture: finds the registry's entry to plan by.
    """

    recipe: Recipe
    texts: CalibrationTexts
    scheme: Scheme | None
    options: PlanOptions
    architecture: ArchitectureChoice


def check_recipe(recipe: Recipe, texts: CalibrationTexts) -> Request:
    """Refuse what makes no sense, before anything is opened.

    Raises:
        UsageError: options that do not go together, or that nothing uses.
    """
    if recipe.kv_cache not in ("fp8", "auto"):
        raise UsageError(f"{recipe.kv_cache} is not a cache", "choose fp8 or auto")
    scheme, others = _schemes(recipe)
    cached = recipe.kv_cache == "fp8"
    asked = "--calibrate" if recipe.calibrate else "--calibration" if recipe.calibration is not None else None
    scaled = cached or any(each.format.input_scale for each in (scheme, *(other for _, other in others)) if each)
    smoothing = recipe.awq or recipe.smooth is not None
    if recipe.gptq:
        _require_texts(recipe, scaled or smoothing)
    if recipe.smooth is not None:
        _require_smooth(recipe.scheme, recipe.smooth)
    if recipe.awq:
        _require_awq(recipe)
    elif asked and not scaled and recipe.smooth is None:
        raise UsageError(
            f"nothing uses {asked}",
            "give --activation-scheme static, --scheme nvfp4-w4a4, --kv-cache fp8, --smooth 0.5 or --awq too, or leave "
            f"{asked} out",
        )
    expected = {"documents": texts.samples, "length": texts.length}
    options = PlanOptions(
        tuple(recipe.ignore),
        others,
        recipe.tp,
        recipe.quantize_lm_head,
        cached=cached,
        transforms=UNDECIDED if smoothing else None,
        gptq=expected if recipe.gptq else None,
        texts=expected,
        calibrate=recipe.calibrate or smoothing,
    )
    return Request(recipe, texts, scheme, options, ArchitectureChoice(recipe.architecture))


def _require_texts(recipe: Recipe, calibrated: bool) -> None:
    """Refuse a calibration that nothing uses: GPTQ reads texts itself."""
    if recipe.calibration is not None and not calibrated:
        raise UsageError(
            "GPTQ needs more of the texts than a calibration has: nothing uses --calibration",
            "leave it out, and name texts with --text or --dataset: GPTQ reads them itself",
        )


def _require_smooth(scheme: str, exponent: float) -> None:
    """Refuse an exponent that is none, and schemes whose activations are not rounded to INT8."""
    if not 0 < exponent <= 1:
        raise UsageError(f"--smooth {exponent:g} is not above 0 and at most 1", "give --smooth 0.5")
    if scheme != "int8":
        raise UsageError(
            f"--smooth brings --scheme {scheme} nothing: it is for activations that engines round to INT8",
            "use --scheme int8, or leave --smooth out",
        )


def _require_awq(recipe: Recipe) -> None:
    """Refuse AWQ where nothing is stored in groups of INT4, and beside SmoothQuant."""
    if "int4" not in (recipe.scheme, *(recipe.scheme_for or {}).values()):
        raise UsageError(
            f"--awq brings --scheme {recipe.scheme} nothing: it is for groups of INT4",
            "use --scheme int4, or leave --awq out",
        )
    if recipe.smooth is not None:
        raise UsageError("--smooth and --awq both divide inputs of layers", "give one of them")


def _schemes(recipe: Recipe) -> tuple[Scheme | None, tuple[tuple[str, Scheme], ...]]:
    """The scheme that is asked for, None for weights as they are; and those of patterns over module names."""
    if recipe.scheme == UNCHANGED:
        return None, ()
    scheme_for = recipe.scheme_for or {}
    grouped = {name for name, known in SCHEMES.items() if known.group_size}
    # What belongs to one of these goes to those that are mixed in, where that is the only place for it.
    own = recipe.scheme in grouped or grouped.isdisjoint(scheme_for.values())
    size, asymmetric = (recipe.group_size, recipe.asymmetric) if own else (None, False)
    chosen = find_scheme(recipe.scheme, recipe.format, recipe.scale_format, recipe.activation_scheme, size, asymmetric)
    others = find_others(chosen, scheme_for, recipe.group_size, recipe.asymmetric)
    if recipe.no_search:
        if not any(each.searches_scales for each in (chosen, *(other for _, other in others))):
            *most, last = (name for name, known in SCHEMES.items() if known.searches_scales)
            raise UsageError(
                f"--scheme {recipe.scheme} searches for no scales",
                f"use --scheme {', '.join(most)} or {last}, or leave --no-search out",
            )
        chosen, others = chosen.unsearched, tuple((pattern, other.unsearched) for pattern, other in others)
    return chosen, others


def _plan(run: Run, request: Request, options: PlanOptions, ranks: Ranks, again: bool = False) -> Prepared:
    """Open the source and plan what compress() makes of it.

    Args:
        run: what was asked for.
        request: what is made.
        options: for the plan, with what texts have shown so far.
        ranks: this process among several.
        again: whether texts were run: too little memory is no error any more.

    Raises:
        OpenQuantError: the source cannot be read or planned, or the run not be done.
    """
    recipe, texts, scheme = request.recipe, request.texts, request.scheme
    opened = open_source(run, ranks)
    source, checkpoint = opened.source, opened.checkpoint
    suffix = f"{scheme.suffix if scheme else ''}{'-KV8' if options.cached else ''}"
    with without_collector():
        calibration, fingerprint = options.calibration, Fingerprint(checkpoint, source.remote, source.identity)
        if calibration is not None and not fingerprint.matches(calibration.model, calibration.stamp):
            raise UsageError(
                f"{recipe.calibration or calibration.file} is a calibration of another model than {run.model}",
                "make one of this model: openquant calibrate MODEL -o FILE",
            )
        entry = request.architecture.entry(checkpoint, None if run.overwrite else output_of(run, source, suffix))
        if scheme is None:
            plan = make_unchanged_plan(checkpoint, options, source.identity, entry)
        else:
            plan = make_plan(checkpoint, scheme, options, source.identity, entry)
        plan = replace(plan, provenance=Provenance(recipe_of(recipe, texts), request.architecture.kept))
    if again:
        return prepare(run, opened, plan, ranks, refuse=False)
    if texts != CalibrationTexts() and not plan.lacks & {"activations", "Hessians"}:
        raise UsageError("texts are given, and nothing is calibrated", "give --calibrate too, or leave them out")
    steps = texts_steps(run, texts.length, source, checkpoint, plan, output_of(run, source, summary.suffix(plan)))
    return prepare(run, opened, plan, ranks, steps)


@documented(Run)
def dequantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    workers: int | None = None,
    max_memory: int | str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    stream: bool = False,
    push: Push | None = None,
    ranks: Ranks | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Turn a quantized checkpoint back into one of bfloat16 weights, whatever its architecture.

    Args:
        output: directory to write; if None, in the working directory, named `<name>-BF16`.
        ranks: this process among several that do the job together; on its own if None.
        reporter: is told the plan and the progress.

    Returns:
        What was done, or with `dry_run` would be.

    Raises:
        OpenQuantError: nothing in it is quantized, or something else the caller can fix.
    """
    run = Run.parse(
        model=model,
        output=output,
        dry_run=dry_run,
        workers=workers,
        max_memory=max_memory,
        revision=revision,
        overwrite=overwrite,
        stream=stream,
        push=push,
    )
    reporter, began = reporter or Reporter(), time.monotonic()
    with connected(ranks) as ranks:
        prepared = prepare_alike(ranks, lambda: _plan_dequantized(run, ranks))
        _tell_plan(prepared, ranks, reporter)
        if run.dry_run:
            return _result(prepared, began, Outcome())
        return _write(prepared, None, ranks, reporter, began)


def _plan_dequantized(run: Run, ranks: Ranks) -> Prepared:
    """Open the source and plan what dequantize() makes of it."""
    opened = open_source(run, ranks)
    with without_collector():
        plan = make_plain_plan(opened.checkpoint, opened.source.identity)
        if says_folds(card_of(opened.checkpoint)):
            plan = replace(plan, notes=(*plan.notes, FOLDED))
    return prepare(run, opened, plan, ranks)


def _tell_plan(prepared: Prepared, ranks: Ranks, reporter: Reporter) -> None:
    """Tell of the source and the plan; a calibration may take hours, and what it is for can be read meanwhile."""
    in_all_ranks(ranks, lambda: reporter.opened(prepared.source, prepared.target))
    reporter.planned(prepared.plan, prepared.source, prepared.target)


def _write(prepared: Prepared, corpus: Corpus | None, ranks: Ranks, reporter: Reporter, began: float) -> Result:
    """Carry out a plan that lacks nothing but what GPTQ finds with these texts."""
    in_all_ranks(ranks, lambda: prepared.source.fetch_files(prepared.plan.files))
    outcome = carry_out(prepared, ranks, reporter, corpus)
    result = _result(prepared, began, outcome)
    reporter.finished(result, outcome.already_complete)
    return result


def _result(prepared: Prepared, began: float, outcome: Outcome) -> Result:
    """What a run has done, or would do."""
    plan, source, published = prepared.plan, prepared.source, outcome.published
    return Result(
        model=os.fspath(prepared.run.model),
        revision=source.revision,
        output=str(prepared.target),
        scheme=summary.scheme_name(plan),
        schemes=summary.scheme_names(plan),
        kv_cache="fp8" if has_fp8_cache(plan) else "auto",
        folded=(plan.options.transforms and plan.options.transforms.title) or None,
        architecture=plan.model.name,
        dry_run=prepared.run.dry_run,
        source_bytes=summary.source_bytes(plan),
        output_bytes=summary.output_bytes(plan),
        download_bytes=source.remote_bytes([*plan.source.shards, *plan.files]),
        repository=published.repository if published else None,
        pushed_to=published.address if published else None,
        pushed_revision=published.revision if published else None,
        quantized_tensors=summary.quantized_tensors(plan),
        decoded_tensors=summary.decoded_tensors(plan),
        ignored_layers=ignored_layers(plan),
        shards=len(plan.layout.shards),
        tensor_parallel=summary.parallel_sizes(plan),
        serving=serving_to_json(*served) if (served := summary.serving(plan)) else None,
        seconds=round(time.monotonic() - began, 3),
        peak_rss_bytes=peak_rss(),
        resumed=outcome.resumed,
        not_finite={name: found.text for name, found in sorted(outcome.not_finite.items())},
        unread_shards=outcome.unread,
    )


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
    reporter = _KeptPlan()
    result = compress(model, None, scheme, revision=revision, dry_run=True, reporter=reporter, **options)
    return Explanation(
        model=result.model,
        revision=result.revision,
        architecture=result.architecture,
        scheme=result.scheme,
        layers=explain_modules(reporter.plan, layer),
    )


class _KeptPlan(Reporter):
    """Keeps the plan that it is told of."""

    def planned(self, plan: Plan, *_: object) -> None:
        self.plan = plan


@documented(Diagnose)
def diagnose(
    model: str | os.PathLike[str],
    scheme: SchemeName = "tensor",
    *,
    ignore: str | Sequence[str] = (),
    full: bool = False,
    architecture: str | None = None,
    revision: str | None = None,
    stream: bool = False,
    scratch: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Say of each layer of a checkpoint what quantizing will do to it, from its weights alone; nothing is written.

    Args:
        progress: told the bytes of weights read so far and in all, from any thread but never from two at once.

    Returns:
        What was found; `advice` has options of compress where another scheme halves the error of layers.

    Raises:
        OpenQuantError: NaN or infinity in a weight, or something else the caller can fix.
    """
    begun = Diagnose.parse(
        model=model,
        scheme=scheme,
        ignore=ignore,
        full=full,
        architecture=architecture,
        revision=revision,
        stream=stream,
        scratch=scratch,
        workers=workers,
    )
    chosen = find_scheme(begun.scheme)
    source, checkpoint = open_model(begun.model, begun.revision, begun.stream)
    options = PlanOptions(tuple(begun.ignore))
    with without_collector():
        plan = make_plan(
            checkpoint, chosen, options, source.identity, ArchitectureChoice(begun.architecture).entry(checkpoint)
        )
    with supply_shards([(source, shards_to_read(plan))], begun.stream, begun.scratch) as [supply]:
        # More than either brings nothing, and takes long to start.
        most = max(MOST_WORKERS, available_cpus())
        threads = min(begun.workers or min(MOST_WORKERS, available_cpus()), most)
        layers, not_finite = diagnose_layers(plan, supply, threads, begun.full, progress)
    rows = sum(layer.shape[0] for layer in layers)
    found = Diagnosis(
        model=os.fspath(model),
        revision=source.revision,
        architecture=plan.model.name,
        scheme=chosen.name,
        rows_read=sum(layer.rows for layer in layers) / rows if rows else 1.0,
        layers=layers,
        not_finite={name: held.text for name, held in not_finite.items()},
    )
    return with_advice(found, plan, begun.ignore)


def push(directory: str | os.PathLike[str], target: Push) -> str:
    """Publish a directory that compress() made.

    Args:
        directory: the directory; it must be finished.
        target: where to.

    Returns:
        The address of the commit or pull request.

    Raises:
        OpenQuantError: it is not finished or damaged, or cannot be published.
    """
    path = Path(directory)
    digest, files = finished_files(path)
    require_sound(path, files)
    shards = [name for name in files if name.endswith(".safetensors")]
    publisher = Publisher(target, path, digest, shards)
    others = [*files.difference(shards), *take_evaluation(publisher)]
    with silent():
        with output_errors(path, "read"):
            publisher.prepare(read_small(path / "README.md", f"{path}/README.md"))
        with publisher:
            return publisher.finish(sorted(others), terminal(path.resolve().name)).address
