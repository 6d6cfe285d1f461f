"""What a run reads, writes and needs, all of it known before anything is written.

Every rank makes its Job in the same way: `open_source`, make a plan, and `prepare`, which checks that memory suffices.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from .convert.conversion import worker_memory, worth_compiling
from .distributed import Ranks
from .errors import UsageError
from .files.checkpoint import Checkpoint, Fingerprint, Stamp
from .files.destination import WeightFacts
from .files.output import Claim, OutputContents, refuse_overlap
from .hub.publish import AT_ONCE, Publisher
from .hub.source import Source, find_source, memory_needed, scratch_bytes
from .machine import COMPILED_MEMORY, available_cpus, find_device
from .options import Run
from .plan import summary
from .plan.plan import Plan
from .plan.serving import chosen_scales
from .result import Reporter
from .streaming import session
from .streaming.memory import MemoryStep, memory_left

if TYPE_CHECKING:
    from .data.corpus import Corpus
    from .streaming.interleaved import TextRun
    from .streaming.pass_checkpoint import PassCheckpoint

# More threads do not make a disk faster, and each takes memory.
MOST_WORKERS, MOST_GPU_WORKERS = 16, 4


@dataclass(frozen=True)
class Opened:
    """A source that was opened for a run. Of a repository only config, index and headers are fetched.

    Attributes:
        run: options of the run.
        ranks: the processes of the run, which share its work.
        reporter: receives notes and progress.
        source: where the checkpoint comes from.
        checkpoint: its config, files and headers.
        stamps: size, times and inode of each shard of a local source, taken before the plan is made.
        device: device that computes: "cpu", or a torch device such as "cuda:1".
    """

    run: Run
    ranks: Ranks
    reporter: Reporter
    source: Source
    checkpoint: Checkpoint
    stamps: Mapping[str, Stamp]
    device: str

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the source as it was when it was opened; no shard is read yet."""
        return self.source.fingerprint(self.checkpoint, self.stamps)

    @contextmanager
    def run_texts(
        self,
        corpus: Corpus,
        checkpoint: PassCheckpoint | None,
        hidden: int,
        budget: int,
        directory: Path,
        processes: int = 1,
        fingerprint: Fingerprint | None = None,
    ) -> Iterator[TextRun]:
        """Give the model its shards as they arrive, for texts that run through it.

        Args:
            corpus: the texts, as tokens.
            checkpoint: file from which an interrupted pass continues; None for none.
            hidden: bytes of the hidden states of all texts.
            budget: bytes of them that stay in memory.
            directory: has the file for the others.
            processes: processes of this machine that have such a file each.
            fingerprint: gets the hash of each of the source's shards on the way; None for no hashes.

        Yields:
            The texts and the model.
        """
        # Only now is torch imported.
        from .streaming.interleaved import TextRun
        from .streaming.model import StreamedModel

        model = StreamedModel(self.checkpoint, device=self.device)
        progress = session.checked_progress(self.ranks, self.reporter.on_progress)
        place = session.Scratch(directory, budget, self.run.stream, processes)
        origin = self.source, fingerprint or self.fingerprint()
        hashes = fingerprint is not None
        with session.streamed_run([origin], hidden, place, self.ranks, hashes, [model]) as scratch:
            yield TextRun(model, corpus, scratch, progress, checkpoint)

    def output_directory(self, suffix: str) -> Path:
        """Return the output directory, which may be missing.

        Args:
            suffix: what follows the source's name, such as "-FP8", if the user names no directory.
        """
        if self.run.output is not None:
            return Path(self.run.output)
        return self.source.default_path(self.source.name + suffix)


@dataclass(frozen=True)
class Job(Opened):
    """A run that is ready to write.

    Attributes:
        plan: the plan.
        target: the output directory.
        workers: number of threads, as many as memory allows.
        fast: whether to use compiled loops, which take memory and time to load.
    """

    plan: Plan
    target: Path
    workers: int
    fast: bool

    @property
    def view(self) -> list[object]:
        """What must be equal in all ranks: the plan's digest, and size and time of each shard of a local source."""
        return [self.plan.digest, {name: (size, modified) for name, (size, modified, *_) in self.stamps.items()}]


