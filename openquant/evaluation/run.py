"""evaluate(): outputs held against their source, from opening them to writing what was found beside them.

Several processes share the texts; the first puts together what all have found, and writes it.

transformers is imported by the modules that run models, and these when they are needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed import Ranks
from ..errors import SourceError, UsageError
from ..files.checkpoint import open_checkpoint
from ..files.destination import Destination, ProtectedPaths
from ..files.evaluation import EVALUATION
from ..files.fingerprint import Fingerprint
from ..files.names import EVAL_FILE, JOURNAL_FILE
from ..formats.names import CacheScheme
from ..hub.shards import Needs, supply_shards
from ..hub.source import Source, find_source, model_folder
from ..job import in_all_ranks
from ..machine import find_device
from ..options import Evaluate, Texts, documented, files_read
from ..streaming.memory import answer_memory, evaluation_steps, memory_left
from ..streaming.session import BUDGET, ArrivingShards, find_tokenizer, hidden_bytes, scratch_for, vocabulary_of

if TYPE_CHECKING:
    from ..streaming.shard_provider import ShardProvider
    from .results import Evaluation


@documented(Evaluate, Texts)
def evaluate(
    outputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    stream: bool = False,
    prompts: str | os.PathLike[str] | None = None,
    kv_cache: CacheScheme = "auto",
    device: str = "cpu",
    max_memory: int | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    seed: int = 0,
    fail_above: float | None = None,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    dataset: str | None = None,
    samples: int = 16,
    length: int = 512,
    begun: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    remaining: Callable[[float], None] | None = None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Hold outputs against their source: what they answer to texts, where it comes from, and a verdict in a word.

    Args:
        begun: told in a line what is to be done, before it starts.
        progress: told how many tokens are computed, and how many there are in all.
        remaining: told about how many seconds are left, once the first layer is computed and as it goes on.
        ranks: this process among several, as `Ranks.from_environment(os.environ)` finds it; each runs its share of the
            texts.

    Returns:
        The figures, in every process; docs/evaluation.md says what they mean.

    Raises:
        OpenQuantError: something the caller can fix.
    """
    asked = Evaluate.parse(
        outputs=outputs,
        source=source,
        out=out,
        stream=stream,
        prompts=prompts,
        kv_cache=kv_cache,
        device=device,
        max_memory=max_memory,
        scratch=scratch,
        seed=seed,
        fail_above=fail_above,
    )
    texts = Texts.parse(text=text, dataset=dataset, samples=samples, length=length)
    ranks = ranks or Ranks()
    with ranks:
        ranks.agree(None)
        return in_all_ranks(ranks, lambda: _evaluated(asked, texts, ranks, begun, progress, remaining))


