"""What the user asks for (PlanOptions), what becomes of each tensor (Decisions), and the output's quantization_config.

The config has the names by which engines look up modules: the ignore list, and the targets of schemes that only some
layers have. What SmoothQuant, AWQ and GPTQ add to a plan is here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..errors import PlanError
from ..files.shardfile import TensorInfo, TensorPlace
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

    @cached_property
    def ignored(self) -> re.Pattern[str]:
        """The modules that `ignore` matches, as an expression for `fullmatch`."""
        return compile_any(text.removesuffix(".weight") for text in self.ignore)


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
        One sentence each: how many layers are rounded, and whether the texts are too few.
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