@contextmanager
def connect_ranks(ranks: Ranks | None) -> Iterator[Ranks]:
    """Connect the ranks of a run.

    Args:
        ranks: the processes of the job as this one sees them; None for a process on its own.

    Returns:
        A context manager that gives the connected ranks. Entering it waits for all of them; at its end this rank leaves
        the others.

    Raises:
        OutputError: while entering: a rank failed, died, or did not come within `ranks.patience` seconds.
        UsageError: while entering: there are several ranks, and `ranks.rendezvous` is None.
    """
    ranks = ranks or Ranks()
    with ranks:
        # Connecting takes memory, so it comes before the memory for workers is measured.
        ranks.agree(None)
        yield ranks


def make_job(run: Run, ranks: Ranks, reporter: Reporter, plan: Callable[[Opened], Job]) -> Job:
    """Open the source in all ranks, make its plan, and check that all see the same source and plan.

    Args:
        run: options of the run.
        ranks: the connected ranks of the run.
        reporter: receives notes and progress.
        plan: plans the opened source in this rank, and calls `prepare`.

    Returns:
        What `plan` returned in this rank.

    Raises:
        SourceError: ranks see different sources.
        Exception: what `open_source` or `plan` raised in this rank.
        OutputError: another rank failed or died.
    """
    job = ranks.all_do(lambda: plan(open_source(run, ranks, reporter)))
    ranks.require_same(job.view, "sources")
    return job


def open_source(run: Run, ranks: Ranks, reporter: Reporter) -> Opened:
    """Open the source of a run. Nothing is written; of a repository only config, index and headers are fetched.

    Args:
        run: options of the run.
        ranks: the ranks of the run, whose local number selects the device.
        reporter: receives notes and progress.

    Returns:
        The source, its opened checkpoint, stamps that show whether its shards change, and the device. With `dry_run`
        the device is "cpu", and `run.device` is not looked at.

    Raises:
        SourceError: there is no such source, or it cannot be read.
        UsageError: there is no such device, `run.output` is "", or `open_model` refuses the options.
    """
    device = "cpu" if run.dry_run else find_device(run.device, ranks.local_rank)
    source, checkpoint = open_model(run.model, run.revision, run.stream, run.copy)
    with without_collector():
        return Opened(run, ranks, reporter, source, checkpoint, source.stamps(checkpoint), device)


def open_model(
    model: str | os.PathLike[str], revision: str | None, stream: bool, copy: Collection[str] = ()
) -> tuple[Source, Checkpoint]:
    """Open a model. Of a repository only config, index, headers and small files that decide about others are fetched.

    Args:
        model: directory, GGUF file, or name of a repository on the Hub.
        revision: commit, branch or tag of a repository; None for its default branch.
        stream: whether its shards will be streamed; an error for a local directory.
        copy: patterns of further files that belong to it.

    Returns:
        Where the model's files come from, and its config, files and headers.

    Raises:
        SourceError: there is no such model, or it cannot be read.
        UsageError: `stream` or a revision is given for a local directory, `model` is "" or names another revision, or
            a pattern names no file.
    """
    name = os.fspath(model)
    source = find_source(name, revision)
    if stream and source.repo is None:
        kind = "directory" if source.gguf is None else "file"
        raise UsageError(f"{name} is a local {kind}, nothing of it can be streamed", "leave --stream out")

    with without_collector():
        checkpoint = source.open(copy)
    for pattern in copy:
        if not any(fnmatchcase(file, pattern) for file in checkpoint.files):
            raise UsageError(
                f"--copy {pattern} names no file of {source.place} that may be copied",
                "it is a pattern like 'prompts/*' or 'x.py'; hidden files and weights beside the model are not copied",
            )
    return source, checkpoint


