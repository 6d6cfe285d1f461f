"""A plan in figures, for the terminal, the model card and `--json`; and what becomes of single modules.

    summary.title(plan)             # "one scale per tensor, 16 of 28 layers one scale per output row"
    summary.output_bytes(plan)      # 9434513408, before anything is read
    explain_modules(plan, "model.layers.0.mlp.gate")[0].why       # "router"

Nothing is decided here, and the conversion does not use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import UsageError
from ..files.shardfile import TensorInfo
from ..formats.format import Group
from ..formats.hardware import KEPT, KEPT_SUFFIX, UNCHANGED
from ..formats.schemes import Scheme
from ..patterns import Ignored, compile_pattern, template
from ..registry.architecture import HEAD, MTP_LAYER, ModuleRules, ParallelSplit, is_embedding, is_head
from ..weights.weight import Weight
from .architecture import TENSOR_PARALLEL_SIZES, check_parallel_sizes, text_config, why_indivisible
from .assign import NO_MODULE
from .decisions import FEW_AXES, Decision, PassthroughTensor
from .engines import sglang_refusal
from .layout import output_tensors, weights_of_tensor
from .plan import Plan, has_fp8_cache, ignored_layers
from .serving import Serving, estimate_serving


def source_bytes(plan: Plan) -> int:
    """Return the size of the tensors of a plan's source in bytes."""
    return sum(info.nbytes for info in plan.source.tensors.values())


def output_bytes(plan: Plan) -> int:
    """Return the size of the tensors of a plan's output in bytes."""
    return sum(shard.nbytes for shard in plan.layout.shards)


def quantized_bytes(plan: Plan) -> int:
    """Return the size in the source, in bytes, of the weights that are quantized in the output."""
    return sum(line.bytes_before for line in plan.lines if line.quantized)


def quantized_tensors(plan: Plan) -> int:
    """Count the layers that are quantized in the output."""
    return sum(schemes(plan).values())


def decoded_tensors(plan: Plan) -> int:
    """Count the weights that are quantized in the source, but not in the output."""
    return sum(len(line.names) for line in plan.lines if line.decoded)


def has_quantized_source(plan: Plan) -> bool:
    """Whether any weight is quantized in the source."""
    return any(kept.weight for kept in plan.decisions.passthrough) or any(
        layer.format for layer in plan.layers.values()
    )


def schemes(plan: Plan) -> dict[Scheme, int]:
    """Count the layers of each scheme.

    Args:
        plan: what a run will write.

    Returns:
        The number of layers, by scheme, the plan's own first.
    """
    counts = dict.fromkeys(plan.decisions.schemes, 0)
    for line in plan.lines:
        if line.scheme is not None:
            counts[line.scheme] += len(line.names)
    return counts


def scheme_names(plan: Plan) -> dict[str, int]:
    """Count the layers of each scheme.

    Args:
        plan: what a run will write.

    Returns:
        The number of layers, by the name that the user types: {"tensor": 196}; the plan's own first.
    """
    counts = Counter[str]()
    for scheme, count in schemes(plan).items():
        counts[scheme.name] += count
    return dict(counts)


def scheme_name(plan: Plan) -> str:
    """Return the name of the plan's own scheme: "tensor"; "none" if weights are copied, "bf16" if they are decoded,
    "keep" if codes and scales of the source are kept.
    """
    if plan.decisions.keeps:
        return KEPT
    if plan.scheme:
        return plan.scheme.name
    if plan.quantization_config:
        return UNCHANGED
    return "bf16"


def title(plan: Plan) -> str:
    """Say what shares a scale: "one scale per tensor, 16 of 28 layers one scale per output row".

    Without a scheme: "weights as they are" if they are copied, "bfloat16 weights" if they are decoded.
    """
    if not plan.quantization_config:
        return "bfloat16 weights"
    if plan.scheme is None:
        return "weights as they are"

    counts = schemes(plan)
    most, *others = counts
    total = sum(counts.values())
    titles = [most.title]
    for other in others:
        text = f"{counts[other]} of {total} layers "
        if other.format.number.name != most.format.number.name:
            text += f"{other.format.number.name}, "
        titles.append(text + other.title)
    return ", ".join(titles)


