"""Builds the results of an evaluation, as eval.json and `--json` have them; docs/evaluation.md explains the keys.

    make_evaluation(measurements, texts).outputs[0]["kl"]["mean"]      # 0.0031

Distances of hidden states and routes of tokens are counted by layer and pass; those of several processes add up. The
results do not depend on the order of documents or on the number of processes: counts are integers, and distances are
kept for each document and summed exactly (math.fsum).

What is measured so far is stored in a pass checkpoint, and sent to the first of several processes. A pass checkpoint
has the layers that all texts are through, and nothing of logits: passes are saved before the output head. Arrays are
in numpy's format, never pickled, and counts are JSON.

    state = EvaluationState(measurements, compared, generators)
    checkpoint.extra = state.to_bytes
    state.add_bytes(checkpoint.saved, checkpoint.done)

The models under test, and the settings of an evaluation.

source, output = ModelUnderTest("Qwen3-8B", checkpoint), ModelUnderTest("Qwen3-8B-FP8", quantized_checkpoint)
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from safetensors.numpy import load, save
from torch import Tensor, nn

from ..data.corpus import Corpus, Document
from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..files.cards import stated_facts
from ..files.checkpoint import Checkpoint, Fingerprint
from ..files.destination import WeightFacts
from ..streaming.hooks import holds_experts
from ..streaming.model import StreamedModel
from ..streaming.offload import OffloadFile
from ..streaming.pass_checkpoint import PassCheckpoint
from ..streaming.session import DocumentRanks
from ..version import __version__
from .as_served import ServedModel
from .kl import EDGES, DocumentRecord, kl_histogram, summarize
from .task_passes import TaskRequests
from .types import CHANGED, ENOUGH_TEXTS, Brief, NamedModel, OutputEvaluation, kl_text, verdict_word
from .verdict import LayerFigures, Suspect, WeightChange, suspects_by_config, suspects_by_layers, suspects_by_weights

# Settings of config.json that do not change what a model computes. Other such settings never come from config.json.
_IRRELEVANT = frozenset(
    ("architectures", "model_type", "dtype", "use_cache", "initializer_range", "tokenizer_class", "bos_token_id",
     "eos_token_id", "pad_token_id", "attention_dropout", "chunk_size_feed_forward", "problem_type",
     "is_encoder_decoder", "max_position_embeddings", "finetuning_task")
)  # fmt: skip


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

    source: NamedModel
    floor: Brief
    outputs: list[OutputEvaluation]
    notes: tuple[str, ...] = ()
    written: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {"source": self.source, "floor": self.floor, "outputs": self.outputs}


class HiddenStateDistances:
    """Relative distances of hidden states from the source's, ||h' - h|| / ||h||, averaged over all tokens.

    Attributes:
        layers: names of the decoder layers as keys, in the order in which they run.
    """

    def __init__(self) -> None:
        self.layers: dict[str, None] = {}
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._tokens: dict[tuple[str, int], int] = {}
        self._source: Tensor | None = None

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
        self._add(layer, number, [float(distances.double().sum())], len(distances))

    def _add(self, layer: str, number: int, sums: Iterable[float], tokens: int) -> None:
        self.layers[layer] = None
        self._sums.setdefault((layer, number), []).extend(sums)
        self._tokens[layer, number] = self._tokens.get((layer, number), 0) + tokens

    def mean(self, layer: str, number: int) -> float:
        """Return the mean relative distance of all tokens after a layer in a pass.

        Args:
            layer: name of the layer.
            number: number of the pass, from 1; the source's has no distances.

        Raises:
            KeyError: no document went through that layer in that pass.
        """
        return math.fsum(self._sums[layer, number]) / self._tokens[layer, number]

    def counts(self) -> Counts:
        """Return rows for `add_counts` of another process: layer, pass, list of each document's sum, tokens."""
        return [[*key, sums, self._tokens[key]] for key, sums in self._sums.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add the rows that `counts` of another process returned."""
        for layer, number, sums, tokens in counts:
            self._add(layer, number, sums, tokens)


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


class RouteCounts:
    """Counts tokens that are routed to other experts than in the source, by module and pass.

    Attributes:
        pass_number: number of the pass that runs now, set by the caller. Pass 0 is the source's and must come first.
            None if nothing is to be counted, such as while prompts are answered.
    """

    def __init__(self) -> None:
        self.pass_number: int | None = None
        self._source: dict[str, Tensor] = {}
        self._counts: dict[tuple[str, int], list[int]] = {}

    def register_hooks(self, model: nn.Module) -> None:
        """Register hooks on all modules of stacked experts of a model."""
        for name, module in model.named_modules():
            if holds_experts(module):
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.pass_number is None:
                return
            experts = _expert_choice(module, *args, **kwargs)
            if self.pass_number == 0:
                self._source[name] = experts
                return
            self._add(name, self.pass_number, int((experts != self._source[name]).any(-1).sum()), len(experts))

        return before

    def _add(self, name: str, number: int, rerouted: int, tokens: int) -> None:
        counts = self._counts.setdefault((name, number), [0, 0])
        counts[0] += rerouted
        counts[1] += tokens

    def share(self, layer: str, number: int) -> float | None:
        """Return the share of tokens of a pass that a layer routes to other experts than in the source.

        Args:
            layer: name of the decoder layer.
            number: number of the pass, from 1.

        Returns:
            The largest share in any of its modules of experts, 0 to 1; None if it has none or nothing was counted.
        """
        shares = [
            rerouted / total
            for (name, counted_pass), (rerouted, total) in self._counts.items()
            if counted_pass == number and name.startswith(f"{layer}.")
        ]
        return max(shares, default=None)

    def counts(self) -> Counts:
        """Return rows for `add_counts` of another process: module, pass, rerouted tokens, all tokens."""
        return [[*key, *counts] for key, counts in self._counts.items()]

    def add_counts(self, counts: Counts) -> None:
        """Add the rows that `counts` of another process returned."""
        for row in counts:
            self._add(*row)


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

    def counts(self) -> dict[str, Any]:
        """Return the counters of this process's documents, as JSON can hold them."""
        return {
            "distances": self.distances.counts(),
            "routes": self.routes.counts(),
            "clipped": [output.served.clipped.counts() for output in self.outputs],
        }

    def add(self, records: Mapping[int, Mapping[int, DocumentRecord]], counts: Mapping[str, Any]) -> None:
        """Add the records and counters of another process's documents.

        Args:
            records: records by pass number and document number. This process must have some of each of these passes.
            counts: what the other process's `counts` returned.
        """
        for number, by_document in records.items():
            self.records[number].update(by_document)
        self.distances.add_counts(counts["distances"])
        self.routes.add_counts(counts["routes"])
        for output, clipped in zip(self.outputs, counts["clipped"], strict=True):
            output.served.clipped.add_counts(clipped)

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
        SourceError: a shard cannot be read, for the digest of a model.
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
        cast(OutputEvaluation, {**_figures(measurements, output, floor), "texts": answers, **common})
        for output, answers in zip(measurements.outputs, texts, strict=True)
    ]

    model_notes = (note for output in measurements.outputs for note in output.served.notes)
    documents = len(measurements.corpus.documents)
    few = (
        [] if documents >= ENOUGH_TEXTS else [f"{_few(documents)}: take 16 or more to publish the figures (--samples)"]
    )

    all_notes = dict.fromkeys([*measurements.corpus.notes, *few, *model_notes, *notes])
    return Evaluation(source, floor, outputs, tuple(all_notes))


