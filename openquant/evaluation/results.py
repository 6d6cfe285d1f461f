"""Builds the results of an evaluation, as eval.json and `--json` have them; docs/figures.md explains the keys.

    make_evaluation(measurements, texts).outputs[0]["kl"]["mean"]      # 0.0031

Distances of hidden states and routes of tokens are counted by layer and pass; those of several processes add up. The
results do not depend on the order of documents or on the number of processes: counts are integers, and distances are
kept for each document and summed exactly (math.fsum).

What is measured so far is stored in a pass checkpoint, and sent to the first of several processes. A pass checkpoint
has the layers that all texts are through, and nothing of logits: passes are saved before the output head.

    checkpoint.extra = measurements.state
    measurements.merge(checkpoint.saved)

The models under test, and the settings of an evaluation.

source, output = ModelUnderTest("Qwen3-8B", checkpoint), ModelUnderTest("Qwen3-8B-FP8", quantized_checkpoint)
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ..data.corpus import Corpus
from ..data.tokenizer import Tokenizer
from ..distributed import Ranks
from ..errors import SourceError, UsageError
from ..files.checkpoint import Checkpoint, Fingerprint
from ..streaming.interleaved import holds_experts
from ..streaming.memory import vocabulary_of
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..version import __version__
from .as_served import ServedModel, ShareCount
from .kl import EDGES, DocumentRecord, kl_histogram, summarize
from .task_passes import TaskRequests
from .verdict import CHANGED, ENOUGH_TEXTS, LayerFigures, OutputEvaluation, Suspect, suspects_by_layers, verdict_word

# A model with this share of its vocabulary as perplexity guesses. One that was trained is far from it.
GUESSED = 0.5


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        source: name, digest and stamp of the source.
        floor: figures of the noise floor: the source compared with itself plus rounding noise.
        outputs: the eval.json of each output.
        notes: remarks for the user, such as that prompts were not answered.
        written: the files that hold the results; none in ranks other than the first.
    """

    source: dict[str, str]
    floor: dict[str, Any]
    outputs: list[OutputEvaluation]
    notes: tuple[str, ...] = ()
    written: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {"source": self.source, "floor": self.floor, "outputs": self.outputs}


