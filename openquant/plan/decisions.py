"""What the user asks for (PlanOptions), what becomes of each tensor (Decisions), and the output's quantization_config.

The config has the names by which engines look up modules: the ignore list, and the targets of schemes that only some
layers have. What SmoothQuant, AWQ and GPTQ add to a plan is here too.

A Layout says where every output tensor goes: shards, their headers and offsets, the jobs that fill them; and the
printed lines.

    plan.layout.shards                                       # names and sizes
    plan.layout.lay_out("model-00001-of-00005.safetensors").jobs

Each source shard becomes one output shard of the same name, so a finished shard never depends on another. A shard is
laid out only when it is written, because it may have many thousands of jobs. The plan is printed with a line for all
tensors of the same name template, source dtype, shape and decision.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import PlanError
from ..files.shardfile import DTYPE_BITS, Location, TensorInfo, TensorPlace, make_header
from ..formats.format import Format
from ..formats.numbers import with_fp8_cache
from ..formats.schemes import Scheme
from ..patterns import compile_any
from ..registry.architecture import Architecture, ModuleRules, is_embedding, is_head, is_table
from ..weights.statistics import Calibration, PlaceholderCalibration
from ..weights.weight import UNDECIDED, Weight, WeightTransforms

FEW_AXES = "fewer than two axes"
# What a calibration must still find: ranges of activations and of the KV cache; factors of SmoothQuant or AWQ; GPTQ's
# Hessians.
Lack = Literal["activations", "smoothing", "Hessians"]


class PassthroughTensor(NamedTuple):
    """A tensor that is not quantized.

    Attributes:
        tensor: name, dtype and shape as it is written.
        name_template: its name with `*` for its numbers, as the plan prints it: "model.layers.*.mlp.gate".
        why: the reason, such as "router".
        weight: the quantized weight that it is decoded from; None if the source has it unquantized.
        value: for a scale that the plan adds: the number, or the source's tensor that holds it under another name;
            None for tensors of the source.
        smoothed: what smoothing changes it to: its new bytes, or the weight with its transform; None if nothing.
    """

    tensor: TensorInfo
    name_template: str
    why: str
    weight: Weight | None = None
    value: float | TensorInfo | None = None
    smoothed: bytes | Weight | None = None

    @property
    def small(self) -> bool:
        """Whether it has fewer than two axes, as norms and biases have."""
        return len(self.tensor.shape) < 2


class StackedTensor(NamedTuple):
    """A tensor that holds weights of several experts, each of which is written as a tensor of its own."""

    tensor: TensorInfo
    layers: tuple[Weight, ...]


# A tensor of the source with what is written for it: itself, a weight that may be quantized, or several weights.
Item = PassthroughTensor | Weight | StackedTensor


class Decision(NamedTuple):
    """What becomes of a weight that may be quantized.

    Attributes:
        scheme: the scheme; None if the weight is not quantized.
        why: the reason, such as "--ignore **.down_proj"; empty for the plan's own scheme.
    """

    scheme: Scheme | None
    why: str


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks for besides the scheme.

    Attributes:
        ignore: patterns of modules that are not quantized.
        scheme_for: patterns of modules, each with a scheme for what it matches; the first match counts.
        tp: a tensor-parallel size that must be able to serve the output; None for any.
        head: whether the output head is quantized too.
        embedding: whether the input embedding is quantized too.
        calibration: ranges of activations and of the KV cache, for static scales; None without.
        fp8_kv_cache: whether the output gets scales for an FP8 KV cache.
        transforms: what smoothing changes about weights before they are quantized; None without.
        gptq: the calibration texts of GPTQ as eval.json has them, {"documents": 128, "length": 512, ..}; None if
            weights are rounded to nearest.
        texts: the texts that a calibration still to be made will read, {"documents": 128, "length": 512}; None if none
            can be made.
        calibrate: whether that calibration is made even if the scheme does not need it.
    """

    ignore: tuple[str, ...] = ()
    scheme_for: tuple[tuple[str, Scheme], ...] = ()
    tp: int | None = None
    head: bool = False
    embedding: bool = False
    calibration: Calibration | None = None
    fp8_kv_cache: bool = False
    transforms: WeightTransforms | None = None
    gptq: Mapping[str, Any] | None = None
    texts: Mapping[str, Any] | None = None
    calibrate: bool = False

    @property
    def lacks(self) -> frozenset[Lack]:
        """What a calibration must find before a plan with these options can be carried out."""
        lacking: dict[Lack, bool] = {
            "activations": isinstance(self.calibration, PlaceholderCalibration),
            "smoothing": self.transforms is UNDECIDED,
            "Hessians": self.gptq is not None,
        }
        return frozenset(lack for lack, is_lacking in lacking.items() if is_lacking)

    def ignores(self) -> Callable[[str], bool]:
        """Return a function that says whether `ignore` matches a module."""
        ignored = compile_any(text.removesuffix(".weight") for text in self.ignore)
        return lambda module: ignored.fullmatch(module) is not None


