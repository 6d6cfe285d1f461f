"""What becomes of single modules of a plan, and which rule of the registry's entry says so.

explained(plan, "model.layers.0.mlp.gate")[0].why       # "router"
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import UsageError
from ..files.tensors import TensorInfo
from ..formats.format import Group
from ..formats.ignored import Ignored
from ..formats.schemes import Scheme
from ..patterns import compile_pattern, template
from ..registry.architecture import DRAFT, ParallelSplit, absolute_patterns
from ..registry.rules import ModuleRules
from ..weights.weight import Weight
from .config import ignored_layers
from .decisions import FEW_AXES, Decision, PassthroughTensor, StackedTensor
from .layout import output_tensors
from .plan import Plan
from .tensor_parallel import TENSOR_PARALLEL_SIZES, text_config, why_indivisible

# Names that are offered in place of one that is not there, and how alike they must be.
_MOST_OFFERED, _ALIKE = 3, 0.6


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source or the output: {"name": "lm_head.weight", "dtype": "BF16", "shape": [256, 64]}."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """What of the registry's entry covers a module.

    Attributes:
        field: "compress", "keep", "experts", "draft_layers" or "rest".
        pattern: the pattern; of draft layers config.json's key that counts the others; None for what no pattern covers.
    """

    field: str
    pattern: str | None


@dataclass(frozen=True)
class RankSplit:
    """How tensor-parallel ranks divide a module.

    Attributes:
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config.json's key that counts the heads along it; None where any division goes.
        replicated: whether heads are copied where there are fewer than ranks.
        sizes: those of 1 to 16 by which it divides.
        problems: why it does not by others, by size.
    """

    axis: str
    heads: str | None
    replicated: bool
    sizes: tuple[int, ...]
    problems: dict[int, str]


@dataclass(frozen=True)
class ModuleExplanation:
    """What becomes of modules that are alike.

    Attributes:
        module: one of them, of which all else is said.
        modules: all of them: their names differ in numbers only, and their fate is the same.
        scheme: what it is stored in, "channel"; None if it is not quantized.
        why: why it stays as it is, or has another scheme than most; empty for what has the plan's own.
        rule: what of the entry covers it; None for tensors of fewer than two axes, and for what --ignore alone names.
        shape: of the weight, [out, in].
        source: the tensors of the source that it is made from.
        shard: the file these lie in, and the output's has the same name.
        output: the tensors that it becomes.
        joined: all modules that engines merge it with, itself included; empty if they do not.
        experts: the module of the routed experts that it belongs to; None if to none.
        ranks: how tensor-parallel ranks divide it; None if they do not.
        engines: the names that it may be looked up under, by engine.
        listed: the entry of the config's list of unquantized modules that covers it; None if none does.
    """

    module: str
    modules: tuple[str, ...]
    scheme: str | None
    why: str
    rule: Rule | None
    shape: tuple[int, ...]
    source: tuple[Tensor, ...]
    shard: str
    output: tuple[Tensor, ...]
    joined: tuple[str, ...]
    experts: str | None
    ranks: RankSplit | None
    engines: dict[str, tuple[str, ...]]
    listed: str | None


@dataclass(frozen=True)
class Explanation:
    """The answer about some modules of a model.

    Attributes:
        model: as it was asked for.
        revision: the source's commit on the Hub, or None.
        architecture: the registry's entry that the plan was made by.
        scheme: of most layers.
        layers: one for all modules that are alike.
    """

    model: str
    revision: str | None
    architecture: str
    scheme: str
    layers: tuple[ModuleExplanation, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them."""
        return asdict(self)


class _Found(NamedTuple):
    """A module, and what the plan has for it: a weight, or a tensor that is kept."""

    module: str
    what: Weight | PassthroughTensor
    shard: str


def explain_modules(plan: Plan, asked: str) -> tuple[ModuleExplanation, ...]:
    """What becomes of the modules of that name, or of all that match a pattern.

    Args:
        plan: the plan.
        asked: a module of the source or the output, with or without `.weight`; `*`, `**` and `{a,b}` as in --ignore.

    Raises:
        UsageError: there is none, or the pattern is malformed.
    """
    pattern = compile_pattern(asked.removesuffix(".weight"))
    kinds: dict[tuple[object, ...], list[_Found]] = {}
    for found in _modules(plan):
        source = found.what.source.module if isinstance(found.what, Weight) else found.module
        if pattern.fullmatch(found.module) or pattern.fullmatch(source):
            kinds.setdefault(_kind(plan, found), []).append(found)
    if not kinds:
        raise UsageError(f"{asked} is no module of this model, nor does it match one", _offer(plan, asked))
    return tuple(_explain(plan, alike) for alike in kinds.values())


def _modules(plan: Plan) -> Iterator[_Found]:
    for shard, items in plan.decisions.items.items():
        for item in items:
            if isinstance(item, PassthroughTensor):
                yield _Found(item.tensor.module, item, shard)
            else:
                for weight in item.layers if isinstance(item, StackedTensor) else (item,):
                    yield _Found(weight.module, weight, shard)


def _kind(plan: Plan, found: _Found) -> tuple[object, ...]:
    what = found.what
    if isinstance(what, PassthroughTensor):
        return template(found.module), what.tensor.dtype, what.tensor.shape, what.why
    return what.alike, what.source.dtype, what.shape, what.format, plan.decisions.of(found.module)


