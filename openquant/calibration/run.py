"""calibrate(): texts run through a model, and how large the activations of its layers are written to a file.

Several processes share the texts; the first puts together what all have seen, and writes it.

transformers is imported by the modules that run models, and these when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed import Ranks
from ..errors import SourceError, UsageError
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.destination import Destination, ProtectedPaths
from ..files.fingerprint import Fingerprint
from ..hub.shards import supply_shards
from ..hub.source import Source, find_source, model_folder
from ..job import in_all_ranks
from ..machine import find_device
from ..options import Calibrate, CalibrationTexts, documented, files_read
from ..reporter import Reporter
from ..streaming.memory import calibration_steps, memory_left
from ..streaming.session import BUDGET, ArrivingShards, find_tokenizer, hidden_bytes, scratch_for, vocabulary_of
from ..version import __version__
from ..weights.statistics import SUFFIX, Calibration, calibrations, read_calibration

if TYPE_CHECKING:
    from ..data.corpus import Corpus


@documented(Calibrate, CalibrationTexts)
def calibrate(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    stream: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    max_memory: int | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    samples: int = 128,
    length: int = 512,
    begun: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    remaining: Callable[[float], None] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Find how large the activations are that go into each layer of a model, for `compress(calibration=...)`.

    Args:
        begun: told in a line what is to be done, before it starts.
        progress: told how many tokens are through all layers, and how many there are.
        remaining: told about how many seconds are left, once the first layer is computed and as it goes on.
        ranks: this process among several, as `Ranks.from_environment(os.environ)` finds it; each runs its share of the
            texts.

    Returns:
        The file.

    Raises:
        OpenQuantError: something the caller can fix.
    """
    asked = Calibrate.parse(
        model=model,
        out=out,
        revision=revision,
        stream=stream,
        overwrite=overwrite,
        device=device,
        max_memory=max_memory,
        scratch=scratch,
    )
    texts = CalibrationTexts.parse(text=text, dataset=dataset, samples=samples, length=length)
    ranks = ranks or Ranks()
    with ranks:
        ranks.agree(None)
        return in_all_ranks(ranks, lambda: _calibrated(asked, texts, ranks, begun, progress, remaining))


def _calibrated(
    asked: Calibrate,
    texts: CalibrationTexts,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
    remaining: Callable[[float], None] | None,
) -> Path:
    """The file that the first rank has written."""
    asked = replace(asked, device=find_device(asked.device, ranks.local_rank))
    source = find_source(os.fspath(asked.model), asked.revision)
    if asked.stream and source.repo is None:
        raise UsageError(f"{asked.model} is a local directory, nothing of it can be streamed", "leave --stream out")
    checkpoint = open_checkpoint(source.root, source.remote, source.absent)
    path = Path(asked.out) if asked.out is not None else source.beside(f"{source.name}{SUFFIX}")
    option = "-o" if asked.out is not None else ""
    target = calibration_destination(path, option, "name another file with -o", source, checkpoint, asked, texts)
    target.require()
    memory_left(asked.max_memory, calibration_steps(checkpoint, texts.length))
    corpus = agreed_texts(source, checkpoint, texts, ranks)
    _run(source, checkpoint, corpus, target, asked, ranks, begun, progress, remaining)
    return path


def calibration_destination(
    path: Path,
    option: str,
    elsewhere: str,
    source: Source,
    checkpoint: Checkpoint,
    asked: Calibrate,
    texts: CalibrationTexts,
    outputs: Sequence[Path] = (),
) -> Destination:
    """The file of a calibration.

    Args:
        path: where it lies.
        option: what names it on the command line, if something does.
        elsewhere: how to name another.
        source: where the model comes from.
        checkpoint: its config, files and headers.
        asked: how it is calibrated.
        texts: what is read.
        outputs: what the run writes besides.
    """
    fingerprint = Fingerprint(checkpoint, source.remote, source.identity)
    kind = calibrations(None if asked.overwrite else fingerprint.matches)
    protected = ProtectedPaths((model_folder(asked.model),), files_read(vars(texts)), outputs)
    return Destination(path, option, kind, protected, elsewhere=elsewhere)


