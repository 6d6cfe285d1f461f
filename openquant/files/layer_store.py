"""Stores the layers that GPTQ has quantized, in a directory beside the output, until the conversion copies them.

Each decoder layer has one or more files. A file is whole or missing, and names its run and the digest of its tensors,
so that a run that continues takes only its own files.

    store = LayerStore(Path("Qwen3-8B-INT4.rounded"), "5f70bf..")
    store.claim()
    info = TensorInfo("model.layers.0.mlp.up_proj.weight_packed", "I32", (8, 1))
    store.write(0, [(info, data)])          # {info: TensorPlace(.../000.safetensors, 184)}
    store.read(0)                           # {.../000.safetensors: the same}; {} if this run has not written layer 0
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OutputError, SourceError
from .destination import write_atomic
from .journal import output_errors
from .shardfile import Bytes
from .small_files import parse_json
from .tensors import TensorInfo, make_header, read_header

_KIND = "openquant rounded"
# Files of a run: layers, the pass checkpoint, and unfinished ones of both.
_OURS = re.compile(r"\d{3,}(-\d+)?\.safetensors|[0-9a-f]{16}\.passes(\.new)?|\.openquant-[0-9a-f]{16}\.partial")
# Bytes that are hashed at a time.
_PIECE = 1 << 22


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

    @property
    def pass_checkpoint(self) -> Path:
        """Path of the pass checkpoint, from which an interrupted pass continues."""
        return self.path / f"{self.run_digest[:16]}.passes"

    @property
    def nbytes(self) -> int:
        """Size of all stored layers in bytes, this run's or another's."""
        statuses = (os.lstat(path) for path in self.path.glob("*.safetensors"))
        return sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))

    def claim(self) -> None:
        """Make the directory, or remove the files of other runs from it.

        Raises:
            OutputError: it has a file that no run writes, or cannot be written.
            SourceError: the header of a file with layers is damaged.
        """
        with output_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            paths = sorted(self.path.iterdir())
            foreign = [path for path in paths if not _is_ours(path)]
            if foreign:
                raise OutputError(
                    f"{foreign[0]} was not made by openquant",
                    "move it away, or choose another directory with -o",
                )

            for path in paths:
                is_own_layer = path.suffix == ".safetensors" and self._header(path) is not None
                if not is_own_layer and not path.name.startswith(self.pass_checkpoint.name):
                    path.unlink()

    def read(self, number: int) -> dict[Path, dict[TensorInfo, TensorPlace]]:
        """Return where the tensors of a decoder layer lie, for each of its files; their digests are checked.

        Args:
            number: number of the decoder layer.

        Returns:
            Places of tensors, by path; empty if this run has not quantized the layer.

        Raises:
            SourceError: a file is damaged.
            OutputError: a file cannot be read.
        """
        return {path: places for path in self._paths(number) if (places := self._read(path)) is not None}

    def places(self) -> dict[str, TensorPlace]:
        """Return where the tensors of all layers of this run lie, by tensor name. Only headers are read, no digest is
        checked.

        Raises:
            SourceError: a file is damaged.
        """
        places: dict[str, TensorPlace] = {}
        with output_errors(self.path, "read"):
            for path in sorted(self.path.glob("*.safetensors")):
                header = self._header(path)
                if header is None:
                    continue
                for info, offset in header[1]:
                    places[info.name] = TensorPlace(path, offset)
        return places

    def _paths(self, number: int) -> list[Path]:
        """Return the existing files of a layer: 007.safetensors, or 007-0.safetensors and so on for its parts."""
        return sorted(self.path.glob(f"{number:03d}.safetensors")) + sorted(
            self.path.glob(f"{number:03d}-*.safetensors")
        )

    def _read(self, path: Path) -> dict[TensorInfo, TensorPlace] | None:
        """Return where the tensors of a file lie; None if it is another run's."""
        with output_errors(path, "read"):
            header = self._header(path)
            if header is None:
                return None

            expected_digest, tensors = header
            digest = self._digest([info for info, _ in tensors])
            with path.open("rb") as file:
                file.seek(tensors[0][1] if tensors else 0, os.SEEK_SET if tensors else os.SEEK_END)
                while data := file.read(_PIECE):
                    digest.update(data)
        if digest.hexdigest() != expected_digest:
            raise damaged_file(path)
        return {info: TensorPlace(path, offset) for info, offset in tensors}

    def write(
        self, number: int, tensors: Sequence[tuple[TensorInfo, Bytes]], part: int | None = None
    ) -> dict[TensorInfo, TensorPlace]:
        """Write tensors of a decoder layer to a file.

        Args:
            number: number of the decoder layer.
            tensors: its tensors, each with its bytes, uint8.
            part: number of the part, if the layer is written in several files; None for a single file.

        Returns:
            Where each tensor lies.

        Raises:
            OutputError: the disk is full, or the file cannot be written.
        """
        digest = self._digest([info for info, _ in tensors])
        for _, data in tensors:
            digest.update(data.data)
        facts = json.dumps({"about": self.run_digest, "sha256": digest.hexdigest()})
        header = make_header([info for info, _ in tensors], {_KIND: facts})
        path = self.path / f"{number:03d}{'' if part is None else f'-{part}'}.safetensors"
        write_atomic(path, header, *(data.data for _, data in tensors))
        places = {}
        start = len(header)
        for info, data in tensors:
            assert data.nbytes == info.nbytes
            places[info] = TensorPlace(path, start)
            start += info.nbytes
        return places

    def _digest(self, tensors: Sequence[TensorInfo]) -> hashlib._Hash:
        """Return a hash of the run and the tensors' descriptions, to be updated with their bytes."""
        return hashlib.sha256(json.dumps([self.run_digest, tensors]).encode())

    def remove(self) -> None:
        """Remove all files of runs, and the directory if it is then empty."""
        with suppress(OSError):
            for path in self.path.iterdir():
                if _is_ours(path):
                    path.unlink()
            self.path.rmdir()

    def _header(self, path: Path) -> tuple[str, list[tuple[TensorInfo, int]]] | None:
        """Return the digest in a file's header, and its tensors with their offsets; None if it is another run's."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            try:
                _, tensors = read_header(read, size, str(path))
                header: dict[str, Any] = json.loads(read(8, int.from_bytes(read(0, 8), "little")))
                facts = parse_json(header["__metadata__"][_KIND].encode(), path.name)
                run_digest = facts["about"]
                digest = facts["sha256"]
            except (SourceError, ValueError, LookupError, TypeError, AttributeError):
                raise damaged_file(path) from None
        return (str(digest), tensors) if run_digest == self.run_digest else None


def _is_ours(path: Path) -> bool:
    """Return whether a path can be that of a file that a run wrote."""
    return _OURS.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def damaged_file(path: Path) -> SourceError:
    """Return the error for a file of stored layers that is not as it was written. The caller raises it.

    Args:
        path: the file.
    """
    return SourceError(f"{path} is damaged", "remove it; its layers are then quantized again")
