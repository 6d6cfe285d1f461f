"""The evaluation: a source, itself with noise, and its outputs go side by side through all layers and all texts.

Every weight is read once. What is found of an output is a dictionary, which is its eval.json; docs/evaluation.md has
the keys.

    found = evaluate(Subject("Qwen3-8B", checkpoint), [Subject("Qwen3-8B-FP8", other)], corpus)
    found.outputs[0]["kl"]["mean"]      # 0.0031
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.corpus import Corpus
from ..data.prompts import Prompt
from ..errors import naming
from ..streaming import transformers_internals
from ..streaming.documents import documents_of_rank
from ..streaming.interleaved import ForwardPass, run_interleaved
from ..streaming.matmul import products_in_float32
from ..streaming.meta_model import REST
from ..streaming.model import StreamedModel, shards_by_unit
from ..streaming.progress import Advanced, PassProgress, Remaining, layer_costs
from ..streaming.torch_threads import limited_threads, threads_for
from .answers import compare_answers, prompts_to_answer
from .as_served import ServedModel, logits
from .gathering import pack_records, unpack_records
from .generate import TOKENS, continue_prompts, teacher_forced
from .kl import ModelNames, compare_logits
from .noise_floor import RoundingNoise
from .results import Evaluation, Findings, results
from .under_test import EvaluationSettings, ModelUnderTest, OutputUnderTest, require_one_model
from .weight_changes import compare_weights

# Of the vocabulary, what is computed to learn how long the output head and the comparison of logits take.
SOME_TOKENS = 2048
# Tokens that are written to learn how long answers take.
FIRST_TOKENS = 8


def compare_outputs(
    source: ModelUnderTest,
    outputs: Sequence[ModelUnderTest],
    corpus: Corpus,
    settings: EvaluationSettings | None = None,
    begun: Callable[[str], None] | None = None,
    progress: Advanced | None = None,
    remaining: Remaining | None = None,
) -> Evaluation:
    """Hold outputs against their source.

    Args:
        source: what they were made from, quantized or not.
        outputs: at least one.
        corpus: the texts.
        settings: how; the default is all that is needed.
        begun: told in a line what is to be done.
        progress: told how many tokens are computed, those that models write among them, and how many there are.
        remaining: told about how many seconds are left, from the first layer on.

    Raises:
        SourceError: a checkpoint cannot be read or run, or answers with NaN.
        UsageError: the checkpoints are not of one model.
        OutputError: hidden states found no room on disk.
    """
    evaluating = _Evaluating(source, outputs, corpus, settings or EvaluationSettings(), progress, remaining)
    if begun is not None:
        begun(evaluating.about())
    return evaluating.run()


class _Evaluating:
    """One call of `compare_outputs`."""

    def __init__(
        self,
        source: ModelUnderTest,
        outputs: Sequence[ModelUnderTest],
        corpus: Corpus,
        settings: EvaluationSettings,
        progress: Advanced | None,
        remaining: Remaining | None,
    ) -> None:
        self.source, self.corpus, self.settings = source, corpus, settings
        with naming(source.name):
            self.model = StreamedModel(source.checkpoint, device=settings.device)
        # Not with the noise's forward: models of outputs have none.
        self.layers = [
            name
            for name, module in self.model.units.items()
            if not isinstance(module, nn.Embedding)
            and module is not transformers_internals.output_head(self.model.model)
        ]
        self.mine = documents_of_rank(len(corpus.documents), settings.team)
        self.outputs: list[OutputUnderTest] = []
        self.found = Findings(source, self.model, self.outputs, corpus, settings)
        self.found.routes.watch(self.model.model)
        self.noise = RoundingNoise(self.model.units[name] for name in self.layers)
        for output in outputs:
            with naming(output.name):
                model = StreamedModel(output.checkpoint, dtype=self.model.dtype, device=settings.device)
            require_one_model(source, self.model, output, model)
            self.found.routes.watch(model.model)
            served = ServedModel(output.name, output.checkpoint, model, settings.kv_cache)
            self.outputs.append(OutputUnderTest(output, served, self.passes, 2 if served.rounds else 1))
        self.compared: set[tuple[str, int]] = set()
        # Of the first document, the tokens that each model finds most likely to come next, by pass.
        self.likely: dict[int, list[int]] = {}
        self.held: Tensor | None = None
        table = self.model.model.get_input_embeddings()
        self.vocabulary = int(getattr(table, "num_embeddings", 0))
        self.prompts: Sequence[Prompt] = ()
        if settings.tokenizer is not None and settings.again:
            size = max(self.model.nbytes, *(each.served.model.nbytes for each in self.outputs))
            self.prompts = prompts_to_answer(
                settings.prompts, settings.tokenizer, self.vocabulary, size, settings.answering
            )
        tokens = self.passes * len(self.mine) * corpus.length
        more = TOKENS * len(self.prompts) * (1 + len(self.outputs)) if self.answers_here else 0
        costs = layer_costs(self.model, [*self.layers, *self.head])
        self.counted = PassProgress(costs, tokens, progress, remaining, more)

    @property
    def head(self) -> list[str]:
        """The output head's name, if there is one."""
        head = transformers_internals.output_head(self.model.model)
        return [name for name, module in self.model.units.items() if module is head]

    @property
    def answers_here(self) -> bool:
        """Whether this process has models answer."""
        return bool(self.prompts) and (self.settings.team is None or self.settings.team.rank == 0)

    @property
    def passes(self) -> int:
        """How often a document goes through a model; twice through the source, with noise and without."""
        return self.outputs[-1].last + 1 if self.outputs else 2

    def about(self) -> str:
        """What is to be done: "16 documents of 512 tokens: code (8), docs (8); 4 passes"."""
        return f"{self.corpus.described}; {self.passes} passes"

    def run(self) -> Evaluation:
        """What is found once all texts are through, the same in all processes that share them."""
        with self._supplied(), limited_threads(threads_for(self.model, self.corpus.length)):
            return self._run()

    @contextmanager
    def _supplied(self) -> Iterator[None]:
        """Have shards come meanwhile."""
        if self.settings.supply is None:
            yield
            return
        wanted = [shards_by_unit(self.model), *(output.needs for output in self.outputs)]
        with self.settings.supply(wanted) as ways:
            models = self.model, *(output.served.model for output in self.outputs)
            for model, traffic in zip(models, ways, strict=True):
                model.shard_provider = traffic
            yield

    def _measure_the_end(self) -> None:
        """Learn how long what comes after the layers takes, from a part of it."""
        for name in self.head:
            self.counted.forecast.expect(name, len(self.mine) * self._seconds_of_head())
        if self.answers_here:
            plain = partial(products_in_float32, self.settings.device)
            self.counted.forecast.expect("answers 0", self._seconds_of_answers(self.model, plain))
            for number, output in enumerate(self.outputs, 1):
                served = output.served
                seconds = self._seconds_of_answers(served.model, served.around, served.cache)
                self.counted.forecast.expect(f"answers {number}", seconds)
                # What that rounded is no part of the texts.
                served.clipped.clear()

    def _seconds_of_head(self) -> float:
        """About how long all models' logits of a document and their comparison take."""
        table = self.model.model.get_input_embeddings().weight
        some = min(SOME_TOKENS, self.vocabulary)
        hidden = torch.ones(self.corpus.length, table.shape[1], dtype=table.dtype, device=table.device)
        rows = torch.ones(some, table.shape[1], dtype=table.dtype, device=table.device)
        ids = torch.zeros(self.corpus.length, dtype=torch.int64)
        names = ModelNames("the source", "an output")
        seconds = []
        with torch.inference_mode(), products_in_float32(self.settings.device):
            # The first time is longer.
            for _ in range(2):
                begin = time.perf_counter()
                found = functional.linear(hidden, rows)
                between = time.perf_counter()
                compare_logits(found, found, ids, "", "", names)
                seconds.append(self.passes * (between - begin) + (self.passes - 1) * (time.perf_counter() - between))
        return seconds[-1] * self.vocabulary / some

    def _seconds_of_answers(
        self,
        model: StreamedModel,
        around: Callable[[], AbstractContextManager[Any]],
        cache: Callable[[], Any] = lambda: None,
    ) -> float:
        """About how long a model takes to be loaded as a whole and to answer all prompts.

        Args:
            model: the model.
            around: what it is computed in, such as activations rounded.
            cache: makes what keys and values are kept in.
        """
        first = self.prompts[0]
        one = replace(first, ids=first.ids[:1])
        times = [time.perf_counter()]
        continue_prompts(
            model,
            [one, one, first],
            (),
            FIRST_TOKENS,
            around=around,
            cache=cache,
            progress=lambda _: times.append(time.perf_counter()),
        )
        loaded, written, all_read = (after - before for before, after in itertools.pairwise(times))
        reading = max(0.0, all_read - written) / len(first.ids)
        tokens = sum(len(prompt.ids) for prompt in self.prompts)
        return max(0.0, loaded - written) + reading * tokens + written * TOKENS / FIRST_TOKENS * len(self.prompts)

    def _run(self) -> Evaluation:
        self._measure_the_end()
        run_interleaved(
            [self._group(number) for number in self.mine],
            finished=self._finished,
            after_unit=self._after_unit,
            scratch=self.settings.scratch,
            progress=self.counted.layer_done,
        )
        team = self.settings.team
        if team is None:
            return self._results()
        for data in team.gather(pack_records(self.found.records, self.found.counts())):
            self.found.add(*unpack_records(data, self.corpus.documents))
        found = self._results() if team.rank == 0 else None
        told = team.agree(None, found and {**found.to_json(), "notes": found.notes})[0]
        return found or Evaluation(told["source"], told["floor"], told["outputs"], tuple(told["notes"]))

    def _results(self) -> Evaluation:
        notes = []
        if self.settings.prompts is not None and not self.prompts:
            notes.append(
                "--prompts were not answered: a model takes more than half of the free memory, or more than "
                "--max-memory leaves"
            )
        notes += [
            f"{output.of.name}: its weights are folded, and were not held against the source's one by one; openquant "
            "verify --source --full does that"
            for output in self.outputs
            if output.folded
        ]
        return results(self.found, self._answers(), notes)

    def _answers(self) -> list[list[dict[str, Any]]]:
        """What models answer, for each output beside the source's; along a text where that would take too long."""
        tokenizer = self.settings.tokenizer
        if tokenizer is None:
            return [[] for _ in self.outputs]
        if self.prompts:
            served = [output.served for output in self.outputs]
            return compare_answers(self.model, self.source.checkpoint, served, tokenizer, self.prompts, self._answered)
        ids = self.corpus.documents[0].ids
        return [[teacher_forced(ids, self.likely[0], self.likely[output.last], tokenizer)] for output in self.outputs]

    def _answered(self, model: int, prompt: int) -> None:
        if prompt == len(self.prompts):
            self.counted.forecast.done(f"answers {model}")
        self.counted.more_done(TOKENS)

    def _group(self, number: int) -> list[ForwardPass[Tensor]]:
        ids = torch.tensor(self.corpus.documents[number].ids, device=self.settings.device)
        noisy = self.noise.source(self.settings.seed * 1_000_003 + number)
        passes = [ForwardPass(self.model, lambda: logits(self.model, ids)) for _ in range(2)]
        passes[1] = ForwardPass(self.model, passes[1].body, noisy)
        for output in self.outputs:
            passes += output.served.passes(ids)
        return [ForwardPass(each.model, each.body, self._around(at, each.around)) for at, each in enumerate(passes)]

    def _around(
        self, number: int, inner: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[Any]]:
        @contextmanager
        def around() -> Iterator[None]:
            self.found.routes.number = number
            try:
                with products_in_float32(self.settings.device), inner():
                    yield
            finally:
                self.found.routes.number = None

        return around

    def _after_unit(self, unit: str, group: int, number: int, hidden: Tensor) -> None:
        if unit in self.layers:
            self.found.distances.add(unit, number, hidden)
        if self.mine[group] == 0:
            self._compare_weights(unit, number)

    def _compare_weights(self, unit: str, number: int) -> None:
        """Hold an output's weights of a unit against the source's, while both are loaded."""
        output = next((each for each in self.outputs if each.first == number), None)
        # Of a folded one each weight is another, and what rounding explains cannot be told by it alone.
        if output is None or (unit, number) in self.compared or output.folded:
            return
        self.compared.add((unit, number))
        models = self.model, output.served.model
        mine, theirs = (model.model for model in models)

        def between() -> None:
            for model in models:
                model.release_pages()

        for name, parameter in mine.named_parameters():
            if self.model.unit_of(name) != unit:
                continue
            owner, _, last = name.rpartition(".")
            other = getattr(theirs.get_submodule(owner), last)
            module = name.removesuffix(".weight")
            weight = output.served.model.quantized.get(module)
            form = None if weight is None else weight.format
            if form is None or parameter.ndim == 2:
                output.changes.append(compare_weights(module, parameter, other, form, between=between))
                continue
            transposed = bool(getattr(mine.get_submodule(owner), "is_transposed", False))
            output.changes += [
                compare_weights(f"{module}[{expert}]", before, after, form, transposed)
                for expert, (before, after) in enumerate(zip(parameter, other, strict=True))
            ]

    def _finished(self, group: int, number: int, found: Tensor) -> None:
        at = self.mine[group]
        if at == 0:
            self._compare_weights(REST, number)
            self.likely[number] = found.argmax(-1).tolist()
        if number == 0:
            self.held = found
            return
        assert self.held is not None
        document, ids = self.corpus.documents[at], torch.tensor(self.corpus.documents[at].ids)
        output = next((each for each in self.outputs if each.first <= number <= each.last), None)
        names = ModelNames(self.source.name, output.of.name if output else f"{self.source.name} with noise")
        record = compare_logits(self.held, found, ids, document.domain, document.name, names)
        self.found.records.setdefault(number, {})[at] = record
        if number + 1 == self.passes:
            self.held = None
