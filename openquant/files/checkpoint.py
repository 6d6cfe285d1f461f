"""Open a checkpoint: config.json, the index, and the header of every shard. No tensor is read."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ..errors import SourceError
from ..threads import in_parallel
from .names import CARD_FILE, INDEX_FILE, SINGLE_FILE, left_out_part
from .small_files import MAX_INDEX, MAX_SMALL, open_regular, parse_json, read_small, short_repr
from .tensors import DAMAGED, MAX_TENSORS, TENSOR_NAME, Location, TensorInfo, read_header

# Headers that are read from the Hub at a time, and what is asked for first: most are no longer than that.
HEADERS_AT_ONCE = 8
FIRST_PART = 1 << 17


@dataclass(frozen=True)
class Checkpoint:
    """Everything a plan needs to know of a source.

    Attributes:
        root: the directory.
        config: config.json, parsed.
        architecture: the first entry of config.json's `architectures`.
        shards: shard file names in order, with the file's size in bytes.
        headers: SHA-256 of each shard's header, by file name.
        tensors: every tensor, by name.
        where: the place of every tensor, by name.
        indexed: whether the source has a model.safetensors.index.json.
        files: other files that belong to the model, relative to root, with sizes in bytes.
        left_out: files and directories that do not: foreign weights, leftovers, hidden directories.
    """

    root: Path
    config: dict[str, Any]
    architecture: str
    shards: dict[str, int]
    headers: dict[str, str]
    tensors: dict[str, TensorInfo]
    where: dict[str, Location]
    indexed: bool
    files: dict[str, int]
    left_out: tuple[str, ...]


class RemoteFile(Protocol):
    """A shard that is not on disk.

    Attributes:
        size: in bytes.
        digest: of its contents, in hexadecimal digits: of 64 digits it is the SHA-256.
    """

    size: int
    digest: str

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on."""


def open_checkpoint(
    root: Path, remote: Mapping[str, RemoteFile] | None = None, absent: Mapping[str, int] | None = None
) -> Checkpoint:
    """Read a checkpoint directory's metadata and check all of it.

    Args:
        root: the directory.
        remote: shards that belong to it but lie elsewhere, by name.
        absent: other files that do, with sizes in bytes, by name relative to root.

    Raises:
        SourceError: anything missing, damaged, contradictory, or not a safetensors checkpoint.
    """
    with readable():
        return _open(root, remote or {}, absent or {})


