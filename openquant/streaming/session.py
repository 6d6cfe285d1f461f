"""What a run of a streamed model needs: its tokenizer, a file for hidden states, and its shards as they are downloaded.

transformers is imported inside functions only.

    with streamed_run([(source, fingerprint)], hidden, place, ranks, hashes=False, models=[model]) as scratch:
        run_interleaved(passes, finished=show, scratch=scratch)

Models ask a ShardProvider for the shards of a unit, and say when they are done with them:

    provider.wait_for("model.layers.3", stopped)
    provider.path("model-00002-of-00005.safetensors")
    provider.release("model.layers.3")
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from ..convert.conversion import ShardProvider
from ..distributed import Ranks, attempt
from ..errors import SourceError
from ..files.checkpoint import Checkpoint, Fingerprint
from ..hub.source import ShardSupply, Source, supply_shards
from ..threads import in_threads

if TYPE_CHECKING:
    from ..data.tokenizer import Tokenizer
    from .model import StreamedModel
    from .offload import OffloadFile


T = TypeVar("T")

# Bytes of memory for hidden states of waiting passes, and for Hessians, without --max-memory.
BUDGET = 4 << 30
# What messages call the inputs that all ranks must read alike.
TEXTS_OR_CHECKPOINTS = "texts or checkpoints"


def find_tokenizer(source: Source, checkpoint: Checkpoint, like: Tokenizer | None = None) -> Tokenizer:
    """Load a checkpoint's tokenizer, and download its files first if the source is on the Hub.

    Args:
        source: where the checkpoint comes from.
        checkpoint: the checkpoint.
        like: a tokenizer that is already loaded, and is used again if its files are the same.

    Raises:
        SourceError: there is none, it cannot be downloaded, it is damaged, or it fails or exceeds its limits.
    """
    from ..data.tokenizer import FILES, TEMPLATES, load_tokenizer

    file_names = {*FILES, *TEMPLATES, "generation_config.json"}
    source.fetch_files([name for name in checkpoint.files if name in file_names])
    return load_tokenizer(source.root, source.repo or source.name, like)


def checked_progress(ranks: Ranks, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return a function that reports progress, and raises what has ended another rank."""

    def report(done: int, total: int) -> None:
        ranks.check()
        progress(done, total)

    return report


def part_path(path: Path, ranks: Ranks) -> Path:
    """Return the path that passes are saved to until a file is complete; each rank has its own."""
    rank = f"-{ranks.rank}" if ranks.size > 1 else ""
    return path.with_name(f"{path.name}.part{rank}")


