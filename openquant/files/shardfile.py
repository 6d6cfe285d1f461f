"""Shard files: reading a source at offsets, writing an output at offsets, and the layers that GPTQ has quantized.

Large writes bypass the page cache if the system can (O_DIRECT), because the data is not read again, and filling the
cache takes more CPU time than quantizing. The edges of such a write, which share a disk block with a neighbour, and
small tensors go through the cache, many at once, because each such write waits for the direct writes to the file. The
two kinds never touch the same block.

A LayerStore is a directory beside the output, which has one or more files for each decoder layer until the conversion
copies them. A file is whole or missing, and its name begins with its run's digest, so that a run that continues takes
only its own files.

    store = LayerStore(Path("Qwen3-8B-INT4.rounded"), "5f70bf..")
    store.claim()
    info = TensorInfo("model.layers.0.mlp.up_proj.weight_packed", "I32", (8, 1))
    store.write(0, [(info, data)])
    store.stored(0)                         # {info}; empty if this run has not written layer 0
    store.places()[info.name]               # TensorPlace(.../5f70bf..-000-0.safetensors, 184)

A safetensors file is 8 bytes (little-endian header length), a JSON header, and the tensors without holes
(https://huggingface.co/docs/safetensors). All rules of that format are checked here, so later code can trust offsets.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import OutputError, SourceError
from .destination import output_errors, write_atomic
from .model_files import refuse_pointer, short_repr
from .output import OutputDirectory

Bytes = npt.NDArray[np.uint8]

# Direct writes need an offset, length and address that are multiples of the disk's block, and must not share a page
# with other writes.
ALIGNMENT = max(4096, os.sysconf("SC_PAGE_SIZE"))
DIRECT_FROM = 1 << 18
# Small writes to a shard are collected until they have so many bytes.
PENDING_LIMIT = 1 << 20


class AlignedBuffer:
    """A buffer that gives views with the alignment of any file offset, as direct writes need them.

    Args:
        memory: allocates memory, uint8, of the given number of bytes.
        size: largest view in bytes.
    """

    def __init__(self, memory: Callable[[int], Bytes], size: int) -> None:
        self.size = size
        self._memory = memory(size + ALIGNMENT)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return uint8 [nbytes] whose address has the alignment of `offset` in a file. Overlaps earlier views.

        Args:
            offset: bytes from the start of the file.
            nbytes: at most the buffer's `size`.
        """
        start = (offset - self._memory.ctypes.data) % ALIGNMENT
        return self._memory[start : start + nbytes]


