"""Carry out a prepared plan: claim the output, fetch, convert, write the other files, publish."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .calibration.run import apply_gptq, missing_bytes, rounded_layer_store
from .convert.conversion import WeightFindings, check_written, convert
from .distributed import Ranks
from .errors import OutputError, PlanError, SourceError, UsageError
from .files.cards import card_of, evaluation_digest, evaluation_files, find_evaluation
from .files.checkpoint import Fingerprint, open_checkpoint, readable
from .files.destination import output_errors
from .files.model_files import CARD_FILE, EVAL_FILE, EVAL_PICTURE, INDEX_FILE, read_small
from .files.output import REPLACE, Claim
from .formats.numbers import NonFinite
from .hub.error_mapping import PushError
from .hub.publish import Published, Publisher
from .hub.source import ShardSupply, Source, repository_source, silent
from .job import Prepared, claim_of, in_all_ranks, source_needs
from .options import Push
from .plan import summary
from .plan.decisions import Shard
from .plan.plan import Plan, output_config
from .report.card import evaluated_card, model_card, with_notes
from .report.cells import terminal
from .result import Reporter, lost_notes
from .verification.checks import check_finished, require_sound

if TYPE_CHECKING:
    from .data.corpus import Corpus


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run; by default, of one that has written nothing.

    Attributes:
        resumed: whether it continued an earlier run.
        already_complete: whether the earlier run had left nothing to do.
        published: where the model was pushed; None if it was not.
        findings: what it found in the weights that this run converted, and in shards that an earlier run finished;
            complete in the first rank only.
        unread_shards: number of shards that were not checked for those, since an earlier run moved them to the Hub.
    """

    resumed: bool = False
    already_complete: bool = False
    published: Published | None = None
    findings: WeightFindings = field(default_factory=WeightFindings)
    unread_shards: int = 0


