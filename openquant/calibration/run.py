"""Runs of texts through a model: calibrate() writes the input statistics of its layers, and GPTQ rounds the layers.

Several ranks share the texts of calibrate(). The first merges the statistics of all, and writes the file.

A run of compress() finds here what its plan lacks (`run_texts`), so that the plan can be made again with it: input
statistics, and the scales of SmoothQuant and AWQ that come from these and from the weights. GPTQ's Hessians come later,
while layers are rounded (`apply_gptq`), or in the same pass if statistics are missing and there is a single process.
Layers that GPTQ rounded lie in `OUTPUT.rounded` beside the output, a file for each decoder layer, until the output is
finished.

torch and transformers are imported only when a model is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..convert.conversion import loops
from ..distributed import Ranks
from ..errors import PlanError, UsageError
from ..fields import values_for, verb
from ..files.checkpoint import Checkpoint
from ..files.destination import Destination, Needs, require_space
from ..files.shardfile import LayerStore
from ..formats.numbers import Floats
from ..hub.source import Source, supply_shards
from ..job import Job, Opened, claim_of, connect_ranks, open_source
from ..machine import COMPILED_MEMORY, resident
from ..options import Calibrate, CalibrationTexts, Recipe, Run
from ..patterns import collapse
from ..plan import summary
from ..plan.decisions import PlanOptions, rounded_bytes
from ..plan.plan import Plan
from ..recipes import Request, gptq_texts
from ..result import Reporter, default_reporter
from ..streaming import memory, session
from ..streaming.memory import MemoryStep, hidden_bytes, memory_left
from ..version import __version__
from ..weights.reading import Reader
from ..weights.statistics import SUFFIX, Calibration, InputStatistics, calibrations, read_calibration
from ..weights.weight import WeightTransform, WeightTransforms
from . import smoothing
from .smoothing import MappingTransforms, SmoothingMapping

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .gptq_pass import ChooseTransforms
    from .sensitivity import Sensitivities


@verb(Calibrate, CalibrationTexts, positional=("model", "out"))
def calibrate(
    options: Calibrate, texts: CalibrationTexts, ranks: Ranks | None = None, reporter: Reporter | None = None
) -> Path:
    """Run texts through a model, and write its input statistics to a file for `compress(calibration=...)`.

    Args:
        ranks: the ranks that share the texts, from `Ranks.from_environment(os.environ)`; None for this process alone.
        reporter: receives a line that describes the run, and the progress in tokens; nothing is reported if None.

    Returns:
        The path of the file.

    Raises:
        OpenQuantError: something the caller can fix.
    """
    with connect_ranks(ranks) as connected:
        return connected.all_do(lambda: _calibrate(options, texts, connected, reporter or default_reporter()))


def _calibrate(options: Calibrate, texts: CalibrationTexts, ranks: Ranks, reporter: Reporter) -> Path:
    """Calibrate with parsed options; the path of the file that the first rank has written."""
    opened, corpus, target = _check_inputs(options, texts, ranks, reporter)
    _run(opened, corpus, target, options.scratch)
    return target.path


def _check_inputs(
    options: Calibrate, texts: CalibrationTexts, ranks: Ranks, reporter: Reporter
) -> tuple[Opened, Corpus, Destination]:
    """Open the model, read the texts, and refuse what cannot be done, before anything is computed or written."""
    opened = open_source(Run(**values_for(Run, vars(options))), ranks, reporter)
    source = opened.source
    option = ""
    path = source.default_path(f"{source.name}{SUFFIX}")
    if options.out is not None:
        option = "-o"
        path = Path(options.out)

    # An older calibration of the same model is replaced, with `overwrite` that of any.
    kind = calibrations(None if options.overwrite else opened.fingerprint().matches)
    target = Destination(path, option, kind, elsewhere="name another file with -o")
    target.require()
    # An engine would load it as a shard of the model.
    if path.resolve().parent == source.root.resolve():
        raise UsageError(f"{target.title} lies in the model {source.root}", target.elsewhere)

    memory_left(options.max_memory, memory.calibration_steps(opened.checkpoint, texts.length))
    return opened, read_texts(source, opened.checkpoint, texts, ranks), target


def calibration_path(source: Source, output: Path) -> Path:
    """Return the path of the calibration file that a run of compress() makes: NAME.calibration.safetensors.

    Args:
        source: where the model comes from, which gives NAME.
        output: the output directory, beside which the file lies.
    """
    return output.parent / f"{source.name}{SUFFIX}"


def find_calibration(job: Job, recipe: Recipe, corpus: Corpus) -> tuple[Calibration, LayerStore | None]:
    """Calibrate a model in a run of compress(), or read the file of an earlier run with the same texts.

    All ranks call this together. If GPTQ rounds the layers of the plan, a single process does so in the same pass.

    Args:
        job: the run.
        recipe: options of the output, which say how layers are smoothed.
        corpus: the texts, as tokens.

    Returns:
        The calibration, with statistics of the inputs of layers, the same in all ranks; and the layers that were
        rounded in the same pass, None if there was none.

    Raises:
        UsageError: the file is no calibration, or one of another model or with other texts; its path cannot be used;
            or memory or the disk for streamed shards is too small.
        SourceError: the model or the file cannot be read, or ranks read different ones.
        PlanError: SmoothQuant was requested for a quantized source, or a weight is too large for its scheme.
        OutputError: the file, hidden states or layers cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    run = job.run
    path = calibration_path(job.source, job.target)
    target = Destination(path, "", calibrations(), elsewhere="name another output with -o")
    target.require()

    store = None
    calibration = None
    if path.exists() and path.stat().st_size and not run.overwrite:
        calibration = read_calibration(path)
        same_texts = calibration.texts.get("sha256") == corpus.sha256
        if not same_texts or not job.fingerprint().matches(calibration.model, calibration.stamp):
            raise UsageError(
                f"{path} is a calibration of another model or with other texts",
                f"give --calibration {path} to use it, or --overwrite to replace it",
            )

    # All ranks must look for the file before the first writes it.
    job.ranks.agree(None)
    if calibration is not None:
        return calibration, None

    if "Hessians" in job.plan.lacks and job.ranks.size == 1:
        # Several ranks share the texts of a calibration, and must round with the statistics of all.
        choose = None
        if "smoothing" in job.plan.lacks:
            choose = partial(_layer_transforms, job, recipe, smoothing.usable_mappings(job.plan).mappings)
        store = apply_gptq(job, corpus, _Calibrating(target, choose))
    else:
        _run(job, corpus, target, kept=f"; kept in {path}")
    job.ranks.agree(None)
    return read_calibration(path), store


