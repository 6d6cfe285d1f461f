"""The verbs as functions, each read from top to bottom: open, plan, calibrate, plan again, convert, publish.

Verbs of which a room exists are there: calibration/run.py, evaluation/run.py and
verification/verify.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibration.run import keep_rounded, read_texts, run_texts, texts_needs, texts_steps
from .diagnosis.diagnose import diagnose_layers, normal_row_error, shards_to_read
from .diagnosis.result import Diagnosis, choices, measured_kl
from .distributed import Ranks, attempt
from .errors import SourceError, UsageError
from .fields import verb
from .files import destination
from .files.cards import evaluation_notes, find_notes, metadata_notes, source_of, split_card
from .files.destination import DiskSpace
from .files.model_files import CARD_FILE, damaged_json, is_shard, read_small
from .fit.budget import refuse_options
from .formats.hardware import KEPT
from .formats.schemes import SCHEMES, find_scheme
from .hub.publish import Publisher
from .hub.source import silent, supply_shards
from .job import MOST_WORKERS, Job, Opened, claim_of, connect_ranks, make_job, open_model, prepare, without_collector
from .machine import available_cpus, peak_rss
from .options import CalibrationTexts, Diagnose, Explain, FitOptions, ModelSource, Push, Recipe, Run, push_target
from .patterns import list_first
from .plan import summary
from .plan.decisions import PlanOptions
from .plan.plan import (
    Plan,
    has_fp8_cache,
    ignored_layers,
    make_kept_plan,
    make_plain_plan,
    make_plan,
    make_unchanged_plan,
)
from .plan.serving import serving_to_json
from .plan.summary import Explanation, explain_modules
from .recipes import Request, check_recipe, recipe_of
from .result import Reporter, Result, default_reporter, lost_notes, zero_notes
from .run import Outcome, carry_out, evaluation_publisher, generate_files, publisher_of, take_evaluation
from .verification.checks import require_sound
from .weights.statistics import read_calibration

if TYPE_CHECKING:
    from .data.corpus import Corpus

# A note on dequantized outputs of SmoothQuant or AWQ.
FOLDED = "norms stay as the output has them, folded with the weights: both together are the model, neither alone"


@verb(Run, Recipe, CalibrationTexts, FitOptions, positional=("model", "output", "scheme"))
def compress(
    run: Run,
    recipe: Recipe,
    texts: CalibrationTexts,
    fit: FitOptions,
    ranks: Ranks | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Quantize a checkpoint to FP8, INT8, INT4 or FP4.

    If it calibrates, it writes `NAME.calibration.safetensors` beside the output, where NAME is the model's. Later runs
    of this model with the same texts use that file again.

    Args:
        ranks: the ranks of a run with several processes; if None, this process works alone.
        reporter: receives the plan and the progress; nothing is reported if None.
        dry_run: make and report the plan, and write nothing.

    Returns:
        What was done, or with `dry_run` what would be done.

    Raises:
        OpenQuantError: something that the caller can fix; errors.py has the kinds.
    """
    request = check_request(run, recipe, texts, fit)
    reporter = reporter or default_reporter()
    start = time.monotonic()

    with connect_ranks(ranks) as ranks:
        if run.dry_run or request.fit.fit is not None:
            _require_writable(run, ranks)
        request = ranks.all_do(partial(complete_options, request, ranks, reporter))
        job = plan_of(request, ranks, reporter)
        space = _report_plan(job, request.texts)

        if run.dry_run:
            if request.texts.text and job.plan.lacks:
                read_texts(job.source, job.checkpoint, request.texts, ranks)
            return _result(job, space, start, Outcome())

        corpus = None
        if job.plan.lacks:
            _require_writable(run, ranks, job.plan)
            job, corpus = _calibrate(request, job)
        return _write(job, space, start, corpus)


