"""Headers of safetensors files: names, dtypes, shapes and offsets of tensors.

A safetensors file is 8 bytes (little-endian header length), a JSON header, and the tensors without holes
(https://huggingface.co/docs/safetensors). All rules of that format are checked here, so later code can trust offsets.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import SourceError
from .small_files import refuse_pointer, short_repr

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
    checked: dict[tuple[Any, ...], tuple[str, tuple[int, ...], int]] = {}
    entries = sorted(_parse_entry(name, tensor, entry, checked) for tensor, entry in _parse_header(text, name).items())

    # Tensors must fill the file without a hole.
    start = 8 + len(text)
    expected = 0
    tensors = []
    for begin, end, nbytes, info in entries:
        if begin != expected:
            problem = "overlaps the tensor before it" if begin < expected else "leaves a hole before it"
            raise SourceError(f"{name}: {info.name} {problem} (starts at {begin}, not {expected})", DAMAGED)
        if end - begin != nbytes:
            needed = f"{info.dtype} {list(info.shape)} needs {short_repr(nbytes)}"
            raise SourceError(f"{name}: {info.name} spans {end - begin} bytes, {needed}", DAMAGED)
        tensors.append((info, start + begin))
        expected = end

    if start + expected != size:
        problem = "truncated" if start + expected > size else "followed by bytes that no tensor owns"
        raise SourceError(f"{name} is {problem}: it has {size} bytes, its header says {start + expected}", DAMAGED)
    return hashlib.sha256(text).hexdigest(), tensors


def _read_header_text(read: Callable[[int, int], bytes], size: int, name: str) -> bytes:
    """Return the JSON of a header."""
    if size < 8:
        raise SourceError(f"{name} is {size} bytes long, too short for a safetensors file", DAMAGED)
    refuse_pointer(read(0, min(size, 64)), name)

    size_of_header = read(0, 8)
    length = int.from_bytes(size_of_header, "little")
    if size_of_header.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise SourceError(
            f"{name} is a web page, not the file itself",
            "download it again: the address that it came from may need a login",
        )

    if length > MAX_HEADER or length < 2:
        raise SourceError(f"{name} claims a header of {length} bytes (2 to {MAX_HEADER} are allowed)", DAMAGED)
    if 8 + length > size:
        raise SourceError(f"{name} is truncated: its header ends at byte {8 + length} of {size}", DAMAGED)

    text = read(8, length)
    # Bounds the time of parsing: an entry has four colons and, with three axes, six commas.
    if text.count(b":") > 4 * MAX_TENSORS or text.count(b",") > 8 * MAX_TENSORS:
        raise SourceError(f"{name} has a header for more than {MAX_TENSORS:,} tensors", DAMAGED)
    return text


def _parse_header(text: bytes, name: str) -> dict[str, Any]:
    """Return the entries of a header by tensor name."""
    try:
        # Decoded first, because json accepts UTF-16 and a byte-order mark in bytes, and no other reader does.
        header = json.loads(text.decode())
        # The slow search for repeated names runs only if the counts differ: without repetition they are equal.
        if isinstance(header, dict) and text.count(b'"data_offsets"') != len(header.keys() - {"__metadata__"}):
            json.loads(text.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} has a broken header: {error}", DAMAGED) from None
    if not isinstance(header, dict):
        raise SourceError(f"{name} has a header that is not a JSON object", DAMAGED)

    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise SourceError(f"{name} has a __metadata__ that does not map names to strings", DAMAGED)
    return header


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key[:100]} appears twice")
            seen.add(key)
    return result


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _parse_entry(
    file: str, tensor: str, entry: Any, checked: dict[tuple[Any, ...], tuple[str, tuple[int, ...], int]]
) -> tuple[int, int, int, TensorInfo]:
    """Return begin and end offset, size in bytes by dtype and shape, and the tensor.

    Args:
        file: file name, for messages.
        tensor: name of the tensor.
        entry: its entry in the header.
        checked: dtypes and shapes that were checked before, which saves time; extended.
    """
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
        # repr distinguishes 1 from True and 1.0, which are no sizes.
        key = (dtype, repr(shape) if len(shape) <= MAX_AXES else "")
        kind = checked.get(key)
    except (TypeError, KeyError, ValueError, RecursionError):
        kind = None

    # Terminals obey control characters instead of showing them. Halves of surrogate pairs are not printable, too.
    if not tensor.isprintable() or not TENSOR_NAME.fullmatch(tensor):
        raise SourceError(
            f"{file}: {short_repr(tensor)} is not a possible name",
            "save the model again with names that torch could give",
        )

    if kind is None or len(entry) != 3:
        kind = checked[key] = _check_entry(file, tensor, entry)
    if not _is_size(begin) or not _is_size(end):
        raise SourceError(f"{file}: {tensor} has impossible data_offsets {short_repr(entry['data_offsets'])}", DAMAGED)
    return begin, end, kind[2], TensorInfo(tensor, kind[0], kind[1])


def _check_entry(file: str, tensor: str, entry: Any) -> tuple[str, tuple[int, ...], int]:
    """Return the dtype, the shape, and the size in bytes that they need."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{file}: {tensor} is not described by exactly dtype, shape and data_offsets", DAMAGED)

    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]

    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(
            f"{file}: {tensor} has the unknown dtype {short_repr(dtype)}", "convert it with a known dtype"
        )
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(_is_size(size) for size in shape):
        raise SourceError(f"{file}: {tensor} has the impossible shape {short_repr(shape)}", DAMAGED)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise SourceError(f"{file}: {tensor} has impossible data_offsets {short_repr(offsets)}", DAMAGED)
    if 0 in shape:
        raise SourceError(
            f"{file}: {tensor} has no elements (shape {shape})", "the model was saved wrongly: save it again"
        )

    info = TensorInfo(tensor, dtype, tuple(shape))
    return info.dtype, info.shape, info.nbytes


def make_header(tensors: list[TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """Make the bytes of a safetensors file before its first tensor.

    Args:
        tensors: name, dtype and shape of each tensor, in file order.
        metadata: `__metadata__` of the file; {"format": "pt"} if None.

    Returns:
        The bytes, padded to a multiple of 8 as the format requires. The first tensor follows them.
    """
    entries: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
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