@dataclass
class ArrivingShards:
    """Provides a model's shards as they are downloaded, unit by unit; a ShardProvider.

    Shards of units that are never called, such as those of vision towers, are skipped.

    Attributes:
        supply: downloads them.
        needs: file names of the shards of each unit, in the order units are called.
        name: the model's name, for messages.
        fingerprint: refuses shards that changed since the run began.
        ranks: this process's rank among several; each rank downloads for itself.
        hashes: whether each shard's hash is added to the fingerprint once it is on disk.
    """

    supply: ShardSupply
    needs: Mapping[str, Sequence[str]]
    name: str
    fingerprint: Fingerprint
    ranks: Ranks
    hashes: bool = True

    def __post_init__(self) -> None:
        self.path = self.supply.path
        # Units that are not released, in the order of `supply.needs`.
        self._remaining = dict.fromkeys(self.supply.needs)

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until a unit's shards are on disk, or `stopped()`. Units before it were skipped, and are released.

        Raises:
            SourceError: they cannot be downloaded, were deleted already, or changed since the run began.
            OutputError: they cannot be written, or another rank has failed.
        """
        if what in self._remaining:
            # Skipped units are released last first, so that releasing one does not start the download of another.
            for unit in reversed(list(itertools.takewhile(lambda unit: unit != what, self._remaining))):
                self.release(unit)
        elif self.supply.scratch is not None and what in self.supply.needs:
            raise SourceError(
                f"{self.name} computes {what} twice or out of order, and its shards were deleted", "leave --stream out"
            )

        self.supply.wait_for(what, lambda: stopped() or attempt(self.ranks.check)[1] is not None)

        self.ranks.check()
        shards = self.needs.get(what, ())
        self.fingerprint.require_unchanged(shards)
        if self.hashes:
            for shard in shards:
                self.fingerprint.add(shard, self.path(shard))

    def release(self, what: str) -> None:
        """Release the shards of a unit, so that they may be deleted."""
        if what in self._remaining:
            del self._remaining[what]
            self.supply.release(what)


@dataclass(frozen=True)
class Scratch:
    """Where a run keeps hidden states and shards that it streams.

    Attributes:
        directory: the directory of both.
        budget: bytes of hidden states that may stay in memory.
        stream: whether downloaded shards are kept in the directory until their last use, not in the Hub's cache.
        processes: the number of processes that use the directory, each as much of it.
    """

    directory: Path
    budget: int
    stream: bool
    processes: int = 1


@contextmanager
def streamed_run(
    origins: Sequence[tuple[Source, Fingerprint]],
    hidden: int,
    place: Scratch,
    ranks: Ranks,
    hashes: bool,
    models: Sequence[StreamedModel],
) -> Iterator[OffloadFile | None]:
    """Give models their shards as they arrive, and hidden states that may not fit into memory a file.

    Args:
        origins: where each model comes from, and the fingerprint of its checkpoint: shards that have changed since are
            refused, once more at the end.
        hidden: bytes of all hidden states.
        place: where hidden states and streamed shards are kept.
        ranks: the processes of the run; what ends another one ends the wait for a shard.
        hashes: whether each shard's hash is added to the fingerprint once it is on disk.
        models: the models, whose shard providers are replaced.

    Yields:
        The file; None if all hidden states fit into the budget.

    Raises:
        OutputError: no file can be made in the directory.
        UsageError: its disk has too little space for streamed shards.
        SourceError: the disk of the Hub's cache has too little space, or a shard has changed.
    """
    from .offload import OffloadFile

    scratch = None
    offloaded = 0
    if hidden > place.budget:
        scratch = OffloadFile(place.directory, place.budget)
        offloaded = hidden
    needs = [(source, model.shards_by_unit()) for (source, _), model in zip(origins, models, strict=True)]
    with (
        scratch or nullcontext(),
        supply_shards(needs, place.stream, place.directory, offloaded, place.processes) as supplies,
    ):
        for model, supply, (source, shards), (_, fingerprint) in zip(models, supplies, needs, origins, strict=True):
            name = source.repo or source.name
            model.shard_provider = ArrivingShards(supply, shards, name, fingerprint, ranks, hashes=hashes)
        yield scratch

    for _, fingerprint in origins:
        fingerprint.require_unchanged()


def documents_of_rank(documents: int, ranks: Ranks) -> range:
    """Return the numbers of this rank's documents, every `size`-th of them.

    Args:
        documents: the number of documents.
        ranks: the processes that share them.
    """
    return range(ranks.rank, documents, ranks.size)


@dataclass(frozen=True)
class LocalShards:
    """Shards that are all in one directory, and stay there.

    Attributes:
        root: the directory.
    """

    root: Path

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Return at once, since all shards are on disk; `what` and `stopped` are ignored."""

    def path(self, name: str) -> Path:
        """Return the path of a shard, by its file name; whether it exists is not checked."""
        return self.root / name

    def release(self, what: str) -> None:
        """Do nothing, since the shards stay."""


class Stopped(Exception):
    """Raised in a thread to end its work, after another failed or the user interrupted."""


def work_as_shards_arrive(
    tasks: Sequence[tuple[str, T]],
    provider: ShardProvider,
    begin: Callable[[], Callable[[T], None]],
    workers: int,
    stopped: threading.Event,
    ranks: Ranks | None = None,
) -> None:
    """Work on tasks in threads, each once its shards are on disk.

    Args:
        tasks: what each task needs, as the provider calls it, and the task. Shards of one name are released after the
            last task that needs them.
        provider: provides the shards.
        begin: called in each thread; returns the function that does a task in it, which may raise Stopped.
        workers: number of threads.
        stopped: is set when the work is over, also if an interrupt or an error ends it.
        ranks: what ends another rank ends the wait for a shard; None for a single process.

    Raises:
        SourceError: a shard cannot be downloaded.
        OutputError: it cannot be written, or another rank has failed.
        BaseException: what a task raised.
    """
    check = Ranks().check if ranks is None else ranks.check
    waiting = iter(tasks)
    remaining = Counter(what for what, _ in tasks)
    # A second lock, since a thread may wait long for its next task.
    taking = threading.Lock()
    counting = threading.Lock()

    def work() -> None:
        do = begin()
        while not stopped.is_set():
            with taking:
                what, task = next(waiting, (None, None))
                if what is None:
                    return
                provider.wait_for(what, lambda: stopped.is_set() or attempt(check)[1] is not None)
                check()
            if stopped.is_set():
                return

            try:
                do(cast(T, task))
            except Stopped:
                return

            with counting:
                remaining[what] -= 1
                is_last = not remaining[what]
            if is_last:
                provider.release(what)

    in_threads(work, min(workers, len(tasks)), stopped)