def _few(documents: int) -> str:
    one = documents == 1
    return "a single text gives no interval" if one else f"an interval from {documents} texts says next to nothing"


def _figures(measurements: Measurements, output: OutputUnderTest, floor: Brief) -> dict[str, Any]:
    weights_only, as_served = measurements.records_of_pass(output.first), measurements.records_of_pass(output.last)
    seed = measurements.settings.seed
    figures = summarize(as_served, seed)

    # Layers of vision towers are not among them, as no text runs through those.
    layers = [_layer(measurements, name, output) for name in measurements.distances.layers]

    suspects = [
        *_suspects_by_files(measurements, output),
        *suspects_by_weights(output.changes, output.served.quantized_routers, output.facts.gptq),
        *suspects_by_layers(layers),
    ]

    verdict = verdict_word(figures["kl"]["mean"], floor["kl"])
    if output.subject.tokenizer_differences:
        verdict = "broken"

    errors = [change.error for change in output.changes if change.quantized]
    return {
        **figures,
        "kl_histogram": {
            "edges": list(EDGES),
            "output": kl_histogram(as_served),
            "floor": kl_histogram(measurements.records_of_pass(1)),
        },
        "weights_only": _brief(weights_only, seed),
        "weight_error": statistics.median(errors) if errors else 0.0,
        "kv_cache": "fp8" if output.served.fp8_cache else "auto",
        "layers": [_layer_json(layer) for layer in layers],
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
        output.served.clipped.share(inside),
    )


def _suspects_by_files(measurements: Measurements, output: OutputUnderTest) -> list[Suspect]:
    source_config, output_config = (_flat_config(model) for model in (measurements.model, output.served.model))
    tokenizer = [
        Suspect("tokenizer", f"it differs from the source's in {difference}")
        for difference in output.subject.tokenizer_differences
    ]
    return [*tokenizer, *suspects_by_config(source_config, output_config)]


