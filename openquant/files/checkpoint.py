"""Opens a checkpoint: reads config.json, the index, and the header of every shard; and identifies its contents.

No tensor is read but those in which bitsandbytes says what shape its weights have.

A fingerprint is a digest of all contents. A stamp shows without reading that they are unchanged.

    fingerprint = Fingerprint(checkpoint)
    fingerprint.add("model-00001-of-00002.safetensors", path)   # shards may come and go
    fingerprint.hexdigest()                                     # "5f70bf18a0.."; reads the shards that were not added
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Protocol

from ..errors import SourceError
from ..threads import in_parallel
from . import model_files
from .shardfile import DAMAGED, Location, TensorInfo, read_at, read_header

_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")

# Headers that are read from the Hub at a time, and bytes of the first request: most headers are shorter.
HEADERS_AT_ONCE = 8
FIRST_PART = 1 << 17
# Tensors that hold JSON (bitsandbytes functional.py, QuantState.as_dict), and the most bytes of one that is read.
QUANT_STATE = ".quant_state.bitsandbytes__"
MAX_QUANT_STATE = 1 << 10


@dataclass(frozen=True)
class Checkpoint:
    """An opened model directory: all that a plan needs to know of a source.

    Attributes:
        root: the directory.
        config: config.json, parsed.
        architecture: first entry of `architectures` in config.json.
        shards: size of each shard in bytes, by file name in order.
        headers: SHA-256 of each shard's header, by file name.
        tensors: all tensors, by name.
        where: shard and offset of each tensor, by name.
        indexed: whether there is a model.safetensors.index.json.
        files: size in bytes of other files of the model, by path relative to root.
        left_out: files and directories that are no part of the model: other formats, leftovers, what nobody asks for.
        quant_states: contents of the tensors in which bitsandbytes says what shape a weight has, by name.
        unindexed: the shards of MTP layers that the index does not name.
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
    quant_states: dict[str, bytes] = field(default_factory=dict)
    unindexed: tuple[str, ...] = ()

    def place(self, name: str) -> str:
        """Return a tensor for a message: "model.safetensors: lm_head.weight"."""
        return f"{self.where[name].shard}: {name}"


class RemoteFile(Protocol):
    """A shard that is not on disk.

    Attributes:
        size: size in bytes.
        digest: digest of its contents, hexadecimal; 64 digits are a SHA-256.
    """

    size: int
    digest: str

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on.

        Raises:
            SourceError: they cannot be read.
        """


def open_checkpoint(
    root: Path,
    remote: Mapping[str, RemoteFile] | None = None,
    absent: Mapping[str, int] | None = None,
    copy: Collection[str] = (),
) -> Checkpoint:
    """Read and check the metadata of a checkpoint.

    Args:
        root: the directory.
        remote: its shards that are not in the directory, by file name; each can be read at offsets.
        absent: size in bytes of its other files that are not in the directory, by path relative to root.
        copy: patterns of files that belong to it although nothing else says so (`--copy`).

    Returns:
        Its config, its files, and name, dtype, shape and offset of each tensor.

    Raises:
        SourceError: something is missing, damaged or contradictory, or it is no safetensors checkpoint.
    """
    with readable():
        return _open(root, remote or {}, absent or {}, copy)


@contextmanager
def readable(hint: str = "check the file and its permissions") -> Iterator[None]:
    """Turn an OSError that is raised in the `with` block into a SourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}", hint) from None


