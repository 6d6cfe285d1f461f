"""Writes openquant/registry/class_tensors.jsonl: the tensors that each class has, with sizes in terms of config.json.

    python tools/class_tensors.py                           # all classes, about ten minutes
    python tools/class_tensors.py Qwen3ForCausalLM          # these; the lines of all others stay

Each class of the small models (tests/support) is built by transformers without weights: as it is, and once for each
key of its config with another value of this key alone. What changes with a key says what a size is made of, and what
decides whether a tensor is there. openquant/registry/architecture.py says what the lines mean.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import transformers

from class_builds import BASE, UNCHECKED, Builds, Changes, Entry, Structure
from class_sizes import Sizes, derived_sizes
from openquant.models import MODELS
from openquant.patterns import compile_pattern
from openquant.registry.architecture import PATH
from support import small_checkpoints, small_models

# A part that a toggle adds with more tensors outside of lists than this is left out.
_MOST_ADDED = 100
# Of lists of layers, choices between kinds that no key alone makes.
_CHOICES = {
    ("Gemma3nForCausalLM", "model.layers"): {
        "self_attn": ["num_hidden_layers+-1*num_kv_shared_layers<", {"True": [0], "False": [1]}]
    },
    ("Gemma3nForConditionalGeneration", "model.language_model.layers"): {
        "self_attn": [
            "text_config.num_hidden_layers+-1*text_config.num_kv_shared_layers<",
            {"True": [0], "False": [1]},
        ]
    },
}
# Of classes that transformers builds by another's name: what the code beside the published weights says.
_PUBLISHED_DEFAULTS = {("MiniCPMForCausalLM", "tie_word_embeddings"): True}
# Tensors that transformers builds in any case, and vLLM (models/radio.py:170) where config.json has this key.
_IF_SAID = {
    "vision_model.radio_model.model.patch_generator.video_embedder.weight": "vision_config.video_temporal_patch_size"
}


def _below(entries: Iterable[str], child: str) -> set[str]:
    return {name for name in entries if name.partition(".")[0] == child}


def _by_layer(path: str, values: Any, length: int) -> Iterator[tuple[str, Callable[[Any], list[str]]]]:
    """How a key may say something of each layer: by a value for each, by the numbers of some, from 0 or 1 on, by how
    many the first ones are, or by the distance between some.
    """
    if isinstance(values, (list, str)) and len(values) == length and not any(isinstance(one, dict) for one in values):
        yield path, lambda of_layers: list(map(str, of_layers))
    if isinstance(values, list) and values and all(type(number) is int and 0 <= number <= length for number in values):
        for first in (0, 1):
            if all(first <= number < length + first for number in values):
                yield f"{path}@{first}", partial(_has_numbers, range(first, length + first))
    if type(values) is int and values > 0:
        yield f"{path}<", lambda count: [str(layer < count) for layer in range(length)]
        yield f"{path}%", lambda count: [str(layer % max(count, 1) == 0) for layer in range(length)]


def _divides(kinds: Mapping[str, set[int]], having: set[int]) -> bool:
    """Whether the kinds of a value all have a child of a layer, or all lack it, and those of another do not."""
    return len({value <= having for value in kinds.values()}) > 1 and all(
        value <= having or not value & having for value in kinds.values()
    )


def _has_numbers(layers: range, numbers: Any) -> list[str]:
    return [str(layer in numbers) for layer in layers]


class Draft:
    """The line of a class: which tensors it has, and when."""

    def __init__(self, architecture: str, published: bool = True) -> None:
        self.architecture = architecture
        self.sizes = Sizes(architecture, published)
        self.builds = self.sizes.builds
        # Which of the kinds of a list the layers with certain names are of.
        self.origins: dict[tuple[str, frozenset[str]], int] = {}
        self._causes_of: dict[tuple[str, str], set[str]] = {}

    def line(self) -> dict[str, Any]:
        """Return the class's line."""
        data = self.lines()
        _index_sizes(data)
        keys = {key for size in data["sizes"] for key in re.findall(r"[a-zA-Z_][\w.]*", size)} | data["defaults"].keys()
        keys |= {key for size in data["derived"].values() for key in size.split("/")}
        # The numbers that count or choose layers, where config.json need not say them.
        deciding = [data["sizes"][length] for length, *_ in data["lists"].values()]
        deciding += [key for _, _, choices in data["lists"].values() for key, _ in choices.values()]
        for key in sorted(
            {key for text in deciding for key in re.findall(r"[a-zA-Z_][\w.]*", text)} - self.builds.said
        ):
            default = self._default(key)
            if type(default) is int and default > 0:
                data["derived"].setdefault(key, str(default))
        data["aliases"] = {path: other for path, other in sorted(self.builds.aliases.items()) if path in keys}
        return data

    def lines(self) -> dict[str, Any]:
        """Return the class's line with sizes written out."""
        base = self.builds.structure(BASE)
        assert base is not None
        outside = {
            template: self._entry("", 0, template, BASE) for template in base.outside if not UNCHECKED.match(template)
        }
        for template in outside.keys() & _IF_SAID.keys():
            outside[template][2].append([_IF_SAID[template], True])

        lists: dict[str, list[dict[str, Any]]] = {}
        for prefix, elements in base.lists.items():
            lists[prefix] = [
                {
                    template: self._entry(prefix, number, template, BASE)
                    for template in entries
                    if not UNCHECKED.match(f"{prefix}.{template}")
                }
                for number, entries in sorted(elements.items())
            ]
        for prefix, elements in base.lists.items():
            for number, entries in enumerate(elements.values()):
                self.origins.setdefault((prefix, frozenset(entries)), number)
        used: dict[str, Any] = {}
        for path, value in self.sizes.toggles:
            changes = frozenset({(path, value)})
            other = self.builds.structure(changes)
            assert other is not None
            if path in self.sizes.counts:
                continue
            changed = self._toggled(outside, base.outside, other.outside, "", 0, path, value)
            for prefix, elements in base.lists.items():
                sets = {frozenset(entries) for entries in elements.values()}
                for number, entries in elements.items():
                    others = other.lists.get(prefix, {}).get(number, {})
                    if frozenset(others) in sets - {frozenset(entries)}:
                        continue
                    kind = lists[prefix][number] if number < len(lists[prefix]) else None
                    if kind is not None:
                        changed |= self._toggled(kind, entries, others, prefix, number, path, value)
            for prefix, elements in other.lists.items():
                if prefix not in base.lists and len(other.outside) <= len(base.outside) + _MOST_ADDED:
                    changed = True
                    lists[prefix] = [
                        {
                            template: [*self._entry(prefix, number, template, changes)[:2], [[path, bool(value)]]]
                            for template in entries
                        }
                        for number, entries in sorted(elements.items())
                    ]
            if changed:
                used[path] = bool(self._default(path))

        self._more_kinds(base, outside, lists)
        small = small_models.MODELS.get(self.architecture)
        if self.builds.published and small and "experts" in (small.drop or ""):
            saved = Draft(self.architecture, published=False)
            other_lists = saved.lines()["lists"]
            for prefix in lists.keys() & other_lists.keys():
                lists[prefix] += _renamed(other_lists[prefix][1])
        data: dict[str, Any] = {"class": self.architecture, "defaults": used}
        data["lists"] = {}
        for prefix, kinds in lists.items():
            present_on = next(
                (
                    c
                    for c in (BASE, *(frozenset({t}) for t in self.sizes.toggles))
                    if self.builds.value((prefix, 0, "", -1), c)
                ),
                BASE,
            )
            structure = self.builds.structure(present_on)
            assert structure is not None
            count = self.sizes.find((prefix, min(structure.lists.get(prefix, {0: {}})), "", -1), present_on)
            if not re.search("[a-z]", count):
                count = self._layer_count(prefix) or f"?{prefix}"
            unique = [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]
            places = [unique.index(kind) for kind in kinds]
            choices = self._choices(prefix, unique, places) | _CHOICES.get((self.architecture, prefix), {})
            data["lists"][prefix] = [count, unique, choices]
        data["outside"] = outside
        data["parts"] = parts_of(self.builds.config)
        data["derived"] = derived_sizes(self.builds)
        data["built"] = all(".experts." in name for name in self.builds.extra)
        return data

    def _choices(self, prefix: str, unique: list[dict[str, Any]], places: list[int]) -> dict[str, Any]:
        """Find the keys with a value for each layer that say which kind a child of it is of.

        Returns, for each child, the key and the kinds that each value of it goes with.
        """
        choices: dict[str, Any] = {}
        base = self.builds.structure(BASE)
        assert base is not None
        elements = base.lists.get(prefix, {})
        # Keys that config.json says come first, where it may say the same by two.
        for path, base_values in sorted(self.builds.defaults.items(), key=lambda item: item[0] not in self.builds.said):
            changed = [other for other_path, other in self.sizes.others if other_path == path]
            changed += self.sizes.numbers.get(path, [])
            for key, of_layers in _by_layer(path, base_values, len(elements)):
                builds = [(of_layers(base_values), base)]
                for other in changed:
                    structure = self.builds.structure(frozenset({(path, other)}))
                    assert structure is not None
                    taken = self.builds.taken(path, other)
                    builds.append((of_layers(taken if type(taken) is type(base_values) else other), structure))
                # A number must be seen to move the layers that it decides about.
                if isinstance(base_values, (list, str)) or len({tuple(of_layers) for of_layers, _ in builds}) > 1:
                    self._add_choices(choices, key, builds, prefix, unique, places)
        return choices

    def _add_choices(
        self,
        choices: dict[str, Any],
        key: str,
        builds: list[tuple[list[str], Structure]],
        prefix: str,
        unique: list[dict[str, Any]],
        places: list[int],
    ) -> None:
        """Add the children of layers that a key decides about; values of the key by layer stand with each build."""
        elements = builds[0][1].lists.get(prefix, {})
        if len(builds[0][0]) == len(elements) > 1:
            for child in sorted({name.partition(".")[0] for entries in elements.values() for name in entries}):
                kinds: dict[str, set[int]] = {}
                causes = False
                for of_layers, structure in builds:
                    for number, entries in structure.lists.get(prefix, {}).items():
                        names = frozenset(entries)
                        causes |= number in elements and _below(entries, child) != _below(elements[number], child)
                        if number < len(of_layers) and (prefix, names) in self.origins:
                            kinds.setdefault(of_layers[number], set()).add(places[self.origins[prefix, names]])
                variants = [
                    {frozenset(_below(names, child)) for names in self._names_of(prefix, numbers, places)}
                    for numbers in kinds.values()
                ]
                having = {number for number, kind in enumerate(unique) if _below(kind, child)}
                if causes and child not in choices and _divides(kinds, having):
                    lacking = set(range(len(unique))) - having
                    choices[child] = [
                        key,
                        {value: sorted(having if numbers & having else lacking) for value, numbers in kinds.items()},
                    ]
                causes = causes and not self._causes(prefix, child) - {re.split("[@<%]", key)[0]}
                disjoint = not set.intersection(*variants) if len(variants) > 1 else False
                if causes and child not in choices and (disjoint or not set(key) & {*"@<%"}):
                    choices[child] = [key, {value: sorted(numbers) for value, numbers in kinds.items()}]

    def _causes(self, prefix: str, child: str) -> set[str]:
        """The keys with a number that decide which tensors a child of a layer has."""
        if (prefix, child) not in self._causes_of:
            base = self.builds.structure(BASE)
            assert base is not None
            expected = {number: _below(entries, child) for number, entries in base.lists[prefix].items()}
            changes = {path: values for path, values in self.sizes.numbers.items() if path not in self.sizes.counts}
            self._causes_of[prefix, child] = {
                path
                for path, values in changes.items()
                for structure in (self.builds.structure(frozenset({(path, value)})) for value in values)
                if structure is not None
                and any(
                    _below(structure.lists.get(prefix, {}).get(number, {}), child) != names
                    for number, names in expected.items()
                )
            }
        return self._causes_of[prefix, child]

    def _names_of(self, prefix: str, numbers: set[int], places: list[int]) -> list[frozenset[str]]:
        """The names of the kinds with these places."""
        return [names for (of, names), number in self.origins.items() if of == prefix and places[number] in numbers]

    def _layer_count(self, prefix: str) -> str | None:
        """The key that counts the decoder layers, where it cannot be changed alone."""
        model = MODELS[self.architecture]
        if not compile_pattern(model.layers).fullmatch(f"{prefix}.0"):
            return None
        path = f"{model.text_config}.num_hidden_layers" if model.text_config else "num_hidden_layers"
        base = self.builds.structure(BASE)
        assert base is not None
        length = len(base.lists[prefix])
        return path if self.builds.defaults.get(path) == length else None

    def _default(self, path: str) -> Any:
        """The value of a key that config.json does not say; that of the small model if it must be said."""
        return _class_default(self.builds, path)

    def _entry(self, prefix: str, number: int, template: str, on: Changes) -> list[Any]:
        structure = self.builds.structure(on)
        assert structure is not None
        entry = (structure.lists[prefix][number] if prefix else structure.outside)[template]
        shape = [self.sizes.find((prefix, number, template, axis), on) for axis in range(len(entry.shape))]
        count = self.sizes.find((prefix, number, template, -1), on) if "*" in template else None
        return [shape, count, []]

    def _toggled(
        self,
        kind: dict[str, Any],
        before: Mapping[str, Entry],
        after: Mapping[str, Entry],
        prefix: str,
        number: int,
        path: str,
        value: Any,
    ) -> bool:
        """Note what a key's other truth takes away and adds."""
        truth = bool(value)
        changed = False
        if len(after) > len(before) + _MOST_ADDED:
            return False
        for template in sorted(before.keys() - after.keys()):
            if template not in kind:
                continue
            kind[template][2].append([path, not truth])
            changed = True
        for template in sorted(after.keys() - before.keys()):
            changed = True
            if template in kind or UNCHECKED.match(f"{prefix}.{template}"):
                continue
            entry = self._entry(prefix, number, template, frozenset({(path, value)}))
            kind[template] = [entry[0], entry[1], [[path, truth]]]
        return changed

    def _more_kinds(self, base: Structure, outside: dict[str, Any], lists: dict[str, list[dict[str, Any]]]) -> None:
        """Add the kinds of layers that other numbers, or other lists of kinds, give."""
        changes = [frozenset({(path, value)}) for path, values in self.sizes.numbers.items() for value in values]
        changes += [frozenset({other}) for other in self.sizes.others]
        for change in changes:
            other = self.builds.structure(change)
            assert other is not None
            for template in base.outside.keys() - other.outside.keys():
                outside.pop(template, None)
            for prefix in base.lists:
                known = (
                    {frozenset(kind) for kind in lists[prefix]}
                    | {frozenset(t for t, entry in kind.items() if not entry[2]) for kind in lists[prefix]}
                    | {frozenset(entries) for entries in base.lists[prefix].values()}
                )
                for number, entries in sorted(other.lists.get(prefix, {}).items()):
                    if self.builds.extra and number not in base.lists[prefix]:
                        continue
                    if frozenset(entries) in known:
                        continue
                    known.add(frozenset(entries))
                    self.origins[prefix, frozenset(entries)] = len(lists[prefix])
                    lists[prefix].append(
                        {
                            template: self._alike(lists[prefix], template, prefix, number, change)
                            for template in entries
                            if not UNCHECKED.match(f"{prefix}.{template}")
                        }
                    )

    def _alike(self, kinds: list[dict[str, Any]], template: str, prefix: str, number: int, on: Changes) -> list[Any]:
        for kind in kinds:
            if template in kind:
                shape, count, conditions = kind[template]
                return [shape, count, [one for one in conditions if bool(self.builds.defaults[one[0]]) == one[1]]]
        return self._entry(prefix, number, template, on)


