"""Saves suspended forward passes to a file, so that a run that was stopped continues from there.

A pass is a suspended call stack, which cannot be saved. The file has the arguments that every pass calls its next unit
with. A continued pass starts again: it computes embeddings, units that an earlier run computed return zeros of the
right shapes, and the first unit that it did not gets the saved arguments. So only what goes from unit to unit counts,
and all of it is in those arguments; the model makes masks and rotary angles again.
tests/calibration/test_observers.py checks this for every architecture of the registry.

    checkpoint = PassCheckpoint(Path("x.part"), {"texts": "5f70bf.."})
    run_interleaved(passes, checkpoint=checkpoint, ...)
    checkpoint.remove()

The file begins with `_KIND`. Parts follow, each after its length as eight bytes, little-endian: the state, which says
what is computed of which run; the further bytes of the caller; and the arguments of each pass. State and arguments are
what torch.save writes. The last 32 bytes are the SHA-256 of all bytes before them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import OpenQuantError, OutputError, SourceError
from ..files.destination import write_pieces
from ..files.model_files import open_regular
from ..machine import first_line

# Least seconds between two saves, and least time between them as a multiple of what the last one took, so that saving
# takes at most a twentieth of a run.
EVERY, TIMES = 30.0, 20
_KIND = b"openquant passes 2\n"
_DIGEST = hashlib.sha256().digest_size
# Bytes hashed at a time.
_PIECE = 1 << 22
_AGAIN = "remove it to begin again"
_PLAIN = (type(None), bool, int, float, str)


class _UnsupportedError(Exception):
    """A unit takes or returns an object that cannot be saved."""


class PassCheckpoint:
    """A file that suspended passes are saved to, and that an earlier run may have saved passes to.

    Args:
        path: the file. While it is written, `PATH.new` lies beside it.
        about: what must be the same for passes to be continued, by the name that messages have for it:
            {"texts": "5f70bf.."}.
        extra: returns further bytes to save, such as observers' statistics; called whenever the file is written.

    Attributes:
        saved: the further bytes that an earlier run saved; None if there is no file, and passes start afresh.

    Raises:
        SourceError: the file is damaged, or was saved with another `about`.
        OutputError: another process uses the file.
    """

    def __init__(self, path: Path, about: Mapping[str, str], extra: Callable[[], bytes] = bytes) -> None:
        self.path = path
        self.extra = extra
        self.saved: bytes | None = None
        self._new_path = path.with_name(f"{path.name}.new")
        self._about = about
        self._last_write = time.monotonic()
        self._write_seconds = 0.0
        # What each computed unit returned to each pass, with zeros in its tensors.
        self._outputs: dict[str, list[Any]] = {}
        # The unit that passes were saved at, their number, and where in the file their arguments begin.
        self._unit = ""
        self._passes = 0
        self._calls_start = 0
        self._entered: set[str] = set()
        # Whether all that goes from unit to unit can be saved, and each unit is called once.
        self._supported = True

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
        """Read all but the arguments of the passes, once the digest is found to be right."""
        with self.continuing(), self._open() as file:
            if not _has_valid_digest(file):
                raise ValueError("it is damaged or incomplete")
            if file.read(len(_KIND)) != _KIND:
                raise ValueError("another version of openquant has saved it")

            state = _load(_read_part(file))
            about = dict(state["about"])
            self._unit = state["unit"]
            self._passes = state["passes"]
            self._outputs = dict(state["outputs"])
            self.saved = _read_part(file)
            self._calls_start = file.tell()

        for name, value in self._about.items():
            if about.get(name) != value:
                raise SourceError(
                    f"{self.path} is from a run with other {name}",
                    f"{_AGAIN}, or use the same {name}",
                )

    def _open(self) -> BinaryIO:
        return open_regular(self.path, str(self.path), _AGAIN, links=False)

    @contextmanager
    def continuing(self) -> Iterator[None]:
        """Turn errors that contents of the file cause inside this context into a SourceError that names the file."""
        try:
            yield
        except OpenQuantError:
            raise
        except Exception as error:
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

        with self.continuing():
            unknown = sorted({self._unit, *self._outputs} - set(units))
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
        """
        return _plain(self._outputs[unit][number], lambda tensor: _zeros(tensor.shape, tensor.dtype, device))

    def saved_calls(self, unit: str, waiting: Sequence[Any], device: str) -> Iterator[Any]:
        """Yield the saved arguments of each pass that waits for a unit; they can be taken once.

        Args:
            unit: its name.
            waiting: (args, kwargs) that each pass calls it with.
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
            if self._passes != len(waiting):
                raise ValueError(f"it has the arguments of {unit} for other passes")
            file = self._open()
        with file:
            file.seek(self._calls_start)
            for call in waiting:
                with self.continuing():
                    # A copy, because what torch.load returns cannot be resized, and so not be offloaded.
                    saved_call = _plain(_load(_read_part(file), device), torch.clone)
                    if not _matches(saved_call, call):
                        raise ValueError(f"{unit} is called with other arguments")
                yield _put_in_place(saved_call, call)

    def record_output(self, unit: str, output: Any) -> None:
        """Record structure, shapes and dtypes of what a unit returns to a pass; called for all passes, in their order.

        If it has an object that cannot be saved, passes are not saved from then on.
        """
        try:
            zeros = _plain(output, lambda tensor: _zeros(tensor.shape, tensor.dtype))
        except _UnsupportedError:
            self._supported = False
        else:
            self._outputs.setdefault(unit, []).append(zeros)

    def is_due(self, unit: str) -> bool:
        """Whether passes should be saved now that a unit is computed: they can be, and the last save is long ago."""
        elapsed = time.monotonic() - self._last_write
        return self._supported and unit in self._outputs and elapsed >= max(EVERY, TIMES * self._write_seconds)

    def write(self, unit: str, batches: Sequence[Sequence[Any]], in_memory: Callable[[int], Any]) -> None:
        """Save passes that wait for a unit. Nothing is written if an argument cannot be saved.

        Args:
            unit: its name.
            batches: for each batch, (args, kwargs) that each of its passes calls the unit with.
            in_memory: makes a context manager in which the tensors of the batch of that number are in memory.

        Raises:
            OutputError: the file cannot be written.
        """
        begin = time.monotonic()
        try:
            calls = [[_plain(call, lambda tensor: tensor) for call in batch] for batch in batches]
        except _UnsupportedError:
            return

        write_pieces(self.path, _pieces(self._parts(unit, calls, in_memory)), self._new_path)
        self._last_write = time.monotonic()
        self._write_seconds = self._last_write - begin

    def _parts(
        self, unit: str, batches: list[list[Any]], in_memory: Callable[[int], Any]
    ) -> Iterator[bytes | memoryview]:
        """Yield the parts of the file, the arguments of one pass at a time."""
        yield _dump(
            {
                "about": dict(self._about),
                "unit": unit,
                "passes": sum(map(len, batches)),
                "outputs": self._outputs,
            }
        )
        yield self.extra()
        for number, batch in enumerate(batches):
            with in_memory(number):
                for call in batch:
                    # A copy, because of a view torch.save writes all that it is a view of.
                    yield _dump(_plain(call, lambda tensor: tensor.clone(memory_format=torch.contiguous_format)))

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


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the contents of a file with these parts."""
    digest = hashlib.sha256(_KIND)
    yield _KIND
    for part in parts:
        for piece in (len(part).to_bytes(8, "little"), part):
            digest.update(piece)
            yield piece
    yield digest.digest()


