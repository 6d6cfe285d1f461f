"""Choose the registry entry of a class that has none, for `--architecture auto`.

ArchitectureChoice("auto").entry(checkpoint, Path("out"))   # from out's journal, else from vLLM, else GENERIC

An output's journal has the entry with which it was made. So a run can be resumed, and an output planned again, on
another machine and without that engine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..errors import OpenQuantError
from ..files.checkpoint import Checkpoint
from ..files.journal import read_journal
from ..models import GENERIC
from ..patterns import compile_pattern
from ..plan.architecture import AUTO, known_architecture
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

# Limits for an entry in a journal, which anybody may have written.
MAX_ITEMS, MAX_LETTERS = 10_000, 1_000
BY_NAMES_AND_SHAPES = "decided from names and shapes alone, as {}: look at the plan, and at what the engine makes of it"
NO_VLLM = "no vLLM is here to be asked (OPENQUANT_VLLM names a Python that has it)"


class ArchitectureChoice:
    """Finds the registry entry of a run, and remembers one that is not from the registry.

    Args:
        option: the value of `--architecture`; None if it is not given.
    """

    def __init__(self, option: str | None) -> None:
        self.option = option
        self.chosen: Architecture | None = None

    def entry(self, checkpoint: Checkpoint, target: Path | None = None) -> Architecture | str | None:
        """Return what `make_plan` takes to find the entry. For "auto" vLLM may be asked, at the first call only.

        Args:
            checkpoint: the opened source.
            target: the output directory, which an earlier run may have begun; None to read no earlier entry there.

        Returns:
            For "auto" and a class that the registry lacks, the entry: from the journal of `target` or of the source,
            from vLLM, or GENERIC. Else the option as it is, None included; its name need not exist.

        Raises:
            PlanError: vLLM would quantize layers that must stay as they are, or builds none that could be quantized.
            SourceError: the source is quantized, and its scales do not belong to its codes.
        """
        if self.option != AUTO or known_architecture(checkpoint) is not None:
            return self.option
        if self.chosen is None:
            directories = [directory for directory in (target, checkpoint.root) if directory is not None]
            entries = (_read_entry(directory, checkpoint.architecture) for directory in directories)
            self.chosen = next((entry for entry in entries if entry is not None), None) or _decide(checkpoint)
        return self.chosen

    @property
    def kept(self) -> dict[str, Any] | None:
        """The entry for the output's journal; None if it is from the registry."""
        return None if self.chosen is None else architecture_to_json(self.chosen)


def find_engine() -> Path | None:
    """Return a Python that has vLLM: the one that OPENQUANT_VLLM names, or this one; None if there is none."""
    named = os.environ.get("OPENQUANT_VLLM")
    if named:
        return Path(named)
    return Path(sys.executable) if importlib.util.find_spec("vllm") is not None else None


def _decide(checkpoint: Checkpoint) -> Architecture:
    interpreter = find_engine()
    if interpreter is None:
        return replace(GENERIC, decided=BY_NAMES_AND_SHAPES.format(NO_VLLM))
    try:
        return build_architecture(checkpoint, interpreter)
    except EngineFailed as error:
        return replace(GENERIC, decided=BY_NAMES_AND_SHAPES.format(_reason(error)))


def _reason(error: EngineFailed) -> str:
    """Return the first and last line of an error's message, which for a traceback is its reason; no pydantic links."""
    lines = [line.strip() for line in error.message.splitlines() if "For further information" not in line]
    first, last = lines[0], next(filter(None, reversed(lines)), "")
    text = first.rstrip(":") if last == first else f"{first.rstrip(':')}: {last}"
    return "".join(letter if letter.isprintable() else " " for letter in text)[:400].strip()


def _read_entry(directory: Path, architecture: str) -> Architecture | None:
    """Return the entry in an output's journal; None if there is none that can be read."""
    try:
        journal = read_journal(directory) if directory.is_dir() else None
    except OpenQuantError:
        # Claiming the directory will report it.
        return None
    return None if journal is None else architecture_from_json(journal.get("entry"), architecture)


def architecture_to_json(entry: Architecture) -> dict[str, Any]:
    """Convert an entry to JSON for a journal; `architecture_from_json` reads it."""
    if entry.name == GENERIC.name:
        return {"name": entry.name, "decided": entry.decided}
    return {
        "name": entry.name,
        "decided": entry.decided,
        "layers": entry.layers,
        "compress": list(entry.compress),
        "keep": [[keep.pattern, keep.why, keep.divided] for keep in entry.keep],
        "joined": [[fused.pattern, fused.listed_as] for fused in entry.fused],
        "splits": [
            [split.pattern, split.axis, split.heads, split.replicated, list(split.parts)] for split in entry.splits
        ],
        "experts": [
            [
                layout.path,
                [[stack.name, list(stack.parts), stack.transposed] for stack in layout.stacked],
                layout.beside,
            ]
            for layout in entry.experts
        ],
        "cached": [[rows.pattern, rows.heads] for rows in entry.cached],
        "text_config": entry.text_config,
        "draft_layers": entry.draft_layers,
        "spellings": [list(group) for group in entry.spellings],
        "renames": [list(pair) for pair in entry.renames],
        "rest": entry.rest,
        "head_refused": entry.head_refused,
        "embedding": entry.embedding,
    }


def architecture_from_json(entry: Any, architecture: str) -> Architecture | None:
    """Read an entry of a journal, which is not trusted.

    Args:
        entry: JSON value, as `architecture_to_json` makes it.
        architecture: the class that the entry must be for.

    Returns:
        The entry; None if it is invalid or for another class. The generic entry is for any class.
    """
    if not isinstance(entry, Mapping):
        return None
    try:
        if entry["name"] == GENERIC.name:
            return replace(GENERIC, decided=_text(entry["decided"]))
        parsed = Architecture(
            name=_text(entry["name"]),
            decided=_text(entry["decided"]),
            layers=_pattern(entry["layers"]),
            compress=tuple(map(_pattern, _list(entry["compress"]))),
            keep=tuple(Keep(_pattern(one), _text(why), divided is True) for one, why, divided in _list(entry["keep"])),
            fused=tuple(FusedLayers(_pattern(one), _optional_text(listed)) for one, listed in _list(entry["joined"])),
            splits=tuple(
                ParallelSplit(_pattern(one), "in" if axis == "in" else "out", _optional_text(heads), copied is True,
                      tuple(map(_optional_text, _list(parts))))
                for one, axis, heads, copied, parts in _list(entry["splits"])
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
                for path, stacks, beside in _list(entry["experts"])
            ),
            cached=tuple(CachedRows(_pattern(one), _optional_text(heads)) for one, heads in _list(entry["cached"])),
            text_config=_optional_text(entry["text_config"]),
            draft_layers=_optional_text(entry["draft_layers"]),
            spellings=tuple(tuple(map(_text, _list(group))) for group in _list(entry["spellings"])),
            renames=tuple((_text(old), _text(new)) for old, new in _list(entry["renames"])),
            rest=_optional_text(entry["rest"]),
            head_refused=_optional_text(entry["head_refused"]),
            embedding=_found_by(entry["embedding"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OpenQuantError):
        return None
    return parsed if parsed.name == architecture else None


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_LETTERS or not value.isprintable():
        raise TypeError(value)
    return value


def _found_by(value: Any) -> Literal["name", "class"] | None:
    if value not in ("name", "class", None):
        raise TypeError(value)
    found: Literal["name", "class"] | None = value
    return found


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _pattern(value: Any) -> str:
    compile_pattern(_text(value).removeprefix("."))
    return str(value)