def find_calibration(
    source: Source,
    checkpoint: Checkpoint,
    target: Destination,
    asked: Calibrate,
    texts: CalibrationTexts,
    ranks: Ranks,
    reporter: Reporter,
) -> Calibration:
    """What texts show of a model, for a run of compress(); as a file says it that an earlier run left, or found now.

    Args:
        source: where the model comes from.
        checkpoint: its config, files and headers.
        target: the file.
        asked: how it is to be done, and whether a file of other texts or of another model is replaced.
        texts: what is read.
        ranks: this process among several, all of which get to know it.
        reporter: is told of it.

    Raises:
        UsageError: there is such a file.
        SourceError: the model or a text cannot be read.
        OutputError: the file cannot be written, or hidden states found no room.
    """
    path = target.path
    replace(target, kind=calibrations()).require()
    corpus, known = agreed_texts(source, checkpoint, texts, ranks), None
    if path.exists() and path.stat().st_size and not asked.overwrite:
        known = read_calibration(path)
        fingerprint = Fingerprint(checkpoint, source.remote, source.identity)
        if known.texts.get("sha256") != corpus.sha256 or not fingerprint.matches(known.model, known.stamp):
            raise UsageError(
                f"{path} is a calibration of another model or with other texts",
                f"give --calibration {path} to use it, or --overwrite to replace it",
            )
    # Before one of them writes it.
    ranks.agree(None)
    if known is not None:
        return known
    _run(
        source,
        checkpoint,
        corpus,
        target,
        asked,
        ranks,
        lambda about: reporter.calibrating(f"{about}; kept in {path}"),
        reporter.calibrated,
        reporter.remaining,
    )
    ranks.agree(None)
    return read_calibration(path)


def agreed_texts(source: Source, checkpoint: Checkpoint, texts: CalibrationTexts, ranks: Ranks) -> Corpus:
    """The texts, which are the same in all ranks."""
    from ..data.corpus import read_corpus

    tokenizer = find_tokenizer(source, checkpoint)
    corpus = read_corpus(texts, tokenizer, "calibration", vocabulary_of(checkpoint))
    _require_same(ranks.agree(None, [corpus.sha256, dict(checkpoint.shards)]))
    return corpus


def _require_same(seen: Sequence[object]) -> None:
    """Refuse ranks of which one says something else than the first."""
    if any(other != seen[0] for other in seen):
        raise SourceError("ranks see different texts or checkpoints", "let all of them read the same files")


def _run(
    source: Source,
    checkpoint: Checkpoint,
    corpus: Corpus,
    target: Destination,
    asked: Calibrate,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
    remaining: Callable[[float], None] | None,
) -> None:
    """Run texts through a model; the first rank writes what all have seen."""
    # Only now is torch imported.
    from ..streaming.model import StreamedModel, shards_by_unit
    from ..streaming.offload import refuse_memory
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .observers import observe_inputs

    fingerprint = Fingerprint(checkpoint, source.remote, source.identity)
    path = target.path
    part = path.with_name(f"{path.name}.part{f'-{ranks.rank}' if ranks.size > 1 else ''}")
    versions = f"openquant {__version__}, transformers {version('transformers')}"
    same = {"texts": corpus.sha256, "number of ranks": str(ranks.size), "versions of libraries": versions}
    kept = PassCheckpoint(part, lambda: {"weights": fingerprint.stamp, **same})
    if begun is not None:
        continued = () if kept.found is None else ("an earlier run is continued",)
        begun("; ".join((corpus.described, *corpus.notes, *continued)))

    def advanced(done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(done, total)

    streamed = StreamedModel(checkpoint, device=asked.device)
    place = Path(asked.scratch) if asked.scratch is not None else path.absolute().parent
    if asked.scratch is None and asked.stream and source.remote:
        refuse_memory(place, "shards")
    hidden = hidden_bytes(checkpoint, -(-len(corpus.documents) // ranks.size) * corpus.length)
    with ExitStack() as stack:
        left = memory_left(asked.max_memory, calibration_steps(checkpoint, corpus.length))
        room = scratch_for(hidden, place, BUDGET if left is None else left, asked.scratch is not None)
        held = stack.enter_context(room) if room else None
        more = hidden if room else 0
        shards = shards_by_unit(streamed)
        supplies = supply_shards([(source, shards)], asked.stream, place, more, ranks.local_size)
        [supply] = stack.enter_context(supplies)
        streamed.traffic = ArrivingShards(supply, shards, source.name, fingerprint, ranks)
        team = ranks if ranks.size > 1 else None
        inputs, cached = observe_inputs(
            streamed, corpus, scratch=held, team=team, progress=advanced, remaining=remaining, kept=kept
        )
    model = fingerprint.hexdigest()
    fingerprint.require_unchanged()
    _require_same(ranks.agree(None, model))
    if ranks.first:
        target.write(Calibration(inputs, model, corpus.account, cached, fingerprint.stamp).to_bytes())
    # Only then may the others lose what they have.
    ranks.agree(None)
    kept.remove()
