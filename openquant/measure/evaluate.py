"""The evaluation: a source, itself with noise, and its outputs go side by side through all layers and all texts.

Every weight is read once. What is found of an output is a dictionary, which is its eval.json; docs/evaluation.md has
the keys.

    found = evaluate(Subject("Qwen3-8B", checkpoint), [Subject("Qwen3-8B-FP8", other)], corpus)
    found.outputs[0]["kl"]["mean"]      # 0.0031
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ..errors import SourceError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.fingerprint import fingerprint
from ..version import __version__
from . import library
from .answers import answers, asked
from .changes import Change, compare_weights
from .fidelity import EDGES, Names, Record, compare, histogram, summary
from .forward import Pass, StreamedModel, run
from .generate import along
from .noise import Noise
from .products import products_in_float32
from .prompts import Prompt
from .scratch import Scratch
from .served import Served, logits
from .shares import Team, packed, share, unpacked
from .skeleton import REST
from .tallies import Distances, Routes
from .texts import Corpus
from .tokenizer import Tokenizer
from .verdict import (
    BROKEN,
    Layer,
    Suspect,
    suspects_by_config,
    suspects_by_layers,
    suspects_by_weights,
    word,
)
from .work import Work, spoken

# Told how many steps are done, and how many there are.
Progress = Callable[[int, int], None]
# Settings that say nothing of what a model computes.
_TOLD = frozenset(
    ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path", "model_type",
     "initializer_range", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "return_dict",
     "output_attentions", "output_hidden_states", "attention_dropout", "chunk_size_feed_forward", "id2label",
     "label2id", "problem_type", "is_encoder_decoder", "max_position_embeddings", "finetuning_task")
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A checkpoint to be evaluated, or its source.

    Attributes:
        name: what it is called, for people.
        checkpoint: what it holds.
        path: where a shard lies; in the checkpoint's directory if None.
        tokenizer: in what its tokenizer does something else than the source's, such as "the chat template".
    """

    name: str
    checkpoint: Checkpoint
    path: Callable[[str], Path] | None = None
    tokenizer: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of its tensors."""
        return sum(info.nbytes for info in self.checkpoint.tensors.values())


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    Attributes:
        seed: of the noise and of the bootstrap.
        kv_cache: "fp8", or "auto" for what an output's config says.
        device: of torch.
        scratch: where hidden states go beyond a budget; None for nowhere.
        tokenizer: the source's, to show what models answer to prompts; None to have none.
        prompts: a file of them; built-in ones if None.
        team: the processes that share the documents; None for this one alone.
    """

    seed: int = 0
    kv_cache: str = "auto"
    device: str = "cpu"
    scratch: Scratch | None = None
    tokenizer: Tokenizer | None = None
    prompts: str | os.PathLike[str] | None = None
    team: Team | None = None


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        source: its name and digest.
        floor: figures of the source beside itself with noise.
        outputs: what was found of each, as its eval.json has it.
        notes: what people should know of it.
    """

    source: dict[str, Any]
    floor: dict[str, Any]
    outputs: list[dict[str, Any]]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"source": self.source, "floor": self.floor, "outputs": self.outputs}


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


@dataclass
class _Subject:
    """An output, and what is found of it as texts go through."""

    of: Subject
    served: Served
    first: int
    passes: int
    changes: list[Change] = field(default_factory=list)


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
        with _naming(source):
            self.model = StreamedModel(source.checkpoint, device=settings.device, path=source.path)
        # Not with the noise's forward: models of outputs have none.
        self.layers = [
            name
            for name, module in self.model.units.items()
            if not isinstance(module, nn.Embedding) and module is not library.output_head(self.model.model)
        ]
        self.mine = share(len(corpus.documents), settings.team)
        self.distances, self.routes = Distances(), Routes()
        self.routes.watch(self.model.model)
        self.noise = Noise(self.model.units[name] for name in self.layers)
        # Of each pass but the source's own, by the document's number.
        self.records: dict[int, dict[int, Record]] = {}
        self.outputs: list[_Subject] = []
        number = 2
        for output in outputs:
            with _naming(output):
                model = StreamedModel(
                    output.checkpoint, dtype=self.model.dtype, device=settings.device, path=output.path
                )
            _require_one_model(source, self.model, output, model)
            self.routes.watch(model.model)
            served = Served(output.name, output.checkpoint, model, settings.kv_cache, output.path)
            passes = 2 if served.rounds else 1
            self.outputs.append(_Subject(output, served, number, passes))
            number += passes
        self.compared: set[tuple[str, int]] = set()
        # Of the first document, the tokens that each model finds most likely to come next, by pass.
        self.likely: dict[int, list[int]] = {}
        self.held: Tensor | None = None
        self.steps = 0
        table = self.model.model.get_input_embeddings()
        self.vocabulary = int(getattr(table, "num_embeddings", 0))
        self.prompts: Sequence[Prompt] = ()
        if settings.tokenizer is not None:
            size = max(self.model.nbytes, *(each.served.model.nbytes for each in self.outputs))
            self.prompts = asked(settings.prompts, settings.tokenizer, self.vocabulary, size)

    def about(self) -> str:
        """What is to be done, and how long it may take: "16 documents of 512 tokens: .., 4 passes, about 5 minutes"."""
        passes = self.outputs[-1].first + self.outputs[-1].passes
        work = Work(self.model.nbytes, self.model.dtype.itemsize, self.vocabulary, passes, len(self.outputs))
        took = work.seconds(len(self.mine) * self.corpus.length, self.settings.device)
        return f"{self.corpus.described}; {passes} passes, about {spoken(took)}"

    def run(self) -> Evaluation:
        """What is found once all texts are through, the same in all processes that share them."""
        run(
            [self._group(number) for number in self.mine],
            finished=self._finished,
            after_unit=self._after_unit,
            scratch=self.settings.scratch,
            progress=self._advanced,
        )
        team = self.settings.team
        if team is None:
            return self._results(self._answers())
        for data in team.gather(packed(self.records, self._counts())):
            self._add(*unpacked(data, self.corpus.documents))
        found = self._results(self._answers()) if team.rank == 0 else None
        told = team.agree(None, found and {**found.to_json(), "notes": found.notes})[0]
        return found or Evaluation(told["source"], told["floor"], told["outputs"], tuple(told["notes"]))

    def _counts(self) -> dict[str, Any]:
        """What was counted of this process's documents."""
        return {
            "distances": self.distances.counts(),
            "routes": self.routes.counts(),
            "clipped": [output.served.clipped.counts() for output in self.outputs],
        }

    def _add(self, records: Mapping[int, Mapping[int, Record]], counts: Mapping[str, Any]) -> None:
        """Add what another process found of its documents."""
        for number, found in records.items():
            self.records[number].update(found)
        self.distances.add_counts(counts["distances"])
        self.routes.add_counts(counts["routes"])
        for output, clipped in zip(self.outputs, counts["clipped"], strict=True):
            output.served.clipped.add_counts(clipped)

    def _records(self, number: int) -> list[Record]:
        """The records of a pass, in the order of the documents."""
        return [record for _, record in sorted(self.records[number].items(), key=lambda each: each[0])]

    def _answers(self) -> list[list[dict[str, Any]]]:
        """What models answer, for each output beside the source's; along a text where that would take too long."""
        tokenizer = self.settings.tokenizer
        if tokenizer is None:
            return [[] for _ in self.outputs]
        if self.prompts:
            served = [output.served for output in self.outputs]
            return answers(self.model, self.source.checkpoint, served, tokenizer, self.prompts)
        ids, last = self.corpus.documents[0].ids, [output.first + output.passes - 1 for output in self.outputs]
        return [[along(ids, self.likely[0], self.likely[number], tokenizer)] for number in last]

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
            self.routes.number = number
            with products_in_float32(self.settings.device), inner():
                yield

        return around

    def _after_unit(self, unit: str, group: int, number: int, hidden: Tensor) -> None:
        if unit in self.layers:
            self.distances.add(unit, number, hidden)
        if self.mine[group] == 0:
            self._compare_weights(unit, number)

    def _compare_weights(self, unit: str, number: int) -> None:
        """Hold an output's weights of a unit against the source's, while both are loaded."""
        output = next((each for each in self.outputs if each.first == number), None)
        if output is None or (unit, number) in self.compared:
            return
        self.compared.add((unit, number))
        models = self.model, output.served.model
        mine, theirs = (model.model for model in models)

        def between() -> None:
            for model in models:
                model.rest()

        for name, parameter in mine.named_parameters():
            if _unit_of(self.model, name) != unit:
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
        output = next((each for each in self.outputs if each.first <= number < each.first + each.passes), None)
        names = Names(self.source.name, output.of.name if output else f"{self.source.name} with noise")
        record = compare(self.held, found, ids, document.domain, document.name, names)
        self.records.setdefault(number, {})[at] = record
        if number + 1 == (self.outputs[-1].first + self.outputs[-1].passes):
            self.held = None

    def _advanced(self, unit: str, done: int, total: int) -> None:
        del unit, done
        self.steps += 1
        if self.progress is not None:
            # Of a model's own bytes, which is what bars show: each unit of it is as large as any other.
            share = min(1.0, self.steps / (total * len(self.model.units)))
            self.progress(int(share * self.model.nbytes), self.model.nbytes)

    def _results(self, texts: Sequence[list[dict[str, Any]]]) -> Evaluation:
        floor = _brief(self._records(1), self.settings.seed)
        source = {"name": self.source.name, "digest": fingerprint(self.source.checkpoint)}
        common = {
            "floor": floor,
            "text": self.corpus.account,
            "versions": _versions(),
            "seed": self.settings.seed,
            "device": self.settings.device,
            "source": source,
        }
        outputs = [
            {**self._result(output, floor), "texts": shown, **common}
            for output, shown in zip(self.outputs, texts, strict=True)
        ]
        notes = [*self.corpus.notes, *(note for output in self.outputs for note in output.served.notes)]
        if self.settings.prompts is not None and not self.prompts:
            notes.append("--prompts were not answered: a model takes more than half of the free memory")
        return Evaluation(source, floor, outputs, tuple(dict.fromkeys(notes)))

    def _result(self, output: _Subject, floor: Mapping[str, Any]) -> dict[str, Any]:
        weights, full = (self._records(number) for number in (output.first, output.first + output.passes - 1))
        figures = summary(full, self.settings.seed)
        # Not those of towers, which no text goes through.
        layers = [self._layer(name, output) for name in self.distances.layers]
        suspects = [
            *self._by_files(output),
            *suspects_by_weights(output.changes, output.served.kept),
            *suspects_by_layers(layers),
        ]
        verdict = word(figures["kl"]["mean"], floor["kl"])
        if output.of.tokenizer:
            verdict = "broken"
        alone = _brief(weights, self.settings.seed)
        errors = [change.error for change in output.changes if change.quantized]
        return {
            **figures,
            "kl_histogram": {"edges": list(EDGES), "output": histogram(full), "floor": histogram(self._records(1))},
            "weights_only": alone,
            "weight_error": statistics.median(errors) if errors else 0.0,
            "kv_cache": "fp8" if output.served.cached else "auto",
            "layers": [_layer_json(layer) for layer in layers],
            "verdict": verdict,
            "reasons": _reasons(figures, floor, suspects),
            "suspects": list(dict.fromkeys(suspect.layer for suspect in suspects)),
            "sizes": {"source": self.source.nbytes, "output": output.of.nbytes},
            "output": {"name": output.of.name, "digest": fingerprint(output.of.checkpoint)},
        }

    def _layer(self, name: str, output: _Subject) -> Layer:
        number = output.first + output.passes - 1
        last = name.rpartition(".")[2]

        def inside(place: str | int) -> bool:
            return str(place) == last if isinstance(place, int) else place.startswith(f"{name}.")

        return Layer(
            name,
            self.distances.of(name, number),
            self.distances.of(name, 1),
            self.routes.of(name, number),
            output.served.clipped.share(inside),
        )

    def _by_files(self, output: _Subject) -> list[Suspect]:
        mine, theirs = (_config_of(model) for model in (self.model, output.served.model))
        tokenizer = [Suspect("tokenizer", f"it has another answer for {what}") for what in output.of.tokenizer]
        return [*tokenizer, *suspects_by_config(mine, theirs)]