@dataclass(frozen=True)
class Decisions:
    """What becomes of each tensor.

    Attributes:
        scheme: the plan's own scheme, of all weights that are not in `overrides`; None if nothing is quantized.
        items: all tensors, by the shard that holds them.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        fused: for each module that engines fuse with others, all members of its group, itself included.
        overrides: decisions about the weights that do not have the plan's own scheme, by module.
        input_absmax: largest magnitude of each layer's input activations, by module, where a calibration has it.
        rounded: where the tensors lie that GPTQ has already rounded, by name; None before GPTQ has run.
        keeps: whether all codes and scales of a quantized source must stay as they are (--scheme keep).
    """

    scheme: Scheme | None
    items: dict[str, list[Item]]
    layers: dict[str, Weight] = field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    overrides: dict[str, Decision] = field(default_factory=dict)
    input_absmax: Mapping[str, float] = field(default_factory=dict)
    rounded: Mapping[str, TensorPlace] | None = None
    keeps: bool = False

    def of(self, module: str) -> Decision:
        """Return the decision about a weight that may be quantized."""
        return self.overrides.get(module) or Decision(self.scheme, "")

    def iter_decisions(self) -> Iterator[tuple[Weight, Decision]]:
        """Iterate over the weights that may be quantized, each with its decision."""
        default = Decision(self.scheme, "")
        return ((weight, self.overrides.get(module, default)) for module, weight in self.layers.items())

    @cached_property
    def passthrough(self) -> list[PassthroughTensor]:
        """All tensors that may not be quantized, in the order of the source."""
        return [item for items in self.items.values() for item in items if isinstance(item, PassthroughTensor)]

    @property
    def quantized(self) -> list[tuple[Weight, Scheme]]:
        """The weights that are quantized, each with its scheme."""
        return [(weight, decision.scheme) for weight, decision in self.iter_decisions() if decision.scheme is not None]

    @property
    def unquantized(self) -> list[str]:
        """The modules that may be quantized and are not."""
        return [weight.module for weight, decision in self.iter_decisions() if decision.scheme is None]

    @cached_property
    def kinds(self) -> list[tuple[Weight, Scheme]]:
        """One quantized weight for each name template and scheme; experts alone may be tens of thousands."""
        return list(
            {(weight.name_template, scheme.suffix): (weight, scheme) for weight, scheme in self.quantized}.values()
        )

    @cached_property
    def schemes(self) -> list[Scheme]:
        """The schemes of the plan, its own first."""
        schemes = dict.fromkeys([self.scheme, *(decision.scheme for decision in self.overrides.values())])
        return [scheme for scheme in schemes if scheme is not None]


def apply_transforms(items: dict[str, list[Item]], layers: dict[str, Weight], transforms: WeightTransforms) -> None:
    """Add transforms to the weights of a plan, and new values to the norms and biases that smoothing changes.

    Args:
        items: all tensors, by file name of the shard; changed in place.
        layers: the weights that may be quantized, by full module name; changed in place.
        transforms: what the calibration changes: factors of matrices by full module name, and new bytes of norms and
            biases by tensor name.
    """
    for shard_items in items.values():
        shard_items[:] = (_transform_item(item, transforms) for item in shard_items)
    layers |= {module: _with_transform(weight, transforms) for module, weight in layers.items()}


def _transform_item(item: Item, transforms: WeightTransforms) -> Item:
    if isinstance(item, Weight):
        return _with_transform(item, transforms)
    if isinstance(item, StackedTensor):
        return item._replace(layers=tuple(_with_transform(weight, transforms) for weight in item.layers))
    return item._replace(smoothed=_apply_smoothing(item, transforms))


def _apply_smoothing(kept: PassthroughTensor, transforms: WeightTransforms) -> bytes | Weight | None:
    info = kept.tensor
    if info.name in transforms.tensors:
        data = transforms.tensors[info.name]
        assert len(data) == info.nbytes
        return data
    transform = transforms.weights.get(info.module)
    if transform is None or not transform.smooths:
        return None
    return Weight(info.module, kept.name_template, info, (info.shape[0], info.shape[1]), transform=transform)


def _with_transform(weight: Weight, transforms: WeightTransforms) -> Weight:
    return weight._replace(transform=transforms.weights.get(weight.module, weight.transform))


