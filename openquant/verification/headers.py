"""Headers, the quantized weights and scales that a directory's headers show, and Findings, what checks report of them.

The checks are functions of both (checks.py has them in order). No tensor is read. A problem is what engines would load
wrongly. A note is what engines accept but openquant would write differently.
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

# Last parts of the names of tensors that AWQ and GPTQ store beside the codes.
COLUMN_PARTS = ("qzeros", "scales", "g_idx")


@dataclass
class Findings:
    """What the checks found, in their order.

    Attributes:
        ours: whether openquant made the directory, so that everything must be as openquant writes it.
        problems: one line for each problem.
        notes: one line for each thing that is worth knowing or was not checked.
        unlisted: names that are missing in the ignore list. Each is also a problem.
    """

    ours: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unlisted: set[str] = field(default_factory=set)

    def add_difference(self, message: str) -> None:
        """Add something that openquant never writes, but other tools may: a problem if `ours`, else a note."""
        (self.problems if self.ours else self.notes).append(message)


@dataclass(frozen=True)
class Headers:
    """The headers of a quantized directory.

    Attributes:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        scheme: the openquant scheme that the directory is stored in, or the nearest one; None if there is none.
        entry: the module rules of its architecture, which quantize the output head and the embedding if the directory
            does; None if the registry has no entry.
        head: whether the output head is quantized.
        embedding: whether the input embedding is quantized.
        codes: the quantized weights, by the name of the unquantized tensor.
        stored: the same weights, by the name of the tensor that holds the codes.
        scales: names of all tensors that belong to codes: scales, zero points, shapes.
    """

    checkpoint: Checkpoint
    quantization: Quantization
    scheme: Scheme | None
    entry: ModuleRules | None
    head: bool
    embedding: bool
    codes: dict[str, Weight]
    stored: dict[str, Weight]
    scales: set[str]

    def place(self, name: str) -> str:
        """A stored tensor, by its full name, for a message: "model.safetensors: lm_head.weight"."""
        return f"{self.checkpoint.where[name].shard}: {name}"

    def owner(self, name: str) -> str | None:
        """The name of the weight whose scale, zero points or shape a tensor is, judged by its name; None if it is none.

        The weight need not exist.
        """
        module, _, last = name.rpartition(".")
        # A parameter called "scales" may be something else.
        in_columns = self.quantization.method in IN_COLUMNS and last in COLUMN_PARTS
        if last in (INPUT_SCALE, "input_global_scale") or (in_columns and (last != "scales" or name in self.scales)):
            return f"{module}.weight"
        for suffix in ("_scale_inv", "_global_scale", "_scale", "_shape", "_zero_point"):
            owner = name.removesuffix(suffix)
            # The name of stacked experts has no ".weight", so it counts only if it has codes.
            if owner != name and (owner.endswith(".weight") or owner in self.codes):
                return owner
        return None

    def belongs_to_codes(self, name: str) -> bool:
        """Whether a tensor is the scale, zero points or shape of a quantized weight, or is called so."""
        return name in self.scales or self.owner(name) is not None

    def layers(self, entry: ModuleRules) -> dict[str, Weight]:
        """The matrices of the directory that the module rules allow to quantize, by module."""
        tensors = (
            self.stored[info.name].source if info.name in self.stored else info
            for info in self.checkpoint.tensors.values()
        )
        return {
            info.module: Weight(
                info.module, entry.rule(info.module).name_template, info, (info.shape[0], info.shape[1])
            )
            for info in tensors
            if len(info.shape) == 2 and info.name.endswith(".weight") and entry.rule(info.module).compress
        }


def described(info: TensorInfo) -> str:
    """Format a tensor's dtype and shape for a message: "F32 [1]".

    Args:
        info: name, dtype and shape of the tensor.
    """
    return f"{info.dtype} {list(info.shape)}"


def either(words: Sequence[str]) -> str:
    """Join words for a message: "F32, BF16 or F16".

    Args:
        words: at least one word.
    """
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
