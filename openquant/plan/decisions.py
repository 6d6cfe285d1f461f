"""Types for what becomes of each tensor: Kept, Stack, Fate, Fates, and what asks for it: Options, Found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..files.layer_store import TensorPlace
from ..files.tensors import TensorInfo
from ..formats.schemes import Scheme
from ..patterns import compile_any, template
from ..weights.statistics import Calibration, StandIn
from ..weights.transform import UNDECIDED, WeightTransforms
from ..weights.weight import Weight

FEW_AXES = "fewer than two axes"
# What a plan may lack: statistics of activations, keys and values; what SmoothQuant or AWQ choose; what GPTQ rounds by.
Lack = Literal["activations", "smoothing", "Hessians"]


class PassthroughTensor(NamedTuple):
    """A tensor that is not quantized.

    Attributes:
        tensor: as it is written.
        alike: its name with `*` for its numbers, as the plan prints it: "model.layers.*.mlp.gate".
        why: the reason, such as "router".
        weight: as the source has it quantized; None if it is copied as it is.
        made: what it holds where the source has no such tensor: a number, or the one that is in a tensor of another
            name.
        changed: what becomes of it where inputs of layers are folded: what it then holds, or itself with its tuning.
    """

    tensor: TensorInfo
    alike: str
    why: str
    weight: Weight | None = None
    made: float | TensorInfo | None = None
    changed: bytes | Weight | None = None

    @property
    def small(self) -> bool:
        """Whether it has fewer than two axes, as norms and biases."""
        return len(self.tensor.shape) < 2


class StackedTensor(NamedTuple):
    """A tensor that holds the weights of several experts, each of which is written by itself."""

    tensor: TensorInfo
    layers: tuple[Weight, ...]


# A tensor of the source, and what is made from it: itself, a weight that could be quantized, or several.
Item = PassthroughTensor | Weight | StackedTensor


class Decision(NamedTuple):
    """What becomes of a weight that could be quantized.

    Attributes:
        scheme: what it is stored in; None if it stays unquantized.
        why: what says so, such as "--ignore **.down_proj"; empty for what has the plan's own scheme.
    """

    scheme: Scheme | None
    why: str


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks for beside the scheme.

    Attributes:
        ignore: patterns over module names that stay unquantized.
        scheme_for: patterns over module names, each with the scheme of what matches; the first that matches counts.
        tp: a tensor-parallel size that must be able to serve the result.
        head: whether the output head is quantized too.
        calibration: how large activations are, for stored scales of them.
        cached: whether keys and values are cached in FP8, with scales of theirs.
        transforms: what a calibration changes about weights before they are rounded.
        gptq: the texts by which GPTQ rounds, as eval.json has them: {"documents": 128, "length": 512, ..}; None if
            weights are rounded to nearest.
        texts: how much a calibration that is still to be made will read: {"documents": 128, "length": 512}; None if
            none can be made.
        calibrate: whether it is to be made although the scheme may not need it.
    """

    ignore: tuple[str, ...] = ()
    scheme_for: tuple[tuple[str, Scheme], ...] = ()
    tp: int | None = None
    head: bool = False
    calibration: Calibration | None = None
    cached: bool = False
    transforms: WeightTransforms | None = None
    gptq: Mapping[str, Any] | None = None
    texts: Mapping[str, Any] | None = None
    calibrate: bool = False

    @property
    def lacks(self) -> frozenset[Lack]:
        """What a plan with these options lacks."""
        found: dict[Lack, bool] = {
            "activations": isinstance(self.calibration, StandIn),
            "smoothing": self.transforms is UNDECIDED,
            "Hessians": self.gptq is not None,
        }
        return frozenset(lack for lack, is_lacking in found.items() if is_lacking)

    @property
    def stays(self) -> Callable[[str], bool]:
        """A function of a module that the registry's entry does not know: whether --ignore keeps it."""
        ignored = compile_any(text.removesuffix(".weight") for text in self.ignore)
        return lambda module: ignored.fullmatch(module) is not None


class StoredLayout(NamedTuple):
    """How a written directory has its modules: what options would have made it so.

    Attributes:
        unquantized: modules; one name with `*` for numbers where all named alike are, "model.layers.*.mlp.gate".
        schemes: likewise those of another scheme than most, in the order that counts where one is to be chosen.
    """

    unquantized: set[str]
    schemes: dict[str, Scheme]

    def stays(self, module: str) -> bool:
        """Whether a module is unquantized in the written directory."""
        return module in self.unquantized or template(module) in self.unquantized


@dataclass(frozen=True)
class Decisions:
    """What becomes of each tensor.

    Attributes:
        scheme: the plan's own, of all weights that are not in `others`; None if nothing is to be quantized.
        items: all tensors, by the shard they lie in.
        layers: weights that could be quantized, by module.
        sets: the joined set, by module, of each that engines merge with others; itself included.
        others: the fates, by module, of those that are not stored in the plan's own scheme.
        inputs: the largest magnitude that goes into each layer, by module, where a calibration says it.
        rounded: where tensors lie that were rounded before the conversion, by name.
    """

    scheme: Scheme | None
    items: dict[str, list[Item]]
    layers: dict[str, Weight]
    sets: dict[str, tuple[str, ...]]
    others: dict[str, Decision]
    inputs: Mapping[str, float] = field(default_factory=dict)
    rounded: Mapping[str, TensorPlace] = field(default_factory=dict)

    def of(self, module: str) -> Decision:
        """What becomes of a weight that could be quantized."""
        return self.others.get(module) or Decision(self.scheme, "")

    def each(self) -> Iterator[tuple[Weight, Decision]]:
        """The weights that could be quantized, and what becomes of them."""
        usual, others = Decision(self.scheme, ""), self.others
        return ((weight, others.get(module, usual)) for module, weight in self.layers.items())

    @property
    def kept(self) -> Iterator[PassthroughTensor]:
        """All tensors that could not be quantized, in the order of the source."""
        return (item for items in self.items.values() for item in items if isinstance(item, PassthroughTensor))

    @property
    def quantized(self) -> list[tuple[Weight, Scheme]]:
        """The weights that are quantized, each with its scheme."""
        return [(weight, decision.scheme) for weight, decision in self.each() if decision.scheme is not None]

    @property
    def unquantized(self) -> list[str]:
        """The modules that could be quantized and are not."""
        return [weight.module for weight, decision in self.each() if decision.scheme is None]

    @cached_property
    def kinds(self) -> list[tuple[Weight, Scheme]]:
        """Of the quantized weights, one for all of a scheme whose names differ in numbers only, as these are many."""
        return list({(weight.alike, scheme.suffix): (weight, scheme) for weight, scheme in self.quantized}.values())

    @cached_property
    def schemes(self) -> list[Scheme]:
        """The schemes of this plan, its own first."""
        found = dict.fromkeys([self.scheme, *(decision.scheme for decision in self.others.values())])
        return [scheme for scheme in found if scheme is not None]