class HiddenStateDistances:
    """Relative distances of hidden states from the source's, ||h' - h|| / ||h||, averaged over all tokens.

    Attributes:
        sums: by layer and pass, the sum over tokens and the number of tokens of each document.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._source: Tensor | None = None

    @property
    def layers(self) -> list[str]:
        """Names of the decoder layers, in the order in which they run."""
        return list(dict.fromkeys(layer for layer, _ in self.sums))

    def add(self, layer: str, number: int, hidden: Tensor) -> None:
        """Add the hidden states of one document after a layer.

        Args:
            layer: name of the layer.
            number: number of the pass. Pass 0 is the source's; it must come first for each layer and document.
            hidden: hidden states [..., hidden], any floating dtype.
        """
        states = hidden.reshape(-1, hidden.shape[-1]).float()
        if number == 0:
            self._source = states
            return
        assert self._source is not None
        norms = self._source.norm(dim=-1)
        distances = (states - self._source).norm(dim=-1) / norms.clamp(min=torch.finfo(torch.float32).tiny)
        self.merge({(layer, number): [(float(distances.double().sum()), len(distances))]})

    def merge(self, sums: Mapping[tuple[str, int], Sequence[tuple[float, int]]]) -> None:
        """Add the `sums` of another process."""
        for key, of_documents in sums.items():
            self.sums.setdefault(key, []).extend(of_documents)

    def mean(self, layer: str, number: int) -> float:
        """Return the mean relative distance of all tokens after a layer in a pass.

        Args:
            layer: name of the layer.
            number: number of the pass, from 1; the source's has no distances.

        Raises:
            KeyError: no document went through that layer in that pass.
        """
        of_documents = self.sums[layer, number]
        return math.fsum(total for total, _ in of_documents) / sum(tokens for _, tokens in of_documents)


def _expert_choice(
    module: Any, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
) -> Tensor:
    """Return [tokens, ...], rows that are equal if two passes send a token to the same experts.

    The parameters are those of the forward of transformers' modules of stacked experts.
    """
    del top_k_weights
    if top_k_index is not None:
        return top_k_index.sort(-1).values
    # Llama 4 passes all tokens to every expert, as zeros to those that were not chosen.
    return hidden_states.view(module.num_experts, -1, hidden_states.shape[-1]).any(-1).T


class RouteCounts(ShareCount):
    """Counts tokens that are routed to other experts than in the source, by module and pass.

    Attributes:
        pass_number: number of the pass that runs now, set by the caller. Pass 0 is the source's and must come first.
            None if nothing is to be counted, such as while prompts are answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pass_number: int | None = None
        self._source: dict[str, Tensor] = {}

    def register_hooks(self, model: nn.Module) -> None:
        """Register hooks on all modules of stacked experts of a model."""
        for name, module in model.named_modules():
            if holds_experts(module):
                module.register_forward_pre_hook(partial(self._count_routes, name), with_kwargs=True)

    def _count_routes(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.pass_number is None:
            return
        experts = _expert_choice(module, *args, **kwargs)
        if self.pass_number == 0:
            self._source[name] = experts
            return
        rerouted = int((experts != self._source[name]).any(-1).sum())
        self.count((name, self.pass_number), rerouted, len(experts))

    def share(self, layer: str, number: int) -> float | None:
        """Return the share of tokens of a pass that a layer routes to other experts than in the source.

        Args:
            layer: name of the decoder layer.
            number: number of the pass, from 1.

        Returns:
            The largest share in any of its modules of experts, 0 to 1; None if it has none or nothing was counted.
        """
        return self.largest(lambda place: place[1] == number and place[0].startswith(f"{layer}."))


@dataclass
class Measurements:
    """Everything that is measured while the texts run through the models.

    Attributes:
        source: the source.
        model: the source's model.
        outputs: the outputs, with the differences of their weights.
        corpus: the texts.
        settings: settings of the evaluation.
        records: comparisons with the source's logits, by pass number and document number; pass 0 has none.
        distances: distances of hidden states from the source's, by layer and pass.
        routes: counts of tokens that are routed to other experts, by module and pass.
    """

    source: ModelUnderTest
    model: StreamedModel
    outputs: list[OutputUnderTest]
    corpus: Corpus
    settings: EvaluationSettings
    records: dict[int, dict[int, DocumentRecord]] = field(default_factory=dict)
    distances: HiddenStateDistances = field(default_factory=HiddenStateDistances)
    routes: RouteCounts = field(default_factory=RouteCounts)

    def state(self) -> dict[str, Any]:
        """Return what is measured so far of this process's documents, for `merge`: tensors and plain values."""
        return {
            "records": {
                number: {document: torch.from_numpy(record.figures()) for document, record in by_document.items()}
                for number, by_document in self.records.items()
            },
            "distances": self.distances.sums,
            "routes": self.routes.counts,
            "clipped": [output.served.clipped.counts for output in self.outputs],
        }

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add what another process, or an interrupted one, has measured: its `state()`."""
        for number, by_document in state["records"].items():
            for at, figures in by_document.items():
                document = self.corpus.documents[at]
                record = DocumentRecord.from_figures(document, figures.numpy())
                self.records.setdefault(number, {})[at] = record

        self.distances.merge(state["distances"])
        self.routes.merge(state["routes"])
        for output, clipped in zip(self.outputs, state["clipped"], strict=True):
            output.served.clipped.merge(clipped)

    def records_of_pass(self, number: int) -> list[DocumentRecord]:
        """Return the records of a pass, numbered from 1, in the order of the documents."""
        by_document = self.records[number]
        return [by_document[document] for document in sorted(by_document)]


def make_evaluation(
    measurements: Measurements, texts: Sequence[list[dict[str, Any]]], notes: Sequence[str] = ()
) -> Evaluation:
    """Compute the figures, suspects and verdict of all outputs.

    Args:
        measurements: measurements of all processes combined.
        texts: for each output its answers beside the source's, a list of dictionaries as eval.json has them in `texts`.
        notes: remarks for the user, in addition to those of the corpus and of the models.

    Returns:
        The eval.json of each output, the figures of the noise floor, and notes for the user.

    Raises:
        SourceError: a shard cannot be read, for the digest of a model, or hidden states overflow.
    """
    seed = measurements.settings.seed
    floor = _brief(measurements.records_of_pass(1), seed)
    source = measurements.source.identity()

    common = {
        "floor": floor,
        "text": measurements.corpus.account,
        "versions": versions(),
        "seed": seed,
        "device": measurements.settings.device,
        "source": source,
    }

    outputs = [
        {**_figures(measurements, output, floor), "texts": answers, **common}
        for output, answers in zip(measurements.outputs, texts, strict=True)
    ]

    model_notes = (note for output in measurements.outputs for note in output.served.notes)
    documents = len(measurements.corpus.documents)
    few = []
    if documents < ENOUGH_TEXTS:
        few = [
            f"an interval from {documents} texts says next to nothing: take 16 or more to publish the figures "
            "(--samples)"
        ]

    guesses = _note_guesses(measurements.source.checkpoint, outputs[0]["perplexity"]["source"])
    all_notes = dict.fromkeys([*guesses, *measurements.corpus.notes, *few, *model_notes, *notes])
    return Evaluation(source, floor, outputs, tuple(all_notes))


def _note_guesses(source: Checkpoint, perplexity: float) -> list[str]:
    """Say that the source guesses, which leaves nothing that an output could lose."""
    vocabulary = vocabulary_of(source)
    if vocabulary is None or not perplexity >= GUESSED * vocabulary:
        return []
    return [
        f"the source does little better than guess among its {vocabulary:,} tokens (perplexity {perplexity:,.0f}): its "
        "weights, config or tokenizer may be damaged, and likeness to it says nothing"
    ]


def _figures(measurements: Measurements, output: OutputUnderTest, floor: Mapping[str, Any]) -> dict[str, Any]:
    weights_only, as_served = measurements.records_of_pass(output.first), measurements.records_of_pass(output.last)
    seed = measurements.settings.seed
    figures = summarize(as_served, seed)

    # Layers of vision towers are not among them, as no text runs through those.
    layers = [_layer(measurements, name, output) for name in measurements.distances.layers]

    suspects = suspects_by_layers(layers)
    for part in output.subject.tokenizer_differences:
        suspects.append(Suspect("tokenizer", f"it differs from the source's in {part}"))

    verdict = verdict_word(figures["kl"]["mean"], floor["kl"])
    if output.subject.tokenizer_differences:
        verdict = "broken"

    return {
        **figures,
        "kl_histogram": {
            "edges": list(EDGES),
            "output": kl_histogram(as_served),
            "floor": kl_histogram(measurements.records_of_pass(1)),
        },
        "weights_only": _brief(weights_only, seed),
        "kv_cache": "fp8" if output.served.fp8_cache else "auto",
        "layers": [_layer_json(layer, output.subject.name) for layer in layers],
        "verdict": verdict,
        "reasons": _reasons(figures, floor, suspects),
        "suspects": list(dict.fromkeys(suspect.layer for suspect in suspects)),
        "sizes": {"source": measurements.source.nbytes, "output": output.subject.nbytes},
        "output": output.subject.identity(),
    }


def _layer(measurements: Measurements, name: str, output: OutputUnderTest) -> LayerFigures:
    last = name.rpartition(".")[2]

    def inside(place: str | int) -> bool:
        return str(place) == last if isinstance(place, int) else place.startswith(f"{name}.")

    return LayerFigures(
        name,
        measurements.distances.mean(name, output.last),
        measurements.distances.mean(name, 1),
        measurements.routes.share(name, output.last),
        output.served.clipped.largest(inside) or 0.0,
    )


def _brief(records: Sequence[DocumentRecord], seed: int) -> dict[str, Any]:
    """Compute the short form of the figures, for the floor and for weights alone."""
    figures = summarize(records, seed)
    kl = dict(figures["kl"])
    return {
        "kl": kl.pop("mean"),
        **kl,
        "top1": figures["top1"],
        "top5": figures["top5"],
        "perplexity": figures["perplexity"]["output"],
        "rms_dp": figures["rms_dp"],
    }


def _layer_json(layer: LayerFigures, output: str) -> dict[str, Any]:
    if not math.isfinite(layer.distance + layer.floor):
        raise SourceError(
            f"hidden states of {output} after {layer.name}, or those of its source, are too large to be compared",
            "one of them overflows on these texts, or is damaged: openquant verify or diagnose may say where",
        )
    entry = {"layer": layer.name, "distance": layer.distance, "floor": layer.floor}
    if layer.routed_otherwise is None:
        return entry
    return {**entry, "routed_otherwise": layer.routed_otherwise}


def _reasons(figures: Mapping[str, Any], floor: Mapping[str, Any], suspects: Sequence[Suspect]) -> list[str]:
    kl, ratio = figures["kl"]["mean"], figures["perplexity"]["ratio"]
    times = f", {kl / floor['kl']:.3g} times the floor" if floor["kl"] else ""
    beyond = f" (broken is more than {CHANGED})" if kl > CHANGED else ""
    return [
        f"mean KL {kl:.3g} nats{times}{beyond}",
        f"the most probable token is the same at {100 * figures['top1']:.2f} % of positions, "
        f"at {100 * floor['top1']:.2f} % with the floor's noise",
        f"perplexity is {ratio:.4g} times the source's",
        *(f"{suspect.layer}: {suspect.why}" for suspect in suspects),
    ]


def versions() -> dict[str, str]:
    """Return the versions of openquant, Python, and the libraries that figures depend on, by name."""
    return {
        "openquant": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class ModelUnderTest:
    """A checkpoint of an evaluation: the source or an output.

    Attributes:
        name: name for messages, such as "Qwen3-8B-FP8".
        checkpoint: the opened checkpoint.
        tokenizer_differences: behaviours in which its tokenizer differs from the source's, such as "the chat template".
        given_fingerprint: fingerprint that the caller has made already; None to make it of the checkpoint's directory.
    """

    name: str
    checkpoint: Checkpoint
    tokenizer_differences: tuple[str, ...] = ()
    given_fingerprint: Fingerprint | None = None

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the checkpoint's files."""
        return self.given_fingerprint or Fingerprint(self.checkpoint)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.nbytes for info in self.checkpoint.tensors.values())

    def identity(self) -> dict[str, str]:
        """Return its name and the digest and stamp of its fingerprint, as eval.json has them.

        Raises:
            SourceError: a shard cannot be read.
        """
        return {"name": self.name, "digest": self.fingerprint.hexdigest(), "stamp": self.fingerprint.stamp}


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of `compare_outputs`.

    Attributes:
        seed: seed of the rounding noise and of the bootstrap.
        kv_cache: "fp8" to round every output's KV cache to FP8, "auto" for what its config says.
        device: torch device that the models run on.
        tokenizer: the source's tokenizer; None to leave out answers to prompts.
        prompts: file of prompts; None for built-in ones.
        streamed: makes a context in which the models get their shards as they arrive, and which gives the file for
            hidden states; by default all shards are in the checkpoints' directories, and all states in memory.
        answers_prompts: whether the models answer prompts after the texts, for which all weights are read once more.
        ranks: the processes that share the documents.
        tasks: questions of tasks that the models answer too; None for none.
        pass_checkpoint: file from which an interrupted evaluation continues; None for none.
        answer_memory: bytes that the weights of a model which answers prompts may take; None for no limit but the
            machine's memory.
    """

    seed: int = 0
    kv_cache: str = "auto"
    device: str = "cpu"
    tokenizer: Tokenizer | None = None
    prompts: str | os.PathLike[str] | None = None
    streamed: Callable[[Sequence[StreamedModel]], AbstractContextManager[OffloadFile | None]] = lambda _: nullcontext()
    answers_prompts: bool = True
    ranks: Ranks = field(default_factory=Ranks)
    answer_memory: int | None = None
    tasks: TaskRequests | None = None
    pass_checkpoint: PassCheckpoint | None = None


@dataclass
class OutputUnderTest:
    """An output during an evaluation.

    Attributes:
        subject: the checkpoint and its name.
        served: the model as engines serve it.
        first: number of its first pass among those of all models; this pass rounds weights alone.
    """

    subject: ModelUnderTest
    served: ServedModel
    first: int

    @property
    def last(self) -> int:
        """Number of its last pass, with everything that engines round; a second one if they round more."""
        return self.first + int(self.served.rounds)


def require_one_model(
    source: ModelUnderTest, source_model: StreamedModel, output: ModelUnderTest, output_model: StreamedModel
) -> None:
    """Require that an output has the class, number of layers and vocabulary of its source.

    Args:
        source: the source's checkpoint, with its name for messages.
        source_model: the source's model; its weights are not read.
        output: the output's checkpoint, with its name for messages.
        output_model: the output's model; its weights are not read.

    Raises:
        UsageError: one of them differs.
    """
    facts = []
    for model in (source_model, output_model):
        size = getattr(model.model.get_input_embeddings(), "num_embeddings", None)
        layers = sum(not isinstance(module, nn.Embedding) for module in model.units.values())
        facts.append((type(model.model).__name__, f"{size} tokens", f"{layers} layers"))

    for source_fact, output_fact in zip(*facts, strict=True):
        if source_fact != output_fact:
            raise UsageError(
                f"{output.name} has {output_fact}, {source.name} has {source_fact}",
                "name the model that it was made from",
            )
