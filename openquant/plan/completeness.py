"""Compares a checkpoint with what its class builds of this config.json: names, numbers of layers and experts, shapes.

    lost, misfits, _ = compare_with_class(entry, decoded.tensors.values(), decoded.config, text)
    lost       # ["model.layers.3.mlp (3 tensors)", "vision_tower (vision or audio, 436 tensors)"]
    misfits    # ["hidden_size is 512, and lm_head.weight is [512, 256]"]

Engines do not check that in quantized models: vLLM loads one that lacks a layer, and computes noise. What the class has
is data (registry/architecture.py), and ConfigSizes is what config.json says of it. A size that it does not say must be
the same in all tensors that have it.

Last, added tokens of a tokenizer that have no row in the input embedding: engines read whatever lies behind it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import SourceError
from ..files.model_files import MAX_INDEX, parse_json, read_small, short_repr
from ..files.shardfile import TensorInfo
from ..models import config_value
from ..patterns import collapse, compile_pattern, group_pairs, list_first
from ..registry.architecture import (
    ANY,
    EMBEDDING,
    HEAD,
    MTP_LAYER,
    TASK_HEAD,
    TOWER,
    ClassTensors,
    LayerList,
    ModuleRules,
    TensorRule,
    find_class_tensors,
)
from .architecture import Stored, mtp_layer_finder, under_stored_names

_Value = TypeVar("_Value")
# How many layers are named as lost, and how many experts of a layer are looked at: config.json may say any number.
_MOST_LOST = 1_000
_MOST_EXPERTS = 10_000
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Tensors that files have beside those of their class: constants, scales, and parts as other tools store them.
_UNREAD = re.compile(
    r"\.experts\.|inv_freq$|position_ids$|patch_embedding\.|masked_bias$|\.attn\.bias$|\.attention\.bias$|_scale$|_zero_point$"
)
_NUMBERS = re.compile(r"\d+")
# What notes begin with that say nothing about a source.
NOT_CHECKED = "completeness not checked"
_TASK_HEAD = "the head of its task: no tensor is named score, classifier or the like"


class ClassComparison(NamedTuple):
    """What does not fit between a checkpoint and its class.

    Attributes:
        lost: what the checkpoint lacks, a text for each loss.
        misfits: shapes and numbers that contradict config.json or each other, a sentence for each.
        is_whole: whether transformers builds the class. If not, some of its tensors are only known by name.
    """

    lost: list[str]
    misfits: list[str]
    is_whole: bool


class Loss(NamedTuple):
    """Tensors that a checkpoint lacks: all below a module, or one.

    Attributes:
        layers: prefix of the list of layers that it is in; empty outside of them.
        layer: number of the layer; None outside.
        path: name of the module or tensor, below the layer if it is in one. Empty for the whole layer.
        tensors: how many are lost.
    """

    layers: str
    layer: int | None
    path: str
    tensors: int


class _Layers:
    """The layers of one list as they are stored."""

    def __init__(self, prefix: str, layers: LayerList, stored: Stored) -> None:
        self.prefix = prefix
        # For each name below a layer: in which layers it is, and how often.
        self.present: dict[str, Counter[int]] = {}
        for name in dict.fromkeys(name for kind in layers.kinds for name in kind):
            found = Counter(int(numbers[0]) for numbers, _ in stored.find(f"{prefix}.*.{name}"))
            if found:
                self.present[name] = found
        self.numbers = {number for found in self.present.values() for number in found}

    def alike(
        self, values: Mapping[str, list[str]]
    ) -> dict[tuple[frozenset[str], tuple[tuple[str, str], ...]], list[int]]:
        """Return the layers that have the same names and values, by both.

        Args:
            values: what config.json says of each layer, by the child of the layer that it decides about.
        """
        names_of: dict[int, set[str]] = {number: set() for number in sorted(self.numbers)}
        for name, found in self.present.items():
            for number in found:
                names_of[number].add(name)
        groups: dict[tuple[frozenset[str], tuple[tuple[str, str], ...]], list[int]] = {}
        for number, names in names_of.items():
            said = tuple((child, of_layers[number]) for child, of_layers in values.items() if number < len(of_layers))
            groups.setdefault((frozenset(names), said), []).append(number)
        return groups


class _Comparer:
    def __init__(self, entry: ModuleRules, known: ClassTensors, stored: Stored, config: ConfigSizes) -> None:
        self.entry = entry
        self.known = known
        self.stored = stored
        self.config = config
        self.losses: list[Loss] = []
        self.misfits: list[str] = []
        self.is_decoder = compile_pattern(entry.model.layers).fullmatch
        # What does not fit, by what config.json says.
        self.wrong: dict[str, dict[str, None]] = {}

    def run(self) -> None:
        expected = {
            name: 1
            for name, rule in self.known.outside.items()
            if "*" not in name and self.config.holds(rule.conditions)
        }

        lost = {name for name in expected if not self.stored.find(name)}

        # Files of multimodal models have more than their class.
        if self.entry.model.text_config is None:
            below = tuple(f"{prefix}." for prefix in self.known.lists)
            beside = [name for name in self.stored.by_template if not name.startswith(below)]
            self._compare_unread(beside, self.known.outside)

        for prefix, layers in self.known.lists.items():
            tensors, is_lost = self._compare_list(prefix, layers)
            if tensors:
                expected[prefix] = tensors
            if is_lost:
                lost.add(prefix)

        outside = [Loss("", None, path, tensors) for path, tensors in _subtrees(expected, lost)]
        self.losses = [*outside, *self.losses]

        self._compare_shapes()

    def _compare_list(self, prefix: str, layers: LayerList) -> tuple[int, bool]:
        """Compare a list of layers. Returns how many tensors it must have, and whether all are lost."""
        stored = _Layers(prefix, layers, self.stored)
        kinds = [
            {name: rule for name, rule in kind.items() if self.config.holds(rule.conditions)} for kind in layers.kinds
        ]
        if not any(kinds):
            return 0, False
        if self.is_decoder(f"{prefix}.0"):
            stored_names = [name for name in self.stored.by_template if name.startswith(f"{prefix}.*.")]
            self._compare_unread(stored_names, {f"{prefix}.*.{name}" for kind in kinds for name in kind})

        length = self._length(layers.length, stored)
        fewest = min(sum(map(self._count, kind.values())) for kind in kinds if kind)
        if not stored.numbers:
            return length * fewest, True

        last = max(stored.numbers)
        if last >= length:
            self.misfits.append(f"{self.config.describe(layers.length)}, and the tensors have {prefix}.{last}")
        if length - len(stored.numbers) > _MOST_LOST:
            said = self.config.describe(layers.length)
            self.misfits.append(f"{said}, and the tensors have {len(stored.numbers)} of {prefix}, the last {last}")
        else:
            absent = (number for number in range(length) if number not in stored.numbers)
            self.losses += [Loss(prefix, number, "", fewest) for number in absent]

        for (names, values), numbers in stored.alike(self._values_of(layers, length)).items():
            kind = _closest_kind(kinds, layers, dict(values), names)
            expected = {name: self._count(rule) for name, rule in kind.items()}
            within = [number for number in numbers if number < length]
            self.losses += [
                Loss(prefix, number, path, tensors)
                for path, tensors in _subtrees(expected, kind.keys() - names)
                for number in within
            ]
            self._compare_experts(stored, kind, within)

        return length * fewest, False

    def _compare_unread(self, stored_names: Iterable[str], names: Iterable[str]) -> None:
        """Name tensors that the class does not have: engines refuse them, or answer without them."""
        if not self.known.is_built:
            return

        # Stacked experts are there under both names.
        read = {_NUMBERS.sub("*", name).removesuffix(".weight") for name in names}
        unread = [
            name
            for name in stored_names
            if _NUMBERS.sub("*", name).removesuffix(".weight") not in read
            and not _UNREAD.search(name)
            and not (name.endswith(".bias") and self.config.has_biases)
            and self.entry.rule(name.rpartition(".")[0]).keep not in (MTP_LAYER, TASK_HEAD.why)
        ]

        if unread:
            self.misfits.append(f"with it {self.known.name} has no {list_first(unread, 4)}")

    def _values_of(self, layers: LayerList, length: int) -> dict[str, list[str]]:
        """The values of keys that choose between kinds of layers, for each layer, by child of the layer."""
        said = {child: self.config.by_layer(key, min(length, _MOST_LOST)) for child, (key, _) in layers.choices.items()}
        return {child: values for child, values in said.items() if values is not None}

    def _count(self, rule: TensorRule) -> int:
        if not rule.repeats:
            return 1
        return max(self.config.size(rule.repeats) or [1])

    def _length(self, expression: str, stored: _Layers) -> int:
        found = max(stored.numbers, default=0) + 1
        sizes = self.config.size(expression) or {found}
        return found if found in sizes else max(sizes)

    def _compare_experts(self, stored: _Layers, kind: Mapping[str, TensorRule], numbers: Collection[int]) -> None:
        """Compare how many experts layers have."""
        repeats_of = {name: rule.repeats for name, rule in kind.items() if rule.repeats and name in stored.present}

        for number in numbers:
            counts = {
                name: self._count_experts(stored, name, repeats, number)
                for name, repeats in repeats_of.items()
                if stored.present[name][number]
            }
            # Looking for each expert by its name takes seconds where there are tens of thousands.
            if any(stored.present[name][number] < count for name, count in counts.items()):
                self.losses += self._lost_experts(stored.prefix, number, counts)

    def _count_experts(self, stored: _Layers, name: str, repeats: str, number: int) -> int:
        """How many experts a layer must have; more than config.json counts are a misfit."""
        if repeats == ANY:
            return self._experts_of(f"{stored.prefix}.{number}", name)

        found = stored.present[name]
        allowed = self.config.size(repeats) or frozenset({max(found.values())})
        if found[number] in allowed:
            return found[number]
        most = max(allowed)
        experts = f"{stored.prefix}.{number}.{name.partition('.*')[0]}"
        if found[number] > most:
            self.wrong.setdefault(self.config.describe(repeats), {f"{experts} has {found[number]}": None})
        return most

    def _experts_of(self, layer: str, name: str) -> int:
        """How many experts a layer has: as many as its router has rows, or else one more than the last one's number."""
        module = name.partition(".*")[0].rpartition(".")[0]
        for router in ("gate.weight", "gate_weight"):
            for _, info in self.stored.find(f"{layer}.{module}.{router}"):
                return info.shape[0]
        return 1 + max(int(found[0]) for found, _ in self.stored.find(f"{layer}.{name}"))

    def _lost_experts(self, prefix: str, number: int, counts: Mapping[str, int]) -> Iterator[Loss]:
        """Name the experts that a layer lacks; counts: how many there must be, by their names below the layer."""
        expected: dict[str, int] = {}
        lost: set[str] = set()
        for name, count in counts.items():
            stored = {numbers[0] for numbers, _ in self.stored.find(f"{prefix}.{number}.{name}")}
            paths = {str(expert): name.replace("*", str(expert), 1) for expert in range(min(count, _MOST_EXPERTS))}
            expected |= dict.fromkeys(paths.values(), 1)
            lost |= {path for expert, path in paths.items() if expert not in stored}
        for path, tensors in _subtrees(expected, lost):
            yield Loss(prefix, number, path, tensors)

    # Shapes.

    def _compare_shapes(self) -> None:
        unsaid: dict[str, dict[int, list[TensorInfo]]] = {}

        for pattern, rules in self._rules():
            by_shape = group_pairs((info.shape, info) for _, info in self.stored.find(pattern))
            for shape, infos in by_shape.items():
                misfits = [self._misfit(rule, shape) for rule in rules]
                if None not in misfits:
                    self.wrong.setdefault(str(misfits[0]), {}).update(dict.fromkeys(map(_shape_of, infos)))
                elif len(rules) == 1:
                    for size, length in zip(rules[0].shape, shape, strict=True):
                        if size != ANY and self.config.size(size) is None:
                            unsaid.setdefault(size, {}).setdefault(length, []).extend(infos)

        self.misfits += [
            f"{said}, and {next(iter(texts))}" + (f" ({len(texts)} tensors)" if len(texts) > 1 else "")
            for said, texts in self.wrong.items()
            if not any(set(other.split(" and ")) < set(said.split(" and ")) for other in self.wrong)
        ]

        for lengths in unsaid.values():
            usual, *others = sorted(lengths.values(), key=len, reverse=True)
            self.misfits += [f"{_shape_of(other[0])}, and {_shape_of(usual[0])}" for other in others]

    def _rules(self) -> Iterator[tuple[str, list[TensorRule]]]:
        for name, rule in self.known.outside.items():
            yield name, [rule]
        for prefix, layers in self.known.lists.items():
            for name in dict.fromkeys(name for kind in layers.kinds for name in kind):
                rules = [kind[name] for kind in layers.kinds if name in kind]
                yield f"{prefix}.*.{name}", list(dict.fromkeys(rules))

    def _misfit(self, rule: TensorRule, shape: tuple[int, ...]) -> str | None:
        """What config.json says of the first axis that is of another length; None if all fit."""
        if len(shape) != len(rule.shape):
            return f"it must have {len(rule.shape)} axes"
        for expression, length in zip(rule.shape, shape, strict=True):
            sizes = self.config.size(expression)
            if sizes is not None and length not in sizes:
                return self.config.describe(expression)
        return None