def check_request(
    run: Run, recipe: Recipe, texts: CalibrationTexts | None = None, fit: FitOptions | None = None
) -> Request:
    """Check options of compress() together, before anything is opened.

    Args:
        run: what is read and written, and how.
        recipe: the options that decide the bytes of the output.
        texts: calibration texts; those of the defaults if None.
        fit: the size that schemes are chosen for; none if None.

    Raises:
        UsageError: options make no sense together.
    """
    texts = texts or CalibrationTexts()
    fit = fit or FitOptions()
    if recipe.tune and run.stream:
        raise UsageError("--tune reads shards several times, which --stream deletes", "leave one of the two out")
    if recipe.tune and find_spec("numba") is None:
        raise UsageError("--tune needs numba", "pip install numba")
    if fit.fit is not None:
        refuse_options(recipe)
    return Request(run, recipe, texts, fit, *check_recipe(recipe, texts))


def complete_options(request: Request, ranks: Ranks, reporter: Reporter) -> Request:
    """Read the calibration that is given, and with `fit` choose the mixture of schemes.

    Args:
        request: the checked options.
        ranks: the processes of this run.
        reporter: receives notes and progress.

    Raises:
        OpenQuantError: the calibration cannot be read, the model cannot be measured, or nothing fits.
    """
    if request.fit.fit is not None:
        request = _choose_schemes(request, ranks, reporter)
    file = request.recipe.calibration
    if file is None:
        return request
    return replace(request, options=replace(request.options, calibration=read_calibration(Path(file))))


def _choose_schemes(request: Request, ranks: Ranks, reporter: Reporter) -> Request:
    """Choose the mixture of schemes for --fit."""
    # Imports torch.
    from .fit.run import choose_mixture

    recipe, found = choose_mixture(request, ranks, reporter)
    texts = request.texts
    if not (recipe.gptq or recipe.calibrate or request.options.fp8_kv_cache):
        # Without a calibration nothing else reads the texts.
        texts = CalibrationTexts()

    scheme, options = check_recipe(recipe, texts)
    return replace(request, recipe=recipe, texts=texts, scheme=scheme, options=options, frontier=found.to_json())


def plan_of(request: Request, ranks: Ranks, reporter: Reporter, again: bool = False) -> Job:
    """Open the source and make the plan of compress(), the same in all ranks.

    Args:
        request: the complete options.
        ranks: the processes of this run.
        reporter: receives notes and progress.
        again: whether this is the second plan, after a calibration.

    Returns:
        The plan, and what a run needs besides.

    Raises:
        OpenQuantError: the source cannot be read or planned, memory does not allow the run, or ranks differ.
    """
    # A calibration and --fit have required the memory already. Too little of it is then no error any more.
    required = again or request.frontier is not None
    return make_job(request.run, ranks, reporter, partial(_plan, request, required))


def _plan(request: Request, required: bool, opened: Opened) -> Job:
    """Make the plan of compress(). `required`: whether the memory was required already."""
    texts = request.texts
    with without_collector():
        plan = _make_plan(request, opened)
    if required:
        return prepare(opened, plan, refuse=False)

    if texts != CalibrationTexts() and not plan.lacks & {"activations", "Hessians"}:
        raise UsageError(
            "texts are given, and nothing is calibrated",
            "give --gptq, or --calibrate and what uses it, such as --kv-cache fp8, or leave them out",
        )
    return prepare(opened, plan, texts_steps(opened, plan, texts.length))


def _make_plan(request: Request, opened: Opened) -> Plan:
    """Make the plan, after checking that the calibration is of this model."""
    recipe = request.recipe
    options = request.options
    calibration = options.calibration
    if calibration is not None and not opened.fingerprint().matches(calibration.model, calibration.stamp):
        raise UsageError(
            f"{recipe.calibration or calibration.file} is a calibration of another model than {request.run.model}",
            "make one of this model: openquant calibrate MODEL -o FILE",
        )

    identity = opened.source.identity
    if recipe.scheme == KEPT:
        plan = make_kept_plan(opened.checkpoint, options, identity, recipe.architecture)
    elif request.scheme is None:
        plan = make_unchanged_plan(opened.checkpoint, options, identity, recipe.architecture)
    else:
        plan = make_plan(opened.checkpoint, request.scheme, options, identity, recipe.architecture)
    return replace(plan, provenance=destination.Provenance(recipe_of(recipe, request.texts), request.frontier))


