"""Recipes: the options of a run, saved with its output, so that another model can be quantized in the same way.

A recipe has the options that decide how weights are quantized, by their names in Python, without defaults:

    recipe_of(Recipe("int4", gptq=True), CalibrationTexts(samples=64))["options"]
    # {"scheme": "int4", "gptq": True, "samples": 64}

It has nothing of the machine: only names of text files, and instead of a calibration file that there was a calibration.
A recipe that is read is not trusted.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .errors import UsageError
from .files.checkpoint import readable
from .files.names import JOURNAL_FILE
from .files.small_files import parse_json, read_small, short_repr
from .options import CalibrationTexts, Option, Recipe, flags_of, options_of
from .version import __version__

# Version of the recipes that are written here; later versions of openquant may have a greater one.
FORMAT = 1
# Bytes. A recipe may be in a journal, which names every file of a large output.
MAX_RECIPE = 64 << 20
MAX_OPTIONS, MAX_LETTERS = 10_000, 10_000
_KINDS = (Recipe, CalibrationTexts)
_MEND = "give the .openquant.json of an output, or leave --recipe out"


def recipe_of(recipe: Recipe, texts: CalibrationTexts) -> dict[str, Any]:
    """Return the recipe of a run, as JSON for the output's journal.

    Args:
        recipe: options that decide how weights are quantized.
        texts: options of the calibration texts.

    Returns:
        "format" (a number), "openquant" (the version), and "options": the scheme, and all values other than the
        defaults by the names of the options. Texts and a dataset on disk are named without their directories; a
        calibration file becomes "calibrate": true.
    """
    options: dict[str, Any] = {}
    for group in (recipe, texts):
        for field in fields(group):
            value = getattr(group, field.name)
            if value and value != field.default:
                options[field.name] = dict(value) if isinstance(value, Mapping) else value
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
    """Convert options of a recipe to flags and values of the command line.

    Args:
        options: "options" of a recipe: JSON values by the names of the options, such as
            {"scheme": "int4", "gptq": true}.

    Returns:
        Flags with their values, None for a switch: [("--scheme", "int4"), ("--gptq", None)]. Options that may be
        repeated are there once for each value.
    """
    allowed = _allowed_options()
    words: list[tuple[str, str | None]] = []
    for name, value in options.items():
        flag = flags_of(name, allowed[name])[-1]
        if value is True:
            words.append((flag, None))
        elif isinstance(value, Mapping):
            words += [(flag, f"{pattern}={scheme}") for pattern, scheme in value.items()]
        else:
            words += [(flag, str(item)) for item in (value if isinstance(value, list) else [value])]
    return words


def recipe_command(options: Mapping[str, Any]) -> str:
    """Convert options of a recipe to a line for a shell: "--scheme int4 --ignore '**.down_proj'".

    Args:
        options: "options" of a recipe: JSON values by the names of the options, such as
            {"scheme": "int4", "gptq": true}.
    """
    return shlex.join(word for pair in option_words(options) for word in pair if word is not None)


def read_recipe(path: Path) -> list[str]:
    """Read a recipe.

    Args:
        path: an output directory, its `.openquant.json`, or a file with the recipe alone.

    Returns:
        Arguments for the command line: ["--scheme=int4", "--gptq"].

    Raises:
        UsageError: the file has no recipe, one of another version's format, or one with something that is no option of
            compress or no value of it.
        SourceError: the file is missing, cannot be read, is too large, or is no JSON.
    """
    file = path / JOURNAL_FILE if path.is_dir() else path
    with readable():
        data = read_small(file, str(file), MAX_RECIPE)
    content = parse_json(data, str(file))
    json.loads(data, object_pairs_hook=lambda pairs: _unique(pairs, file))
    recipe = content.get("recipe", content) if isinstance(content, dict) else None
    options = recipe.get("options") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(options, dict) or type(recipe.get("format")) is not int:
        raise UsageError(f"{file} holds no recipe", _MEND)
    if recipe["format"] != FORMAT:
        raise UsageError(
            f"{file} is a recipe of format {short_repr(recipe['format'])}, this openquant reads {FORMAT}",
            f"use the openquant that wrote it: {short_repr(recipe.get('openquant'))}",
        )
    allowed = _allowed_options()
    unknown = sorted(options.keys() - allowed.keys())
    if unknown:
        raise UsageError(
            f"{file} has {short_repr(unknown[0])}, which is no option of compress that a recipe has", _MEND
        )
    for name, value in options.items():
        if not _fits(value, allowed[name], name):
            flag = flags_of(name, allowed[name])[-1]
            raise UsageError(f"{file}: {name} is {short_repr(value)}, which {flag} does not take", _MEND)
    return [flag if value is None else f"{flag}={value}" for flag, value in option_words(options)]


def _unique(pairs: Sequence[tuple[str, Any]], file: Path) -> dict[str, Any]:
    """An object of a recipe, refused if a key is there twice: one of the values would count for nothing."""
    counts = Counter(key for key, _ in pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise UsageError(f"{file} has {short_repr(twice[0])} twice in one place", "leave one of them out")
    return dict(pairs)


def _allowed_options() -> dict[str, Option]:
    """Return the options that a recipe may have: all but a calibration file, which fits one model only."""
    return {name: option for kind in _KINDS for name, option in options_of(kind).items() if name != "calibration"}


def _fits(value: object, option: Option, name: str) -> bool:
    """Return whether a value has the option's type. The command checks the value itself."""
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
