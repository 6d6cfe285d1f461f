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
from collections.abc import Mapping
from functools import cache
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
# Of classes that transformers builds by another's name: what the code beside the published weights says.
_PUBLISHED_DEFAULTS = {("MiniCPMForCausalLM", "tie_word_embeddings"): True}
# Tensors that transformers builds in any case, and vLLM (models/radio.py:170) where config.json has this key.
_IF_SAID = {
    "vision_model.radio_model.model.patch_generator.video_embedder.weight": "vision_config.video_temporal_patch_size"
}


class Draft:
    """The line of a class: which tensors it has, and when."""

    def __init__(self, architecture: str, published: bool = True) -> None:
        self.architecture = architecture
        self.sizes = Sizes(architecture, published)
        self.builds = self.sizes.builds

    def line(self) -> dict[str, Any]:
        """Return the class's line."""
        data = self.lines()
        _index_sizes(data)
        keys = {key for size in data["sizes"] for key in re.findall(r"[a-zA-Z_][\w.]*", size)} | data["defaults"].keys()
        keys |= {key for size in data["derived"].values() for key in size.split("/")}
        # The numbers that count layers, where config.json need not say them.
        deciding = [data["sizes"][length] for length, *_ in data["lists"].values()]
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
            data["lists"][prefix] = [count, unique]
        data["outside"] = outside
        data["parts"] = parts_of(self.builds.config)
        data["derived"] = derived_sizes(self.builds)
        return data

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
        prefix: [place(length), [placed(kind) for kind in kinds]] for prefix, (length, kinds) in data["lists"].items()
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
