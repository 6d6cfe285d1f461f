"""What engines cannot load of a plan. If no engine can, the plan stops; if only SGLang cannot, a note says so.

Other notes say what the output lacks of the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.model_files import INDEX_FILE, SINGLE_FILE
from ..formats.quantization import find_quantization
from ..formats.schemes import INT8_W8A16, MIXED, Scheme
from ..patterns import collapse
from ..registry.architecture import Architecture, ModuleRules, Refusal, SGLangLimits, is_embedding, is_head
from ..version import SGLANG, VLLM
from ..weights.find import unread_tensors
from ..weights.weight import Weight
from .architecture import text_config
from .decisions import Decisions, PlanOptions, gptq_notes, tokens_of
from .serving import serving_notes, unrouted_note

# The compressed-tensors format whose codes are packed into int32.
PACKED = "pack-quantized"
# Refuses the schemes of an output, whichever they are.
_refuse = partial(Refusal, None, None)
_NO_HEAD = "leave --quantize-lm-head out"
_NO_EMBEDDING = "leave --quantize-embeddings out"
# Classes whose heads vLLM builds without a name (models/qwen2_rm.py:47-63), and whether SGLang has the class
# (models/qwen2_rm.py:90).
_NAMELESS_HEADS = {"Qwen2ForRewardModel": True, "Qwen2ForProcessRewardModel": False}


def find_refusal(refused: Iterable[Refusal], scheme: Scheme, is_expert: bool = False) -> Refusal | None:
    """Find the refusal that applies to a scheme.

    Args:
        refused: what an entry says engines, or SGLang alone, cannot load.
        scheme: the scheme of some layers.
        is_expert: whether these are routed experts.

    Returns:
        The first that applies; None if the scheme is loaded.
    """
    fmt = scheme.format
    scales = {None: True, "single": fmt.shares_scale, "several": not fmt.shared, "not by row": not fmt.by_row}
    return next(
        (
            refusal
            for refusal in refused
            if refusal.scheme in (None, scheme.name)
            and refusal.format in (None, scheme.method)
            and scales[refusal.scales]
            and (is_expert or not refusal.experts)
        ),
        None,
    )


def sglang_refusal(entry: ModuleRules, decisions: Decisions) -> Refusal | None:
    """Say why SGLang cannot load an output.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        The reason (`why`), with a hint on what it can load (`hint`); None if SGLang can load it.
    """
    scheme = decisions.scheme
    sglang = entry.model.sglang

    if scheme is None:
        return _refuse_cache_scales(sglang, decisions)

    if sglang.experts is not None and any(map(entry.experts, decisions.layers)):
        return _refuse(sglang.experts, "serve it with vLLM")

    if any(is_embedding(weight.module) for weight, _ in decisions.kinds):
        return _refuse("it loads no quantized embedding", "it loads without --quantize-embeddings")

    for _, chosen in decisions.kinds:
        if "SGLang" not in chosen.engines:
            return _refuse(f"it does not support {chosen.name}", "try another scheme")

    quantized = [(weight.module, scheme) for weight, scheme in decisions.kinds if not is_head(weight.module)]

    # Experts first: what loads them loads all else.
    for module, chosen in sorted(quantized, key=lambda layer: not entry.experts(layer[0])):
        if "SGLang" not in chosen.expert_engines and entry.experts(module):
            hint = "give them another scheme with --scheme-for, or leave them unquantized with --ignore"
            return _refuse(f"it loads no experts in {_name_in_full(chosen)}", hint)

        refusal = find_refusal(sglang.refused, chosen, bool(entry.experts(module)))
        if refusal is not None:
            return refusal

    if any(entry.rule(module).plain for module, _ in quantized):
        return _refuse(f"it builds {_list_patterns(sglang.plain)} in bfloat16", "it loads with --ignore for these")

    packed = (module for module, chosen in quantized if chosen.format.codes == "weight_packed")
    if any(entry.rule(module).unpacked for module in packed):
        why = f"it accepts no packed codes for {_list_patterns(sglang.unpacked)}"
        return _refuse(why, "it loads with --ignore for these")

    if sglang.head is not None and len(quantized) < len(decisions.kinds):
        return _refuse(sglang.head, "it loads without --quantize-lm-head")

    uneven = any(decision.scheme is None or not is_head(module) for module, decision in decisions.overrides.items())
    if quantized and uneven and scheme.method in sglang.uniform_formats:
        return _refuse("it finds none of these layers by name", "it loads if all layers have the same scheme")

    return _refuse_cache_scales(sglang, decisions) or _refuse_mixture(entry, decisions, quantized)


def _refuse_mixture(
    entry: ModuleRules, decisions: Decisions, quantized: Sequence[tuple[str, Scheme]]
) -> Refusal | None:
    """Why SGLang does not load these schemes side by side."""
    # Experts with int32-packed codes check the whole config's format (compressed_tensors_wNa16_moe.py:75-84).
    mixed = len({chosen.settings.get("format") for _, chosen in decisions.kinds}) > 1
    int32_experts = (
        module for module, chosen in quantized if chosen.settings.get("format") == PACKED and entry.experts(module)
    )
    if mixed and any(int32_experts):
        hint = "give the experts --scheme-for nvfp4, or all layers the same scheme"
        return _refuse("it loads int32-packed experts only if all layers are int32-packed", hint)

    # It takes the block size from the config group of all Linear layers (compressed_tensors.py:272-279).
    blocks = (module for module, chosen in quantized if chosen.name == "block" and not entry.experts(module))
    if decisions.scheme and decisions.scheme.name != "block" and any(blocks):
        return _refuse("it loads blocks only if most layers have them", "it loads -w 128 with --scheme-for")
    return None


def _refuse_cache_scales(sglang: SGLangLimits, decisions: Decisions) -> Refusal | None:
    """Say why SGLang cannot load an output's scales of the KV cache; None if it can or there are none."""
    if sglang.cache is None:
        return None
    scales = [kept.value for kept in decisions.passthrough if kept.value is not None]
    if sglang.cache_of_ones and any(scale != 1.0 for scale in scales):
        return _refuse(sglang.cache, "it loads without --calibration")
    if scales and not sglang.cache_of_ones:
        return _refuse(sglang.cache, "it loads without --kv-cache")
    return None