def _calibrate(request: Request, job: Job) -> tuple[Job, Corpus | None]:
    """Run texts through the model, and plan again with what this gives; the texts are those for GPTQ."""
    options, corpus, store = job.ranks.all_do(lambda: run_texts(job, request))
    planned = plan_of(replace(request, options=options), job.ranks, job.reporter, again=True)
    if corpus is not None and store is not None:
        planned = keep_rounded(planned, corpus, store)
    planned.reporter.on_plan(planned.plan, planned.source, planned.target)
    return planned, corpus


@verb(Run, positional=("model", "output"), without=("device",))
def dequantize(run: Run, ranks: Ranks | None = None, reporter: Reporter | None = None) -> Result:
    """Dequantize a checkpoint of any architecture to bfloat16.

    Args:
        output: directory to write. If None, `<name>-BF16` in the working directory, or beside the model if the working
            directory is the model's or lies in it.
        ranks: the ranks of a run with several processes; if None, this process works alone.
        reporter: receives the plan and the progress; nothing is reported if None.
        dry_run: make and report the plan, and write nothing.

    Returns:
        What was done, or with `dry_run` what would be done.

    Raises:
        OpenQuantError: nothing in it is quantized, or something else that the caller can fix.
    """
    reporter = reporter or default_reporter()
    start = time.monotonic()

    with connect_ranks(ranks) as ranks:
        if run.dry_run:
            _require_writable(run, ranks)
        job = make_job(run, ranks, reporter, _plan_dequantized)
        space = _report_plan(job, CalibrationTexts())

        if run.dry_run:
            return _result(job, space, start, Outcome())
        return _write(job, space, start)


def _plan_dequantized(opened: Opened) -> Job:
    """Make the plan of dequantize()."""
    with without_collector():
        plan = make_plain_plan(opened.checkpoint, opened.source.identity)
        if destination.stated_facts(opened.checkpoint.root).smoothed:
            plan = replace(plan, notes=(*plan.notes, FOLDED))
    return prepare(opened, plan)


def _require_writable(run: Run, ranks: Ranks, plan: Plan | None = None) -> None:
    """Check that the output can be pushed, before passes that may take hours; without them `carry_out` is as early."""
    if run.push is not None:
        shards = [shard.name for shard in plan.layout.shards] if plan else []
        publisher = Publisher(run.push, Path(), "", shards)
        ranks.first_does(lambda: publisher.prepare(b"", creates=False))


def _report_plan(job: Job, texts: CalibrationTexts) -> DiskSpace:
    """Report the source, the disk space that the run needs and the plan, before a calibration that may take hours.

    Returns:
        The disk space; in ranks but the first, that of a complete output.

    Raises:
        OutputError: openquant did not write the output directory, or with other options.
        UsageError: it cannot be written to.
        PushError: in a dry run, the repository would be refused.
    """
    space, error = None, None
    if job.ranks.first:
        space, error = attempt(lambda: find_space(job, texts))
    if space is not None:
        job.reporter.on_disk_space(space)
    job.reporter.on_plan(job.plan, job.source, job.target)
    job.ranks.agree(error)
    return space or DiskSpace(0, 0, job.run.stream)


