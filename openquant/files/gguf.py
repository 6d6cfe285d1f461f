"""Headers of GGUF files: metadata, and names, types, shapes and offsets of tensors.

A GGUF file is a magic number, a version, two counts, metadata, a table of tensors, and the tensors at offsets that are
multiples of `general.alignment` (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). All rules that later code
relies on are checked here. Only versions 2 and 3 in little-endian order are read, as transformers does.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import SourceError
from .checkpoint import readable
from .model_files import open_regular, short_repr
from .shardfile import DAMAGED, MAX_TENSORS, TENSOR_NAME

MAGIC = b"GGUF"
# Published files have fewer than a hundred keys.
MAX_KEYS = 10_000
# A vocabulary has at most a million tokens.
MAX_ARRAY = 4_000_000
# Chat templates are the longest strings, and tokens are short. Merges are found by cutting tokens everywhere.
MAX_STRING = 1 << 20
MAX_TOKEN = 4096
# As safetensors has it (shardfile.py). A vocabulary of 260,000 tokens with merges takes 12 MB.
MAX_HEADER = 100_000_000
# Numbers of an array that are kept: one for each layer.
_MAX_KEPT = 10_000
MAX_ALIGNMENT = 1 << 20
MAX_AXES = 4
# Formats of metadata values by their type; 8 are strings and 9 arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


class TensorType(Protocol):
    """What a header needs to know of a tensor type: its name, and the number of elements and bytes of a block."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def block(self) -> int: ...  # noqa: D102
    @property
    def block_bytes(self) -> int: ...  # noqa: D102


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: its name in the file, such as "blk.0.attn_q.weight".
        type_id: number of its type.
        shape: sizes of the axes in the order of torch, rows first.
        offset: bytes from the start of the file.
        nbytes: size in bytes.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file.

    Attributes:
        size: size of the file in bytes.
        digest: SHA-256 of the header, hexadecimal.
        metadata: values by key: numbers, bools, strings, and arrays of numbers; of an array of strings, or of more than
            10,000 numbers, only how many it has.
        tensors: all tensors, by name, in the order of the file.
    """

    size: int
    digest: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, name: str, types: Mapping[int, TensorType]) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Args:
        path: the file.
        name: its name in messages.
        types: the tensor types that can be read, by their number in GGUF files.

    Returns:
        Its metadata and tensors. Tensors lie within the file and do not overlap.

    Raises:
        SourceError: it cannot be read, is no complete and consistent GGUF file, or has a tensor of another type.
    """
    with readable(), open_regular(path, name) as file:
        size = os.fstat(file.fileno()).st_size
        cursor = _Cursor(file, size, name)
        num_tensors, num_keys = _read_start(cursor)
        metadata = _read_metadata(cursor, num_keys)
        entries = [_read_entry(cursor, types) for _ in range(num_tensors)]

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise SourceError(f"{name} has the impossible general.alignment {short_repr(alignment)}", DAMAGED)

    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for tensor in entries:
        if tensor.name in tensors:
            raise SourceError(f"{name} holds {tensor.name} twice", DAMAGED)
        if tensor.offset % alignment:
            raise SourceError(
                f"{name}: {tensor.name} starts at {tensor.offset}, which is no multiple of {alignment}", DAMAGED
            )
        tensors[tensor.name] = tensor._replace(offset=start + tensor.offset)

    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise SourceError(f"{name}: {tensor.name} overlaps the tensor before it", DAMAGED)
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise SourceError(f"{name} is truncated: {tensor.name} ends at byte {end:,} of {size:,}", DAMAGED)
    return GgufHeader(size, cursor.digest.hexdigest(), metadata, tensors)


