"""Recipes: the options of a run that decide its output, checked for a plan, and saved with the output.

    scheme, options = check_recipe(Recipe("int4", ignore=("**.o_proj",)), CalibrationTexts())
    make_plan(checkpoint, scheme, options)

Another model can be quantized in the same way. A saved recipe has options by their names in Python, without defaults:

    recipe_of(Recipe("int4", gptq=True), CalibrationTexts(samples=64))["options"]
    # {"scheme": "int4", "gptq": True, "samples": 64}

It has nothing of the machine: only names of text files, and instead of a calibration file that there was a calibration.
A recipe that is read is not trusted.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .errors import UsageError
from .fields import Option, options_of, values_for, words_of
from .files.checkpoint import readable
from .files.model_files import JOURNAL_FILE, parse_json, read_small, short_repr
from .formats.hardware import KEPT, UNCHANGED
from .formats.schemes import SCHEMES, Scheme, find_others, find_scheme
from .options import CalibrationTexts, FitOptions, Recipe, Run
from .plan.decisions import PlanOptions
from .version import __version__
from .weights.weight import UNDECIDED

# Version of the recipes that are written here; later versions of openquant may have a greater one.
FORMAT = 1
# Bytes. A recipe may be in a journal, which names every file of a large output.
MAX_RECIPE = 64 << 20
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


def recipe_command(options: Mapping[str, Any]) -> str:
    """Convert options of a recipe to a line for a shell: "--scheme int4 --ignore '**.down_proj'".

    Args:
        options: "options" of a recipe: JSON values by the names of the options, such as
            {"scheme": "int4", "gptq": true}. Those that may be repeated have several values.
    """
    return shlex.join(words_of(_allowed_options(), options))


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe.

    Args:
        path: an output directory, its `.openquant.json`, or a file with the recipe alone.

    Returns:
        Options by their names in Python: {"scheme": "int4", "gptq": True}.

    Raises:
        UsageError: the file has no recipe, or one with something that is no option of compress or no value of it.
        SourceError: the file is missing, cannot be read, is too large, or is no JSON.
    """
    file = path / JOURNAL_FILE if path.is_dir() else path
    with readable():
        content = parse_json(read_small(file, str(file), MAX_RECIPE), str(file))

    recipe = content.get("recipe", content) if isinstance(content, dict) else None
    options = recipe.get("options") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(options, dict) or recipe.get("format") != FORMAT:
        raise UsageError(f"{file} holds no recipe", _MEND)

    allowed = _allowed_options()
    unknown = sorted(options.keys() - allowed.keys())
    if unknown:
        raise UsageError(
            f"{file} has {short_repr(unknown[0])}, which is no option of compress that a recipe has", _MEND
        )
    try:
        for kind in _KINDS:
            kind(**values_for(kind, options))
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", _MEND) from None
    return options


def _allowed_options() -> dict[str, Option]:
    """Return the options that a recipe may have: all but a calibration file, which fits one model only."""
    return {name: option for kind in _KINDS for name, option in options_of(kind).items() if name != "calibration"}


@dataclass(frozen=True)
class Request:
    """The checked options of a call of compress().

    Attributes:
        run: what is read and written, and how.
        recipe: the options that decide the bytes of the output.
        texts: calibration texts, if the plan needs some.
        fit: the size that schemes are chosen for, if any.
        scheme: scheme of all layers for which no pattern names another; None to leave all weights as they are, or to
            keep the codes and scales of a quantized source.
        options: plan options, before a calibration adds to them.
        frontier: what --fit chose from, as `fit --search --json` prints it; None without --fit.
    """

    run: Run
    recipe: Recipe
    texts: CalibrationTexts
    fit: FitOptions
    scheme: Scheme | None
    options: PlanOptions
    frontier: Mapping[str, Any] | None = None