class SourceFile:
    """A source shard that is read at offsets; use as a context manager.

    Args:
        path: path of the shard.
        shard: its file name, for messages.

    Raises:
        SourceError: while entering: it cannot be opened.
    """

    def __init__(self, path: Path, shard: str) -> None:
        self.path = path
        self.shard = shard

    def __enter__(self) -> SourceFile:
        try:
            self.handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(
                f"{self.shard} cannot be read: {error.strerror}", "the source changed while it was being read"
            ) from None
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.handle)

    def read(self, into: Bytes, offset: int, label: str) -> None:
        """Fill a buffer from an offset of the file.

        Args:
            into: the buffer, uint8 and contiguous.
            offset: bytes from the start of the file.
            label: name of the tensor in messages.

        Raises:
            SourceError: the file ends early, or the disk fails.
        """
        view = into.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.handle, [view[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{label} in {self.shard} cannot be read: {error.strerror}", "check the disk that holds the source"
                ) from None
            if count == 0:
                raise SourceError(
                    f"{self.shard} ends inside {label}", "the source changed while it was being read: run again"
                )
            done += count


@dataclass(eq=False)
class ShardFile:
    """An output shard that is written from any thread and in any order, after `open`.

    Args:
        name: its file name.
        header: bytes before the first tensor.
        size: size of the whole file in bytes.
        output: the output directory.
        on_published: called with the file name once it is final.
        on_written: called with the number of bytes after each write.
    """

    name: str
    header: bytes
    size: int
    output: OutputDirectory
    on_published: Callable[[str], None]
    on_written: Callable[[int], None]

    def __post_init__(self) -> None:
        self.path = self.output.path / self.name
        self._left = self.size - len(self.header)
        self._lock = threading.Lock()
        self._pending: dict[int, bytes] = {}
        self._pending_bytes = 0
        self._handle = -1
        self._direct = -1

    def open(self) -> None:
        """Create the file with its final size, and write the header.

        Raises:
            OutputError: it cannot be written.
        """
        partial = self.output.partial(self.name)
        with output_errors(self.path):
            self._handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            os.ftruncate(self._handle, self.size)
            _write_all(self._handle, memoryview(self.header), 0)
        # Not every system or file system has such a mode.
        with suppress(AttributeError, OSError):
            self._direct = os.open(partial, os.O_WRONLY | os.O_DIRECT)

    def write(self, data: npt.NDArray[Any], offset: int) -> int:
        """Write an array at an offset. The write that completes the file gives it its final name.

        Every byte after the header must be written once. The array may be used again when this returns.

        Args:
            data: contiguous array of any dtype.
            offset: bytes from the start of the file.

        Returns:
            The offset after the array.

        Raises:
            OutputError: the disk is full or fails.
            Exception: what `on_written` raises, and `on_published` in the write that completes the file.
        """
        view = data.reshape(-1).view(np.uint8)
        with output_errors(self.path):
            start, end = self._write_direct(view, offset)

            # The edges share a disk block with a neighbour: large ones are written now, small ones with others.
            edges = [(view[:start], offset), (view[end:], offset + end)]
            for edge, edge_offset in edges:
                if edge.nbytes >= DIRECT_FROM:
                    _write_all(self._handle, edge.data, edge_offset)

            with self._lock:
                for edge, edge_offset in edges:
                    if 0 < edge.nbytes < DIRECT_FROM:
                        self._pending[edge_offset] = edge.tobytes()
                        self._pending_bytes += edge.nbytes

                self._left -= view.nbytes
                complete = self._left == 0
                if complete or self._pending_bytes >= PENDING_LIMIT:
                    self._write_pending()
        if complete:
            self._publish()
        self.on_written(view.nbytes)
        return offset + view.nbytes

    def _write_direct(self, view: Bytes, offset: int) -> tuple[int, int]:
        """Write the aligned part of `view` without the page cache. Returns where in `view` it begins and ends."""
        start = -offset % ALIGNMENT
        if self._direct < 0 or view.nbytes < DIRECT_FROM or (view.ctypes.data - offset) % ALIGNMENT:
            return 0, 0
        body = (view.nbytes - start) // ALIGNMENT * ALIGNMENT
        try:
            written = os.pwrite(self._direct, view[start : start + body].data, offset + start)
        except OSError:
            return 0, 0  # a cached write succeeds or reports the error
        return start, start + written // ALIGNMENT * ALIGNMENT

    def _write_pending(self) -> None:
        """Write the collected small writes, adjacent ones together."""
        start = 0
        run = bytearray()
        for offset in sorted(self._pending):
            if offset != start + len(run):
                _write_all(self._handle, memoryview(run), start)
                start = offset
                run = bytearray()
            run += self._pending[offset]
        _write_all(self._handle, memoryview(run), start)
        self._pending.clear()
        self._pending_bytes = 0

    def _publish(self) -> None:
        with output_errors(self.path):
            os.fsync(self._handle)
        self.close()
        self.output.publish(self.name)
        self.on_published(self.name)

    def close(self) -> None:
        """Close the file, finished or not."""
        for handle in (self._handle, self._direct):
            if handle >= 0:
                os.close(handle)
        self._handle = self._direct = -1


def _write_all(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


# Files of a run: layers, the pass checkpoint, and unfinished ones of both.
_OURS = re.compile(
    r"[0-9a-f]{16}-(\d{3,}-\d+\.safetensors|(\d+-of-\d+\.passes|\d\.passes\.tuned)(\.new)?)"
    r"|[0-9a-f]{16}\.passes(\.tuned)?(\.new)?"
    r"|\.openquant-[0-9a-f]{16}\.partial"
)


class TensorPlace(NamedTuple):
    """Where a tensor's bytes lie: the path of a file, and the offset in bytes from its start."""

    path: Path
    offset: int


class LayerStore:
    """The directory of quantized layers of one run.

    Args:
        path: the directory; it may be missing.
        run_digest: digest of the run, hexadecimal.
    """

    def __init__(self, path: Path, run_digest: str) -> None:
        self.path = path
        self.run_digest = run_digest
        # How the names of this run's files begin.
        self._prefix = run_digest[:16]

    def sensitivities(self, part: int) -> Path:
        """Return the path of the file of the sensitivities of a part of the documents."""
        return self.path / f"{self._prefix}-{part}.passes.tuned"

    def pass_checkpoint(self, rank: int, size: int) -> Path:
        """Return the path of a pass checkpoint, from which an interrupted pass continues.

        Args:
            rank: the process whose pass it is.
            size: the number of processes. A run with another number begins its passes again.
        """
        return self.path / f"{self._prefix}-{rank}-of-{size}.passes"

    @property
    def nbytes(self) -> int:
        """Size of all stored layers in bytes, this run's or another's."""
        statuses = (os.lstat(path) for path in self.path.glob("*.safetensors"))
        return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))

    def claim(self) -> None:
        """Make the directory, or remove the files of other runs from it.

        Raises:
            OutputError: it has a file that no run writes, or cannot be written.
        """
        with output_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            paths = sorted(self.path.iterdir())
            foreign = [path for path in paths if not _is_ours(path)]
            if foreign:
                raise OutputError(
                    f"{foreign[0]} was not made by openquant", "move it away, or choose another directory with -o"
                )
            for path in paths:
                if not path.name.startswith(self._prefix):
                    path.unlink()

    def stored(self, number: int) -> set[TensorInfo]:
        """Return the tensors of a decoder layer that this run has written.

        Args:
            number: number of the decoder layer.

        Raises:
            SourceError: a file is damaged.
            OutputError: a file cannot be read.
        """
        return {info for info, _, _ in self._tensors(f"{number:03d}-")}

    def places(self) -> dict[str, TensorPlace]:
        """Return where the tensors of all layers of this run lie, by tensor name. Only headers are read.

        Raises:
            SourceError: a file is damaged.
            OutputError: a file cannot be read.
        """
        return {info.name: TensorPlace(path, offset) for info, path, offset in self._tensors()}

    def _tensors(self, layer: str = "") -> Iterator[tuple[TensorInfo, Path, int]]:
        """Yield the tensors of a layer or of all, with their files and offsets."""
        with output_errors(self.path, "read"):
            for path in sorted(self.path.glob(f"{self._prefix}-{layer}*.safetensors")):
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    try:
                        _, tensors = read_header(partial(read_at, file), size, str(path))
                    except SourceError as error:
                        raise SourceError(error.message, "remove it; its layers are then quantized again") from None
                for info, offset in tensors:
                    yield info, path, offset

    def write(self, number: int, tensors: Sequence[tuple[TensorInfo, Bytes]], part: int = 0) -> None:
        """Write tensors of a decoder layer to a file.

        Args:
            number: number of the decoder layer.
            tensors: its tensors, each with its bytes, uint8.
            part: number of the part, if the layer is written in several files.

        Raises:
            OutputError: the disk is full, or the file cannot be written.
        """
        path = self.path / f"{self._prefix}-{number:03d}-{part}.safetensors"
        write_atomic(path, make_header([info for info, _ in tensors]), *(data.data for _, data in tensors))

    def rename(self, run_digest: str) -> LayerStore:
        """Let another run have the files of this one.

        Args:
            run_digest: digest of that run, hexadecimal.

        Returns:
            The store of that run.

        Raises:
            OutputError: a file cannot be renamed.
        """
        with output_errors(self.path):
            for path in self.path.glob(f"{self._prefix}*"):
                path.rename(path.with_name(run_digest[:16] + path.name.removeprefix(self._prefix)))
        return LayerStore(self.path, run_digest)

    def remove(self) -> None:
        """Remove all files of runs, and the directory if it is then empty."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if _is_ours(path):
                    path.unlink()
            self.path.rmdir()


def _is_ours(path: Path) -> bool:
    """Return whether a path can be that of a file that a run wrote."""
    return _OURS.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Return `length` bytes of a file from `offset` on."""
    file.seek(offset)
    return file.read(length)


