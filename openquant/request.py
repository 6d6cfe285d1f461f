"""The options of compress() that decide its output, checked and turned into those of a plan.

request = check_recipe(Recipe("int4", ignore=("**.o_proj",)), CalibrationTexts())
make_plan(checkpoint, request.scheme, request.options)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .formats.names import KEPT, UNCHANGED
from .formats.schemes import SCHEMES, Scheme, find_others, find_scheme
from .options import CalibrationTexts, Recipe
from .plan.decisions import PlanOptions
from .weights.weight import UNDECIDED


@dataclass(frozen=True)
class Request:
    """The checked options of a call of compress().

    Attributes:
        recipe: the options that decide the bytes of the output.
        texts: calibration texts, if the plan needs some.
        scheme: scheme of all layers for which no pattern names another; None to leave all weights as they are, or to
            keep the codes and scales of a quantized source.
        options: plan options, before a calibration adds to them.
        architecture: name of the registry entry; None for that of the class.
        frontier: what --fit chose from, as `fit --search --json` prints it; None without --fit.
    """

    recipe: Recipe
    texts: CalibrationTexts
    scheme: Scheme | None
    options: PlanOptions
    architecture: str | None
    frontier: Mapping[str, Any] | None = None


def check_recipe(recipe: Recipe, texts: CalibrationTexts) -> Request:
    """Check options of compress() before anything is opened.

    Args:
        recipe: the options that decide the bytes of the output.
        texts: options of the calibration texts: files or a dataset, samples and length.

    Returns:
        The same options, with the scheme, the options of the plan, and what finds the registry's entry.

    Raises:
        UsageError: options contradict each other, nothing uses one of them, or there is no such scheme.
    """
    if recipe.kv_cache not in ("fp8", "auto"):
        raise UsageError(f"{recipe.kv_cache} is not a cache", "choose fp8 or auto")
    scheme, others = _schemes(recipe)
    fp8_cache = recipe.kv_cache == "fp8"
    option = "--calibrate" if recipe.calibrate else "--calibration" if recipe.calibration is not None else None
    schemes = [scheme, *(other for _, other in others)]
    needs_scales = fp8_cache or any(chosen.format.input_scale for chosen in schemes if chosen)
    smoothing = recipe.awq or recipe.smooth is not None
    if recipe.gptq:
        _require_texts(recipe, needs_scales or smoothing)
    if recipe.smooth is not None:
        _require_smooth(recipe.scheme, recipe.smooth)
    if recipe.awq:
        _require_awq(recipe)
    elif option and not needs_scales and recipe.smooth is None:
        raise UsageError(
            f"nothing uses {option}",
            "give --activation-scheme static, --scheme nvfp4-w4a4, --kv-cache fp8, --smooth 0.5 or --awq too, or leave "
            f"{option} out",
        )
    expected = {"documents": texts.samples, "length": texts.length}
    options = PlanOptions(
        tuple(recipe.ignore),
        others,
        recipe.tp,
        recipe.quantize_lm_head,
        recipe.quantize_embeddings,
        fp8_kv_cache=fp8_cache,
        transforms=UNDECIDED if smoothing else None,
        gptq=expected if recipe.gptq else None,
        texts=expected,
        calibrate=recipe.calibrate or smoothing,
    )
    return Request(recipe, texts, scheme, options, recipe.architecture)


def _require_texts(recipe: Recipe, calibrated: bool) -> None:
    """Refuse a calibration file that nothing uses: GPTQ runs the texts itself."""
    if recipe.calibration is not None and not calibrated:
        raise UsageError(
            "GPTQ needs Hessians, which a calibration file does not have: nothing uses --calibration",
            "leave it out, and name texts with --text or --dataset: GPTQ reads them itself",
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
        if not any(scheme.searches_scales for scheme in (chosen, *(other for _, other in others))):
            *names, last = (name for name, scheme in SCHEMES.items() if scheme.searches_scales)
            raise UsageError(
                f"--scheme {recipe.scheme} searches for no scales",
                f"use --scheme {', '.join(names)} or {last}, or leave --no-search out",
            )
        chosen, others = chosen.unsearched, tuple((pattern, other.unsearched) for pattern, other in others)
    return chosen, others
