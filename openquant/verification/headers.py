"""What the headers of a quantized directory hold, sorted: quantized weights, their scales, and all else.

Headers is what is there; checks of it are functions in modules by what they check (checks.py has them all in order),
and Findings is what they find. No tensor is read. What engines would load wrongly is a problem; what another tool may
do otherwise than this one, and engines accept, is a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..files.checkpoint import Checkpoint
from ..files.tensors import TensorInfo
from ..formats.format import INPUT_SCALE
from ..formats.quantization import IN_COLUMNS, Quantization
from ..formats.schemes import Scheme
from ..registry.rules import ModuleRules
from ..weights.weight import Weight

# Beside codes in columns, the last parts of names.
COLUMN_PARTS = ("qzeros", "scales", "g_idx")


@dataclass
class Findings:
    """What checks find, in their order.

    Attributes:
        ours: whether this program made the directory: then all is as it writes it.
        problems: what is off, one line each.
        notes: what is worth knowing, and what was not checked, one line each.
        unlisted: the names that had to be in the ignore list and are not, each of which is a problem.
    """

    ours: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unlisted: set[str] = field(default_factory=set)

    def differs(self, message: str) -> None:
        """Add something that this program never does, and another may: a problem of ours, a note of others'."""
        (self.problems if self.ours else self.notes).append(message)


@dataclass(frozen=True)
class Headers:
    """The headers of a quantized directory.

    Attributes:
        checkpoint: the opened directory.
        quantization: what its config says.
        scheme: the scheme of ours that it is stored in, the nearest where it is not quite; None for other ways to
            store it.
        entry: the registry's, with the output head among what is quantized if it is; None without one.
        head: whether the output head is quantized.
        codes: the quantized weights, by the name that each would have unquantized.
        stored: the same by the name of the tensor that holds their codes.
        scales: the names of their scales, and of what else is beside codes.
    """

    checkpoint: Checkpoint
    quantization: Quantization
    scheme: Scheme | None
    entry: ModuleRules | None
    head: bool
    codes: dict[str, Weight]
    stored: dict[str, Weight]
    scales: set[str]

    def place(self, name: str) -> str:
        """A tensor for a message: "model.safetensors: lm_head.weight"."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def owner(self, name: str) -> str | None:
        """The weight that a tensor is the scale or zero points of, or says the shape of; None if it is neither."""
        module, _, last = name.rpartition(".")
        # What is called scales may be another parameter.
        in_columns = self.quantization.method in IN_COLUMNS and last in COLUMN_PARTS
        if last in (INPUT_SCALE, "input_global_scale") or (in_columns and (last != "scales" or name in self.scales)):
            return f"{module}.weight"
        for suffix in ("_scale_inv", "_global_scale", "_scale", "_shape", "_zero_point"):
            owner = name.removesuffix(suffix)
            # A stack of experts has no more to its name than a parameter that a model may have beside a scale of it.
            if owner != name and (owner.endswith(".weight") or owner in self.codes):
                return owner
        return None

    def layers(self, entry: ModuleRules) -> dict[str, Weight]:
        """The stored matrices that an entry of the registry lets quantize, by module."""
        tensors = (
            self.stored[info.name].source if info.name in self.stored else info
            for info in self.checkpoint.tensors.values()
        )
        return {
            info.module: Weight(info.module, entry.rule(info.module).alike, info, (info.shape[0], info.shape[1]))
            for info in tensors
            if len(info.shape) == 2 and info.name.endswith(".weight") and entry.rule(info.module).compress
        }


def described(info: TensorInfo) -> str:
    """A tensor's dtype and shape for a message: "F32 [1]"."""
    return f"{info.dtype} {list(info.shape)}"


def either(words: Sequence[str]) -> str:
    """Words for a message: "F32, BF16 or F16"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
