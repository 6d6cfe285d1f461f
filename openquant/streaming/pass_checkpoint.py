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
what is computed of which run, with what the caller has measured; and the arguments of each pass. All are what
torch.save writes. The last 32 bytes are the SHA-256 of all bytes before them, so that a file whose digest is right is
one that such a run has written.
"""

from __future__ import annotations

import os
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import SourceError
from ..files.destination import write_pieces
from ..files.model_files import open_regular

# Least seconds between two saves, and least time between them as a multiple of what the last one took, so that saving
# takes at most a twentieth of a run.
EVERY, TIMES = 30.0, 20
_KIND = b"openquant passes 3\n"
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

    Attributes:
        extra: returns what else is saved, such as observers' statistics: tensors and plain values in dicts and lists.
            Called whenever the file is written.
        saved: what `extra` returned in an earlier run; None if there is no file, and passes start afresh.

    Raises:
        SourceError: the file is damaged, or was saved with another `about`.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path = path
        self.extra: Callable[[], Any] = dict
        self.saved: Any = None
        self._new_path = path.with_name(f"{path.name}.new")
        self._about = about
        self._last_write = time.monotonic()
        self._write_seconds = 0.0
        # What each computed unit returned to each pass, with zeros in its tensors.
        self._outputs: dict[str, list[Any]] = {}
        # The unit that passes were saved at, and where in the file their arguments begin.
        self._unit = ""
        self._calls_start = 0
        self._entered: set[str] = set()
        # Whether all that goes from unit to unit can be saved.
        self._supported = True

        if os.path.lexists(path):
            self._read()

    def _read(self) -> None:
        """Read all but the arguments of the passes."""
        with self._open() as file:
            if file.read(len(_KIND)) != _KIND:
                raise SourceError(f"{self.path} cannot be continued: it is of another version", _AGAIN)
            state = self._load_part(file)
            self._calls_start = file.tell()
            self._inode = os.fstat(file.fileno()).st_ino

        for name, value in self._about.items():
            if state["about"].get(name) != value:
                raise SourceError(f"{self.path} is from a run with other {name}", f"{_AGAIN}, or use the same {name}")

        self._unit = state["unit"]
        self._outputs = state["outputs"]
        self.saved = state["measured"]

    def _load_part(self, file: BinaryIO, device: str = "cpu") -> Any:
        """Load the part of the file that begins where the file is."""
        try:
            return load(file.read(int.from_bytes(file.read(8), "little")), device)
        # torch has many for a file that is cut off.
        except Exception as error:
            raise SourceError(f"{self.path} cannot be continued: it is damaged", _AGAIN) from error

    def _open(self) -> BinaryIO:
        return open_regular(self.path, str(self.path), _AGAIN, links=False)

    @property
    def done(self) -> frozenset[str]:
        """Names of the units that are computed, embedding tables left out."""
        return frozenset(self._outputs)

    def enter_unit(self, unit: str, is_embedding: bool) -> bool:
        """Note that passes reach a unit, and return whether an earlier run computed it, so that it is skipped.

        Args:
            unit: its name.
            is_embedding: whether it is an embedding table, which is always computed again.
        """
        self._entered.add(unit)
        return self._unit not in ("", unit) and not is_embedding

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
        """
        if unit != self._unit:
            return

        self._unit = ""
        with self._open() as file:
            if os.fstat(file.fileno()).st_ino != self._inode:
                raise SourceError(f"{self.path} cannot be continued: another run has saved it meanwhile", _AGAIN)
            file.seek(self._calls_start)
            for call in waiting:
                # A copy, because what torch.load returns cannot be resized, and so not be offloaded.
                yield _put_in_place(_plain(self._load_part(file, device), torch.clone), call)

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
        return self._supported and unit in self._outputs and self._is_long_ago()

    def _is_long_ago(self) -> bool:
        return time.monotonic() - self._last_write >= max(EVERY, TIMES * self._write_seconds)

    def write_measured(self, is_last: bool) -> None:
        """Save what `extra` returns alone, between passes, if the last save is long ago or no pass follows.

        Raises:
            OutputError: the file cannot be written.
        """
        if is_last or self._is_long_ago():
            self.write("", [], lambda _: None)

    def write(self, unit: str, batches: Sequence[Sequence[Any]], in_memory: Callable[[int], Any]) -> None:
        """Save passes that wait for a unit. Nothing is written if they wait for it a second time, as in models that
        repeat layers, or if an argument cannot be saved.

        Args:
            unit: its name.
            batches: for each batch, (args, kwargs) that each of its passes calls the unit with.
            in_memory: makes a context manager in which the tensors of the batch of that number are in memory.

        Raises:
            OutputError: the file cannot be written.
        """
        # An earlier call of the unit would get the arguments of this one.
        if unit in self._entered:
            return

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
        yield dump({"about": dict(self._about), "unit": unit, "outputs": self._outputs, "measured": self.extra()})
        for number, batch in enumerate(batches):
            with in_memory(number):
                for call in batch:
                    # A copy, because of a view torch.save writes all that it is a view of.
                    yield dump(_plain(call, lambda tensor: tensor.clone(memory_format=torch.contiguous_format)))

    def remove(self) -> None:
        """Delete the file, once all units are computed."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self._new_path.unlink(missing_ok=True)


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the contents of a file with these parts."""
    yield _KIND
    for part in parts:
        yield len(part).to_bytes(8, "little")
        yield part


def dump(value: Any) -> memoryview:
    """Return what torch.save writes of a value: tensors and plain values in dicts, lists and tuples."""
    file = BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def load(data: bytes, device: str = "cpu") -> Any:
    """Return the value of what `dump` wrote; no code that the data name is run."""
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


def _put_in_place(saved: Any, current: Any) -> Any:
    """A saved value in place of the current one. Dicts are updated: other code of the model may refer to them."""
    if isinstance(current, (dict, UserDict)):
        current.update({key: _put_in_place(value, current.get(key)) for key, value in saved.items()})
        return current
    if isinstance(current, tuple):
        return tuple(map(_put_in_place, saved, current))
    return current if saved is None else saved
