"""The evaluation: a source, itself with noise, and its outputs go side by side through all layers and all texts.

Every weight is read once. What is found of an output is a dictionary, which is its eval.json; docs/evaluation.md has
the keys.

    found = evaluate(Subject("Qwen3-8B", checkpoint), [Subject("Qwen3-8B-FP8", other)], corpus)
    found.outputs[0]["kl"]["mean"]      # 0.0031
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..forward import library
from ..forward.parallel import limited_threads, threads_for
from ..forward.products import products_in_float32
from ..forward.skeleton import REST
from ..forward.streamed import StreamedModel
from ..forward.suspended import Pass, run
from ..texts.corpus import Corpus
from ..texts.prompts import Prompt
from .answers import answers, asked
from .changes import compare_weights
from .fidelity import Names, compare
from .generate import along
from .noise import Noise
from .results import Evaluation, Findings, results
from .served import Served, logits
from .shares import packed, share, unpacked
from .subjects import Output, Settings, Subject, naming, needs, require_one_model
from .work import Work, spoken

# Told how many steps are done, and how many there are.
Progress = Callable[[int, int], None]


def evaluate(
    source: Subject,
    outputs: Sequence[Subject],
    corpus: Corpus,
    settings: Settings | None = None,
    begun: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Hold outputs against their source.

    Args:
        source: what they were made from, quantized or not.
        outputs: at least one.
        corpus: the texts.
        settings: how; the default is all that is needed.
        begun: told in a line what is to be done and how long it may take.
        progress: told how far it is.

    Raises:
        SourceError: a checkpoint cannot be read or run, or answers with NaN.
        UsageError: the checkpoints are not of one model.
        OutputError: hidden states found no room on disk.
    """
    evaluating = _Evaluating(source, outputs, corpus, settings or Settings(), progress)
    if begun is not None:
        begun(evaluating.about())
    return evaluating.run()


class _Evaluating:
    """One call of `evaluate`."""

    def __init__(
        self,
        source: Subject,
        outputs: Sequence[Subject],
        corpus: Corpus,
        settings: Settings,
        progress: Progress | None,
    ) -> None:
        self.source, self.corpus, self.settings, self.progress = source, corpus, settings, progress
        with naming(source):
            self.model = StreamedModel(source.checkpoint, device=settings.device)
        # Not with the noise's forward: models of outputs have none.
        self.layers = [
            name
            for name, module in self.model.units.items()
            if not isinstance(module, nn.Embedding) and module is not library.output_head(self.model.model)
        ]
        self.mine = share(len(corpus.documents), settings.team)
        self.outputs: list[Output] = []
        self.found = Findings(source, self.model, self.outputs, corpus, settings)
        self.found.routes.watch(self.model.model)
        self.noise = Noise(self.model.units[name] for name in self.layers)
        for output in outputs:
            with naming(output):
                model = StreamedModel(output.checkpoint, dtype=self.model.dtype, device=settings.device)
            require_one_model(source, self.model, output, model)
            self.found.routes.watch(model.model)
            served = Served(output.name, output.checkpoint, model, settings.kv_cache)
            self.outputs.append(Output(output, served, self.passes, 2 if served.rounds else 1))
        self.compared: set[tuple[str, int]] = set()
        # Of the first document, the tokens that each model finds most likely to come next, by pass.
        self.likely: dict[int, list[int]] = {}
        self.held: Tensor | None = None
        self.steps = 0
        table = self.model.model.get_input_embeddings()
        self.vocabulary = int(getattr(table, "num_embeddings", 0))
        self.prompts: Sequence[Prompt] = ()
        if settings.tokenizer is not None and settings.again:
            size = max(self.model.nbytes, *(each.served.model.nbytes for each in self.outputs))
            self.prompts = asked(settings.prompts, settings.tokenizer, self.vocabulary, size)

    @property
    def passes(self) -> int:
        """How often a document goes through a model; twice through the source, with noise and without."""
        return self.outputs[-1].last + 1 if self.outputs else 2

    def about(self) -> str:
        """What is to be done, and how long it may take: "16 documents of 512 tokens: .., 4 passes, about 5 minutes"."""
        work = Work(self.model.nbytes, self.model.dtype.itemsize, self.vocabulary, self.passes, len(self.outputs))
        took = work.seconds(len(self.mine) * self.corpus.length, self.settings.device)
        return f"{self.corpus.described}; {self.passes} passes, about {spoken(took)}"

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
        wanted = [needs(self.model), *(output.needs for output in self.outputs)]
        with self.settings.supply(wanted) as ways:
            models = self.model, *(output.served.model for output in self.outputs)
            for model, traffic in zip(models, ways, strict=True):
                model.traffic = traffic
            yield

    def _run(self) -> Evaluation:
        run(
            [self._group(number) for number in self.mine],
            finished=self._finished,
            after_unit=self._after_unit,
            scratch=self.settings.scratch,
            progress=self._advanced,
        )
        team = self.settings.team
        if team is None:
            return self._results()
        for data in team.gather(packed(self.found.records, self.found.counts())):
            self.found.add(*unpacked(data, self.corpus.documents))
        found = self._results() if team.rank == 0 else None
        told = team.agree(None, found and {**found.to_json(), "notes": found.notes})[0]
        return found or Evaluation(told["source"], told["floor"], told["outputs"], tuple(told["notes"]))

    def _results(self) -> Evaluation:
        notes = []
        if self.settings.prompts is not None and not self.prompts:
            notes.append("--prompts were not answered: a model takes more than half of the free memory")
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
            return answers(self.model, self.source.checkpoint, served, tokenizer, self.prompts)
        ids = self.corpus.documents[0].ids
        return [[along(ids, self.likely[0], self.likely[output.last], tokenizer)] for output in self.outputs]

    def _group(self, number: int) -> list[Pass[Tensor]]:
        ids = torch.tensor(self.corpus.documents[number].ids, device=self.settings.device)
        noisy = self.noise.source(self.settings.seed * 1_000_003 + number)
        passes = [Pass(self.model, lambda: logits(self.model, ids)) for _ in range(2)]
        passes[1] = Pass(self.model, passes[1].body, noisy)
        for output in self.outputs:
            passes += output.served.passes(ids)
        return [Pass(each.model, each.body, self._around(at, each.around)) for at, each in enumerate(passes)]

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
                model.rest()

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
        names = Names(self.source.name, output.of.name if output else f"{self.source.name} with noise")
        record = compare(self.held, found, ids, document.domain, document.name, names)
        self.found.records.setdefault(number, {})[at] = record
        if number + 1 == self.passes:
            self.held = None

    def _advanced(self, unit: str, done: int, total: int) -> None:
        del unit, done
        self.steps += 1
        if self.progress is not None:
            # Of a model's own bytes, which is what bars show: each unit of it is as large as any other.
            share = min(1.0, self.steps / (total * len(self.model.units)))
            self.progress(int(share * self.model.nbytes), self.model.nbytes)
