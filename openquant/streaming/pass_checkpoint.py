"""Passes kept in a file as they wait before a unit, so that what ends before its end goes on from there.

A pass is a suspended call stack, which no file can hold. Continued passes begin at their beginning and compute
embeddings; units that were done give zeros of the right shapes, and the first that was not is called with what the
file has. So of a model's own code only what goes from unit to unit counts, all of which is in that call; its masks and
angles are made anew.
tests/measure/test_calibrate.py holds that for every architecture of the registry.

    kept = Kept(Path("x.part"), lambda: {"texts": "5f70bf.."})
    run(passes, kept=kept, ...)         # and after it kept.remove()

The file is a safetensors file whose last 32 bytes are the SHA-256 of all bytes before them.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import OutputError, SourceError
from ..files.atomic import make_directory
from ..files.small_files import open_regular
from ..files.tensors import TensorInfo, read_header
from ..machine import first_line

# Seconds between writings, and how many times as long as the last one took: what is lost is less than what it costs.
EVERY, TIMES = 30.0, 20
_KIND = "openquant passes"
_DIGEST = hashlib.sha256().digest_size
# Bytes that are hashed at a time.
_PIECE = 1 << 22
_AGAIN = "remove it to begin again"
# What reading a file raises that is sound by its digest and has something else in it than what is written there.
_WRONG = (
    SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError,
    OverflowError,
)  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)

Json = Any


class _Unknown(Exception):
    """What a unit is called with, or gives, is nothing that a file has."""


class PassCheckpoint:
    """Where passes are kept, and those that are found there.

    Args:
        path: the file, which nothing else has. While it is written anew `PATH.new` lies beside it.
        about: what must be the same for passes to be continued, by its name in messages: {"texts": "5f70bf.."}.
        own: what else is to be kept, asked for whenever the file is written.

    Attributes:
        found: what else was kept; None where nothing was, and passes begin at their beginning.

    Raises:
        SourceError: what lies there is damaged, or about something else.
    """

    def __init__(self, path: Path, about: Callable[[], Mapping[str, str]], own: Callable[[], bytes] = bytes) -> None:
        self.path, self.own = path, own
        self._new = path.with_name(f"{path.name}.new")
        self.found: bytes | bytearray | None = None
        self._about, self._last, self._took = about, time.monotonic(), 0.0
        # What each unit gave, without its numbers.
        self._gave: dict[str, Json] = {}
        self._unit = ""
        self._calls: dict[str, Json] = {}
        self._begun: set[str] = set()
        # Whether a file has all that goes from unit to unit, and a unit's name says where a pass is.
        self._able = True
        # Of each tensor in the file offset and size.
        self._places: dict[str, tuple[int, int]] = {}
        for name in (path, self._new):
            if os.path.lexists(name) and not stat.S_ISREG(os.lstat(name).st_mode):
                raise SourceError(f"{name} is not a regular file", _AGAIN)
        if os.path.lexists(path):
            self._read()

    def _read(self) -> None:
        with self.sound(), self._open() as file:
            size = os.fstat(file.fileno()).st_size
            tensors = _tensors(file, size)
            # A size that the header does not say may be so large that hashing never ends.
            if tensors is None or not _is_sound(file, size):
                raise ValueError("it is damaged or incomplete")
            facts = json.loads(_metadata(file)[_KIND])
            about = facts["about"]
            if not (isinstance(about, dict) and isinstance(facts["unit"], str)):
                raise TypeError("it says nothing of what was begun")
            self._gave, self._unit, self._calls = dict(facts["gave"]), facts["unit"], dict(facts["calls"])
            self._places = {info.name: (offset, info.nbytes) for info, offset in tensors}
            self.found = self._bytes_of("own", file) if "own" in self._places else b""
        for name, value in self._about().items():
            if about.get(name) != value:
                raise SourceError(
                    f"{self.path} was begun with other {name}",
                    "remove it to begin again, or give what it was begun with",
                )

    def _open(self) -> BinaryIO:
        return open_regular(self.path, str(self.path), _AGAIN, links=False)

    def _bytes_of(self, name: str, file: BinaryIO) -> bytearray:
        """The bytes of a tensor in the file."""
        offset, nbytes = self._places[name]
        found = bytearray(nbytes)
        if os.preadv(file.fileno(), [found], offset) != nbytes:
            raise ValueError(f"{name} ends early")
        return found

    @contextmanager
    def sound(self) -> Iterator[None]:
        """Say of what is raised meanwhile that the file cannot be continued."""
        try:
            yield
        except _WRONG as error:
            raise SourceError(f"{self.path} cannot be continued: {first_line(error)[:200]}", _AGAIN) from None

    def require_units(self, units: Collection[str], last: str) -> None:
        """Refuse what was kept of other units than a model has, or at none that is still to come.

        Args:
            units: of the model.
            last: that which no pass goes beyond.

        Raises:
            SourceError: the message names one.
        """
        if self.found is None:
            return
        strange = sorted({self._unit, *self._gave} - set(units))
        with self.sound():
            if strange:
                raise ValueError(f"the model has no {strange[0]}")
            if self._unit in self._gave or last in self._gave:
                raise ValueError(f"nothing is left to do at {self._unit}")

    @property
    def done(self) -> frozenset[str]:
        """The units that passes were through as they were kept."""
        return frozenset(self._gave)

    def begin(self, unit: str, embeds: bool = False) -> bool:
        """See passes come to a unit; whether it was done, before the one that they were kept at.

        Args:
            unit: its name.
            embeds: whether it is an embedding table, which is computed again.

        Raises:
            SourceError: it comes before the one that they were kept at, and was not done.
        """
        self._able = self._able and unit not in self._begun
        self._begun.add(unit)
        if not self._unit or unit == self._unit or embeds:
            return False
        with self.sound():
            if unit not in self._gave:
                raise ValueError(f"{unit} was not done, and comes before {self._unit}")
        return True

    def stand_in(self, unit: str, device: str) -> Any:
        """Zeros in place of what a unit gave that was done."""

        def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device).expand(*shape)

        with self.sound():
            return _filled(self._gave[unit], None, lambda _, shape, dtype: zeros(shape, dtype))

    def bring_back(self, unit: str, waiting: Sequence[tuple[int, int, Any]], device: str) -> Iterator[Any]:
        """What passes that wait for a unit, given by group, number and call, are to call it with instead, one by one;
        nothing if it is not the unit they were kept at."""
        if unit != self._unit:
            return
        self._unit = ""
        with self.sound():
            if self._calls.keys() != {f"{group}.{number}" for group, number, _ in waiting}:
                raise ValueError(f"it has the calls of {unit} of other passes")
        with self.sound():
            file = self._open()
        with file:
            for group, number, call in waiting:

                def read(
                    place: int, shape: Sequence[int], dtype: torch.dtype, group: int = group, number: int = number
                ) -> Tensor:
                    if 0 in shape:
                        return torch.empty(*shape, dtype=dtype, device=device)
                    flat = torch.frombuffer(self._bytes_of(f"{group}.{number}.{place}", file), dtype=torch.uint8)
                    return flat.view(dtype).reshape(*shape).to(device)

                with self.sound():
                    described = self._calls[f"{group}.{number}"]
                    if not _is_like(described, call) or dict(described["tuple"][1]["dict"]).keys() != call[1].keys():
                        raise ValueError(f"{unit} is called in another way")
                    filled = _filled(described, call, read)
                yield filled

    def note(self, unit: str, output: Any) -> None:
        """See what a unit gives, of which only the shapes are kept; they are those of all passes."""
        if unit not in self._gave:
            try:
                self._gave[unit] = _described(output, [])
            except _Unknown:
                self._able = False

    def due(self, unit: str) -> bool:
        """Whether passes are to be kept now that a unit is done."""
        since = time.monotonic() - self._last
        return self._able and unit in self._gave and since >= max(EVERY, TIMES * self._took)

    def write(self, unit: str, groups: Sequence[Sequence[Any]], at_hand: Callable[[int], Any]) -> None:
        """Keep passes that wait for a unit; none where a unit is called with what no file has.

        Args:
            unit: its name.
            groups: what they call it with.
            at_hand: a context manager in which a group's tensors are in memory.

        Raises:
            OutputError: the file cannot be written.
        """
        begin = time.monotonic()
        calls: dict[str, Json] = {}
        tensors: list[list[tuple[str, Tensor]]] = []
        try:
            for at, group in enumerate(groups):
                tensors.append([])
                for number, call in enumerate(group):
                    found: list[Tensor] = []
                    calls[f"{at}.{number}"] = _described(call, found)
                    tensors[-1] += [(f"{at}.{number}.{place}", tensor) for place, tensor in enumerate(found)]
        except _Unknown:
            return
        own = self.own()
        facts = {"about": dict(self._about()), "unit": unit, "gave": self._gave, "calls": calls}
        header: dict[str, Json] = {"__metadata__": {_KIND: json.dumps(facts)}}
        end = 0
        sizes = [("own", len(own))]
        sizes += [(name, tensor.numel() * tensor.element_size()) for each in tensors for name, tensor in each]
        sizes += [("sha256", _DIGEST)]
        # read_header takes none without elements.
        for name, size in ((name, size) for name, size in sizes if size):
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        new = self._new
        try:
            make_directory(new.parent)
            new.unlink(missing_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.sha256()

                def put(part: Any) -> None:
                    digest.update(part)
                    file.write(part)

                put(len(data).to_bytes(8, "little") + data + own)
                for at, each in enumerate(tensors):
                    with at_hand(at):
                        for _, tensor in each:
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
        self._last, self._took = time.monotonic(), time.monotonic() - begin

    def remove(self) -> None:
        """Have nothing there: all is done."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self._new.unlink(missing_ok=True)


