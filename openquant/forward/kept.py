"""Passes kept in a file as they wait before a unit, so that what ends before its end goes on from there.

A pass is a suspended call stack, which no file can hold. Continued passes begin at their beginning and compute
embeddings; units that were done give zeros of the right shapes, and the first that was not is called with what the
file has. So of a model's own code only what goes from unit to unit counts, all of which is in that call; its masks and
angles are made anew.
tests/measure/test_calibrate.py holds that for every architecture of the registry.

    kept = Kept(Path("x.part"), lambda: {"texts": "5f70bf.."})
    run(passes, kept=kept, ...)         # and after it kept.remove()
"""

from __future__ import annotations

import json
import os
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import OutputError, SourceError

# Seconds between writings, and how many times as long as the last one took: what is lost is less than what it costs.
EVERY, TIMES = 30.0, 20
_KIND = "openquant passes"
# What reading a damaged file raises: numpy's archives are zip files.
_DAMAGED = (SafetensorError, BadZipFile, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
_PLAIN = (type(None), bool, int, float, str)

Json = Any


class _Unknown(Exception):
    """What a unit is called with, or gives, is nothing that a file has."""


class Kept:
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
        self.found: bytes | None = None
        self._about, self._last, self._took = about, time.monotonic(), 0.0
        # What each unit gave, without its numbers.
        self._gave: dict[str, Json] = {}
        self._unit = ""
        self._calls: dict[str, Json] = {}
        self._begun: set[str] = set()
        # Whether a file has all that goes from unit to unit, and a unit's name says where a pass is.
        self._able = True
        if os.path.lexists(path):
            self._read()

    def _read(self) -> None:
        with self.sound(), safe_open(self.path, "pt") as file:
            facts = json.loads(file.metadata()[_KIND])
            about: dict[str, str] = facts["about"]
            self._gave, self._unit, self._calls = dict(facts["gave"]), str(facts["unit"]), dict(facts["calls"])
            self.found = file.get_tensor("own").numpy().tobytes()
        for name, value in self._about().items():
            if about.get(name) != value:
                raise SourceError(
                    f"{self.path} was begun with other {name}",
                    "remove it to begin again, or give what it was begun with",
                )

    @contextmanager
    def sound(self) -> Iterator[None]:
        """Say of what is raised meanwhile that the file is damaged."""
        try:
            yield
        except _DAMAGED as error:
            raise SourceError(f"{self.path} cannot be continued: {error}", "remove it to begin again") from None

    @property
    def done(self) -> frozenset[str]:
        """The units that passes were through as they were kept."""
        return frozenset(self._gave)

    def begin(self, unit: str) -> bool:
        """See passes come to a unit; whether it was done, before the one that they were kept at."""
        self._able = self._able and unit not in self._begun
        self._begun.add(unit)
        return bool(self._unit) and unit in self._gave

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
        with self.sound(), safe_open(self.path, "pt") as file:
            for group, number, call in waiting:

                def read(
                    place: int, shape: Sequence[int], dtype: torch.dtype, group: int = group, number: int = number
                ) -> Tensor:
                    flat: Tensor = file.get_tensor(f"{group}.{number}.{place}")
                    return flat.clone().view(dtype).reshape(*shape).to(device)

                yield _filled(self._calls[f"{group}.{number}"], call, read)

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
        for name, size in sizes:
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        new = self._new
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with os.fdopen(handle, "wb") as file:
                file.write(len(data).to_bytes(8, "little") + data + own)
                for at, each in enumerate(tensors):
                    with at_hand(at):
                        for _, tensor in each:
                            file.write(_bytes(tensor))
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
    [(kind, held)] = [(key, each) for key, each in described.items() if key not in ("shape", "dtype")]
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
