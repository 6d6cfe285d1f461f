"""Format: how one weight is stored, whichever tool wrote it: numeric format, what shares a scale, and its tensors.

The weights that share a scale are a rectangle of the matrix, so the scales of a weight are a grid. All arithmetic uses
that grid; only the stored tensor may have fewer axes. Formats are values: two that are equal store weights alike.

Two kinds of formats are read from elsewhere. How engines quantize the input activations of a layer is said by a config,
in the words of compressed-tensors. The types of GGML, which GGUF files hold, are blocks along a row, each with its
codes and their scales; the package gguf says how large blocks are and decodes them.

    read_activation_quantization({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})
    # ActivationQuantization(E4M3, (1, None))
    ggml_types()[12]    # Q4_K: blocks of 256 weights in 144 bytes
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..files.shardfile import TensorInfo
from ..version import install_hint
from .numbers import E2M1, E4M3, INT8, Codes, Floats, Number, nearest_bfloat16

# Rows (outputs) and columns (inputs) that share a scale; None is the whole axis.
Group = tuple[int | None, int | None]
StoredScales = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.uint8]
# The name of a static activation scale: vLLM, layers/quantization/fp8.py:331-346.
INPUT_SCALE = "input_scale"
# Dtypes of scales: floats, and bare exponents (E8M0).
FLOATS = ("F32", "BF16", "F16")
EXPONENTS = ("U8", "F8_E8M0")


def grid_of(group: Group, shape: tuple[int, ...]) -> tuple[int, int]:
    """Count the groups of a matrix along each axis; groups at its edges may be smaller.

    Args:
        group: (height, width) of a group; None is the whole axis.
        shape: (out, in).

    Returns:
        The shape of the grid of scales, one per group: (ceil(out / height), ceil(in / width)).
    """
    (rows, cols) = shape
    (height, width) = group
    return -(-rows // (height or rows)), -(-cols // (width or cols))


def widen(grid: Floats, width: int | None) -> Floats:
    """Repeat each entry of a grid `width` times along its row; unchanged if None, as one column broadcasts."""
    if width is None:
        return grid
    return np.repeat(grid, width, axis=1)


@dataclass(frozen=True)
class Scale:
    """How the scales of a weight are stored.

    Attributes:
        name: last part of the tensor's name.
        axes: number of axes of the tensor: 2 for the grid, 1 or 0 for a single scale.
        dtype: "F32"; "BF16" or "F8_E4M3", to which scales are rounded before codes are computed; "U8" for the exponent
            field of a power of two (E8M0).
        power_of_two: whether all scales are powers of two.
        clip_limit: for power-of-two scales: the largest absmax / scale allowed; larger values are clamped to the
            format's maximum. None if nothing is clamped.
        floor: smallest scale of a group that is not all zero.
        of_zeros: scale of a group that is all zero.
        unit: what stored scales are multiplied by.
    """

    name: str
    axes: int = 2
    dtype: str = "F32"
    power_of_two: bool = False
    clip_limit: float | None = None
    # Smaller float32 values are subnormal, which some hardware flushes to zero.
    floor: float = 2.0**-126
    of_zeros: float = 1.0
    unit: float = 1.0


@final
@dataclass(frozen=True)
class GlobalScale:
    """A scale above those of groups, shared by fused layers, which brings the scales of groups into the range of FP8.

    Attributes:
        name: last part of the tensor's name.
        axes: number of axes of the tensor: 1 or 0.
        divides: whether stored scales of groups are divided by it, as in compressed-tensors; else multiplied.
    """

    name: str
    axes: int = 1
    divides: bool = True


def _global_scale_tensor(module: str, scale: GlobalScale | None) -> TensorInfo | None:
    if scale is None:
        return None
    return TensorInfo(f"{module}.{scale.name}", "F32", (1,) * scale.axes)


@final
@dataclass(frozen=True)
class Columns:
    """The layout of codes that are stored transposed, [in, out], as AutoAWQ and GPTQ do.

    Attributes:
        zeros: last part of the name of the zero points, which such checkpoints always have.
        order: position in a word of the codes of several outputs; None where a word has the codes of several inputs,
            the first in the lowest bits, and the zero points of several outputs likewise.
        zero_point_offset: what is added to stored zero points to get their values.
        index: last part of the name of the tensor with the group of each input ("g_idx"); None where groups are
            consecutive inputs.
        act_order: whether that tensor may assign inputs to groups in any order.
        signed: whether codes of 4 bits are signed integers, instead of 8 above their values.
    """

    zeros: str
    order: tuple[int, ...] | None = None
    zero_point_offset: int = 0
    index: str | None = None
    act_order: bool = False
    signed: bool = False


@dataclass(frozen=True)
class Blocks:
    """The layout of a weight in a GGUF file: blocks that hold codes and scales together, and what llama.cpp changed.

    Attributes:
        head_rows: rows of an attention head whose two rotary halves llama.cpp interleaved, row 0 of the first half and
            row 0 of the second and so on (convert_hf_to_gguf.py, LlamaModel.permute); 0 where rows are in order.
        plus_one: whether llama.cpp added 1, as it does to norms whose weights stand around zero.
    """

    head_rows: int = 0
    plus_one: bool = False


# A larger global scale could be infinite, or its reciprocal subnormal.
LARGEST_GLOBAL_SCALE = 2.0**125


@final
@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Attributes:
        number: numeric format of the codes.
        group: rows and columns that share a scale; (None, None) is one scale per tensor, shared by fused layers.
        scale: how scales are stored.
        codes: last part of the code tensor's name.
        static: whether there is an `input_scale`, the static scale of activations.
        shape: whether there is a `weight_shape` tensor with [out, in], for codes in words, which do not show it.
        global_scale: the scale above those of groups; None without one.
        input_global_scale: the stored global scale of activations, whose groups engines scale dynamically under it;
            None without one.
        zero_point: last part of the name of the zero points; None if codes are symmetric. There is one zero point for
            each scale, packed in words along the rows, the first row in the lowest bits.
        columns: layout of codes that are stored transposed; None where codes lie in rows.
        blocks: layout of blocks that hold codes and scales; None where scales are a tensor of their own.
    """

    number: Number
    group: Group
    scale: Scale
    codes: str = "weight"
    static: bool = False
    shape: bool = False
    global_scale: GlobalScale | None = None
    input_global_scale: GlobalScale | None = None
    zero_point: str | None = None
    columns: Columns | None = None
    blocks: Blocks | None = None

    @property
    def signed_scales(self) -> bool:
        """Whether scales may be negative: those of integers, as auto-round and openquant choose them.

        The range of INT4 is -8 to 7. If the largest weight of a group is positive, a negative scale gives it the code
        -8. Engines multiply by the scale whatever its sign.
        """
        return self.number.integer

    @property
    def shared(self) -> bool:
        """Whether there is one scale per tensor, which fused layers share."""
        return self.group == (None, None)

    @property
    def shares_scale(self) -> bool:
        """Whether fused layers share a scale, made from the largest weight of all: the only one or the global scale."""
        return self.shared or self.global_scale is not None

    @property
    def by_row(self) -> bool:
        """Whether all its tensors have a row for each row of the weight."""
        others = self.static or self.shape or self.global_scale or self.input_global_scale or self.zero_point
        return self.group[0] == 1 and not others

    @cached_property
    def weights_only(self) -> Format:
        """This format without activation scales. Formats for which it is equal store weights alike."""
        return replace(self, static=False, input_global_scale=None)

    @property
    def input_scale(self) -> str | None:
        """Last part of the name of the stored activation scale; None without one."""
        if self.static:
            return INPUT_SCALE
        return self.input_global_scale and self.input_global_scale.name

    def scale_inputs(self, largest: float) -> float:
        """Compute the stored activation scale: `input_scale`, or `input_global_scale` where the format has one.

        It leaves room for activations twice as large as those of the calibration. Headroom costs little, as floats have
        the same precision over a wide range, and larger values are clipped: on examples/tiny-qwen3 static scales up to
        16 times as large give the same KL, and half as large ones do not.

        Args:
            largest: largest absolute activation that the calibration met.

        Returns:
            The scale; 1 if `largest` is 0, or so small or large that the scale would be subnormal or infinite.
        """
        limit = E4M3.largest
        if self.input_global_scale:
            limit *= self.number.largest
        scale = largest * 2 / limit
        if not 2.0**-126 <= scale < math.inf:
            scale = 1.0
        if self.input_global_scale and self.input_global_scale.divides:
            return 1 / scale
        return scale

    def shared_scale_name(self, module: str) -> str:
        """Return the name of a module's copy of the scale that fused layers share, if `shares_scale`."""
        return f"{module}.{(self.global_scale or self.scale).name}"

    @property
    def title(self) -> str:
        """What shares a scale, in the words of plans and cards: "one power-of-two scale per 128x128 block"."""
        kind = self._kind
        if self.scale.power_of_two:
            kind = "power-of-two scale"

        height, width = self.group
        if height is None and self.static:
            return f"one {kind} per tensor, static activations"
        if height is None:
            return f"one {kind} per tensor"
        if width is None:
            return f"one {kind} per output row"
        if height > 1:
            return f"one {kind} per {height}x{width} block"
        if self.global_scale:
            return f"one {kind} per {width} inputs of a row and a global scale"
        return f"one {kind} per {width} inputs of a row"

    @property
    def label(self) -> str:
        """What shares a scale, in the words of configs, for checks: "one scale per channel"."""
        height, width = self.group
        if width is not None:
            return f"one {self._kind} per {height}x{width} block"
        if height is None:
            return "one scale per tensor"
        return f"one {self._kind} per channel"

    @property
    def _kind(self) -> str:
        if self.zero_point is None:
            return "scale"
        return "scale and zero point"

    def parts(self, module: str, shape: tuple[int, int]) -> tuple[TensorInfo, ...]:
        """Return the tensors of a weight: codes and scales, and where the format has them a global scale, zero points,
        an activation scale and those of `constant_tensors`. Not for formats with `columns`.

        Args:
            module: the weight's name without ".weight".
            shape: (out, in), for which `shape_error` returns None.

        Returns:
            Name, dtype and shape of each tensor; the first two are codes and scales.
        """
        codes = TensorInfo(f"{module}.{self.codes}", self.number.dtype, (shape[0], self.number.items(shape[1])))
        scale = TensorInfo(f"{module}.{self.scale.name}", self.scale.dtype, self.scale_shape(shape))
        optional: list[TensorInfo | None] = [
            _global_scale_tensor(module, self.global_scale),
            self.zero_points(module, shape),
            _global_scale_tensor(module, self.input_global_scale),
        ]
        if self.static:
            optional.insert(2, scale._replace(name=f"{module}.{INPUT_SCALE}"))
        constants = (info for info, _ in self.constant_tensors(module, shape))
        return (codes, scale, *(info for info in optional if info is not None), *constants)

    def constant_tensors(self, module: str, shape: tuple[int, int]) -> tuple[tuple[TensorInfo, bytes], ...]:
        """Return the tensors of a weight [out, in] that follow from its shape alone, with their bytes; () without any.

        Args:
            module: the weight's name without ".weight".
            shape: (out, in).
        """
        if not self.shape:
            return ()
        return ((TensorInfo(f"{module}.weight_shape", "I64", (2,)), struct.pack("<2q", *shape)),)

    def scale_of(self, weight: str) -> str:
        """Return the name of a weight's scales: "X.weight_scale_inv" for "X.weight", "X_scale_inv" for a stack "X";
        "X.scales" for "X.weight" if the name does not begin with "weight".
        """
        if not self.scale.name.startswith("weight"):
            return f"{weight.removesuffix('.weight')}.{self.scale.name}"
        return weight + self.scale.name.removeprefix("weight")

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the stored scales of a weight [out, in]."""
        grid = grid_of(self.group, shape)
        assert all(size == 1 for size in grid[self.scale.axes :])
        return grid[: self.scale.axes]

    def zero_points(self, module: str, shape: tuple[int, int]) -> TensorInfo | None:
        """Return the tensor of a weight's zero points: words [out * bits / 32, in / width]; None without them."""
        if self.zero_point is None:
            return None
        rows, cols = grid_of(self.group, shape)
        return TensorInfo(f"{module}.{self.zero_point}", "I32", (self.number.items(rows), cols))

    def shape_error(self, shape: tuple[int, int]) -> str | None:
        """Return why a weight of shape (out, in) cannot be stored; None if it can."""
        height, width = (size or 1 for size in self.group)
        if height == 1 and shape[1] % width:
            return f"{shape[1]} inputs per row do not divide into groups of {width}"
        if shape[0] % height or shape[1] % width:
            return f"{shape[0]} x {shape[1]} does not divide into {height} x {width} blocks"

        run = self.number.run
        words = f"{self.number.items(run)} words with {run}"
        if self.number.items(run) == 1:
            words = f"words of {run}"

        if shape[1] % run:
            return f"rows of {shape[1]} do not divide into {words} codes"
        if self.zero_point is not None and shape[0] % run:
            return f"{shape[0]} rows do not divide into {words} zero points"
        return None

    @property
    def height(self) -> int:
        """Number of rows that must be encoded together: they share a scale, or words of zero points."""
        if self.zero_point is not None:
            return self.number.run
        return self.group[0] or 1

    @cached_property
    def indivisible(self) -> Group:
        """Rows and columns that tensor parallelism must not split: (1, 4) if 4 codes fill a word. None for an axis
        that may be split anywhere, even if all of it shares a scale.
        """
        height, width = self.group
        words = self.number.run
        if self.zero_point is not None:
            height = self.height
        if width is None and words == 1:
            return height, None
        return height, math.lcm(width or 1, words)

    def holds(self, other: Format) -> bool:
        """Return whether weights in another format can be stored in this one without quantizing them again.

        Names, the layout of codes and zero points, and the dtype of scales may differ.
        """
        kind = self.number, self.group, self.global_scale is None
        return (
            kind == (other.number, other.group, other.global_scale is None)
            and (other.scale.power_of_two or not self.scale.power_of_two)
            and (other.zero_point is None or self.zero_point is not None)
            and not (other.columns and other.columns.act_order)
        )

    @property
    def carry(self) -> int:
        """What is added to the bits of a float32 before its mantissa is cleared, to round it to a power of two."""
        if self.scale.clip_limit is None:
            return 0x7FFFFF
        return 0x800000

    def choose_global_scale(self, largest: Floats) -> Floats:
        """Compute the global scale, by which the scales of groups are multiplied before they are stored in E4M3.

        For NVFP4 it is 2688 / largest, so that the largest scale becomes 448, the largest E4M3.

        Args:
            largest: float32 of any shape, the largest absolute weight of the fused layers.

        Returns:
            float32 of the same shape, at most 2^125; 1 where all weights are zero or the format has no global scale.
        """
        if self.global_scale is None:
            return np.ones_like(largest)
        with np.errstate(divide="ignore", over="ignore"):
            # Two steps, as torch divides a number by a tensor, and therefore compressed-tensors.
            exact = np.float32(1) / largest * np.float32(E4M3.largest * self.number.largest)
        return np.where(largest == 0, np.float32(1), np.minimum(exact, np.float32(LARGEST_GLOBAL_SCALE))).astype(
            np.float32
        )

    def scales(self, absmax: Floats, global_scale: Floats | None = None) -> Floats:
        """Compute the scale of each group from its largest absolute weight.

        Args:
            absmax: finite float32 of any shape, the largest absolute weight of each group.
            global_scale: float32 of one element, that of the fused layers; computed from `absmax` if None. Formats
                without a global scale ignore it.

        Returns:
            float32 of the shape of `absmax`, finite and above zero: the values of the stored scales, divided by the
            global scale where there is one.
        """
        scale = absmax / np.float32(self.scale.clip_limit or self.number.span)
        if self.scale.power_of_two:
            # Rounds up to a power of two: adding `carry` carries into the exponent unless the mantissa is zero. With a
            # clip limit it always carries. The division above is exact enough: the quotient exceeds a power of two
            # exactly where absmax exceeds the divisor times that power.
            scale = ((scale.view(np.uint32) + np.uint32(self.carry)) & np.uint32(0xFF800000)).view(np.float32)

        if self.global_scale is not None:
            if global_scale is None:
                global_scale = self.choose_global_scale(absmax.max(keepdims=True))
            scale = scale * global_scale

        scale = np.maximum(scale, np.float32(self.scale.floor))
        if self.scale.dtype == "BF16":
            scale = (nearest_bfloat16(scale) << 16).view(np.float32)
        if self.scale.dtype == "F8_E4M3":
            scale = E4M3.nearest(scale)

        scale = np.where(absmax == 0, np.float32(self.scale.of_zeros), scale).astype(np.float32)

        if global_scale is None or self.global_scale is None:
            return scale
        return scale / global_scale

    def ranges(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Compute the scale and zero point of each group from its range, extended to include zero.

        With 4 bits the scale is (high - low) / 15, as in compressed-tensors. Only for formats with zero points.

        Args:
            low: finite float32 of any shape, the smallest weight of each group.
            high: finite float32 of the same shape, the largest weight of each group.

        Returns:
            Scales and zero points, both float32 of the same shape. A zero point is the value of the code for zero:
            weight = (code value - zero point) * scale.
        """
        low = np.minimum(low, np.float32(0))
        high = np.maximum(high, np.float32(0))
        # The range of codes is twice the span.
        half = (high - low) / np.float32(2)
        # Zero points follow from the unrounded scale (compressed-tensors, quantization/utils/helpers.py:106-108).
        exact = np.maximum(half / np.float32(self.number.span), np.float32(self.scale.floor))
        zero_point = self.number.nearest(-np.float32(self.number.largest) - low / exact)
        return self.scales(half), zero_point

    def encode_scales(self, scale: Floats, global_scale: Floats | None = None) -> StoredScales:
        """Encode scales as they are stored.

        Args:
            scale: float32 of any shape, as `scales` returns them.
            global_scale: float32 of one element, needed for scales in E4M3; others ignore it.

        Returns:
            uint16 (the bits of bfloat16 or float16) or uint8 (E4M3 or E8M0) of the same shape; `scale` itself where
            scales are stored as float32.
        """
        if self.scale.dtype == "F8_E4M3":
            assert global_scale is not None
            return E4M3.encode(scale * global_scale)
        if self.scale.dtype == "BF16":
            return nearest_bfloat16(scale).astype(np.uint16)
        if self.scale.dtype == "F16":
            return scale.astype(np.float16).view(np.uint16)
        if self.scale.dtype == "U8":
            return (scale.view(np.uint32) >> 23).astype(np.uint8)
        return scale

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Dtypes that scales may have in checkpoints of other tools; the one that we write comes first."""
        if self.scale.dtype == "U8":
            return EXPONENTS
        if self.scale.dtype == "F8_E4M3":
            return (self.scale.dtype,)
        floats = (self.scale.dtype, *(name for name in FLOATS if name != self.scale.dtype))
        if self.scale.power_of_two:
            return (*floats, *EXPONENTS)
        return floats

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scales of a weight [..., out, in] may have in checkpoints of other tools."""
        *stack, rows, cols = shape
        if not self.shared:
            # A group at the edge may be smaller.
            return ((*stack, *grid_of(self.group, (rows, cols))),)
        # One for each expert of a stack, or for each half of gate and up side by side.
        if stack:
            return ((*stack, 1, 1), (*stack, 2, 1))
        return ((), (1,))


KNOWN = (
    "known are FP8 and symmetric INT8 with dynamic scales by token, tensor or group, or with a static input_scale, "
    "and NVFP4 with a static input_global_scale"
)


@final
@dataclass(frozen=True)
class ActivationQuantization:
    """How the inputs of a layer are quantized.

    Attributes:
        number: numeric format of the quantized activations.
        group: tokens and inputs that share a scale: (1, None) is one per token, (None, None) one per batch, (1, 128)
            one per 128 inputs of a token.
        power_of_two: whether scales are rounded up to powers of two.
        static: whether the scale is stored, as `input_scale`, instead of computed from the activations.
        has_global_scale: whether an `input_global_scale` is stored; the dynamic scales of groups under it are E4M3.
    """

    number: Number
    group: Group
    power_of_two: bool = False
    static: bool = False
    has_global_scale: bool = False

    def largest(self, scale: float) -> float:
        """Return the largest activation that is not clipped.

        Args:
            scale: the stored `input_scale`. With a global scale: `input_global_scale`, by which the scales of groups
                are multiplied before they are rounded to E4M3.
        """
        if self.has_global_scale:
            return E4M3.largest * self.number.largest / scale
        return scale * self.number.largest


_NUMBERS: Mapping[tuple[Any, Any], Number] = {("float", 8): E4M3, ("int", 8): INT8}

# What configs always say of NVFP4 activations.
_NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def read_activation_quantization(activations: Mapping[str, Any] | None) -> ActivationQuantization | None:
    """Read the `input_activations` of a compressed-tensors config group.

    Args:
        activations: the parsed JSON object; None or empty if the group has none, which leaves activations unquantized.

    Returns:
        Numeric format and group of the activations, and which scales are stored; None if they are not quantized.

    Raises:
        UsageError: openquant does not know this way of quantizing activations.
    """
    if not activations:
        return None
    if all(activations.get(key) == value for key, value in _NVFP4.items()):
        return ActivationQuantization(E2M1, (1, 16), has_global_scale=True)

    number = _NUMBERS.get((activations.get("type"), activations.get("num_bits")))
    static = not activations.get("dynamic")
    size = activations.get("group_size")

    groups: dict[Any, Group] = {"tensor": (None, None)}
    if not static:
        groups["token"] = (1, None)
        if type(size) is int and size > 0:
            groups["group"] = (1, size)

    group = groups.get(str(activations.get("strategy")))

    if number is None or group is None or activations.get("symmetric") is False:
        text = json.dumps(activations)
        raise UsageError(f"config.json quantizes activations as {text[:200]}, which is not known here", KNOWN)

    return ActivationQuantization(
        number, group, str(activations.get("scale_dtype")).endswith("uint8") or activations.get("ue8m0") is True, static
    )


@dataclass(frozen=True)
class GgmlType(Number):
    """A tensor type of GGML. Weights are decoded from it and never encoded in it.

    Attributes:
        type_id: its number in GGUF files.
        block: number of weights in a block.
        block_bytes: bytes of a block.
    """

    type_id: int
    block: int
    block_bytes: int

    def nbytes(self, codes: int) -> int:
        """Return how many bytes a row of weights takes; their number must be a multiple of `block`."""
        return codes // self.block * self.block_bytes


def ggml_types() -> dict[int, GgmlType]:
    """Return the tensor types that the package gguf decodes, by their number in GGUF files.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import dequantize
    except ImportError:
        raise UsageError(
            "GGUF files are read with the package gguf, which is not installed", install_hint("gguf")
        ) from None

    types: dict[int, GgmlType] = {}
    for kind, (block, block_bytes) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        types[int(kind)] = GgmlType(kind.name, kind.name, "U8", 8, 0, 0, int(kind), block, block_bytes)

    return types


def decode_blocks(codes: Codes, number: GgmlType, blocks: Blocks, out: Floats) -> None:
    """Decode whole rows.

    Args:
        codes: uint8 [rows, bytes], the blocks of these rows.
        number: their tensor type.
        blocks: what is undone after that.
        out: float32 [rows, in], filled. With `head_rows`, the rows are those of whole heads.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # Damaged scales may be NaN or infinite, which the reader finds in what they decode to.
    with np.errstate(all="ignore"):
        values = dequantize(codes, GGMLQuantizationType(number.type_id)).reshape(out.shape)
        if blocks.head_rows:
            halves = values.reshape(-1, blocks.head_rows // 2, 2, out.shape[1])
            out.reshape(-1, 2, blocks.head_rows // 2, out.shape[1])[:] = halves.swapaxes(1, 2)
        elif blocks.plus_one:
            np.subtract(values, np.float32(1), out=out)
        else:
            out[:] = values