def _has_valid_digest(file: BinaryIO) -> bool:
    """Whether the last 32 bytes of a file are the SHA-256 of those before them; it is at its beginning afterwards."""
    digest = hashlib.sha256()
    remaining = os.fstat(file.fileno()).st_size - _DIGEST
    while remaining > 0 and (data := file.read(min(remaining, _PIECE))):
        digest.update(data)
        remaining -= len(data)
    is_valid = file.read() == digest.digest()
    file.seek(0)
    return is_valid


def _read_part(file: BinaryIO) -> bytes:
    """Read the part of the file that begins where the file is."""
    return file.read(int.from_bytes(file.read(8), "little"))


def _dump(value: Any) -> memoryview:
    """What torch.save writes of a value."""
    file = BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def _load(data: bytes, device: str = "cpu") -> Any:
    """The value of what torch.save wrote; no code that the file names is run."""
    return torch.load(BytesIO(data), map_location=device, weights_only=True)


@cache
def _zeros(shape: torch.Size, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """An expanded zero, the same for all passes, so that torch.save writes it once."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _plain(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value as tuples, dicts and plain values that torch.load accepts, with each tensor changed.

    Raises:
        _UnsupportedError: it has an object that cannot be saved.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return tuple(_plain(item, change) for item in value)
    # transformers passes keys and values that layers share in a UserDict.
    if type(value) is dict or isinstance(value, UserDict):
        return {_plain(key, change): _plain(item, change) for key, item in value.items()}
    if getattr(value, "holds_nothing", False):
        return None
    raise _UnsupportedError


def _matches(saved: Any, current: Any) -> bool:
    """Whether a saved value has the structure, types, shapes and dtypes of the current one.

    A saved dict may have more keys, which units before this one added.
    """
    if isinstance(current, Tensor):
        return isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (current.shape, current.dtype)
    if isinstance(current, tuple):
        return type(saved) is tuple and len(saved) == len(current) and all(map(_matches, saved, current))
    if isinstance(current, (dict, UserDict)):
        return type(saved) is dict and all(key in saved and _matches(saved[key], current[key]) for key in current)
    return type(saved) is type(current) or (saved is None and hasattr(current, "holds_nothing"))


def _put_in_place(saved: Any, current: Any) -> Any:
    """A saved value in place of the current one. Dicts are updated: other code of the model may refer to them."""
    if isinstance(current, (dict, UserDict)):
        current.update({key: _put_in_place(value, current.get(key)) for key, value in saved.items()})
        return current
    if isinstance(current, tuple):
        return tuple(map(_put_in_place, saved, current))
    return current if saved is None else saved