def description(plan: Plan) -> str:
    """Describe the weights that a plan writes.

    Args:
        plan: what a run will write.

    Returns:
        Numeric format, and what shares a scale: "float8_e4m3fn, one scale per tensor"; layers of other schemes follow.
        "bfloat16 weights" or "weights as they are" if nothing is quantized.
    """
    if plan.scheme is None:
        return title(plan)
    return f"{plan.scheme.format.number.name}, {title(plan)}"


def numbers(plan: Plan) -> str:
    """Name the weights' numeric formats: "FP8", "FP8 and INT8" or "BF16"; "unchanged" if none is quantized here."""
    if not plan.quantization_config:
        return "BF16"
    return " and ".join(dict.fromkeys(scheme.format.number.title for scheme in plan.decisions.schemes)) or "unchanged"


def suffix(plan: Plan) -> str:
    """Return the suffix of the output's default name: "-FP8", or "-BF16" if weights are decoded. With an FP8 KV cache
    "-KV8" follows, and stands alone if weights are copied. What keeps the source's codes and scales has "-CT" alone.
    """
    if plan.decisions.keeps:
        return KEPT_SUFFIX

    name = ""
    if plan.scheme:
        name = plan.scheme.suffix
    elif not plan.quantization_config:
        name = "-BF16"
    if has_fp8_cache(plan):
        name += "-KV8"
    return name


def cache_layers(plan: Plan) -> int:
    """Count the layers for which the plan adds scales of the KV cache."""
    return sum(kept.value is not None for kept in plan.decisions.passthrough) // 2


def engines(plan: Plan) -> tuple[str, ...]:
    """Return the engines that can serve the output: ("vLLM", "SGLang")."""
    if sglang_refusal(plan.entry, plan.decisions):
        return ("vLLM",)
    return ("vLLM", "SGLang")


def parallel_sizes(plan: Plan) -> list[int]:
    """Return the tensor-parallel sizes that can serve the output: [1, 2, 4]."""
    return [size for size, problem in plan.parallel.items() if problem is None]


def source_parallel(plan: Plan) -> Mapping[int, str | None]:
    """Return tensor-parallel sizes, each with the reason for which it cannot serve the plan's source, if any."""
    if plan.scheme is None:
        return plan.parallel
    formats = ((layer, layer.format) for layer in plan.layers.values())
    return check_parallel_sizes(plan.decoded, plan.entry, formats, None)


