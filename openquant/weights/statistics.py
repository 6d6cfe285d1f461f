"""Calibration: how large the activations of a model are that go into each layer, as texts have them.

A streamed pass finds it (calibration/observers.py), and a safetensors file keeps it: a model is calibrated once for all
that is made of it.

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
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..errors import SourceError, UsageError
from ..files.checkpoint import readable
from ..files.destination import FileKind
from ..files.small_files import parse_json, read_small
from ..files.tensors import MAX_HEADER
from ..formats.numbers import Floats

SUFFIX = ".calibration.safetensors"
# What is read into memory at once. Deepseek-V3's takes 40 MB.
MOST = 1 << 30
_KIND = "openquant calibration"
_LARGEST = float(np.finfo(np.float32).max)
_AGAIN = "make it again: openquant calibrate MODEL -o FILE"


@dataclass(frozen=True)
class InputStatistics:
    """What went into a layer, or into the experts of a layer, over all tokens.

    Attributes:
        tensors: the weights that it was multiplied by, as the checkpoint names them; of experts those of all.
        absmax: float32 [in], the largest magnitude of each.
        mean: float32 [in], the mean magnitude of each.
        tokens: how many went in; none where no token was routed to any of the experts.
        square: float32 [in], the mean square of each; None in the files of an earlier openquant.
        routed: how many tokens were routed to each expert; None where that is not known, or there are none.
    """

    tensors: tuple[str, ...]
    absmax: Floats
    mean: Floats
    tokens: int
    square: Floats | None = None
    routed: tuple[int, ...] | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude of all."""
        return float(self.absmax.max(initial=0))


@dataclass(frozen=True)
class Calibration:
    """What texts have shown of a model.

    Attributes:
        inputs: of layers.
        model: the digest of the checkpoint (files/fingerprint.py), SHA-256 in hexadecimal; "" if it is still to be
            made.
        cached: the largest magnitudes of keys and of values as they are cached, by the number of each decoder layer
            that has a cache of its own: {0: (21.5, 3.25)}.
        texts: what was read, as eval.json has it: {"files": ["wiki.txt"], "sha256": .., "documents": 128, ..}.
        stamp: the checkpoint's stamp as the texts were run, by which it is known again without being read.
        file: where it was read from, for messages.
    """

    inputs: tuple[InputStatistics, ...]
    model: str
    texts: Mapping[str, Any]
    cached: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    stamp: str = ""
    file: str = ""

    @cached_property
    def _by_tensor(self) -> dict[str, InputStatistics]:
        return {tensor: each for each in self.inputs for tensor in each.tensors}

    def of(self, tensor: str) -> InputStatistics | None:
        """What went into the layer of a weight; None where nothing was seen."""
        found = self._by_tensor.get(tensor)
        return found if found is not None and found.tokens else None

    @property
    def described(self) -> str:
        """Such as "128 x 512 tokens"."""
        return f"{self.texts.get('documents')} x {self.texts.get('length')} tokens"

    @cached_property
    def sha256(self) -> str:
        """Of its file's bytes, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Its file: `N.absmax`, `N.mean` and `N.square`, float32 [in], of each of the inputs; metadata says which they
        are."""
        tensors: dict[str, Floats] = {}
        for number, each in enumerate(self.inputs):
            tensors |= {f"{number}.absmax": each.absmax, f"{number}.mean": each.mean}
            if each.square is not None:
                tensors[f"{number}.square"] = each.square
        facts = {
            "model": self.model,
            "stamp": self.stamp,
            "texts": dict(self.texts),
            "inputs": [
                {"tensors": each.tensors, "tokens": each.tokens} | ({"routed": each.routed} if each.routed else {})
                for each in self.inputs
            ],
            "cached": {str(number): list(both) for number, both in self.cached.items()},
        }
        # safetensors writes metadata in an order of its own: one entry keeps the bytes the same.
        return save(tensors, {_KIND: json.dumps(facts, sort_keys=True)})


