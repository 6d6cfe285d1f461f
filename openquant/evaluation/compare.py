"""Runs a source, the source with rounding noise, and its outputs layer by layer over the same texts.

Every weight is read once. The passes of a document are numbered: 0 is the source, 1 the source with noise (the floor),
and then each output has one pass with rounded weights alone and, if engines round more, one as engines serve it.

    evaluation = compare_outputs(ModelUnderTest("Qwen3-8B", source), [ModelUnderTest("Qwen3-8B-FP8", output)], corpus)
    evaluation.outputs[0]["kl"]["mean"]      # 0.0031
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.corpus import Corpus
from ..data.prompts import Prompt
from ..errors import naming
from ..streaming import transformers_internals
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.meta_model import REST
from ..streaming.model import (
    Advanced,
    PassProgress,
    StreamedModel,
    layer_costs,
    limited_threads,
    products_in_float32,
    threads_for,
)
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..streaming.session import documents_of_rank
from .answers import compare_answers, prompts_to_answer
from .as_served import ServedModel, logits
from .gathering import pack_records, unpack_records
from .generate import TOKENS, teacher_forced
from .kl import ModelNames, compare_logits
from .noise_floor import RoundingNoise
from .results import Evaluation, Measurements, make_evaluation
from .saved_measurements import EvaluationState
from .task_passes import TaskPasses
from .task_results import evaluate_tasks
from .task_servers import generate_texts
from .types import counted_questions
from .under_test import EvaluationSettings, ModelUnderTest, OutputUnderTest, require_one_model
from .weight_changes import compare_weights


def compare_outputs(
    source: ModelUnderTest,
    outputs: Sequence[ModelUnderTest],
    corpus: Corpus,
    settings: EvaluationSettings | None = None,
    begun: Callable[[str], None] | None = None,
    progress: Advanced | None = None,
) -> Evaluation:
    """Compare outputs with their source over the same texts.

    Args:
        source: the model that the outputs were made from, quantized or not.
        outputs: the outputs, at least one.
        corpus: the texts, as token ids.
        settings: seed, device, KV cache and so on; the defaults if None.
        begun: called once with a line that says what is to be done.
        progress: called with the number of tokens that are done, those of answers included, and of all tokens. Each
            pass of a text counts, and a token that is through layers of half the cost counts half.

    Returns:
        The eval.json of each output, the figures of the noise floor, and notes for the user; the same in all processes
        that share the texts.

    Raises:
        SourceError: a checkpoint or the prompts cannot be read, transformers has no such model, or a logit is NaN or
            infinite.
        PlanError: a checkpoint is quantized in a format that cannot be read.
        UsageError: the checkpoints are not of one model, or engines round one in a way that is not supported here.
        OutputError: hidden states cannot be written, or another rank has failed.
        OpenQuantError: transformers' model fails on these weights or texts.
    """
    comparison = _Comparison(source, outputs, corpus, settings or EvaluationSettings(), progress)
    if begun is not None:
        begun(comparison.description())
    return comparison.run()


class _Comparison:
    """One call of `compare_outputs`."""

    def __init__(
        self,
        source: ModelUnderTest,
        outputs: Sequence[ModelUnderTest],
        corpus: Corpus,
        settings: EvaluationSettings,
        progress: Advanced | None,
    ) -> None:
        self.source, self.corpus, self.settings = source, corpus, settings
        with naming(source.name):
            self.model = StreamedModel(source.checkpoint, device=settings.device)
        self.local_documents = documents_of_rank(len(corpus.documents), settings.ranks)
        self.outputs: list[OutputUnderTest] = []
        self.measurements = Measurements(source, self.model, self.outputs, corpus, settings)
        self.measurements.routes.register_hooks(self.model.model)
        self.noise = RoundingNoise(self.model.units[name] for name in self.model.layers)
        for output in outputs:
            with naming(output.name):
                model = StreamedModel(output.checkpoint, dtype=self.model.dtype, device=settings.device)
            require_one_model(source, self.model, output, model)
            self.measurements.routes.register_hooks(model.model)
            served = ServedModel(model, settings.kv_cache)
            self.outputs.append(OutputUnderTest(output, served, self.passes, 2 if served.rounds else 1))
        self.tasks: TaskPasses | None = None
        if settings.tasks is not None:
            served_models = [output.served for output in self.outputs]
            names = [source.name, *(output.name for output in outputs)]
            self.tasks = TaskPasses(settings.tasks, self.model, served_models, names, settings.ranks)
        # The texts that each model's server generates for tasks.
        self.generated: list[list[str]] = [[] for _ in range(1 + len(outputs))]
        # Units whose weights are compared already, by name and pass.
        self.compared: set[tuple[str, int]] = set()
        # The most probable next token at each position of the first document, by pass.
        self.top_tokens: dict[int, list[int]] = {}
        # The source's logits of the document that is being compared.
        self.source_logits: Tensor | None = None
        # Generators of the rounding noise of this process's documents.
        self.generators = {
            document: torch.Generator().manual_seed(settings.seed * 1_000_003 + document)
            for document in self.local_documents
        }
        self.checkpoint = settings.pass_checkpoint
        self.continues = self.checkpoint is not None and self.checkpoint.saved is not None
        embedding = self.model.model.get_input_embeddings()
        self.vocabulary = int(getattr(embedding, "num_embeddings", 0))
        self.prompts: Sequence[Prompt] = ()
        if settings.tokenizer is not None and settings.answers_prompts:
            nbytes = max(self.model.nbytes, *(output.served.model.nbytes for output in self.outputs))
            self.prompts = prompts_to_answer(
                settings.prompts, settings.tokenizer, self.vocabulary, nbytes, settings.answer_memory
            )
        text_tokens = self.passes * len(self.local_documents) * corpus.length
        if self.tasks is not None:
            text_tokens += self.tasks.models * self.tasks.local_tokens
        answer_tokens = TOKENS * len(self.prompts) * (1 + len(self.outputs)) if self.answers_prompts else 0
        if not self.continues:
            answer_tokens += self.generated_tokens
        resumed = frozenset() if self.checkpoint is None else self.checkpoint.done
        costs = layer_costs(self.model, [unit for unit in (*self.model.layers, *self.head) if unit not in resumed])
        self.progress = PassProgress(costs, text_tokens, progress, answer_tokens)

    @property
    def head(self) -> list[str]:
        """Name of the output head in a list; empty if it is not a unit of its own."""
        head = transformers_internals.output_head(self.model.model)
        return [name for name, module in self.model.units.items() if module is head]

    @property
    def answers_prompts(self) -> bool:
        """Whether this process has the models answer prompts; of several only the first does."""
        return bool(self.prompts) and (self.settings.ranks is None or self.settings.ranks.rank == 0)

    @property
    def passes(self) -> int:
        """Number of forward passes of each document: two of the source, and one or two of each output."""
        return self.outputs[-1].last + 1 if self.outputs else 2

    @property
    def generated_tokens(self) -> int:
        """The most tokens of the texts that servers generate."""
        tasks = self.settings.tasks
        return 0 if tasks is None else len(tasks.servers) * sum(text.max_tokens for text in tasks.tasks.generations)

    def description(self) -> str:
        """Say what is to be done: "16 documents of 512 tokens: code (8), docs (8); 4 passes"."""
        return f"{self._description()}{'; an earlier run is continued' if self.continues else ''}"

    def _description(self) -> str:
        described = f"{self.corpus.described}; {self.passes} passes"
        if self.tasks is None or self.settings.tasks is None:
            return described
        described += f"; {counted_questions(self.settings.tasks.tasks.questions)} of tasks"
        if self.tasks.tokens:
            described += f", {self.tasks.tokens:,} tokens in {self.tasks.models} passes"
        if self.generated_tokens:
            names = ", ".join(server.url for server in self.settings.tasks.servers)
            described += f", answered by {names} with {self.generated_tokens:,} tokens at most"
        return described

    def run(self) -> Evaluation:
        """Run all passes of all documents, and return the figures."""
        models = [self.model, *(output.served.model for output in self.outputs)]
        threads = threads_for(self.model, self.corpus.length)
        with self.settings.streamed(models) as scratch, limited_threads(threads):
            return self._run(scratch)

    def _run(self, scratch: OffloadFile | None) -> Evaluation:
        tasks = self.settings.tasks
        if tasks is not None and tasks.servers and not self.continues:
            # First, as servers are what fails most easily.
            self.generated = generate_texts(tasks.servers, tasks.tasks.generations, self.progress.more_done)
        if self.checkpoint is not None:
            self._continue_from(self.checkpoint)

        run_interleaved(
            [*map(self._passes_of, self.local_documents), *self._task_passes()],
            finished=self._finished,
            after_unit=self._after_unit,
            scratch=scratch,
            progress=self.progress.layer_done,
            checkpoint=self.checkpoint,
        )

        ranks = self.settings.ranks
        if ranks is None:
            return self._evaluation()
        for data in ranks.gather(pack_records(self.measurements.records, self.measurements.counts())):
            self.measurements.add(*unpack_records(data, self.corpus.documents))
        if self.tasks is not None:
            for data in ranks.gather(self.tasks.scores.to_bytes()):
                self.tasks.scores.add_bytes(data)
        evaluation = self._evaluation() if ranks.rank == 0 else None
        first = ranks.agree(None, evaluation and {**evaluation.to_json(), "notes": evaluation.notes})[0]
        return evaluation or Evaluation(first["source"], first["floor"], first["outputs"], tuple(first["notes"]))

    def _continue_from(self, checkpoint: PassCheckpoint) -> None:
        """Have the checkpoint save what is measured, and take what an earlier run saved."""
        generators = list(self.generators.values())
        state = EvaluationState(self.measurements, self.compared, generators, self.generated)
        checkpoint.extra = state.to_bytes
        if checkpoint.saved is None:
            return

        tasks = self.settings.tasks
        texts = len(tasks.tasks.generations) if tasks is not None and tasks.servers else 0
        with checkpoint.continuing():
            state.add_bytes(checkpoint.saved, checkpoint.done, texts)

    def _evaluation(self) -> Evaluation:
        notes = []
        if self.settings.prompts is not None and not self.prompts:
            notes.append(
                "--prompts were not answered: a model takes more than half of the free memory, or more than "
                "--max-memory leaves"
            )
        notes += [
            f"{output.subject.name}: AWQ or SmoothQuant changed its weights, so they were not compared one by one; "
            "openquant verify --source --full does that"
            for output in self.outputs
            if output.facts.smoothed
        ]
        evaluation = make_evaluation(self.measurements, self._answers(), notes)
        if self.tasks is not None and self.settings.tasks is not None:
            figures = evaluate_tasks(self.settings.tasks, self.tasks, self.generated, self.settings.seed)
            for output, of_tasks in zip(evaluation.outputs, figures, strict=True):
                output["tasks"] = of_tasks
        return evaluation

    def _task_passes(self) -> list[list[ForwardPass[Tensor]]]:
        """Return the passes of all packs of questions, which come after those of the texts."""
        return [] if self.tasks is None else [self.tasks.of_pack(number) for number in range(len(self.tasks.packs))]

    def _answers(self) -> list[list[dict[str, Any]]]:
        """Return the `texts` of each output: answers to prompts, or else teacher-forced predictions along a text."""
        tokenizer = self.settings.tokenizer
        if tokenizer is None:
            return [[] for _ in self.outputs]
        if self.prompts:
            served = [output.served for output in self.outputs]
            return compare_answers(self.model, served, tokenizer, self.prompts, self._answered)
        ids = self.corpus.documents[0].ids
        return [
            [teacher_forced(ids, self.top_tokens[0], self.top_tokens[output.last], tokenizer)]
            for output in self.outputs
        ]

    def _answered(self, model: int, prompt: int) -> None:
        del model, prompt
        self.progress.more_done(TOKENS)

    def _passes_of(self, document: int) -> list[ForwardPass[Tensor]]:
        """Return all passes of a document, by number."""
        ids = torch.tensor(self.corpus.documents[document].ids, device=self.settings.device)
        body = partial(logits, self.model, ids)
        noise = self.noise.drawn_from(self.generators[document])
        passes = [ForwardPass(self.model, body), ForwardPass(self.model, body, noise)]
        for output in self.outputs:
            passes += output.served.passes(ids)
        return [
            ForwardPass(forward.model, forward.body, self._around(number, forward.around))
            for number, forward in enumerate(passes)
        ]

    def _around(
        self, number: int, inner: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[Any]]:
        @contextmanager
        def around() -> Iterator[None]:
            self.measurements.routes.pass_number = number
            try:
                with products_in_float32(self.settings.device), inner():
                    yield
            finally:
                self.measurements.routes.pass_number = None

        return around

    def _after_unit(self, unit: str, group: int, number: int, hidden: Tensor) -> None:
        if group >= len(self.local_documents):
            return
        if unit in self.model.layers:
            self.measurements.distances.add(unit, number, hidden)
        if self.local_documents[group] == 0:
            self._compare_weights(unit, number)

    def _compare_weights(self, unit: str, number: int) -> None:
        """Compare a unit's weights of the output whose first pass this is with the source's, while both are loaded."""
        output = next((output for output in self.outputs if output.first == number), None)
        # AWQ and SmoothQuant change every weight on purpose: the rounding error alone cannot be seen.
        if output is None or (unit, number) in self.compared or output.facts.smoothed:
            return
        self.compared.add((unit, number))
        models = self.model, output.served.model
        source_module, output_module = (model.model for model in models)

        def free_pages() -> None:
            for model in models:
                model.release_pages()

        for name, source_weight in source_module.named_parameters():
            if self.model.unit_of(name) != unit:
                continue
            owner, _, last = name.rpartition(".")
            output_weight = getattr(output_module.get_submodule(owner), last)
            module = name.removesuffix(".weight")
            weight = output.served.model.quantized.get(module)
            fmt = None if weight is None else weight.format
            if fmt is None or source_weight.ndim == 2:
                output.changes.append(compare_weights(module, source_weight, output_weight, fmt, between=free_pages))
                continue
            transposed = bool(getattr(source_module.get_submodule(owner), "is_transposed", False))
            output.changes += [
                compare_weights(f"{module}[{expert}]", before, after, fmt, transposed)
                for expert, (before, after) in enumerate(zip(source_weight, output_weight, strict=True))
            ]

    def _finished(self, group: int, number: int, pass_logits: Tensor) -> None:
        if group >= len(self.local_documents):
            assert self.tasks is not None
            self.tasks.finished(group - len(self.local_documents), number, pass_logits)
            return
        index = self.local_documents[group]
        if index == 0:
            self._compare_weights(REST, number)
            self.top_tokens[number] = pass_logits.argmax(-1).tolist()
        if number == 0:
            self.source_logits = pass_logits
            return
        assert self.source_logits is not None
        document = self.corpus.documents[index]
        output = next((output for output in self.outputs if output.first <= number <= output.last), None)
        names = ModelNames(self.source.name, output.subject.name if output else f"{self.source.name} with noise")
        ids = torch.tensor(document.ids)
        record = compare_logits(self.source_logits, pass_logits, ids, document.domain, document.name, names)
        self.measurements.records.setdefault(number, {})[index] = record
        if number + 1 == self.passes:
            self.source_logits = None
