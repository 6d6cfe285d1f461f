"""evaluate(): the verb that compares outputs with their source, from opening them to writing eval.json.

Several processes share the texts; the first combines their results and writes them. Modules that import transformers
are imported only once the options and checkpoints are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..data.corpus import Corpus, read_corpus
from ..data.tasks import Tasks, read_tasks
from ..data.tokenizer import Tokenizer
from ..distributed import Ranks
from ..fields import verb
from ..files.cards import EVALUATION
from ..files.checkpoint import Checkpoint
from ..files.destination import Destination
from ..files.model_files import EVAL_FILE, JOURNAL_FILE
from ..hub.source import Source, find_source
from ..job import connect_ranks
from ..machine import find_device
from ..options import Evaluate, Texts
from ..plan.architecture import known_architecture
from ..result import Reporter, default_reporter
from ..streaming import session
from ..streaming.memory import answer_memory, evaluation_steps, hidden_bytes, memory_left

if TYPE_CHECKING:
    from ..streaming.pass_checkpoint import PassCheckpoint
    from .results import Evaluation, EvaluationSettings, ModelUnderTest
    from .task_passes import TaskRequests


@verb(Evaluate, Texts, positional=("outputs", "source"))
def evaluate(
    options: Evaluate, texts: Texts, ranks: Ranks | None = None, reporter: Reporter | None = None
) -> Evaluation:
    """Compare outputs with their source: how far their answers are apart, which layers cause it, and a verdict.

    A call that was interrupted continues when it is made again with the same arguments.

    Args:
        ranks: this process among several, as `Ranks.from_environment(os.environ)` gives it; each runs its share of the
            texts. None for this process alone.
        reporter: receives a line on what is done, the progress in tokens, and the figures; nothing is reported if None.

    Returns:
        The figures, the same in every process; docs/figures.md says what they mean.

    Raises:
        OpenQuantError: something that the caller can fix.
    """
    with connect_ranks(ranks) as connected:
        return connected.all_do(lambda: _evaluate(options, texts, connected, reporter or default_reporter()))


def _evaluate(options: Evaluate, texts: Texts, ranks: Ranks, reporter: Reporter) -> Evaluation:
    """Evaluate this rank's share of the texts and combine those of all; the first rank writes the results."""
    options = replace(options, device=find_device(options.device, ranks.local_rank))
    inputs = _check_inputs(options, texts, ranks)
    from .compare import compare_outputs

    settings = _settings(options, inputs, ranks)
    progress = session.checked_progress(ranks, reporter.on_progress)
    source, *outputs = inputs.subjects
    evaluation = compare_outputs(source, outputs, inputs.corpus, settings, reporter.on_note, progress)

    if ranks.first:
        _write_results(inputs.files, options, evaluation)
    # The other ranks keep their checkpoints until the results are written.
    ranks.agree(None)
    if settings.pass_checkpoint is not None:
        settings.pass_checkpoint.remove()
    return replace(evaluation, written=tuple(file.path for file in inputs.files if file is not None))


class _Inputs(NamedTuple):
    """What an evaluation reads, opened and checked: the source and then its outputs, and the texts.

    Attributes:
        models: where each model comes from.
        subjects: the checkpoint of each model.
        files: where the results go, as `_destinations` says.
        tokenizer: that of the source.
        corpus: the texts.
        tasks: the questions of tasks; None without tasks.
    """

    models: list[Source]
    subjects: list[ModelUnderTest]
    files: list[Destination | None]
    tokenizer: Tokenizer
    corpus: Corpus
    tasks: TaskRequests | None

    @property
    def named(self) -> list[tuple[str, Checkpoint]]:
        """The name of each model, and its checkpoint."""
        return [(subject.name, subject.checkpoint) for subject in self.subjects]


def _check_inputs(options: Evaluate, texts: Texts, ranks: Ranks) -> _Inputs:
    """Open all models, read texts and tasks, and refuse what cannot be done, before anything is computed or written."""
    models = [find_source(os.fspath(name)) for name in (options.source, *options.outputs)]
    checkpoints = [model.open() for model in models]
    files = _destinations(options, models[1:]) if ranks.first else []
    names = [model.repo or model.name for model in models]
    memory_left(options.max_memory, evaluation_steps(list(zip(names, checkpoints, strict=True)), texts.length))

    from .results import ModelUnderTest

    read = read_tasks(options.tasks, options.limit) if options.tasks else None
    tokenizers: list[Tokenizer] = []
    for model, checkpoint in zip(models, checkpoints, strict=True):
        tokenizers.append(session.find_tokenizer(model, checkpoint, like=tokenizers[0] if tokenizers else None))
    tokenizer = tokenizers[0]
    corpus = read_corpus(texts, tokenizer)
    tasks = None
    if read is not None:
        tasks = _encode_tasks(read, options, texts, checkpoints[0], tokenizer)

    shards = [dict(checkpoint.shards) for checkpoint in checkpoints]
    ranks.require_same([corpus.sha256, tasks and tasks.sha256, shards], session.TEXTS_OR_CHECKPOINTS)
    subjects = [
        ModelUnderTest(name, checkpoint, tokenizer.differences(other), model.fingerprint(checkpoint))
        for name, checkpoint, other, model in zip(names, checkpoints, tokenizers, models, strict=True)
    ]
    return _Inputs(models, subjects, files, tokenizer, corpus, tasks)