def refuse_repeats(model: Architecture) -> None:
    """Refuse GPTQ for a model that runs its layers several times.

    Args:
        model: the registry's entry of the architecture.

    Raises:
        PlanError: the model does.
    """
    if model.repeats:
        raise PlanError(
            f"{model.name} runs its layers several times, and GPTQ rounds a layer after its first pass",
            "leave --gptq out",
        )


def gptq_weights(decisions: Decisions) -> list[tuple[Weight, Scheme]]:
    """Return the weights that GPTQ rounds.

    Output head and embedding are rounded to nearest, since they are not in a decoder layer. Weights that the source has
    in the scheme already keep their codes.

    Args:
        decisions: the scheme of each weight.

    Returns:
        The weights, each with its scheme.
    """
    return [
        (weight, scheme)
        for weight, scheme in decisions.quantized
        if not is_table(weight.module) and not weight.is_stored_as(scheme.format)
    ]


def rounded_tensors(weight: Weight, scheme: Scheme) -> list[TensorInfo]:
    """Return the tensors that rounding a weight makes.

    Args:
        weight: a weight [out, in].
        scheme: the scheme it is rounded in.

    Returns:
        Name, dtype and shape of its codes, stored scales and, if the format has them, global scale and zero points.
    """
    form = scheme.format
    endings = [form.codes, form.scale.name, form.zero_point]
    if form.global_scale:
        endings.append(form.global_scale.name)
    names = {f"{weight.module}.{ending}" for ending in endings}
    return [info for info in form.parts(weight.module, weight.shape) if info.name in names]


def rounded_bytes(gptq_rounded: list[tuple[Weight, Scheme]]) -> int:
    """Return the size of the scratch files that rounded tensors take until they are in the output.

    Args:
        gptq_rounded: the weights that GPTQ rounds, each with its scheme.

    Returns:
        The size in bytes.
    """
    return sum(info.nbytes for weight, scheme in gptq_rounded for info in rounded_tensors(weight, scheme))


def tokens_of(texts: Mapping[str, Any]) -> str:
    """Say how much calibration text there is.

    Args:
        texts: the calibration texts, {"documents": 128, "length": 512}: the number of documents and of tokens in each.

    Returns:
        "128 x 512 tokens".
    """
    return f"{texts.get('documents')} x {texts.get('length')} tokens"


def gptq_notes(decisions: Decisions, entry: ModuleRules, texts: Mapping[str, Any]) -> list[str]:
    """Return notes about GPTQ for the user.

    Args:
        decisions: the scheme of each weight.
        entry: what the registry says of each module of the architecture.
        texts: the calibration texts, {"documents": 128, "length": 512}: the number of documents and of tokens in each.

    Returns:
        One sentence each: how many layers are rounded, whether the texts are too few, and how experts are rounded.
    """
    weights = gptq_weights(decisions)
    notes = [f"GPTQ rounds {len(weights)} layers with their Hessians over {tokens_of(texts)}"]

    length = texts["length"]
    inputs = max((weight.shape[1] for weight, _ in weights if not entry.experts(weight.module)), default=0)

    if texts["documents"] * length < inputs:
        # Such a Hessian has no full rank, and nothing holds the weights of inputs that no token had.
        notes.append(
            f"these are fewer tokens than a layer has inputs ({inputs:,}), and GPTQ may change single groups of it a "
            f"lot: --samples {-(-inputs // length)} gives enough"
        )

    experts = sum(bool(entry.experts(weight.module)) for weight, _ in weights)
    if experts:
        notes.append(
            f"{experts} of them are experts, each rounded with the Hessian over the tokens routed to it; without any "
            "tokens gate and up use the Hessian over all tokens of their layer, and down is rounded to nearest"
        )

    return notes


def quantization_config(entry: ModuleRules, decisions: Decisions, fp8_kv_cache: bool) -> dict[str, Any]:
    """Make the quantization_config of a plan that has a scheme.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.
        fp8_kv_cache: whether the output has scales for an FP8 KV cache.

    Returns:
        The value of the key `quantization_config` in config.json.
    """
    assert decisions.scheme is not None
    settings = decisions.scheme.config(ignored_names(entry, decisions), target_names(entry, decisions))
    if fp8_kv_cache:
        return with_fp8_cache(settings)
    return settings


