"""Format: how one weight is stored, whoever wrote it: its number, what shares a scale, its tensors.

What shares a scale is a rectangle of the matrix, so the scales of a weight form a grid. All arithmetic has that grid;
only what is stored may have fewer axes. Formats are values: two that are equal store alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..files.tensors import TensorInfo
from .numbers import E4M3, Floats, Number, nearest_bfloat16

# Rows and columns that share a scale; None is the whole axis.
Group = tuple[int | None, int | None]
StoredScales = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
# vLLM, layers/quantization/fp8.py:331-346.
INPUT_SCALE = "input_scale"
# What scales that are no bare exponents may be stored as, and those that are.
FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")


def grid_of(group: Group, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many groups a matrix [out, in] has along each axis; those at its edges may be smaller."""
    (rows, cols), (height, width) = shape, group
    return -(-rows // (height or rows)), -(-cols // (width or cols))


@dataclass(frozen=True)
class Scale:
    """The scales of a weight, as they are stored.

    Attributes:
        name: last part of the tensor's name.
        axes: of the tensor: 2 for the grid, 1 or 0 for a single one.
        dtype: "F32"; "BF16" or "F8_E4M3", to which they are rounded before codes are made; "U8" for the exponent field
            of a power of two (E8M0).
        power_of_two: whether all are.
        clip_limit: for power-of-two scales: the largest absmax / scale allowed; larger values are clamped to the
            format's maximum. None if nothing is clamped.
        floor: the smallest scale of a group that is not all zero.
        of_zeros: the scale of a group that is.
    """

    name: str
    axes: int = 2
    dtype: str = "F32"
    power_of_two: bool = False
    clip_limit: float | None = None
    # A smaller float32 would be subnormal, and zero where those are flushed.
    floor: float = 2.0**-126
    of_zeros: float = 1.0


@dataclass(frozen=True)
class GlobalScale:
    """One more scale, for all of a joined set: it brings the scales of groups into the range of FP8.

    Attributes:
        name: last part of the tensor's name.
        axes: of the tensor: 1 or 0.
        divides: whether scales of groups are divided by it, as compressed-tensors has it; else multiplied.
    """

    name: str
    axes: int = 1
    divides: bool = True


@dataclass(frozen=True)
class Columns:
    """How codes lie that are stored turned around, [in, out], as AutoAWQ and GPTQ have them.

    Attributes:
        zeros: last part of the name of the zero points, which are there whether they differ or not.
        order: where in a word the codes of several outputs lie; None where words hold those of several inputs, the
            first lowest, and the zero points of several outputs likewise.
        below: how far zero points are stored below what they are.
        index: last part of the name of what says which group each input is of; None where that is always in order.
        act_order: whether it need not be.
    """

    zeros: str
    order: tuple[int, ...] | None = None
    below: int = 0
    index: str | None = None
    act_order: bool = False


# The largest divisor: what is larger could be infinite, or its reciprocal subnormal.
_LARGEST_DIVISOR = 2.0**125


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Attributes:
        number: what the codes are.
        group: rows and columns that share a scale; all of both is one scale per joined set.
        scale: the scales.
        codes: last part of the code tensor's name.
        static: whether there is also an input_scale, by which engines quantize activations.
        shape: whether there is also a `weight_shape`, which holds [out, in]: codes in words do not tell it.
        global_scale: the scale above those of groups; None without one.
        local: the same of activations, whose groups engines scale as they come; None where that needs none.
        zero_point: last part of the name of the zero points, codes that stand for zero; None where all share one. There
            is one beside each scale, several in a word: of as many rows, the first lowest.
        columns: how codes lie in columns; None where they lie in rows.
    """

    number: Number
    group: Group
    scale: Scale
    codes: str = "weight"
    static: bool = False
    shape: bool = False
    global_scale: GlobalScale | None = None
    local: GlobalScale | None = None
    zero_point: str | None = None
    columns: Columns | None = None

    @property
    def shared(self) -> bool:
        """Whether joined layers have one scale, and no other."""
        return self.group == (None, None)

    @property
    def tied(self) -> bool:
        """Whether joined layers share a scale, which their largest weight decides: the only one, or a global one."""
        return self.shared or self.global_scale is not None

    @cached_property
    def of_weights(self) -> Format:
        """The same without what it says of activations: two of which that is equal store weights alike."""
        return replace(self, static=False, local=None)

    @property
    def input_scale(self) -> str | None:
        """Last part of the name of the stored scale of activations; None if they have none."""
        if self.static:
            return INPUT_SCALE
        return None if self.local is None else self.local.name

    def scale_inputs(self, largest: float) -> float:
        """The stored scale of activations of which the largest absolute value is known: that of static ones, or the one
        of `local`.

        It leaves room for activations twice as large. Headroom costs nothing, as codes have the same precision over a
        wide range, and what lies beyond the largest code is lost: on examples/tiny-qwen3 static scales up to 16 times
        as large answer alike, half as large ones do not.
        """
        most = E4M3.largest if self.local is None else E4M3.largest * self.number.largest
        scale = largest * 2 / most
        if not 2.0**-126 <= scale < math.inf:
            scale = 1.0
        return 1 / scale if self.local is not None and self.local.divides else scale

    def tied_scale(self, module: str) -> str:
        """The name of the scale that a module shares with those it is joined with."""
        return f"{module}.{self.global_scale.name if self.global_scale else self.scale.name}"

    @property
    def title(self) -> str:
        """What shares a scale, as plans and cards say it: "one power-of-two scale per 128x128 block"."""
        kind = "power-of-two scale" if self.scale.power_of_two else self._kind
        height, width = self.group
        if height is None:
            return f"one {kind} per tensor{', static activations' if self.static else ''}"
        if width is None:
            return f"one {kind} per output row"
        more = " and one per joined set" if self.global_scale else ""
        rows = f"one {kind} per {width} inputs of a row{more}"
        return rows if height == 1 else f"one {kind} per {height}x{width} block"

    @property
    def label(self) -> str:
        """What shares a scale, in the words of configs, as checks say it: "one scale per channel"."""
        height, width = self.group
        if width is not None:
            return f"one {self._kind} per {height}x{width} block"
        return "one scale per tensor" if height is None else f"one {self._kind} per channel"

    @property
    def _kind(self) -> str:
        return "scale" if self.zero_point is None else "scale and zero point"

    def parts(self, module: str, shape: tuple[int, int]) -> tuple[TensorInfo, ...]:
        """The tensors of a weight [out, in]: codes, scales, a global scale, zero points and the scale of its
        activations if it has them, and those of `known`.
        """
        codes = TensorInfo(f"{module}.{self.codes}", self.number.dtype, (shape[0], shape[1] // self.number.per_item))
        scale = TensorInfo(f"{module}.{self.scale.name}", self.scale.dtype, self.scale_shape(shape))
        inputs = (scale._replace(name=f"{module}.{INPUT_SCALE}"),) if self.static else ()
        if self.local is not None:
            inputs = (TensorInfo(f"{module}.{self.local.name}", "F32", (1,) * self.local.axes),)
        above, zeros = self.global_scale, self.zero_points(module, shape)
        common = (TensorInfo(f"{module}.{above.name}", "F32", (1,) * above.axes),) if above else ()
        return (
            codes,
            scale,
            *common,
            *((zeros,) if zeros else ()),
            *inputs,
            *(info for info, _ in self.known(module, shape)),
        )

    def known(self, module: str, shape: tuple[int, int]) -> tuple[tuple[TensorInfo, bytes], ...]:
        """The tensors of a weight [out, in] that hold nothing but what its shape says, and their bytes."""
        if not self.shape:
            return ()
        return ((TensorInfo(f"{module}.weight_shape", "I64", (2,)), np.array(shape, "<i8").tobytes()),)

    def scale_of(self, weight: str) -> str:
        """The name of a weight's scales: "X.weight_scale_inv" of "X.weight", "X_scale_inv" of a stack "X"."""
        if self.columns is not None:
            return f"{weight.removesuffix('.weight')}.{self.scale.name}"
        return weight + self.scale.name.removeprefix("weight")

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the stored scales of a weight [out, in]."""
        grid = grid_of(self.group, shape)
        assert all(size == 1 for size in grid[self.scale.axes :])
        return grid[: self.scale.axes]

    def zero_points(self, module: str, shape: tuple[int, int]) -> TensorInfo | None:
        """The zero points of a weight [out, in], where it has them: words [out / codes in a word, in / group]."""
        if self.zero_point is None:
            return None
        rows, cols = grid_of(self.group, shape)
        return TensorInfo(f"{module}.{self.zero_point}", "I32", (-(-rows // self.number.per_item), cols))

    def shape_error(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot be stored; None if it can."""
        height, width = (size or 1 for size in self.group)
        if height == 1 and shape[1] % width:
            return f"{shape[1]} inputs per row do not divide into groups of {width}"
        if shape[0] % height or shape[1] % width:
            return f"{shape[0]} x {shape[1]} does not divide into {height} x {width} blocks"
        if shape[1] % self.number.per_item:
            return f"rows of {shape[1]} do not divide into words of {self.number.per_item} codes"
        if self.zero_point is not None and shape[0] % self.number.per_item:
            return f"{shape[0]} rows do not divide into words of {self.number.per_item} zero points"
        return None

    @property
    def height(self) -> int:
        """Rows that are encoded together: those that share a scale, or whose zero points share a word."""
        return self.number.per_item if self.zero_point is not None else self.group[0] or 1

    @property
    def whole(self) -> Group:
        """Rows and columns that no rank of tensor parallelism may part: (1, 4) where words hold four codes."""
        height, width = self.group
        words = self.number.per_item
        height = height if self.zero_point is None else self.height
        return height, math.lcm(width or 1, words) if width is not None or words > 1 else None

    def holds(self, other: Format) -> bool:
        """Whether codes and scales of another format may stay as they are in this one, whatever they are called."""
        same = self.number, self.group, self.global_scale is None
        return (
            same == (other.number, other.group, other.global_scale is None)
            and (other.scale.power_of_two or not self.scale.power_of_two)
            and (other.zero_point is None or self.zero_point is not None)
            and not (other.columns and other.columns.act_order)
        )

    @property
    def carry(self) -> int:
        """What is added to the bits of a float32, of which then the exponent is kept, to make a power of two of it."""
        return 0x7FFFFF if self.scale.clip_limit is None else 0x800000

    def divisor(self, largest: Floats) -> Floats:
        """The global scale: what the scales of groups are divided by as they are stored in E4M3.

        In NVFP4 that is 2688 / largest, so that the largest scale is the largest E4M3.

        Args:
            largest: float32 of any shape, the largest absolute weight of the joined set.

        Returns:
            float32 of the same shape, at most 2^125; 1 where all weights are zero, or without a global scale.
        """
        if self.global_scale is None:
            return np.ones_like(largest)
        with np.errstate(divide="ignore", over="ignore"):
            # In the two steps in which torch divides a number by a tensor, and so compressed-tensors does.
            exact = np.float32(1) / largest * np.float32(E4M3.largest * self.number.largest)
        return np.where(largest == 0, np.float32(1), np.minimum(exact, np.float32(_LARGEST_DIVISOR))).astype(np.float32)

    def scales(self, absmax: Floats, global_scale: Floats | None = None) -> Floats:
        """The scale of each group from its largest absolute weight, finite and above zero.

        Args:
            absmax: float32 of any shape, the largest absolute weight of each group.
            global_scale: float32 of one element, that of the joined set; that of these groups if None. Formats without
                a global scale ignore it.

        Returns:
            float32 of the shape of `absmax`, rounded as the scales are stored.
        """
        scale = absmax / np.float32(self.scale.clip_limit or self.number.span)
        if self.scale.power_of_two:
            # Carries into the exponent unless the mantissa is zero; always, where the largest weight stays below what
            # the scale reaches. The division before is exact enough: the quotient exceeds a power of two just where
            # absmax exceeds what it was divided by times that.
            scale = ((scale.view(np.uint32) + np.uint32(self.carry)) & np.uint32(0xFF800000)).view(np.float32)
        if self.global_scale is not None:
            global_scale = self.divisor(absmax.max(keepdims=True)) if global_scale is None else global_scale
            scale = scale * global_scale
        scale = np.maximum(scale, np.float32(self.scale.floor))
        if self.scale.dtype == "BF16":
            scale = (nearest_bfloat16(scale) << 16).view(np.float32)
        if self.scale.dtype == "F8_E4M3":
            scale = E4M3.nearest(scale)
        scale = np.where(absmax == 0, np.float32(self.scale.of_zeros), scale).astype(np.float32)
        return scale if global_scale is None or self.global_scale is None else scale / global_scale

    def ranges(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """The scale and zero point of each group: of four bits (max - min) / 15, over a range that includes zero, as
        compressed-tensors has it.

        Args:
            low: float32 of any shape, the least weight of each group.
            high: float32 of the same shape, the largest.

        Returns:
            The scales and the values of the codes that stand for zero, both float32 of the same shape.
        """
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        # Twice the span is all of the range.
        half = (high - low) / np.float32(2)
        # Of the scale that is not rounded yet (compressed-tensors, quantization/utils/helpers.py:106-108).
        exact = np.maximum(half / np.float32(self.number.span), np.float32(self.scale.floor))
        zero_point = self.number.nearest(-np.float32(self.number.largest) - low / exact)
        return self.scales(half), zero_point

    def stored(self, scale: Floats, global_scale: Floats | None = None) -> StoredScales:
        """Scales as they are written.

        Args:
            scale: float32 of any shape.
            global_scale: float32 of one element, for scales in E4M3.

        Returns:
            float32, uint16 (the bits of bfloat16 or float16) or uint8 (E4M3 or E8M0) of the same shape.
        """
        if self.scale.dtype == "F8_E4M3":
            assert global_scale is not None
            return E4M3.encode(scale * global_scale)
        if self.scale.dtype == "BF16":
            return nearest_bfloat16(scale).astype(np.uint16)
        if self.scale.dtype == "F16":
            return scale.astype(np.float16).view(np.uint16)
        return (scale.view(np.uint32) >> 23).astype(np.uint8) if self.scale.dtype == "U8" else scale

    # Of what others wrote.

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """The dtypes that scales may have, the written one first."""
        if self.scale.dtype == "U8":
            return EXPONENTS
        if self.scale.dtype == "F8_E4M3":
            return (self.scale.dtype,)
        floats = (self.scale.dtype, *(name for name in FLOATS if name != self.scale.dtype))
        return (*floats, *(EXPONENTS if self.scale.power_of_two else ()))

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a weight [..., out, in] may have."""
        *stack, rows, cols = shape
        if not self.shared:
            # A group at the edge may be smaller.
            return ((*stack, *grid_of(self.group, (rows, cols))),)
        # One for each expert of a stack, or for each half of gate and up side by side.
        return ((*stack, 1, 1), (*stack, 2, 1)) if stack else ((), (1,))
