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

from .convert.ranks import Ranks, attempt
from .errors import SourceError, UsageError
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.fingerprint import Fingerprint
from .files.whole import require_place, write_whole
from .hub.source import Source, find_source
from .hub.supplied import supplied
from .machine import find_device
from .options import Calibrate, CalibrationTexts, values_for
from .passes import Arriving, find_tokenizer, hidden_bytes, scratch_for, share_of, vocabulary_of
from .report.reporter import Reporter
from .version import __version__
from .weights.calibration import SUFFIX, Calibration, read_calibration

if TYPE_CHECKING:
    from .texts.corpus import Corpus


def calibrate(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    stream: bool = False,
    device: str = "cpu",
    max_memory: int | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    samples: int = 128,
    length: int = 512,
    begun: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Find how large the activations are that go into each layer of a model, for `compress(calibration=...)`.

    Args:
        model: a local directory, or a Hub repository `org/name` or `org/name@revision`.
        out: the file to write; if None `NAME.calibration.safetensors` in the working directory.
        revision: branch, tag or commit of a Hub repository.
        stream: keep only a few shards of a Hub repository on disk, and none in the Hub's cache.
        device: where it is computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one).
        max_memory: bytes that this process may hold in memory; what texts are in beyond that goes to a scratch file.
        scratch: the directory for that file and for streamed shards; that of `out` if None.
        text: files, each a domain: .jsonl with `text` or `messages` in each line, all others text in UTF-8. Without
            any and without a dataset, the source and documentation of Python's own standard library. Evaluations never
            read the parts of them that this reads.
        dataset: a dataset with a column `text` or `messages`, `NAME[:SUBSET[:SPLIT]]`.
        samples: pieces of text in all.
        length: tokens of each.
        begun: told in a line what is to be done, before it starts.
        progress: told how much is done, and how much there is to do.
        ranks: this process among several, as `Ranks.from_environment(os.environ)` finds it; each runs its share of the
            texts.

    Returns:
        The file.

    Raises:
        OpenQuantError: something the caller can fix.
    """
    given = locals()
    asked, texts = Calibrate(**values_for(Calibrate, given)), CalibrationTexts(**values_for(CalibrationTexts, given))
    ranks = ranks or Ranks()
    with ranks:
        ranks.agree(None)
        written, error = attempt(lambda: _calibrated(asked, texts, ranks, begun, progress))
        ranks.agree(error)
        assert written is not None
        return written


def _calibrated(
    asked: Calibrate,
    texts: CalibrationTexts,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> Path:
    """The file that the first rank has written."""
    asked = replace(asked, device=find_device(asked.device, ranks.local_rank))
    source = find_source(os.fspath(asked.model), asked.revision)
    if asked.stream and source.repo is None:
        raise UsageError(f"{asked.model} is a local directory, nothing of it can be streamed", "leave --stream out")
    checkpoint = open_checkpoint(source.root, source.remote, source.absent)
    target = Path(asked.out) if asked.out is not None else Path(f"{source.name}{SUFFIX}")
    require_place(target, str(target), "name another file with -o")
    corpus = agreed_texts(source, checkpoint, texts, ranks)
    _run(source, checkpoint, corpus, target, asked, ranks, begun, progress)
    return target


def calibrated(
    source: Source,
    checkpoint: Checkpoint,
    target: Path,
    asked: Calibrate,
    texts: CalibrationTexts,
    overwrite: bool,
    ranks: Ranks,
    reporter: Reporter,
) -> Calibration:
    """What texts show of a model, for a run of compress(); as a file says it that an earlier run left, or found now.

    Args:
        source: where the model comes from.
        checkpoint: its config, files and headers.
        target: the file.
        asked: how it is to be done; not what is calibrated and where to.
        texts: what is read.
        overwrite: whether a file of other texts or of another model is replaced.
        ranks: this process among several, all of which get to know it.
        reporter: is told of it.

    Raises:
        UsageError: there is such a file.
        SourceError: the model or a text cannot be read.
        OutputError: the file cannot be written, or hidden states found no room.
    """
    require_place(target, str(target), "name another output with -o")
    corpus, known = agreed_texts(source, checkpoint, texts, ranks), None
    if target.exists() and not overwrite:
        known = read_calibration(target)
        if (known.model, known.texts.get("sha256")) != (
            Fingerprint(checkpoint, source.remote).hexdigest(),
            corpus.sha256,
        ):
            raise UsageError(
                f"{target} is a calibration of another model or with other texts",
                f"give --calibration {target} to use it, or --overwrite to replace it",
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
        lambda about: reporter.calibrating(f"{about}; kept in {target}"),
        reporter.calibrated,
    )
    ranks.agree(None)
    return read_calibration(target)


def agreed_texts(source: Source, checkpoint: Checkpoint, texts: CalibrationTexts, ranks: Ranks) -> Corpus:
    """The texts, which are the same in all ranks."""
    from .texts.corpus import read

    tokenizer = find_tokenizer(source, checkpoint)
    corpus = read(texts, tokenizer, "calibration", vocabulary_of(checkpoint))
    seen = ranks.agree(None, [corpus.sha256, dict(checkpoint.shards)])
    if any(other != seen[0] for other in seen):
        raise SourceError("ranks see different texts or checkpoints", "let all of them read the same files")
    return corpus


def _run(
    source: Source,
    checkpoint: Checkpoint,
    corpus: Corpus,
    target: Path,
    asked: Calibrate,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Run texts through a model; the first rank writes what all have seen."""
    # Only now is torch imported.
    from .forward.kept import Kept
    from .forward.scratch import refuse_memory
    from .forward.streamed import StreamedModel
    from .measure.calibrate import calibrate as measure
    from .measure.subjects import needs

    fingerprint = Fingerprint(checkpoint, source.remote)
    part = target.with_name(f"{target.name}.part{f'-{ranks.rank}' if ranks.size > 1 else ''}")
    versions = f"openquant {__version__}, transformers {version('transformers')}"
    same = {"texts": corpus.sha256, "number of ranks": str(ranks.size), "versions of libraries": versions}
    kept = Kept(part, lambda: {"weights": fingerprint.hexdigest(), **same})
    if begun is not None:
        continued = () if kept.found is None else ("an earlier run is continued",)
        begun("; ".join((corpus.described, *corpus.notes, *continued)))

    def advanced(done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(done, total)

    streamed = StreamedModel(checkpoint, device=asked.device)
    place = Path(asked.scratch) if asked.scratch is not None else target.absolute().parent
    if asked.scratch is None and asked.stream and source.remote:
        refuse_memory(place, "shards")
    hidden = hidden_bytes(checkpoint, -(-len(corpus.documents) // ranks.size) * corpus.length)
    with ExitStack() as stack:
        # As much again for the weights of a layer and for logits, of which nothing is known yet.
        room = scratch_for(hidden, place, share_of(asked.max_memory, 2), asked.scratch is not None)
        held = stack.enter_context(room) if room else None
        more = hidden if room else 0
        supplies = supplied([(source, needs(streamed))], asked.stream, place, more, ranks.local_size)
        [supply] = stack.enter_context(supplies)
        streamed.traffic = Arriving(supply, source.name, fingerprint, ranks)
        team = ranks if ranks.size > 1 else None
        inputs, cached = measure(streamed, corpus, scratch=held, team=team, progress=advanced, kept=kept)
    if ranks.first:
        write_whole(target, Calibration(inputs, fingerprint.hexdigest(), corpus.account, cached).to_bytes())
    # Only then may the others lose what they have.
    ranks.agree(None)
    kept.remove()