def _flat_config(model: StreamedModel) -> dict[str, Any]:
    """Return the settings of config.json that change what is computed: {"rope_parameters.rope_theta": 10000.0, ...}."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in _IRRELEVANT:
                    walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", model.model.config.to_dict())
    return flat


def _brief(records: Sequence[DocumentRecord], seed: int) -> Brief:
    """Compute the short form of the figures, for the floor and for weights alone."""
    figures = summarize(records, seed)
    kl = dict(figures["kl"])
    brief = {
        "kl": kl.pop("mean"),
        **kl,
        "top1": figures["top1"],
        "top5": figures["top5"],
        "perplexity": figures["perplexity"]["output"],
        "rms_dp": figures["rms_dp"],
    }
    return cast(Brief, brief)


def _layer_json(layer: LayerFigures) -> dict[str, Any]:
    entry = {"layer": layer.name, "distance": layer.distance, "floor": layer.floor}
    return entry if layer.routed_otherwise is None else {**entry, "routed_otherwise": layer.routed_otherwise}


def _reasons(figures: Mapping[str, Any], floor: Brief, suspects: Sequence[Suspect]) -> list[str]:
    kl, ratio = figures["kl"]["mean"], figures["perplexity"]["ratio"]
    times = f", {kl / floor['kl']:.3g} times the floor" if floor["kl"] else ""
    beyond = f" (broken is more than {CHANGED})" if kl > CHANGED else ""
    return [
        f"mean KL {kl_text(kl, floor['kl'])} nats{times}{beyond}",
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


# Rows that JSON can hold.
Counts = list[list[Any]]


_EXPERT = re.compile(r"\[\d+\]$")


@dataclass(frozen=True)
class EvaluationState:
    """All that a pass over the texts changes before the output head.

    Attributes:
        measurements: distances, routes, clipped activations, and the outputs with the differences of their weights.
        compared: units whose weights are compared already, by name and pass.
        generators: generators of the rounding noise, one for each document of this process.
    """

    measurements: Measurements
    compared: set[tuple[str, int]]
    generators: Sequence[torch.Generator]

    def to_bytes(self) -> bytes:
        """Return a safetensors file with the counts as JSON and the states of the generators, uint8."""
        facts = {
            "counts": self.measurements.counts(),
            "changes": [[astuple(change) for change in output.changes] for output in self.measurements.outputs],
            "compared": sorted(self.compared),
        }
        noise = [generator.get_state().numpy() for generator in self.generators]
        arrays = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        return save(arrays | {f"noise {number}": state for number, state in enumerate(noise)})

    def add_bytes(self, data: bytes, done: Set[str]) -> None:
        """Add what an interrupted run of the same evaluation has measured.

        Args:
            data: what its `to_bytes` returned.
            done: names of the units that all its passes are through, without embedding tables.

        Raises:
            ValueError: a figure is invalid or missing, or of another model.
            LookupError, TypeError, RuntimeError, SafetensorError: it is no such file.
        """
        arrays = load(data)
        facts = json.loads(arrays["facts"].tobytes())
        self._check(facts, done)
        self.measurements.add({}, facts["counts"])
        for output, changes in zip(self.measurements.outputs, facts["changes"], strict=True):
            output.changes.extend(WeightChange(*change) for change in changes)
        self.compared.update((unit, number) for unit, number in facts["compared"])
        for number, generator in enumerate(self.generators):
            generator.set_state(torch.from_numpy(arrays[f"noise {number}"]))

    def _check(self, facts: Any, done: Set[str]) -> None:
        """Refuse figures that no run writes; wrong ones of the right form cannot be told.

        Raises:
            ValueError: a figure is invalid or missing.
        """
        outputs, counts = self.measurements.outputs, facts["counts"]
        model, documents = self.measurements.model, len(self.generators)
        modules = {name: module for name, module in model.model.named_modules() if name}
        layers = [layer for layer in model.layers if layer in done]
        passes = range(1, outputs[-1].last + 1 if outputs else 2)

        _require_keys("distances", counts["distances"], lambda layer, number: layer in layers and number in passes)
        if documents and len(counts["distances"]) != len(layers) * len(passes):
            raise ValueError("it has no distances of a layer that is computed")
        for layer, _, sums, tokens in counts["distances"]:
            if not _are_figures(sums, documents) or tokens != documents * self.measurements.corpus.length:
                raise ValueError(f"its distances of {layer} are invalid")

        experts = {name for name, module in modules.items() if holds_experts(module)}
        _require_keys("routes", counts["routes"], lambda name, number: name in experts and number in passes)
        places = {*modules, *range(len(model.layers))}
        clipped = [[place, output, *row] for output, rows in enumerate(counts["clipped"]) for place, *row in rows]
        _require_keys("clipped activations", clipped, lambda place, _: place in places)
        for place, _, counted, total in (*counts["routes"], *clipped):
            if not (type(counted) is type(total) is int and 0 <= counted <= total and total > 0):
                raise ValueError(f"its counts of {place} are invalid")

        weights = {name.removesuffix(".weight") for name, _ in model.model.named_parameters()}
        for name, quantized, *errors in (change for changes in facts["changes"] for change in changes):
            if _EXPERT.sub("", name) not in weights or type(quantized) is not bool or not _are_figures(errors, 4):
                raise ValueError("its differences of weights are invalid")
        _require_keys("weights", facts["compared"], lambda unit, number: unit in model.units and number in passes)


def _require_keys(what: str, rows: Sequence[Sequence[Any]], is_valid: Callable[[Any, Any], bool]) -> None:
    """Require that the first two values of each row are valid together, and differ from those of other rows."""
    keys = [(row[0], row[1]) for row in rows]
    if len(set(keys)) != len(keys) or not all(is_valid(*key) for key in keys):
        raise ValueError(f"its {what} are of another model")


def _are_figures(values: Any, count: int) -> bool:
    """Whether a value is a list of that many floats that are neither negative nor infinite."""
    return (
        type(values) is list
        and len(values) == count
        and all(type(value) is float and math.isfinite(value) and value >= 0 for value in values)
    )


# Fields of a DocumentRecord that are float64, and those that are bool.
_FIGURES = ("kl", "confidence", "source_nll", "output_nll")
_FLAGS = ("top1", "top5")

# Records by pass number, then by document number.
Records = Mapping[int, Mapping[int, DocumentRecord]]


def pack_records(records: Records, counts: Mapping[str, Any]) -> bytes:
    """Serialize the figures of documents, and counts, for another process.

    Args:
        records: by number of the pass through a model, then by the document's index in the corpus: KL divergence,
            probabilities and token agreement at each position but the last, float64 or bool [length - 1]. All documents
            have the same length.
        counts: anything that JSON can hold, such as `Measurements.counts()`.

    Returns:
        The bytes of an .npz file, which `unpack_records` reads.
    """
    arrays = {"counts": np.frombuffer(json.dumps(counts).encode(), np.uint8)}
    for number, by_document in records.items():
        arrays[f"{number}.documents"] = np.array(list(by_document), np.int64)
        for kind, columns in (("figures", _FIGURES), ("flags", _FLAGS)):
            arrays[f"{number}.{kind}"] = np.array(
                [[getattr(record, column) for column in columns] for record in by_document.values()]
            )
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def unpack_records(
    data: bytes, documents: Sequence[Document]
) -> tuple[dict[int, dict[int, DocumentRecord]], dict[str, Any]]:
    """Read what `pack_records` wrote.

    Args:
        data: bytes of a npz file from `pack_records`.
        documents: all documents of the corpus; records get their domain and name from it.

    Returns:
        The records by number of the pass, then by the document's index in `documents`; and the counts. A record has
        arrays [length - 1], float64 or bool, with a figure of each position but the last.
    """
    records: dict[int, dict[int, DocumentRecord]] = {}

    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        counts: dict[str, Any] = json.loads(arrays["counts"].tobytes())
        for name in arrays.files:
            number, _, kind = name.partition(".")
            if kind == "documents":
                figures, flags = arrays[f"{number}.figures"], arrays[f"{number}.flags"]
                records[int(number)] = {
                    at: DocumentRecord(documents[at].domain, documents[at].name, *figure_rows, *flag_rows)
                    for at, figure_rows, flag_rows in zip(arrays[name].tolist(), figures, flags, strict=True)
                }

    return records, counts


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

    def identity(self) -> NamedModel:
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
        ranks: the processes that share the documents; None if this is the only one.
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
    ranks: DocumentRanks | None = None
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
        passes: number of its passes: 2 if engines round activations or the KV cache too, else 1.
        changes: differences of its weights from the source's, added while the texts run.
    """

    subject: ModelUnderTest
    served: ServedModel
    first: int
    passes: int
    changes: list[WeightChange] = field(default_factory=list)

    @cached_property
    def facts(self) -> WeightFacts:
        """What was done to its weights, by its journal or model card."""
        return stated_facts(self.subject.checkpoint)

    @property
    def last(self) -> int:
        """Number of its last pass, with everything that engines round."""
        return self.first + self.passes - 1


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
        embedding = model.model.get_input_embeddings()
        size = getattr(embedding, "num_embeddings", None)
        layers = sum(not isinstance(module, nn.Embedding) for module in model.units.values())
        facts.append((type(model.model).__name__, f"{size} tokens", f"{layers} layers"))

    for source_fact, output_fact in zip(*facts, strict=True):
        if source_fact != output_fact:
            raise UsageError(
                f"{output.name} has {output_fact}, {source.name} has {source_fact}",
                "name the model that it was made from",
            )