@contextmanager
def readable() -> Iterator[None]:
    """Turn an OSError about the source into a SourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{error.filename} cannot be read: {error.strerror}", "check the file and its permissions"
        ) from None


def _open(root: Path, remote: Mapping[str, RemoteFile], absent: Mapping[str, int]) -> Checkpoint:
    if not root.is_dir():
        if root.exists():
            raise SourceError(f"{root} is a file, not a checkpoint directory", "give the directory that holds it")
        raise SourceError(f"{root} does not exist", "check the path")
    config = read_config(root)
    architecture = _architecture(config)
    names, placed = _find_shards(root, remote)
    shards: dict[str, int] = {}
    headers: dict[str, str] = {}
    tensors: dict[str, TensorInfo] = {}
    where: dict[str, Location] = {}
    far = [shard for shard in names if shard in remote]
    coming = in_parallel(lambda shard: _read_remote(remote[shard], shard), far, HEADERS_AT_ONCE)
    for shard in names:
        if remote and shard not in remote and not (root / shard).exists():
            raise SourceError(
                f"{shard} is named by {INDEX_FILE} and missing from the repository",
                "choose another --revision, or tell the repository's owner",
            )
        if (root / shard).exists() and not (root / shard).is_file():
            raise SourceError(f"{shard} is not a regular file", "download or copy the checkpoint again")
        if shard in remote:
            shards[shard] = remote[shard].size
            headers[shard], found = next(coming)
        else:
            shards[shard], headers[shard], found = _open_shard(root / shard, shard)
        if len(tensors) + len(found) > MAX_TENSORS:
            raise SourceError(f"{root} holds more than {MAX_TENSORS:,} tensors", DAMAGED)
        for info, offset in found:
            if info.name in where:
                raise SourceError(
                    f"{info.name} is in two shards: {where[info.name].shard} and {shard}",
                    "remove the shard that does not belong to the checkpoint, or save the model again",
                )
            tensors[info.name] = info
            where[info.name] = Location(shard, offset)
    if placed is not None:
        _hold_against_index(placed, where)
    if not tensors:
        raise SourceError(f"{root} holds no tensors", "check that the model was saved completely")
    elsewhere = {**absent, **{name: file.size for name, file in remote.items()}}
    files, left_out = _list_files(root, set(names), elsewhere)
    return Checkpoint(root, config, architecture, shards, headers, tensors, where, placed is not None, files, left_out)


def _read_remote(file: RemoteFile, name: str) -> tuple[str, list[tuple[TensorInfo, int]]]:
    """SHA-256 of the header and the tensors with their offsets, as `read_header` gives them; mostly in one request."""
    first = file.read(0, min(FIRST_PART, file.size))

    def read(offset: int, length: int) -> bytes:
        here = first[offset : offset + length]
        return here if len(here) == length else here + file.read(offset + len(here), length - len(here))

    return read_header(read, file.size, name)


def _open_shard(path: Path, name: str) -> tuple[int, str, list[tuple[TensorInfo, int]]]:
    try:
        with open_regular(path, name) as file:
            size = os.fstat(file.fileno()).st_size

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            return size, *read_header(read, size, name)
    except FileNotFoundError:
        raise SourceError(f"{name} is missing from {path.parent}", "download or copy it again") from None


def read_json(path: Path, what: str) -> Any:
    """A JSON file of a checkpoint.

    Raises:
        SourceError: there is none, or it is not a regular file with JSON in UTF-8 of a bounded size and depth.
    """
    with readable():
        try:
            data = read_small(path, what, MAX_INDEX if what == INDEX_FILE else MAX_SMALL)
        except FileNotFoundError:
            raise SourceError(f"{what} is missing from {path.parent}", "download or copy it again") from None
    return parse_json(data, what)


def read_config(root: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        SourceError: there is none, or it is not a JSON object.
    """
    if not (root / "config.json").exists():
        refuse_other_weights(root, _names(root))
        raise SourceError(f"{root} is not a checkpoint: it has no config.json", "give the directory that holds it")
    config = read_json(root / "config.json", "config.json")
    if not isinstance(config, dict):
        raise SourceError("config.json is not a JSON object", "download or copy it again")
    return config


def _architecture(config: dict[str, Any]) -> str:
    found = config.get("architectures")
    if not isinstance(found, list) or not found or not all(_is_class(name) for name in found):
        raise SourceError(
            f"config.json names no architecture (architectures: {json.dumps(found)[:200]})",
            'add the model class, such as "architectures": ["Qwen3ForCausalLM"]',
        )
    return str(found[0])


def _is_class(name: object) -> bool:
    return isinstance(name, str) and len(name) <= 200 and name.isprintable()


def _find_shards(root: Path, remote: Mapping[str, RemoteFile]) -> tuple[list[str], dict[str, str] | None]:
    """Shard names in order, and tensor -> shard as the index has it (None without an index)."""
    if (root / INDEX_FILE).exists():
        index = read_json(root / INDEX_FILE, INDEX_FILE)
        placed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
            raise SourceError(f"{INDEX_FILE} has no weight_map of tensor to file names", "download or copy it again")
        for shard, tensor in {shard: tensor for tensor, shard in reversed(placed.items())}.items():
            if not _is_plain(shard):
                raise SourceError(
                    f"{INDEX_FILE} places {_named(tensor)} in {short_repr(shard)}, which is not a plain file name",
                    "shards must lie in the checkpoint's own directory",
                )
            if not shard.endswith(".safetensors"):
                raise SourceError(
                    f"{INDEX_FILE} places {_named(tensor)} in {shard}, which is not a safetensors file",
                    "save the model with safe_serialization=True",
                )
        return sorted(set(placed.values())), placed
    if (root / SINGLE_FILE).exists() or SINGLE_FILE in remote:
        return [SINGLE_FILE], None
    refuse_without_weights(root, _names(root))


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in the same directory, on any system."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\"} and name.isprintable() and len(name) <= 255


