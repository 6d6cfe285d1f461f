"""Layers that were rounded before the conversion, each unit's in a file or more of a directory beside the output.

A file is whole or not there; it says what it belongs to and what its tensors hash to, so that a run which goes on
takes its own and no others.

    folder = RoundedFolder(Path("Qwen3-8B-INT4.rounded"), "5f70bf..")
    folder.claim()
    info = TensorInfo("model.layers.0.mlp.up_proj.weight_packed", "I32", (8, 1))
    folder.write(0, [(info, data)])         # {info: Place(.../000.safetensors, 184)}
    folder.read(0)                          # {.../000.safetensors: the same}; {} where this run has not written it
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
from .atomic import make_directory, write_whole
from .folder import Folder
from .journal import output_errors
from .shardfile import Bytes
from .small_files import parse_json
from .tensors import TensorInfo, make_header, read_header

_KIND = "openquant rounded"
# What a run has there: units, passes that wait, and either half-written.
_OURS = re.compile(r"\d{3,}(-\d+)?\.safetensors|[0-9a-f]{16}\.passes(\.new)?|\.openquant-[0-9a-f]{16}\.partial")
# Bytes that are hashed at a time.
_PIECE = 1 << 22


class TensorPlace(NamedTuple):
    """Where a tensor's bytes lie: a file, and the offset from its start."""

    path: Path
    offset: int


class LayerStore:
    """The directory of one run.

    Args:
        path: the directory; it may be missing.
        about: what the run is known by, hexadecimal.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path, self.about = path, about

    @property
    def passes(self) -> Path:
        """Where passes are kept that are not through all units."""
        return self.path / f"{self.about[:16]}.passes"

    @property
    def nbytes(self) -> int:
        """Bytes of the units that are there, this run's or another's."""
        found = (os.lstat(path) for path in self.path.glob("*.safetensors"))
        return sum(each.st_size for each in found if stat.S_ISREG(each.st_mode))

    def claim(self) -> None:
        """Make the directory, or remove what other runs left there.

        Raises:
            OutputError: it holds something that no run has there, or cannot be written.
        """
        with output_errors(self.path):
            make_directory(self.path)
            with Folder(self.path) as folder:
                strange = [name for name in folder.names() if not _OURS.fullmatch(name) or not folder.is_file(name)]
                if strange:
                    raise OutputError(
                        f"{self.path / strange[0]} was not made by openquant",
                        "move it away, or choose another directory with -o",
                    )
                for name in folder.names():
                    keeps = name.endswith(".safetensors") and self._header(folder, name) is not None
                    if not keeps and not name.startswith(self.passes.name):
                        folder.remove(name)

    def read(self, number: int) -> dict[Path, dict[TensorInfo, TensorPlace]]:
        """The tensors of a unit in each of its files, and where they lie; nothing if this run has rounded none of it.

        Raises:
            SourceError: a file is damaged.
        """
        return {path: found for path in self._paths(number) if (found := self._read(path)) is not None}

    def places(self) -> dict[str, TensorPlace]:
        """Where the tensors of all units lie that this run has rounded, by name; unread, as another process made them.

        Raises:
            SourceError: a file is damaged.
        """
        found: dict[str, TensorPlace] = {}
        with output_errors(self.path, "read"), Folder(self.path) as folder:
            for name in sorted(folder.names()):
                header = self._header(folder, name) if name.endswith(".safetensors") else None
                for info, offset in () if header is None else header[1]:
                    found[info.name] = TensorPlace(self.path / name, offset)
        return found

    def _paths(self, number: int) -> list[Path]:
        """The files of a unit that are there: 007.safetensors, or of its parts 007-0.safetensors and so on."""
        return sorted(self.path.glob(f"{number:03d}.safetensors")) + sorted(
            self.path.glob(f"{number:03d}-*.safetensors")
        )

    def _read(self, path: Path) -> dict[TensorInfo, TensorPlace] | None:
        with output_errors(path, "read"), Folder(self.path) as folder:
            found = self._header(folder, path.name)
            if found is None:
                return None
            said, tensors = found
            digest = self._digest([info for info, _ in tensors])
            with os.fdopen(folder.open(path.name, os.O_RDONLY), "rb") as file:
                file.seek(tensors[0][1] if tensors else 0, os.SEEK_SET if tensors else os.SEEK_END)
                while data := file.read(_PIECE):
                    digest.update(data)
        if digest.hexdigest() != said:
            raise damaged_file(path)
        return {info: TensorPlace(path, offset) for info, offset in tensors}

    def write(
        self, number: int, tensors: Sequence[tuple[TensorInfo, Bytes]], part: int | None = None
    ) -> dict[TensorInfo, TensorPlace]:
        """Write the tensors of a unit, or of a part of it, by a number of its own; where they lie.

        Raises:
            OutputError: there is no room, or the file cannot be written.
        """
        digest = self._digest([info for info, _ in tensors])
        for _, data in tensors:
            digest.update(data.data)
        facts = json.dumps({"about": self.about, "sha256": digest.hexdigest()})
        header, start = make_header([info for info, _ in tensors], {_KIND: facts})
        path = self.path / f"{number:03d}{'' if part is None else f'-{part}'}.safetensors"
        write_whole(path, header, *(data.data for _, data in tensors))
        places = {}
        for info, data in tensors:
            assert data.nbytes == info.nbytes
            places[info] = TensorPlace(path, start)
            start += info.nbytes
        return places

    def _digest(self, tensors: Sequence[TensorInfo]) -> hashlib._Hash:
        """The hash of a file's facts, to go on with its payload."""
        return hashlib.sha256(json.dumps([self.about, tensors]).encode())

    def remove(self) -> None:
        """Remove what runs have there, and the directory if that was all."""
        with suppress(OSError), Folder(self.path) as folder:
            for name in folder.names():
                if _OURS.fullmatch(name) and folder.is_file(name):
                    folder.remove(name)
        with suppress(OSError):
            self.path.rmdir()

    def _header(self, folder: Folder, name: str) -> tuple[str, list[tuple[TensorInfo, int]]] | None:
        """What a file should hash to, and where they lie; None if it is another run's."""
        handle = folder.open(name, os.O_RDONLY)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise damaged_file(self.path / name)

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            try:
                _, tensors = read_header(read, found.st_size, str(self.path / name))
                header: dict[str, Any] = json.loads(read(8, int.from_bytes(read(0, 8), "little")))
                facts = parse_json(header["__metadata__"][_KIND].encode(), name)
                about, said = facts["about"], facts["sha256"]
            except (SourceError, ValueError, LookupError, TypeError, AttributeError):
                raise damaged_file(self.path / name) from None
        return (str(said), tensors) if about == self.about else None


def damaged_file(path: Path) -> SourceError:
    """What is said of a file that is not what was written."""
    return SourceError(f"{path} is damaged", "remove it: its layers are rounded again")
