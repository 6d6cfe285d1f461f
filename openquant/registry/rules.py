"""The registry's entry of an architecture, asked about modules: once for all whose names differ in numbers only."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..patterns import MAX_DIGITS, compile_any, compile_pattern, template
from .architecture import HEAD, Architecture, ExpertLayout, ParallelSplit, StackedExperts, absolute_patterns


class ModuleRule(NamedTuple):
    """What an entry says of a module.

    Attributes:
        alike: the module's name with `*` for its numbers, "model.layers.*.mlp.up_proj".
        patterns: how many of compress, experts and keep cover it; one is right.
        compress: whether it may be quantized.
        stack: the experts it is a stacked tensor of, and which of their stacks; None if it is none.
        keep: why it stays as it is; None if it does not.
        fused: the pattern of the set that engines merge it into; None if they do not.
        under: how many parts of its name come after the module in which engines have what they merge it into: 1, or
            2 for "indexer.index_qk_proj" beside q_proj; 1 if they do not.
        below: how many parts of its name come after the path of its experts: 2 in "model.layers.0.mlp.experts.7.w1";
            0 if it is no expert's.
        split: how tensor parallelism divides it; None if it does not.
        listed_as: last parts of the engines' names for what they merge it into, listed beside its own.
        looked_up: last part of the name that vLLM looks up instead of its own; None where it looks up its own.
        reordered: whether an engine puts its rows in another order.
        nameless: whether vLLM builds it without a name.
        plain: whether SGLang builds it in bfloat16.
        unpacked: whether SGLang takes no codes of it that share a byte or a word.
        divided: whether tensor-parallel ranks have a part of it each.
    """

    alike: str
    patterns: int
    compress: bool
    stack: tuple[ExpertLayout, StackedExperts] | None
    keep: str | None
    fused: str | None
    under: int
    below: int
    split: ParallelSplit | None
    listed_as: tuple[str, ...]
    looked_up: str | None
    reordered: bool
    nameless: bool
    plain: bool
    unpacked: bool
    divided: bool


class ModuleRules:
    """An entry of the registry, with its patterns compiled and its answers kept.

    Args:
        model: the entry.
    """

    def __init__(self, model: Architecture) -> None:
        self.model = model
        self._compress = compile_any(absolute_patterns(model, model.compress))
        self._reordered = compile_any(absolute_patterns(model, model.reordered))
        self._nameless = compile_any(absolute_patterns(model, model.nameless))
        self._plain = compile_any(absolute_patterns(model, model.sglang.plain))
        self._unpacked = compile_any(absolute_patterns(model, model.sglang.unpacked))
        stacks = [(experts, stacked) for experts in model.experts for stacked in experts.stacked]
        places = [f"{experts.place}.{stacked.name}" for experts, stacked in stacks]
        self._stacks = list(zip(_compiled(model, places), stacks, strict=True))
        self._keeps = list(zip(_compiled(model, (keep.pattern for keep in model.keep)), model.keep, strict=True))
        sets = [one.pattern for one in model.fused]
        self._joined = list(zip(_compiled(model, sets), _compiled(model, map(_place, sets)), model.fused, strict=True))
        self._splits = list(zip(_compiled(model, (one.pattern for one in model.splits)), model.splits, strict=True))
        self._experts = _compiled(model, (experts.path for experts in model.experts))
        # By the template of the parent and the last part of the name. Neighbours have the same parent.
        self._families: dict[str, dict[str, ModuleRule]] = {}
        self._parent, self._siblings = "", self._families.setdefault("", {})

    def rule(self, module: str) -> ModuleRule:
        """What the entry says of a module; asked once for all whose names differ in numbers only."""
        parent, _, last = module.rpartition(".")
        if parent != self._parent:
            self._parent, self._siblings = parent, self._families.setdefault(template(parent), {})
        rule = self._siblings.get(last)
        if rule is None:
            number = parent and last.isdecimal() and len(last) <= MAX_DIGITS
            rule = (self._siblings.get("*") if number else None) or self._ask(module)
            self._siblings["*" if number else last] = rule
        return rule

    def _ask(self, module: str) -> ModuleRule:
        compress = self._compress.fullmatch(module) is not None
        stacks = [stack for pattern, stack in self._stacks if pattern.fullmatch(module)]
        keeps = [keep for pattern, keep in self._keeps if pattern.fullmatch(module)]
        found = [(place, fused) for pattern, place, fused in self._joined if pattern.fullmatch(module)]
        fused = [one for _, one in found]
        # Stacks beside the module of the experts are looked up as that.
        looked_up = [one.listed_as for one in fused] + [e.path.rpartition(".")[2] for e, _ in stacks if e.beside]
        split = next((split for pattern, split in self._splits if pattern.fullmatch(module)), None)
        return ModuleRule(
            alike=template(module),
            patterns=compress + len(stacks) + len(keeps),
            compress=compress,
            stack=stacks[0] if stacks else None,
            keep=keeps[0].why if keeps else None,
            fused=fused[0].pattern if fused else None,
            under=_below(module, [found[0][0]]) if found else 1,
            below=_below(module, self._experts),
            split=split,
            listed_as=tuple(dict.fromkeys(name for one in fused for name in one.names)),
            looked_up=next(filter(None, looked_up), None),
            reordered=self._reordered.fullmatch(module) is not None,
            nameless=self._nameless.fullmatch(module) is not None,
            plain=self._plain.fullmatch(module) is not None,
            unpacked=self._unpacked.fullmatch(module) is not None,
            divided=split is not None or is_head(module) or any(keep.divided for keep in keeps),
        )

    def experts(self, module: str) -> str | None:
        """The path of the experts that a module belongs to: "model.layers.0.mlp.experts"; None if to none."""
        below = self.rule(module).below
        return module.rsplit(".", below)[0] if below else None

    def looked_up(self, module: str) -> str:
        """The name that vLLM looks a module up under: its own, or that of the layer it is merged into."""
        rule = self.rule(module)
        return module if rule.looked_up is None else f"{module.rsplit('.', rule.under)[0]}.{rule.looked_up}"

    def fused_groups(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """For every module that engines merge with others, all there are of its set, itself included, in that order."""
        # By pattern and parent. Sets are many, and have few members.
        found: dict[tuple[str, str], tuple[str, ...]] = {}
        for module in modules:
            rule = self.rule(module)
            if rule.fused is not None:
                key = rule.fused, module.rsplit(".", rule.under)[0]
                found[key] = (*found.get(key, ()), module)
        return {module: members for members in found.values() for module in members}

    def engine_names(self, names: Iterable[str]) -> list[str]:
        """Names of modules, the engines' other names for them, and those of what they are merged into."""
        found: dict[str, None] = {}
        for name in names:
            found[name] = None
            rule = self.rule(name)
            for last in rule.listed_as:
                found[f"{name.rsplit('.', rule.under)[0]}.{last}"] = None
        return list(dict.fromkeys(itertools.chain(found, *map(self.model.names_of, found))))


def _compiled(model: Architecture, patterns: Iterable[str]) -> list[re.Pattern[str]]:
    return [compile_pattern(pattern) for pattern in absolute_patterns(model, patterns)]


def _place(pattern: str) -> str:
    """What is before a pattern's last alternatives: ".self_attn" of ".self_attn.{q,k,v}_proj"."""
    return pattern[: pattern.rindex("{")].rpartition(".")[0]


def _below(module: str, places: Iterable[re.Pattern[str]]) -> int:
    """How many parts of a module's name come after the longest that one of the places matches; 0 if none does."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        path = ".".join(parts[:-count])
        if any(pattern.fullmatch(path) for pattern in places):
            return count
    return 0


def is_head(module: str) -> bool:
    """Whether a module is an output head."""
    return compile_pattern(HEAD.pattern).fullmatch(module) is not None
