"""What a run reads, writes and needs: known before anything is written, and asked for by each step of it.

A run is prepared in all ranks alike: `open_source`, a plan of what is there, and `prepare`, which asks whether memory
and disk allow it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from .convert.conversion import COMPILED_MEMORY, worker_memory, worth_compiling
from .distributed import RERUN_CONTINUES, Ranks, attempt
from .errors import SourceError, UsageError
from .files.checkpoint import Checkpoint, open_checkpoint, readable
from .files.claim import Claim, OutputContents
from .files.fingerprint import Stamp
from .files.output import refuse_overlap, refuse_root
from .files.space import require_space
from .hub.fetch import Download, memory_needed, scratch_bytes
from .hub.publish import AT_ONCE, Publisher
from .hub.source import Source, find_source
from .machine import available_cpus, find_device
from .options import Run
from .plan import summary
from .plan.gptq import rounded_bytes
from .plan.plan import Plan
from .streaming.memory import MemoryStep, memory_left

T = TypeVar("T")

# More do not make a disk faster, and each takes memory.
MOST_WORKERS, MOST_GPU_WORKERS = 16, 4


@dataclass(frozen=True)
class Opened:
    """A source that was opened for a run; of a repository only config, index and headers are fetched.

    Attributes:
        source: where the checkpoint comes from.
        checkpoint: its config, files and headers.
        stamps: size, times and inode of each shard, of a local one, before the plan is made.
        device: where codes will be computed: "cpu" or such as "cuda:1".
    """

    source: Source
    checkpoint: Checkpoint
    stamps: Mapping[str, Stamp]
    device: str


@dataclass(frozen=True)
class Prepared:
    """What a run needs to begin writing.

    Attributes:
        run: what was asked for.
        source: where the checkpoint comes from.
        checkpoint: its config, files and headers.
        stamps: size, times and inode of each shard, of a local one, as the plan was made.
        plan: what is written.
        target: the output directory.
        workers: how many threads, as many as memory allows.
        device: where codes are computed: "cpu" or such as "cuda:1".
        fast: whether compiled loops are worth their memory and the time they take to load.
    """

    run: Run
    source: Source
    checkpoint: Checkpoint
    stamps: Mapping[str, Stamp]
    plan: Plan
    target: Path
    workers: int
    device: str
    fast: bool

    @property
    def seen(self) -> list[object]:
        """What all ranks must have found alike: the plan's digest, size and time of each shard of a local source."""
        return [self.plan.digest, {name: (size, modified) for name, (size, modified, *_) in self.stamps.items()}]


@contextmanager
def connected(ranks: Ranks | None) -> Iterator[Ranks]:
    """Connect the ranks of a run that can be continued; a process on its own if None."""
    ranks = ranks or Ranks()
    ranks.rerun_hint = RERUN_CONTINUES
    with ranks:
        # Connects them, which takes memory that must not come on top of what workers may use.
        ranks.agree(None)
        yield ranks


def in_all_ranks(ranks: Ranks, do: Callable[[], T]) -> T:
    """Take a step in all ranks; none goes on before all have taken it, and if one fails, all end."""
    try:
        result = do()
    except Exception as error:
        ranks.agree(error)
        raise
    ranks.agree(None)
    return result


def prepare_alike(ranks: Ranks, do: Callable[[], Prepared]) -> Prepared:
    """Prepare a run in all ranks.

    Raises:
        SourceError: they see different sources.
    """
    prepared, error = attempt(do)
    seen = ranks.agree(error, prepared and prepared.seen)
    if any(other != seen[0] for other in seen):
        raise SourceError("ranks see different sources", "let all of them read the same files")
    assert prepared is not None
    return prepared


def open_source(run: Run, ranks: Ranks) -> Opened:
    """Open the source of a run; nothing is written, and of a repository only config, index and headers are fetched."""
    device = "cpu" if run.dry_run else find_device(run.device, ranks.local_rank)
    if run.output is not None:
        if not os.fspath(run.output):
            raise UsageError("-o is empty", "give a directory, or leave -o out")
        refuse_root(Path(run.output))
    source, checkpoint = open_model(run.model, run.revision, run.stream)
    checkpoint = _without_own_log(checkpoint, source.absent)
    with without_collector():
        return Opened(source, checkpoint, source.stamps(checkpoint), device)


def open_model(model: str | os.PathLike[str], revision: str | None, stream: bool) -> tuple[Source, Checkpoint]:
    """The source of that name, and its headers; of a repository only config, index and headers are fetched."""
    name = os.fspath(model)
    source = find_source(name, revision)
    if stream and source.repo is None:
        raise UsageError(f"{name} is a local directory, nothing of it can be streamed", "leave --stream out")
    with without_collector():
        return source, open_checkpoint(source.root, source.remote, source.absent)


def output_of(run: Run, source: Source, suffix: str) -> Path:
    """Where the output goes; if nobody says, to "Qwen3-8B-FP8" in the working directory."""
    if run.output is not None:
        return Path(run.output)
    return source.beside(source.name + suffix)


