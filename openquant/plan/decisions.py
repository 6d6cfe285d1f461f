"""Types of a plan: what the user asks for (PlanOptions), and what becomes of each tensor (Decisions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..files.layer_store import TensorPlace
from ..files.tensors import TensorInfo
from ..formats.schemes import Scheme
from ..patterns import compile_any, template
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


class StoredLayout(NamedTuple):
    """The schemes of an existing output directory, to make the same plan again.

    Attributes:
        unquantized: modules that are not quantized. Where all modules of a name template are, the template stands for
            them: "model.layers.*.mlp.gate".
        schemes: modules or templates whose scheme is not that of most layers; when fused layers need one scheme, the
            one that comes first here is chosen.
    """

    unquantized: set[str]
    schemes: dict[str, Scheme]

    def is_unquantized(self, module: str) -> bool:
        """Whether a module is not quantized in the directory."""
        return module in self.unquantized or template(module) in self.unquantized


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

    def decided(self) -> Iterator[tuple[Weight, Decision]]:
        """Iterate over the weights that may be quantized, each with its decision."""
        default, overrides = Decision(self.scheme, ""), self.overrides
        return ((weight, overrides.get(module, default)) for module, weight in self.layers.items())

    @property
    def passthrough(self) -> Iterator[PassthroughTensor]:
        """All tensors that may not be quantized, in the order of the source."""
        return (item for items in self.items.values() for item in items if isinstance(item, PassthroughTensor))

    @property
    def quantized(self) -> list[tuple[Weight, Scheme]]:
        """The weights that are quantized, each with its scheme."""
        return [(weight, decision.scheme) for weight, decision in self.decided() if decision.scheme is not None]

    @property
    def unquantized(self) -> list[str]:
        """The modules that may be quantized and are not."""
        return [weight.module for weight, decision in self.decided() if decision.scheme is None]

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
