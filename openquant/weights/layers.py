"""Where a weight lies in a source: as a tensor of its own, as one expert's part of a stacked one, or as codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..files.tensors import DTYPE_BITS, Location, TensorInfo
from ..formats.schemes import Scheme
from ..models import Stacked
from .encoded import Coding, Encoded


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical weight [out, in] inside one source tensor.

    Attributes:
        label: for messages: the tensor's name, and the expert's number where it is a slice.
        shard: source file name.
        offset: bytes from the start of the file to element [0, 0].
        dtype: BF16, F16 or F32; F32 for codes, which are decoded to that.
        shape: (out, in).
        pitch: bytes from one stored row to the next.
        transposed: stored rows are columns of the matrix; of decoded codes, that rows become columns where the weight
            is written unquantized.
        coding: how codes are decoded; None for plain weights.
    """

    label: str
    shard: str
    offset: int
    dtype: str
    shape: tuple[int, int]
    pitch: int
    transposed: bool
    coding: Coding | None = None


class Layer(NamedTuple):
    """A weight that could be quantized: a tensor of the source, or one expert's part of a stacked one."""

    module: str
    alike: str
    source: TensorInfo
    shape: tuple[int, int]
    expert: int = -1
    part: int = 0
    stacked: Stacked | None = None
    encoded: Encoded | None = None

    @property
    def nbytes(self) -> int:
        """Size of its elements unquantized, in bytes."""
        return self.shape[0] * self.shape[1] * DTYPE_BITS[self.source.dtype] // 8

    @property
    def stored(self) -> int:
        """Size of what the source holds for it, in bytes."""
        return self.encoded.nbytes if self.encoded else self.nbytes

    def passes(self, scheme: Scheme) -> bool:
        """Whether the source has it as a scheme stores it."""
        return self.encoded is not None and self.encoded.passes(scheme)

    @property
    def input_scale(self) -> TensorInfo | None:
        """The scale of its activations, if the source has one."""
        return self.encoded.input_scale if self.encoded else None

    def matrix(self, where: dict[str, Location]) -> Matrix:
        """Where its elements lie."""
        if self.encoded is not None:
            return encoded_matrices(self.encoded, where)[0]
        place, info = where[self.source.name], self.source
        itemsize = DTYPE_BITS[info.dtype] // 8
        pitch = info.shape[-1] * itemsize
        if self.stacked is None:
            return Matrix(info.name, place.shard, place.offset, info.dtype, self.shape, pitch, transposed=False)
        along = itemsize if self.stacked.transposed else pitch
        start = place.offset + self.expert * info.shape[1] * pitch + self.part * self.shape[0] * along
        label = f"{info.name}[{self.expert}]"
        return Matrix(label, place.shard, start, info.dtype, self.shape, pitch, self.stacked.transposed)


def encoded_matrices(encoded: Encoded, where: dict[str, Location]) -> list[Matrix]:
    """Where the codes of a weight lie: of each expert where it is a stack."""
    place, (rows, cols) = where[encoded.codes.name], encoded.shape[-2:]
    found = []
    for number in range(encoded.shape[0] if len(encoded.shape) == 3 else 1):
        coding = encoded.coding(where, number)
        label = f"{encoded.codes.name}[{number}]" if len(encoded.shape) == 3 else encoded.codes.name
        start = place.offset + number * rows * coding.pitch
        found.append(Matrix(label, place.shard, start, "F32", (rows, cols), coding.pitch, encoded.turned, coding))
    return found
