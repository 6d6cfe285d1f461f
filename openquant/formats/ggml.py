"""The tensor types of GGML, which GGUF files hold: blocks along a row, each with its codes and their scales.

The package gguf says how large blocks are and decodes them, so a type that it learns is read without a change here.

    ggml_types()[12]    # Q4_K: blocks of 256 weights in 144 bytes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..version import install_hint
from .format import Blocks, Format, Scale
from .numbers import Codes, Floats, Number


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

    def encode(self, quotients: Floats) -> Codes:
        """Not possible: a block has scales of its own."""
        raise NotImplementedError

    def values(self) -> Floats:
        """Not possible: the value of a code depends on its block."""
        raise NotImplementedError

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        """Not possible: nothing is encoded."""
        raise NotImplementedError


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


def ggml_format(number: GgmlType, blocks: Blocks) -> Format:
    """Return the format of a weight in a GGUF file.

    Args:
        number: its tensor type.
        blocks: what is undone after its blocks are decoded.
    """
    return Format(number, (1, number.block), Scale(""), blocks=blocks)


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
