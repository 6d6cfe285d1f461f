"""Lazy tensors of a checkpoint, as transformers' loader takes them: `tensor[...]` reads one.

A plain tensor is a view of the memory-mapped file, of which only the pages that are computed with are read. A quantized
tensor is decoded to bfloat16, to the values that `openquant dequantize` writes.

Stacks the experts that a checkpoint has one by one, as transformers' classes have them.

Engines load quantized experts one by one, so openquant writes them one by one even if the source has them stacked. The
registry has the layout of each stack. transformers' loader stacks only experts that were published one by one.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import OpenQuantError, SourceError
from ..files.checkpoint import Checkpoint
from ..files.model_files import open_regular
from ..files.shardfile import TensorInfo
from ..formats import kernels
from ..models import MODELS
from ..registry.architecture import StackedExperts
from ..weights.reading import Reader
from ..weights.weight import Weight

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
CHANGED = "the source changed while it was being read: run again"


class LazyTensors:
    """Makes lazy tensors of a checkpoint.

    Args:
        checkpoint: the checkpoint as it would be unquantized, made by `decoded_view`.
        weights: its quantized weights, by tensor name.
        path: returns the path of a shard, by file name.

    Attributes:
        stacks: stacks of experts that the checkpoint has one by one, by the name of the stack. MetaModel adds them.
        replaced: what makes a tensor of the checkpoint in place of reading it, by name.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Mapping[str, Weight], path: Callable[[str], Path]) -> None:
        self.checkpoint = checkpoint
        self.weights = weights
        self.path = path
        self.stacks: dict[str, ExpertStack] = {}
        self.replaced: Mapping[str, Callable[[], torch.Tensor]] = {}
        self._open_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def pieces(self, name: str) -> tuple[str, ...]:
        """Return the names of the checkpoint's tensors that a tensor is made of: its own, or those of a stack."""
        stack = self.stacks.get(name)
        return tuple(member.name for member in stack.members) if stack is not None else (name,)

    def select(self, names: Iterable[str]) -> dict[str, LazyTensor]:
        """Return a lazy tensor for each name. Files stay mapped until the last of their tensors is freed.

        Args:
            names: names of the checkpoint's tensors or of `stacks`. Their shards must be on disk.

        Raises:
            SourceError: a file cannot be read, or changed since its header was read.
        """
        files: dict[str, mmap.mmap] = {}
        tensors: dict[str, LazyTensor] = {}
        for name in names:
            readers = {piece: self._reader(piece, files) for piece in self.pieces(name)}
            if name in self.stacks:
                stack = self.stacks[name]
                tensors[name] = LazyTensor(stack.info, partial(stack.make, partial(_call, readers)))
            else:
                tensors[name] = LazyTensor(self.checkpoint.tensors[name], readers[name])
        return tensors

    def _reader(self, name: str, files: dict[str, mmap.mmap]) -> Callable[[], torch.Tensor]:
        """A function that reads a tensor of the checkpoint; its shard is mapped now and added to `files`."""
        if name in self.replaced:
            return self.replaced[name]
        weight = self.weights.get(name)
        if weight is not None:
            return partial(self._decode, weight)
        shard, offset = self.checkpoint.where[name]
        if shard not in files:
            files[shard] = self._map_shard(shard)
        return partial(_plain, self.checkpoint.tensors[name], files[shard], offset)

    def byte_ranges(self, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
        """Return offset and length in bytes of all stored tensors that these are made of, by shard."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for piece in (piece for name in names for piece in self.pieces(name)):
            weight = self.weights.get(piece)
            for info in weight.parts if weight is not None else (self.checkpoint.tensors[piece],):
                shard, offset = self.checkpoint.where[info.name]
                ranges.setdefault(shard, []).append((offset, info.nbytes))
        return ranges

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read these tensors in the background, as far as it can and their shards are on disk."""
        if not hasattr(os, "posix_fadvise"):
            return
        for shard, ranges in self.byte_ranges(names).items():
            try:
                handle = os.open(self.path(shard), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                continue  # it is not downloaded yet, or the reader will report the error
            try:
                for offset, nbytes in ranges:
                    os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def release_pages(self) -> None:
        """Drop the pages of mapped files from this process's memory; the next access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._open_maps:
                file.madvise(mmap.MADV_DONTNEED)

    def _map_shard(self, shard: str) -> mmap.mmap:
        try:
            with open_regular(self.path(shard), shard, CHANGED) as file:
                if os.fstat(file.fileno()).st_size != self.checkpoint.shards[shard]:
                    raise SourceError(f"{shard} has another size than when its header was read", CHANGED)
                # Private pages, because torch warns of buffers that are not writable. Nothing writes to them.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise SourceError(f"{shard} cannot be read: {error.strerror}", CHANGED) from None
        self._open_maps.add(mapped)
        return mapped

    def _decode(self, weight: Weight) -> torch.Tensor:
        """Decode a quantized weight to bfloat16 [out, in], or [experts, out, in]."""
        decoded = torch.empty(weight.source.shape, dtype=torch.bfloat16)
        matrices = weight.matrices
        out = decoded.view(torch.int16).numpy().view(np.uint16).reshape(len(matrices), *(1, *decoded.shape)[-2:])

        reader = Reader(self.checkpoint.where, self.path)
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
        return decoded


class LazyTensor:
    """One tensor, read when it is indexed. It has the interface of a slice of safetensors' `safe_open`.

    Args:
        info: its name, dtype and shape.
        read: returns the tensor.

    Attributes:
        error: the error of reading it, of which transformers' loader keeps only the text; None if there was none.
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
        """Return its shape."""
        return list(self.info.shape)

    def get_dtype(self) -> str:
        """Return its dtype as safetensors names it, such as "BF16"."""
        return self.info.dtype


def _plain(info: TensorInfo, file: mmap.mmap, offset: int) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise SourceError(
            f"{info.name} is {info.dtype}, a dtype that models do not compute in", "start from another checkpoint"
        )
    count = info.nbytes // dtype.itemsize
    return torch.frombuffer(file, dtype=dtype, count=count, offset=offset).reshape(info.shape)


def _call(reads: Mapping[str, Callable[[], torch.Tensor]], name: str) -> torch.Tensor:
    return reads[name]()


class StackMember(NamedTuple):
    """One projection of one expert.

    Attributes:
        expert: number of the expert.
        part: number of the projection among the stack's `layout.parts`, such as 1 for up in gate_up.
        name: name of its tensor.
    """

    expert: int
    part: int
    name: str


class ExpertStack(NamedTuple):
    """A stacked tensor whose experts a checkpoint has one by one.

    Attributes:
        info: its name, shape [experts, out, in] or transposed [experts, in, out], and the dtype of its first member.
        layout: its layout in the registry.
        members: the projections it is made of, by expert and part.
    """

    info: TensorInfo
    layout: StackedExperts
    members: tuple[StackMember, ...]

    def make(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Make the stacked tensor, of shape `info.shape`.

        Args:
            read: returns the tensor [out, in] of a name. It is called for each of `members`; the first gives the dtype.
        """
        stacked = None
        for member in self.members:
            matrix = read(member.name)
            if stacked is None:
                stacked = torch.empty(self.info.shape, dtype=matrix.dtype)
            rows = stacked[member.expert].T if self.layout.transposed else stacked[member.expert]
            rows[member.part * len(matrix) : (member.part + 1) * len(matrix)] = matrix
        assert stacked is not None
        return stacked


def find_expert_stacks(architecture: str, tensors: Mapping[str, TensorInfo]) -> dict[str, ExpertStack]:
    """Find the stacks that a checkpoint's experts belong to.

    Args:
        architecture: the class that config.json names.
        tensors: the checkpoint's tensors that the model has no parameter for, by name.

    Returns:
        Each complete stack under both names it may have: of a parameter, and of a module's weight. Stacks that lack a
        projection, or whose projections have different shapes, are left out.
    """
    stacks: dict[str, ExpertStack] = {}
    for experts in MODELS[architecture].experts if architecture in MODELS else ():
        for layout in experts.stacked:
            parts = "|".join(map(re.escape, layout.parts))
            pattern = re.compile(rf"(.*){re.escape(experts.path)}\.(\d{{1,6}})\.({parts})\.weight")
            members_of: dict[str, list[StackMember]] = {}
            for name in tensors:
                match = pattern.fullmatch(name)
                if match:
                    module = match[1] + experts.place
                    member = StackMember(int(match[2]), layout.parts.index(match[3]), name)
                    members_of.setdefault(module, []).append(member)

            for module, members in members_of.items():
                for name in (f"{module}.{layout.name}", f"{module}.{layout.name}.weight"):
                    stack = _stack(name, layout, sorted(members), tensors)
                    if stack is not None:
                        stacks[name] = stack
    return stacks


def _stack(
    name: str, layout: StackedExperts, members: list[StackMember], tensors: Mapping[str, TensorInfo]
) -> ExpertStack | None:
    """The stack of these members; None if some are missing or have another shape."""
    count = members[-1].expert + 1
    shapes = {tensors[member.name].shape for member in members}
    complete = [(member.expert, member.part) for member in members] == [
        (expert, part) for expert in range(count) for part in range(len(layout.parts))
    ]
    if not complete or len(shapes) != 1:
        return None
    [(rows, cols)] = shapes
    rows *= len(layout.parts)
    shape = (count, cols, rows) if layout.transposed else (count, rows, cols)
    return ExpertStack(TensorInfo(name, tensors[members[0].name].dtype, shape), layout, tuple(members))