def ignored_names(entry: ModuleRules, decisions: Decisions) -> list[str]:
    """Return the ignore list: module names as in the checkpoint, and the engines' other names for them.

    vLLM compares names for equality (layers/quantization/utils/quant_utils.py:617-691, for compressed-tensors
    utils/config_utils.py:226-293). It looks up experts by the path that holds them all, in the compressed-tensors
    format by the names of the first expert.

    SGLang matches whole subtrees, by a name in the fp8 format (layers/quantization/utils.py:51-64) and by a regular
    expression in the other. Towers are listed so, because the engine renames the modules inside.

    lm_head is listed unless it is quantized, since transformers would quantize one that is tied to the embedding.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        Full module names, and for towers in the compressed-tensors format regular expressions that begin with "re:".
    """
    quantized = [weight.module for weight, _ in decisions.kinds]

    names: dict[str, None] = {}
    if not any(map(is_head, quantized)):
        names["lm_head"] = None
    modules = [
        keep.tensor.module
        for keep in decisions.passthrough
        if len(keep.tensor.shape) == 2 and keep.tensor.name.endswith(".weight")
    ]

    for module in (*modules, *decisions.unquantized):
        experts = entry.experts(module)
        if experts:
            names[experts] = None
            # SGLang looks up these names, whatever the projections are called (compressed_tensors.py:883).
            names |= {f"{experts}.0.{part}_proj": None for part in ("gate", "up", "down")}
        names[module] = None

    towers = [
        tower
        for tower in entry.model.towers
        if any(tower in module.split(".") for module in names)
        and not any(tower in module.split(".") for module in quantized)
    ]

    if decisions.scheme is not None and decisions.scheme.method == "compressed-tensors":
        towers = [f"re:(.*[.])?{tower}[.].*" for tower in towers]

    return [*entry.engine_names(names), *towers]