def _encode_tasks(
    tasks: Tasks, options: Evaluate, texts: Texts, source: Checkpoint, tokenizer: Tokenizer
) -> TaskRequests:
    """Make tokens of the questions of tasks."""
    from .task_passes import TaskRequests, encode_requests, longest_sequence

    requests = encode_requests(tasks.requests, tokenizer, longest_sequence(source.config, tokenizer))
    # Private directories are not published.
    given = tuple(Path(task).name if Path(task).is_absolute() else os.fspath(task) for task in options.tasks)
    return TaskRequests(tasks, requests, given, options.limit, texts.length)


def _settings(options: Evaluate, inputs: _Inputs, ranks: Ranks) -> EvaluationSettings:
    """Return the settings of the comparison."""
    from .results import EvaluationSettings

    tasks = inputs.tasks
    longest_text = inputs.corpus.length if tasks is None else max(inputs.corpus.length, tasks.longest)
    left = memory_left(options.max_memory, evaluation_steps(inputs.named, longest_text))
    directory = _scratch_directory(options, inputs.models)
    place = session.Scratch(directory, session.BUDGET if left is None else left, options.stream, ranks.local_size)
    origins = [(model, subject.fingerprint) for model, subject in zip(inputs.models, inputs.subjects, strict=True)]

    return EvaluationSettings(
        options.seed,
        options.kv_cache,
        options.device,
        inputs.tokenizer,
        options.prompts,
        partial(session.streamed_run, origins, _hidden_bytes(inputs, ranks), place, ranks, True),
        answers_prompts=not (options.stream or options.no_prompts),
        ranks=ranks,
        answer_memory=answer_memory(options.max_memory),
        tasks=tasks,
        pass_checkpoint=_pass_checkpoint(options, inputs, ranks),
    )


def _hidden_bytes(inputs: _Inputs, ranks: Ranks) -> int:
    """The bytes of all hidden states of this rank."""
    source = inputs.subjects[0].checkpoint
    tasks = inputs.tasks
    # Two passes through each model.
    tokens = -(-len(inputs.corpus.documents) // ranks.size) * inputs.corpus.length
    of_model = 2 * hidden_bytes(source, tokens)
    if tasks is not None:
        # One pass, with a mask of up to four bytes for each pair of tokens.
        task_tokens = -(-tasks.tokens // ranks.size)
        mask = 4 * max(tasks.length, tasks.longest) * task_tokens
        of_model += hidden_bytes(source, task_tokens) + mask
    return len(inputs.models) * of_model


def _conditions(options: Evaluate, inputs: _Inputs, ranks: Ranks) -> dict[str, str]:
    """What must be the same for an interrupted evaluation to be continued."""
    from .results import versions

    source, *outputs = (
        _sha256([subject.fingerprint.stamp, model.digests(subject.checkpoint)])
        for model, subject in zip(inputs.models, inputs.subjects, strict=True)
    )
    return {
        "source": source,
        "outputs": _sha256(outputs),
        "texts": inputs.corpus.sha256,
        "tasks": inputs.tasks.sha256 if inputs.tasks is not None else "",
        "options": _sha256([options.seed, options.kv_cache, options.device, inputs.corpus.length]),
        "number of ranks": str(ranks.size),
        "versions of libraries": ", ".join(f"{name} {value}" for name, value in versions().items()),
    }


def _pass_checkpoint(options: Evaluate, inputs: _Inputs, ranks: Ranks) -> PassCheckpoint | None:
    """Return the file from which an interrupted evaluation continues.

    Args:
        options: options of the evaluation.
        inputs: the models and texts; the file is named after the first output.
        ranks: the processes, each of which has a file of its own.

    Returns:
        The file; None if nothing can be written there, or if it is not known of the source's class that nothing but
        arguments goes from layer to layer.

    Raises:
        SourceError: there is a file that is damaged, or from a run of other models, texts or options.
    """
    from ..streaming.pass_checkpoint import PassCheckpoint

    directory = _scratch_directory(options, inputs.models)
    entry = known_architecture(inputs.subjects[0].checkpoint)
    if entry is None or entry.repeats or not os.access(directory, os.W_OK):
        return None
    results = EVAL_FILE if options.out is None else Path(options.out).name
    name = f"{inputs.models[1].name}.{results}"
    return PassCheckpoint(session.part_path(directory / name, ranks), _conditions(options, inputs, ranks))


def _sha256(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _scratch_directory(options: Evaluate, models: Sequence[Source]) -> Path:
    """Return the directory for scratch files: --scratch, or beside the first output that is a local directory."""
    if options.scratch is not None:
        return Path(options.scratch)
    return next((output.root.parent for output in models[1:] if output.repo is None), Path())


def _destinations(options: Evaluate, outputs: Sequence[Source]) -> list[Destination | None]:
    """Return where the results go: --out, or for each output its eval.json, or None if it is no directory of ours.

    The files are checked here, before anything is computed.

    Raises:
        UsageError: a file cannot be written.
    """
    # Nothing is written into the Hub's cache.
    written = {output.root for output in outputs if output.repo is None and (output.root / JOURNAL_FILE).exists()}

    def check(path: Path, option: str) -> Destination:
        destination = Destination(path, option, EVALUATION, "name another file with --out")
        destination.require()
        return destination

    if options.out is not None:
        return [check(Path(options.out), "--out")]
    return [check(output.root / EVAL_FILE, "") if output.root in written else None for output in outputs]


def _write_results(files: Sequence[Destination | None], options: Evaluate, evaluation: Evaluation) -> None:
    """Write the results to the files of `_destinations`."""
    results: Sequence[Mapping[str, object]] = evaluation.outputs
    if options.out is not None and len(evaluation.outputs) > 1:
        results = [evaluation.to_json()]

    for file, result in zip(files, results, strict=True):
        if file is not None:
            file.write(f"{json.dumps(result, indent=1, allow_nan=False)}\n".encode())