def _named(tensor: str) -> str:
    """A tensor's name from the index for a message: quoted and cut where it is not what a name can be."""
    return tensor if tensor.isprintable() and TENSOR_NAME.fullmatch(tensor) else short_repr(tensor)


def _names(root: Path) -> list[str]:
    return [path.name for path in root.glob("*")]


def refuse_other_weights(place: Path | str, names: Collection[str]) -> None:
    """Say so if weights are there only in a form that is not read.

    Args:
        place: the directory or repository.
        names: its files.

    Raises:
        SourceError: they are.
    """
    if INDEX_FILE in names or SINGLE_FILE in names:
        return
    if "adapter_config.json" in names:
        raise SourceError(
            f"{place} holds only an adapter, not a model",
            "merge it into its base model first (peft: merge_and_unload, then save_pretrained)",
        )
    for pattern, what in (("*.bin", "pickled"), ("*.pt", "pickled"), ("*.pth", "pickled"), ("*.gguf", "GGUF")):
        for name in sorted(fnmatch.filter(names, pattern)):
            raise SourceError(
                f"{place} holds {what} weights ({name}); only safetensors are read",
                "convert them first: load with transformers and save_pretrained",
            )


def refuse_without_weights(place: Path | str, names: Collection[str]) -> NoReturn:
    """Say why a directory or repository with neither an index nor a single file of weights is refused.

    Raises:
        SourceError: always.
    """
    refuse_other_weights(place, names)
    for name in sorted(fnmatch.filter(names, "*.safetensors")):
        raise SourceError(
            f"{place} holds {name} but neither {SINGLE_FILE} nor {INDEX_FILE}",
            "copy the index too, or rename a single file to " + SINGLE_FILE,
        )
    raise SourceError(f"{place} is not a checkpoint: it holds no safetensors weights", "check the path")


def _hold_against_index(placed: dict[str, str], where: dict[str, Location]) -> None:
    if placed == {tensor: location.shard for tensor, location in where.items()}:
        return
    for tensor, shard in placed.items():
        if tensor not in where or where[tensor].shard != shard:
            raise SourceError(f"{INDEX_FILE} places {_named(tensor)} in {shard}, which does not hold it", DAMAGED)
    for tensor, location in where.items():
        if tensor not in placed:
            raise SourceError(f"{location.shard} holds {tensor}, which {INDEX_FILE} does not list", DAMAGED)


def _list_files(root: Path, shards: set[str], elsewhere: Mapping[str, int]) -> tuple[dict[str, int], tuple[str, ...]]:
    files: dict[str, int] = {}
    left_out: set[str] = set()

    def fail(error: OSError) -> None:
        raise error

    for folder, directories, names in os.walk(root, onerror=fail):
        base = Path(folder)
        for directory in sorted(directories):
            relative = (base / directory).relative_to(root).as_posix()
            # A linked directory could lead anywhere, back to the root included.
            if left_out_part(f"{relative}/") is not None or (base / directory).is_symlink():
                directories.remove(directory)
                left_out.add(f"{relative}/")
        for name in names:
            path = base / name
            relative = path.relative_to(root).as_posix()
            if relative in shards or relative == INDEX_FILE:
                continue
            if left_out_part(relative) is not None:
                left_out.add(relative)
            elif path.is_file():
                if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                size = path.stat().st_size
                # A card is read whole and written anew.
                if relative == CARD_FILE and size > MAX_SMALL:
                    left_out.add(relative)
                else:
                    files[relative] = size
            elif path.is_symlink() and not path.exists():
                raise SourceError(f"{relative} is a broken link", "download or copy the checkpoint again")
            else:
                left_out.add(relative)
    for relative, size in elsewhere.items():
        if relative in shards:
            continue
        if set(relative.split("/")) & {"", ".", ".."} or "\\" in relative or not relative.isprintable():
            raise SourceError(f"{relative!r} is no possible file of a repository", "choose another one")
        part = left_out_part(relative)
        if part is not None:
            left_out.add(part)
        elif relative == CARD_FILE and size > MAX_SMALL:
            left_out.add(relative)
        else:
            files[relative] = size
    return dict(sorted(files.items())), tuple(sorted(left_out))