# Bits per element of all dtypes of safetensors 0.8.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# The safetensors library refuses longer headers (safetensors 0.8, src/tensor.rs).
MAX_HEADER = 100_000_000
# The largest published models have a quarter of this. A million takes a minute and a gigabyte.
MAX_TENSORS = 1_000_000
# The most that torch and numpy allow.
MAX_AXES = 64
# Stars and braces are pattern syntax, and compressed-tensors takes names that begin with re: for regular expressions.
TENSOR_NAME = re.compile(r"(?!re:)[^*{}]{1,1000}")


DAMAGED = "the file is damaged or incomplete: download or copy it again"


class TensorInfo(NamedTuple):
    """A tensor as a safetensors header describes it.

    Attributes:
        name: full tensor name, `.weight` included.
        dtype: safetensors dtype, such as "BF16" or "F8_E4M3".
        shape: sizes of the axes, () for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            bits *= size
        return bits // 8

    @property
    def module(self) -> str:
        """The module that owns the tensor: its name without `.weight`."""
        return self.name.removesuffix(".weight")


class Location(NamedTuple):
    """Where a tensor's bytes lie.

    Attributes:
        shard: file name of the shard.
        offset: bytes from the start of the file.
    """

    shard: str
    offset: int


def read_header(read: Callable[[int, int], bytes], size: int, name: str) -> tuple[str, list[tuple[TensorInfo, int]]]:
    """Parse and check the header of a safetensors file.

    Args:
        read: `read(offset, length)` returns that range of the file; fewer bytes only at the end of the file.
        size: size of the whole file in bytes.
        name: the file's name, for messages.

    Returns:
        The SHA-256 of the header's JSON, hexadecimal; and name, dtype and shape of every tensor with the offset of its
        first byte from the start of the file, in file order.

    Raises:
        SourceError: the file is not a complete, consistent safetensors file.
    """
    text = _read_header_text(read, size, name)
    try:
        # Decoded first, because json accepts UTF-16 and a byte-order mark in bytes, and no other reader does.
        header = json.loads(text.decode())
        header.pop("__metadata__", None)
        entries = sorted(_parse_entry(tensor, entry) for tensor, entry in header.items())
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise SourceError(f"{name} has a broken header: {error}", DAMAGED) from None

    # Tensors must fill the file without a hole.
    start = 8 + len(text)
    expected = 0
    tensors = []
    for begin, end, tensor, dtype, shape in entries:
        info = _check_tensor(name, tensor, dtype, shape)
        if begin != expected:
            problem = "leaves a hole before it"
            if begin < expected:
                problem = "overlaps the tensor before it"
            raise SourceError(f"{name}: {info.name} {problem} (starts at {begin}, not {expected})", DAMAGED)
        if end - begin != info.nbytes:
            needed = f"{info.dtype} {list(info.shape)} needs {short_repr(info.nbytes)}"
            raise SourceError(f"{name}: {info.name} spans {end - begin} bytes, {needed}", DAMAGED)
        tensors.append((info, start + begin))
        expected = end

    if start + expected != size:
        problem = "followed by bytes that no tensor owns"
        if start + expected > size:
            problem = "truncated"
        raise SourceError(f"{name} is {problem}: it has {size} bytes, its header says {start + expected}", DAMAGED)
    return hashlib.sha256(text).hexdigest(), tensors


def _read_header_text(read: Callable[[int, int], bytes], size: int, name: str) -> bytes:
    """Return the JSON of a header."""
    if size < 8:
        raise SourceError(f"{name} is {size} bytes long, too short for a safetensors file", DAMAGED)
    refuse_pointer(read(0, min(size, 64)), name)

    length = int.from_bytes(read(0, 8), "little")
    if length > MAX_HEADER or length < 2:
        raise SourceError(f"{name} claims a header of {length} bytes (2 to {MAX_HEADER} are allowed)", DAMAGED)
    if 8 + length > size:
        raise SourceError(f"{name} is truncated: its header ends at byte {8 + length} of {size}", DAMAGED)

    return read(8, length)


def _parse_entry(tensor: str, entry: Any) -> tuple[int, int, str, Any, tuple[Any, ...]]:
    """Return begin and end offset, name, dtype and shape of a tensor in a header."""
    begin, end = map(operator.index, entry["data_offsets"])
    return begin, end, tensor, entry["dtype"], tuple(entry["shape"])


def _check_tensor(file: str, tensor: str, dtype: Any, shape: tuple[Any, ...]) -> TensorInfo:
    """Return a tensor of a header, whose name, dtype and shape must be possible."""
    # Terminals obey control characters instead of showing them. Halves of surrogate pairs are not printable, too.
    if not tensor.isprintable() or not TENSOR_NAME.fullmatch(tensor):
        raise SourceError(
            f"{file}: {short_repr(tensor)} is not a possible name",
            "save the model again with names that torch could give",
        )

    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(
            f"{file}: {tensor} has the unknown dtype {short_repr(dtype)}", "convert it with a known dtype"
        )

    if 0 in shape:
        raise SourceError(
            f"{file}: {tensor} has no elements (shape {list(shape)})", "the model was saved wrongly: save it again"
        )

    if len(shape) > MAX_AXES or not all(type(size) is int and 0 < size < 1 << 63 for size in shape):
        raise SourceError(f"{file}: {tensor} has the impossible shape {short_repr(list(shape))}", DAMAGED)

    return TensorInfo(tensor, dtype, shape)


def make_header(tensors: list[TensorInfo]) -> bytes:
    """Make the bytes of a safetensors file before its first tensor.

    Args:
        tensors: name, dtype and shape of each tensor, in file order.

    Returns:
        The bytes, padded to a multiple of 8 as the format requires. The first tensor follows them.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in tensors:
        entries[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
