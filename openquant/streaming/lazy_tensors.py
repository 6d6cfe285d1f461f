"""The tensors of a checkpoint as transformers' loader takes them: `slice[...]` gives one, plain or decoded.

A plain one is a view of the file, of which only what is computed with comes into memory. What is stored in a Format is
decoded into bfloat16: the values that `openquant dequantize` writes.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import OpenQuantError, SourceError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import Bytes
from ..files.small_files import open_regular
from ..files.tensors import TensorInfo
from ..formats import kernels
from ..weights.reading import Reader
from ..weights.weight import Weight
from .expert_stacks import ExpertStack

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
CHANGED = "the source changed while it was being read: run again"


class LazyTensors:
    """The tensors of a checkpoint.

    Args:
        checkpoint: as `decoded_view` has it.
        weights: those of its tensors that are stored in a Format, by name.
        path: where a shard lies that is here.

    Attributes:
        stacks: tensors that it holds in pieces, by name.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Mapping[str, Weight], path: Callable[[str], Path]) -> None:
        self.checkpoint = checkpoint
        self.weights = weights
        self.path = path
        self.stacks: dict[str, ExpertStack] = {}
        self._mapped_now: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def pieces(self, name: str) -> tuple[str, ...]:
        """The tensors of the checkpoint that a tensor is: itself, or the members of a stack."""
        stack = self.stacks.get(name)
        return tuple(member.name for member in stack.members) if stack is not None else (name,)

    def of(self, names: Iterable[str]) -> dict[str, LazyTensor]:
        """A slice for each name; the files of plain ones stay mapped until the last of their tensors is gone.

        Raises:
            SourceError: a file cannot be read, or is another than it was.
        """
        files: dict[str, mmap.mmap] = {}
        found: dict[str, LazyTensor] = {}
        for name in names:
            reads = {piece: self._reading(piece, files) for piece in self.pieces(name)}
            if name in self.stacks:
                stack = self.stacks[name]
                found[name] = LazyTensor(stack.info, partial(stack.make, partial(_call, reads)))
            else:
                found[name] = LazyTensor(self.checkpoint.tensors[name], reads[name])
        return found

    def _reading(self, name: str, files: dict[str, mmap.mmap]) -> Callable[[], torch.Tensor]:
        """A function that gives a tensor of the checkpoint."""
        weight = self.weights.get(name)
        if weight is not None:
            return partial(self._decoded, weight)
        shard, offset = self.checkpoint.where[name]
        if shard not in files:
            files[shard] = self._mapped(shard)
        return partial(_plain, self.checkpoint.tensors[name], files[shard], offset)

    def parts(self, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
        """Where all that these are made of lies: in each shard offsets and lengths."""
        parts: dict[str, list[tuple[int, int]]] = {}
        for name in (piece for whole in names for piece in self.pieces(whole)):
            weight = self.weights.get(name)
            for info in weight.parts if weight is not None else (self.checkpoint.tensors[name],):
                shard, offset = self.checkpoint.where[info.name]
                parts.setdefault(shard, []).append((offset, info.nbytes))
        return parts

    def expect(self, names: Iterable[str]) -> None:
        """Have the system read what these take from disk, without waiting for it."""
        if not hasattr(os, "posix_fadvise"):
            return
        for shard, pieces in self.parts(names).items():
            try:
                handle = os.open(self.path(shard), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                continue  # it is still to come, or reading it will say why not
            try:
                for offset, nbytes in pieces:
                    os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def let_go(self) -> None:
        """Leave what was looked at of mapped files to the system's cache. With each page comes what lies around it."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._mapped_now:
                file.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, shard: str) -> mmap.mmap:
        try:
            with open_regular(self.path(shard), shard, CHANGED) as file:
                if os.fstat(file.fileno()).st_size != self.checkpoint.shards[shard]:
                    raise SourceError(f"{shard} has another size than before", CHANGED)
                # Private pages, which torch takes for writable; nothing writes to them.
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise SourceError(f"{shard} cannot be read: {error.strerror}", CHANGED) from None
        self._mapped_now.add(found)
        return found

    def _decoded(self, weight: Weight) -> torch.Tensor:
        made = torch.empty(weight.source.shape, dtype=torch.bfloat16)
        matrices = weight.matrices
        out = made.view(torch.int16).numpy().view(np.uint16).reshape(len(matrices), *made.shape[-2:])
        reader = Reader(self.checkpoint.where, self.path, _memory)
        for target, matrix in zip(out, matrices, strict=True):
            low = 0
            for bits in reader.rows(matrix, 1):
                high = low + len(bits)
                if matrix.decodes_transposed:
                    part = np.empty(bits.shape, np.uint16)
                    kernels.to_bfloat16(bits.view(np.float32), part)
                    target[:, low:high] = part.T
                else:
                    kernels.to_bfloat16(bits.view(np.float32), target[low:high])
                low = high
        return made


class LazyTensor:
    """One tensor, read when it is indexed.

    Attributes:
        error: why it could not be read; transformers' loader keeps only the text of it.
    """

    def __init__(self, info: TensorInfo, read: Callable[[], torch.Tensor]) -> None:
        self.info = info
        self.error: OpenQuantError | None = None
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            return self._read()[index]
        except OpenQuantError as error:
            self.error = error
            raise

    def get_shape(self) -> list[int]:
        """Sizes of its axes."""
        return list(self.info.shape)

    def get_dtype(self) -> str:
        """As safetensors names it."""
        return self.info.dtype


def _plain(info: TensorInfo, file: mmap.mmap, offset: int) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise SourceError(f"{info.name} is {info.dtype}, which no model computes with", "start from another checkpoint")
    count = info.nbytes // dtype.itemsize
    return torch.frombuffer(file, dtype=dtype, count=count, offset=offset).reshape(info.shape)


def _call(reads: Mapping[str, Callable[[], torch.Tensor]], name: str) -> torch.Tensor:
    return reads[name]()


def _memory(size: int) -> Bytes:
    return np.empty(size, np.uint8)
