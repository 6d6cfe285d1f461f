"""Serializes what an evaluation has measured: for its pass checkpoint, and for the first of several processes.

A pass checkpoint has the layers that all texts are through, and nothing of logits: passes are saved before the output
head.

    state = EvaluationState(measurements, compared, generators)
    checkpoint.extra = state.to_bytes
    state.add_bytes(checkpoint.saved, checkpoint.done)

Processes send the figures of their documents. Arrays are in numpy's format, never pickled, and counts are JSON.

    data = pack_records(records, counts)            # of this process's documents
    records, counts = unpack_records(data, documents)
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from ..data.corpus import Document
from ..streaming.hooks import holds_experts
from .kl import DocumentRecord
from .results import Measurements
from .weight_changes import WeightChange

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
        The bytes of a npz file, for `unpack_records`.
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