def _unit_of(model: StreamedModel, name: str) -> str:
    """The unit that a parameter belongs to; REST outside of all."""
    while name and name not in model.units:
        name = name.rpartition(".")[0]
    return name or REST


def _config_of(model: StreamedModel) -> dict[str, Any]:
    """What a model's configuration says of what it computes, flat: {"rope_parameters.rope_theta": 10000.0, ...}."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in _TOLD:
                    walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            found[prefix] = value

    walk("", model.model.config.to_dict())
    return found


@contextmanager
def _naming(subject: Subject) -> Iterator[None]:
    """Say of which of several checkpoints a config.json or a weight cannot be run."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{subject.name}: {error.message}", error.hint) from error


def _require_one_model(source: Subject, mine: StreamedModel, output: Subject, theirs: StreamedModel) -> None:
    """Refuse what cannot be held against one another.

    Raises:
        UsageError: classes, layers or vocabularies differ.
    """
    facts = []
    for model in (mine, theirs):
        table = model.model.get_input_embeddings()
        size = getattr(table, "num_embeddings", None)
        layers = sum(not isinstance(module, nn.Embedding) for module in model.units.values())
        facts.append((type(model.model).__name__, f"{size} tokens", f"{layers} layers"))
    for before, after in zip(*facts, strict=True):
        if before != after:
            raise UsageError(
                f"{output.name} has {after}, {source.name} has {before}", "name the model that it was made from"
            )


