"""evaluate(): outputs held against their source, from opening them to writing what was found beside them.

Several processes share the texts; the first puts together what all have found, and writes it.

transformers is imported by the modules that run models, and these when they are needed.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .convert.ranks import Ranks, attempt
from .errors import SourceError, UsageError
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.fingerprint import Fingerprint
from .files.names import EVAL_FILE, JOURNAL_FILE
from .files.whole import require_place, write_whole
from .hub.fetch import Supply
from .hub.source import Source, find_source
from .hub.supplied import Needs, supplied
from .machine import find_device, peak_rss
from .options import Evaluate, Texts, values_for

if TYPE_CHECKING:
    from .forward.scratch import Scratch
    from .forward.traffic import Traffic
    from .measure.results import Evaluation
    from .measure.subjects import Subject
    from .texts.tokenizer import Tokenizer

# Bytes of hidden states that wait in memory, if nobody says how much of it there is.
BUDGET = 4 << 30


def evaluate(
    outputs: Sequence[str | os.PathLike[str]],
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    stream: bool = False,
    prompts: str | os.PathLike[str] | None = None,
    kv_cache: str = "auto",
    device: str = "cpu",
    max_memory: int | None = None,
    scratch: str | os.PathLike[str] | None = None,
    seed: int = 0,
    fail_above: float | None = None,
    text: Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    samples: int = 16,
    length: int = 512,
    begun: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Hold outputs against their source: what they answer to texts, where it comes from, and a verdict in a word.

    Args:
        outputs: directories or Hub repositories, made from one source.
        source: the checkpoint they were made from, a directory or a Hub repository.
        out: a file for the figures, of several outputs for those of all; if None they go to eval.json of each output
            that openquant made, of directories alone.
        stream: keep only a few shards of Hub repositories on disk, and none in the Hub's cache; models then answer
            along a text instead of prompts.
        prompts: a file of prompts that source and outputs answer side by side; built-in ones if None.
        kv_cache: "fp8" to round keys and values to FP8, or "auto" to do so where an output's config says it.
        device: where it is computed: "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one).
        max_memory: bytes that this process may hold in memory; what texts are in beyond that goes to a scratch file.
        scratch: the directory for that file and for streamed shards; if None the parent of the first output that is a
            directory, or else the working directory.
        seed: of the floor's noise and of intervals.
        fail_above: the largest mean KL of an output that is no failure, for the command's exit code.
        text: files, each a domain: .jsonl with `text` or `messages` in each line, all others text in UTF-8. Without
            any and without a dataset, the source and documentation of Python's own standard library.
        dataset: a dataset with a column `text` or `messages`, `NAME[:SUBSET[:SPLIT]]`.
        samples: pieces of text in all.
        length: tokens of each.
        begun: told in a line what is to be done and how long it may take, before it starts.
        progress: told how much is done, and how much there is to do.
        ranks: this process among several, as `Ranks.from_environment(os.environ)` finds it; each runs its share of the
            texts.

    Returns:
        The figures, in every process; docs/evaluation.md says what they mean.

    Raises:
        OpenQuantError: something the caller can fix.
    """
    given = locals()
    asked, texts = Evaluate(**values_for(Evaluate, given)), Texts(**values_for(Texts, given))
    ranks = ranks or Ranks()
    with ranks:
        ranks.agree(None)
        found, error = attempt(lambda: _evaluated(asked, texts, ranks, begun, progress))
        ranks.agree(error)
        assert found is not None
        return found