def prepare(
    run: Run, opened: Opened, plan: Plan, ranks: Ranks, before: Sequence[MemoryStep] = (), refuse: bool = True
) -> Prepared:
    """Find how a plan is to be carried out.

    Args:
        run: what was asked for.
        opened: the source.
        plan: of it.
        ranks: this process among several.
        before: what comes before the conversion and takes memory.
        refuse: whether too little memory is an error; what earlier steps took hours for is not thrown away.

    Raises:
        UsageError: the output overlaps with the source, or memory allows no worker, or a step before the conversion.
    """
    source, device = opened.source, opened.device
    target = output_of(run, source, summary.suffix(plan))
    refuse_overlap(source.root, target)
    most = MOST_WORKERS if device == "cpu" else MOST_GPU_WORKERS
    workers = run.workers or min(most, max(1, available_cpus() // ranks.local_size))
    fast = worth_compiling(plan)
    if run.max_memory is not None:
        each = worker_memory(plan, device)
        # With downloads.
        nbytes = memory_needed(source, run.stream) + each
        converting = MemoryStep("converting with a single worker", nbytes, models=bool(before))
        memory_left(run.max_memory, [converting, *before], refuse)
        room = run.max_memory - converting.needed + each
        workers = max(1, min(workers, room // each))
        fast = fast and room >= workers * each + COMPILED_MEMORY
    return Prepared(run, source, opened.checkpoint, opened.stamps, plan, target, workers, device, fast)


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


@contextmanager
def without_collector() -> Iterator[None]:
    """Work without the cycle collector, which would take half the time of a plan: millions of objects, and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def expected_download(source: Source, plan: Plan) -> Download:
    """What a run of this plan has still to fetch, and the disk it takes meanwhile."""
    others = [name for name in plan.files if name in source.absent]
    return Download(
        source.remote_bytes([*plan.source.shards, *others]),
        scratch_bytes(source, source_needs(source, plan)),
        len(others),
        source.remote_bytes(others),
    )


def source_needs(source: Source, plan: Plan, outputs: Sequence[str] | None = None) -> dict[str, list[str]]:
    """For each of these output shards (all if None) the source shards it is made from; of a local source, nothing.

    Such as {"b.safetensors": ["a.safetensors", "b.safetensors"]}, where b has layers that are joined with some of a.
    """
    if not source.remote:
        return {}
    if outputs is None:
        outputs = [shard.name for shard in plan.layout.shards]
    return {output: sorted(plan.layout.sources(output)) for output in outputs}


def claim_of(
    prepared: Prepared, made: Mapping[str, bytes], publisher: Publisher | None, ranks: Ranks, rounded: int
) -> Claim:
    """The claim of a run on its output directory.

    Args:
        prepared: what is to be written.
        made: the files that are written rather than copied, by name.
        publisher: publishes the output; None if nobody does.
        ranks: this process among several.
        rounded: bytes of rounded layers that wait on the same disk for a while.
    """
    plan, source, run = prepared.plan, prepared.source, prepared.run
    contents = OutputContents(
        plan.digest,
        {shard.name: shard.nbytes for shard in plan.layout.shards},
        {**plan.files, **{name: len(data) for name, data in made.items()}},
        plan.provenance,
        at_once=AT_ONCE if run.push and run.push.only else None,
        scratch=(scratch_bytes(source, source_needs(source, plan)) * ranks.size if run.stream else 0) + rounded,
    )
    return Claim(
        prepared.target,
        contents,
        run.overwrite,
        elsewhere=publisher.elsewhere if publisher else frozenset,
        sources=lambda: {**prepared.stamps, **source.digests(prepared.checkpoint)},
    )


def require_output(prepared: Prepared, ranks: Ranks, passing: int) -> None:
    """Refuse an output that could not be written once passes over texts are through, before they begin.

    Args:
        prepared: the run, with a plan whose scales and rounded layers are still to come.
        ranks: this process among several.
        passing: bytes of hidden states that a pass writes beside the output: its scratch file and those it keeps.

    Raises:
        OutputError: the directory is not a run's or cannot be written to, or a disk has no room.
    """
    plan, target, source = prepared.plan, prepared.target, prepared.source
    # The card and config.json of this plan are not final; they are small.
    rounded = rounded_bytes(plan.gptq_rounded) if plan.options.gptq is not None else 0
    missing = claim_of(prepared, {}, None, ranks, rounded).missing_bytes()
    if not missing:
        return
    # Of a calibration there are three figures of each input of each layer.
    calibration = sum(12 * weight.shape[1] for weight in plan.layers.values())
    needs = [(target, missing), (target.absolute().parent, calibration)]
    if source.remote and not prepared.run.stream:
        needs.append((source.root, source.remote_bytes([*plan.source.shards, *plan.files])))
    require_space(needs)
    # What a pass writes is gone before the output is written.
    require_space([(target.absolute().parent, passing + calibration), *needs[2:]])