@dataclass(frozen=True)
class _Writing:
    """What all phases of a run share.

    Attributes:
        prepared: options of the run, source checkpoint, plan and output directory.
        generated: contents of the files that are written rather than copied, by name.
        claim: the claim on the output directory.
        publisher: publishes the output; None if it is not published.
        ranks: the processes of this run, each with its number (rank) among them.
        reporter: receives the progress.
    """

    prepared: Prepared
    generated: Mapping[str, bytes]
    claim: Claim
    publisher: Publisher | None
    ranks: Ranks
    reporter: Reporter

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes of the source are converted; end if another rank has failed."""
        self.ranks.check()
        self.reporter.on_advance(nbytes)


class _Transfer:
    """Downloads shards before convert() needs them and uploads finished ones; ends if another rank fails."""

    def __init__(self, supply: ShardSupply, publisher: Publisher | None, ranks: Ranks) -> None:
        self.supply = supply
        self.ranks = ranks
        self.publisher = publisher
        self.path = supply.path

    def wait_for(self, output: str, stopped: Callable[[], bool]) -> None:
        def has_ended() -> bool:
            self.ranks.check()
            return stopped()

        if self.publisher is not None:
            self.publisher.wait_for_room(output, has_ended)
        self.supply.wait_for(output, has_ended)

    def release(self, output: str) -> None:
        self.supply.release(output)
        if self.publisher is not None:
            self.publisher.begin_upload(output)


def carry_out(prepared: Prepared, ranks: Ranks, reporter: Reporter, corpus: Corpus | None = None) -> Outcome:
    """Write the output and publish it, together with the other ranks.

    The files that the plan copies must be on disk (`Source.fetch_files`); shards are fetched here.

    Args:
        prepared: options of the run, source checkpoint, plan and output directory.
        ranks: the processes of this run, each with its number (rank) among them.
        reporter: receives the progress.
        corpus: the texts with which GPTQ rounds layers before the conversion; None without GPTQ.

    Returns:
        Whether the run continued an earlier one, where the output was published, and the NaN and infinities by tensor
        name.

    Raises:
        SourceError: the source cannot be read or changed, or a weight to be quantized has NaN or infinity.
        PlanError: a weight is too large for its scheme.
        OutputError: the output cannot be claimed, written or published, or another rank failed.
        UsageError: the device failed, or the name of the repository to push to is not valid.
    """
    plan = prepared.plan
    # Generated before the conversion, so that nothing about them can fail after hours.
    generated = generate_files(prepared)
    publisher = publisher_of(prepared)

    rounded = missing_bytes(prepared) if corpus is not None else 0
    claim = claim_of(prepared, generated, publisher, ranks, rounded)
    writing = _Writing(prepared, generated, claim, publisher, ranks, reporter)
    findings = WeightFindings()
    unread_shards = 0

    with ExitStack() as stack:
        if prepared.source.remote or publisher:
            stack.enter_context(silent())
        # Only the first rank claims the directory and asks the Hub; the others hear what is left and the current name.
        unfinished, repository = ranks.first_does(lambda: _find_work(writing, stack.enter_context(claim)))
        if publisher:
            publisher.repo = repository
            stack.enter_context(publisher)

        # GPTQ rounds layers before the conversion.
        if corpus is not None and unfinished:
            plan = in_all_ranks(ranks, lambda: apply_gptq(prepared, corpus, ranks, reporter))
            writing = replace(writing, prepared=replace(prepared, plan=plan))

        if unfinished is not None:
            _report_start(writing, unfinished)
            findings = _convert_shards(writing, unfinished)
            unread_shards = ranks.first_does(lambda: _finish_output(writing, unfinished, findings))

        published = in_all_ranks(ranks, lambda: _publish(writing, unfinished))
        if corpus is not None and ranks.first:
            rounded_layer_store(prepared.target).remove()
    return Outcome(claim.resumed, unfinished is None, published, findings, unread_shards)


def _find_work(writing: _Writing, claim: Claim) -> tuple[list[str] | None, str]:
    """Find what is left to do in a claimed directory.

    Returns:
        Names of the shards to convert, None if nothing at all is left to do; and the repository to push to, or "".

    Raises:
        SourceError: the output there was made from another source.
        OutputError: openquant did not write the output directory, or it cannot be written to.
    """
    prepared, publisher = writing.prepared, writing.publisher
    push = prepared.run.push
    if claim.complete and not (push and push.only):
        # It may have been damaged since an earlier run finished it.
        require_sound(prepared.target, claim.contents.files.keys())

    changed = claim.changed_sources
    if not claim.complete:
        # What an unfinished output has of another shard is made again.
        changed = changed - prepared.stamps.keys()
    if changed:
        raise SourceError(f"{prepared.source.root / min(changed)} changed since {prepared.target} was made", REPLACE)
    if claim.changed_sources:
        layout = prepared.plan.layout
        outdated = [shard.name for shard in layout.shards if layout.sources(shard.name) & claim.changed_sources]
        # The journal says last what the source is now: a run that is killed before removes the same once more.
        if publisher:
            publisher.forget_uploads()
        claim.discard(outdated)
    if publisher:
        publisher.prepare(writing.generated[CARD_FILE], prepared.source.downloaded_commit())

    unfinished = [shard.name for shard in prepared.plan.layout.shards if not claim.is_finished(shard.name)]
    repository = publisher.repo if publisher else ""
    return None if claim.complete else unfinished, repository


def _report_start(writing: _Writing, unfinished: Sequence[str]) -> None:
    """Report the bytes of the source, and how many of them an earlier run has converted."""
    layout = writing.prepared.plan.layout
    sizes = {shard.name: layout.count_source_bytes(shard.name) for shard in layout.shards}
    total = sum(sizes.values())
    writing.reporter.on_start(total, total - sum(sizes[name] for name in unfinished))


def _convert_shards(writing: _Writing, unfinished: list[str]) -> WeightFindings:
    """Convert this rank's share of the shards, and wait for the others.

    Returns:
        What was found in the weights; in the first rank that of all ranks.
    """
    ranks, names = writing.ranks, set(unfinished)
    mine = ranks.share([shard for shard in writing.prepared.plan.layout.shards if shard.name in names])
    findings = in_all_ranks(ranks, lambda: _convert_share(writing, mine))
    own = [findings.not_finite, sorted(findings.zero_layers), sorted(findings.lost_layers)]
    for data in ranks.gather(json.dumps(own).encode()):
        not_finite, zero_layers, lost_layers = json.loads(data)
        findings.not_finite.update({name: NonFinite(*counts) for name, counts in not_finite.items()})
        findings.zero_layers.update(zero_layers)
        findings.lost_layers.update(lost_layers)
    return findings


def _convert_share(writing: _Writing, shards: Sequence[Shard]) -> WeightFindings:
    """Fetch, convert and upload shards. Returns what was found in their weights."""
    prepared, publisher, ranks = writing.prepared, writing.publisher, writing.ranks
    plan, source = prepared.plan, prepared.source
    needs = source_needs(source, plan, [shard.name for shard in shards])
    scratch = writing.claim.directory.make_scratch(ranks.rank) if prepared.run.stream else None
    if source.remote and scratch is None:
        source.require_cache_space(needs)

    with ShardSupply(source, needs, scratch) as supply:
        transfer = _Transfer(supply, publisher, ranks)
        try:
            findings = convert(
                plan,
                shards,
                transfer,
                writing.claim.directory,
                prepared.workers,
                prepared.device,
                writing.advance,
                fast=prepared.fast,
            )
        except (SourceError, PlanError):
            # Bytes at the planned offsets of a replaced shard look like damaged weights.
            _require_unmoved(prepared)
            raise

    if publisher:
        publisher.wait_for_uploads()
    return findings


def _finish_output(writing: _Writing, unfinished: list[str], findings: WeightFindings) -> int:
    """Write all other files, check the output and mark it as finished.

    Args:
        writing: the run.
        unfinished: the shards that it converted.
        findings: what was found in their weights; what shards of an earlier run show is added.

    Returns:
        The number of shards of an earlier run that cannot be checked, since they are on the Hub.
    """
    prepared, claim = writing.prepared, writing.claim
    plan, push, target = prepared.plan, prepared.run.push, prepared.target
    unread_shards = 0

    for name in {shard.name for shard in plan.layout.shards}.difference(unfinished):
        if (target / name).is_file():
            earlier = check_written(target / name, plan.layout.lay_out(name))
            findings.not_finite.update(earlier.not_finite)
            findings.lost_layers.update(earlier.lost_layers)
        else:
            unread_shards += 1

    _write_others(writing, findings.lost_layers)
    # A run that only pushes has deleted the shards that are on the Hub.
    if not (push and push.only):
        _check_finished(target, plan, claim.resumed)
    claim.finish()
    return unread_shards


def _publish(writing: _Writing, unfinished: list[str] | None) -> Published | None:
    """Publish the output, if the run pushes. Only the first rank does it."""
    prepared, publisher, push = writing.prepared, writing.publisher, writing.prepared.run.push
    if publisher is None or push is None or not writing.ranks.first:
        return None

    evaluation: list[str] = []
    if unfinished is None and not push.only:
        evaluation = take_evaluation(publisher)

    writing.reporter.on_publishing(publisher.repo)
    title = terminal(f"{prepared.source.name} in {summary.numbers(prepared.plan)} ({summary.title(prepared.plan)})")
    return publisher.commit(sorted([*prepared.plan.files.keys() | writing.generated.keys(), *evaluation]), title)


def take_evaluation(publisher: Publisher) -> list[str]:
    """Publish an evaluation that lies in the output directory too, and add its figures to the card.

    Args:
        publisher: uploads the output directory; it gets a function that completes the model card.

    Returns:
        Names of the evaluation's files: eval.json, and its page and picture if they are there; empty if there is no
        evaluation.

    Raises:
        SourceError: the directory is no readable checkpoint, or the evaluation is damaged or of another model.
    """
    evaluated = find_evaluation(open_checkpoint(publisher.directory))
    if evaluated is None:
        return []

    picture = EVAL_PICTURE if EVAL_PICTURE in evaluated.files else None
    publisher.complete = partial(evaluated_card, evaluation=evaluated.evaluation, picture=picture)
    return evaluated.files


@contextmanager
def evaluation_publisher(path: Path, target: Push) -> Iterator[tuple[Publisher, list[str]]]:
    """Make what publishes an evaluation in the repository of its model, and run all checks of it.

    Args:
        path: the evaluation.
        target: the repository, or "org/name@revision" for an open pull request or a branch, and other options of
            publishing.

    Yields:
        The publisher; and the names of the files to publish: the card with the figures, eval.json, and its picture.

    Raises:
        SourceError: the evaluation is damaged or of another model, or the repository holds no readable checkpoint.
        PushError: there is no such repository, the user may not write there, or the Hub refuses the card.
        OutputError: the temporary directory cannot be written.
        UsageError: the name is not valid, or its revision contradicts --create-pr.
    """
    name, at_sign, revision = target.name.partition("@")
    if at_sign and not revision:
        raise UsageError(f"{target.name} names no revision after the @", "write org/name@refs/pr/1")
    if revision and target.create_pr:
        raise UsageError(
            f"{target.name} names a revision to commit to, --create-pr opens a pull request", "give one of them"
        )

    files = evaluation_files(path)
    evaluation = json.loads(files[EVAL_FILE])
    output = evaluation["output"]
    picture = EVAL_PICTURE if EVAL_PICTURE in files else None

    with silent(), output_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        digest = evaluation_digest(evaluation)
        publisher = Publisher(replace(target, name=name), Path(folder), digest, (), revision or None)
        if publisher.find() is None:
            raise PushError(f"{publisher.repo} does not exist, so nothing in it was evaluated", "push the model first")

        source = repository_source(publisher.repo, publisher.revision)
        checkpoint = source.open()
        fingerprint = Fingerprint(checkpoint, source.remote, source.identity)
        if not fingerprint.matches(output["digest"], output.get("stamp", "")):
            evaluated = f"{publisher.repo}{at_sign}{revision}"
            raise SourceError(
                f"{path} is not of the model in {source.identity}",
                f"evaluate that one: openquant eval {evaluated} --source SOURCE --out eval.json",
            )

        source.fetch_files([CARD_FILE])
        card = card_of(checkpoint).encode()
        for name, data in {CARD_FILE: card, **files}.items():
            (publisher.directory / name).write_bytes(data)

        publisher.complete = partial(evaluated_card, evaluation=evaluation, picture=picture)
        publisher.prepare(card)
        yield publisher, [CARD_FILE, *files]


def _check_finished(target: Path, plan: Plan, resumed: bool) -> None:
    """Compare the output with the plan. If the run was resumed, somebody may have changed the earlier run's files."""
    try:
        check_finished(target, plan)
    except RuntimeError as error:
        if not resumed:
            raise
        raise OutputError(
            f"{error}; an earlier run wrote part of it", "if something changed it since, replace it with --overwrite"
        ) from None