def _list_patterns(patterns: tuple[str, ...]) -> str:
    return ", ".join(f"**{pattern}" for pattern in patterns)


def refuse_schemes(model: Architecture, schemes: Iterable[Scheme]) -> None:
    """Refuse schemes in which engines cannot load an architecture.

    Args:
        model: the registry's entry of the architecture.
        schemes: all schemes that layers may get.

    Raises:
        PlanError: it says why, and what engines load instead.
    """
    for scheme in dict.fromkeys(schemes):
        refusal = find_refusal(model.refused, scheme)
        if refusal is not None:
            raise PlanError(f"{model.name} cannot be served with {scheme.title}: {refusal.why}", refusal.hint)


def refuse_experts(entry: ModuleRules, decisions: Decisions) -> None:
    """Refuse experts in a scheme in which engines load none.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight.

    Raises:
        PlanError: it names the experts.
    """
    if all(scheme.expert_engines for scheme in decisions.schemes):
        return

    refused: dict[str, Scheme] = {}
    for weight, scheme in decisions.quantized:
        if not scheme.expert_engines and (path := entry.experts(weight.module)):
            refused[path] = scheme

    if refused:
        scheme = next(iter(refused.values()))
        raise PlanError(
            f"{', '.join(collapse(refused))}: engines load no experts with {scheme.title} in the {scheme.method} "
            "format",
            "use --scheme channel or --format fp8, give them another scheme with --scheme-for, or leave them "
            "unquantized with --ignore",
        )


def refuse_nameless(entry: ModuleRules, decisions: Decisions) -> None:
    """Refuse to give a module that vLLM builds without a name another scheme than the plan's, or none.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight.

    Raises:
        PlanError: it names the modules.
    """
    reasons = {module: decision.why for module, decision in decisions.overrides.items() if entry.rule(module).nameless}
    if reasons:
        why = next(iter(reasons.values()))
        raise PlanError(
            f"{', '.join(collapse(reasons))}: {VLLM} builds it without a name and so reads it in the scheme of most "
            f"layers ({why})",
            "leave it out of --ignore and --scheme-for, or use --scheme channel, which fits any shape",
        )


def check_task_head(architecture: str) -> list[str]:
    """Check whether engines leave the head of a reward model unquantized.

    Args:
        architecture: the class in config.json's `architectures`.

    Returns:
        A note for a class that only SGLang loads rightly, else an empty list.

    Raises:
        PlanError: no engine does.
    """
    if architecture not in _NAMELESS_HEADS:
        return []
    why = f"{VLLM} builds the head of {architecture} without a name, and reads it as quantized"
    if not _NAMELESS_HEADS[architecture]:
        raise PlanError(f"{why}; {SGLANG} has no such class", "serve it as it is")
    return [f"{why}: serve this output in SGLang"]