def _evaluated(
    asked: Evaluate,
    texts: Texts,
    ranks: Ranks,
    begun: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
    remaining: Callable[[float], None] | None,
) -> Evaluation:
    """What all ranks have found; the first has written it."""
    chosen = find_device(asked.device, ranks.local_rank)
    sources = [find_source(os.fspath(name)) for name in (asked.source, *asked.outputs)]
    if asked.stream and all(each.repo is None for each in sources):
        raise UsageError("all models are local directories, nothing of them can be streamed", "leave --stream out")
    checkpoints = [open_checkpoint(each.root, each.remote, each.absent) for each in sources]
    targets = _targets(asked, texts, sources[1:]) if ranks.first else None
    models = [(each.repo or each.name, checkpoint) for each, checkpoint in zip(sources, checkpoints, strict=True)]
    memory_left(asked.max_memory, evaluation_steps(models, texts.length))
    # Only now is transformers imported.
    from ..data.corpus import read_corpus
    from .compare import compare_outputs
    from .under_test import EvaluationSettings, ModelUnderTest

    def advanced(done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(done, total)

    with ExitStack() as stack:
        tokenizers = [find_tokenizer(each, checkpoint) for each, checkpoint in zip(sources, checkpoints, strict=True)]
        tokenizer = tokenizers[0]
        corpus = read_corpus(texts, tokenizer, vocabulary=vocabulary_of(checkpoints[0]))
        seen = ranks.agree(None, [corpus.sha256, [dict(checkpoint.shards) for checkpoint in checkpoints]])
        if any(other != seen[0] for other in seen):
            raise SourceError("ranks see different texts or checkpoints", "let all of them read the same files")
        subjects = [
            ModelUnderTest(
                name,
                checkpoint,
                tokenizer.differences(own),
                Fingerprint(checkpoint, each.remote, each.identity),
            )
            for each, (name, checkpoint), own in zip(sources, models, tokenizers, strict=True)
        ]
        place = _place(asked, sources)
        # The source twice, each output twice.
        tokens = -(-len(corpus.documents) // ranks.size) * corpus.length
        hidden = 2 * len(checkpoints) * hidden_bytes(checkpoints[0], tokens)
        left = memory_left(asked.max_memory, evaluation_steps(models, corpus.length))
        room = scratch_for(hidden, place, BUDGET if left is None else left, asked.scratch is not None)

        @contextmanager
        def supply(needs: Sequence[Needs]) -> Iterator[list[ShardProvider]]:
            pairs = list(zip(sources, needs, strict=True))
            more = hidden if room else 0
            with supply_shards(pairs, asked.stream, place, more, ranks.local_size) as supplies:
                yield [
                    ArrivingShards(each, wanted, subject.name, subject.fingerprint, ranks)
                    for each, wanted, subject in zip(supplies, needs, subjects, strict=True)
                ]

        settings = EvaluationSettings(
            asked.seed,
            asked.kv_cache,
            chosen,
            stack.enter_context(room) if room else None,
            tokenizer,
            asked.prompts,
            supply,
            again=not asked.stream,
            team=ranks if ranks.size > 1 else None,
            answering=answer_memory(asked.max_memory),
        )
        found = compare_outputs(subjects[0], subjects[1:], corpus, settings, begun, advanced, remaining)
        for subject in subjects:
            subject.fingerprint.require_unchanged()
    for target, value in targets(found) if targets is not None else ():
        target.write(f"{json.dumps(value, indent=1, allow_nan=False)}\n".encode())
    return found


def _place(asked: Evaluate, sources: Sequence[Source]) -> Path:
    """The directory for what has no room in memory: that of the first output that does not lie in the Hub's cache."""
    if asked.scratch is not None:
        return Path(asked.scratch)
    place = next((each.root.parent for each in sources[1:] if each.repo is None), Path())
    if asked.stream and any(each.remote for each in sources):
        from ..streaming.offload import require_disk

        require_disk(place, "shards")
    return place


def _targets(
    asked: Evaluate, texts: Texts, outputs: Sequence[Source]
) -> Callable[[Evaluation], Iterator[tuple[Destination, Mapping[str, object]]]]:
    """Where what will be found goes, asked before anything is computed.

    Raises:
        UsageError: nothing can be written there.
    """
    # Nothing is written into the Hub's cache.
    ours = {each.root for each in outputs if each.repo is None and (each.root / JOURNAL_FILE).exists()}
    protected = protected_by(asked, texts)

    def place(path: Path, option: str, root: Path | None) -> Destination:
        found = Destination(path, option, EVALUATION, protected, root, "name another file with --out")
        found.require()
        return found

    if asked.out is not None:
        one = place(Path(asked.out), "--out", output_of(asked))
        return lambda found: iter([(one, found.outputs[0] if len(found.outputs) == 1 else found.to_json())])
    files = [place(each.root / EVAL_FILE, "", each.root) if each.root in ours else None for each in outputs]
    return lambda found: ((file, value) for file, value in zip(files, found.outputs, strict=True) if file is not None)


def protected_by(asked: Evaluate, texts: Texts) -> ProtectedPaths:
    """What no file that an evaluation writes may replace."""
    models = [model_folder(each) for each in (asked.source, *asked.outputs)]
    return ProtectedPaths(models, files_read({**vars(asked), **vars(texts)}))


def output_of(asked: Evaluate) -> Path | None:
    """The directory that an evaluation can lie in: that of an output, if there is only one."""
    return Path(asked.outputs[0]) if len(asked.outputs) == 1 and Path(asked.outputs[0]).is_dir() else None