def publisher_of(prepared: Prepared) -> Publisher | None:
    """Return what publishes the output of a run; None if it is not published."""
    plan, push = prepared.plan, prepared.run.push
    if push is None:
        return None
    return Publisher(push, prepared.target, plan.digest, [shard.name for shard in plan.layout.shards])


def generate_files(prepared: Prepared, leave_out: Container[str] = ()) -> dict[str, bytes]:
    """Return the files that are written rather than copied.

    config.json is last, since engines take no directory without it for a model.

    Args:
        prepared: options of the run, source checkpoint, complete plan and output directory. The source's card must be
            on disk.
        leave_out: names of files that are not needed.

    Returns:
        The contents of each file by its name.
    """
    plan = prepared.plan
    makers: dict[str, Callable[[], bytes]] = {CARD_FILE: lambda: _card(plan, prepared.source, prepared.target)}
    if plan.source.indexed:
        makers[INDEX_FILE] = lambda: _index(plan)
    makers["config.json"] = lambda: _config(plan)
    return {name: make() for name, make in makers.items() if name not in leave_out}


def _require_unmoved(prepared: Prepared) -> None:
    """Refuse a source that was written to since the plan was made.

    Raises:
        SourceError: a shard has another size, or other times.
    """
    source, checkpoint = prepared.source, prepared.checkpoint
    now = source.stamps(checkpoint)
    # Without the inode, which some network file systems change now and then; a replaced file has another ctime anyway.
    moved = [name for name, stamp in now.items() if stamp[:-1] != prepared.stamps[name][:-1]]
    if moved:
        path = source.root / min(moved)
        # That of a GGUF file is a link to it.
        if source.gguf is not None:
            path = path.resolve()
        # Run again, what was made of it is made anew; of one with another header the plan is another too.
        raise SourceError(
            f"{path} changed while it was being converted",
            "let nothing write to the model meanwhile, and run the same command again",
        )