def find_space(job: Job, texts: CalibrationTexts) -> DiskSpace:
    """Find the disk space that a run needs. A dry run also checks the repository to push to.

    Args:
        job: the run with its plan.
        texts: options that say how many texts are calibrated with, and how long.

    Raises:
        OutputError: openquant did not write the output directory, or with other options.
        UsageError: it cannot be written to.
        PushError: in a dry run, the repository would be refused.
    """
    run = job.run
    plan = job.plan
    source = job.source
    publisher = publisher_of(job)
    notes = []
    if publisher and run.dry_run:
        notes.append(_preview_push(job, publisher))

    generated = {} if plan.lacks else generate_files(job, plan.files)
    claim = claim_of(job, generated, publisher)
    needs: list[destination.Needs]
    if plan.lacks:
        needs = texts_needs(job, texts)
    else:
        needs = [[(job.target, claim.missing_bytes(final=True))]]
        if source.remote and not run.stream:
            needs.append([(source.root, source.remote_bytes(plan.source.shards))])

    of_phases = [sum(nbytes for path, nbytes in phase if path != source.root) for phase in needs]
    needed = max(of_phases, default=0)
    if run.dry_run and needed:
        # A dry run says what would end the run.
        errors = [attempt(partial(destination.require_space, phase))[1] for phase in needs]
        notes += [str(error) for error in errors if error is not None][:1]
    return DiskSpace(needed, sum(claim.contents.files.values()), run.stream, tuple(notes))


def _preview_push(job: Job, publisher: Publisher) -> str:
    """Refuse a repository that the run would refuse. Nothing is changed on the Hub.

    Returns:
        What the run would do there.

    Raises:
        PushError: the run would be refused.
    """
    if job.plan.lacks:
        # Neither the card nor what tells the uploads of this plan from others is final.
        publisher.prepare(b"", creates=False)
        return f"the run pushes to {publisher.repo}: {_commit_to(publisher)}"

    job.source.fetch_files([CARD_FILE])
    with silent():
        names = publisher.prepare(generate_files(job)[CARD_FILE], creates=False)
    return f"the run pushes to {publisher.repo}, {_repository_text(names, publisher)}: {_commit_to(publisher)}"


def _fetch_files(job: Job) -> None:
    """Download the files that are copied, and refuse those that no engine could parse."""
    job.source.fetch_files(job.plan.files)
    for problem in damaged_json(job.source.root):
        raise SourceError(problem, "download or copy it again")


def _write(job: Job, space: DiskSpace, start: float, corpus: Corpus | None = None) -> Result:
    """Carry out a complete plan; `corpus` has the texts for GPTQ, if it rounds layers first."""
    job.ranks.all_do(lambda: _fetch_files(job))
    outcome = carry_out(job, corpus)
    result = _result(job, space, start, outcome)
    job.reporter.on_finish(result, outcome.already_complete)
    return result


def _result(job: Job, space: DiskSpace, start: float, outcome: Outcome) -> Result:
    """Return what a run that began at time `start` has done, or would do."""
    plan = job.plan
    published = outcome.published
    findings = outcome.findings
    served = summary.serving(plan)
    findings_notes = zero_notes(sorted(findings.zero_layers)) + lost_notes(sorted(findings.lost_layers))

    return Result(
        model=os.fspath(job.run.model),
        revision=job.source.revision,
        output=str(job.target),
        scheme=summary.scheme_name(plan),
        schemes=summary.scheme_names(plan),
        kv_cache="fp8" if has_fp8_cache(plan) else "auto",
        folded=(plan.options.transforms and plan.options.transforms.title) or None,
        architecture=plan.model.name,
        dry_run=job.run.dry_run,
        source_bytes=summary.source_bytes(plan),
        output_bytes=summary.output_bytes(plan),
        download_bytes=job.source.remote_bytes([*plan.source.shards, *plan.files]),
        disk_bytes=space.needed,
        repository=published.repository if published else None,
        pushed_to=published.address if published else None,
        pushed_revision=published.revision if published else None,
        quantized_tensors=summary.quantized_tensors(plan),
        decoded_tensors=summary.decoded_tensors(plan),
        ignored_layers=ignored_layers(plan),
        shards=len(plan.layout.shards),
        tensor_parallel=summary.parallel_sizes(plan),
        serving=serving_to_json(*served) if served else None,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=peak_rss(),
        resumed=outcome.resumed,
        not_finite={name: counts.text for name, counts in sorted(findings.not_finite.items())},
        unread_shards=outcome.unread_shards,
        notes=[*plan.notes, *space.notes, *findings_notes],
        engines=list(summary.engines(plan)),
        fit=plan.provenance.frontier,
    )