def refuse_head(checkpoint: Checkpoint, model: Architecture, scheme: Scheme) -> None:
    """Refuse to quantize the output head if engines cannot load that, or the source has none.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture.
        scheme: the plan's scheme.

    Raises:
        PlanError: it says why.
    """
    if not model.has_head:
        raise PlanError(f"{checkpoint.architecture} has no output head", _NO_HEAD)

    if model.head_refused is not None:
        raise PlanError(f"{model.name}: its output head stays unquantized: {model.head_refused}", _NO_HEAD)

    if is_tied(checkpoint, model):
        if any(is_head(info.module) for info in checkpoint.tensors.values()):
            raise PlanError(
                "config.json ties the output head to the embedding, although the source has one",
                "set tie_word_embeddings to false if the head was trained; or leave --quantize-lm-head out",
            )
        raise PlanError("the output head is the embedding, which stays unquantized", _NO_HEAD)

    if scheme.method == "fp8":
        raise PlanError(
            "engines load no quantized output head in the fp8 format",
            "use --scheme channel or --format compressed-tensors",
        )


def refuse_embedding(checkpoint: Checkpoint, model: Architecture, scheme: Scheme) -> None:
    """Refuse to quantize the input embedding if no engine can load that, or the source has none of its own.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture.
        scheme: the plan's scheme.

    Raises:
        PlanError: it says why.
    """
    fp8 = scheme.method == "fp8"

    if scheme not in MIXED:
        raise PlanError(
            f"no engine loads a quantized embedding beside --scheme {scheme.name} in the {scheme.method} format",
            "use --scheme channel or int8-weights" + (", or --format compressed-tensors" if fp8 else ""),
        )

    if model.embedding is None:
        raise PlanError(
            f"{model.name}: its embedding stays unquantized: {VLLM} builds it without a quantization, and no other "
            "engine loads a quantized one",
            _NO_EMBEDDING,
        )

    if not any(is_embedding(info.module) for info in checkpoint.tensors.values()):
        raise PlanError("the source has no embed_tokens.weight", _NO_EMBEDDING)

    if is_tied(checkpoint, model):
        raise PlanError(f"the embedding is the output head too, and {VLLM} ties no quantized one to it", _NO_EMBEDDING)


def refuse_embedding_schemes(decisions: Decisions) -> None:
    """Refuse an embedding in a scheme in which no engine loads one.

    Args:
        decisions: the scheme of each weight.

    Raises:
        PlanError: it names the embedding.
    """
    for weight, scheme in decisions.kinds:
        if is_embedding(weight.module) and not scheme.embedding:
            raise PlanError(
                f"{weight.module}: no engine loads an embedding in {_name_in_full(scheme)}",
                f"{VLLM} loads int8-weights, int4 and int2 without zero points: give it one of these with --scheme-for",
            )


def _name_in_full(scheme: Scheme) -> str:
    """Return the name of a scheme: "int4 with zero points"."""
    if scheme.asymmetric:
        return f"{scheme.name} with zero points"
    return scheme.name


def is_tied(checkpoint: Checkpoint, model: Architecture) -> bool:
    """Whether the output head is the input embedding: config.json says so, or there is no tensor of a head.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture.
    """
    configs = checkpoint.config, text_config(checkpoint, model)
    is_said = any(config.get("tie_word_embeddings") is True for config in configs)
    return is_said or not any(is_head(info.module) for info in checkpoint.tensors.values())


def entry_notes(model: Architecture) -> list[str]:
    """Return a note on how an entry outside the registry was made.

    Args:
        model: the architecture's entry.

    Returns:
        A list of one sentence; empty for the registry's own entries.
    """
    return [*filter(None, [model.decided])]


def source_notes(checkpoint: Checkpoint, model: Architecture) -> list[str]:
    """Return notes on weights of the source that not all engines compute with.

    Args:
        checkpoint: the opened source.
        model: the architecture's entry.

    Returns:
        A sentence for each file beside the index, and one for a head of its own that config.json denies.
    """
    notes = [
        f"{name} is taken in: {INDEX_FILE} does not name it, so vLLM does not load these MTP layers; the output's does"
        for name in checkpoint.unindexed
    ]

    beside = [name for name in checkpoint.left_out if name.endswith(".safetensors") and "/" not in name]
    for name in beside:
        if name == SINGLE_FILE:
            why = f"it lies beside {INDEX_FILE}, and transformers loads it in place of the shards"
        else:
            why = f"{INDEX_FILE} does not name it, so engines do not load it"
        if checkpoint.indexed and not name.startswith(("adapter", "consolidated")):
            notes.append(f"{name} is left out: {why}")

    if is_tied(checkpoint, model) and any(is_head(info.module) for info in checkpoint.tensors.values()):
        notes.append(
            "the source has an output head, and config.json ties it to the embedding: vLLM computes with the head, "
            "SGLang with the embedding; if the head was trained, set tie_word_embeddings to false"
        )

    return notes


