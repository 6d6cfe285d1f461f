"""Headers of GGUF files, as the package gguf reads them: metadata, and names, types, shapes and offsets of tensors.

A GGUF file is a magic number, a version, two counts, metadata, a table of tensors, and the tensors
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Only little-endian files are read, as transformers does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SourceError
from .checkpoint import readable
from .shardfile import TENSOR_NAME

# Numbers of an array that are kept: one for each layer.
_MAX_KEPT = 10_000
_UNREADABLE = "it is incomplete, or newer than the package: download it again, or pip install -U gguf"


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


def read_gguf_header(path: Path, name: str, types: Collection[int]) -> GgufHeader:
    """Read the header of a GGUF file.

    Args:
        path: the file.
        name: its name in messages.
        types: the tensor types that can be read, by their number in GGUF files.

    Returns:
        Its metadata and tensors, which lie within the file.

    Raises:
        SourceError: it cannot be read, is no complete GGUF file, or has a tensor of another type.
    """
    from gguf import GGUFEndian, GGUFReader

    with readable():
        try:
            reader = GGUFReader(path)
        except (ValueError, LookupError, OverflowError) as error:
            raise SourceError(f"{name} is no GGUF file that the package gguf reads: {error}", _UNREADABLE) from None
    if reader.endianess != GGUFEndian.LITTLE:
        raise SourceError(f"{name} is big-endian", "take the little-endian file of the model")

    tensors: dict[str, GgufTensor] = {}
    for tensor in reader.tensors:
        if not tensor.name.isprintable() or not TENSOR_NAME.fullmatch(tensor.name):
            raise SourceError(f"{name}: {tensor.name!r} is not a possible name of a tensor", _UNREADABLE)
        if int(tensor.tensor_type) not in types:
            raise SourceError(
                f"{name}: {tensor.name} has the type {tensor.tensor_type.name}, which the installed gguf does not "
                "decode",
                "a newer gguf may know it: pip install -U gguf",
            )
        # The axis whose elements lie side by side comes first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[tensor.name] = GgufTensor(
            tensor.name, int(tensor.tensor_type), shape, tensor.data_offset, tensor.n_bytes
        )

    metadata = {key: _value(field) for key, field in reader.fields.items()}
    digest = hashlib.sha256(reader.data[: reader.data_offset].tobytes()).hexdigest()
    return GgufHeader(reader.data.size, digest, metadata, tensors)


def _value(field: Any) -> Any:
    """Return the value of a metadata key, or the number of values in a long array."""
    is_texts = field.types[-1].name == "STRING" and len(field.types) > 1
    if is_texts or len(field.data) > _MAX_KEPT:
        return len(field.data)
    return field.contents()