def _open(root: Path, remote: Mapping[str, RemoteFile], absent: Mapping[str, int], copy: Collection[str]) -> Checkpoint:
    if not root.is_dir():
        if root.exists():
            raise SourceError(f"{root} is a file, not a checkpoint directory", "give the directory that holds it")
        raise SourceError(f"{root} does not exist", "check the path")

    config = read_config(root)
    architecture = _architecture(root, config)
    names, weight_map = _find_shards(root, remote)
    unindexed = [] if weight_map is None else _mtp_shards(root, remote, config, names)

    # The tensors of all shards.
    found = _Shards()
    for name, size, digest, header in _read_shards(root, remote, [*names, *unindexed]):
        if name not in unindexed or found.where.keys().isdisjoint(info.name for info, _ in header):
            found.add(name, size, digest, header)
        else:
            # Left over: the index has these layers elsewhere.
            unindexed = [shard for shard in unindexed if shard != name]

    if weight_map is not None:
        added = {name: shard for name, (shard, _) in found.where.items() if shard in unindexed}
        _check_index(root / model_files.INDEX_FILE, weight_map | added, found.where)
    if not found.tensors:
        raise SourceError(f"{root} holds no tensors", "check that the model was saved completely")

    # Other files.
    elsewhere = {**absent, **{name: file.size for name, file in remote.items()}}
    files, left_out = _list_files(root, set(found.shards), elsewhere, copy)

    return Checkpoint(
        root=root,
        config=config,
        architecture=architecture,
        **vars(found),
        indexed=weight_map is not None,
        files=files,
        left_out=left_out,
        quant_states=_read_quant_states(root, remote, found),
        unindexed=tuple(unindexed),
    )


@dataclass
class _Shards:
    """What the headers of the shards say; the fields are those of a Checkpoint."""

    shards: dict[str, int] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    where: dict[str, Location] = field(default_factory=dict)

    def add(self, shard: str, size: int, digest: str, header: list[tuple[TensorInfo, int]]) -> None:
        """Add a shard, whose tensors no other may have."""
        self.shards[shard] = size
        self.headers[shard] = digest
        for info, offset in header:
            if info.name in self.where:
                raise SourceError(
                    f"{info.name} is in two shards: {self.where[info.name].shard} and {shard}",
                    "download the one where the index does not place it again, or remove it if the index lacks it",
                )
            self.tensors[info.name] = info
            self.where[info.name] = Location(shard, offset)


def _read_shards(
    root: Path, remote: Mapping[str, RemoteFile], names: list[str]
) -> Iterator[tuple[str, int, str, list[tuple[TensorInfo, int]]]]:
    """Yield the name of each shard, its size in bytes, and what `read_header` returns."""
    remote_names = [name for name in names if name in remote]
    remote_headers = in_parallel(lambda name: _read_remote(remote[name], name), remote_names, HEADERS_AT_ONCE)

    for name in names:
        path = root / name
        if path.exists() and not path.is_file():
            raise SourceError(f"{name} is not a regular file", "download or copy the checkpoint again")
        if name in remote:
            yield name, remote[name].size, *next(remote_headers)
            continue

        if remote and not path.exists():
            raise SourceError(
                f"{name} is named by {model_files.INDEX_FILE} and missing from the repository",
                "choose another --revision, or tell the repository's owner",
            )
        yield name, *_open_shard(path, name)


def _read_quant_states(root: Path, remote: Mapping[str, RemoteFile], found: _Shards) -> dict[str, bytes]:
    """Return the contents of the tensors that have a quant state, by name."""

    def read(info: TensorInfo) -> bytes:
        shard, offset = found.where[info.name]
        if shard in remote:
            return remote[shard].read(offset, info.nbytes)
        with model_files.open_regular(root / shard, shard) as file:
            return read_at(file, offset, info.nbytes)

    states = [info for name, info in found.tensors.items() if QUANT_STATE in name and info.nbytes <= MAX_QUANT_STATE]
    contents = in_parallel(read, states, HEADERS_AT_ONCE)
    return {info.name: data for info, data in zip(states, contents, strict=True)}


def _read_remote(file: RemoteFile, name: str) -> tuple[str, list[tuple[TensorInfo, int]]]:
    """Return what `read_header` returns, mostly with one request."""
    first = file.read(0, min(FIRST_PART, file.size))

    def read(offset: int, length: int) -> bytes:
        data = first[offset : offset + length]
        if len(data) < length:
            data += file.read(offset + len(data), length - len(data))
        return data

    return read_header(read, file.size, name)


