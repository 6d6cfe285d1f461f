"""Notes of a plan for the user: what the output lacks of the source, and which engine cannot load it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ..files.checkpoint import Checkpoint
from ..files.model_files import INDEX_FILE, SINGLE_FILE
from ..formats.hardware import MLX_LM, MLX_LM_CLASSES, MLX_LM_VERSION
from ..formats.quantization import find_quantization
from ..formats.schemes import INT8_W8A16, MIXED, SCHEMES, Scheme
from ..patterns import collapse
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_head
from ..version import SGLANG
from ..weights.find import unread_tensors
from ..weights.weight import Weight
from .decisions import Decisions, PlanOptions, gptq_notes
from .engines import is_tied, sglang_refusal
from .static_scales import serving_notes, unrouted_note

_SENTENCE_TRANSFORMERS = {"modules.json", "config_sentence_transformers.json"}


def entry_notes(model: Architecture) -> list[str]:
    """Return a note on how an entry outside the registry was made.

    Args:
        model: the architecture's entry.

    Returns:
        A list of one sentence; empty for the registry's own entries.
    """
    return [model.decided] if model.decided else []


def source_notes(checkpoint: Checkpoint, model: Architecture) -> list[str]:
    """Return notes on weights of the source that not all engines compute with.

    Args:
        checkpoint: the opened source.
        model: the architecture's entry.

    Returns:
        A sentence for each file beside the index, and one for a head of its own that config.json denies.
    """
    added = [
        f"{name} is taken in: {INDEX_FILE} does not name it, so vLLM does not load these MTP layers; the output's does"
        for name in checkpoint.unindexed
    ]

    beside = [name for name in checkpoint.left_out if fnmatchcase(name, "*.safetensors") and "/" not in name]
    notes = added + [
        f"{checkpoint.with_cost(SINGLE_FILE)} is left out: it lies beside {INDEX_FILE}, and transformers loads it in "
        "place of the shards"
        if name == SINGLE_FILE
        else f"{checkpoint.with_cost(name)} is left out: {INDEX_FILE} does not name it, so engines do not load it"
        for name in beside
        if checkpoint.indexed and not name.startswith(("adapter", "consolidated"))
    ]

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
    return [] if refusal is None else [f"{SGLANG} does not load this output: {refusal.why}; {refusal.hint}"]


def mlx_notes(model: Architecture, schemes: Iterable[Scheme]) -> list[str]:
    """Return a note on an output that mlx-lm loads without an error and computes wrongly.

    Args:
        model: the architecture's entry.
        schemes: all schemes of the output.

    Returns:
        A list of one sentence; empty if mlx-lm reads the output, or refuses it.
    """
    # Of other formats than those measured mlx-lm refuses all.
    misread = [
        scheme.name
        for scheme in schemes
        if MLX_LM.get(scheme.name) == "misread" and scheme.method == SCHEMES[scheme.name].method
    ]
    if model.name not in MLX_LM_CLASSES or not misread:
        return []
    return [
        f"{MLX_LM_VERSION} misreads {', '.join(misread)} of this class without an error: give it what `openquant "
        "dequantize` makes of the output"
    ]


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
    notes = [*engine_notes(entry, decisions), *mlx_notes(entry.model, decisions.schemes)]

    if options.fp8_kv_cache:
        notes += serving_notes(entry.model, decisions)
    elif weights and (find_quantization(checkpoint.config) or {}).get("kv_cache_scheme"):
        notes.append(
            "kv_cache_scheme is left out, but its scales are kept: serve with --kv-cache-dtype fp8 to use them, or "
            "give --kv-cache fp8 here so that engines do by default"
        )

    notes += [*left_behind(checkpoint, weights), *_requantized_notes(decisions)]
    notes += [*_pooling_notes(checkpoint, decisions), *_head_notes(decisions, options)]

    several = len({scheme.name for scheme in decisions.schemes}) > 1
    notes += dict.fromkeys(
        f"{scheme.name}: {note}" if several else note for scheme in decisions.schemes for note in scheme.notes
    )

    if options.calibration is not None and decisions.input_absmax:
        notes.append(
            f"static activation scales are twice those of a calibration with {options.calibration.described}: headroom "
            "costs nothing, and larger activations are clamped"
        )
        notes += unrouted_note(options.calibration, entry, decisions.input_absmax, decisions.layers)

    notes += options.transforms.notes if options.transforms else ()
    notes += gptq_notes(decisions, entry, options.gptq) if options.gptq else ()
    return notes


def left_behind(checkpoint: Checkpoint, weights: Iterable[Weight]) -> list[str]:
    """Return a note about tensors beside quantized weights that engines refuse, and that the output leaves out.

    Args:
        checkpoint: the opened source.
        weights: the weights that are quantized in the source.

    Returns:
        A list of one sentence that names them; empty if there are none. Scales of decoded weights do not count.
    """
    names = unread_tensors(checkpoint.tensors, weights)
    return [f"left out, as engines refuse them: {', '.join(collapse(names))}"] if names else []


def _pooling_notes(checkpoint: Checkpoint, decisions: Decisions) -> list[str]:
    """A note on a quantized output head of an embedding model or reranker.

    vLLM (models/adapters.py:125-131, 538-541) serves these without the head, or with an unquantized one.
    """
    files = _SENTENCE_TRANSFORMERS & checkpoint.files.keys()
    if not (files or checkpoint.config.get("classifier_from_token")):
        return []
    if not any(is_head(weight.module) for weight, _ in decisions.kinds):
        return []
    said_by = min(files, default="config.json")
    return [
        f"{said_by} says that this is an embedding model or reranker, and vLLM serves none with a quantized output "
        "head: leave --quantize-lm-head out"
    ]


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
    """Notes about layers whose codes could be kept if the scheme had their zero points or act-order."""
    zero_points = act_order = divided = 0
    for layer, scheme in decisions.quantized:
        form = layer.format
        divided += layer.divides_into(scheme.format)
        if form is None or (form.number, form.group) != (scheme.format.number, scheme.format.group):
            continue
        if form.columns is not None and form.columns.act_order:
            act_order += 1
        elif form.zero_point is not None and not scheme.asymmetric and scheme.group_size is not None:
            zero_points += 1

    notes = []

    if divided:
        notes.append(
            f"{divided} layers are in MXFP4: their codes stay and no weight changes, but where the largest scale of "
            "fused layers is more than 2^17 times the smallest, which are quantized again"
        )
    if zero_points:
        notes.append(f"{zero_points} layers have zero points and are quantized again; --asymmetric keeps their codes")
    if act_order:
        notes.append(f"{act_order} layers have act-order (g_idx) and are quantized again")

    return notes