def _brief(records: Sequence[Record], seed: int) -> dict[str, Any]:
    """The figures of what stands beside others."""
    found = summary(records, seed)
    return {
        "kl": found["kl"]["mean"],
        **{name: found["kl"][name] for name in ("interval", "median", "p90", "p99", "p999", "max", "share_above_0.1")},
        "top1": found["top1"],
        "top5": found["top5"],
        "perplexity": found["perplexity"]["output"],
        "rms_dp": found["rms_dp"],
    }


def _layer_json(layer: Layer) -> dict[str, Any]:
    found = {"layer": layer.name, "distance": layer.distance, "floor": layer.floor}
    return found if layer.routed_otherwise is None else {**found, "routed_otherwise": layer.routed_otherwise}


def _reasons(figures: Mapping[str, Any], floor: Mapping[str, Any], suspects: Sequence[Suspect]) -> list[str]:
    kl, ratio = figures["kl"]["mean"], figures["perplexity"]["ratio"]
    times = f", {kl / floor['kl']:.3g} times the floor" if floor["kl"] else ""
    beyond = " (broken is more than 0.5)" if kl > BROKEN else ""
    return [
        f"mean KL {kl:.3g} nats{times}{beyond}",
        f"the most probable token is the same at {100 * figures['top1']:.2f} % of positions, "
        f"at {100 * floor['top1']:.2f} % with the floor's noise",
        f"perplexity is {ratio:.4g} times the source's",
        *(f"{suspect.layer}: {suspect.why}" for suspect in suspects),
    ]


def _versions() -> dict[str, str]:
    return {
        "openquant": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
