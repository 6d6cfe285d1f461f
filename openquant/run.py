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
from .convert.conversion import Conversion, WeightFindings, loops
from .distributed import Ranks
from .errors import PlanError, SourceError, UsageError
from .files.cards import card_of, evaluation_digest, evaluation_files, find_evaluation
from .files.checkpoint import open_checkpoint, readable
from .files.destination import output_errors
from .files.model_files import CARD_FILE, EVAL_FILE, EVAL_PICTURE, INDEX_FILE, MAX_SMALL, read_small
from .files.output import REPLACE, Claim
from .formats.numbers import NonFinite
from .hub.error_mapping import PushError
from .hub.publish import Published, Publisher
from .hub.source import ShardSupply, Source, repository_source, silent
from .job import Job, claim_of, source_needs, without_collector
from .options import Push
from .plan import summary
from .plan.layout import Shard
from .plan.plan import Plan, output_config
from .report.card import evaluated_card, model_card, with_notes
from .report.cells import terminal
from .result import lost_notes
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
        findings: what it found in the weights that this run converted; complete in the first rank only.
        unread_shards: number of shards of an earlier run, which were not looked at.
    """

    resumed: bool = False
    already_complete: bool = False
    published: Published | None = None
    findings: WeightFindings = field(default_factory=WeightFindings)
    unread_shards: int = 0


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


def carry_out(job: Job, corpus: Corpus | None = None) -> Outcome:
    """Write the output and publish it, together with the other ranks.

    The files that the plan copies must be on disk (`Source.fetch_files`); shards are fetched here.

    Args:
        job: the run, with a complete plan.
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
    # Generated before the conversion, so that nothing about them can fail after hours.
    generated = generate_files(job)
    publisher = publisher_of(job)
    rounded = missing_bytes(job) if corpus is not None else 0
    writer = _Writer(job, generated, claim_of(job, generated, publisher, rounded), publisher)

    with ExitStack() as stack:
        if job.source.remote or publisher:
            stack.enter_context(silent())
        return writer.write(stack, corpus)