@verb(ModelSource, Explain, Recipe, CalibrationTexts, positional=("model", "layer", "scheme"))
def explain(source: ModelSource, named: Explain, recipe: Recipe, texts: CalibrationTexts) -> Explanation:
    """Explain what compress() does to a layer, and why. Only config, index and headers of the model are read.

    Args:
    Returns:
        The explanation. Its `layers` has one item for all layers that are treated alike; its `to_json()` is what
        `--json` prints.

    Raises:
        OpenQuantError: there is no such layer, or compress() would refuse the model or the options.
    """
    run = Run(source.model, revision=source.revision, dry_run=True)
    request = check_request(run, recipe, texts)
    ranks = Ranks()
    reporter = Reporter()
    job = plan_of(complete_options(request, ranks, reporter), ranks, reporter)
    plan = job.plan
    return Explanation(
        model=os.fspath(source.model),
        revision=job.source.revision,
        architecture=plan.model.name,
        scheme=summary.scheme_name(plan),
        layers=explain_modules(plan, named.layer),
    )


@verb(Diagnose, positional=("model", "scheme"))
def diagnose(request: Diagnose, reporter: Reporter | None = None) -> Diagnosis:
    """Estimate the quantization error of each layer of a checkpoint from its weights alone. Nothing is written.

    Args:
        reporter: receives the progress in bytes of weights; nothing is reported if None.

    Returns:
        The errors of each layer; and `choices`, options of compress that were measured to lose less on another model.

    Raises:
        OpenQuantError: a weight that would be quantized has NaN or infinity, or something else that the caller can fix.
    """
    progress = partial((reporter or default_reporter()).on_progress, unit="bytes")
    chosen = find_scheme(request.scheme)

    source, checkpoint = open_model(request.model, request.revision, request.stream)
    options = PlanOptions(tuple(request.ignore))
    with without_collector():
        plan = make_plan(checkpoint, chosen, options, source.identity, request.architecture)

    with supply_shards([(source, shards_to_read(plan))], request.stream, request.scratch) as [supply]:
        threads = request.workers or min(MOST_WORKERS, available_cpus())
        layers, not_finite = diagnose_layers(plan, supply, threads, progress)

    rows = sum(layer.shape[0] for layer in layers)
    return Diagnosis(
        model=os.fspath(request.model),
        revision=source.revision,
        architecture=plan.model.name,
        scheme=chosen.name,
        rows_read=sum(layer.rows for layer in layers) / rows if rows else 1.0,
        layers=layers,
        normal={name: normal_row_error(scheme) for name, scheme in SCHEMES.items()},
        bytes=summary.output_bytes(plan),
        kl=measured_kl(chosen),
        choices=choices(plan),
        not_finite={name: counts.text for name, counts in not_finite.items()},
    )


def push(directory: str | os.PathLike[str], target: Push | str) -> str:
    """Publish a directory that compress() or dequantize() made, or the evaluation of one that is published already.

    Args:
        directory: a finished output directory; or an eval.json, whose figures go into the card of the repository.
        target: repository and other options of publishing; a text is the name of the repository.

    Returns:
        The address of the commit or pull request.

    Raises:
        OpenQuantError: the directory is unfinished or damaged, the evaluation is of another model, or the Hub refuses.
    """
    path = Path(directory)
    target = push_target(target)
    # A file can only be an evaluation.
    if path.is_file():
        with evaluation_publisher(path, target) as (publisher, names), publisher:
            return publisher.commit(names, "Evaluation by openquant").address

    publisher, others = _publisher(path, target)
    with silent():
        publisher.prepare(_published_card(path))
        with publisher:
            return publisher.commit(others, publisher.repo.rpartition("/")[2]).address


