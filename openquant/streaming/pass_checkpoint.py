"""Saves suspended forward passes to a file, so that a run that was stopped continues from there.

A pass is a suspended call stack, which cannot be saved. The file has the arguments that every pass calls its next unit
with. A continued pass starts again: it computes embeddings, units that an earlier run computed return zeros of the
right shapes, and the first unit that it did not gets the saved arguments. So only what goes from unit to unit counts,
and all of it is in those arguments; the model makes masks and rotary angles again.
tests/calibration/test_observers.py checks this for every architecture of the registry.

    checkpoint = PassCheckpoint(Path("x.part"), lambda: {"texts": "5f70bf.."})
    run_interleaved(passes, checkpoint=checkpoint, ...)
    checkpoint.remove()

The file is a safetensors file whose last 32 bytes are the SHA-256 of all bytes before them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import OutputError, SourceError
from ..files.small_files import open_regular
from ..files.tensors import TensorInfo, read_header
from ..machine import first_line

# Least seconds between two saves, and least time between them as a multiple of what the last one took, so that saving
# takes at most a twentieth of a run.
EVERY, TIMES = 30.0, 20
_KIND = "openquant passes"
_DIGEST = hashlib.sha256().digest_size
# Bytes hashed at a time.
_PIECE = 1 << 22
_AGAIN = "remove it to begin again"
# What reading raises for a file whose digest is right, but whose contents this module did not write.
_BAD_CONTENT = (
    SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError,
    OverflowError,
)  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)

Json = Any


class _UnsupportedError(Exception):
    """A unit takes or returns an object that cannot be saved."""


class PassCheckpoint:
    """A file that suspended passes are saved to, and that an earlier run may have saved passes to.

    Args:
        path: the file. While it is written, `PATH.new` lies beside it.
        about: returns what must be the same for passes to be continued, by the name that messages have for it:
            {"texts": "5f70bf.."}.
        extra: returns further bytes to save, such as observers' statistics; called whenever the file is written.

    Attributes:
        saved: the further bytes that an earlier run saved; None if there is no file, and passes start afresh.

    Raises:
        SourceError: the file is damaged, or was saved with another `about`.
        OutputError: another process uses the file.
    """

    def __init__(self, path: Path, about: Callable[[], Mapping[str, str]], extra: Callable[[], bytes] = bytes) -> None:
        self.path, self.extra = path, extra
        self._new_path = path.with_name(f"{path.name}.new")
        self.saved: bytes | bytearray | None = None
        self._about, self._last_write, self._write_seconds = about, time.monotonic(), 0.0
        # Descriptions of outputs and arguments, each once: thousands of passes have few different shapes.
        self._descriptions: list[Json] = []
        self._numbers: dict[str, int] = {}
        # For each computed unit the number of its output's description, of each pass.
        self._outputs: dict[str, list[int]] = {}
        # The unit that passes were saved at, and the description of the arguments that each calls it with, by
        # "BATCH.NUMBER".
        self._unit = ""
        self._calls: dict[str, int] = {}
        self._entered: set[str] = set()
        # Whether all that goes from unit to unit can be saved, and each unit is called once.
        self._supported = True
        # Offset and size in bytes of each tensor in the file.
        self._locations: dict[str, tuple[int, int]] = {}
        for name in (path, self._new_path):
            if os.path.lexists(name) and not stat.S_ISREG(os.lstat(name).st_mode):
                raise SourceError(f"{name} is not a regular file", _AGAIN)
        self._release_lock = self._take_lock()
        if os.path.lexists(path):
            self._read()

    def _take_lock(self) -> Callable[[], object]:
        """Refuse a file that another process uses. Returns what gives it free, as the end of this object does."""
        # Not beside the file, where a killed run would leave it.
        name = hashlib.sha256(os.fsencode(self.path.absolute())).hexdigest()
        path = Path(tempfile.gettempdir(), f"openquant-{name[:16]}.lock")
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            # Another user's, or nothing can be written.
            return lambda: None

        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            # Others say that this file system has no locks.
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return lambda: None
            raise OutputError(
                f"another run is using {self.path}", "wait until it has ended, or give another place"
            ) from None
        return weakref.finalize(self, _release, handle, path)

    def _read(self) -> None:
        with self.continuing(), self._open() as file:
            size = os.fstat(file.fileno()).st_size
            tensors = _tensors(file, size)
            # The header is checked first: a sparse file that is larger than it says could take hours to hash.
            if tensors is None or not _has_valid_digest(file, size):
                raise ValueError("it is damaged or incomplete")
            facts = json.loads(_metadata(file)[_KIND])
            about = facts["about"]
            if not (isinstance(about, dict) and isinstance(facts["unit"], str)):
                raise TypeError("its metadata are incomplete")
            self._outputs, self._unit, self._calls = dict(facts["gave"]), facts["unit"], dict(facts["calls"])
            self._descriptions = list(facts["descriptions"])
            self._numbers = {json.dumps(known): number for number, known in enumerate(self._descriptions)}
            self._locations = {info.name: (offset, info.nbytes) for info, offset in tensors}
            self.saved = self._read_tensor("own", file) if "own" in self._locations else b""
        for name, value in self._about().items():
            if about.get(name) != value:
                raise SourceError(
                    f"{self.path} is from a run with other {name}",
                    f"{_AGAIN}, or use the same {name}",
                )

    def _open(self) -> BinaryIO:
        return open_regular(self.path, str(self.path), _AGAIN, links=False)

    def _read_tensor(self, name: str, file: BinaryIO) -> bytearray:
        offset, nbytes = self._locations[name]
        data = bytearray(nbytes)
        if os.preadv(file.fileno(), [data], offset) != nbytes:
            raise ValueError(f"{name} ends early")
        return data

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Turn errors that contents of the file cause inside this context into a SourceError that names the file."""
        try:
            yield
        except _BAD_CONTENT as error:
            raise SourceError(f"{self.path} cannot be continued: {first_line(error)[:200]}", _AGAIN) from None

    def require_units(self, units: Collection[str], last: str) -> None:
        """Check that the file fits the model and that some unit is left to compute.

        Args:
            units: names of the model's units.
            last: the last unit to compute; "" if all are.

        Raises:
            SourceError: the file names a unit that the model does not have, or all units are computed.
        """
        if self.saved is None:
            return
        unknown = sorted({self._unit, *self._outputs} - set(units))
        with self.continuing():
            if unknown:
                raise ValueError(f"the model has no {unknown[0]}")
            if self._unit in self._outputs or last in self._outputs:
                raise ValueError(f"no unit is left to compute at {self._unit}")

    @property
    def done(self) -> frozenset[str]:
        """Names of the units that are computed, embedding tables left out."""
        return frozenset(self._outputs)

    def enter_unit(self, unit: str, is_embedding: bool = False) -> bool:
        """Note that passes reach a unit.

        Args:
            unit: its name.
            is_embedding: whether it is an embedding table, which is always computed again.

        Returns:
            Whether an earlier run computed the unit, so that it is skipped.

        Raises:
            SourceError: the unit comes before the one that passes were saved at, but was not computed.
        """
        self._supported = self._supported and unit not in self._entered
        self._entered.add(unit)
        if not self._unit or unit == self._unit or is_embedding:
            return False
        with self.continuing():
            if unit not in self._outputs:
                raise ValueError(f"{unit} comes before {self._unit}, but was not computed")
        return True

    def refuse_units(self) -> None:
        """Note that passes wait for different units: they are not saved from then on.

        Raises:
            SourceError: the file has passes, which were not saved in such a run.
        """
        self._supported = False
        if self._unit:
            with self.continuing():
                raise ValueError(f"passes do not reach {self._unit} together")

    def zero_output(self, unit: str, number: int, device: str) -> Any:
        """Return what a computed unit returns, with zeros in its tensors, on a device such as "cpu".

        Args:
            unit: name of a unit of `done`.
            number: number of the pass among those of all batches.
            device: the device of the tensors, which are expanded scalars.

        Raises:
            SourceError: the file's description of the output is invalid.
        """

        def zeros(_: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device).expand(*shape)

        with self.continuing():
            return _rebuild(self._descriptions[self._outputs[unit][number]], None, zeros)

    def saved_calls(self, unit: str, waiting: Sequence[tuple[int, int, Any]], device: str) -> Iterator[Any]:
        """Yield the saved arguments of each pass that waits for a unit; they can be taken once.

        Args:
            unit: its name.
            waiting: batch number, number in the batch, and (args, kwargs) of each pass.
            device: where tensors are put.

        Yields:
            (args, kwargs) for each pass, in the order of `waiting`; none if passes were saved at another unit. Dicts of
            the current arguments are updated in place.

        Raises:
            SourceError: the file has other passes, or arguments of another structure.
        """
        if unit != self._unit:
            return
        self._unit = ""
        with self.continuing():
            if self._calls.keys() != {f"{batch}.{number}" for batch, number, _ in waiting}:
                raise ValueError(f"it has the arguments of {unit} for other passes")
        with self.continuing():
            file = self._open()
        with file:
            for batch, number, call in waiting:

                def read(
                    index: int, shape: Sequence[int], dtype: torch.dtype, batch: int = batch, number: int = number
                ) -> Tensor:
                    if 0 in shape:
                        return torch.empty(*shape, dtype=dtype, device=device)
                    flat = torch.frombuffer(self._read_tensor(f"{batch}.{number}.{index}", file), dtype=torch.uint8)
                    return flat.view(dtype).reshape(*shape).to(device)

                with self.continuing():
                    description = self._descriptions[self._calls[f"{batch}.{number}"]]
                    if not _matches(description, call) or _keywords(description) != call[1].keys():
                        raise ValueError(f"{unit} is called with other arguments")
                    saved_call = _rebuild(description, call, read)
                yield saved_call

    def record_output(self, unit: str, output: Any) -> None:
        """Record structure, shapes and dtypes of what a unit returns to a pass; called for all passes, in their order.

        If it has an object that cannot be saved, passes are not saved from then on.
        """
        try:
            self._outputs.setdefault(unit, []).append(self._number(_describe(output, [])))
        except _UnsupportedError:
            self._supported = False

    def _number(self, description: Json) -> int:
        """The number of a description among all different ones."""
        number = self._numbers.setdefault(json.dumps(description), len(self._descriptions))
        if number == len(self._descriptions):
            self._descriptions.append(description)
        return number

    def is_due(self, unit: str) -> bool:
        """Whether passes should be saved now that a unit is computed: they can be, and the last save is long ago."""
        elapsed = time.monotonic() - self._last_write
        return self._supported and unit in self._outputs and elapsed >= max(EVERY, TIMES * self._write_seconds)

    def write(self, unit: str, batches: Sequence[Sequence[Any]], in_memory: Callable[[int], Any]) -> None:
        """Save passes that wait for a unit. Nothing is written if an argument cannot be saved, or if there are more
        passes than a header can name.

        Args:
            unit: its name.
            batches: for each batch, (args, kwargs) that each of its passes calls the unit with.
            in_memory: makes a context manager in which the tensors of the batch of that number are in memory.

        Raises:
            OutputError: the file cannot be written.
        """
        begin = time.monotonic()
        calls: dict[str, int] = {}
        # For each batch, its tensors and their names in the file.
        tensors: list[list[tuple[str, Tensor]]] = []
        try:
            for at, batch in enumerate(batches):
                tensors.append([])
                for number, call in enumerate(batch):
                    arguments: list[Tensor] = []
                    calls[f"{at}.{number}"] = self._number(_describe(call, arguments))
                    tensors[-1] += [(f"{at}.{number}.{index}", tensor) for index, tensor in enumerate(arguments)]
        except _UnsupportedError:
            return
        extra = self.extra()
        facts = {
            "about": dict(self._about()),
            "unit": unit,
            "descriptions": self._descriptions,
            "gave": self._outputs,
            "calls": calls,
        }
        header: dict[str, Json] = {"__metadata__": {_KIND: json.dumps(facts)}}
        end = 0
        sizes = [("own", len(extra))]
        sizes += [(name, tensor.numel() * tensor.element_size()) for batch in tensors for name, tensor in batch]
        sizes += [("sha256", _DIGEST)]
        # read_header refuses tensors without elements.
        for name, size in ((name, size) for name, size in sizes if size):
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        data = len(data).to_bytes(8, "little") + data
        if _tensors(BytesIO(data), len(data) + end) is None:
            return
        new = self._new_path
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256()

                def put(data: Any) -> None:
                    digest.update(data)
                    file.write(data)

                put(data + extra)
                for at, named_tensors in enumerate(tensors):
                    with in_memory(at):
                        for _, tensor in named_tensors:
                            put(_bytes(tensor))
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise OutputError(
                f"{self.path} cannot be written: {error.strerror or error}",
                "free some space, or give another place",
            ) from error
        self._last_write, self._write_seconds = time.monotonic(), time.monotonic() - begin

    def remove(self) -> None:
        """Delete the file, once all units are computed."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self._new_path.unlink(missing_ok=True)
        self._release_lock()


def _release(handle: int, path: Path) -> None:
    """Give a lock back and delete its file."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(handle)