def _shape_of(info: TensorInfo) -> str:
    return f"{info.name} is {list(info.shape)}"


def _closest_kind(
    kinds: list[dict[str, TensorRule]], layers: LayerList, values: Mapping[str, str], names: frozenset[str]
) -> dict[str, TensorRule]:
    """Return the kind of layer that stored names are closest to, for each child of the layer by itself."""

    def distance(rules: Mapping[str, TensorRule], stored: Collection[str]) -> tuple[int, int]:
        return len(rules.keys() - stored), len(set(stored) - rules.keys())

    stored = {child: list(names_of) for child, names_of in _children(dict.fromkeys(names)).items()}
    by_child = [_children(kind) for kind in kinds]
    closest: dict[str, dict[str, TensorRule]] = {}
    possible = set(range(len(kinds)))
    for child in dict.fromkeys(child for kind in by_child for child in kind):
        numbers = set(range(len(kinds)))
        chosen = layers.choices[child][1].get(values[child]) if child in values else None
        if chosen is not None:
            numbers = set(chosen)
            possible &= {
                number
                for number, kind in enumerate(by_child)
                if any((child in kind) == (child in by_child[one]) for one in numbers)
            }
        choices = [by_child[number][child] for number in sorted(numbers) if child in by_child[number]]
        if choices:
            closest[child] = min(choices, key=lambda rules: distance(rules, stored.get(child, ())))
    wholes = [
        {name: rule for child in by_child[number] for name, rule in closest.get(child, {}).items()}
        for number in sorted(possible) or range(len(kinds))
    ]
    return min(wholes, key=lambda rules: distance(rules, names))


