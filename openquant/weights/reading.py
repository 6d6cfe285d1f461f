"""Matrices of a source read a bounded piece at a time, decoded where the source has them quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import SourceError
from ..files.shardfile import Bytes, SourceFile
from ..formats import kernels
from ..formats.kernels import BITS_TYPE, Bits
from ..formats.numbers import Floats
from .encoded import Coding
from .layers import Matrix

BUFFER = 4 << 20
# A transposed matrix is read in columns: longer pieces of each stored row make fewer system calls.
TRANSPOSED_BUFFER = 32 << 20
# The least that a byte can be the exponent of. In an output no scale is zero.
SMALLEST_SCALE = 2.0**-127
# The first float32 that rounds to infinity in bfloat16.
OVERFLOW = np.float32((2 - 2.0**-8) * 2.0**127)


def rows_at_once(matrix: Matrix, multiple: int) -> int:
    """How many rows are read at a time: about a buffer of them, in multiples of `multiple`."""
    rows, cols = matrix.shape
    limit = TRANSPOSED_BUFFER if matrix.transposed and matrix.coding is None else BUFFER
    return min(rows, max(1, limit // (cols * BITS_TYPE[matrix.dtype].itemsize) // multiple) * multiple)


def memory_of(matrix: Matrix, multiple: int) -> tuple[int, int]:
    """Bytes of the buffer that rows of a matrix are read into, and what is held beside it meanwhile."""
    piece = rows_at_once(matrix, multiple) * matrix.shape[1] * BITS_TYPE[matrix.dtype].itemsize
    if matrix.coding is None:
        return piece, piece if matrix.transposed else 0
    # Codes, a quarter of the weights that they become at most, and scales for as few as 32 of these.
    return piece, piece // 2


class Reader:
    """One thread's buffer.

    Args:
        path: where a shard lies.
        memory: makes a buffer of so many bytes.
    """

    def __init__(self, path: Callable[[str], Path], memory: Callable[[int], Bytes]) -> None:
        self.path = path
        self._memory = memory
        self._buffer = memory(BUFFER)

    def open(self, shard: str) -> SourceFile:
        """A shard, to be entered."""
        return SourceFile(self.path(shard), shard)

    def rows(self, matrix: Matrix, multiple: int) -> Iterator[Bits]:
        """The matrix in runs of rows [n, in], each a multiple of `multiple` rows and about a buffer long.

        Raises:
            SourceError: it cannot be read, or a scale or code is none.
        """
        rows, cols = matrix.shape
        kind, step = BITS_TYPE[matrix.dtype], rows_at_once(matrix, multiple)
        pitch = cols * kind.itemsize
        if self._buffer.nbytes < step * pitch:
            self._buffer = self._memory(step * pitch)
        with self.open(matrix.shard) as source:
            for low in range(0, rows, step):
                count = min(step, rows - low)
                part = self._buffer[: count * pitch]
                if matrix.coding is not None:
                    self._decode(source, matrix, matrix.coding, low, part.view(np.float32).reshape(count, cols))
                elif matrix.transposed:
                    width = count * kind.itemsize
                    for col in range(cols):
                        piece = part[col * width : (col + 1) * width]
                        source.read(piece, matrix.offset + col * matrix.pitch + low * kind.itemsize, matrix.label)
                    yield np.ascontiguousarray(part.view(kind).reshape(cols, count).T)
                    continue
                else:
                    source.read(part, matrix.offset + low * matrix.pitch, matrix.label)
                yield part.view(kind).reshape(count, cols)

    def _decode(self, source: SourceFile, matrix: Matrix, coding: Coding, low: int, out: Floats) -> None:
        codes = np.empty((len(out), coding.pitch), np.uint8)
        self.codes(source, matrix, low, codes.reshape(-1))
        scale = self.scales(coding, low, len(out))
        self._decode_codes(matrix, coding, codes, scale, low, out)

    def check_codes(self, matrix: Matrix, low: int, codes: Bytes, scale: Floats) -> None:
        """Refuse codes of whole rows from `low` on that stand for weights beyond bfloat16.

        Raises:
            SourceError: one does.
        """
        assert matrix.coding is not None
        if scale.max() >= OVERFLOW / np.float32(matrix.coding.number.largest):
            rows = codes.reshape(-1, matrix.coding.pitch)
            self._decode_codes(
                matrix, matrix.coding, rows, scale, low, np.empty((len(rows), matrix.shape[1]), np.float32)
            )

    def _decode_codes(self, matrix: Matrix, coding: Coding, codes: Bytes, scale: Floats, low: int, out: Floats) -> None:
        kernels.decode_rows(codes, coding.number, scale, coding.group, low, out)
        # Looked for only where a code could be too large.
        if scale.max() >= OVERFLOW / np.float32(coding.number.largest) and (np.abs(out) >= OVERFLOW).any():
            raise SourceError(
                f"{matrix.label} in {matrix.shard} stands for weights beyond what bfloat16 holds: "
                f"{coding.scale} reaches {scale.max():g}",
                "the scales are damaged: download or save them again",
            )

    def codes(self, source: SourceFile, matrix: Matrix, low: int, into: Bytes) -> None:
        """Codes of whole rows from `low` on.

        Raises:
            SourceError: one is NaN.
        """
        source.read(into, matrix.offset + low * matrix.pitch, matrix.label)
        if matrix.coding is not None and kernels.first_unsound(into, matrix.coding.number) is not None:
            raise SourceError(
                f"{matrix.label} in {matrix.shard} holds NaN",
                "the weights are damaged: download or save them again",
            )

    def scales(self, coding: Coding, low: int, count: int, least: float = 0.0, power_of_two: bool = False) -> Floats:
        """The scales of so many rows from `low` on: those rows of the grid, float32.

        Raises:
            SourceError: one is not finite, below `least`, or no power of two though it must be.
        """
        height = coding.group[0] or low + count
        first, last = low // height, (low + count - 1) // height
        pitch = coding.nbytes // coding.grid[0]
        raw = np.empty((last + 1 - first) * pitch, np.uint8)
        with self.open(coding.shard) as source:
            source.read(raw, coding.offset + first * pitch, coding.scale)
        scale = kernels.scale_values(raw, coding.dtype).reshape(-1, coding.grid[1])
        check_scales(scale, coding.scale, coding.shard, least)
        odd = np.frexp(scale)[0] != 0.5
        if power_of_two and odd.any():
            raise SourceError(
                f"{coding.scale} in {coding.shard} holds {scale[odd][0]:g}, no power of two as config.json has it",
                "the scales are damaged: download or save them again, or choose a scheme with float scales",
            )
        return scale


def check_scales(scale: Floats, name: str, shard: str, least: float) -> None:
    """Refuse scales that are not finite, or below `least`.

    Raises:
        SourceError: one is.
    """
    wrong = ~(np.isfinite(scale) & (scale >= least))
    if wrong.any():
        raise SourceError(
            f"{name} in {shard} holds {scale[wrong][0]:g}, which no scale can be",
            "the scales are damaged: download or save them again",
        )


def consumed(matrix: Matrix, rows: int) -> int:
    """Bytes of the source that so many rows were read from, but for scales."""
    pitch = matrix.shape[1] * BITS_TYPE[matrix.dtype].itemsize if matrix.coding is None else matrix.coding.pitch
    return rows * pitch