def serving(plan: Plan) -> tuple[Serving, Serving] | None:
    """Compute what it takes to serve the source and the output.

    Args:
        plan: what a run will write.

    Returns:
        Bytes of weights and caches and the GPUs needed, of the source, then of the output; None for a plan to
        dequantize.
    """
    if not plan.quantization_config:
        return None
    return (
        estimate_serving(plan, source_parallel(plan), output=False),
        estimate_serving(plan, plan.parallel, output=True),
    )


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source or the output: {"name": "lm_head.weight", "dtype": "BF16", "shape": [256, 64]}."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """The field of the registry's entry that decides about a module.

    Attributes:
        field: "compress", "keep", "experts", "draft_layers" or "rest".
        pattern: the pattern that matches; for MTP layers the config key that counts the decoder layers; None for
            "rest", which is for modules that no pattern matches.
    """

    field: str
    pattern: str | None


@dataclass(frozen=True)
class RankSplit:
    """How tensor-parallel ranks divide a module.

    Attributes:
        axis: "out" (column parallel) or "in" (row parallel).
        heads: config key that counts the heads along the axis; None if it may be divided anywhere.
        replicated: whether heads are copied if there are fewer than ranks.
        sizes: the tensor-parallel sizes, of 1 to 16, by which it divides.
        problems: for other sizes, why it does not.
    """

    axis: str
    heads: str | None
    replicated: bool
    sizes: tuple[int, ...]
    problems: dict[int, str]


@dataclass(frozen=True)
class ModuleExplanation:
    """What becomes of modules with the same name template and the same decision.

    Attributes:
        module: the first of them, to which the other fields refer.
        modules: all of them.
        scheme: name of its scheme, "channel"; None if it is not quantized.
        why: why it is not quantized, or has another scheme than most; empty for the plan's own scheme.
        rule: the field of the entry that decides; None for tensors of fewer than two axes, and for modules that only
            --ignore matches.
        shape: of the weight, [out, in].
        source: the tensors of the source that it is made from.
        shard: file name of the shard that holds them; the output's has the same name.
        output: the tensors that are written for it.
        joined: all modules that engines fuse it with, itself included; empty if they do not.
        experts: the module of the routed experts that it belongs to; None if it does not.
        ranks: how tensor-parallel ranks divide it; None if they do not.
        engines: the names by which each engine may look it up.
        listed: the item of the ignore list that matches it; None if none does.
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
    """The explanation of some modules of a model.

    Attributes:
        model: the model, as the user named it.
        revision: the source's commit on the Hub; None for a directory.
        architecture: name of the registry's entry.
        scheme: scheme of most layers.
        layers: one explanation for all modules of the same name template and decision.
    """

    model: str
    revision: str | None
    architecture: str
    scheme: str
    layers: tuple[ModuleExplanation, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, as `--json` prints them."""
        return asdict(self)


class _Module(NamedTuple):
    """A module of the plan, with its weight or passthrough tensor, and the shard that holds it."""

    name: str
    tensor: Weight | PassthroughTensor
    shard: str


def explain_modules(plan: Plan, requested: str) -> tuple[ModuleExplanation, ...]:
    """Explain the modules that a name or pattern matches.

    Args:
        plan: what a run will write.
        requested: a module of the source or output, with or without `.weight`; `*`, `**` and `{a,b}` as in --ignore.

    Returns:
        One explanation for all modules of the same name template and decision: their scheme and why, the tensors they
        are made from and written as, and how engines fuse, divide and name them.

    Raises:
        UsageError: nothing matches, the pattern is malformed, or it names an output head that is the embedding.
    """
    name = requested.removesuffix(".weight")
    pattern = compile_pattern(name)

    groups: dict[tuple[object, ...], list[_Module]] = {}
    for module in _modules(plan):
        source = module.tensor.source.module if isinstance(module.tensor, Weight) else module.name
        if pattern.fullmatch(module.name) or pattern.fullmatch(source):
            groups.setdefault(_group_key(plan, module), []).append(module)

    if not groups and is_head(name) and not any(is_head(module.name) for module in _modules(plan)):
        embeddings = [module.name for module in _modules(plan) if is_embedding(module.name)]
        if embeddings:
            raise UsageError(
                f"{name} is no module of its own: the output head is the input embedding, which stays unquantized",
                f"explain {embeddings[0]} instead",
            )

    if not groups:
        raise UsageError(f"{requested} is no module of this model, nor does it match one", NO_MODULE)

    return tuple(_explain(plan, modules) for modules in groups.values())


def _modules(plan: Plan) -> Iterator[_Module]:
    for shard, items in plan.decisions.items.items():
        for item in items:
            if isinstance(item, PassthroughTensor):
                yield _Module(item.tensor.module, item, shard)
            for weight in weights_of_tensor(item):
                yield _Module(weight.module, weight, shard)


def _group_key(plan: Plan, module: _Module) -> tuple[object, ...]:
    tensor = module.tensor
    if isinstance(tensor, PassthroughTensor):
        return template(module.name), tensor.tensor.dtype, tensor.tensor.shape, tensor.why
    return tensor.name_template, tensor.source.dtype, tensor.shape, tensor.format, plan.decisions.of(module.name)


def _explain(plan: Plan, modules: list[_Module]) -> ModuleExplanation:
    module, tensor, shard = modules[0]

    entry = plan.entry
    rule = entry.rule(module)
    if isinstance(tensor, PassthroughTensor):
        shape = tensor.tensor.shape
        decision = Decision(None, tensor.why)
    else:
        shape = tensor.shape
        decision = plan.decisions.of(module)
    source, output = _tensors(tensor, decision.scheme)

    ranks = None
    if rule.divided and len(shape) == 2:
        ranks = _ranks(
            plan, (shape[0], shape[1]), rule.split, decision.scheme.format.indivisible if decision.scheme else (1, 1)
        )

    engines = _engines(entry, module)

    return ModuleExplanation(
        module=module,
        modules=tuple(module.name for module in modules),
        scheme=decision.scheme and decision.scheme.name,
        why=_why(plan, module, decision.why),
        rule=_rule(plan, tensor, decision.why),
        shape=shape,
        source=tuple(Tensor(info.name, info.dtype, info.shape) for info in source),
        shard=shard,
        output=tuple(Tensor(info.name, info.dtype, info.shape) for info in output),
        joined=plan.decisions.fused.get(module, ()),
        experts=entry.experts(module),
        ranks=ranks,
        engines=engines,
        listed=_find_listed(plan, {name for names in engines.values() for name in names}),
    )


def _why(plan: Plan, module: str, why: str) -> str:
    """Why a module is not quantized; of an output head also which option would quantize it, or why none does."""
    if why != HEAD.why or not is_head(module):
        return why
    return f"{why}: {plan.model.head_refused or 'quantized with --quantize-lm-head only'}"


def _rule(plan: Plan, tensor: Weight | PassthroughTensor, why: str) -> Rule | None:
    """The field of the entry that decides about a module, found in the order of `sort_tensors`."""
    model = plan.model
    module = (tensor.source if isinstance(tensor, Weight) else tensor.tensor).module
    if why == FEW_AXES:
        return None
    if why == MTP_LAYER:
        return Rule("draft_layers", model.draft_layers)

    stacks = [f"{experts.place}.{stacked.name}" for experts in model.experts for stacked in experts.stacked]
    fields = {"compress": model.compress, "keep": [keep.pattern for keep in model.keep], "experts": stacks}
    for field, patterns in fields.items():
        for pattern in map(model.absolute, patterns):
            if compile_pattern(pattern).fullmatch(module):
                return Rule(field, pattern)

    if why and why == model.rest:
        return Rule("rest", None)
    return None


def _tensors(
    tensor: Weight | PassthroughTensor, scheme: Scheme | None
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """The tensors of the source, and those of the output, of a weight or passthrough tensor."""
    if isinstance(tensor, Weight):
        return tensor.parts or (tensor.source,), output_tensors(tensor, scheme)
    output = (tensor.tensor,)
    if isinstance(tensor.value, TensorInfo):
        return (tensor.value,), output
    if tensor.value is not None:
        return (), output
    if tensor.weight:
        return tensor.weight.parts, output
    return output, output


def _ranks(plan: Plan, shape: tuple[int, int], split: ParallelSplit | None, group: Group) -> RankSplit:
    if split is None:
        # Embeddings and output heads, which engines pad until they divide.
        return RankSplit("out", None, False, TENSOR_PARALLEL_SIZES, {})
    config = text_config(plan.decoded, plan.model)
    problems = {size: why_indivisible(shape, split, config, group, size) for size in TENSOR_PARALLEL_SIZES}
    return RankSplit(
        axis=split.axis,
        heads=split.heads,
        replicated=split.replicated,
        sizes=tuple(size for size, problem in problems.items() if problem is None),
        problems={size: problem for size, problem in problems.items() if problem is not None},
    )


def _engines(entry: ModuleRules, module: str) -> dict[str, tuple[str, ...]]:
    """The names of a module by engine; first that of the fused layer, if the engine looks up that one."""
    rule = entry.rule(module)
    fused = next((layers for layers in entry.model.fused if layers.pattern == rule.fused), None)
    sglang_name = f"{module.rsplit('.', rule.fused_depth)[0]}.{fused.sglang}" if fused and fused.sglang else module
    names = {"vLLM": entry.vllm_name(module), "SGLang": sglang_name}
    return {
        engine: tuple(dict.fromkeys((*entry.model.names_of(name), *entry.model.names_of(module))))
        for engine, name in names.items()
    }


def _find_listed(plan: Plan, names: set[str]) -> str | None:
    if plan.scheme is None:
        return None
    return Ignored(plan.scheme.ignored_keys[0], ignored_layers(plan), plan.scheme.method == "fp8").find(sorted(names))
