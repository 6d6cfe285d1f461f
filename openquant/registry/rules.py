"""ModuleRules: what an entry of the registry says of each module of a checkpoint.

Modules whose names differ in numbers only have the same rule, which is looked up once.

    ModuleRules(MODELS["Qwen3ForCausalLM"]).rule("model.layers.0.mlp.up_proj").compress    # True
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..patterns import MAX_DIGITS, compile_any, compile_pattern, template
from .architecture import EMBEDDING, HEAD, Architecture, ExpertLayout, ParallelSplit, StackedExperts, absolute_patterns

# Base classes have it without "model." or the like.
_EMBEDDINGS = compile_any([EMBEDDING.pattern, "{embed_tokens,language_model.embed_tokens,text_model.embed_tokens}"])


class ModuleRule(NamedTuple):
    """What an entry says of a module.

    Attributes:
        name_template: the module's name with `*` for its numbers, "model.layers.*.mlp.up_proj".
        patterns: how many patterns of compress, experts and keep match it; 1 if the entry is right.
        compress: whether it may be quantized.
        stack: for a tensor of stacked experts: its layout and which of the layout's stacks it is; None for others.
        keep: why it is not quantized; None if it may be.
        fused: pattern of the layers that engines fuse it with; None if they do not.
        fused_depth: how many segments of its name follow the module that holds the fused layer: 1, or 2 for
            "indexer.index_qk_proj" fused with q_proj; 1 if it is not fused.
        expert_depth: how many segments of its name follow the path of its experts: 2 in
            "model.layers.0.mlp.experts.7.w1"; 0 if it does not belong to an expert.
        split: how tensor-parallel ranks divide it; None if they do not.
        fused_names: last segments of the engines' names for the fused layer, which the ignore list has too.
        vllm_segment: last segment of the name that vLLM looks up in place of the module's own; None for its own.
        reordered: whether an engine reorders its rows at load.
        nameless: whether vLLM builds it without a name.
        plain: whether SGLang builds it in bfloat16.
        unpacked: whether SGLang accepts no packed codes of it.
        divided: whether each tensor-parallel rank holds a part of it rather than a copy.
    """

    name_template: str
    patterns: int
    compress: bool
    stack: tuple[ExpertLayout, StackedExperts] | None
    keep: str | None
    fused: str | None
    fused_depth: int
    expert_depth: int
    split: ParallelSplit | None
    fused_names: tuple[str, ...]
    vllm_segment: str | None
    reordered: bool
    nameless: bool
    plain: bool
    unpacked: bool
    divided: bool


class ModuleRules:
    """The rules of an entry for modules, with its patterns compiled and results cached.

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
        stack_patterns = [f"{experts.place}.{stacked.name}" for experts, stacked in stacks]
        self._stacks = list(zip(_compile_all(model, stack_patterns), stacks, strict=True))
        self._keeps = list(zip(_compile_all(model, (keep.pattern for keep in model.keep)), model.keep, strict=True))

        fused_patterns = [fused.pattern for fused in model.fused]
        self._fused = list(
            zip(
                _compile_all(model, fused_patterns),
                _compile_all(model, map(_fused_parent, fused_patterns)),
                model.fused,
                strict=True,
            )
        )

        self._splits = list(
            zip(_compile_all(model, (split.pattern for split in model.splits)), model.splits, strict=True)
        )
        self._experts = _compile_all(model, (experts.path for experts in model.experts))

        # By the template of the parent, then by the last segment. Neighbours in a checkpoint have the same parent.
        self._families: dict[str, dict[str, ModuleRule]] = {}
        self._parent = ""
        self._siblings = self._families.setdefault("", {})

    def rule(self, module: str) -> ModuleRule:
        """Return the rule of a module."""
        parent, _, last = module.rpartition(".")
        if parent != self._parent:
            self._parent = parent
            self._siblings = self._families.setdefault(template(parent), {})
        rule = self._siblings.get(last)
        if rule is None:
            is_number = parent and last.isdecimal() and len(last) <= MAX_DIGITS
            rule = (self._siblings.get("*") if is_number else None) or self._find_rule(module)
            self._siblings["*" if is_number else last] = rule
        return rule

    def _find_rule(self, module: str) -> ModuleRule:
        compress = self._compress.fullmatch(module) is not None
        stacks = [stack for pattern, stack in self._stacks if pattern.fullmatch(module)]
        keeps = [keep for pattern, keep in self._keeps if pattern.fullmatch(module)]
        fused = [(parent, layers) for pattern, parent, layers in self._fused if pattern.fullmatch(module)]

        # vLLM looks up stacks that are siblings of the experts' module by that module's name.
        vllm_segments = [layers.listed_as for _, layers in fused]
        vllm_segments += [experts.path.rpartition(".")[2] for experts, _ in stacks if experts.beside]
        split = next((split for pattern, split in self._splits if pattern.fullmatch(module)), None)

        return ModuleRule(
            name_template=template(module),
            patterns=compress + len(stacks) + len(keeps),
            compress=compress,
            stack=stacks[0] if stacks else None,
            keep=keeps[0].why if keeps else None,
            fused=fused[0][1].pattern if fused else None,
            fused_depth=_depth_below(module, [fused[0][0]]) if fused else 1,
            expert_depth=_depth_below(module, self._experts),
            split=split,
            fused_names=tuple(dict.fromkeys(name for _, layers in fused for name in layers.names)),
            vllm_segment=next(filter(None, vllm_segments), None),
            reordered=self._reordered.fullmatch(module) is not None,
            nameless=self._nameless.fullmatch(module) is not None,
            plain=self._plain.fullmatch(module) is not None,
            unpacked=self._unpacked.fullmatch(module) is not None,
            divided=split is not None or is_table(module) or any(keep.divided for keep in keeps),
        )

    def experts(self, module: str) -> str | None:
        """Return the path of the experts that a module belongs to, "model.layers.0.mlp.experts"; None if none."""
        depth = self.rule(module).expert_depth
        return module.rsplit(".", depth)[0] if depth else None

    def vllm_name(self, module: str) -> str:
        """Return the name by which vLLM looks a module up: its own, that of the layer it is fused into, or for stacked
        experts that lie beside the experts' module, that of this module.
        """
        rule = self.rule(module)
        if rule.vllm_segment is None:
            return module
        return f"{module.rsplit('.', rule.fused_depth)[0]}.{rule.vllm_segment}"

    def fused_groups(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Group modules that engines fuse.

        Args:
            modules: names of the modules that exist.

        Returns:
            For each module that engines fuse with others, all existing members of its group, itself included, in the
            order given.
        """
        # By pattern and parent.
        groups: dict[tuple[str, str], tuple[str, ...]] = {}
        for module in modules:
            rule = self.rule(module)
            if rule.fused is not None:
                key = rule.fused, module.rsplit(".", rule.fused_depth)[0]
                groups[key] = (*groups.get(key, ()), module)
        return {module: members for members in groups.values() for module in members}

    def engine_names(self, modules: Iterable[str]) -> list[str]:
        """Return the names of modules and of the layers they are fused into, each in every engine's spelling."""
        names: dict[str, None] = {}
        for module in modules:
            names[module] = None
            rule = self.rule(module)
            for segment in rule.fused_names:
                names[f"{module.rsplit('.', rule.fused_depth)[0]}.{segment}"] = None
        return list(dict.fromkeys(itertools.chain(names, *map(self.model.names_of, names))))


def _compile_all(model: Architecture, patterns: Iterable[str]) -> list[re.Pattern[str]]:
    return [compile_pattern(pattern) for pattern in absolute_patterns(model, patterns)]


def _fused_parent(pattern: str) -> str:
    """What stands before a pattern's last alternatives: ".self_attn" of ".self_attn.{q,k,v}_proj"."""
    return pattern[: pattern.rindex("{")].rpartition(".")[0]


def _depth_below(module: str, parents: Iterable[re.Pattern[str]]) -> int:
    """How many segments of a module's name follow the longest prefix that a parent matches; 0 if none does."""
    segments = module.split(".")
    for depth in range(1, len(segments)):
        prefix = ".".join(segments[:-depth])
        if any(pattern.fullmatch(prefix) for pattern in parents):
            return depth
    return 0


def is_head(module: str) -> bool:
    """Return whether a module is an output head.

    Args:
        module: full name of the module: "lm_head".
    """
    return compile_pattern(HEAD.pattern).fullmatch(module) is not None


def is_embedding(module: str) -> bool:
    """Return whether a module is an input embedding.

    Args:
        module: full name of the module: "model.embed_tokens".
    """
    return _EMBEDDINGS.fullmatch(module) is not None


def is_table(module: str) -> bool:
    """Return whether a module is an output head or an input embedding, which have a row for each token.

    Args:
        module: full name of the module: "lm_head".
    """
    return is_head(module) or is_embedding(module)