class _Cursor:
    """Reads a file from its beginning, and hashes what was read."""

    def __init__(self, file: BufferedReader, size: int, name: str) -> None:
        self.file = file
        self.size = size
        self.name = name
        self.position = 0
        self.digest = hashlib.sha256()

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if self.position + nbytes > MAX_HEADER:
            raise SourceError(f"{self.name} has a header of more than {MAX_HEADER:,} bytes", DAMAGED)
        data = self.file.read(nbytes) if nbytes <= self.left else b""
        if len(data) != nbytes:
            raise SourceError(f"{self.name} is truncated: it ends inside its header", DAMAGED)
        self.position += nbytes
        self.digest.update(data)
        return data

    @property
    def left(self) -> int:
        """Number of bytes that follow."""
        return self.size - self.position

    def number(self, code: str) -> Any:
        """Return the next number of a format of `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self, what: str, longest: int = MAX_STRING) -> str:
        """Return the next string, of at most so many bytes."""
        length = self.number("Q")
        if length > longest:
            raise SourceError(f"{self.name}: {what} claims {length:,} bytes", DAMAGED)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise SourceError(f"{self.name}: {what} is no UTF-8", DAMAGED) from None


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and metadata keys."""
    if cursor.size < 24 or cursor.take(4) != MAGIC:
        raise SourceError(f"{cursor.name} is no GGUF file", DAMAGED)
    version = cursor.number("I")
    num_tensors = cursor.number("Q")
    num_keys = cursor.number("Q")

    if version in (2 << 24, 3 << 24):
        raise SourceError(f"{cursor.name} is big-endian", "take the little-endian file of the model")
    if version not in (2, 3):
        raise SourceError(
            f"{cursor.name} is GGUF version {version}; 2 and 3 are read", "convert the model again with llama.cpp"
        )
    # An entry of the table has at least 24 bytes, a key 13.
    if num_tensors > min(MAX_TENSORS, cursor.left // 24) or num_keys > min(MAX_KEYS, cursor.left // 13):
        raise SourceError(f"{cursor.name} claims {num_tensors:,} tensors and {num_keys:,} metadata keys", DAMAGED)
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key")
        if not key or len(key) > 1000 or not key.isprintable():
            raise SourceError(f"{cursor.name}: {short_repr(key)} is not a possible metadata key", DAMAGED)
        if key in metadata:
            raise SourceError(f"{cursor.name} holds the metadata key {key} twice", DAMAGED)
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("I")
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string(key)
    if kind != _ARRAY:
        raise SourceError(f"{cursor.name}: {key} has the unknown type {kind}", DAMAGED)

    kind = cursor.number("I")
    count = cursor.number("Q")
    if count > MAX_ARRAY:
        raise SourceError(f"{cursor.name}: {key} claims {count:,} values", DAMAGED)
    if kind == _STRING:
        for _ in range(count):
            cursor.string(key, MAX_TOKEN)
        return count
    if kind not in _SCALARS:
        raise SourceError(f"{cursor.name}: {key} is an array of the type {kind}, which is not read", DAMAGED)

    data = cursor.take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
    if count > _MAX_KEPT:
        return count
    return list(struct.unpack(f"<{count}{_SCALARS[kind]}", data))


def _read_entry(cursor: _Cursor, types: Mapping[int, TensorType]) -> GgufTensor:
    """Return a tensor; its offset is counted from the start of the tensors."""
    tensor = cursor.string("a tensor's name")
    if not tensor.isprintable() or not TENSOR_NAME.fullmatch(tensor):
        raise SourceError(f"{cursor.name}: {short_repr(tensor)} is not a possible name of a tensor", DAMAGED)

    axes = cursor.number("I")
    if not 1 <= axes <= MAX_AXES:
        raise SourceError(f"{cursor.name}: {tensor} has {axes} axes (1 to {MAX_AXES} are allowed)", DAMAGED)
    # The axis whose elements lie side by side comes first.
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]

    type_id = cursor.number("I")
    offset = cursor.number("Q")
    if type_id not in types:
        raise SourceError(
            f"{cursor.name}: {tensor} has the type {type_id}, which the installed gguf does not decode",
            "a newer gguf may know it: pip install -U gguf",
        )

    kind = types[type_id]
    if 0 in shape or shape[-1] % kind.block:
        raise SourceError(
            f"{cursor.name}: {tensor} is {list(shape)}, and {kind.name} has blocks of {kind.block}", DAMAGED
        )
    return GgufTensor(tensor, type_id, shape, offset, prod(shape) // kind.block * kind.block_bytes)