def engine_notes(entry: ModuleRules, decisions: Decisions) -> list[str]:
    """Return a note on why SGLang cannot load the output.

    Args:
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.

    Returns:
        A list of one sentence; empty if it can.
    """
    refusal = sglang_refusal(entry, decisions)
    if refusal is None:
        return []
    return [f"{SGLANG} does not load this output: {refusal.why}; {refusal.hint}"]


def output_notes(
    checkpoint: Checkpoint, weights: Collection[Weight], entry: ModuleRules, decisions: Decisions, options: PlanOptions
) -> list[str]:
    """Return notes about the output, once all is decided.

    Args:
        checkpoint: the opened source.
        weights: the weights that are quantized in the source; empty for an unquantized source.
        entry: what the registry says of each module of the architecture.
        decisions: the scheme of each weight, and the tensors that are not quantized.
        options: what the user asks for.

    Returns:
        Sentences for the user.
    """
    notes = engine_notes(entry, decisions)

    if options.fp8_kv_cache:
        notes += serving_notes(entry.model, decisions)
    elif weights and (find_quantization(checkpoint.config) or {}).get("kv_cache_scheme"):
        notes.append(
            "kv_cache_scheme is left out, but its scales are kept: serve with --kv-cache-dtype fp8 to use them, or "
            "give --kv-cache fp8 here so that engines do by default"
        )

    notes += [*left_behind(checkpoint, weights), *_requantized_notes(decisions), *_head_notes(decisions, options)]
    notes += _float32_notes(decisions)

    several = len({scheme.name for scheme in decisions.schemes}) > 1
    notes += dict.fromkeys(
        f"{scheme.name}: {note}" if several else note for scheme in decisions.schemes for note in scheme.notes
    )

    if options.calibration is not None and decisions.input_absmax:
        notes.append(
            f"static activation scales are twice those of a calibration with {tokens_of(options.calibration.texts)}: "
            "headroom costs nothing, and larger activations are clamped"
        )
        notes += unrouted_note(options.calibration, entry, decisions.input_absmax, decisions.layers)

    if options.transforms:
        notes += options.transforms.notes
    if options.gptq:
        notes += gptq_notes(decisions, entry, options.gptq)
    return notes


def _float32_notes(decisions: Decisions) -> list[str]:
    """Return a note about matrices that stay float32, as a finetune may have them; small ones are meant to be exact."""
    kept = [item.tensor for item in decisions.passthrough if item.tensor.dtype == "F32" and not item.small]
    nbytes = sum(info.nbytes for info in kept)
    if nbytes < 10**8:
        return []

    return [
        f"what is not quantized stays float32 ({nbytes / 1e9:.3g} GB), and engines compute with it in 16 bits: of a "
        "source saved in bfloat16 it takes half"
    ]


def left_behind(checkpoint: Checkpoint, weights: Iterable[Weight]) -> list[str]:
    """Return a note about tensors beside quantized weights that engines refuse, and that the output leaves out.

    Args:
        checkpoint: the opened source.
        weights: the weights that are quantized in the source.

    Returns:
        A list of one sentence that names them; empty if there are none. Scales of decoded weights do not count.
    """
    names = unread_tensors(checkpoint.tensors, weights)
    if not names:
        return []
    return [f"left out, as engines refuse them: {', '.join(collapse(names))}"]


def _head_notes(decisions: Decisions, options: PlanOptions) -> list[str]:
    """A note on an output head of few bits, unless layers have schemes of their own by the user or by a mixture."""
    bits = INT8_W8A16.format.number.bits
    if options.scheme_for:
        return []
    return [
        f"the output head is in {scheme.name}, which can cost as much as all other layers together: "
        f"--scheme-for {layer.module}={INT8_W8A16.name} gives it {bits} bits"
        for layer, scheme in decisions.quantized
        if is_head(layer.module) and scheme in MIXED and scheme.format.number.bits < bits
    ]


def _requantized_notes(decisions: Decisions) -> list[str]:
    """A note about layers whose codes could be kept if the scheme had their zero points."""
    layers = [
        layer
        for layer, scheme in decisions.quantized
        if layer.format is not None
        and layer.format.zero_point is not None
        and not (layer.format.columns and layer.format.columns.act_order)
        and (layer.format.number, layer.format.group) == (scheme.format.number, scheme.format.group)
        and scheme.group_size is not None
        and not scheme.asymmetric
    ]
    if not layers:
        return []
    return [f"{len(layers)} layers have zero points and are quantized again; --asymmetric keeps their codes"]
