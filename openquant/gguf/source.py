"""Opens GGUF files as a checkpoint."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SourceError, UsageError
from ..files.checkpoint import read_config, readable
from ..files.gguf import GgufHeader, GgufTensor, read_gguf_header
from ..files.model_files import SINGLE_FILE
from ..files.shardfile import SourceFile
from ..files.small_files import MAX_SMALL, short_repr
from ..files.tensors import DAMAGED, Location, TensorInfo
from ..formats.format import Blocks, GgmlType, decode_blocks, ggml_types
from ..formats.numbers import Floats
from ..weights.find import GgufCheckpoint, gguf_weight
from ..weights.weight import Weight
from .config import find_gguf_architecture, gguf_config

if TYPE_CHECKING:
    from .names import PlacedTensor

SUFFIX = ".gguf"
# Bytes that the tensors of an output shard take in bfloat16.
SHARD_BYTES = 5_000_000_000
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_FILES = 1000


@dataclass(frozen=True)
class OpenedGguf:
    """A GGUF file, shown as a Hugging Face directory.

    Attributes:
        checkpoint: its config, files, and tensors under the names that they have in such a directory. Its `root` is a
            temporary directory, which is removed with this object.
    """

    checkpoint: GgufCheckpoint


def open_gguf(path: Path) -> OpenedGguf:
    """Open a GGUF file, or the first of several that are one model. Weights are not read.

    Args:
        path: the file.

    Returns:
        Its checkpoint. config.json, tokenizer and chat template are made from the metadata, in a temporary directory.

    Raises:
        SourceError: it cannot be read, is damaged, or its metadata and tensors are not those of a class of transformers
            that is known here.
        UsageError: the package gguf is not installed, transformers is too old, or another file must be given.
    """
    types = ggml_types()
    files = _all_files(path.absolute())
    headers = [read_gguf_header(file, file.name, types) for file in files]
    _check_split(files, headers)
    owners, tensors = _all_tensors(files, headers)
    metadata = headers[0].metadata
    name = path.name
    architecture, entry = find_gguf_architecture(metadata, name)
    # torch and transformers take seconds to load, so all else is checked before.
    from .names import ROPE_FACTORS, model_tensors, place_tensors
    from .tokenizer import errors_only, write_tokenizer

    rope = tensors.get(ROPE_FACTORS)
    factors = None if rope is None else _read_vector(files[owners[rope.name]], rope, types[rope.type_id])
    with errors_only(), readable():
        config, expected = model_tensors(gguf_config(metadata, tensors, factors, name), name)
        placed = place_tensors(architecture, entry, config, expected, tensors, name)
        root = Path(tempfile.mkdtemp(prefix="openquant-gguf-"))
        try:
            config.save_pretrained(root)
            write_tokenizer(files[0], metadata, root)
            made = {file.name: file.stat().st_size for file in sorted(root.iterdir())}
            groups = list(_shards([(owners[tensor.stored.name], tensor) for tensor in placed]))
            shards = _link_shards(root, [files[group[0][0]] for group in groups])
            opened = OpenedGguf(
                _checkpoint(
                    root, path, config.architectures[0], made, dict(zip(shards, groups, strict=True)), headers, types
                )
            )
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
    weakref.finalize(opened, shutil.rmtree, root, ignore_errors=True)
    return opened


def _link_shards(root: Path, files: list[Path]) -> list[str]:
    """Make a link to the GGUF file that has its tensors for each output shard, and return their names."""
    count = len(files)
    names = [SINGLE_FILE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name, file in zip(names, files, strict=True):
        (root / name).symlink_to(file)
    return names


def _checkpoint(
    root: Path,
    path: Path,
    architecture: str,
    files: dict[str, int],
    shards: dict[str, list[tuple[int, PlacedTensor]]],
    headers: list[GgufHeader],
    types: Mapping[int, GgmlType],
) -> GgufCheckpoint:
    """Return the checkpoint whose shards have these tensors, each with the number of its GGUF file."""
    weights: dict[str, Weight] = {}
    where: dict[str, Location] = {}

    for shard, group in shards.items():
        for _, tensor in group:
            blocks = Blocks(tensor.head_rows, tensor.plus_one)
            kind = types[tensor.stored.type_id]
            weights[tensor.name] = gguf_weight(tensor.name, tensor.shape, tensor.stored, kind, blocks)
            where[tensor.name] = Location(shard, tensor.stored.offset)

    owner = {shard: headers[group[0][0]] for shard, group in shards.items()}
    return GgufCheckpoint(
        root=root,
        config=read_config(root),
        architecture=architecture,
        shards={shard: header.size for shard, header in owner.items()},
        headers={shard: header.digest for shard, header in owner.items()},
        tensors={name: weight.codes for name, weight in weights.items()},
        where=where,
        indexed=len(shards) > 1,
        files=files,
        left_out=(),
        weights=weights,
        file=path,
    )


def _all_tensors(files: list[Path], headers: list[GgufHeader]) -> tuple[dict[str, int], dict[str, GgufTensor]]:
    """Return the number of the file that holds each tensor, and the tensors, by name."""
    owners: dict[str, int] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in tensors:
                both = f"{files[owners[name]].name} and in {files[number].name}"
                raise SourceError(f"{name} is in {both}", "download or copy the files again")
            owners[name] = number
            tensors[name] = tensor
    return owners, tensors


def _all_files(path: Path) -> list[Path]:
    """Return the files of a model, which are several if the name says so."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    number = int(split["number"])
    if not 1 <= count <= _MOST_FILES or number != 1:
        first = f"{split['stem']}-00001-of-{split['count']}.gguf"
        raise UsageError(f"{path.name} is not the first of {count} files", f"give {first}, in the same directory")
    files = [path.with_name(f"{split['stem']}-{part:05d}-of-{split['count']}.gguf") for part in range(1, count + 1)]
    with readable():
        for file in files:
            if not file.exists():
                raise SourceError(f"{file.name} is missing from {file.parent}", "download or copy it again")
    return files


