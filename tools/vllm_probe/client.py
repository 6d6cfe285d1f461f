"""Ask vLLM, in a process of its own, how it builds models.

The process is not trusted: its time and its output have limits, and answers are checked before use.
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
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from openquant.errors import PlanError

PROBE = Path(__file__).parent / "probe.py"
SECONDS = 600
MAX_BYTES = 1 << 26
MAX_TEXT = 1 << 18
# Bases of vLLM's classes that say how tensor parallelism divides a layer.
AXES = {"ColumnParallelLinear": "out", "RowParallelLinear": "in"}


@dataclass(frozen=True)
class Question:
    """A model that an engine shall build.

    Attributes:
        config: the model's config.json.
        shapes: shape of every tensor of its checkpoint, by name; empty if they are not known, and nothing is loaded.
        listed: module names in the ignore list of its quantization_config.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    listed: Sequence[str] = ()


@dataclass(frozen=True)
class EngineLayer:
    """A layer that vLLM builds and that could be quantized.

    Attributes:
        path: path of the layer in vLLM's model.
        kinds: names of its class and base classes in vLLM.
        prefix: name under which it asks for a quantization method and is looked up in ignore lists.
        asked: whether it asks for a quantization method.
        skipped: whether Question.listed leaves it unquantized; None where vLLM fails, since only some parts are listed.
        divided: whether tensor parallelism divides it.
        experts: number of its experts; 0 if it has none.
        sizes: output rows of each of its parts; a single number if it has no parts.
        own: whether an ignore list with the checkpoint's modules that are loaded into it leaves it unquantized.
        named: whether such a list that also has `prefix` does.
        holds: what is loaded into its weights, in order: tensor, first row of the tensor, number of rows.
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
        """The axis along which tensor parallelism divides it, "out" or "in"; None if it does not."""
        return next((AXES[kind] for kind in self.kinds if kind in AXES), None) if self.divided else None

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the checkpoint that are loaded into its weights, each once, in order."""
        return tuple(dict.fromkeys(name.removesuffix(".weight") for name, _, _ in self.holds))

    @property
    def linear(self) -> bool:
        """Whether vLLM quantizes it by default: linear layers and experts, not the embedding or the head."""
        return self.asked and (self.experts > 0 or "LinearBase" in self.kinds)


@dataclass(frozen=True)
class EngineAnswer:
    """How an engine builds one model.

    Attributes:
        layers: all layers that could be quantized.
        unread: names of tensors that it does not load.
        packed: the class's packed_modules_mapping: members of each fused layer by its name.
        renamed: the engine's names of modules that it renames, by the checkpoint's names.
        version: version of vLLM.
    """

    layers: tuple[EngineLayer, ...]
    unread: tuple[str, ...]
    packed: Mapping[str, tuple[str, ...]]
    renamed: Mapping[str, str | None]
    version: str

    @cached_property
    def expert_counts(self) -> set[int]:
        """How many experts its layers of experts have; a router has as many rows."""
        return {layer.experts for layer in self.layers if layer.experts}

    def by_module(self) -> dict[str, EngineLayer]:
        """Return the layer into which each module of the checkpoint is loaded; of several layers the last."""
        return {module: layer for layer in self.layers for module in layer.modules}


class EngineFailed(PlanError):
    """The engine cannot build a model, or did not answer."""


def ask_engine(
    questions: Sequence[Question], interpreter: Path, *paths: Path, seconds: float = SECONDS
) -> list[EngineAnswer | EngineFailed]:
    """Ask vLLM how it builds models, all in one process, which imports vLLM once.

    Args:
        questions: the models.
        interpreter: a Python that has vLLM.
        paths: directories for its import path, in place of those of PYTHONPATH.
        seconds: time limit for all questions together.

    Returns:
        For each question the answer, or why vLLM cannot build that model.

    Raises:
        EngineFailed: the interpreter has no vLLM, did not end in time, or printed too much.
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
                output_text = messages.read().decode(errors="replace").strip()
                raise EngineFailed(
                    f"{interpreter} does not say what vLLM builds:\n{output_text}", "it must be a Python with vLLM"
                )
        return [_read(output / str(number)) for number in range(len(questions))]


def _run(command: list[str], root: Path, environment: Mapping[str, str], messages: BinaryIO, seconds: float) -> int:
    """Run a command. If its time is over or its messages are too long, it and its children are killed."""
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
        # After the reason, a line may list all classes of vLLM.
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


def _parse(answer: Any) -> EngineAnswer:
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
        for path, layer in answer["layers"].items()
    ]
    return EngineAnswer(
        layers=tuple(layers),
        unread=tuple(map(_text, answer["unread"])),
        packed={_text(name): tuple(map(_text, members)) for name, members in answer["packed"].items()},
        renamed={name: None if other is None else _text(other) for name, other in answer["mapper"].items()},
        version=_text(answer["version"])[:100],
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