@dataclass
class _Writer:
    """Writes the output of a run.

    Attributes:
        job: the run; its plan gets the places of rounded layers.
        generated: contents of the files that are written rather than copied, by name.
        claim: the claim on the output directory.
        publisher: publishes the output; None if it is not published.
    """

    job: Job
    generated: Mapping[str, bytes]
    claim: Claim
    publisher: Publisher | None

    def write(self, stack: ExitStack, corpus: Corpus | None) -> Outcome:
        """Claim the directory, convert what is left, and publish it. `stack` holds the claim and the publisher."""
        ranks = self.job.ranks
        findings = WeightFindings()
        unread_shards = 0

        # Only the first rank claims the directory and asks the Hub; the others hear what is left and the current name.
        unfinished, repository = ranks.first_does(lambda: self._find_work(stack))
        if self.publisher:
            self.publisher.repo = repository
            stack.enter_context(self.publisher)

        if unfinished is not None:
            if corpus is not None and unfinished and "Hessians" in self.job.plan.lacks:
                store = ranks.all_do(lambda: apply_gptq(self.job, corpus))
                self.job = replace(self.job, plan=self.job.plan.with_rounded(store.places()))
            self._report_start(unfinished)
            findings = self._convert_shards(unfinished)
            unread_shards = ranks.first_does(lambda: self._finish_output(unfinished, findings))

        published = ranks.all_do(lambda: self._publish(unfinished))
        if corpus is not None and ranks.first:
            rounded_layer_store(self.job.target).remove()
        return Outcome(self.claim.resumed, unfinished is None, published, findings, unread_shards)

    def _find_work(self, stack: ExitStack) -> tuple[list[str] | None, str]:
        """Claim the directory, and find what is left to do in it.

        Returns:
            Names of the shards to convert, None if nothing at all is left to do; and the repository to push to, or "".

        Raises:
            SourceError: the output there was made from another source.
            OutputError: openquant did not write the output directory, or it cannot be written to.
        """
        job = self.job
        layout = job.plan.layout
        publisher = self.publisher
        claim = stack.enter_context(self.claim)

        if claim.complete and not (job.run.push and job.run.push.only):
            # It may have been damaged since an earlier run finished it.
            require_sound(job.target, claim.contents.files.keys())

        changed = claim.changed_sources
        if not claim.complete:
            # What an unfinished output has of another shard is made again.
            changed = changed - job.stamps.keys()
        if changed:
            raise SourceError(f"{job.source.root / min(changed)} changed since {job.target} was made", REPLACE)

        if claim.changed_sources:
            outdated = [shard.name for shard in layout.shards if layout.sources(shard.name) & claim.changed_sources]
            # The journal says last what the source is now: a run that is killed before removes the same once more.
            if publisher:
                publisher.forget_uploads()
            claim.discard(outdated)
        if publisher:
            publisher.prepare(self.generated[CARD_FILE])

        unfinished = [shard.name for shard in layout.shards if not claim.is_finished(shard.name)]
        return None if claim.complete else unfinished, publisher.repo if publisher else ""

    def _report_start(self, unfinished: Sequence[str]) -> None:
        """Report the bytes of the output, and how many of them an earlier run has written."""
        sizes = {shard.name: shard.nbytes for shard in self.job.plan.layout.shards}
        total = sum(sizes.values())
        self.job.reporter.on_start(total, total - sum(sizes[name] for name in unfinished))

    def _convert_shards(self, unfinished: Sequence[str]) -> WeightFindings:
        """Convert this rank's share of the shards, and wait for the others.

        Returns:
            What was found in the weights; in the first rank that of all ranks.
        """
        ranks = self.job.ranks
        names = set(unfinished)
        mine = ranks.share([shard for shard in self.job.plan.layout.shards if shard.name in names])
        findings = ranks.all_do(lambda: self._convert_share(mine))

        own = [findings.not_finite, sorted(findings.zero_layers), sorted(findings.lost_layers)]
        for data in ranks.gather(json.dumps(own).encode()):
            not_finite, zero_layers, lost_layers = json.loads(data)
            findings.not_finite.update({name: NonFinite(*counts) for name, counts in not_finite.items()})
            findings.zero_layers.update(zero_layers)
            findings.lost_layers.update(lost_layers)
        return findings

    def _convert_share(self, shards: Sequence[Shard]) -> WeightFindings:
        """Fetch, convert and upload shards. Returns what was found in their weights."""
        job = self.job
        source = job.source
        directory = self.claim.directory

        needs = source_needs(source, job.plan, [shard.name for shard in shards])
        scratch = directory.make_scratch(job.ranks.rank) if job.run.stream else None
        if source.remote and scratch is None:
            source.require_cache_space(needs)

        with ShardSupply(source, needs, scratch) as supply:
            transfer = _Transfer(supply, self.publisher, job.ranks)
            try:
                conversion = Conversion(
                    job.plan, shards, transfer, directory, job.device, self._advance, loops(job.fast)
                )
                findings = conversion.run(job.workers)
            except (SourceError, PlanError):
                # Bytes at the planned offsets of a replaced shard look like damaged weights.
                job.fingerprint().require_unchanged()
                raise

        if self.publisher:
            self.publisher.wait_for_uploads()
        return findings

    def _advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes are written; end if another rank has failed."""
        self.job.ranks.check()
        self.job.reporter.on_advance(nbytes)

    @without_collector()
    def _finish_output(self, unfinished: Sequence[str], findings: WeightFindings) -> int:
        """Write all other files, check the output and mark it as finished.

        Args:
            unfinished: the shards that this run converted.
            findings: what was found in their weights.

        Returns:
            The number of shards of an earlier run, which this one has not looked at.
        """
        job = self.job
        self._write_others(findings.lost_layers)
        # A run that only pushes has deleted the shards that are on the Hub.
        if not (job.run.push and job.run.push.only):
            check_finished(job.target, job.plan)
        self.claim.finish()
        return len(job.plan.layout.shards) - len(unfinished)

    def _write_others(self, lost_layers: Set[str]) -> None:
        """Write all files but shards, after checking that the source did not change during the run. The card names
        layers of which many weights became zero.
        """
        source = self.job.source
        claim = self.claim

        self.job.fingerprint().require_unchanged()
        digests = source.digests(self.job.checkpoint)
        copied = self.job.plan.files.keys() - self.generated.keys()
        changed = {name for name, digest in digests.items() if claim.sources[name] != digest}
        if changed - copied:
            raise SourceError(f"{source.root / min(changed - copied)} changed while it was being converted", REPLACE)

        for name in copied:
            if name in changed or not claim.is_finished(name):
                claim.directory.copy(source.root / name, name)
        for name, data in self.generated.items():
            if name == CARD_FILE:
                data = with_notes(data.decode(), lost_notes(sorted(lost_layers))).encode()
            if not claim.is_finished(name):
                claim.directory.write(name, data)

    def _publish(self, unfinished: Sequence[str] | None) -> Published | None:
        """Publish the output, if the run pushes. Only the first rank does it."""
        job = self.job
        if self.publisher is None or not job.ranks.first:
            return None

        evaluation: list[str] = []
        if unfinished is None and not self.publisher.push.only:
            evaluation = take_evaluation(self.publisher)

        job.reporter.on_publishing(self.publisher.repo)
        title = terminal(f"{job.source.name} in {summary.numbers(job.plan)} ({summary.title(job.plan)})")
        return self.publisher.commit(sorted([*job.plan.files.keys() | self.generated.keys(), *evaluation]), title)


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
        PushError: there is no such repository, or the user may not write there.
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
        fingerprint = source.fingerprint(checkpoint)
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


def publisher_of(job: Job) -> Publisher | None:
    """Return what publishes the output of a run; None if it is not published."""
    if job.run.push is None:
        return None
    return Publisher(job.run.push, job.target, job.plan.digest, [shard.name for shard in job.plan.layout.shards])


def generate_files(job: Job, leave_out: Container[str] = ()) -> dict[str, bytes]:
    """Return the files that are written rather than copied.

    config.json is last, since engines take no directory without it for a model.

    Args:
        job: the run, with a complete plan. The source's card must be on disk.
        leave_out: names of files that are not needed.

    Returns:
        The contents of each file by its name.
    """
    plan = job.plan
    makers: dict[str, Callable[[], bytes]] = {CARD_FILE: lambda: _card(plan, job.source, job.target)}
    if plan.source.indexed:
        makers[INDEX_FILE] = lambda: _index(plan)
    makers["config.json"] = lambda: _config(plan)
    return {name: make() for name, make in makers.items() if name not in leave_out}


def _card(plan: Plan, source: Source, target: Path) -> bytes:
    base = None
    if CARD_FILE in plan.files:
        with readable():
            base = read_small(source.root / CARD_FILE, CARD_FILE).decode("utf-8-sig", errors="replace")
    # A directory name that is no UTF-8 could not be written into the card.
    directory = os.fsencode(Path(os.path.realpath(target)).name).decode("utf-8", "replace")
    template = _has_chat_template(plan, source)
    return model_card(base, plan, source.name, source.repo, source.revision, directory, template).encode()


def _has_chat_template(plan: Plan, source: Source) -> bool:
    path = source.root / "tokenizer_config.json"
    # Before a push that is only tried, the file is not fetched.
    if "chat_template.jinja" in plan.files or not path.is_file() or path.stat().st_size > MAX_SMALL:
        return "chat_template.jinja" in plan.files
    with readable():
        return b'"chat_template"' in read_small(path, path.name)


def _index(plan: Plan) -> bytes:
    weight_map = {info.name: shard.name for shard in plan.layout.shards for info in plan.layout.outputs(shard.name)}
    index = {"metadata": {"total_size": summary.output_bytes(plan)}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _config(plan: Plan) -> bytes:
    text = json.dumps(output_config(plan), indent=2, ensure_ascii=False) + "\n"
    # Half of a surrogate pair, which UTF-8 does not have, is escaped.
    return text.encode(errors="backslashreplace")