def _check_split(files: list[Path], headers: list[GgufHeader]) -> None:
    """Refuse files whose metadata say that they are other parts than their names do."""
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        part = header.metadata.get("split.no", 0)
        count = header.metadata.get("split.count", 0)
        # Older files that are whole have a count of 0 or 1, or none.
        if (part, max(count, 1) if isinstance(count, int) else count) != (number, len(files)):
            raise SourceError(
                f"{file.name} says that it is part {short_repr(part)} of {short_repr(count)} (split.no and "
                "split.count)",
                "give files their first names: NAME-00001-of-00003.gguf and so on",
            )


def _shards(tensors: list[tuple[int, PlacedTensor]]) -> Iterator[list[tuple[int, PlacedTensor]]]:
    """Divide tensors, each with the number of its file, into output shards: of one file, and about SHARD_BYTES."""
    group: list[tuple[int, PlacedTensor]] = []
    nbytes = 0
    # Within a file they keep the model's order.
    for owner, tensor in sorted(tensors, key=lambda tensor: tensor[0]):
        size = TensorInfo("", "BF16", tensor.shape).nbytes
        if group and (owner != group[0][0] or nbytes + size > SHARD_BYTES):
            yield group
            group = []
            nbytes = 0
        group.append((owner, tensor))
        nbytes += size
    yield group


def _read_vector(file: Path, tensor: GgufTensor, kind: GgmlType) -> Floats:
    """Read and decode a small tensor, float32 of one axis."""
    if tensor.nbytes > MAX_SMALL:
        raise SourceError(f"{file.name}: {tensor.name} has {tensor.nbytes:,} bytes", DAMAGED)
    codes = np.empty(tensor.nbytes, np.uint8)
    out = np.empty((1, prod(tensor.shape)), np.float32)
    with SourceFile(file, file.name) as source:
        source.read(codes, tensor.offset, tensor.name)
    decode_blocks(codes.reshape(1, -1), kind, Blocks(), out)
    return out.reshape(-1)