def _children(rules: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
    """Group what is below a layer by the first part of the name."""
    groups: dict[str, dict[str, _Value]] = {}
    for name, rule in rules.items():
        groups.setdefault(name.partition(".")[0], {})[name] = rule
    return groups


def _subtrees(expected: Mapping[str, int], lost: Collection[str]) -> list[tuple[str, int]]:
    """Find the highest modules of which everything is lost, each with its number of tensors."""
    if not lost:
        return []
    kept = {path for name in expected if name not in lost for path in _ancestors(name)}
    subtrees: dict[str, int] = {}
    for name in expected:
        if name in lost:
            highest = next((path for path in _ancestors(name) if path not in kept), name)
            subtrees[highest] = subtrees.get(highest, 0) + expected[name]
    return list(subtrees.items())


def _ancestors(name: str) -> list[str]:
    """The modules that a tensor is in, the outermost first: "mlp", "mlp.experts", .. and its own name."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def compare_with_class(
    entry: ModuleRules, tensors: Collection[TensorInfo], config: Mapping[str, Any], text: Mapping[str, Any]
) -> ClassComparison | None:
    """Compare tensors with those that the class has.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        config: config.json.
        text: the language model's part of it, as text_config returns it.

    Returns:
        What does not fit; None if nothing is known of the class.
    """
    if entry.model.decided is not None:
        return None
    known = find_class_tensors(entry.model.name)
    known = known and _with_parts_of(known, entry, config)
    if known is None:
        return None

    stored = Stored(entry, tensors, text)
    known = under_stored_names(known, entry, stored)
    if not entry.model.has_head:
        known = known._replace(outside=_without_head(known.outside, entry))
    comparer = _Comparer(entry, known, stored, ConfigSizes(config, text, entry.model.text_config or "", known))
    comparer.run()
    lost = [_TASK_HEAD] if _lacks_task_head(entry, tensors, config) else []
    return ClassComparison([*lost, *_describe_losses(entry, comparer.losses)], comparer.misfits, known.is_built)


def _with_parts_of(known: ClassTensors, entry: ModuleRules, config: Mapping[str, Any]) -> ClassTensors | None:
    """Leave out the towers if config.json has other models in their place; None if it has another language model."""
    others = {
        path for path, kind in known.parts.items() if config_value(config, f"{path}.model_type") not in (None, kind)
    }
    if entry.model.text_config in others:
        return None
    if not others:
        return known

    def is_tower(name: str) -> bool:
        return entry.rule(name.rpartition(".")[0]).keep == TOWER

    return known._replace(
        outside={name: rule for name, rule in known.outside.items() if not is_tower(name)},
        lists={prefix: layers for prefix, layers in known.lists.items() if not is_tower(f"{prefix}.0.weight")},
    )


def _without_head(outside: Mapping[str, TensorRule], entry: ModuleRules) -> dict[str, TensorRule]:
    """Leave the output head out."""
    return {
        name: rule
        for name, rule in outside.items()
        if entry.rule(name.removesuffix(".weight").removesuffix(".bias")).keep != HEAD.why
    }


def completeness_notes(
    entry: ModuleRules, tensors: Collection[TensorInfo], config: Mapping[str, Any], text: Mapping[str, Any]
) -> list[str]:
    """Return notes about what a source lacks, and what of config.json does not fit it.

    The arguments are those of `compare_with_class`.
    """
    comparison = compare_with_class(entry, tensors, config, text)
    if comparison is None:
        return [f"{NOT_CHECKED}: nothing says which tensors {entry.model.name} has"]
    # Nothing is wrong without MTP layers: transformers drops them when it saves, and leaves their count.
    lost = [*_lost_mtp_layers(entry, tensors, text), *comparison.lost]
    notes = [f"the source lacks {text}" for text in lost]
    notes += [f"config.json does not fit the tensors: {text}" for text in comparison.misfits]
    if not comparison.is_whole:
        notes.insert(0, f"{NOT_CHECKED} by all sizes: transformers does not build all of {entry.model.name}")
    return notes


def _lacks_task_head(entry: ModuleRules, tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> bool:
    """Whether the head of a task is not there, and vLLM does not make it of the output head (models/adapters.py)."""
    if TASK_HEAD not in entry.model.keep or config.get("classifier_from_token"):
        return False
    return all(entry.rule(info.module).keep != TASK_HEAD.why for info in tensors)


def _lost_mtp_layers(entry: ModuleRules, tensors: Iterable[TensorInfo], text: Mapping[str, Any]) -> Iterator[str]:
    """The MTP layers that config.json counts, if none of them is there."""
    counts = [key for key in _MTP_COUNTS if type(text.get(key)) is int and text[key] > 0]
    has_mtp = entry.model.draft_layers is not None or MTP_LAYER in (keep.why for keep in entry.model.keep)
    if not counts or not has_mtp:
        return
    is_mtp_layer = mtp_layer_finder(entry.model, dict(text))
    if not any(is_mtp_layer(info.module) or entry.rule(info.module).keep == MTP_LAYER for info in tensors):
        yield f"its MTP layers, and {counts[0]} is {short_repr(text[counts[0]])}"


def check_layer_count(text: Mapping[str, Any]) -> None:
    """Refuse a number of decoder layers that is none.

    Args:
        text: the language model's part of config.json, as text_config returns it.

    Raises:
        SourceError: num_hidden_layers is not a whole number.
    """
    count = text.get("num_hidden_layers")
    if count is not None and (type(count) is not int or count < 0):
        raise SourceError(
            f"config.json gives num_hidden_layers {short_repr(count)}, which is no number of layers",
            "correct it, or download config.json again",
        )


def _describe_losses(entry: ModuleRules, losses: Iterable[Loss]) -> list[str]:
    """One text for each kind of loss: "model.layers.{3..5}.mlp (9 tensors)"."""
    texts: list[str] = []
    layers_of: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        if loss.layer is None:
            texts.append(_describe_loss(loss.path, _reason(entry, loss.path), loss.tensors))
        else:
            layers_of.setdefault((loss.layers, loss.path), []).append(loss)

    # What is lost in the same layers is one loss.
    by_layers: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for (prefix, path), group in layers_of.items():
        layers = tuple(f"{prefix}.{loss.layer}" for loss in group)
        by_layers.setdefault(layers, []).append((path, sum(loss.tensors for loss in group)))
    for layers, paths in by_layers.items():
        where = collapse(layers)[0]
        tensors = sum(number for _, number in paths)
        below = collapse(path for path, _ in paths)
        whole = f"{', '.join(below)} of {where}"
        if len(below) == 1:
            whole = f"{where}.{below[0]}".removesuffix(".")
        texts.append(_describe_loss(whole, None, tensors))
    return texts


def _describe_loss(path: str, reason: str | None, tensors: int) -> str:
    details = [*filter(None, [reason])]
    if tensors > 1:
        details.append(f"{short_repr(tensors)} tensors")
    if not details:
        return path
    return f"{path} ({', '.join(details)})"


def _reason(entry: ModuleRules, path: str) -> str | None:
    """What the registry calls a module, such as "vision tower"; None if it has no word for it."""
    for module in (path, path.rpartition(".")[0]):
        if module and (reason := entry.rule(module).keep):
            return reason
    return None


_KEY = re.compile(r"#?[A-Za-z_][\w.]*")
_BY_LAYER = re.compile(r"(.*?)([@<%]?)(\d?)")
_TIED = "tie_word_embeddings"


class ConfigSizes:
    """config.json as it decides about tensors.

    Args:
        config: its contents.
        text: the language model's part of it, as text_config returns it.
        text_path: where that part is in config.json, such as "text_config"; empty for the top level.
        known: what the class says of keys that are missing.
    """

    def __init__(self, config: Mapping[str, Any], text: Mapping[str, Any], text_path: str, known: ClassTensors) -> None:
        self._config = config
        self._text = text
        self._text_path = text_path
        self._known = known
        self._sizes: dict[str, frozenset[int] | None] = {}

    def value(self, key: str) -> Any:
        """Return the value of a key, nested ones joined by dots; None if config.json does not say it.

        That of "#key" is the length of the list that the key has.
        """
        if key.startswith("#"):
            elements = self.value(key[1:])
            return len(elements) if isinstance(elements, list) else None
        value = self._find_setting(key)
        if value is None and key in self._known.aliases:
            value = self._find_setting(self._known.aliases[key])
        return value

    def _find_setting(self, key: str) -> Any:
        value = config_value(self._config, key)
        if value is None and key.startswith(self._text_path):
            # Older files have the language model's keys at the top level, or under other names.
            value = self._text.get(key.removeprefix(self._text_path).removeprefix("."))
        return value

    @property
    def has_biases(self) -> bool:
        """Whether config.json turns biases on, under one of the names that engines look at."""
        return any("bias" in key and value is True for key, value in self._text.items())

    def holds(self, conditions: Iterable[tuple[str, bool]]) -> bool:
        """Whether conditions of a rule are met."""
        return all(self._truth(key) == truth for key, truth in conditions)

    def _truth(self, key: str) -> bool:
        if key.endswith(_TIED):
            said = [part[_TIED] for part in (self._config, self._text) if part.get(_TIED) is not None]
            return any(said or [self._known.defaults.get(key, False)])

        value = self.value(key)
        # JSON's null is said, and false.
        if value is None and not self._has_key(key):
            return self._known.defaults.get(key, False)
        return bool(value)

    def _has_key(self, key: str) -> bool:
        """Whether config.json has the key, whatever its value."""
        parent, _, last = key.rpartition(".")
        part = self._config
        if parent:
            part = config_value(self._config, parent)
        return isinstance(part, Mapping) and last in part

    def by_layer(self, key: str, length: int) -> list[str] | None:
        """Return what a key says of each layer, as LayerList.choices has keys; None if config.json does not say it."""
        path, kind, first = _BY_LAYER.fullmatch(key).groups()  # type: ignore[union-attr]
        said = self.value(path)
        if kind == "@" and isinstance(said, list):
            return [str(number + int(first) in said) for number in range(length)]
        if not kind and isinstance(said, (list, str)) and len(said) >= length:
            return list(map(str, said[:length]))
        count = max(self.size(path) or (0,))
        if count and kind == "<":
            return [str(number < count) for number in range(length)]
        if count and kind == "%":
            return [str(number % count == 0) for number in range(length)]
        return None

    def size(self, expression: str) -> frozenset[int] | None:
        """Return the numbers that a size may be; None if config.json does not say it."""
        if expression not in self._sizes:
            self._sizes[expression] = self._evaluate(expression)
        return self._sizes[expression]

    def _evaluate(self, expression: str) -> frozenset[int] | None:
        if expression.startswith(("?", ANY)):
            return None
        # A key may have a list with a number for each layer.
        choices: dict[str, list[int | float]] = {}
        for key in _KEY.findall(expression):
            value = self.value(key)
            if value is None and key in self._known.derived:
                value = sorted(self.size(self._known.derived[key]) or ())
            numbers = value if isinstance(value, list) else [value]
            if not numbers or not all(map(_is_size, numbers)):
                return None
            choices[key] = list(dict.fromkeys(numbers))

        sizes = (
            _calculate(expression, dict(zip(choices, numbers, strict=True)))
            for numbers in itertools.product(*choices.values())
        )
        return frozenset(size for size in sizes if size is not None) or None

    def describe(self, expression: str) -> str:
        """Say what config.json says of a size: "num_attention_heads is 16 and head_dim is 128"."""
        keys: dict[str, None] = {}
        for found in _KEY.findall(expression):
            key = found.lstrip("#")
            is_derived = self.value(key) is None and key in self._known.derived
            keys |= dict.fromkeys(_KEY.findall(self._known.derived[key]) if is_derived else [key])
        return (
            " and ".join(f"{key} is {short_repr(self.value(key))}" for key in keys)
            or f"it is {expression} in the class"
        )


def _is_size(value: object) -> bool:
    return (type(value) is int and value >= 0) or (type(value) is float and 0 <= value < math.inf)


def _calculate(expression: str, numbers: Mapping[str, int | float]) -> int | None:
    """Calculate a sum of products; None if it is no whole number."""
    total = 0
    for term in expression.split("+"):
        above, *below = term.split("/")
        product = math.prod(_factor(factor, numbers) for factor in above.split("*"))
        divisor = math.prod(_factor(factor, numbers) for factor in below)
        if not divisor or product % divisor:
            return None
        total += int(product // divisor)
    return total


def _factor(factor: str, numbers: Mapping[str, int | float]) -> int | float:
    if factor in numbers:
        return numbers[factor]
    return int(factor)


# Text models keep the tokenizer of their multimodal sisters, whose tokens for images they never see.
_OTHER_MODALITY = re.compile("image|audio|video|vision|speech", re.IGNORECASE)


def token_misfits(root: Path, entry: ModuleRules, tensors: Iterable[TensorInfo]) -> list[str]:
    """Compare the added tokens of a tokenizer with the rows of the input embedding.

    Args:
        root: directory of the checkpoint.
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.

    Returns:
        One sentence if a token has no row; empty if all have one, or if there is no tokenizer.
    """
    try:
        file, texts = _read_added_tokens(root)
    except (SourceError, LookupError, AttributeError, TypeError, ValueError, RecursionError):
        # Damaged files are found by those that read them.
        return []

    last = max((number for number, text in texts.items() if not _OTHER_MODALITY.search(text)), default=-1)

    tables = [info for info in tensors if len(info.shape) == 2 and entry.rule(info.module).keep == EMBEDDING.why]
    table = max(tables, key=lambda info: info.shape[0], default=None)
    if table is None or last < table.shape[0]:
        return []
    return [
        f"{file} does not fit the tensors: token {short_repr(texts[last])} has number {last}, and "
        f"{table.name} is {list(table.shape)}"
    ]


def _read_added_tokens(root: Path) -> tuple[str, dict[int, str]]:
    """The file with a tokenizer's added tokens, and their texts by number; of a large file only these are parsed."""
    name = "tokenizer.json"
    if (root / name).is_file():
        text = read_small(root / name, name, MAX_INDEX).decode(errors="replace")
        start = text.index("[", text.index('"added_tokens"'))
        added, _ = json.JSONDecoder().raw_decode(text, start)
        return name, {token["id"]: str(token["content"]) for token in added if type(token["id"]) is int}

    name = "tokenizer_config.json"
    if not (root / name).is_file():
        return name, {}
    decoder = parse_json(read_small(root / name, name), name)["added_tokens_decoder"]
    return name, {int(number): str(token["content"]) for number, token in decoder.items()}
