"""Compares a checkpoint with what its class builds of this config.json: names, numbers of layers and experts, shapes.

    lost, misfits = compare_with_class(entry, decoded.tensors.values(), decoded.config, text)
    lost       # ["model.layers.3.mlp (3 tensors)", "vision_tower (vision or audio, 436 tensors)"]
    misfits    # ["hidden_size is 512, and lm_head.weight is [512, 256]"]

Engines do not check that in quantized models: vLLM loads one that lacks a layer, and computes noise. What the class has
is data (registry/architecture.py), and ConfigSizes is what config.json says of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ..files.model_files import short_repr
from ..files.shardfile import TensorInfo
from ..patterns import collapse
from ..registry.architecture import (
    ANY,
    HEAD,
    TASK_HEAD,
    TOWER,
    ClassTensors,
    LayerList,
    ModuleRules,
    TensorRule,
    find_class_tensors,
)
from .architecture import Stored, config_value, under_stored_names

_Value = TypeVar("_Value")
# What notes begin with that say nothing about a source.
NOT_CHECKED = "completeness not checked"
_TASK_HEAD = "the head of its task: no tensor is named score, classifier or the like"


class ClassComparison(NamedTuple):
    """What does not fit between a checkpoint and its class.

    Attributes:
        lost: what the checkpoint lacks, a text for each loss.
        misfits: shapes and numbers that contradict config.json or each other, a sentence for each.
    """

    lost: list[str]
    misfits: list[str]


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

    def alike(self) -> dict[frozenset[str], list[int]]:
        """Return the numbers of the layers that have the same names, by these names."""
        names_of: dict[int, set[str]] = {number: set() for number in sorted(self.numbers)}
        for name, found in self.present.items():
            for number in found:
                names_of[number].add(name)

        groups: dict[frozenset[str], list[int]] = {}
        for number, names in names_of.items():
            groups.setdefault(frozenset(names), []).append(number)
        return groups


class _Comparer:
    def __init__(self, known: ClassTensors, stored: Stored, config: ConfigSizes) -> None:
        self.known = known
        self.stored = stored
        self.config = config
        self.losses: list[Loss] = []
        self.misfits: list[str] = []
        # What does not fit, by what config.json says.
        self.wrong: dict[str, dict[str, None]] = {}

    def run(self) -> None:
        expected = {
            name: 1
            for name, rule in self.known.outside.items()
            if "*" not in name and self.config.holds(rule.conditions)
        }

        lost = {name for name in expected if not self.stored.find(name)}

        for prefix, layers in self.known.lists.items():
            tensors, is_lost = self._compare_list(prefix, layers)
            if tensors:
                expected[prefix] = tensors
            if is_lost:
                lost.add(prefix)

        self.losses = [
            *(Loss("", None, path, tensors) for path, tensors in _subtrees(expected, lost)),
            *self.losses,
        ]

        self._compare_shapes()

    def _compare_list(self, prefix: str, layers: LayerList) -> tuple[int, bool]:
        """Compare a list of layers. Returns how many tensors it must have, and whether all are lost."""
        stored = _Layers(prefix, layers, self.stored)
        kinds = [
            {name: rule for name, rule in kind.items() if self.config.holds(rule.conditions)} for kind in layers.kinds
        ]
        if not any(kinds):
            return 0, False
        length = self._length(layers.length, stored)
        fewest = min(sum(map(self._count, kind.values())) for kind in kinds if kind)
        if not stored.numbers:
            return length * fewest, True

        last = max(stored.numbers)
        if last >= length:
            self.misfits.append(f"{self.config.describe(layers.length)}, and the tensors have {prefix}.{last}")
        absent = (number for number in range(length) if number not in stored.numbers)
        self.losses += [Loss(prefix, number, "", fewest) for number in absent]

        for names, numbers in stored.alike().items():
            kind = _closest_kind(kinds, names)
            expected = {name: self._count(rule) for name, rule in kind.items()}
            within = [number for number in numbers if number < length]
            self.losses += [
                Loss(prefix, number, path, tensors)
                for path, tensors in _subtrees(expected, kind.keys() - names)
                for number in within
            ]
            self._compare_counts(stored, kind, within)

        return length * fewest, False

    def _count(self, rule: TensorRule) -> int:
        if not rule.repeats:
            return 1
        return max(self.config.size(rule.repeats) or [1])

    def _length(self, expression: str, stored: _Layers) -> int:
        found = max(stored.numbers, default=0) + 1
        sizes = self.config.size(expression) or {found}
        return found if found in sizes else max(sizes)

    def _compare_counts(self, stored: _Layers, kind: Mapping[str, TensorRule], numbers: Collection[int]) -> None:
        """Compare how many experts layers have."""
        counted = {
            name: rule.repeats
            for name, rule in kind.items()
            if rule.repeats and not rule.repeats.startswith(ANY) and name in stored.present
        }

        counts: dict[str, int] = {}
        short: set[int] = set()

        for name, expression in counted.items():
            found = stored.present[name]
            allowed = self.config.size(expression) or frozenset({max(found.values())})
            wrong = [number for number in numbers if found[number] and found[number] not in allowed]
            most = counts[name] = max(allowed)
            short |= {number for number in wrong if found[number] < most}

            beyond = next((number for number in wrong if found[number] > most), None)
            if beyond is not None:
                experts = f"{stored.prefix}.{beyond}.{name.partition('.*')[0]}"
                self.wrong.setdefault(self.config.describe(expression), {})[f"{experts} has {found[beyond]}"] = None

        for number in sorted(short):
            self.losses += self._lost_experts(stored.prefix, number, counts)

    def _lost_experts(self, prefix: str, number: int, counts: Mapping[str, int]) -> Iterator[Loss]:
        """Name the experts that a layer lacks; counts: how many there must be, by their names below the layer."""
        expected: dict[str, int] = {}
        lost: set[str] = set()
        for name, count in counts.items():
            stored = {numbers[0] for numbers, _ in self.stored.find(f"{prefix}.{number}.{name}")}
            paths = {str(expert): name.replace("*", str(expert), 1) for expert in range(count)}
            expected |= dict.fromkeys(paths.values(), 1)
            lost |= {path for expert, path in paths.items() if expert not in stored}
        for path, tensors in _subtrees(expected, lost):
            yield Loss(prefix, number, path, tensors)

    # Shapes.

    def _compare_shapes(self) -> None:
        for pattern, rules in self._rules():
            by_shape: dict[tuple[int, ...], list[TensorInfo]] = {}
            for _, info in self.stored.find(pattern):
                by_shape.setdefault(info.shape, []).append(info)

            for shape, infos in by_shape.items():
                misfits = [self._misfit(rule, shape) for rule in rules]
                if None not in misfits:
                    self.wrong.setdefault(str(misfits[0]), {}).update(dict.fromkeys(map(_shape_of, infos)))

        self.misfits += [
            f"{said}, and {next(iter(texts))}" + (f" ({len(texts)} tensors)" if len(texts) > 1 else "")
            for said, texts in self.wrong.items()
            if not any(set(other.split(" and ")) < set(said.split(" and ")) for other in self.wrong)
        ]

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


def _closest_kind(kinds: list[dict[str, TensorRule]], names: frozenset[str]) -> dict[str, TensorRule]:
    """Return the kind of layer that stored names are closest to, for each child of the layer by itself."""

    def distance(rules: Mapping[str, TensorRule], stored: Collection[str]) -> tuple[int, int]:
        return len(rules.keys() - stored), len(set(stored) - rules.keys())

    stored = _children(dict.fromkeys(names))
    by_child = [_children(kind) for kind in kinds]
    closest = {
        child: min(
            (kind[child] for kind in by_child if child in kind),
            key=lambda rules: distance(rules, stored.get(child, {})),
        )
        for child in dict.fromkeys(child for kind in by_child for child in kind)
    }
    wholes = [{name: rule for child in kind for name, rule in closest[child].items()} for kind in by_child]
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
    known = None if entry.model.decided is not None else find_class_tensors(entry.model.name)
    known = known and _with_parts_of(known, entry, config)
    if known is None:
        return None
    stored = Stored(entry, tensors, text)
    known = under_stored_names(known, entry, stored)
    if not entry.model.has_head:
        known = known._replace(outside=_without_head(known.outside, entry))
    comparer = _Comparer(known, stored, ConfigSizes(config, text, entry.model.text_config or "", known))
    comparer.run()
    lost = [_TASK_HEAD] if _lacks_task_head(entry, tensors, config) else []
    return ClassComparison([*lost, *_describe_losses(entry, comparer.losses)], comparer.misfits)


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
    notes = [f"the source lacks {text}" for text in comparison.lost]
    notes += [f"config.json does not fit the tensors: {text}" for text in comparison.misfits]
    return notes


def _lacks_task_head(entry: ModuleRules, tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> bool:
    """Whether the head of a task is not there, and vLLM does not make it of the output head (models/adapters.py)."""
    if TASK_HEAD not in entry.model.keep or config.get("classifier_from_token"):
        return False
    return all(entry.rule(info.module).keep != TASK_HEAD.why for info in tensors)


def _describe_losses(entry: ModuleRules, losses: Iterable[Loss]) -> list[str]:
    """One text for each kind of loss: "model.layers.{3..5}.mlp (9 tensors)"."""
    texts: list[str] = []
    layers_of: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        if loss.layer is None:
            texts.append(_describe_loss(loss.path, _reason(entry, loss.path), loss.tensors))
        else:
            layers_of.setdefault((loss.layers, loss.path), []).append(loss)

    for (prefix, path), group in layers_of.items():
        [where] = collapse(f"{prefix}.{loss.layer}" for loss in group)
        tensors = sum(loss.tensors for loss in group)
        texts.append(_describe_loss(f"{where}.{path}".removesuffix("."), None, tensors))
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


_KEY = re.compile(r"[#~]?[A-Za-z_][\w.]*")
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

        That of "#key" is the length of the list that the key has, that of "~key" its binary logarithm.
        """
        if key.startswith("#"):
            elements = self.value(key[1:])
            return len(elements) if isinstance(elements, list) else None
        if key.startswith("~"):
            numbers = self.size(key[1:])
            return max(numbers).bit_length() - 1 if numbers else None
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
            key = found.lstrip("#~")
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
