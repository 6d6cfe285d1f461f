"""compress() and dequantize(): the whole job, open -> plan -> convert -> finish, without printing anything."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .calibration.prepare import Calibrated
from .convert.conversion import COMPILED_MEMORY, worker_memory, worth_compiling
from .diagnosis.diagnose import diagnose_layers, shards_to_read
from .diagnosis.result import Diagnosis
from .diagnosis.suggestions import with_advice
from .distributed import RERUN_CONTINUES, Ranks, attempt
from .errors import SourceError, UsageError
from .files.cards import card_of, says_folds
from .files.checkpoint import Checkpoint, open_checkpoint, readable
from .files.journal import finished_files, output_errors
from .files.output import refuse_overlap, refuse_root
from .files.small_files import read_small
from .formats.names import UNCHANGED, ActivationScheme, CacheScheme, FormatName, GroupSize, ScaleFormat, SchemeName
from .formats.schemes import SCHEMES, Scheme, find_others, find_scheme
from .hub.fetch import memory_needed
from .hub.publish import Published, Publisher
from .hub.shards import supply_shards
from .hub.source import Source, find_source, silent
from .job import Prepared, Rounding
from .machine import available_cpus, find_device, peak_rss
from .options import CalibrationTexts, Diagnose, Push, Recipe, Run, documented
from .plan.decisions import PlanOptions
from .plan.plan import Plan, make_plain_plan, make_plan
from .plan.serving import serving_to_json
from .plan.unchanged import make_unchanged_plan
from .recipes import recipe_of
from .report.escape import terminal
from .reporter import Reporter
from .result import Result
from .run import carry_out, take_evaluation
from .streaming.memory import MemoryStep, memory_left
from .verification.finished import require_sound
from .vllm_probe.choose import ArchitectureChoice
from .weights.statistics import Calibration
from .weights.transform import WeightTransforms

# More do not make a disk faster, and each takes memory.
MOST_WORKERS, MOST_GPU_WORKERS = 16, 4
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
    if recipe.kv_cache not in ("fp8", "auto"):
        raise UsageError(f"{recipe.kv_cache} is not a cache", "choose fp8 or auto")
    chosen, others = _schemes(recipe)
    cached = recipe.kv_cache == "fp8"
    asked = "--calibrate" if recipe.calibrate else "--calibration" if recipe.calibration is not None else None
    scaled = cached or any(each.format.input_scale for each in (chosen, *(other for _, other in others)) if each)
    if recipe.gptq:
        _require_texts(recipe, scaled or recipe.awq or recipe.smooth is not None)
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
    options = PlanOptions(tuple(recipe.ignore), others, recipe.tp, recipe.quantize_lm_head, cached=cached)
    suffix = f"{chosen.suffix if chosen else ''}{'-KV8' if cached else ''}"

    def plan(
        source: Source,
        checkpoint: Checkpoint,
        seen: Calibration | None,
        transforms: WeightTransforms | None,
        read: Mapping[str, Any] | None,
    ) -> Plan:
        known = replace(options, calibration=seen, transforms=transforms, gptq=read)
        entry = deciding.entry(checkpoint, None if run.overwrite else _target(run, source, suffix))
        if chosen is None:
            made = make_unchanged_plan(checkpoint, known, source.identity, entry)
        else:
            made = make_plan(checkpoint, chosen, known, source.identity, entry)
        return replace(made, recipe=recipe_of(recipe, texts), unlisted=deciding.kept)

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
    deciding = ArchitectureChoice(recipe.architecture)
    making = Calibrated(run, recipe, texts, plan)
    return _work(run, making.make, ranks, reporter, making.calibrate, making.rounding, making.steps)


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

    def make(source: Source, checkpoint: Checkpoint) -> Plan:
        plan = make_plain_plan(checkpoint, source.identity)
        return replace(plan, notes=(*plan.notes, FOLDED)) if says_folds(card_of(checkpoint)) else plan

    return _work(run, make, ranks, reporter)


def _work(
    run: Run,
    make: Callable[[Source, Checkpoint], Plan],
    ranks: Ranks | None,
    reporter: Reporter | None,
    before: Callable[[Prepared, Ranks, Reporter], bool] = lambda *_: False,
    rounding: Callable[[], Rounding | None] = lambda: None,
    steps: Callable[[Source, Checkpoint, Plan, Path], Sequence[MemoryStep]] = lambda *_: (),
) -> Result:
    """What was done: the source opened, planned and converted, or with `dry_run` planned only.

    Args:
        run: what was asked for.
        make: makes the plan of a checkpoint, given where it comes from.
        ranks: this process among several.
        reporter: is told of it.
        before: does what must come before anything is written; whether the plan is then to be made again.
        rounding: what rounds layers before they are converted, if something does.
        steps: what comes before the conversion and takes memory.
    """
    begin = time.monotonic()
    reporter = reporter or Reporter()
    ranks = ranks or Ranks()
    ranks.rerun_hint = RERUN_CONTINUES
    with ranks:
        # Connects them, which takes memory that must not come on top of what workers may use.
        ranks.agree(None)

        def prepare(first: bool) -> Prepared:
            device = "cpu" if run.dry_run else find_device(run.device, ranks.local_rank)
            most = MOST_WORKERS if device == "cpu" else MOST_GPU_WORKERS
            workers = run.workers or min(most, max(1, available_cpus() // ranks.local_size))
            return _prepare(run, make, steps, workers, device, first)

        def agreed(first: bool) -> Prepared:
            prepared, error = attempt(lambda: prepare(first))
            seen = ranks.agree(error, prepared and prepared.seen)
            if any(other != seen[0] for other in seen):
                raise SourceError("ranks see different sources", "let all of them read the same files")
            assert prepared is not None
            return prepared

        prepared, again = agreed(first=True), None
        opened = prepared
        _, error = attempt(lambda: reporter.opened(opened.source, opened.target))
        ranks.agree(error)
        if not run.dry_run:
            first = prepared
            # A calibration may take hours, and what it is for can be read meanwhile.
            reporter.planned(first.plan, first.source, first.target)
            again, error = attempt(lambda: before(first, ranks, reporter))
            ranks.agree(error)
            prepared = agreed(first=False) if again else first
        plan = prepared.plan

        def result(resumed: bool, published: Published | None) -> Result:
            return Result(
                model=os.fspath(run.model),
                revision=prepared.source.revision,
                output=str(prepared.target),
                scheme=plan.scheme_name,
                schemes=plan.scheme_names,
                kv_cache="fp8" if plan.cached else "auto",
                folded=(plan.transforms and plan.transforms.title) or None,
                architecture=plan.model.name,
                dry_run=run.dry_run,
                source_bytes=plan.source_bytes,
                output_bytes=plan.output_bytes,
                download_bytes=prepared.source.remote_bytes([*plan.source.shards, *plan.files]),
                repository=published.repository if published else None,
                pushed_to=published.address if published else None,
                pushed_revision=published.revision if published else None,
                quantized_tensors=plan.quantized_tensors,
                decoded_tensors=plan.decoded_tensors,
                ignored_layers=plan.ignored_layers,
                shards=len(plan.shards),
                tensor_parallel=plan.parallel_sizes,
                serving=serving_to_json(*plan.serving) if plan.serving else None,
                seconds=round(time.monotonic() - begin, 3),
                peak_rss_bytes=peak_rss(),
                resumed=resumed,
            )

        if run.dry_run or again:
            reporter.planned(plan, prepared.source, prepared.target)
        if run.dry_run:
            return result(resumed=False, published=None)
        _, error = attempt(lambda: prepared.source.fetch_files(plan.files))
        ranks.agree(error)
        outcome = carry_out(prepared, ranks, reporter, rounding())
        done = replace(
            result(outcome.resumed, outcome.published),
            not_finite={name: found.text for name, found in sorted(outcome.not_finite.items())},
            unread_shards=outcome.unread,
        )
        reporter.finished(done, outcome.already_complete)
        return done


def _prepare(
    run: Run,
    make: Callable[[Source, Checkpoint], Plan],
    steps: Callable[[Source, Checkpoint, Plan, Path], Sequence[MemoryStep]],
    workers: int,
    device: str,
    first: bool,
) -> Prepared:
    """Open the source and plan; nothing is written, and of a repository only config, index and headers are fetched.

    Args:
        run: what was asked for.
        make: makes the plan.
        steps: what comes before the conversion and takes memory.
        workers: how many threads, at most.
        device: where codes are computed.
        first: whether no step is done yet; what they took hours for is not thrown away for a lack of memory.
    """
    if run.output is not None:
        if not os.fspath(run.output):
            raise UsageError("-o is empty", "give a directory, or leave -o out")
        refuse_root(Path(run.output))
    source, checkpoint = _open(run.model, run.revision, run.stream)
    checkpoint = _without_own_log(checkpoint, source.absent)
    with _without_collector():
        stamps = source.stamps(checkpoint)
        plan = make(source, checkpoint)
    target = _target(run, source, plan.suffix)
    refuse_overlap(source.root, target)
    before = steps(source, checkpoint, plan, target) if first else ()
    converting = MemoryStep("converting with a single worker", worker_memory(plan, device), models=bool(before))
    fetching = memory_needed(source, run.stream)
    workers, fast = _affordable(workers, plan, run.max_memory, fetching, converting, before, first)
    return Prepared(run, source, checkpoint, stamps, plan, target, workers, device, fast)


def _open(model: str | os.PathLike[str], revision: str | None, stream: bool) -> tuple[Source, Checkpoint]:
    """The source of that name, and its headers; of a repository only config, index and headers are fetched."""
    name = os.fspath(model)
    source = find_source(name, revision)
    if stream and source.repo is None:
        raise UsageError(f"{name} is a local directory, nothing of it can be streamed", "leave --stream out")
    with _without_collector():
        return source, open_checkpoint(source.root, source.remote, source.absent)


def _without_own_log(checkpoint: Checkpoint, absent: Container[str]) -> Checkpoint:
    """The checkpoint but for a file that this process writes its messages to, as with `> convert.log` inside it."""
    streams = []
    for handle in (1, 2):
        with suppress(OSError):
            streams.append(os.fstat(handle))
    with readable():
        logs = {
            name
            for name in checkpoint.files
            if name not in absent
            and any(os.path.samestat((checkpoint.root / name).stat(), stream) for stream in streams)
        }
    files = {name: size for name, size in checkpoint.files.items() if name not in logs}
    return replace(checkpoint, files=files, left_out=tuple(sorted({*checkpoint.left_out, *logs})))


def _affordable(
    workers: int,
    plan: Plan,
    max_memory: int | None,
    fetching: int,
    converting: MemoryStep,
    before: Sequence[MemoryStep],
    first: bool,
) -> tuple[int, bool]:
    """How many threads, at most `workers`, the memory allows, of which downloads need `fetching` bytes; and whether
    compiled loops are worth it and take no thread's memory.

    Raises:
        UsageError: it does not allow one, or a step before the conversion.
    """
    fast = worth_compiling(plan)
    if max_memory is None:
        return workers, fast
    each = converting.nbytes
    with_downloads = replace(converting, nbytes=fetching + each)
    memory_left(max_memory, [with_downloads, *before], first)
    room = max_memory - with_downloads.needed + each
    workers = max(1, min(workers, room // each))
    return workers, fast and room >= workers * each + COMPILED_MEMORY


@contextmanager
def _without_collector() -> Iterator[None]:
    """Work without the cycle collector, which would take half the time of a plan: millions of objects, and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    source, checkpoint = _open(begun.model, begun.revision, begun.stream)
    options = PlanOptions(tuple(begun.ignore))
    with _without_collector():
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


def _target(run: Run, source: Source, suffix: str) -> Path:
    """Where the output goes; if nobody says, to "Qwen3-8B-FP8" in the working directory."""
    if run.output is not None:
        return Path(run.output)
    return source.beside(source.name + suffix)