def check_recipe(recipe: Recipe, texts: CalibrationTexts) -> tuple[Scheme | None, PlanOptions]:
    """Check options of compress() before anything is opened.

    Args:
        recipe: the options that decide the bytes of the output.
        texts: options of the calibration texts: files or a dataset, samples and length.

    Returns:
        The scheme of all layers for which no pattern names another, and the options of the plan (see Request).

    Raises:
        UsageError: options contradict each other, nothing uses one of them, or there is no such scheme.
    """
    scheme, others = _schemes(recipe)
    fp8_cache = recipe.kv_cache == "fp8"
    schemes = [scheme, *(other for _, other in others)]
    needs_scales = fp8_cache or any(chosen.format.input_scale for chosen in schemes if chosen)
    smoothing = recipe.awq or recipe.smooth is not None
    _require_use(recipe, needs_scales)

    expected = {"documents": texts.samples, "length": texts.length}
    options = PlanOptions(
        tuple(recipe.ignore),
        others,
        recipe.tp,
        recipe.quantize_lm_head,
        recipe.quantize_embeddings,
        fp8_kv_cache=fp8_cache,
        transforms=UNDECIDED if smoothing else None,
        gptq=gptq_texts(recipe, expected),
        texts=expected,
        calibrate=recipe.calibrate or smoothing,
    )
    return scheme, options


def gptq_texts(recipe: Recipe, account: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a plan says of GPTQ's texts; None without GPTQ.

    Args:
        recipe: the options that decide the bytes of the output.
        account: number and length of the texts, and what else is known of them (`Corpus.account`).
    """
    if not recipe.gptq:
        return None
    return {**account, "tuned": True} if recipe.tune else dict(account)


def _require_use(recipe: Recipe, needs_scales: bool) -> None:
    """Refuse a calibration, GPTQ, SmoothQuant or AWQ that the schemes have no use for."""
    smoothing = recipe.awq or recipe.smooth is not None
    if recipe.tune and not recipe.gptq:
        raise UsageError("--tune says how GPTQ weighs tokens and outputs", "give --gptq too")
    if recipe.smooth is not None:
        _require_smooth(recipe.scheme, recipe.smooth)
    if recipe.awq:
        _require_awq(recipe)

    option = None
    if recipe.calibration is not None:
        option = "--calibration"
    if recipe.calibrate:
        option = "--calibrate"
    if option and not needs_scales and not smoothing:
        raise UsageError(
            f"nothing uses {option}",
            "give --activation-scheme static, --scheme nvfp4-w4a4, --kv-cache fp8, --smooth 0.5 or --awq too, or leave "
            f"{option} out",
        )


def _require_smooth(scheme: str, exponent: float) -> None:
    """Refuse an exponent out of range, and schemes whose activations are not INT8."""
    if not 0 < exponent <= 1:
        raise UsageError(f"--smooth {exponent:g} is not above 0 and at most 1", "give --smooth 0.5")
    if scheme != "int8":
        raise UsageError(
            f"--smooth brings --scheme {scheme} nothing: it is for activations that engines round to INT8",
            "use --scheme int8, or leave --smooth out",
        )


def _require_awq(recipe: Recipe) -> None:
    """Refuse AWQ if no layer has integers in groups, and together with SmoothQuant."""
    names = (recipe.scheme, *(recipe.scheme_for or {}).values())
    if not any(SCHEMES[name].group_size for name in names if name in SCHEMES):
        raise UsageError(
            f"--awq brings --scheme {recipe.scheme} nothing: it is for groups of integers",
            "use --scheme int4 or another of int2 to int7, or leave --awq out",
        )
    if recipe.smooth is not None:
        raise UsageError("--smooth and --awq both divide inputs of layers", "give one of them")


def _schemes(recipe: Recipe) -> tuple[Scheme | None, tuple[tuple[str, Scheme], ...]]:
    """Return the scheme of --scheme, None for weights as they are, and those of --scheme-for by pattern."""
    if recipe.scheme in (UNCHANGED, KEPT):
        return None, ()

    scheme_for = recipe.scheme_for or {}
    grouped = {name for name, scheme in SCHEMES.items() if scheme.group_size}
    # --group-size and --asymmetric go to the schemes of --scheme-for if only those can have them.
    for_scheme = recipe.scheme in grouped or grouped.isdisjoint(scheme_for.values())
    size, asymmetric = (recipe.group_size, recipe.asymmetric) if for_scheme else (None, False)
    chosen = find_scheme(recipe.scheme, recipe.format, recipe.scale_format, recipe.activation_scheme, size, asymmetric)
    others = find_others(chosen, scheme_for, recipe.group_size, recipe.asymmetric)

    if recipe.no_search:
        others = tuple((pattern, other.unsearched) for pattern, other in others)
        chosen = chosen.unsearched
    return chosen, others