def _has_valid_digest(file: BinaryIO, size: int) -> bool:
    """Whether the last 32 of a file's `size` bytes are the SHA-256 of those before them."""
    digest, remaining = hashlib.sha256(), size - _DIGEST
    file.seek(0)
    while remaining and (data := file.read(min(remaining, _PIECE))):
        digest.update(data)
        remaining -= len(data)
    return file.read(_DIGEST + 1) == digest.digest()


def _tensors(file: BinaryIO, size: int) -> list[tuple[TensorInfo, int]] | None:
    """The tensors of a safetensors file of `size` bytes and their offsets; None if its header is wrong."""

    def read(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    try:
        return read_header(read, size, "it")[1]
    except SourceError:
        return None


def _metadata(file: BinaryIO) -> Any:
    file.seek(0)
    return json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]


def _matches(description: Json, current: Any) -> bool:
    """Whether a described value has the structure, types, shapes and dtypes of the current one.

    A described dict may have more keys, which units before this one added.
    """
    [(kind, content)] = _kind_and_content(description)
    if kind == "own":
        # None stands in for an object that holds nothing.
        return current is None or bool(getattr(current, "holds_nothing", False))
    if isinstance(current, Tensor):
        dtype = str(current.dtype).removeprefix("torch.")
        return kind == "tensor" and (description["shape"], description["dtype"]) == (list(current.shape), dtype)
    if type(current) in _PLAIN:
        return kind == "plain" and type(content) is type(current)
    if type(current) is tuple:
        return kind == "tuple" and len(content) == len(current) and all(map(_matches, content, current))
    if isinstance(current, (dict, UserDict)):
        items = dict(content) if kind == ("dict" if isinstance(current, dict) else "shared") else {}
        return all(key in items and _matches(items[key], value) for key, value in current.items())
    return False