def _explain(plan: Plan, alike: list[_Found]) -> ModuleExplanation:
    module, what, shard = alike[0]
    entry = plan.entry
    rule, shape = entry.rule(module), what.tensor.shape if isinstance(what, PassthroughTensor) else what.shape
    decision = Decision(None, what.why) if isinstance(what, PassthroughTensor) else plan.decisions.of(module)
    stored, made = _tensors(what, decision.scheme)
    ranks = None
    if rule.divided and len(shape) == 2:
        ranks = _ranks(
            plan, (shape[0], shape[1]), rule.split, decision.scheme.format.indivisible if decision.scheme else (1, 1)
        )
    engines = _engines(entry, module)
    return ModuleExplanation(
        module=module,
        modules=tuple(found.module for found in alike),
        scheme=decision.scheme.name if decision.scheme else None,
        why=decision.why,
        rule=_rule(plan, what, decision.why),
        shape=shape,
        source=tuple(Tensor(info.name, info.dtype, info.shape) for info in stored),
        shard=shard,
        output=tuple(Tensor(info.name, info.dtype, info.shape) for info in made),
        joined=plan.decisions.sets.get(module, ()),
        experts=entry.experts(module),
        ranks=ranks,
        engines=engines,
        listed=_listed(plan, {name for names in engines.values() for name in names}),
    )


def _rule(plan: Plan, what: Weight | PassthroughTensor, why: str) -> Rule | None:
    """What of the entry covers a module: sort.py asks in this order."""
    model, module = plan.model, (what.source if isinstance(what, Weight) else what.tensor).module
    if why == FEW_AXES:
        return None
    if why == DRAFT:
        return Rule("draft_layers", model.draft_layers)
    stacks = [f"{experts.place}.{stacked.name}" for experts in model.experts for stacked in experts.stacked]
    fields = {"compress": model.compress, "keep": [keep.pattern for keep in model.keep], "experts": stacks}
    for field, patterns in fields.items():
        for pattern in absolute_patterns(model, patterns):
            if compile_pattern(pattern).fullmatch(module):
                return Rule(field, pattern)
    return Rule("rest", None) if why and why == model.rest else None


def _tensors(
    what: Weight | PassthroughTensor, scheme: Scheme | None
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """The tensors of the source that something is made from, and those that it becomes."""
    if isinstance(what, Weight):
        return what.parts or (what.source,), output_tensors(what, scheme)
    if what.made is not None:
        return (what.made,) if isinstance(what.made, TensorInfo) else (), (what.tensor,)
    return what.weight.parts if what.weight else (what.tensor,), (what.tensor,)


def _ranks(plan: Plan, shape: tuple[int, int], split: ParallelSplit | None, group: Group) -> RankSplit:
    if split is None:
        # Embeddings and output heads, which engines fill up to what divides.
        return RankSplit("out", None, False, TENSOR_PARALLEL_SIZES, {})
    config = text_config(plan.seen, plan.model)
    found = {size: why_indivisible(shape, split, config, group, size) for size in TENSOR_PARALLEL_SIZES}
    return RankSplit(
        axis=split.axis,
        heads=split.heads,
        replicated=split.replicated,
        sizes=tuple(size for size, problem in found.items() if problem is None),
        problems={size: problem for size, problem in found.items() if problem is not None},
    )


def _engines(entry: ModuleRules, module: str) -> dict[str, tuple[str, ...]]:
    """The names of a module, and of what each engine merges it into where that is what it looks up."""
    rule = entry.rule(module)
    joined = next((one for one in entry.model.fused if one.pattern == rule.fused), None)
    merged = f"{module.rsplit('.', rule.under)[0]}.{joined.sglang}" if joined and joined.sglang else module
    names = {"vLLM": entry.looked_up(module), "SGLang": merged}
    return {
        engine: tuple(dict.fromkeys((*entry.model.names_of(name), *entry.model.names_of(module))))
        for engine, name in names.items()
    }


def _listed(plan: Plan, names: set[str]) -> str | None:
    if plan.scheme is None:
        return None
    by_experts = plan.scheme.method == "fp8"
    return Ignored(plan.scheme.ignored_keys[0], ignored_layers(plan), by_experts).find(sorted(names))


def _offer(plan: Plan, asked: str) -> str:
    """What may have been meant by a name that is not there."""
    families: dict[str, str] = {}
    names: set[str] = set()
    for found in _modules(plan):
        families.setdefault(template(found.module), found.module)
        names.add(found.module)
    last = f".{asked.removesuffix('.weight')}"
    if "*" not in asked and any(name.endswith(last) for name in families):
        return f"** is any part of a name: '**{last}'"
    offered = []
    wanted = asked.removesuffix(".weight")
    for family in difflib.get_close_matches(template(wanted), families, _MOST_OFFERED, _ALIKE):
        numbers = iter([part for part in wanted.split(".") if part.isdecimal()])
        same = ".".join(next(numbers, part) if part == "*" else part for part in family.split("."))
        offered.append(same if same in names else families[family])
    if offered:
        return f"nearest is {' or '.join(offered)}; compress --dry-run lists all"
    return "modules are named like tensors, without .weight; ** is any part; compress --dry-run -v lists them"