def parts_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the model types of the parts of a config.json, such as its vision_config, by their paths."""
    parts: dict[str, str] = {}
    for key, part in config.items():
        if isinstance(part, Mapping):
            if isinstance(part.get("model_type"), str):
                parts[f"{prefix}{key}"] = part["model_type"]
            parts |= parts_of(part, f"{prefix}{key}.")
    return parts


def _renamed(kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kinds whose unknown sizes are other ones than those of another draft."""
    renamed: list[dict[str, Any]] = json.loads(re.sub(r'"\?(\d+)"', r'"?1000\1"', json.dumps(kinds)))
    return renamed


def _index_sizes(data: dict[str, Any]) -> None:
    """Replace the expressions of a line by their places in its list of sizes."""
    sizes: dict[str, int] = {}

    def place(expression: str | None) -> int | None:
        return None if expression is None else sizes.setdefault(expression, len(sizes))

    def placed(rules: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [[place(size) for size in shape], place(count), conditions]
            for name, (shape, count, conditions) in rules.items()
        }

    data["outside"] = placed(data["outside"])
    data["lists"] = {
        prefix: [place(length), [placed(kind) for kind in kinds], choices]
        for prefix, (length, kinds, choices) in data["lists"].items()
    }
    data["sizes"] = list(sizes)


