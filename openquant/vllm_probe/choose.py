"""Who decides about a class without an entry, where `--architecture auto` asks for it; what an output keeps of that.

Deciding("auto").entry(checkpoint, Path("out"))     # of out's journal, else of the engine, else GENERIC

An output keeps the entry that it was made by, so that a run is continued by it, and the output planned again, wherever
that is and whatever engine is there then.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import OpenQuantError
from ..files.checkpoint import Checkpoint
from ..files.journal import read_journal
from ..models import GENERIC, MODELS
from ..patterns import compile_pattern
from ..plan.architecture import AUTO
from ..registry.architecture import (
    Architecture,
    CachedRows,
    ExpertLayout,
    FusedLayers,
    Keep,
    ParallelSplit,
    StackedExperts,
)
from .build import build_architecture
from .client import EngineFailed

# Of an entry in a journal, which may be anybody's.
MOST, MAX_LETTERS = 10_000, 1_000
ALONE = "decided from names and shapes alone, as {}: look at the plan, and at what the engine makes of it"
NOBODY = "no vLLM is here to be asked (OPENQUANT_VLLM names a Python that has it)"


class ArchitectureChoice:
    """Finds the entry of what has none, once.

    Args:
        asked: as `--architecture` says it.
    """

    def __init__(self, asked: str | None) -> None:
        self.asked = asked
        self.found: Architecture | None = None

    def entry(self, checkpoint: Checkpoint, target: Path | None = None) -> Architecture | str | None:
        """What find_model is to be asked for.

        Args:
            checkpoint: the opened source.
            target: an output that may have been begun.

        Raises:
            PlanError: the engine would quantize what has to stay as it is.
        """
        if self.asked != AUTO or checkpoint.architecture in MODELS:
            return self.asked
        if self.found is None:
            places = [place for place in (target, checkpoint.root) if place is not None]
            held = (_held(place, checkpoint.architecture) for place in places)
            self.found = next((entry for entry in held if entry is not None), None) or _decide(checkpoint)
        return self.found

    @property
    def kept(self) -> dict[str, Any] | None:
        """What an output keeps of it; None where the registry decided."""
        return None if self.found is None else architecture_to_json(self.found)


def find_engine() -> Path | None:
    """A Python that has vLLM: the one that OPENQUANT_VLLM names, or this; None if neither."""
    named = os.environ.get("OPENQUANT_VLLM")
    if named:
        return Path(named)
    return Path(sys.executable) if importlib.util.find_spec("vllm") is not None else None


def _decide(checkpoint: Checkpoint) -> Architecture:
    interpreter = find_engine()
    if interpreter is None:
        return replace(GENERIC, decided=ALONE.format(NOBODY))
    try:
        return build_architecture(checkpoint, interpreter)
    except EngineFailed as error:
        return replace(GENERIC, decided=ALONE.format(_line(error)))


def _line(error: EngineFailed) -> str:
    """Its first line, and its last, which names the reason of a traceback; but for where pydantic has more to read."""
    lines = [line.strip() for line in error.message.splitlines() if "For further information" not in line]
    first, last = lines[0], next(filter(None, reversed(lines)), "")
    text = first.rstrip(":") if last == first else f"{first.rstrip(':')}: {last}"
    return "".join(letter if letter.isprintable() else " " for letter in text)[:400].strip()


def _held(directory: Path, architecture: str) -> Architecture | None:
    """The entry that an output was made by; None if there is none that can be read."""
    try:
        journal = read_journal(directory) if directory.is_dir() else None
    except OpenQuantError:
        # Whoever writes there says so.
        return None
    return None if journal is None else architecture_from_json(journal.get("entry"), architecture)


def architecture_to_json(entry: Architecture) -> dict[str, Any]:
    """An entry as a journal has it: what `architecture_from_json` makes the same of."""
    if entry.name == GENERIC.name:
        return {"name": entry.name, "decided": entry.decided}
    return {
        "name": entry.name,
        "decided": entry.decided,
        "layers": entry.layers,
        "compress": list(entry.compress),
        "keep": [[one.pattern, one.why, one.divided] for one in entry.keep],
        "joined": [[one.pattern, one.listed_as] for one in entry.fused],
        "splits": [[one.pattern, one.axis, one.heads, one.replicated, list(one.parts)] for one in entry.splits],
        "experts": [
            [one.path, [[stack.name, list(stack.parts), stack.transposed] for stack in one.stacked], one.beside]
            for one in entry.experts
        ],
        "cached": [[one.pattern, one.heads] for one in entry.cached],
        "text_config": entry.text_config,
        "draft_layers": entry.draft_layers,
        "spellings": [list(group) for group in entry.spellings],
        "renames": [list(pair) for pair in entry.renames],
        "rest": entry.rest,
        "head_refused": entry.head_refused,
    }


def architecture_from_json(held: Any, architecture: str) -> Architecture | None:
    """An entry of a journal, which may be anybody's; None if it is none of that class."""
    if not isinstance(held, Mapping):
        return None
    try:
        if held["name"] == GENERIC.name:
            return replace(GENERIC, decided=_text(held["decided"]))
        found = Architecture(
            name=_text(held["name"]),
            decided=_text(held["decided"]),
            layers=_pattern(held["layers"]),
            compress=tuple(map(_pattern, _list(held["compress"]))),
            keep=tuple(Keep(_pattern(one), _text(why), divided is True) for one, why, divided in _list(held["keep"])),
            fused=tuple(FusedLayers(_pattern(one), _maybe(listed)) for one, listed in _list(held["joined"])),
            splits=tuple(
                ParallelSplit(_pattern(one), "in" if axis == "in" else "out", _maybe(heads), copied is True,
                      tuple(map(_maybe, _list(parts))))
                for one, axis, heads, copied, parts in _list(held["splits"])
            ),
            experts=tuple(
                ExpertLayout(
                    _pattern(path),
                    tuple(
                        StackedExperts(_text(name), tuple(map(_text, _list(parts))), transposed is True)
                        for name, parts, transposed in _list(stacks)
                    ),
                    beside is True,
                )
                for path, stacks, beside in _list(held["experts"])
            ),
            cached=tuple(CachedRows(_pattern(one), _maybe(heads)) for one, heads in _list(held["cached"])),
            text_config=_maybe(held["text_config"]),
            draft_layers=_maybe(held["draft_layers"]),
            spellings=tuple(tuple(map(_text, _list(group))) for group in _list(held["spellings"])),
            renames=tuple((_text(old), _text(new)) for old, new in _list(held["renames"])),
            rest=_maybe(held["rest"]),
            head_refused=_maybe(held["head_refused"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OpenQuantError):
        return None
    return found if found.name == architecture else None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST:
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_LETTERS or not value.isprintable():
        raise TypeError(value)
    return value


def _maybe(value: Any) -> str | None:
    return None if value is None else _text(value)


def _pattern(value: Any) -> str:
    compile_pattern(_text(value).removeprefix("."))
    return str(value)