def _open_shard(path: Path, name: str) -> tuple[int, str, list[tuple[TensorInfo, int]]]:
    """Return the size in bytes, and what `read_header` returns."""
    try:
        with model_files.open_regular(path, str(path)) as file:
            size = os.fstat(file.fileno()).st_size
            return size, *read_header(partial(read_at, file), size, str(path))
    except FileNotFoundError:
        raise SourceError(f"{name} is missing from {path.parent}", "download or copy it again") from None


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file of a checkpoint.

    Args:
        path: the file.
        what: its name where the message names the directory too. A file of the name INDEX_FILE may be larger than
            others.

    Returns:
        The parsed value: dict, list, str, int, float, bool or None.

    Raises:
        SourceError: it is missing, cannot be read, is not a regular file, too large, or not JSON.
    """
    largest = model_files.MAX_SMALL
    if what == model_files.INDEX_FILE:
        largest = model_files.MAX_INDEX
    with readable():
        try:
            data = model_files.read_small(path, str(path), largest)
        except FileNotFoundError:
            raise SourceError(f"{what} is missing from {path.parent}", "download or copy it again") from None
    return model_files.parse_json(data, str(path))


def read_config(root: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint.

    Args:
        root: the checkpoint's directory.

    Returns:
        The parsed JSON object.

    Raises:
        SourceError: it is missing, cannot be read, or is not a JSON object.
    """
    if not (root / "config.json").exists():
        refuse_other_weights(root, _names(root))
        if (root / model_files.JOURNAL_FILE).exists():
            raise SourceError(
                f"{root} is unfinished or damaged: it has a {model_files.JOURNAL_FILE} and no config.json",
                "run the command that makes it again: it continues; or remove the directory",
            )
        if (root / "params.json").exists():
            raise SourceError(
                f"{root} holds a model in Mistral's own form (params.json), without a config.json",
                "take the repository's safetensors and config.json of transformers, which most have beside it",
            )
        below = sorted(str(path.parent) for path in root.glob("*/config.json"))
        hint = f"did you mean {' or '.join(below[:3])}?" if below else "give the directory that holds it"
        raise SourceError(f"{root} is not a checkpoint: it has no config.json", hint)

    config = read_json(root / "config.json", "config.json")
    if not isinstance(config, dict):
        raise SourceError(f"{root / 'config.json'} is not a JSON object", "download or copy it again")
    return config


