"""Calibration: statistics of the inputs of each layer, over all tokens of the calibration texts.

Observers collect them in a streamed pass (calibration/observers.py). They are stored in a safetensors file, so that one
calibration serves all outputs of a model.

    calibration = read_calibration(Path("Qwen3-8B.calibration.safetensors"))
    calibration.of("model.layers.0.mlp.up_proj.weight").largest     # 21.5
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import SourceError, UsageError
from ..files.checkpoint import readable
from ..files.destination import FileKind
from ..files.model_files import parse_json, read_small
from ..files.shardfile import MAX_HEADER
from ..formats.numbers import Floats

SUFFIX = ".calibration.safetensors"
# Largest calibration file in bytes. DeepSeek-V3's has 40 MB.
MAX_CALIBRATION = 1 << 30
_KIND = "openquant calibration"
_AGAIN = "make it again: openquant calibrate MODEL -o FILE"


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the input of a layer, or of all experts of a layer, over all tokens.

    Attributes:
        tensors: names of the weights that have this input, such as q, k and v; of experts the weights of all.
        absmax: float32 [in], largest magnitude of each input channel.
        mean: float32 [in], mean magnitude of each input channel.
        tokens: number of tokens; 0 if no token was routed to any of the experts.
        square: float32 [in], mean square of each input channel; None in files of older versions.
        routed: number of tokens routed to each expert; None for dense layers, or if unknown.
    """

    tensors: tuple[str, ...]
    absmax: Floats
    mean: Floats
    tokens: int
    square: Floats | None = None
    routed: tuple[int, ...] | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude of all input channels."""
        return float(self.absmax.max(initial=0))


@dataclass(frozen=True)
class Calibration:
    """What a calibration found of a model.

    Attributes:
        inputs: statistics of the inputs of layers.
        model: digest of the checkpoint (files/checkpoint.py), SHA-256 in hexadecimal; "" for a placeholder.
        texts: the calibration texts in the form of eval.json: {"files": ["wiki.txt"], "documents": 128, ..}.
        cached: largest magnitudes of keys and of values in the KV cache, by number of the decoder layer:
            {0: (21.5, 3.25)}. Layers without a cache of their own are missing.
        stamp: the checkpoint's stamp (files/checkpoint.py), by which it is recognized without reading it.
        file: path that it was read from, for messages.
    """

    inputs: tuple[InputStatistics, ...]
    model: str
    texts: Mapping[str, Any]
    cached: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    stamp: str = ""
    file: str = ""

    @cached_property
    def _by_tensor(self) -> dict[str, InputStatistics]:
        return {tensor: statistics for statistics in self.inputs for tensor in statistics.tensors}

    def of(self, tensor: str) -> InputStatistics | None:
        """Return the statistics of the input of a weight, by its tensor name; None if no token reached it, or the
        calibration lacks it.
        """
        statistics = self._by_tensor.get(tensor)
        if statistics is None or not statistics.tokens:
            return None
        return statistics

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the bytes of its file, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the bytes of its file: tensors `N.absmax`, `N.mean` and `N.square`, float32 [in], for input number N.
        Metadata says which layers each input belongs to.
        """
        tensors: dict[str, Floats] = {}
        for number, statistics in enumerate(self.inputs):
            tensors |= {f"{number}.absmax": statistics.absmax, f"{number}.mean": statistics.mean}
            if statistics.square is not None:
                tensors[f"{number}.square"] = statistics.square
        facts = {
            "model": self.model,
            "stamp": self.stamp,
            "texts": dict(self.texts),
            "inputs": [
                {"tensors": statistics.tensors, "tokens": statistics.tokens}
                | ({"routed": statistics.routed} if statistics.routed else {})
                for statistics in self.inputs
            ],
            "cached": {str(number): list(magnitudes) for number, magnitudes in self.cached.items()},
        }
        # A plan without a calibration needs no safetensors, and the static Space has none.
        from safetensors.numpy import save

        # One entry, because safetensors does not keep the order of several: the bytes would vary.
        return save(tensors, {_KIND: json.dumps(facts, sort_keys=True)})


