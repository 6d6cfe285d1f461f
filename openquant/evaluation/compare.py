"""Runs a source, the source with rounding noise, and its outputs layer by layer over the same texts.

Every weight is read once. The passes of a document are numbered: 0 is the source, 1 the source with noise (the floor),
and then each output has one pass with rounded weights alone and, if engines round more, one as engines serve it.

    evaluation = compare_outputs(ModelUnderTest("Qwen3-8B", source), [ModelUnderTest("Qwen3-8B-FP8", output)], corpus)
    evaluation.outputs[0]["kl"]["mean"]      # 0.0031

The noise floor is what bfloat16 rounding alone changes: the source runs again with noise after each layer. Two programs
that compute the same model in bfloat16 add in different orders, so their results are sometimes rounded to different
neighbours. A difference between two models that is no larger than this noise means nothing.

Each layer's output is in bfloat16 already. Its value before rounding is taken to lie anywhere within half a step of it,
and is rounded stochastically: one value in eight moves a step up, one a step down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.corpus import Corpus
from ..data.domains import Prompt
from ..errors import naming
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.model import Advanced, PassProgress, StreamedModel, limited_threads, products_in_float32
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint, dump, load
from ..streaming.session import documents_of_rank
from .as_served import TOKENS, ServedModel, compare_answers, prompts_to_answer
from .kl import compare_logits
from .results import (
    Evaluation,
    EvaluationSettings,
    Measurements,
    ModelUnderTest,
    OutputUnderTest,
    make_evaluation,
    require_one_model,
)
from .task_passes import TaskPasses, evaluate_tasks
from .verdict import counted_questions


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
            pass of a text counts, and a token that is through half of the layers counts half.

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


@dataclass
class _Comparison:
    """One call of `compare_outputs`, whose arguments these are."""

    source: ModelUnderTest
    subjects: Sequence[ModelUnderTest]
    corpus: Corpus
    settings: EvaluationSettings
    advanced: Advanced | None

    def __post_init__(self) -> None:
        settings = self.settings
        with naming(self.source.name):
            self.model = StreamedModel(self.source.checkpoint, device=settings.device)
        self.local_documents = documents_of_rank(len(self.corpus.documents), settings.ranks)
        self.outputs: list[OutputUnderTest] = []
        self.measurements = Measurements(self.source, self.model, self.outputs, self.corpus, settings)
        self.measurements.routes.register_hooks(self.model.model)
        self.noise = RoundingNoise(self.model.units[name] for name in self.model.layers)
        for subject in self.subjects:
            self._open_output(subject)

        self.tasks: TaskPasses | None = None
        if settings.tasks is not None:
            served_models = [output.served for output in self.outputs]
            names = [self.source.name, *(subject.name for subject in self.subjects)]
            self.tasks = TaskPasses(settings.tasks, self.model, served_models, names, settings.ranks)

        # The source's logits of the document that is being compared.
        self.source_logits: Tensor | None = None
        # Generators of the rounding noise of this process's documents.
        self.generators = {
            document: torch.Generator().manual_seed(settings.seed * 1_000_003 + document)
            for document in self.local_documents
        }
        self.checkpoint = settings.pass_checkpoint
        self.continues = self.checkpoint is not None and self.checkpoint.saved is not None

        self.prompts = self._read_prompts()
        self.progress = self._count_tokens()

    def _open_output(self, output: ModelUnderTest) -> None:
        """Open an output, which must be of the source's model."""
        with naming(output.name):
            model = StreamedModel(output.checkpoint, dtype=self.model.dtype, device=self.settings.device)
        require_one_model(self.source, self.model, output, model)
        self.measurements.routes.register_hooks(model.model)

        served = ServedModel(model, self.settings.kv_cache)
        self.outputs.append(OutputUnderTest(output, served, self.passes))

    def _read_prompts(self) -> Sequence[Prompt]:
        """Read the prompts that the models answer; none if they answer none."""
        settings = self.settings
        if settings.tokenizer is None or not settings.answers_prompts:
            return ()
        nbytes = max(self.model.nbytes, *(output.served.model.nbytes for output in self.outputs))
        return prompts_to_answer(settings.prompts, settings.tokenizer, nbytes, settings.answer_memory)

    def _count_tokens(self) -> PassProgress:
        """Make what tells of the progress, from the tokens of texts, tasks and answers."""
        text_tokens = self.passes * len(self.local_documents) * self.corpus.length
        if self.tasks is not None:
            text_tokens += self.tasks.models * sum(pack.ids.size for pack in self.tasks.packs)

        answer_tokens = 0
        if self.answers_prompts:
            answer_tokens = TOKENS * len(self.prompts) * (1 + len(self.outputs))

        resumed = frozenset() if self.checkpoint is None else self.checkpoint.done
        heads = (name for name, module in self.model.units.items() if module is self.model.head)
        units = [*self.model.layers, *heads]
        left = [unit for unit in units if unit not in resumed]
        return PassProgress(left, text_tokens, self.advanced, answer_tokens)

    @property
    def answers_prompts(self) -> bool:
        """Whether this process has the models answer prompts; of several only the first does."""
        return bool(self.prompts) and self.settings.ranks.first

    @property
    def passes(self) -> int:
        """Number of forward passes of each document: two of the source, and one or two of each output."""
        return self.outputs[-1].last + 1 if self.outputs else 2

    def description(self) -> str:
        """Say what is to be done: "16 documents of 512 tokens: code (8), docs (8); 4 passes"."""
        described = f"{self.corpus.described}; {self.passes} passes"
        if self.tasks is not None and self.settings.tasks is not None:
            questions = counted_questions(self.settings.tasks.tasks.questions)
            described += f"; {questions} of tasks, {self.tasks.tokens:,} tokens in {self.tasks.models} passes"
        if self.continues:
            described += "; an earlier run is continued"
        return described

    def run(self) -> Evaluation:
        """Run all passes of all documents, and return the figures."""
        models = [self.model, *(output.served.model for output in self.outputs)]
        with self.settings.streamed(models) as scratch, limited_threads(self.model, self.corpus.length):
            return self._run(scratch)

    def _run(self, scratch: OffloadFile | None) -> Evaluation:
        """Run all passes, and put the figures of all ranks together."""
        if self.checkpoint is not None:
            self._continue_from(self.checkpoint)

        passes = [self._passes_of(document) for document in self.local_documents]
        if self.tasks is not None:
            # Those of all packs of questions come after those of the texts.
            passes += [self.tasks.of_pack(number) for number in range(len(self.tasks.packs))]

        run_interleaved(
            passes,
            finished=self._take_logits,
            after_unit=self._after_unit,
            scratch=scratch,
            progress=self.progress.layer_done,
            checkpoint=self.checkpoint,
        )

        ranks = self.settings.ranks
        # The first rank has the figures of all.
        if ranks.size > 1:
            for data in ranks.gather(bytes(dump(self._state()))):
                self._merge(load(data))

        evaluation = self._evaluation() if ranks.first else None
        first = ranks.agree(None, evaluation and {**evaluation.to_json(), "notes": evaluation.notes})[0]
        return evaluation or Evaluation(first["source"], first["floor"], first["outputs"], tuple(first["notes"]))

    def _continue_from(self, checkpoint: PassCheckpoint) -> None:
        """Have the checkpoint save what is measured, and take what an earlier run saved."""
        noise = list(self.generators.values())
        checkpoint.extra = lambda: {**self._state(), "noise": [generator.get_state() for generator in noise]}
        if checkpoint.saved is None:
            return

        self._merge(checkpoint.saved)
        for generator, state in zip(noise, checkpoint.saved["noise"], strict=True):
            generator.set_state(state)

    def _state(self) -> dict[str, Any]:
        """Return what this process has measured, for `_merge`."""
        scores = None if self.tasks is None else self.tasks.scores.state()
        return {"measured": self.measurements.state(), "scores": scores}

    def _merge(self, state: Mapping[str, Any]) -> None:
        """Add what another process, or an interrupted one, has measured."""
        self.measurements.merge(state["measured"])
        if self.tasks is not None:
            self.tasks.scores.merge(state["scores"])

    def _evaluation(self) -> Evaluation:
        """Make the results of what is measured."""
        notes = []
        if self.settings.prompts is not None and not self.prompts:
            notes.append(
                "--prompts were not answered: a model takes more than half of the free memory, or more than "
                "--max-memory leaves"
            )

        evaluation = make_evaluation(self.measurements, self._answers(), notes)
        if self.tasks is not None and self.settings.tasks is not None:
            figures = evaluate_tasks(self.settings.tasks, self.tasks, self.settings.seed)
            for output, of_tasks in zip(evaluation.outputs, figures, strict=True):
                output["tasks"] = of_tasks
        return evaluation

    def _answers(self) -> list[list[dict[str, Any]]]:
        """Return the `texts` of each output: answers to prompts."""
        tokenizer = self.settings.tokenizer
        if tokenizer is None or not self.prompts:
            return [[] for _ in self.outputs]
        served = [output.served for output in self.outputs]
        answered = partial(self.progress.more_done, TOKENS)
        return compare_answers(self.model, served, tokenizer, self.prompts, answered)

    def _passes_of(self, document: int) -> list[ForwardPass[Tensor]]:
        """Return all passes of a document, by number."""
        ids = torch.tensor(self.corpus.documents[document].ids, device=self.settings.device)
        body = partial(self.model.logits, ids)
        noise = partial(self.noise.drawn_from, self.generators[document])
        passes = [ForwardPass(self.model, body), ForwardPass(self.model, body, noise)]
        for output in self.outputs:
            passes += output.served.passes(ids)
        return [
            ForwardPass(forward.model, forward.body, partial(self._compare_around, number, forward.around))
            for number, forward in enumerate(passes)
        ]

    @contextmanager
    def _compare_around(self, number: int, inner: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Count routes for a pass while one of its units is computed."""
        self.measurements.routes.pass_number = number
        try:
            with products_in_float32(self.settings.device), inner():
                yield
        finally:
            self.measurements.routes.pass_number = None

    def _after_unit(self, unit: str, group: int, number: int, hidden: Tensor) -> None:
        if group < len(self.local_documents) and unit in self.model.layers:
            self.measurements.distances.add(unit, number, hidden)

    def _take_logits(self, group: int, number: int, pass_logits: Tensor) -> None:
        if group >= len(self.local_documents):
            assert self.tasks is not None
            self.tasks.score(group - len(self.local_documents), number, pass_logits)
            return

        index = self.local_documents[group]

        if number == 0:
            self.source_logits = pass_logits
            return

        assert self.source_logits is not None
        document = self.corpus.documents[index]
        output = next((output for output in self.outputs if output.first <= number <= output.last), None)
        names = self.source.name, output.subject.name if output else f"{self.source.name} with noise"
        record = compare_logits(self.source_logits, pass_logits, document, names)
        self.measurements.records.setdefault(number, {})[index] = record

        if number + 1 == self.passes:
            self.source_logits = None


class RoundingNoise:
    """Adds bfloat16 rounding noise to the outputs of modules, while a context of `drawn_from` is entered.

    Args:
        modules: the decoder layers of a model. Their `forward` is replaced.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._generator: torch.Generator | None = None
        for module in modules:
            # Not a hook: hidden states must have the noise before other hooks compare them.
            module.forward = partial(self._add_noise, module.forward)

    @contextmanager
    def drawn_from(self, generator: torch.Generator) -> Iterator[None]:
        """Add noise while the context is entered.

        Args:
            generator: draws the noise, on the CPU. Give each pass its own: then its noise depends on the generator's
                seed alone, not on other passes.
        """
        self._generator = generator
        try:
            yield
        finally:
            self._generator = None

    def _add_noise(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if self._generator is None:
            return output
        if isinstance(output, tuple):
            return (stochastic_round(output[0], self._generator), *output[1:])
        return stochastic_round(output, self._generator)


def stochastic_round(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round values stochastically to bfloat16.

    A value between two bfloat16 numbers becomes either; the nearer it is to one, the more probable is that one. Values
    of dtype bfloat16 have been rounded already: each moves a step up with a probability of 1/8, and a step down with
    1/8. Zeros, infinities and NaN stay, and so do values that would become infinite.

    Args:
        values: any shape, any floating dtype.
        generator: torch's generator of the noise, on the CPU; the device of `values` does not matter.

    Returns:
        The rounded values, with the shape and dtype of `values`.
    """
    bits = values.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32).to(bits.device)
    if values.dtype == torch.bfloat16:
        rounded_off = torch.randint(-(1 << 15), 1 << 15, bits.shape, generator=generator, dtype=torch.int32)
        noise += rounded_off.to(bits.device)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    rounded_values = rounded.to(values.dtype)
    # A step below zero would be NaN, a step above the largest value infinity, and one above a NaN could be a number.
    valid = (values != 0) & values.isfinite() & rounded_values.isfinite()
    return torch.where(valid, rounded_values, values)