def _evaluated(
    asked: Evaluate,
    texts: Texts,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> Evaluation:
    """What all ranks have found; the first has written it."""
    chosen = find_device(asked.device, ranks.local_rank)
    sources = [find_source(os.fspath(name)) for name in (asked.source, *asked.outputs)]
    if asked.stream and all(each.repo is None for each in sources):
        raise UsageError("all models are local directories, nothing of them can be streamed", "leave --stream out")
    checkpoints = [open_checkpoint(each.root, each.remote, each.absent) for each in sources]
    targets = _targets(asked, sources[1:]) if ranks.first else None
    # Only now is transformers imported.
    from .measure.evaluate import evaluate as measure
    from .measure.subjects import Settings, Subject
    from .texts.corpus import read

    def advanced(done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(done, total)

    with ExitStack() as stack:
        tokenizers = [_tokenizer(each, checkpoint) for each, checkpoint in zip(sources, checkpoints, strict=True)]
        tokenizer = tokenizers[0]
        corpus = read(texts, tokenizer, vocabulary=_vocabulary(checkpoints[0]))
        seen = ranks.agree(None, [corpus.sha256, [dict(checkpoint.shards) for checkpoint in checkpoints]])
        if any(other != seen[0] for other in seen):
            raise SourceError("ranks see different texts or checkpoints", "let all of them read the same files")
        subjects = [
            Subject(
                each.repo or each.name, checkpoint, tokenizer.differences(own), Fingerprint(checkpoint, each.remote)
            )
            for each, checkpoint, own in zip(sources, checkpoints, tokenizers, strict=True)
        ]
        place = _place(asked, sources)
        hidden = _hidden(checkpoints, -(-len(corpus.documents) // ranks.size) * corpus.length)
        room = _scratch(asked, place, hidden)

        @contextmanager
        def supply(needs: Sequence[Needs]) -> Iterator[list[Traffic]]:
            pairs = list(zip(sources, needs, strict=True))
            more = hidden if room else 0
            with supplied(pairs, asked.stream, place, more, ranks.local_size) as supplies:
                yield [_Arriving(*each, ranks) for each in zip(supplies, subjects, strict=True)]

        settings = Settings(
            asked.seed,
            asked.kv_cache,
            chosen,
            stack.enter_context(room) if room else None,
            tokenizer,
            asked.prompts,
            supply,
            again=not asked.stream,
            team=ranks if ranks.size > 1 else None,
        )
        found = measure(subjects[0], subjects[1:], corpus, settings, begun, advanced)
    for target, value in targets(found) if targets is not None else ():
        write_json(target, value)
    return found


class _Arriving:
    """How the shards of a model come, unit by unit; those of units that no text goes through are passed over.

    Args:
        supply: brings them.
        subject: the model; what counts for its fingerprint is read of each that is here.
        ranks: this process among several, of which each streams for itself.
    """

    def __init__(self, supply: Supply, subject: Subject, ranks: Ranks) -> None:
        self.supply, self.subject, self.ranks = supply, subject, ranks
        self.path = supply.path
        self._left = dict.fromkeys(supply.needs)

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until a unit's shards are here.

        Raises:
            SourceError: they cannot be had, or are gone already.
        """
        if what in self._left:
            # The last first: while an earlier one is given up, none of these begins to come in its place.
            for unit in reversed(list(itertools.takewhile(lambda unit: unit != what, self._left))):
                self.finished(unit)
        elif self.supply.scratch is not None and what in self.supply.needs:
            raise SourceError(
                f"{self.subject.name} computes {what} again, or later than expected: its shards are gone",
                "leave --stream out",
            )
        self.supply.wait_for(what, lambda: stopped() or attempt(self.ranks.check)[1] is not None)
        self.ranks.check()
        for shard in self.supply.needs.get(what, ()):
            if self.subject.fingerprint is not None:
                self.subject.fingerprint.look(shard, self.path(shard))

    def finished(self, what: str) -> None:
        """Nothing more is read for this unit."""
        if what in self._left:
            del self._left[what]
            self.supply.finished(what)


def _tokenizer(source: Source, checkpoint: Checkpoint) -> Tokenizer:
    """A checkpoint's tokenizer.

    Raises:
        SourceError: there is none, or it is damaged.
    """
    from .texts.tokenizer import FILES, TEMPLATES, load

    wanted = {*FILES, *TEMPLATES, "generation_config.json"}
    source.fetch_files([name for name in checkpoint.files if name in wanted])
    return load(source.root, source.repo or source.name)


def _vocabulary(checkpoint: Checkpoint) -> int | None:
    """Tokens that a model has, as config.json says."""
    inner = checkpoint.config.get("text_config")
    places = (checkpoint.config, inner if isinstance(inner, dict) else {})
    return next((size for place in places if isinstance(size := place.get("vocab_size"), int)), None)


def _hidden(checkpoints: Sequence[Checkpoint], tokens: int) -> int:
    """Bytes that so many tokens take between layers, in all models: the source twice, each output twice, and embeddings
    that wait beside what became of them.
    """
    config = checkpoints[0].config
    inner = config.get("text_config")
    size = next((each.get("hidden_size") for each in (config, inner) if isinstance(each, dict)), 0)
    return 2 * 2 * len(checkpoints) * tokens * (size if isinstance(size, int) else 0) * 2


def _place(asked: Evaluate, sources: Sequence[Source]) -> Path:
    """The directory for what has no room in memory: that of the first output that does not lie in the Hub's cache."""
    if asked.scratch is not None:
        return Path(asked.scratch)
    place = next((each.root.parent for each in sources[1:] if each.repo is None), Path())
    if asked.stream and any(each.remote for each in sources):
        from .forward.scratch import refuse_memory

        refuse_memory(place, "shards")
    return place


def _scratch(asked: Evaluate, place: Path, hidden: int) -> Scratch | None:
    """A file for so many bytes of hidden states, where they may be more than memory has room for."""
    from .forward.scratch import Scratch

    # As much again for the weights of a layer and for logits, of which nothing is known yet.
    budget = BUDGET if asked.max_memory is None else max(0, (asked.max_memory - peak_rss()) // 2)
    return None if hidden <= budget else Scratch(place, budget, asked.scratch is not None)


def _targets(
    asked: Evaluate, outputs: Sequence[Source]
) -> Callable[[Evaluation], Iterator[tuple[Path, dict[str, object]]]]:
    """Where what will be found goes, asked before anything is computed.

    Raises:
        UsageError: nothing can be written there.
    """
    if asked.out is not None:
        files = [Path(asked.out)]
    else:
        # Nothing is written into the Hub's cache.
        ours = [each.root for each in outputs if each.repo is None]
        files = [root / EVAL_FILE for root in ours if (root / JOURNAL_FILE).exists()]
    for file in files:
        require_place(file, f"--out {file}" if asked.out is not None else str(file), "name another file with --out")

    def pairs(found: Evaluation) -> Iterator[tuple[Path, dict[str, object]]]:
        if asked.out is not None:
            yield files[0], found.outputs[0] if len(found.outputs) == 1 else found.to_json()
            return
        for output, value in zip(outputs, found.outputs, strict=True):
            if output.root / EVAL_FILE in files:
                yield output.root / EVAL_FILE, value

    return pairs


def write_json(file: Path, value: dict[str, object]) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    write_whole(file, f"{json.dumps(value, indent=1, allow_nan=False)}\n".encode())