def target_names(entry: ModuleRules, decisions: Decisions) -> dict[Scheme, list[str]]:
    """Return, for each scheme, the `targets` of layers that do not have the plan's own, of output head and embedding.

    vLLM (quantization/compressed_tensors/utils.py:73-119) and compressed-tensors (utils/match.py:116-151) look for a
    layer's name before its class, so these layers do not fall into the config group of all Linear layers. To vLLM an
    output head is not a Linear; it is found by name only. So is an embedding, or by its class if vLLM builds it without
    a name: "Embedding" is a part of VocabParallelEmbedding (quantization/utils/config_utils.py:392-411).

    There is one regular expression for all experts of a layer, because they are many and transformers recognizes
    experts by an expression that has "experts". vLLM does not rename modules in expressions, so each begins at the
    layer's number.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight.

    Returns:
        By scheme: full module names, and regular expressions that begin with "re:". Empty if all layers have the plan's
        scheme, and head and embedding are unquantized.
    """
    targets: dict[Scheme, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    has_tables = any(is_table(weight.module) for weight, _ in decisions.kinds)

    for module in decisions.layers:
        table = has_tables and is_table(module)
        scheme = decisions.of(module).scheme if table or module in decisions.overrides else None

        if scheme is not None:
            modules, experts, tables = targets.setdefault(scheme, ({}, {}, {}))

            path = entry.experts(module)
            if table and is_head(module):
                tables[f"re:(.*[.])?{module.rsplit('.', 1)[-1]}"] = None
            elif path:
                experts[path] = None
            else:
                modules[module] = None
            if is_embedding(module) and entry.model.embedding == "class":
                tables["Embedding"] = None

    return {
        scheme: [
            *entry.engine_names(modules),
            *dict.fromkeys(_experts_expression(path) for path in entry.engine_names(experts)),
            *tables,
        ]
        for scheme, (modules, experts, tables) in targets.items()
    }


def _experts_expression(path: str) -> str:
    """A regular expression for all experts below a path, with any prefix before the layer's number."""
    parts = path.split(".")
    number = next(number for number, part in enumerate(parts) if part.isdecimal())
    return "re:(.*[.])?" + "[.]".join([*map(re.escape, parts[number - 1 :]), ".*"])


@dataclass(frozen=True, slots=True)
class CopyBytes:
    """Copy bytes of the source unchanged.

    Attributes:
        label: the tensor's name, for messages.
        shard: the source shard.
        offset: position of the first byte in it.
        nbytes: how many bytes.
        target: position in the output shard.
        dtype: safetensors dtype of the elements.
    """

    label: str
    shard: str
    offset: int
    nbytes: int
    target: int
    dtype: str


@dataclass(frozen=True, slots=True)
class CopyRounded:
    """Copy a tensor of a weight that GPTQ has already rounded.

    Attributes:
        label: the tensor's name, for messages.
        path: the file that holds it.
        offset: position of the first byte in it.
        nbytes: how many bytes.
        target: position in the output shard.
        consumed: bytes of the source that it stands for, for progress.
    """

    label: str
    path: Path
    offset: int
    nbytes: int
    target: int
    consumed: int


@dataclass(frozen=True, slots=True)
class CopyScale:
    """Convert a scale of the source, of a layer's activations or the KV cache, to float32.

    Attributes:
        label: the scale's name, for messages.
        shard: the source shard.
        offset: position of the first byte in it.
        nbytes: size of the scale in the source.
        dtype: its safetensors dtype in the source.
        target: position in the output shard.
        inverse: whether 1 / scale is written.
    """

    label: str
    shard: str
    offset: int
    nbytes: int
    dtype: str
    target: int
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class PutBytes:
    """Write bytes that the plan knows, such as the `weight_shape` of int32-packed codes.

    Attributes:
        label: the tensor's name, for messages.
        data: the bytes.
        target: position in the output shard.
        nbytes: bytes of the source that they stand for, for progress.
    """

    label: str
    data: bytes
    target: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Unstack:
    """Write one expert's slice of a stacked tensor unquantized, at `target`."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class TransformWeight:
    """Write an unquantized weight in its own dtype at `target`, with the factors of smoothing applied."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Write a weight that the source has quantized as unquantized elements, at `target`."""

    weight: Weight
    target: int


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """One weight to be quantized, and the positions of its tensors in the output shard.

    Attributes:
        weight: the weight.
        target: position of its codes.
        scale_target: position of its scales.
        keeps_codes: whether the source's codes are in the scheme's format already and are copied.
        tied_target: position of the scale that fused layers share; None if the scheme has none.
        zero_target: position of its zero points; None if the scheme has none.
    """

    weight: Weight
    target: int
    scale_target: int
    keeps_codes: bool
    tied_target: int | None = None
    zero_target: int | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """Quantize a weight, or the fused layers of one output shard.

    Attributes:
        scheme: their scheme.
        pieces: the weights that this job writes.
        fused: all fused layers, those in other shards included, if they share a scale; empty if not.
        keeps: whether all codes and scales must stay as they are (--scheme keep).
    """

    scheme: Scheme
    pieces: tuple[WeightPlace, ...]
    fused: tuple[Weight, ...]
    keeps: bool = False


# The unit of work.
Job = CopyBytes | CopyRounded | CopyScale | PutBytes | Unstack | TransformWeight | Decode | Encode


@dataclass(frozen=True, slots=True)
class Shard:
    """One output shard: its file name, which is the source shard's, and the size of its tensors in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """The content of an output shard.

    Attributes:
        name: file name.
        header: the safetensors header, everything before the first tensor.
        size: size of the file in bytes.
        jobs: the jobs that write its tensors.
        tensors: all tensors, in file order.
    """

    name: str
    header: bytes
    size: int
    jobs: tuple[Job, ...]
    tensors: tuple[TensorInfo, ...]


def weights_of_tensor(item: Item) -> tuple[Weight, ...]:
    """Return the weights of a tensor that may be quantized.

    Args:
        item: a tensor of the source.

    Returns:
        The weight itself, one weight for each expert and projection of a stack, or none for a passthrough tensor.
    """
    if isinstance(item, PassthroughTensor):
        return ()
    if isinstance(item, StackedTensor):
        return item.layers
    return (item,)


def output_tensors(weight: Weight, scheme: Scheme | None) -> tuple[TensorInfo, ...]:
    """Return the tensors written for a weight.

    Args:
        weight: a weight [out, in].
        scheme: its scheme; None if it is not quantized.

    Returns:
        Name, dtype and shape of each: "X.weight" and "X.weight_scale" for module X, or "X.weight" without a scheme.
    """
    if scheme is None:
        return (TensorInfo(f"{weight.module}.weight", weight.source.dtype, weight.shape),)
    return stored_as(weight, scheme).parts(weight.module, weight.shape)


def stored_as(weight: Weight, scheme: Scheme) -> Format:
    """Return the format in which a weight is written.

    If the source's codes are copied and its scales are float16, so are the output's: bfloat16 would round them.

    Args:
        weight: the weight.
        scheme: its scheme.

    Returns:
        The scheme's format, with float16 scales in that case.
    """
    form = scheme.format
    scale = weight.scale
    if form.scale.dtype == "BF16" and scale is not None and scale.dtype == "F16" and weight.is_stored_as(form):
        return replace(form, scale=replace(form.scale, dtype="F16"))
    return form


def passthrough_source_bytes(kept: PassthroughTensor) -> int:
    """Return the size of what a passthrough tensor is made from.

    Args:
        kept: a tensor that is not quantized.

    Returns:
        Bytes of the source's tensor of its name, of the codes and scales that it is decoded from, or of the scale of
        another name that it is copied from; 0 for a KV-cache scale whose number the plan chose.
    """
    if isinstance(kept.value, TensorInfo):
        return kept.value.nbytes
    if kept.value is not None:
        return 0
    if kept.weight:
        return kept.weight.stored_nbytes
    return kept.tensor.nbytes


@dataclass(frozen=True)
class Layout:
    """The output's shards, and the positions of the tensors in each.

    Attributes:
        decisions: what becomes of each tensor: its scheme, or that it is copied or decoded.
        where: shard and offset of each tensor of the source, by name.
    """

    decisions: Decisions
    where: Mapping[str, Location]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output's shards; none for a source shard that holds nothing but scales."""
        decisions = self.decisions
        # Many weights have the same size.
        sizes: dict[tuple[str, tuple[int, int], Format | None], int] = {}

        def size(weight: Weight) -> int:
            scheme = decisions.of(weight.module).scheme
            key = weight.source.dtype, weight.shape, scheme and stored_as(weight, scheme)
            if key not in sizes:
                sizes[key] = sum(info.nbytes for info in output_tensors(weight, scheme))
            return sizes[key]

        nbytes = {name: 0 for name, items in decisions.items.items() if items}
        for name in nbytes:
            for item in decisions.items[name]:
                if isinstance(item, PassthroughTensor):
                    nbytes[name] += item.tensor.nbytes
                nbytes[name] += sum(map(size, weights_of_tensor(item)))
        return tuple(Shard(name, total) for name, total in nbytes.items())

    def sources(self, shard: str) -> set[str]:
        """Return the source shards that an output shard is made from.

        Those are the shard of its name, shards with scales of its weights, activations or KV cache, and shards with
        layers that share a scale with one of its layers.

        Args:
            shard: the output shard's file name.

        Returns:
            File names of the source's shards.
        """
        decisions = self.decisions
        where = self.where

        sources = {shard}
        for item in decisions.items[shard]:
            if isinstance(item, PassthroughTensor) and item.weight:
                sources |= {where[part.name].shard for part in item.weight.parts}
            elif isinstance(item, PassthroughTensor) and isinstance(item.value, TensorInfo):
                sources.add(where[item.value.name].shard)

            for weight in weights_of_tensor(item):
                scale = _input_scale(weight, decisions)
                scheme = decisions.of(weight.module).scheme
                if scale is not None:
                    sources.add(where[scale.name].shard)

                members = [weight]
                if scheme is not None and scheme.format.shares_scale:
                    members += [decisions.layers[module] for module in decisions.fused.get(weight.module, ())]
                for member in members:
                    sources |= {where[part.name].shard for part in member.parts or (member.source,)}

        return sources

    def count_source_bytes(self, shard: str) -> int:
        """Return how many bytes of the source an output shard is made from, scales in other shards included.

        Layers in other shards that are only read for a scale they share do not count.

        Args:
            shard: the output shard's file name.
        """
        total = 0
        for item in self.decisions.items[shard]:
            if isinstance(item, PassthroughTensor):
                total += passthrough_source_bytes(item)
            for weight in weights_of_tensor(item):
                total += weight.stored_nbytes
                if scale := _input_scale(weight, self.decisions):
                    total += scale.nbytes
        return total

    def outputs(self, shard: str) -> list[TensorInfo]:
        """Return the tensors of an output shard, in file order.

        Args:
            shard: its file name.
        """
        tensors: list[TensorInfo] = []
        for item in self.decisions.items[shard]:
            if isinstance(item, PassthroughTensor):
                tensors.append(item.tensor)
            for weight in weights_of_tensor(item):
                tensors += output_tensors(weight, self.decisions.of(weight.module).scheme)
        # Wide dtypes come first, as the safetensors library writes them, so that every tensor is aligned to its dtype.
        return sorted(tensors, key=lambda info: -DTYPE_BITS[info.dtype])

    def lay_out(self, shard: str) -> ShardLayout:
        """Make the header and the jobs of an output shard.

        Args:
            shard: its file name.
        """
        tensors = self.outputs(shard)
        header = make_header(tensors)
        targets: dict[str, int] = {}
        start = len(header)
        for info in tensors:
            targets[info.name] = start
            start += info.nbytes
        done: set[str] = set()
        jobs = [
            job
            for item in self.decisions.items[shard]
            for job in _jobs(item, self.decisions, self.where, targets, done)
        ]
        return ShardLayout(shard, header, start, tuple(jobs), tuple(tensors))


def _jobs(
    item: Item, decisions: Decisions, where: Mapping[str, Location], targets: dict[str, int], done: set[str]
) -> Iterator[Job]:
    """Make the jobs for a tensor. `done`: modules that an earlier job writes; those that these jobs write are added."""
    if isinstance(item, PassthroughTensor):
        yield from _passthrough_jobs(item, where, targets[item.tensor.name])

    for weight in weights_of_tensor(item):
        scheme = decisions.of(weight.module).scheme
        if scheme is None:
            yield _unquantized_job(weight, where, targets[f"{weight.module}.weight"])
            continue

        if f"{weight.module}.{scheme.format.codes}" in (decisions.rounded or {}):
            yield from _rounded_jobs(weight, scheme, decisions, targets)
        elif weight.module not in done:
            encode = _encode_job(weight, scheme, decisions, where, targets)
            done.update(piece.weight.module for piece in encode.pieces)
            yield encode

        yield from _input_scale_jobs(weight, scheme, decisions, where, targets)
        for info, data in scheme.format.constant_tensors(weight.module, weight.shape):
            yield PutBytes(info.name, data, targets[info.name])


def _passthrough_jobs(item: PassthroughTensor, where: Mapping[str, Location], target: int) -> Iterator[Job]:
    """The jobs for a tensor that is not quantized."""
    info = item.tensor

    if isinstance(item.value, TensorInfo):
        yield _scale_job(item.value, where, target)
    elif item.value is not None:
        yield PutBytes(info.name, struct.pack("<f", item.value), target)
    elif isinstance(item.smoothed, bytes):
        yield PutBytes(info.name, item.smoothed, target, info.nbytes)
    elif item.smoothed is not None:
        yield TransformWeight(item.smoothed, target)
    elif item.weight is None:
        location = where[info.name]
        yield CopyBytes(info.name, location.shard, location.offset, info.nbytes, target, info.dtype)
    else:
        for number, matrix in enumerate(item.weight.matrices):
            size = TensorInfo("", info.dtype, matrix.shape).nbytes
            yield Decode(matrix, target + number * size)


def _unquantized_job(weight: Weight, where: Mapping[str, Location], target: int) -> Job:
    """The job for a layer's weight that is not quantized."""
    if weight.format is not None:
        return Decode(weight, target)
    if weight.smoothed:
        return TransformWeight(weight, target)
    if weight.expert >= 0:
        return Unstack(weight, target)

    name = f"{weight.module}.weight"
    location = where[name]
    return CopyBytes(name, location.shard, location.offset, weight.nbytes, target, weight.source.dtype)


def _rounded_jobs(weight: Weight, scheme: Scheme, decisions: Decisions, targets: dict[str, int]) -> Iterator[Job]:
    """Copies of the codes and scales that GPTQ wrote; the first one counts for all bytes of the source."""
    stored = weight.stored_nbytes
    for info in output_tensors(weight, scheme):
        if file := (decisions.rounded or {}).get(info.name):
            yield CopyRounded(info.name, file.path, file.offset, info.nbytes, targets[info.name], stored)
            stored = 0


def _encode_job(
    weight: Weight, scheme: Scheme, decisions: Decisions, where: Mapping[str, Location], targets: dict[str, int]
) -> Encode:
    """The job that quantizes a weight, and those fused with it that lie in its shard."""
    fmt = scheme.format
    fused = [decisions.layers[module] for module in decisions.fused.get(weight.module, (weight.module,))]
    shard = where[weight.source.name].shard

    pieces = (
        WeightPlace(
            member,
            targets[f"{member.module}.{fmt.codes}"],
            targets[f"{member.module}.{fmt.scale.name}"],
            member.is_stored_as(fmt),
            targets[fmt.shared_scale_name(member.module)] if fmt.shares_scale else None,
            targets[f"{member.module}.{fmt.zero_point}"] if fmt.zero_point else None,
        )
        for member in fused
        if where[member.source.name].shard == shard
    )
    return Encode(scheme, tuple(pieces), tuple(fused) if fmt.shares_scale else (), decisions.keeps)


def _input_scale_jobs(
    weight: Weight, scheme: Scheme, decisions: Decisions, where: Mapping[str, Location], targets: dict[str, int]
) -> Iterator[Job]:
    """The job for the static scale of a layer's inputs: the source's, or one from a calibration."""
    name = f"{weight.module}.{scheme.format.input_scale}"
    scale = _input_scale(weight, decisions)
    if scale is not None:
        dynamic = weight.format and weight.format.input_global_scale
        yield _scale_job(scale, where, targets[name], inverse=dynamic is not None and not dynamic.divides)
    elif name in targets:
        absmax = decisions.input_absmax.get(weight.module)
        yield PutBytes(name, struct.pack("<f", scheme.input_scale(absmax)), targets[name])


def _scale_job(scale: TensorInfo, where: Mapping[str, Location], target: int, inverse: bool = False) -> CopyScale:
    """The job that copies a scale of the source."""
    location = where[scale.name]
    return CopyScale(scale.name, location.shard, location.offset, scale.nbytes, scale.dtype, target, inverse)


def _input_scale(weight: Weight, decisions: Decisions) -> TensorInfo | None:
    """The source's scale of a layer's activations, if the output keeps it."""
    scheme = decisions.of(weight.module).scheme
    if scheme is None or weight.module in decisions.input_absmax:
        return None
    return weight.input_scale_for(scheme.format)


def weight_kinds(decisions: Decisions) -> list[Weight]:
    """Return one weight of each kind (`Weight.kind`) among all that may be read row by row, to size buffers.

    Those are the weights that may be quantized, and the others that are decoded or smoothed.

    Args:
        decisions: what becomes of each tensor.

    Returns:
        The weights.
    """
    kinds = {weight.kind: weight for weight in decisions.layers.values()}
    kinds |= {kept.weight.kind: kept.weight for kept in decisions.passthrough if kept.weight}
    kinds |= {kept.smoothed.kind: kept.smoothed for kept in decisions.passthrough if isinstance(kept.smoothed, Weight)}
    return list(kinds.values())


@dataclass(frozen=True)
class PlanLine:
    """A line of the printed plan: tensors of the same name template, dtype in the source, shape and decision.

    For tensors that are quantized in the source, the dtype is that of their codes.

    Attributes:
        names: the modules, or the tensors if they have fewer than two axes.
        shape: shape of each.
        scheme: their scheme; None if they are not quantized.
        decoded: whether they are quantized in the source, but not in the output.
        why: why they are not quantized ("router"), or have another scheme than most
            ("channel: --scheme-for **.down_proj=channel"); empty for the plan's own scheme.
        bytes_before: size of all of them in the source.
        bytes_after: size of all of them in the output.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    scheme: Scheme | None
    decoded: bool
    why: str
    bytes_before: int
    bytes_after: int

    @property
    def quantized(self) -> bool:
        """Whether they are quantized in the output."""
        return self.scheme is not None


# Name template, dtype in the source, shape, whether quantized, and why.
_Kind = tuple[str, str, tuple[int, ...], bool, str]


@dataclass(slots=True)
class _Group:
    """Tensors that become a line: their scheme, whether they are decoded, the size of each before and after, names."""

    scheme: Scheme | None
    decoded: bool
    before: int
    after: int
    names: list[str]
    # Total size in the source of those that are quantized there, each of which may be stored in another format.
    stored: int = 0


def plan_lines(decisions: Decisions) -> tuple[PlanLine, ...]:
    """Return the lines of a printed plan.

    Args:
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        One line for all tensors of the same name template, dtype in the source, shape and decision, with names, shape,
        scheme, reason, and bytes before and after. First come weights that may be quantized, then other matrices, then
        tensors of fewer than two axes.
    """
    groups: dict[_Kind, _Group] = {}
    kind: _Kind

    for layer, (scheme, why) in decisions.iter_decisions():
        stored = layer.format is not None
        if scheme is not None and why:
            why = f"{scheme.name}: {why}"
        dtype = layer.codes.dtype if stored else layer.source.dtype
        kind = layer.name_template, dtype, layer.shape, scheme is not None, why

        group = groups.get(kind)
        if group is None:
            after = sum(info.nbytes for info in output_tensors(layer, scheme))
            group = groups[kind] = _Group(scheme, stored and scheme is None, 0 if stored else layer.nbytes, after, [])
        group.names.append(layer.module)
        group.stored += layer.stored_nbytes if stored else 0

    for kept in sorted(decisions.passthrough, key=lambda kept: kept.small):
        tensor = kept.tensor
        weight = kept.weight
        kind = kept.name_template, weight.codes.dtype if weight else tensor.dtype, tensor.shape, False, kept.why

        group = groups.get(kind)
        if group is None:
            group = groups[kind] = _Group(None, weight is not None, 0, tensor.nbytes, [])
        group.names.append(tensor.name if kept.small else tensor.module)
        group.stored += passthrough_source_bytes(kept)

    lines = []
    for (_, _, shape, _, why), group in groups.items():
        before = group.stored + len(group.names) * group.before
        after = len(group.names) * group.after
        lines.append(PlanLine(tuple(group.names), shape, group.scheme, group.decoded, why, before, after))

    return tuple(lines)