def read_texts(source: Source, checkpoint: Checkpoint, texts: CalibrationTexts, ranks: Ranks) -> Corpus:
    """Read the calibration texts, and require that all ranks have read the same.

    Args:
        source: where the model comes from, for its tokenizer.
        checkpoint: the model's config, files and headers.
        texts: options that say which texts, how many and how long.
        ranks: the processes of this run, all of which call this together.

    Returns:
        The documents as tokens, with a digest of them.

    Raises:
        SourceError: a text or the tokenizer cannot be read, or ranks have other texts or checkpoints.
        UsageError: options of the texts do not make sense, or `datasets` is not installed.
        OutputError: another rank has failed.
    """
    from ..data.corpus import read_corpus

    tokenizer = session.find_tokenizer(source, checkpoint)
    corpus = read_corpus(texts, tokenizer, "calibration")
    ranks.require_same([corpus.sha256, dict(checkpoint.shards)], session.TEXTS_OR_CHECKPOINTS)
    return corpus


def _run(
    opened: Opened, corpus: Corpus, target: Destination, directory: str | os.PathLike[str] | None = None, kept: str = ""
) -> None:
    """Run texts through a model; the first rank writes the statistics of all ranks.

    Args:
        opened: the model.
        corpus: the texts.
        target: the file that is written.
        directory: where hidden states and streamed shards are kept; None for beside that file.
        kept: ends the first line that is reported.
    """
    # Only now is torch imported.
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .observers import observe_inputs

    ranks = opened.ranks
    checkpoint = opened.checkpoint
    fingerprint = opened.fingerprint()
    about = {
        "weights": fingerprint.stamp,
        "texts": corpus.sha256,
        "number of ranks": str(ranks.size),
        "versions of libraries": f"openquant {__version__}, transformers {version('transformers')}",
    }
    pass_checkpoint = PassCheckpoint(session.part_path(target.path, ranks), about)
    opened.reporter.on_note(_describe(corpus.described, corpus.notes, pass_checkpoint) + kept)

    free = memory_left(opened.run.max_memory, memory.calibration_steps(checkpoint, corpus.length))
    budget = session.BUDGET if free is None else free
    documents_of_a_rank = -(-len(corpus.documents) // ranks.size)
    hidden = hidden_bytes(checkpoint, documents_of_a_rank * corpus.length)

    where = Path(directory or target.path.absolute().parent)
    with opened.run_texts(corpus, pass_checkpoint, hidden, budget, where, ranks.local_size, fingerprint) as run:
        statistics, kv_absmax = observe_inputs(run, ranks)
        # Shards that no text went through are read now.
        digest = fingerprint.hexdigest()

    ranks.require_same(digest, session.TEXTS_OR_CHECKPOINTS)
    if ranks.first:
        target.write(Calibration(statistics, digest, corpus.account, kv_absmax, fingerprint.stamp).to_bytes())
    # The other ranks keep their checkpoints until the file is written.
    ranks.agree(None)
    pass_checkpoint.remove()


def _describe(what: str, notes: Sequence[str], pass_checkpoint: PassCheckpoint) -> str:
    """The line that a run begins with."""
    continued = () if pass_checkpoint.saved is None else ("an earlier run is continued",)
    return "; ".join((what, *notes, *continued))


@dataclass(frozen=True)
class _Calibrating:
    """What GPTQ's pass does besides, if the plan lacks statistics of activations: texts then run once.

    Attributes:
        target: the calibration file that it writes.
        choose_transforms: as for `round_layers`.
    """

    target: Destination
    choose_transforms: ChooseTransforms | None


def apply_gptq(job: Job, corpus: Corpus, calibrating: _Calibrating | None = None) -> LayerStore:
    """Round the layers of a plan by GPTQ, so that the conversion copies them. Layers of an earlier run are reused.

    All ranks call this together. Each runs all texts, and rounds its share of the layers.

    Args:
        job: the run.
        corpus: the calibration texts, as tokens.
        calibrating: what the same pass calibrates, in a single process; None if the plan lacks only Hessians.

    Returns:
        The store with all rounded layers.

    Raises:
        SourceError: the model cannot be read, its activations are not finite, or a file of an earlier run is damaged.
        PlanError: a weight is too large for its scheme.
        UsageError: the disk has too little space for shards that are streamed.
        OutputError: rounded layers or hidden states cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    ranks = job.ranks
    store = rounded_layer_store(job.target, _digest(job, corpus))
    ranks.first_does(store.claim)

    sensitivities = None
    if job.plan.is_tuned:
        sensitivities = ranks.all_do(lambda: _find_sensitivities(job, corpus, store))
    ranks.all_do(lambda: _round_layers(job, corpus, store, sensitivities, calibrating))
    return store


def missing_bytes(job: Job) -> int:
    """Return the bytes of disk that rounded layers will still take, in addition to those that are there.

    Args:
        job: the run.
    """
    return max(0, rounded_bytes(job.plan.gptq_rounded) - rounded_layer_store(job.target).nbytes)


def keep_rounded(job: Job, corpus: Corpus, store: LayerStore) -> Job:
    """Give the plan that came of a calibration the layers that were rounded in the same pass.

    Args:
        job: the run with that plan.
        corpus: the calibration texts, as tokens.
        store: the layers, which belong to the plan before; another run of that plan would not find them any more.

    Returns:
        The run with the places of rounded tensors in its plan.

    Raises:
        OutputError: the layers cannot be renamed.
    """
    kept = store.rename(_digest(job, corpus))
    return replace(job, plan=job.plan.with_rounded(kept.places()))


def _digest(job: Job, corpus: Corpus) -> str:
    """Return the SHA-256 of all that the rounded layers follow from. Layers of another digest are of another run."""
    libraries = [version(name) for name in ("torch", "transformers")]
    facts = [job.plan.digest, dict(job.stamps), corpus.sha256, libraries]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _find_sensitivities(job: Job, corpus: Corpus, store: LayerStore) -> Sensitivities:
    """Find how much tokens and outputs count."""
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .gptq_pass import find_hessians, hessian_groups
    from .sensitivity import PARTS, find_sensitivities

    def open_part(number: int) -> PassCheckpoint:
        """Open what stays beside the rounded layers, so that a run that is stopped later finds all in it."""
        return PassCheckpoint(store.sensitivities(number), {"texts": corpus.sha256})

    first = open_part(job.ranks.rank % PARTS)
    job.reporter.on_note(_describe(f"weighing {corpus.described}", corpus.notes, first))

    steps = memory.sensitivity_steps(job.checkpoint, job.plan, corpus.length)
    free = memory_left(job.run.max_memory, steps, refuse=False)
    with job.run_texts(corpus, None, 0, 0, job.target.absolute().parent) as run:
        groups = hessian_groups(find_hessians(run.model, job.plan).values(), job.plan.entry)
        return find_sensitivities(run, groups, session.BUDGET if free is None else free, job.ranks, open_part)


def _round_layers(
    job: Job, corpus: Corpus, store: LayerStore, sensitivities: Sensitivities | None, calibrating: _Calibrating | None
) -> None:
    """Run the texts and round this rank's decoder layers."""
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .gptq_pass import round_layers
    from .observers import InputRecorder

    plan = job.plan
    ranks = job.ranks
    pass_checkpoint = PassCheckpoint(store.pass_checkpoint(ranks.rank, ranks.size), {"run": store.run_digest})
    # They were said before the texts were weighed.
    notes = () if plan.is_tuned else corpus.notes
    kept = f"; statistics are kept in {calibrating.target.path}" if calibrating else ""
    job.reporter.on_note(_describe(f"GPTQ with {corpus.described}", notes, pass_checkpoint) + kept)

    fast, half, max_hessian_bytes = _divide_memory(job, corpus.length)
    hidden = hidden_bytes(job.checkpoint, len(corpus.documents) * corpus.length)
    fingerprint = job.fingerprint() if calibrating else None
    where = job.target.absolute().parent
    with job.run_texts(corpus, pass_checkpoint, hidden, half, where, ranks.local_size, fingerprint) as run:
        rounding = partial(round_layers, run, plan, store, loops(fast), max_hessian_bytes, ranks, sensitivities)
        if calibrating is None or fingerprint is None:
            rounding()
        else:
            recorder = InputRecorder(run)
            rounding(recorder, calibrating.choose_transforms)
            # Shards that no text went through are read now.
            found = recorder.inputs(), fingerprint.hexdigest(), corpus.account, recorder.kv_absmax, fingerprint.stamp
            calibrating.target.write(Calibration(*found).to_bytes())

    pass_checkpoint.remove()


def _divide_memory(job: Job, length: int) -> tuple[bool, int, int]:
    """Divide the memory that GPTQ's largest layer leaves, with texts of so many tokens.

    Returns:
        Whether there is room for compiled loops; and bytes for hidden states, and for Hessians, in halves.
    """
    plan = job.plan
    free = memory_left(job.run.max_memory, memory.gptq_steps(job.checkpoint, plan, length), refuse=False)
    if free is None:
        return job.fast, session.BUDGET, session.BUDGET
    if "smoothing" in plan.lacks:
        free = max(0, free - smoothing.search_memory(plan))
    fast = job.fast and free > COMPILED_MEMORY
    half = (free - fast * COMPILED_MEMORY) // 2
    return fast, half, memory.hessian_memory(plan) + half


def rounded_layer_store(target: Path, digest: str = "") -> LayerStore:
    """Return the store of layers that GPTQ has rounded for an output directory.

    Args:
        target: the output directory.
        digest: that of the run whose layers are read and written (`_digest`); "" to count or remove those of any run.

    Returns:
        The store in the directory `OUTPUT.rounded`, with one file for each decoder layer; nothing is read yet.
    """
    return LayerStore(target.with_name(f"{target.name}.rounded"), digest)


# Chooses the scale of a mapping, float32 [channels], or says why there is none; called from several threads.
ChooseScale = Callable[[SmoothingMapping, Reader], Floats | str]


def texts_steps(opened: Opened, plan: Plan, length: int) -> list[MemoryStep]:
    """Estimate the memory of each step of the calibration that a plan needs.

    Args:
        opened: the opened source.
        plan: the plan; what it lacks (statistics, rounded layers) says which steps there are.
        length: tokens of each text.

    Returns:
        Name and bytes of memory of each step, in order; empty if the plan lacks nothing.
    """
    steps: list[MemoryStep] = []
    search = smoothing.search_memory(plan) if "smoothing" in plan.lacks else 0

    if "activations" in plan.lacks:
        path = calibration_path(opened.source, opened.output_directory(summary.suffix(plan)))
        if path.exists() and not opened.run.overwrite:
            steps.append(MemoryStep("reading texts", 0))
        else:
            steps += memory.calibration_steps(opened.checkpoint, length)

    if "Hessians" in plan.lacks:
        rounding = memory.gptq_steps(opened.checkpoint, plan, length)
        steps += [replace(step, nbytes=step.nbytes + search) for step in rounding]
        if plan.is_tuned:
            steps += memory.sensitivity_steps(opened.checkpoint, plan, length)

    if "smoothing" in plan.lacks:
        steps.append(MemoryStep("choosing smoothing scales", search, models=bool(steps)))
    return steps


def run_texts(job: Job, request: Request) -> tuple[PlanOptions, Corpus | None, LayerStore | None]:
    """Run texts through the model to find what a plan lacks. All ranks call this together.

    Args:
        job: the run.
        request: the options that the plan was made with.

    Returns:
        The plan's options with what the plan lacked (calibration, description of GPTQ's texts, transforms), to make
        the final plan with; the texts for GPTQ, None unless the plan lacks Hessians; and layers that GPTQ has rounded
        in the pass of the calibration, None if there are none. All ranks get the same.

    Raises:
        OutputError: the output, hidden states or shards cannot be written, or another rank has failed.
        SourceError: the model, a weight or a text cannot be read, or ranks read different ones.
        PlanError: SmoothQuant was requested for a quantized source.
        UsageError: the file beside the output is no calibration, or one of another model or with other texts; options
            of the texts do not make sense; or memory or the disk for streamed shards is too small.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    lacks = job.plan.lacks
    options = request.options
    corpus = store = None

    _require_room(job, request.texts)
    if lacks & {"activations", "Hessians"}:
        corpus = read_texts(job.source, job.checkpoint, request.texts, job.ranks)
        if "activations" in lacks:
            calibration, store = find_calibration(job, request.recipe, corpus)
            options = replace(options, calibration=calibration)
        if "Hessians" in lacks:
            options = replace(options, gptq=gptq_texts(request.recipe, corpus.account))
    if "smoothing" in lacks:
        assert options.calibration is not None
        options = replace(options, transforms=choose_transforms(job, request.recipe, options.calibration))
    return options, corpus if "Hessians" in lacks else None, store


def texts_needs(job: Job, texts: CalibrationTexts) -> list[Needs]:
    """Return the disk space that a run with a calibration needs.

    Args:
        job: the run, with the plan before the calibration.
        texts: options that say how many texts, and how long.

    Returns:
        What is written at the same time, for the output and for the forward pass before it, the larger first; empty if
        the output is complete.

    Raises:
        OutputError: openquant did not write the output directory, or with other options, or it cannot be written to.
    """
    plan = job.plan
    source = job.source

    # The card and config.json of this plan are not final; they are small, so none are passed.
    missing = claim_of(job, {}, rounded=rounded_bytes(plan.gptq_rounded)).missing_bytes(final=False)
    if not missing:
        return []

    # The pass checkpoint has all hidden states; those that do not fit in memory are also in the offload file.
    # GPTQ's ranks each have all of them.
    copies = job.ranks.local_size if "Hessians" in plan.lacks else 1
    passing = copies * hidden_bytes(job.checkpoint, texts.samples * texts.length)
    _, half, _ = _divide_memory(job, texts.length)
    if passing > half:
        passing *= 2
    passing += missing_bytes(job)

    # A calibration has three float32 statistics for each input of each layer.
    calibration = sum(12 * weight.shape[1] for weight in plan.layers.values())
    parent = job.target.absolute().parent
    cached = []
    if source.remote and not job.run.stream:
        cached.append((source.root, source.remote_bytes([*plan.source.shards, *plan.files])))

    # The files of the forward pass are deleted before the output is written.
    output: Needs = [(job.target, missing), (parent, calibration), *cached]
    forward: Needs = [(parent, passing + calibration), *cached]
    return [output, forward] if missing >= passing else [forward, output]


def _require_room(job: Job, texts: CalibrationTexts) -> None:
    """Refuse an output that does not fit on its disk, before texts run for hours."""

    def require() -> None:
        for needs in texts_needs(job, texts):
            require_space(needs)

    job.ranks.first_does(require)


def choose_transforms(job: Job, recipe: Recipe, calibration: Calibration) -> WeightTransforms:
    """Choose AWQ's or SmoothQuant's scales for a model; for AWQ also how the search for scales weighs errors.

    All ranks call this together and get the same.

    Args:
        job: the run, with a plan without smoothing.
        recipe: options of the output, with `awq` or `smooth`.
        calibration: statistics of the inputs of layers: absmax, mean magnitude and mean square of each channel.

    Returns:
        Factors of rows and columns and importance of columns of weights by full module name, new bytes of norms and
        biases by tensor name, notes that say which mappings are not used and why, and a title for the model card, "" if
        none is used.

    Raises:
        PlanError: SmoothQuant was requested for a quantized source.
        SourceError: a weight cannot be read, or the calibration has no mean squares of a layer's inputs or another
            number of inputs.
        OutputError: shards cannot be written, or another rank has failed.
        UsageError: the disk has too little space for shards that are streamed.
    """
    plan = job.plan
    name, choose = _scale_chooser(job, recipe, calibration)
    usable = smoothing.usable_mappings(plan)
    if usable.mappings:
        job.reporter.on_note(f"{name}: choosing scales for {len(usable.mappings)} smoothing mappings")

    outcomes = _choose_scales(job, usable.mappings, choose)
    parts = [outcome for outcome in outcomes if isinstance(outcome, MappingTransforms)]

    unused = {reason: list(smooth_layers) for reason, smooth_layers in usable.unused.items()}
    for mapping, outcome in zip(usable.mappings, outcomes, strict=True):
        if isinstance(outcome, str):
            unused.setdefault(outcome, []).append(mapping.smooth_layer)

    total = len(outcomes) + sum(map(len, usable.unused.values()))
    if not total:
        notes = [f"{name} changes nothing: no smoothing mappings of {plan.model.name} are known"]
    else:
        notes = [f"{name}: inputs are divided by powers of two in {len(parts)} of {total} smoothing mappings"]
    notes += [f"no smoothing at {', '.join(collapse(layers))}: {reason}" for reason, layers in unused.items()]

    transforms = smoothing.combine_transforms(parts, plan)
    title = f"{name}: inputs divided by powers of two in {len(parts)} norms and projections" if parts else ""
    transforms = replace(transforms, notes=tuple(notes), title=title)
    return smoothing.with_importance(transforms, plan, calibration) if recipe.awq else transforms


def _scale_chooser(job: Job, recipe: Recipe, calibration: Calibration) -> tuple[str, ChooseScale]:
    """The name of a recipe's method of smoothing, and what chooses its scales."""
    if recipe.awq:
        return "AWQ", partial(smoothing.awq_scale, plan=job.plan, calibration=calibration)

    exponent = recipe.smooth
    assert exponent is not None
    if summary.has_quantized_source(job.plan):
        raise PlanError(
            f"{job.source.name} is quantized already: smoothing cannot undo the errors of its rounding",
            "start from the unquantized model, or leave --smooth out",
        )
    choose = partial(smoothing.smoothquant_scale, plan=job.plan, calibration=calibration, exponent=exponent)
    return f"SmoothQuant {exponent:g}", choose


def _layer_transforms(
    job: Job,
    recipe: Recipe,
    mappings: Sequence[SmoothingMapping],
    inputs: tuple[InputStatistics, ...],
    modules: Set[str],
    reader: Reader,
) -> Mapping[str, WeightTransform]:
    """Choose how some modules of a decoder layer are smoothed, as `choose_transforms` does it for a whole model."""
    _, choose = _scale_chooser(job, recipe, Calibration(inputs, "", {}))
    parts = []
    for mapping in mappings:
        if modules.isdisjoint((mapping.smooth_layer, *mapping.balance_layers)):
            continue
        scale = choose(mapping, reader)
        if not isinstance(scale, str):
            parts.append(smoothing.apply_smoothing(mapping, scale, job.plan, reader))
    return smoothing.combine_transforms(parts, job.plan).weights


def _choose_scales(
    job: Job, mappings: Sequence[SmoothingMapping], choose: ChooseScale
) -> list[MappingTransforms | str]:
    """Return what each mapping changes; for one that is not used, a text that says why."""
    plan = job.plan
    ranks = job.ranks
    directory = job.target.absolute().parent
    layer_counts = [
        sum(name in plan.layers for name in (mapping.smooth_layer, *mapping.balance_layers)) for mapping in mappings
    ]
    outcomes: dict[int, MappingTransforms | str] = {}
    lock = threading.Lock()

    def choose_scale(reader: Reader, number: int) -> None:
        mapping = mappings[number]
        scale = choose(mapping, reader)
        outcome = scale if isinstance(scale, str) else smoothing.apply_smoothing(mapping, scale, plan, reader)
        with lock:
            outcomes[number] = outcome
            job.reporter.on_progress(sum(layer_counts[each] for each in outcomes), sum(layer_counts), "layers")

    workers = job.workers
    per_thread = smoothing.search_memory(plan)
    if job.run.max_memory is not None and per_thread:
        workers = max(1, min(workers, (job.run.max_memory - resident()) // per_thread))

    tasks = [(str(number), number) for number in range(len(mappings))]
    needs: dict[str, list[str]] = {}
    if job.source.remote:
        needs = {what: smoothing.mapping_shards(mappings[number], plan) for what, number in tasks}
    if needs and job.run.stream:
        directory.mkdir(parents=True, exist_ok=True)

    with supply_shards([(job.source, needs)], job.run.stream, directory, times=ranks.local_size) as [supply]:
        session.work_as_shards_arrive(
            tasks,
            supply,
            lambda: partial(choose_scale, Reader(plan.decoded.where, supply.path)),
            workers,
            threading.Event(),
            ranks,
        )
    return [outcomes[number] for _, number in tasks]
