"""What an evaluation has found, as eval.json and `--json` have it; docs/evaluation.md says what the keys mean.

results(findings, texts).outputs[0]["kl"]["mean"]      # 0.0031
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import transformers

from ..data.corpus import Corpus
from ..streaming.model import StreamedModel
from ..version import __version__
from .counters import HiddenStateDistances, RouteCounts
from .kl import EDGES, DocumentRecord, histogram, summary
from .types import Brief, NamedModel, OutputEvaluation
from .under_test import EvaluationSettings, ModelUnderTest, OutputUnderTest
from .verdict import (
    BROKEN,
    LayerFigures,
    Suspect,
    suspects_by_config,
    suspects_by_layers,
    suspects_by_weights,
    verdict_word,
)

# Settings that say nothing of what a model computes; others of that kind are never taken from config.json.
_TOLD = frozenset(
    ("architectures", "model_type", "dtype", "use_cache", "initializer_range", "tokenizer_class", "bos_token_id",
     "eos_token_id", "pad_token_id", "attention_dropout", "chunk_size_feed_forward", "problem_type",
     "is_encoder_decoder", "max_position_embeddings", "finetuning_task")
)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Attributes:
        source: its name, digest and stamp.
        floor: figures of the source beside itself with noise.
        outputs: what was found of each, as its eval.json has it.
        notes: what people should know of it.
    """

    source: NamedModel
    floor: Brief
    outputs: list[OutputEvaluation]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"source": self.source, "floor": self.floor, "outputs": self.outputs}


@dataclass
class Findings:
    """What texts have told on their way through the models.

    Attributes:
        source: the source.
        model: its model.
        outputs: the outputs.
        corpus: the texts.
        settings: how they were evaluated.
        records: of each pass but the source's own, by the document's number.
        distances: of hidden states, by layer.
        routes: which experts tokens went to.
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
        """What was counted of this process's documents."""
        return {
            "distances": self.distances.counts(),
            "routes": self.routes.counts(),
            "clipped": [output.served.clipped.counts() for output in self.outputs],
        }

    def add(self, records: Mapping[int, Mapping[int, DocumentRecord]], counts: Mapping[str, Any]) -> None:
        """Add what another process found of its documents."""
        for number, found in records.items():
            self.records[number].update(found)
        self.distances.add_counts(counts["distances"])
        self.routes.add_counts(counts["routes"])
        for output, clipped in zip(self.outputs, counts["clipped"], strict=True):
            output.served.clipped.add_counts(clipped)

    def of(self, number: int) -> list[DocumentRecord]:
        """The records of a pass, in the order of the documents."""
        found = self.records[number]
        return [found[document] for document in sorted(found)]


def results(found: Findings, texts: Sequence[list[dict[str, Any]]], notes: Sequence[str] = ()) -> Evaluation:
    """The figures of all outputs.

    Args:
        found: what they are made of, with the findings of all processes.
        texts: of each output what it answers beside the source.
        notes: what people should know beside what texts and models have to say.
    """
    seed = found.settings.seed
    floor = _brief(found.of(1), seed)
    source = found.source.identity()
    common = {
        "floor": floor,
        "text": found.corpus.account,
        "versions": _versions(),
        "seed": seed,
        "device": found.settings.device,
        "source": source,
    }
    outputs = [
        cast(OutputEvaluation, {**_result(found, output, floor), "texts": shown, **common})
        for output, shown in zip(found.outputs, texts, strict=True)
    ]
    said = [*found.corpus.notes, *(note for output in found.outputs for note in output.served.notes), *notes]
    return Evaluation(source, floor, outputs, tuple(dict.fromkeys(said)))


def _result(found: Findings, output: OutputUnderTest, floor: Brief) -> dict[str, Any]:
    weights, full = found.of(output.first), found.of(output.last)
    seed = found.settings.seed
    figures = summary(full, seed)
    # Not those of towers, which no text goes through.
    layers = [_layer(found, name, output) for name in found.distances.layers]
    suspects = [
        *_by_files(found, output),
        *suspects_by_weights(output.changes, output.served.kept, output.by_gptq),
        *suspects_by_layers(layers),
    ]
    verdict = verdict_word(figures["kl"]["mean"], floor["kl"])
    if output.of.tokenizer:
        verdict = "broken"
    errors = [change.error for change in output.changes if change.quantized]
    return {
        **figures,
        "kl_histogram": {"edges": list(EDGES), "output": histogram(full), "floor": histogram(found.of(1))},
        "weights_only": _brief(weights, seed),
        "weight_error": statistics.median(errors) if errors else 0.0,
        "kv_cache": "fp8" if output.served.cached else "auto",
        "layers": [_layer_json(layer) for layer in layers],
        "verdict": verdict,
        "reasons": _reasons(figures, floor, suspects),
        "suspects": list(dict.fromkeys(suspect.layer for suspect in suspects)),
        "sizes": {"source": found.source.nbytes, "output": output.of.nbytes},
        "output": output.of.identity(),
    }


def _layer(found: Findings, name: str, output: OutputUnderTest) -> LayerFigures:
    last = name.rpartition(".")[2]

    def inside(place: str | int) -> bool:
        return str(place) == last if isinstance(place, int) else place.startswith(f"{name}.")

    return LayerFigures(
        name,
        found.distances.of(name, output.last),
        found.distances.of(name, 1),
        found.routes.of(name, output.last),
        output.served.clipped.share(inside),
    )


def _by_files(found: Findings, output: OutputUnderTest) -> list[Suspect]:
    mine, theirs = (_config_of(model) for model in (found.model, output.served.model))
    tokenizer = [Suspect("tokenizer", f"it has another answer for {what}") for what in output.of.tokenizer]
    return [*tokenizer, *suspects_by_config(mine, theirs)]


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


def _brief(records: Sequence[DocumentRecord], seed: int) -> Brief:
    """The figures of what stands beside others."""
    found = summary(records, seed)
    kl = dict(found["kl"])
    figures = {
        "kl": kl.pop("mean"),
        **kl,
        "top1": found["top1"],
        "top5": found["top5"],
        "perplexity": found["perplexity"]["output"],
        "rms_dp": found["rms_dp"],
    }
    return cast(Brief, figures)


def _layer_json(layer: LayerFigures) -> dict[str, Any]:
    found = {"layer": layer.name, "distance": layer.distance, "floor": layer.floor}
    return found if layer.routed_otherwise is None else {**found, "routed_otherwise": layer.routed_otherwise}


def _reasons(figures: Mapping[str, Any], floor: Brief, suspects: Sequence[Suspect]) -> list[str]:
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
