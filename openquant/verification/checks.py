"""All checks of the headers of a quantized directory, in order: config, weights, cache, modules, files.

    headers, findings = check_headers(checkpoint, quantization, MODELS["Qwen3ForCausalLM"], files, ours=True)
    findings.problems                            # [] if nothing is wrong

No tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..files.checkpoint import Checkpoint
from ..formats.quantization import Quantization
from ..plan.architecture import with_layer_counts
from ..registry.architecture import Architecture
from ..registry.rules import ModuleRules, is_embedding, is_head
from ..weights.find import pairs
from .config_checks import check_files, check_index, check_settings
from .headers import Findings, Headers
from .module_checks import check_fused, check_head, check_listed, check_unlisted
from .static_scales import check_cache
from .weight_checks import check_strays, find_decodable_weights, find_weights


def check_headers(
    checkpoint: Checkpoint, quantization: Quantization, model: Architecture | None, files: Iterable[str], ours: bool
) -> tuple[Headers, Findings]:
    """Check the config and the headers of a quantized directory against each other and against the registry.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        model: the registry's entry for its architecture; None if it has none.
        files: paths, relative to the directory, of the files that the run wrote; empty if not known.
        ours: whether openquant made the directory, so that everything must be as openquant writes it.

    Returns:
        The directory as its headers describe it, with its quantized weights; and the problems and notes, one line each.

    Raises:
        SourceError: the index cannot be read.
        UsageError: matching names with regular expressions of the config takes too long.
    """
    findings = Findings(ours, list(quantization.problems))
    scheme = check_settings(checkpoint, quantization, findings)
    codes_and_scales = list(pairs(checkpoint.tensors, quantization))
    # With any method but fp8, a quantized head or embedding is one more quantized layer.
    head = quantization.method != "fp8" and any(is_head(pair.module) for pair in codes_and_scales)
    embedding = quantization.method != "fp8" and any(is_embedding(pair.module) for pair in codes_and_scales)
    if model and head and model.head_refused is None:
        model = model.with_head()
    if model and embedding and model.embedding is not None:
        model = model.with_embedding()
    entry = ModuleRules(with_layer_counts(model, checkpoint)) if model else None
    as_loaded = quantization.checked_as_engines_load
    find = find_weights if as_loaded else find_decodable_weights
    weights = find(checkpoint, quantization, codes_and_scales, findings)
    headers = Headers(checkpoint, quantization, scheme, entry, head, embedding, *weights)
    if as_loaded:
        check_strays(headers, findings)
        check_listed(headers, findings)
    check_cache(headers, findings)
    if entry is None:
        of_list = "which unquantized layers must be in the ignore list, and " if as_loaded else ""
        findings.notes.append(
            f"{checkpoint.architecture} is not a known architecture: it was not checked {of_list}which layers are fused"
        )
    else:
        if as_loaded:
            check_unlisted(headers, entry, findings)
        # A weight that cannot be decoded would count as unquantized.
        if as_loaded or not findings.problems:
            check_fused(headers, entry, findings)
    if as_loaded:
        check_head(headers, findings)
    check_index(checkpoint, findings)
    check_files(checkpoint, files, findings)
    return headers, findings