def _write_others(writing: _Writing, lost_layers: Set[str]) -> None:
    """Write all files but shards, after checking that the source did not change during the run. The card names layers
    of which many weights became zero.
    """
    prepared, claim, generated = writing.prepared, writing.claim, writing.generated
    directory = claim.directory
    source, plan = prepared.source, prepared.plan
    _require_unmoved(prepared)
    digests = source.digests(prepared.checkpoint)
    copied = plan.files.keys() - generated.keys()
    changed = {name for name, digest in digests.items() if claim.sources[name] != digest}
    if changed - copied:
        raise SourceError(f"{source.root / min(changed - copied)} changed while it was being converted", REPLACE)

    for name in copied:
        if name in changed or not claim.is_finished(name):
            directory.copy(source.root / name, name)
    for name, data in generated.items():
        if name == CARD_FILE:
            data = with_notes(data.decode(), lost_notes(sorted(lost_layers))).encode()
        if not claim.is_finished(name):
            directory.write(name, data)


def _card(plan: Plan, source: Source, target: Path) -> bytes:
    base = None
    if CARD_FILE in plan.files:
        with readable():
            base = read_small(source.root / CARD_FILE, CARD_FILE).decode("utf-8-sig", errors="replace")
    # A directory name that is no UTF-8 could not be written into the card.
    directory = os.fsencode(Path(os.path.realpath(target)).name).decode("utf-8", "replace")
    return model_card(base, plan, source.name, source.repo, source.revision, directory).encode()


def _index(plan: Plan) -> bytes:
    weight_map = {info.name: shard.name for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)}
    index = {"metadata": {"total_size": summary.output_bytes(plan)}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _config(plan: Plan) -> bytes:
    try:
        return (json.dumps(output_config(plan), indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        # JSON can have half of a surrogate pair only as an escape.
        return (json.dumps(output_config(plan), indent=2) + "\n").encode()