def _is_sound(file: BinaryIO, size: int) -> bool:
    """Whether the last bytes of a file are the digest of those before them."""
    digest, left = hashlib.sha256(), size - _DIGEST
    file.seek(0)
    while left and (data := file.read(min(left, _PIECE))):
        digest.update(data)
        left -= len(data)
    return file.read(_DIGEST + 1) == digest.digest()


def _tensors(file: BinaryIO, size: int) -> list[tuple[TensorInfo, int]] | None:
    """The tensors that a file of that size has, and their offsets; None if its header does not say so."""

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


def _is_like(described: Json, now: Any) -> bool:
    """Whether a described value has the structure, the types and the shapes of tensors that another one has. What of it
    can change may hold more: what units before this one have put there."""
    [(kind, held)] = _kinds(described)
    if kind == "own":
        # What stood in for such a thing is None.
        return now is None or bool(getattr(now, "holds_nothing", False))
    if isinstance(now, Tensor):
        dtype = str(now.dtype).removeprefix("torch.")
        return kind == "tensor" and (described["shape"], described["dtype"]) == (list(now.shape), dtype)
    if type(now) in _PLAIN:
        return kind == "plain" and type(held) is type(now)
    if type(now) is tuple:
        return kind == "tuple" and len(held) == len(now) and all(map(_is_like, held, now))
    if isinstance(now, (dict, UserDict)):
        found = dict(held) if kind == ("dict" if isinstance(now, dict) else "shared") else {}
        return all(key in found and _is_like(found[key], each) for key, each in now.items())
    return False