class PlaceholderCalibration(Calibration):
    """Stands for a calibration that is still to be run."""


def calibrations(matches: Callable[[str, str], bool] | None = None) -> FileKind:
    """Return the kind of file that `openquant calibrate` writes.

    Args:
        matches: returns whether a checkpoint's digest and stamp (files/checkpoint.py) are those of the model, such as
            `Fingerprint.matches`. With it, `recognizes` raises UsageError for a calibration of another model. If None,
            calibrations of all models are recognized.

    Returns:
        Its name in messages, and the function that recognizes an open file of the kind.
    """

    def recognizes(file: BinaryIO) -> bool:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = parse_json(file.read(length) if length <= MAX_HEADER else b"", "the header")
            facts = header["__metadata__"][_KIND]
        except (SourceError, LookupError, TypeError):
            return False

        if matches is None:
            return True

        try:
            values = json.loads(facts)
            same = matches(values["model"], values.get("stamp", ""))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            same = False

        if not same:
            raise UsageError(
                f"{file.name} is a calibration of another model", "name another file with -o, or give --overwrite"
            )

        return True

    return FileKind("a calibration", recognizes)


def placeholder_calibration(tensors: Iterable[str], texts: Mapping[str, Any]) -> PlaceholderCalibration:
    """Return a calibration in which every weight and every KV cache has statistics of one, to plan before calibrating.

    Args:
        tensors: full names of tensors, at least those of the weights. All numbers in them count as layers with a cache.
        texts: size of the calibration texts: {"documents": 128, "length": 512}.
    """
    ones = np.ones(1, np.float32)
    names = tuple(tensors)
    numbers = {int(part) for name in names for part in name.split(".") if part.isdecimal() and len(part) < 10}
    return PlaceholderCalibration(
        (InputStatistics(names, ones, ones, 1, ones),), "", texts, dict.fromkeys(sorted(numbers), (1.0, 1.0))
    )


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Args:
        path: a file that `openquant calibrate` wrote.

    Returns:
        Input statistics of the layers and magnitudes in the KV cache, with digest of the model and description of the
        texts; `path` is its `file`.

    Raises:
        SourceError: it cannot be read, is another kind of file, or has values that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    with readable():
        data = read_small(path, str(path), MAX_CALIBRATION)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise SourceError(f"{path} is no safetensors file: {error}", _AGAIN) from None

    try:
        length = int.from_bytes(data[:8], "little")
        metadata = parse_json(data[8 : 8 + length], str(path))["__metadata__"]
        facts = parse_json(metadata[_KIND].encode(), str(path))
        inputs = tuple(_input_statistics(path, number, entry, tensors) for number, entry in enumerate(facts["inputs"]))
        cached = {int(layer): (keys, values) for layer, (keys, values) in facts["cached"].items()}
        return Calibration(inputs, facts["model"], facts["texts"], cached, facts["stamp"], str(path))
    except (LookupError, TypeError, ValueError, AttributeError):
        raise SourceError(f"{path} is no calibration", _AGAIN) from None


def _input_statistics(
    path: Path, number: int, entry: Mapping[str, Any], tensors: Mapping[str, Floats]
) -> InputStatistics:
    """Return one entry of the metadata with its tensors, which must be finite."""
    names = tuple(entry["tensors"])
    absmax = tensors[f"{number}.absmax"]
    mean = tensors[f"{number}.mean"]
    square = tensors.get(f"{number}.square")

    for vector in (absmax, mean) if square is None else (absmax, mean, square):
        if not (np.isfinite(vector).all() and (vector >= 0).all()):
            raise SourceError(f"{path}: magnitudes of {names[0]} are negative or not finite", _AGAIN)

    routed = entry.get("routed")
    return InputStatistics(names, absmax, mean, entry["tokens"], square, routed and tuple(routed))