class StandIn(Calibration):
    """A calibration that is still to be made."""


def calibrations(matches: Callable[[str, str], bool] | None = None) -> FileKind:
    """What `openquant calibrate` writes.

    Args:
        matches: whether digest and stamp are those of the model, such as `Fingerprint.matches`, where a calibration of
            another one is not to be replaced.
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


def placeholder_calibration(tensors: Iterable[str], texts: Mapping[str, Any]) -> StandIn:
    """A calibration that has seen all weights and caches, and ones go into each: a plan with it is like one with what
    texts show.

    Args:
        tensors: names of the weights.
        texts: how much would be read: {"documents": 128, "length": 512}.
    """
    ones, names = np.ones(1, np.float32), tuple(tensors)
    numbers = {int(part) for name in names for part in name.split(".") if part.isdecimal() and len(part) < 10}
    return StandIn(
        (InputStatistics(names, ones, ones, 1, ones),), "", texts, dict.fromkeys(sorted(numbers), (1.0, 1.0))
    )


def read_calibration(path: Path) -> Calibration:
    """Read a file that `openquant calibrate` wrote, which anybody may have changed since.

    Raises:
        SourceError: it cannot be read, is something else, or holds what no calibration finds.
    """
    with readable():
        data = read_small(path, str(path), MOST)
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = parse_json(data[8 : 8 + length], str(path)).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is no safetensors file: {error}", _AGAIN) from None
    try:
        facts = parse_json(metadata[_KIND].encode(), str(path))
        if facts["model"] and "stamp" not in facts:
            raise SourceError(
                f"{path} is of an earlier openquant, which did not read all weights to know a model", _AGAIN
            )
        model, stamp, texts, inputs = facts["model"], facts["stamp"], facts["texts"], facts["inputs"]
        if not (_all_text([model, stamp]) and isinstance(texts, dict) and isinstance(inputs, list)):
            raise TypeError
        found = tuple(_inputs(path, number, each, tensors) for number, each in enumerate(inputs))
        cached = {_layer(number): _cached(path, number, both) for number, both in facts.get("cached", {}).items()}
        names = [name for each in found for name in each.tensors]
        if len(names) != len(set(names)):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceError(f"{path} is no calibration", _AGAIN) from None
    return Calibration(found, model, texts, cached, stamp, str(path))


def _layer(number: str) -> int:
    """The number of a layer, as it is written without zeros before it."""
    found = int(number)
    if str(found) != number or found < 0:
        raise ValueError
    return found


def _cached(path: Path, number: str, both: Any) -> tuple[float, float]:
    keys, values = both
    if type(keys) is not float or type(values) is not float:
        raise TypeError
    # They were float32.
    if not (0 <= keys <= _LARGEST and 0 <= values <= _LARGEST):
        raise SourceError(f"{path}: magnitudes of keys or values of layer {number} are negative or not finite", _AGAIN)
    return keys, values


def _inputs(path: Path, number: int, said: Mapping[str, Any], tensors: Mapping[str, Floats]) -> InputStatistics:
    names, tokens, routed = said["tensors"], said["tokens"], said.get("routed")
    absmax, mean, square = tensors[f"{number}.absmax"], tensors[f"{number}.mean"], tensors.get(f"{number}.square")
    if not _is_count(tokens) or not _all_text(names):
        raise TypeError
    if routed is not None and not (isinstance(routed, list) and all(map(_is_count, routed))):
        raise TypeError
    for part in (absmax, mean) if square is None else (absmax, mean, square):
        if part.dtype != np.float32 or part.ndim != 1 or part.shape != absmax.shape:
            raise TypeError
        if not (np.isfinite(part).all() and (part >= 0).all()):
            raise SourceError(f"{path}: magnitudes of {', '.join(names[:1])} are negative or not finite", _AGAIN)
    return InputStatistics(tuple(names), absmax, mean, tokens, square, None if routed is None else tuple(routed))


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def _all_text(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
