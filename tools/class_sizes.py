"""Finds what the sizes of a class's tensors are made of: what changes with which key of config.json."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from class_builds import BASE, Axis, Builds, Changes, Shape, lengths_of, prefixes_of
from openquant.models import MODELS
from openquant.patterns import compile_pattern
from openquant.registry.architecture import ANY

_FLOAT_SIZES = re.compile(r".*(ratio|factor|mult|expand).*")
_MOST_KEYS = 5
_LARGEST_CONSTANT = 3
_LARGEST_FACTOR = 16
# Tensors whose sizes differ from layer to layer in published files, by keys that cannot be changed alone: the prefix of
# the list and the name below a layer.
_VARYING = {
    "DeciLMForCausalLM": r"model\.layers\.mlp\.",
    "DeepseekV4ForCausalLM": r"layers\.attn\.compressor\.",
    "Dots3NoteForCausalLM": r"model\.layers\.self_attn\.g_proj|vision_encoder\.blocks\.mlp\.",
    "Granite4VisionForConditionalGeneration": r"\.?model\.(layerwise|spatial)_projectors\.",
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), r"model\.layers\.self_attn\.(qkv|[qkvo])_proj"),
    "LagunaForCausalLM": r"model\.layers\.self_attn\.[goq]_proj",
    **dict.fromkeys(
        ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "UnlimitedOCRForCausalLM"), r"\.?model\.sam_model\."
    ),
    "Emu3ForConditionalGeneration": r"\.?vqmodel\.",
    **dict.fromkeys(
        ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"), r"\.?token2wav\.code2wav_bigvgan_model\."
    ),
    "Qwen3OmniMoeForConditionalGeneration": r"code2wav\.decoder\.",
    "NemotronHPuzzleForCausalLM": r"backbone\.layers\.mixer\.experts\.",
}
# The vocoder of Qwen 2.5 Omni: a layer for each rate, and as many blocks after each as there are kernels.
_VOCODER = "token2wav_config.bigvgan_config"
_VOCODER_LENGTHS = {
    "token2wav.code2wav_bigvgan_model.ups": f"#{_VOCODER}.upsample_rates",
    "token2wav.code2wav_bigvgan_model.resblocks": f"#{_VOCODER}.upsample_rates*#{_VOCODER}.resblock_kernel_sizes",
}
# Lists whose length a key says in a way that changing it does not show, or not alone.
_LENGTHS = {
    **dict.fromkeys(("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"), _VOCODER_LENGTHS),
    "Qwen3OmniMoeForConditionalGeneration": {
        "code2wav.decoder": "3+#code2wav_config.upsample_rates",
        "code2wav.upsample": "#code2wav_config.upsampling_ratios",
    },
    "VibeVoiceAsrForConditionalGeneration": {
        f"{part}_tokenizer_encoder.conv_layers": f"#{part}_tokenizer_encoder_config.downsampling_ratios"
        for part in ("acoustic", "semantic")
    },
}
# Layers of NemotronH, in a pattern with a letter for each.
_LETTERS = "M*-E"


class Sizes:
    """Changes each key of a class's config, and finds what the sizes of its tensors are made of.

    Attributes:
        builds: the builds of the class.
        numbers: other numbers of each key that is one.
        toggles: keys with another truth than they have.
        others: keys with other lists, of kinds or numbers of layers.
        counts: keys that count the elements of a list.
        failed: keys that cannot be changed alone.
    """

    def __init__(self, architecture: str, published: bool) -> None:
        self.architecture = architecture
        self.builds = Builds(architecture, published)
        base = self.builds.shapes(BASE)
        assert base is not None, architecture
        self.numbers: dict[str, list[Any]] = {}
        self.failed: set[str] = set()
        self.counts: set[str] = set()
        self.toggles: list[tuple[str, Any]] = []
        self.others: list[tuple[str, Any]] = []
        for path, value in self.builds.defaults.items():
            self._try(path, value)
        for path, value in self.builds.config.items():
            if (
                isinstance(value, dict)
                and "rope" not in path
                and path not in (MODELS[architecture].text_config, "text_config")
            ):
                self._toggle(path, None)
        # Keys that can only be changed together, such as hidden_size and mamba_n_heads: pairs of changes.
        self.linked = [
            dict(pair)
            for first, second in itertools.combinations(sorted(self.failed), 2)
            for pair in (self._pair(first, second, 2), self._pair(first, second, Fraction(1, 2)))
            if pair and self.builds.shapes(frozenset(pair)) is not None
        ]
        self._count(base)
        self.unknown: dict[tuple[Any, ...], str] = {}
        self.known: dict[Any, str | None] = {}

    def _try(self, path: str, value: Any) -> None:
        last = path.rpartition(".")[2]
        if isinstance(value, bool):
            self._toggle(path, not value)
        elif value is None:
            if not self._toggle(path, 64):
                self._toggle(path, 2)
        elif isinstance(value, int) or (isinstance(value, float) and _FLOAT_SIZES.fullmatch(last)):
            if not value:
                self._toggle(path, 2)
                return
            candidates = [2 * value, 3 * value, 4 * value]
            candidates += [value + 1, value // 2, value + 2] if isinstance(value, int) else []
            if re.search("shared_layers|replace", last):
                candidates = [value - 1, value + 1]
            if "frequency" in last:
                candidates = [value // 2, 2 * value]
            works = (other for other in candidates if other and self._builds(path, other))
            self.numbers[path] = list(itertools.islice(works, 2))
            if not self.numbers[path]:
                self.failed.add(path)
            if not self._toggle(path, None):
                self._toggle(path, 0)
        elif isinstance(value, list) and value and not isinstance(value[0], (list, dict)):
            for element in dict.fromkeys(value):
                self._other(path, tuple(element for _ in value))
            if all(isinstance(element, int) and element > 1 for element in value):
                self.numbers[path] = [doubled] if self._builds(path, doubled := tuple(2 * n for n in value)) else []
            self._other(path, ())
            if all(type(element) is int for element in value):
                self._other(path, tuple(element + 1 for element in value))
                self._other(path, tuple(element - 1 for element in value))
        elif isinstance(value, str) and set(value) <= set(_LETTERS):
            for letter in _LETTERS:
                self._other(path, letter * len(value))

    def _pair(self, first: str, second: str, factor: int | Fraction) -> list[tuple[str, Any]]:
        """Twice the first key, and the second key by a factor; empty if that is no whole number."""
        one, other = self.builds.defaults[first], self.builds.defaults[second]
        if not isinstance(one, int) or not isinstance(other, int) or (other * factor).denominator > 1:
            return []
        return [(first, 2 * one), (second, int(other * factor))]

    def _builds(self, path: str, value: Any) -> bool:
        return self.builds.shapes(frozenset({(path, value)})) is not None

    def _toggle(self, path: str, value: Any) -> bool:
        if self._builds(path, value):
            self.toggles.append((path, value))
            return True
        return False

    def _other(self, path: str, value: Any) -> None:
        if self._builds(path, value):
            self.others.append((path, value))

    def _count(self, base: Mapping[str, Shape]) -> None:
        """Find the lists whose length depends on a key, and the decoder layers."""
        lengths = lengths_of(base)
        layers = compile_pattern(MODELS[self.architecture].layers)
        counted = {prefix for prefix in lengths if layers.fullmatch(f"{prefix}.0")}
        counted |= {prefix for name in self.builds.extra for prefix, _ in list(prefixes_of(name))[:1]}
        counted |= _LENGTHS.get(self.architecture, {}).keys()
        for path, values in self.numbers.items():
            for value in values[:1]:
                shapes = self.builds.shapes(frozenset({(path, value)}))
                assert shapes is not None
                others = lengths_of(shapes)
                changed = {
                    prefix
                    for prefix, numbers in lengths.items()
                    if prefix in others
                    and len(others[prefix]) != len(numbers)
                    and numbers == set(range(len(numbers)))
                    and others[prefix] == set(range(len(others[prefix])))
                }
                counted |= changed
                if any("*" not in prefix for prefix in changed):
                    self.counts.add(path)
        self.builds.counted = counted

    def find(self, axis: Axis, on: Changes = BASE) -> str:
        """Return the expression of an axis, in builds that all have the changes `on`."""
        value = self.builds.value(axis, on)
        assert value is not None
        name = f"{axis[0]}.{axis[2]}"
        if not axis[2] and axis[0] in _LENGTHS.get(self.architecture, ()):
            return _LENGTHS[self.architecture][axis[0]]
        varies = axis[2] and re.match(_VARYING.get(self.architecture, "(?!)"), name)
        if varies or (axis[3] < 0 and self.builds.is_extra(axis)):
            return ANY
        if self.builds.is_extra(axis):
            return self._unknown(axis, value)
        changed: dict[str, int] = {}
        marks: list[Any] = [value]
        for path, values in self._values(on).items():
            if values:
                other = self.builds.value(axis, _changed(on, {path: values[0]}))
                if other is not None and other != value:
                    changed[path] = other
                    marks.append((path, other))
        key = (tuple(marks), on)
        if key not in self.known:
            self.known[key] = self._express(axis, value, changed, on)
        expression = self.known[key]
        if expression is None:
            # What it is made of is not known, so it is like no other.
            return self._unknown(axis, value)
        if axis[2] and axis[3] == -1 and isinstance(self.builds.defaults.get(expression), list):
            # Where config.json does not say a list of counts, layers differ by right.
            return ANY
        return expression

    def _unknown(self, axis: Axis, value: int) -> str:
        return self.unknown.setdefault((axis[0], *axis[2:], value), f"?{len(self.unknown)}")

    def _express(self, axis: Axis, value: int, changed: Mapping[str, int], on: Changes) -> str | None:
        linked = self._linked_monomial(axis, value, changed, on) if self.linked and not on else None
        if linked is not None:
            return linked
        if not changed:
            # Larger ones may come from a key that could not be changed alone.
            return str(value) if value <= _LARGEST_CONSTANT else None
        if axis[2] and len(changed) == 1 and isinstance(self.builds.defaults[path := next(iter(changed))], list):
            # A list with a size for each layer.
            return path if value in self.builds.defaults[path] else None
        if len(changed) > _MOST_KEYS:
            return None
        old = {path: self._number(path, on) for path in changed}
        if any(number is None for number in old.values()):
            return None
        return (
            self._monomial(axis, value, changed, on)
            or self._polynomial(axis, changed, on)
            or self._derived(axis, value, changed, on)
        )

    def _derived(self, axis: Axis, value: int, changed: Mapping[str, int], on: Changes) -> str | None:
        """Find the key of two that decides, where the other one is only its default."""
        joint = self._joint(axis, changed, 0, on)
        for path, other in changed.items():
            if len(changed) == 2 and joint == other:
                return self._monomial(axis, value, {path: other}, on)
        return None

    def _number(self, path: str, on: Changes) -> Fraction | None:
        value = dict(on).get(path, self.builds.defaults[path])
        return Fraction(value) if isinstance(value, (int, float)) else None

    def _joint(self, axis: Axis, paths: Iterable[str], which: int, on: Changes) -> int | None:
        values = self._values(on)
        return self.builds.value(
            axis,
            _changed(
                on, {path: values[path][which:][0] if values[path][which:] else values[path][-1] for path in paths}
            ),
        )

    def _values(self, on: Changes) -> dict[str, list[Any]]:
        """Other numbers of each key; of one that is changed already, multiples of that number."""
        multiples = {path: [2 * n, 3 * n] for path, n in on if isinstance(n, int) and not isinstance(n, bool) and n}
        return {**self.numbers, **multiples}

    def _linked_monomial(self, axis: Axis, value: int, changed: Mapping[str, int], on: Changes) -> str | None:
        """Fit a product of keys of which some can only be changed together: the one with the fewest of them."""
        powers: dict[str, int] = {}
        for path, other in changed.items():
            ratio = Fraction(self.numbers[path][0]) / self._number(path, on)  # type: ignore[operator]
            power = next((p for p in (1, 2, -1, -2) if ratio**p == Fraction(other, value)), None)
            if power is None:
                return None
            powers[path] = power
        observed = [(changes, self.builds.value(axis, frozenset(changes.items()))) for changes in self.linked]
        paths = sorted({path for changes in self.linked for path in changes})
        if len(paths) > _MOST_KEYS:
            return None
        fits: list[dict[str, int]] = []
        for choice in itertools.product((0, 1, -1), repeat=len(paths)):
            chosen = dict(zip(paths, choice, strict=True))
            expected = (
                value
                * math.prod((Fraction(n, self.builds.defaults[path]) ** chosen[path]) for path, n in changes.items())
                for changes, _ in observed
            )
            if all(number == other for number, (_, other) in zip(expected, observed, strict=True)):
                fits.append({path: power for path, power in chosen.items() if power})
        if not fits:
            return None
        fewest = min(len(fit) for fit in fits)
        powers |= next(fit for fit in fits if len(fit) == fewest)
        if not powers:
            return None
        factor = Fraction(value)
        for path, power in powers.items():
            factor /= self._number(path, on) ** power  # type: ignore[operator]
        return _product(factor, powers)

    def _monomial(self, axis: Axis, value: int, changed: Mapping[str, int], on: Changes) -> str | None:
        values = self._values(on)
        powers: dict[str, int] = {}
        for path, other in changed.items():
            ratio = Fraction(values[path][0]) / self._number(path, on)  # type: ignore[operator]
            power = next((p for p in (1, 2, -1, -2) if ratio**p == Fraction(other, value)), None)
            if power is None:
                return None
            powers[path] = power
        factor = Fraction(value)
        for path, power in powers.items():
            factor /= self._number(path, on) ** power  # type: ignore[operator]
        expected = factor
        which = 1 if len(powers) == 1 else 0
        for path, power in powers.items():
            expected *= Fraction(values[path][min(which, len(values[path]) - 1)]) ** power
        joint = self._joint(axis, powers, which, on)
        if joint is not None and joint != expected:
            return None
        return _product(factor, powers)

    def _polynomial(self, axis: Axis, changed: Mapping[str, int], on: Changes) -> str | None:
        """Fit a sum of products, each key with power one in each."""
        values = self._values(on)
        paths = tuple(changed)
        table: dict[frozenset[str], Fraction] = {}
        for length in range(len(paths) + 1):
            for subset in itertools.combinations(paths, length):
                number = self._joint(axis, subset, 0, on)
                if number is None:
                    return None
                table[frozenset(subset)] = Fraction(number)
        for path in paths:
            old, new = self._number(path, on), Fraction(values[path][0])
            for keys in [one for one in table if path not in one]:
                slope = (table[keys | {path}] - table[keys]) / (new - old)  # type: ignore[operator]
                table[keys | {path}] = slope
                table[keys] -= slope * old  # type: ignore[operator]
        terms = {keys: factor for keys, factor in table.items() if factor}
        if any(factor.denominator > 1 or abs(factor) > _LARGEST_FACTOR for factor in terms.values()):
            return None
        # A second value of each key must lie on it too.
        second = {path: values[path][-1] for path in paths}
        if len(paths) > 1 or len(values[paths[0]]) > 1:
            number = self._joint(axis, paths, 1, on)
            total = Fraction(0)
            for keys, factor in terms.items():
                total += factor * math.prod(Fraction(second[path]) for path in keys)
            if number is None or total != number:
                return None
        else:
            return None
        parts = []
        for keys, factor in terms.items():
            names = sorted(keys)
            parts.append("*".join(names if factor == 1 and names else [str(factor), *names]))
        return "+".join(parts)


def _product(factor: Fraction, powers: Mapping[str, int]) -> str | None:
    """Write a product: "2*hidden_size/num_attention_heads"; None if the factor is none that a class has."""
    if factor.denominator > _LARGEST_FACTOR or factor.numerator > _LARGEST_FACTOR:
        return None
    above = [] if factor.numerator == 1 else [str(factor.numerator)]
    above += [path for path, power in powers.items() for _ in range(max(0, power))]
    below = [] if factor.denominator == 1 else [str(factor.denominator)]
    below += [path for path, power in powers.items() for _ in range(max(0, -power))]
    return "/".join(["*".join(above) or "1", *below])


def _changed(on: Changes, values: Mapping[str, Any]) -> Changes:
    return frozenset({**dict(on), **values}.items())


def derived_sizes(builds: Builds) -> dict[str, str]:
    """Find the head sizes that are hidden_size / num_attention_heads where config.json does not say them."""
    derived: dict[str, str] = {}
    for path, size in builds.defaults.items():
        parent, _, last = path.rpartition(".")
        hidden, heads = (f"{parent}.{key}".lstrip(".") for key in ("hidden_size", "num_attention_heads"))
        width = builds.defaults.get(hidden)
        if (
            last != "head_dim"
            or not isinstance(size, int)
            or not isinstance(width, int)
            or heads not in builds.defaults
        ):
            continue
        base, doubled, wide, unsaid = (
            builds.shapes(frozenset(changes.items()))
            for changes in ({}, {path: 2 * size}, {hidden: 2 * width}, {path: None, hidden: 2 * width})
        )
        if base and doubled and wide and unsaid and base.keys() == doubled.keys() == wide.keys() == unsaid.keys():
            axes = [(name, axis) for name, shape in base.items() for axis in range(len(shape))]
            only = [
                (name, axis)
                for name, axis in axes
                if doubled[name][axis] != base[name][axis] and wide[name][axis] == base[name][axis]
            ]
            if only and all(unsaid[name][axis] == doubled[name][axis] for name, axis in only):
                derived[path] = f"{hidden}/{heads}"
    return derived