def prepare(opened: Opened, plan: Plan, before: Sequence[MemoryStep] = (), refuse: bool = True) -> Job:
    """Decide on output directory, workers and compiled loops for a plan.

    Args:
        opened: the opened source.
        plan: the plan of this source.
        before: steps before the conversion, such as a calibration, with the bytes of memory that they take.
        refuse: whether too little memory is an error. After hours of calibration it should not be.

    Returns:
        Everything that the conversion needs.

    Raises:
        OutputError: output and source overlap.
        UsageError: --max-memory is too little for one worker or an earlier step, and `refuse` is true.
    """
    run = opened.run
    device = opened.device
    target = opened.output_directory(summary.suffix(plan))
    refuse_overlap(opened.source.root, target)

    limit = MOST_WORKERS if device == "cpu" else MOST_GPU_WORKERS
    workers = run.workers or min(limit, max(1, available_cpus() // opened.ranks.local_size))
    fast = worth_compiling(plan)

    if run.max_memory is not None:
        per_worker = worker_memory(plan, device)
        nbytes = memory_needed(opened.source) + per_worker
        converting = MemoryStep("converting with a single worker", nbytes, models=bool(before))
        memory_left(run.max_memory, [converting, *before], refuse)

        for_workers = run.max_memory - converting.needed + per_worker
        workers = max(1, min(workers, for_workers // per_worker))
        fast = fast and for_workers >= workers * per_worker + COMPILED_MEMORY

    return Job(**vars(opened), plan=plan, target=target, workers=workers, fast=fast)


@contextmanager
def without_collector() -> Iterator[None]:
    """In the `with` block, turn off Python's cycle collector, which would take half the time of planning.

    A plan makes millions of objects, and the check of an output looks at as many.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def expected_download(source: Source, plan: Plan) -> tuple[int, int]:
    """Return how many bytes a run has still to download from the Hub, and how many of them lie on disk with `stream`.

    Args:
        source: where the model comes from.
        plan: the plan.
    """
    nbytes = source.remote_bytes([*plan.source.shards, *plan.files])
    return nbytes, scratch_bytes(source, source_needs(source, plan))


def source_needs(source: Source, plan: Plan, outputs: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return which source shards output shards are made from, if any must be fetched.

    Args:
        source: where the checkpoint comes from.
        plan: the plan.
        outputs: file names of output shards; all if None.

    Returns:
        File names of source shards by file name of the output shard, such as {"b.safetensors": ["a.safetensors",
        "b.safetensors"]} where b has layers that engines fuse with layers of a. Empty if all shards are on disk.
    """
    if not source.remote:
        return {}
    if outputs is None:
        outputs = [shard.name for shard in plan.layout.shards]
    return {output: sorted(plan.layout.sources(output)) for output in outputs}


def claim_of(job: Job, generated: Mapping[str, bytes], publisher: Publisher | None = None, rounded: int = 0) -> Claim:
    """Return the claim of a run on its output directory; entering it claims the directory.

    Args:
        job: the run.
        generated: contents of the files that are written rather than copied, by path relative to the output directory.
        publisher: publishes the output; None if it is not published.
        rounded: bytes that layers rounded by GPTQ will still take on the same disk for a while; 0 without GPTQ.

    Returns:
        The claim, a context manager that is not entered yet.
    """
    plan = job.plan
    source = job.source
    run = job.run
    # What replaces a file of the source counts as large as that, so that the size is known before it is made.
    files = {**{name: len(data) for name, data in generated.items()}, **plan.files}
    scratch = rounded
    if run.stream:
        # Each rank keeps source shards of its own on disk.
        scratch += scratch_bytes(source, source_needs(source, plan)) * job.ranks.size

    transforms = plan.options.transforms
    facts = WeightFacts(
        gptq=plan.options.gptq is not None,
        tuned=plan.is_tuned,
        smoothed=transforms is not None and bool(transforms.title),
        weighed=transforms is not None and transforms.weighed > 0,
        keeps_codes=plan.decisions.keeps,
        from_quantized=summary.has_quantized_source(plan),
        static_scales=chosen_scales(plan.decisions, plan.entry),
    )
    contents = OutputContents(
        plan.digest,
        {shard.name: shard.nbytes for shard in plan.layout.shards},
        files,
        plan.provenance._replace(copy=run.copy, smoothing=transforms.scales if transforms else {}),
        facts,
        at_once=AT_ONCE if run.push and run.push.only else None,
        scratch=scratch,
    )
    return Claim(
        job.target,
        contents,
        run.overwrite,
        elsewhere=publisher.uploaded_shards if publisher else frozenset,
        sources=lambda: {**job.stamps, **source.digests(job.checkpoint)},
    )
