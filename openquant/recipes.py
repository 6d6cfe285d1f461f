"""Recipes: what a run was asked for, as its output has it, to be asked for again of another model.

Options that say how weights come out, by their names in Python, without those that have their default:

    written(Recipe("int4", gptq=True), CalibrationTexts(samples=64))["options"]
    # {"scheme": "int4", "gptq": True, "samples": 64}

Nothing of the machine is in one: of files only their names, and for a calibration that one was used. One that is read
may be anybody's.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .errors import UsageError
from .files.checkpoint import readable
from .files.names import JOURNAL_FILE
from .files.small_files import parse_json, read_small, short_repr
from .options import CalibrationTexts, Option, Recipe, flags_of, options_of
from .version import __version__

# Of what is written here; a greater one is a later version's.
FORMAT = 1
# Bytes: it may stand in a journal, which names every file of a large output.
MAX_RECIPE = 64 << 20
MAX_OPTIONS, MAX_LETTERS = 10_000, 10_000
_KINDS = (Recipe, CalibrationTexts)
_MEND = "give the .openquant.json of an output, or leave --recipe out"


def recipe_of(recipe: Recipe, texts: CalibrationTexts) -> dict[str, Any]:
    """What an output has of the options it was made with."""
    options: dict[str, Any] = {}
    for given in (recipe, texts):
        for each in fields(given):
            value = getattr(given, each.name)
            if value and value != each.default:
                options[each.name] = dict(value) if isinstance(value, Mapping) else value
    if options.pop("calibration", None) is not None:
        options["calibrate"] = True
    if "ignore" in options:
        options["ignore"] = list(options["ignore"])
    if "text" in options:
        options["text"] = [Path(name).name for name in options["text"]]
    if "dataset" in options:
        name, colon, rest = str(options["dataset"]).partition(":")
        options["dataset"] = (Path(name).name if Path(name).exists() else name) + colon + rest
    return {"format": FORMAT, "openquant": __version__, "options": {"scheme": recipe.scheme, **options}}


def option_words(options: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Options as a command takes them: [("--scheme", "int4"), ("--gptq", None)]."""
    known = _known()
    found: list[tuple[str, str | None]] = []
    for name, value in options.items():
        flag = flags_of(name, known[name])[-1]
        if value is True:
            found.append((flag, None))
        elif isinstance(value, Mapping):
            found += [(flag, f"{pattern}={scheme}") for pattern, scheme in value.items()]
        else:
            found += [(flag, str(each)) for each in (value if isinstance(value, list) else [value])]
    return found


def recipe_command(options: Mapping[str, Any]) -> str:
    """The same on one line, as a shell takes it: "--scheme int4 --ignore '**.down_proj'"."""
    return shlex.join(word for pair in option_words(options) for word in pair if word is not None)


def read_recipe(path: Path) -> list[str]:
    """The words of a command that ask again for what a recipe says: ["--scheme=int4", "--gptq"].

    Args:
        path: `.openquant.json` of an output, the output itself, or a file with the recipe alone.

    Raises:
        UsageError: there is none, a later version wrote it, or it has what is no option of compress.
        SourceError: it is no JSON, or too large.
    """
    file = path / JOURNAL_FILE if path.is_dir() else path
    with readable():
        data = read_small(file, str(file), MAX_RECIPE)
    held = parse_json(data, str(file))
    found = held.get("recipe", held) if isinstance(held, dict) else None
    options = found.get("options") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(options, dict) or not isinstance(found.get("format"), int):
        raise UsageError(f"{file} holds no recipe", _MEND)
    if found["format"] != FORMAT:
        raise UsageError(
            f"{file} is a recipe of format {short_repr(found['format'])}, this openquant reads {FORMAT}",
            f"use the openquant that wrote it: {short_repr(found.get('openquant'))}",
        )
    known = _known()
    strange = sorted(options.keys() - known.keys())
    if strange:
        raise UsageError(
            f"{file} has {short_repr(strange[0])}, which is no option of compress that a recipe has", _MEND
        )
    for name, value in options.items():
        if not _fits(value, known[name], name):
            flag = flags_of(name, known[name])[-1]
            raise UsageError(f"{file}: {name} is {short_repr(value)}, which {flag} does not take", _MEND)
    return [flag if value is None else f"{flag}={value}" for flag, value in option_words(options)]


def _known() -> dict[str, Option]:
    """What a recipe may have: all but a file of a calibration, which fits one model only."""
    return {name: option for kind in _KINDS for name, option in options_of(kind).items() if name != "calibration"}


def _fits(value: object, option: Option, name: str) -> bool:
    """Whether a value is of an option's type; what it may be the command itself knows."""
    if option.value is None:
        return value is True
    if option.repeated:
        kind = dict if name == "scheme_for" else list
        if not isinstance(value, kind) or len(value) > MAX_OPTIONS:
            return False
        words = [*value, *value.values()] if isinstance(value, dict) else value
        return all(isinstance(word, str) and len(word) <= MAX_LETTERS for word in words)
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= MAX_LETTERS)