def preview_push(directory: str | os.PathLike[str], target: Push) -> dict[str, Any]:
    """Check what push() checks first, and say what it would do. Nothing is written, here or on the Hub.

    Args:
        directory: a finished output directory, or an eval.json.
        target: repository and other options of publishing.

    Returns:
        What would be read, done and written, as `push --dry-run --json` prints it.

    Raises:
        OpenQuantError: push() would refuse it.
    """
    from huggingface_hub import get_token

    path = Path(directory)
    # A file can only be an evaluation.
    if path.is_file():
        return _preview_evaluation(path, target)

    publisher, others = _publisher(path, target)
    notes = push_notes(path)
    names = None
    if get_token() is None:
        notes.append("no token was found (hf auth login), so what the repository holds is not known")
    else:
        with silent():
            names = publisher.prepare(_published_card(path), creates=False)

    with destination.output_errors(path, "read"):
        reads = [
            _place(path / name, "a shard" if name in publisher.shards else "a file")
            for name in sorted([*publisher.shards, *others])
        ]

    does = [f"those of {len(reads)} files are uploaded that the repository does not have; {_commit_to(publisher)}"]
    replaced = sorted({*publisher.shards, *others}.intersection(names or ()))
    if replaced:
        does.append(f"{list_first(replaced, 4)} in the repository are replaced where they differ")

    return _preview(reads, does, publisher, _repository_text(names, publisher), notes)


def _repository_text(names: Sequence[str] | None, publisher: Publisher) -> str:
    """Say whether there is a repository. `names`: those of its files, None if there is none."""
    if names is not None:
        return "a repository that exists"
    return f"a repository that is created{', private' if publisher.private else ''}"


def _preview_evaluation(path: Path, target: Push) -> dict[str, Any]:
    """Say what the push of an evaluation would do."""
    with evaluation_publisher(path, target) as (publisher, names):
        uploaded = f"{', '.join(names)} are uploaded, the card with the figures of this evaluation"
        does = [f"{uploaded}; {_commit_to(publisher)}"]
        return _preview([_place(path, "an evaluation")], does, publisher, "a repository that exists", [])


def _preview(
    reads: list[dict[str, Any]], does: list[str], publisher: Publisher, repository: str, notes: list[str]
) -> dict[str, Any]:
    """Return what `push --dry-run --json` prints. `repository`: whether there is one."""
    writes = [{"path": publisher.repo, "what": repository, "bytes": None}]
    return {"dry_run": True, "reads": reads, "does": does, "writes": writes, "download_bytes": 0, "notes": notes}


def _place(path: Path, what: str) -> dict[str, Any]:
    """Describe a file that is read."""
    return {"path": str(path.absolute()), "what": what, "bytes": path.stat().st_size}


def push_notes(directory: str | os.PathLike[str]) -> list[str]:
    """Say what the card of a directory that is published lacks.

    Args:
        directory: a finished output directory; or an eval.json, for which there are no notes.

    Returns:
        A sentence each: what the card says of a source that lacks something, on license and base_model, and, of an
        output with quantized weights, on its evaluation.

    Raises:
        OpenQuantError: a file of the directory cannot be read.
    """
    path = Path(directory)
    if not path.is_dir():
        return []

    card = _published_card(path).decode(errors="replace")
    notes = [*find_notes(card), *metadata_notes(split_card(card)[1], str(path / CARD_FILE))]
    return [*notes, *evaluation_notes(path)] if source_of(card) else notes


def _commit_to(publisher: Publisher) -> str:
    """Say where a push would commit to."""
    if publisher.push.create_pr:
        return "a pull request is opened"
    return f"one commit to {publisher.revision or 'main'}"


def _publisher(path: Path, target: Push) -> tuple[Publisher, list[str]]:
    """Check a finished directory; what publishes it, and the files beside its shards."""
    digest, files = destination.finished_files(path)
    require_sound(path, files)
    shards = [name for name in files if is_shard(name)]
    publisher = Publisher(target, path, digest, shards)
    return publisher, sorted([*files.difference(shards), *take_evaluation(publisher)])


def _published_card(path: Path) -> bytes:
    with destination.output_errors(path, "read"):
        return read_small(path / "README.md", f"{path}/README.md")