def _architecture(root: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(_is_class(name) for name in names):
        raise SourceError(
            f"{root / 'config.json'} names no architecture (architectures: {json.dumps(names)[:200]})",
            'add the model class, such as "architectures": ["Qwen3ForCausalLM"]',
        )
    return str(names[0])


def _is_class(name: object) -> bool:
    return isinstance(name, str) and len(name) <= 200 and name.isprintable()


def _find_shards(root: Path, remote: Mapping[str, RemoteFile]) -> tuple[list[str], dict[str, str] | None]:
    """Return shard names in order, and the index's weight_map from tensor to shard; None without an index."""
    if (root / model_files.INDEX_FILE).exists():
        weight_map = _read_weight_map(root / model_files.INDEX_FILE)
        return sorted(set(weight_map.values())), weight_map

    if (root / model_files.SINGLE_FILE).exists() or model_files.SINGLE_FILE in remote:
        if others := sorted(fnmatch.filter({*_names(root), *remote}, "model-*-of-*.safetensors")):
            raise SourceError(
                f"{root} holds two models: {model_files.SINGLE_FILE}, and {others[0]} without an index",
                f"remove the older one, or copy the {model_files.INDEX_FILE} of the other",
            )
        return [model_files.SINGLE_FILE], None

    refuse_without_weights(root, _names(root))


def _read_weight_map(path: Path) -> dict[str, str]:
    """Return an index's weight_map from tensor to shard."""
    index = read_json(path, model_files.INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        weight_map = {}
    if not weight_map:
        raise SourceError(f"{path} has no weight_map of tensor to file names", "download or copy it again")

    first_tensors = {shard: tensor for tensor, shard in reversed(weight_map.items())}
    for shard, tensor in first_tensors.items():
        if not _is_plain(shard):
            raise SourceError(
                f"{path} places {model_files.short_repr(tensor)} in {model_files.short_repr(shard)}, "
                "which is not a plain file name",
                "shards must lie in the checkpoint's own directory",
            )
        if not shard.endswith(".safetensors"):
            raise SourceError(
                f"{path} places {model_files.short_repr(tensor)} in {shard}, which is not a safetensors file",
                "save the model with safe_serialization=True",
            )
    return weight_map


def _mtp_shards(root: Path, remote: Mapping[str, RemoteFile], config: dict[str, Any], names: list[str]) -> list[str]:
    """Return the shards of MTP layers that config.json has and the index lacks, as some tools save GLM-4.7.

    SGLang loads mtp.safetensors then (model_loader/weight_utils.py, maybe_add_mtp_safetensors), and vLLM does not
    (model_loader/weight_utils.py, filter_duplicate_safetensors_files).
    """
    text = config.get("text_config")
    decoder = text if isinstance(text, dict) else config
    counts = (decoder.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if not any(type(count) is int and count > 0 for count in counts):
        return []
    return sorted(fnmatch.filter({*_names(root), *remote} - {*names}, "*mtp*.safetensors"))


def _is_plain(name: str) -> bool:
    """Return whether a name is a plain file name on any system, without a directory."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\"} and name.isprintable() and len(name) <= 255


def _names(root: Path) -> list[str]:
    return [path.name for path in root.glob("*")]


def refuse_other_weights(place: Path | str, names: Collection[str]) -> None:
    """Refuse a directory or repository that has weights only in formats that are not read.

    Args:
        place: the directory or repository, for the message.
        names: paths of its files, relative to it.

    Raises:
        SourceError: it has an adapter, or pickled or GGUF weights, and neither model.safetensors nor its index.
    """
    if model_files.INDEX_FILE in names or model_files.SINGLE_FILE in names:
        return

    if "adapter_config.json" in names:
        raise SourceError(
            f"{place} holds only an adapter, not a model",
            "merge it into its base model first (peft: merge_and_unload, then save_pretrained of model and tokenizer)",
        )

    for pattern in ("*.bin", "*.pt", "*.pth"):
        for name in sorted(fnmatch.filter(names, pattern)):
            raise SourceError(
                f"{place} holds pickled weights ({name}); only safetensors are read",
                "convert them first: load with transformers and save_pretrained, model and tokenizer",
            )

    for name in sorted(fnmatch.filter(names, "*.gguf")):
        raise SourceError(
            f"{place} holds GGUF weights ({name}), which are read from a file",
            "download it if it is on the Hub, and give the path of the file",
        )


def refuse_without_weights(place: Path | str, names: Collection[str]) -> NoReturn:
    """Refuse a directory or repository without an index and without model.safetensors, with the reason.

    Args:
        place: the directory or repository, for the message.
        names: paths of its files, relative to it.

    Raises:
        SourceError: always.
    """
    refuse_other_weights(place, names)
    for name in sorted(fnmatch.filter(names, "*.safetensors")):
        raise SourceError(
            f"{place} holds {name} but neither {model_files.SINGLE_FILE} nor {model_files.INDEX_FILE}",
            "copy the index too, or rename a single file to " + model_files.SINGLE_FILE,
        )
    raise SourceError(f"{place} is not a checkpoint: it holds no safetensors weights", "check the path")


def _check_index(path: Path, weight_map: dict[str, str], where: dict[str, Location]) -> None:
    """Refuse an index that contradicts the shards."""
    if weight_map == {tensor: location.shard for tensor, location in where.items()}:
        return
    for tensor, shard in weight_map.items():
        if tensor not in where or where[tensor].shard != shard:
            raise SourceError(
                f"{path} places {model_files.short_repr(tensor)} in {shard}, which does not hold it", DAMAGED
            )
    for tensor, location in where.items():
        if tensor not in weight_map:
            raise SourceError(f"{location.shard} holds {tensor}, which {path} does not list", DAMAGED)


def _list_files(
    root: Path, shards: set[str], elsewhere: Mapping[str, int], copy: Collection[str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return `files` and `left_out` of a Checkpoint; `elsewhere` has sizes of files that are not in the directory."""
    here, closed = _walk(root)
    names = {*here, *elsewhere} - shards

    def read(name: str) -> bytes:
        path = root / name
        if not path.is_file() or path.stat().st_size > model_files.MAX_SMALL:
            return b""
        return model_files.read_small(path, str(path))

    files: dict[str, int] = {}
    for relative in sorted(model_files.belonging(names, read, copy)):
        size = elsewhere[relative] if relative in elsewhere else _size(root, relative)
        # The card is read into memory.
        if size is not None and (relative != model_files.CARD_FILE or size <= model_files.MAX_SMALL):
            files[relative] = size
    return files, _left_out((names - files.keys() - {model_files.INDEX_FILE}) | closed, files)


def _walk(root: Path) -> tuple[set[str], set[str]]:
    """Return the paths of all files, and those of the directories that are skipped, which end in a slash."""

    def fail(error: OSError) -> None:
        raise error

    here: set[str] = set()
    closed: set[str] = set()
    for folder, directories, names in os.walk(root, onerror=fail):
        base = Path(folder).relative_to(root)
        here |= {(base / name).as_posix() for name in names}
        for directory in sorted(directories):
            relative = f"{(base / directory).as_posix()}/"
            # A linked directory could lead anywhere, back to the root included.
            if model_files.left_out_part(relative) is not None or (root / relative).is_symlink():
                directories.remove(directory)
                closed.add(relative)
    return here, closed


def _size(root: Path, relative: str) -> int | None:
    """Return the size in bytes of a file to copy; None for what is no file, such as a pipe."""
    path = root / relative
    if path.is_symlink() and not path.exists():
        raise SourceError(f"{relative} is a broken link", "download or copy the checkpoint again")
    if not path.is_file():
        return None
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    size = path.stat().st_size
    # Pictures of a card are often left as pointers, and no engine reads them.
    if size <= model_files.MAX_POINTER and not relative.lower().endswith(_PICTURES):
        with model_files.open_regular(path, str(path)) as file:
            model_files.refuse_pointer(file.read(model_files.MAX_POINTER), str(path))
    return size


def _left_out(names: Collection[str], files: Collection[str]) -> tuple[str, ...]:
    """Return names that do not belong, and a directory for all below it if nothing there does."""
    kept = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    found = set()
    for name in names:
        parents = [parent.as_posix() for parent in reversed(PurePosixPath(name).parents)]
        found.add(next((f"{parent}/" for parent in parents[1:] if parent not in kept), name))
    return tuple(sorted(found))


# Size, mtime and ctime in ns, and inode of a file. While they are the same, so are its bytes.
Stamp = list[int]


def stamps_of(root: Path, shards: Iterable[str]) -> dict[str, Stamp]:
    """Return what shows without reading that shards are unchanged.

    Args:
        root: the directory of the checkpoint.
        shards: file names of the shards.

    Returns:
        By file name: [size in bytes, mtime in ns, ctime in ns, inode].

    Raises:
        SourceError: one cannot be read.
    """
    with readable():
        stats = {name: (root / name).stat() for name in shards}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats.items()}


class Fingerprint:
    """SHA-256 of a checkpoint: of its config.json, and of its shards' headers, sizes and contents.

    Args:
        checkpoint: the opened checkpoint.
        remote: its shards that are not in the directory, by name.
        commit: repository and commit that it comes from, which identify its shards; "" for a local checkpoint.
        stamps: stamps of local shards when the checkpoint was opened; taken now if None.

    Attributes:
        stamp: SHA-256 of config.json, headers, sizes, and the shards' stamps or the commit. Checkpoints with the same
            stamp have the same contents, but a copy has another stamp.

    Raises:
        SourceError: a shard cannot be read to take its stamp.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        remote: Mapping[str, RemoteFile] | None = None,
        commit: str = "",
        stamps: Mapping[str, Stamp] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.remote = remote or {}
        if stamps is None:
            local = [shard for shard in checkpoint.shards if not commit and shard not in self.remote]
            stamps = stamps_of(checkpoint.root, local)
        self._stamps = dict(stamps)
        self.stamp = self._sha256(commit, self._stamps)
        self._digests: dict[str, str] = {}

    def _sha256(self, *facts: object) -> str:
        everything = [self.checkpoint.config, self.checkpoint.headers, self.checkpoint.shards, *facts]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()

    def add(self, shard: str, path: Path) -> None:
        """Hash a shard, unless it was hashed before or the repository has its SHA-256.

        Args:
            shard: file name of the shard.
            path: where it lies now.

        Raises:
            SourceError: it cannot be read.
        """
        if shard not in self._digests:
            # Shards of a GGUF file are links to it, and have one stamp.
            stamp = self._stamps.get(shard)
            twins = (self._digests.get(other) for other in self._stamps if stamp and self._stamps[other] == stamp)
            known = next(filter(None, twins), None) or self._repository_sha256(shard)
            with readable():
                self._digests[shard] = known or model_files.file_sha256(path, str(path))

    def require_unchanged(self, shards: Iterable[str] | None = None) -> None:
        """Refuse shards that were written to since the checkpoint was opened.

        Args:
            shards: names of shards; all if None. Those without a stamp, as of a commit, are not checked.

        Raises:
            SourceError: one was, or is gone.
        """
        if shards is None:
            shards = self._stamps
        local = [shard for shard in shards if shard in self._stamps]
        for shard, now in stamps_of(self.checkpoint.root, local).items():
            # Without the inode, which some network file systems change; a replaced file has another ctime anyway.
            if now[:-1] != self._stamps[shard][:-1]:
                path = self.checkpoint.root / shard
                # Shards of a GGUF file are links to it.
                if path.resolve().suffix == ".gguf":
                    path = path.resolve()
                raise SourceError(
                    f"{path} changed while it was being read",
                    "let nothing write to the model or link its files meanwhile, and run the same command again",
                )

    def hexdigest(self) -> str:
        """Return the digest. Shards that were not added are read now, from the directory or the repository.

        Raises:
            SourceError: one cannot be read.
        """
        for shard in self.checkpoint.shards:
            if shard in self.remote and shard not in self._digests:
                self._digests[shard] = self._repository_sha256(shard) or _hash_remote(self.remote[shard])
            self.add(shard, self.checkpoint.root / shard)
        return self._sha256([self._digests[shard] for shard in self.checkpoint.shards])

    def matches(self, digest: str, stamp: str) -> bool:
        """Return whether a stored digest and stamp are this checkpoint's. Reads shards only if the stamp differs.

        Args:
            digest: `hexdigest()` of a checkpoint.
            stamp: `stamp` of the same checkpoint.

        Raises:
            SourceError: a shard cannot be read.
        """
        return stamp == self.stamp or digest == self.hexdigest()

    def _repository_sha256(self, shard: str) -> str | None:
        """Return the SHA-256 that the repository has of a shard; None if it has none."""
        if shard not in self.remote or len(self.remote[shard].digest) != 64:
            return None
        return self.remote[shard].digest


def _hash_remote(file: RemoteFile) -> str:
    digest = hashlib.sha256()
    for offset in range(0, file.size, model_files.PIECE):
        digest.update(file.read(offset, min(model_files.PIECE, file.size - offset)))
    return digest.hexdigest()