def _kind_and_content(description: Json) -> list[tuple[str, Json]]:
    return [(key, value) for key, value in description.items() if key not in ("shape", "dtype")]


def _keywords(call: Json) -> Collection[str]:
    """The keywords of described (args, kwargs)."""
    return dict(call["tuple"][1]["dict"]).keys()


def _bytes(tensor: Tensor) -> Any:
    # Of a copy: a storage that numpy has seen cannot be resized, so it could not be offloaded any more.
    copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy().data


def _describe(value: Any, tensors: list[Tensor]) -> Json:
    """Describe a value as JSON and append its tensors to a list; `_rebuild` makes the value from both.

    A description is such as {"tuple": [{"tensor": 0, "shape": [1, 48, 64], "dtype": "bfloat16"}, {"plain": null}]}.

    Raises:
        _UnsupportedError: it has an object that cannot be saved.
    """
    if isinstance(value, Tensor):
        index = next((at for at, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if index == len(tensors):
            tensors.append(value)
        return {"tensor": index, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in _PLAIN:
        return {"plain": value}
    if type(value) is tuple:
        return {"tuple": [_describe(item, tensors) for item in value]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, UserDict):
        # Keys and values that layers share, as transformers passes them to layers that reuse those of others.
        return {"shared": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if getattr(value, "holds_nothing", False):
        return {"own": None}
    raise _UnsupportedError


def _rebuild(description: Json, current: Any, tensor: Callable[[int, Sequence[int], torch.dtype], Tensor]) -> Any:
    """Make a described value. Dicts are updated in place, because other code of the model may refer to them.

    Args:
        description: made by `_describe`.
        current: the value that is replaced.
        tensor: returns the tensor of that number, shape and dtype.
    """
    [(kind, content)] = _kind_and_content(description)
    if kind == "tensor":
        dtype = getattr(torch, description["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{description['dtype']} is not a dtype")
        return tensor(content, description["shape"], dtype)
    if kind == "plain":
        return content
    if kind == "own":
        return current
    if kind in ("dict", "shared"):
        target = current if isinstance(current, dict if kind == "dict" else UserDict) else {}
        if kind == "shared" and target is not current:
            raise TypeError(f"{type(current).__name__} in place of shared keys and values")
        items = {key: _rebuild(item, target.get(key), tensor) for key, item in content}
        target.clear()
        target.update(items)
        return target
    if kind != "tuple":
        raise TypeError(f"{kind} is not a known kind of argument")
    parts = current if type(current) is tuple and len(current) == len(content) else [None] * len(content)
    return tuple(_rebuild(item, part, tensor) for item, part in zip(content, parts, strict=True))