def _kinds(described: Json) -> list[tuple[str, Json]]:
    return [(key, each) for key, each in described.items() if key not in ("shape", "dtype")]


def _bytes(tensor: Tensor) -> Any:
    # Of a copy: what numpy has seen of a storage cannot be put into a scratch file any more.
    copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy().data


def _described(value: Any, tensors: list[Tensor]) -> Json:
    """What `_filled` makes a value from, but for its tensors, which are added to a list.

    Such as {"tuple": [{"tensor": 0, "shape": [1, 48, 64], "dtype": "bfloat16"}, {"plain": null}]}.

    Raises:
        _Unknown: it holds something else.
    """
    if isinstance(value, Tensor):
        place = next((at for at, known in enumerate(tensors) if known is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return {"tensor": place, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in _PLAIN:
        return {"plain": value}
    if type(value) is tuple:
        return {"tuple": [_described(each, tensors) for each in value]}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _described(each, tensors)] for key, each in value.items()]}
    if isinstance(value, UserDict):
        # Of which layers take keys and values of others.
        return {"shared": [[key, _described(each, tensors)] for key, each in value.items()]}
    if getattr(value, "holds_nothing", False):
        return {"own": None}
    raise _Unknown


def _filled(described: Json, now: Any, tensor: Callable[[int, Sequence[int], torch.dtype], Tensor]) -> Any:
    """The value that was described; what can change stays the object that it is now, which others may hold too.

    Args:
        described: by `_described`.
        now: what is there now.
        tensor: gives the tensor of that number, shape and dtype.
    """
    [(kind, held)] = _kinds(described)
    if kind == "tensor":
        dtype = getattr(torch, described["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{described['dtype']} is no dtype")
        return tensor(held, described["shape"], dtype)
    if kind == "plain":
        return held
    if kind == "own":
        return now
    if kind in ("dict", "shared"):
        into = now if isinstance(now, dict if kind == "dict" else UserDict) else {}
        if kind == "shared" and into is not now:
            raise TypeError(f"{type(now).__name__} in place of what layers share")
        found = {key: _filled(each, into.get(key), tensor) for key, each in held}
        into.clear()
        into.update(found)
        return into
    if kind != "tuple":
        raise TypeError(f"{kind} is nothing that is kept")
    known = now if type(now) is tuple and len(now) == len(held) else [None] * len(held)
    return tuple(_filled(each, own, tensor) for each, own in zip(held, known, strict=True))
