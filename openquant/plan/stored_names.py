"""The names of a checkpoint's tensors: by name template, and under which prefixes the tensors of its class are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from ..files.tensors import TensorInfo
from ..patterns import MAX_DIGITS, compile_pattern, template
from ..registry.architecture import Architecture, ExpertLayout, StackedExperts, absolute_patterns
from ..registry.class_tensors import ClassTensors
from ..registry.rules import ModuleRules
from .sort import mtp_layer_finder

_NUMBER = re.compile(rf"(?<=\.)\d{{1,{MAX_DIGITS}}}(?=\.|$)")
_PLACE = re.compile(r"(?<=\.)(?:\*|\d+)(?=\.|$)")


class Stored:
    """The tensors of a checkpoint by name template, without those of MTP layers after the decoder layers.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        text: the language model's part of config.json, as text_config returns it.
    """

    def __init__(self, entry: ModuleRules, tensors: Iterable[TensorInfo], text: Mapping[str, Any]) -> None:
        is_mtp_layer = mtp_layer_finder(entry.model, dict(text))
        # For each name template, the tensors by the numbers in their names.
        self.by_template: dict[str, dict[tuple[str, ...], TensorInfo]] = {}
        self._found: dict[str, list[tuple[tuple[str, ...], TensorInfo]]] = {}
        for info in tensors:
            numbers = tuple(_NUMBER.findall(info.name))
            if numbers and is_mtp_layer(info.module):
                continue
            self.by_template.setdefault(template(info.name), {})[numbers] = info
        for layout in entry.model.experts:
            for stacked in layout.stacked:
                self._stack(entry.model, layout, stacked)

    def _stack(self, model: Architecture, layout: ExpertLayout, stacked: StackedExperts) -> None:
        """Add the stacks of experts that a conversion has split, as the class has them."""
        paths = absolute_patterns(model, [f"{layout.path}.*.{part}.weight" for part in stacked.parts])
        of_parts = [compile_pattern(path) for path in paths]
        for first in [name for name in self.by_template if of_parts[0].fullmatch(name)]:
            path = first.removesuffix(f".*.{stacked.parts[0]}.weight")
            place = path.rpartition(".")[0] if layout.beside else path
            names = [f"{place}.{stacked.name}", f"{place}.{stacked.name}.weight"]
            parts = [self.by_template.get(f"{path}.*.{part}.weight", {}) for part in stacked.parts]
            if any(name in self.by_template for name in names):
                continue
            experts: dict[tuple[str, ...], int] = {}
            for numbers in parts[0]:
                # An expert is there if all its projections are.
                if all(numbers in part for part in parts):
                    experts[numbers[:-1]] = experts.get(numbers[:-1], 0) + 1
            for layer, count in experts.items():
                info = next(info for numbers, info in parts[0].items() if numbers[:-1] == layer)
                rows, cols = len(parts) * info.shape[0], info.shape[1]
                shape = (count, cols, rows) if stacked.transposed else (count, rows, cols)
                for name in names:
                    full = _filled(name, layer)
                    self.by_template.setdefault(name, {})[layer] = info._replace(name=full, shape=shape)

    @cached_property
    def prefixes(self) -> set[str]:
        """What stands before the first number of names: "model.layers"."""
        return {name.partition(".*")[0] for name in self.by_template if ".*" in name}

    def has(self, name: str) -> bool:
        """Whether there is a tensor with this name, or one below a list of layers with this prefix."""
        return template(name) in self.by_template or name in self.prefixes

    def has_below(self, prefix: str) -> bool:
        """Whether there is a tensor below a module."""
        return any(name.startswith(f"{prefix}.") for name in self.by_template)

    def find(self, pattern: str) -> list[tuple[tuple[str, ...], TensorInfo]]:
        """Find tensors by a name with `*` for some of its numbers; gives the numbers in these places."""
        if pattern not in self._found:
            self._found[pattern] = list(self._find(pattern))
        return self._found[pattern]

    def _find(self, pattern: str) -> Iterator[tuple[tuple[str, ...], TensorInfo]]:
        named = self.by_template.get(pattern)
        if named is not None:
            yield from named.items()
            return
        # Some of its places are numbers.
        places = _PLACE.findall(pattern)
        for numbers, info in self.by_template.get(template(pattern), {}).items():
            if all(place in ("*", number) for place, number in zip(places, numbers, strict=True)):
                stars = (number for place, number in zip(places, numbers, strict=True) if place == "*")
                yield tuple(stars), info


def _filled(name: str, numbers: Iterable[str]) -> str:
    """Put numbers in place of the stars of a name template."""
    for number in numbers:
        name = name.replace("*", number, 1)
    return name


def under_stored_names(known: ClassTensors, entry: ModuleRules, stored: Stored) -> ClassTensors:
    """Return a class's tensors under the names of a checkpoint, which may have other prefixes.

    Published files have the language model of one class as "language_model.model" or "model.language_model", say.

    Args:
        known: the tensors of the class.
        entry: what the registry says of each module of the architecture.
        stored: the tensors of the checkpoint.
    """
    lacked = ("model.", ""), (entry.model.lacks, "")
    pairs = [
        (prefix, other)
        for group in (*entry.model.spellings, *lacked, *_decoder_prefixes(known, entry, stored))
        for prefix, other in itertools.permutations(group, 2)
    ]
    names: dict[str, str] = {}
    for name in (*known.outside, *known.lists):
        is_here = stored.has(name)
        names[name] = name if is_here else next(filter(stored.has, _other_names(name, pairs)), name)

    # What is lost is named like what is stored beside it.
    moved = [_different_starts(name, other) for name, other in names.items() if name != other]
    for name, other in names.items():
        start, stored_start = next((pair for pair in moved if name.startswith(pair[0])), ("", ""))
        if name == other and not stored.has(name):
            names[name] = stored_start + name.removeprefix(start)
    outside = {names[name]: rule for name, rule in known.outside.items()}
    lists = {names[prefix]: layers for prefix, layers in known.lists.items()}
    return known._replace(outside=outside, lists=lists)


def _different_starts(name: str, other: str) -> tuple[str, str]:
    """Take away the parts that two names end with alike; what is left ends with a dot, or is empty."""
    parts, other_parts = name.split("."), other.split(".")
    while parts and other_parts and parts[-1] == other_parts[-1]:
        parts.pop()
        other_parts.pop()
    return "".join(f"{part}." for part in parts), "".join(f"{part}." for part in other_parts)


def _decoder_prefixes(known: ClassTensors, entry: ModuleRules, stored: Stored) -> Iterator[tuple[str, str]]:
    """What stands before the decoder layers in the class, and what does in the checkpoint, where that is another."""
    is_decoder = compile_pattern(entry.model.layers)
    lacks = entry.model.lacks
    of_class = [prefix for prefix in known.lists if is_decoder.fullmatch(f"{prefix.removeprefix(lacks)}.0")]
    of_files = [prefix for prefix in stored.prefixes if is_decoder.fullmatch(f"{prefix}.0")]
    for prefix, other in zip(of_class[:1], of_files[:1], strict=False):
        yield _different_starts(prefix, other)


def _other_names(name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Replace what a name begins with, by one pair of prefixes or several."""
    names = [name]
    for prefix, other in pairs:
        names += [other + one.removeprefix(prefix) for one in names if one.startswith(prefix) and prefix != other]
    yield from names[1:]
