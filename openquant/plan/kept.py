"""Plan to keep the codes and scales of a quantized source, and to write them as compressed-tensors (--scheme keep).

make_kept_plan(open_checkpoint(Path("Qwen3-8B-NVFP4")), PlanOptions()).quantization_config["quant_method"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..formats.format import FLOATS, ActivationQuantization, Format, read_activation_quantization
from ..formats.numbers import says_fp8_cache
from ..formats.quantization import Quantization, read_quantization
from ..formats.schemes import KEPT_SCHEMES, Scheme
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_head
from ..weights.find import decoded_view, with_tool_config
from ..weights.weight import Weight
from .architecture import find_architecture
from .assign import why_no_input_scale
from .decisions import PlanOptions
from .kv_cache import find_cached_attentions
from .plan import Plan, make_plan
from .tensor_parallel import text_config

_OTHERS = "choose another scheme, which quantizes its weights again, or dequantize the source"


def make_kept_plan(
    checkpoint: Checkpoint, options: PlanOptions, identity: str = "", architecture: str | Architecture | None = None
) -> Plan:
    """Plan to keep all codes and scales of a quantized source, and what is not quantized.

    Args:
        checkpoint: the opened source.
        options: what the user asks for; only the FP8 KV cache and the tensor-parallel size are used.
        identity: text that tells this source from another with the same headers; it is part of the plan's digest.
        architecture: the class whose entry applies ("Qwen3ForCausalLM"), "auto" or "generic", or an entry; None for the
            checkpoint's own class.

    Returns:
        What a run will write. Its own scheme is that of most quantized weights. The KV cache is in FP8 if the source's
        config says so and engines can load its scales.

    Raises:
        PlanError: nothing in the source is quantized, compressed-tensors has no layout for some of it, engines cannot
            load it so, or what `make_plan` refuses.
        SourceError: scales of the source do not fit its codes.
        UsageError: the source quantizes activations or the KV cache in an unknown way.
    """
    decoded, weights = decoded_view(checkpoint)
    if not weights:
        raise PlanError(f"nothing in {checkpoint.root} is quantized", "choose a scheme to quantize it with")
    quantization = read_quantization(with_tool_config(checkpoint.config, checkpoint.root))
    keeps = _find_schemes(weights.values(), quantization)
    counts = Counter(keeps[weight.format] for weight in weights.values() if weight.format is not None)
    scheme = counts.most_common(1)[0][0]
    notes = []
    if not options.fp8_kv_cache and says_fp8_cache(quantization.settings):
        model = find_architecture(checkpoint, architecture)
        modules = (info.module for info in decoded.tensors.values())
        try:
            find_cached_attentions(modules, ModuleRules(model), text_config(decoded, model))
            options = replace(options, fp8_kv_cache=True)
        except PlanError as error:
            notes.append(f"the FP8 KV cache of the source is not in the output's config: {error.message}")
    options = replace(options, head=any(is_head(weight.module) for weight in weights.values()))
    if any(fmt.global_scale is not None and not fmt.global_scale.divides for fmt in keeps):
        notes.append(
            "global scales are one over those of the source, rounded to float32 (by 6e-8 of them at most); codes and "
            "scales of groups are the source's bytes"
        )
    plan = make_plan(checkpoint, scheme, options, identity, architecture, keeps=keeps)
    return replace(plan, notes=(*plan.notes, *notes))


def _find_schemes(weights: Iterable[Weight], quantization: Quantization) -> dict[Format, Scheme]:
    """Find the scheme that stores the codes and scales of each weight.

    Returns:
        The scheme of each format of the weights. Of stacks of experts that are stored transposed both orientations of
        the format are there.

    Raises:
        PlanError: there is none for a weight, which the message names; or it has no static activation scale.
        UsageError: activations are quantized in an unknown way.
    """
    schemes: dict[Format, Scheme] = {}
    for weight in weights:
        fmt = weight.format
        assert fmt is not None
        inputs = quantization.inputs_of(weight.module)
        turned = replace(fmt, group=fmt.group[::-1]) if len(weight.source.shape) == 3 else fmt
        scheme = next((one for one in KEPT_SCHEMES if _keeps(one, weight, {fmt, turned}, inputs)), None)
        if scheme is None:
            name = weight.codes.name
            raise PlanError(f"compressed-tensors has no layout for {name}: {_described(weight, inputs)}", _OTHERS)
        if scheme.format.input_scale is not None and (problem := why_no_input_scale(weight, scheme.format)):
            raise PlanError(f"{weight.module} has static activations: {problem}", _OTHERS)
        schemes |= {fmt: scheme, turned: scheme}
    return schemes


def _keeps(scheme: Scheme, weight: Weight, formats: set[Format], inputs: ActivationQuantization | None) -> bool:
    """Return whether a scheme stores a weight's codes and scales as they are, and its activations alike."""
    own, scale = scheme.format, weight.scale
    activations = read_activation_quantization(scheme.group["input_activations"])
    return (
        weight.rank_rows is None
        and any(own.holds(fmt) for fmt in formats)
        and all((own.static, own.input_global_scale is None) == (fmt.static, fmt.input_global_scale is None)
                for fmt in formats)
        and _alike(activations) == _alike(inputs)
        # Scales in float32 would be rounded.
        and not (own.scale.dtype == "BF16" and scale is not None and scale.dtype == FLOATS[0])
    )  # fmt: skip


def _alike(inputs: ActivationQuantization | None) -> tuple[object, ...] | None:
    """Return what must be equal of how activations are quantized; what shares a dynamic scale may differ."""
    return None if inputs is None else (inputs.number, inputs.static, inputs.has_global_scale)


def _described(weight: Weight, inputs: ActivationQuantization | None) -> str:
    """Say how a weight is stored: "FP8 with one scale per 64x64 block, F32 scales, FP8 activations"."""
    fmt, scale = weight.format, weight.scale
    assert fmt is not None
    order = ", inputs in any order (act-order)" if fmt.columns and fmt.columns.act_order else ""
    ranks = ", stored per tensor-parallel rank" if weight.rank_rows is not None else ""
    activations = "activations as they are" if inputs is None else f"{inputs.number.title} activations"
    dtype = f", {scale.dtype} scales" if scale is not None else ""
    return f"{fmt.number.title} with {fmt.label}{dtype}{order}{ranks}, {activations}"
