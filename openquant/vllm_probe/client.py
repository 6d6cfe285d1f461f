"""What an engine says of an architecture: vLLM, in an interpreter of its own, builds the class and is watched.

The engine is no part of this program, and its answers are held to be hostile: bounded, and checked before use.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import PlanError

PROBE = Path(__file__).parent / "probe.py"
SECONDS = 600
MAX_BYTES = 1 << 26
MAX_TEXT = 1 << 18
# Bases of vLLM's classes that say how tensor parallelism divides a layer.
AXES = {"ColumnParallelLinear": "out", "RowParallelLinear": "in"}


@dataclass(frozen=True)
class Question:
    """What an engine is asked about.

    Attributes:
        config: config.json, of a small model if there are shapes.
        shapes: of every tensor of its checkpoint; empty if they are not known.
        listed: modules that its quantization_config lists.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    listed: Sequence[str] = ()


@dataclass(frozen=True)
class EngineLayer:
    """One layer of vLLM that may be quantized.

    Attributes:
        path: where the model has it.
        kinds: its class, and those it is derived from.
        prefix: its name as it asks for a quantization.
        asked: whether it asks for one.
        skipped: whether what is listed leaves it as it is; None where some of its parts are listed only.
        divided: whether ranks have a part of it each.
        experts: how many experts it holds; 0 if none.
        sizes: rows of each of its parts; one number where it has none.
        own: whether a list that names the modules of all that is loaded into it has it.
        named: whether one does that names its prefix too.
        holds: what is loaded into its weights, in its order: a tensor, its first row there, and how many of its rows.
    """

    path: str
    kinds: tuple[str, ...]
    prefix: str
    asked: bool
    skipped: bool | None
    divided: bool
    experts: int
    sizes: tuple[int, ...]
    own: bool
    named: bool
    holds: tuple[tuple[str, int, int], ...]

    @property
    def axis(self) -> str | None:
        """How tensor parallelism divides it, as Split.axis says; None if it does not."""
        return next((AXES[kind] for kind in self.kinds if kind in AXES), None) if self.divided else None

    @property
    def linear(self) -> bool:
        """Whether it is quantized where nothing else is said: a linear layer or experts, no embedding and no head."""
        return self.asked and (self.experts > 0 or "LinearBase" in self.kinds)


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine says of one model.

    Attributes:
        layers: all it builds.
        unread: tensors that it loads into nothing.
        packed: members of its merged layers, by their names, as far as the class says so.
        renamed: names of modules that it changes.
        version: of vLLM.
    """

    layers: tuple[EngineLayer, ...]
    unread: tuple[str, ...]
    packed: Mapping[str, tuple[str, ...]]
    renamed: Mapping[str, str | None]
    version: str

    def by_module(self) -> dict[str, EngineLayer]:
        """The layer that each module of the checkpoint is loaded into; the last, of a weight that several have."""
        return {name.removesuffix(".weight"): layer for layer in self.layers for name, _, _ in layer.holds}


class EngineFailed(PlanError):
    """The engine cannot build a model, or did not answer."""


def ask_engine(
    questions: Sequence[Question], interpreter: Path, *paths: Path, seconds: float = SECONDS
) -> list[EngineAnswer | EngineFailed]:
    """What vLLM says of each model: all are asked of one process, which imports vLLM once.

    Args:
        questions: the models.
        interpreter: a Python that has vLLM.
        paths: directories for its import path.
        seconds: that it may take.

    Raises:
        EngineFailed: it has no vLLM, or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="openquant-asked-") as place:
        root, output = Path(place), Path(place, "answers")
        output.mkdir()
        directories = []
        for number, question in enumerate(questions):
            directory = root / str(number)
            directory.mkdir()
            quantization = {"quant_method": "asked", "ignored_layers": list(question.listed)}
            config = {**question.config, "quantization_config": quantization}
            (directory / "config.json").write_text(json.dumps(config))
            if question.shapes:
                (directory / "shapes.json").write_text(json.dumps({k: list(v) for k, v in question.shapes.items()}))
            directories.append(str(directory))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [str(interpreter), str(PROBE), str(output), *directories]
        with (root / "messages").open("w+b") as messages:
            try:
                status = _run(command, root, environment, messages, seconds)
            except OSError as error:
                raise EngineFailed(
                    f"{interpreter} does not say what vLLM builds: {error}", "it must be a Python with vLLM"
                ) from error
            if status:
                messages.seek(max(0, messages.tell() - 2000))
                said = messages.read().decode(errors="replace").strip()
                raise EngineFailed(
                    f"{interpreter} does not say what vLLM builds:\n{said}", "it must be a Python with vLLM"
                )
        return [_read(output / str(number)) for number in range(len(questions))]


def _run(command: list[str], root: Path, environment: Mapping[str, str], messages: BinaryIO, seconds: float) -> int:
    """Run it; when the time is over, or its messages are too long, it ends with all that it has started."""
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages,
        start_new_session=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + seconds
        try:
            while True:
                try:
                    return process.wait(min(0.2, max(0.0, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    if os.fstat(messages.fileno()).st_size > MAX_BYTES:
                        raise OSError("its messages are too long") from None
                    if time.monotonic() >= end:
                        raise OSError(f"no answer in {seconds:g} s") from None
        finally:
            messages.seek(0, os.SEEK_END)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read(path: Path) -> EngineAnswer | EngineFailed:
    hint = "vLLM's own message says what it lacks"
    failed = path.with_suffix(".error")
    if failed.exists():
        # A line may list all classes that vLLM has, after what is wrong.
        lines = [line[:400] for line in failed.read_text(errors="replace")[-MAX_TEXT:].splitlines()[-40:]]
        return EngineFailed("\n".join(["vLLM cannot build it:", *lines]), hint)
    try:
        with path.with_suffix(".json").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError("the answer is too long")
        return _parse(json.loads(text))
    except FileNotFoundError:
        return EngineFailed("vLLM ended without an answer", hint)
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return EngineFailed(f"vLLM died, or its answer cannot be read: {error!r}", hint)


def _parse(found: Any) -> EngineAnswer:
    layers = [
        EngineLayer(
            path=_text(path),
            kinds=tuple(map(_text, layer["kinds"])),
            prefix=_text(layer["prefix"]),
            asked=layer["asked"] is True,
            skipped=layer["skipped"] if isinstance(layer["skipped"], bool) else None,
            divided=layer["divided"] is True,
            experts=int(layer["experts"]),
            sizes=tuple(map(int, layer["sizes"])),
            own=layer["own"] is True,
            named=layer["named"] is True,
            holds=tuple(
                (_text(name), int(row), int(rows))
                for key, runs in layer["holds"].items()
                if "weight" in key
                for name, row, rows in runs
            ),
        )
        for path, layer in found["layers"].items()
    ]
    return EngineAnswer(
        layers=tuple(layers),
        unread=tuple(map(_text, found["unread"])),
        packed={_text(name): tuple(map(_text, members)) for name, members in found["packed"].items()},
        renamed={name: None if other is None else _text(other) for name, other in found["mapper"].items()},
        version=_text(found["version"])[:100],
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