def _class_default(builds: Builds, path: str) -> Any:
    if (builds.architecture, path) in _PUBLISHED_DEFAULTS:
        return _PUBLISHED_DEFAULTS[builds.architecture, path]
    small = small_models.MODELS.get(builds.architecture)
    if isinstance(builds.config.get(path), dict):
        # A class has no part that config.json does not mention.
        return None
    model_type = (small and small.made_as and small.made_as[1]) or builds.config["model_type"]
    found: Any = _defaults_of(model_type)
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


@cache
def _defaults_of(model_type: str) -> dict[str, Any]:
    try:
        return dict(transformers.AutoConfig.for_model(model_type).to_dict())
    except Exception:
        return {}


def _write(text: str) -> None:
    beside = PATH.with_suffix(".part")
    beside.write_text(text)
    beside.replace(PATH)


def main() -> int:
    """Write the file; 0."""
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or list(MODELS)
    lines = {}
    if PATH.exists():
        for line in PATH.read_text().splitlines():
            lines[json.loads(line)["class"]] = line
    for name in names:
        if name not in small_checkpoints.ARCHITECTURES:
            continue
        data = Draft(name).line()
        lines[name] = json.dumps(data, separators=(",", ":"))
        unknown = sum(size.startswith("?") for size in data["sizes"])
        print(f"{name}: {len(data['sizes'])} sizes, {unknown} of them unknown", flush=True)
        _write("".join(f"{lines[name]}\n" for name in MODELS if name in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
