"""What a run reads, writes and needs: known before anything is written, and asked for by each step of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .distributed import Ranks
from .files.checkpoint import Checkpoint
from .files.fingerprint import Stamp
from .files.output import OutputDirectory
from .files.space import require_space
from .hub.fetch import Download, scratch_bytes
from .hub.publish import AT_ONCE, Publisher
from .hub.source import Source
from .options import Run
from .plan.gptq import rounded_bytes
from .plan.plan import Plan
from .reporter import Reporter


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
        outputs = [shard.name for shard in plan.shards]
    return {output: sorted(plan.sources(output)) for output in outputs}


class Rounding(Protocol):
    """Rounds layers of a run before the conversion, which then copies them."""

    def missing(self, prepared: Prepared) -> int:
        """Bytes of disk that it will take."""

    def run(self, prepared: Prepared, ranks: Ranks, reporter: Reporter) -> Plan:
        """The plan with the layers rounded; in all ranks, which call it together."""

    def remove(self, prepared: Prepared) -> None:
        """Remove what it has made."""


def output_directory(
    prepared: Prepared, made: Mapping[str, bytes], publisher: Publisher | None, ranks: Ranks, rounded: int
) -> OutputDirectory:
    """The directory of a run, in which so many bytes of rounded layers wait for a while."""
    plan, source, run = prepared.plan, prepared.source, prepared.run
    return OutputDirectory(
        prepared.target,
        plan.digest,
        {shard.name: shard.nbytes for shard in plan.shards},
        {**plan.files, **{name: len(data) for name, data in made.items()}},
        run.overwrite,
        elsewhere=publisher.elsewhere if publisher else frozenset,
        at_once=AT_ONCE if run.push and run.push.only else None,
        scratch=(scratch_bytes(source, source_needs(source, plan)) * ranks.size if run.stream else 0) + rounded,
        sources=lambda: {**prepared.stamps, **source.digests(prepared.checkpoint)},
        recipe=plan.recipe,
        entry=plan.unlisted,
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
    rounded = rounded_bytes(plan.gptq_rounded) if plan.gptq is not None else 0
    missing = output_directory(prepared, {}, None, ranks, rounded).missing_bytes()
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
