"""The registry's entry for a plan, what config.json says of the architecture, and tensor-parallel sizes.

The entry is that of the class, one that the user names, or a generic one.

    find_architecture(checkpoint).name             # "Qwen3ForCausalLM"
    find_architecture(unknown, "auto").name        # "generic"

Not every tensor-parallel size can serve a plan: the layer that prevents a size is named.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..files.checkpoint import Checkpoint
from ..files.small_files import short_repr
from ..formats.format import Format, Group
from ..models import GENERIC, MODELS, find_body, find_entry, fit_prefix
from ..registry.architecture import Architecture, ParallelSplit
from ..registry.rules import ModuleRules
from ..weights.weight import Weight

# More layers are nonsense, and would each cost a name.
MOST_LAYERS = 10_000
# The class's own entry if there is one, else the generic one.
AUTO = "auto"
# Classes of draft models in vLLM (models/registry.py:625-704) and SGLang (models/llama_eagle.py, dflash.py, *_mtp.py,
# *_nextn.py). Eagle2_5_VL is none.
_DRAFT_CLASS = re.compile(
    r"P?[Ee]agle3?[A-Z].*|.*(?:Eagle3?|NextN|MTP(?:Model)?|DFlash|DSpark|Speculator)|"
    r".*(?:Medusa|DFlash|DSpark|LiLiCorr|Draft|Assistant|MLPSpeculator|MTP).*(?:Model|ForCausalLM)"
)
# Tensors of EAGLE drafts, whose config.json may name the class of a language model.
_OF_DRAFTS = ("d2t", "t2d", "mask_hidden", "midlayer")


def find_architecture(checkpoint: Checkpoint, requested: str | Architecture | None = None) -> Architecture:
    """Return the entry by which a checkpoint is planned.

    Args:
        checkpoint: the opened source.
        requested: a class that has an entry ("Qwen3ForCausalLM"), "auto" or "generic"; None for the checkpoint's own
            class. An Architecture is returned as it is.

    Returns:
        The registry's entry: patterns that say which modules are quantized, kept, fused and divided among ranks. For
        "auto" that of the checkpoint's class, or the generic entry if the class has none.

    Raises:
        PlanError: there is no such entry, or it is a draft model.
    """
    if isinstance(requested, Architecture):
        return requested
    modules = [info.module for info in checkpoint.tensors.values()]
    if requested in MODELS:
        return with_layer_counts(fit_prefix(MODELS[requested], modules), checkpoint)
    _refuse_draft(checkpoint)
    known = known_architecture(checkpoint)
    if requested == GENERIC.name or (requested == AUTO and known is None):
        return GENERIC
    if known is None or requested not in (None, AUTO):
        raise _unknown(requested or checkpoint.architecture, checkpoint)
    return with_layer_counts(known, checkpoint)


def known_architecture(checkpoint: Checkpoint) -> Architecture | None:
    """Return the registry's entry of a checkpoint's class, or of the class whose body it has; None if there is none.

    Args:
        checkpoint: an opened checkpoint, quantized or not.
    """
    modules = [info.module for info in checkpoint.tensors.values()]
    return find_entry(checkpoint.architecture, checkpoint.config, modules)


def _refuse_draft(checkpoint: Checkpoint) -> None:
    """Refuse a draft model. vLLM numbers its layers on from the target's, so that no ignore list can name them
    (models/llama_eagle3.py:202, 325)."""
    name = checkpoint.architecture
    starts = {tensor.partition(".")[0]: tensor for tensor in checkpoint.tensors}
    of_drafts = (*_OF_DRAFTS, "fc") if "layers" in starts else _OF_DRAFTS
    found = next((starts[start] for start in of_drafts if start in starts), None)
    if _DRAFT_CLASS.fullmatch(name) is None and found is None:
        return
    because = f" ({found})" if found else ""
    raise PlanError(
        f"{name} is a draft model for speculative decoding{because}, which is not converted",
        "convert its target, and serve the draft as it is beside it: vLLM takes it in --speculative-config, SGLang as "
        "--speculative-draft-model-path",
    )


def _unknown(name: str, checkpoint: Checkpoint) -> PlanError:
    """The error for a class without an entry."""
    body = find_body(name, checkpoint.config)[0]
    if body is not None:
        return PlanError(
            f"{name} is not a known architecture; its body is that of {body.name}, and its head is not known",
            f"--architecture {body.name} plans the body; leave the head as it is with --ignore",
        )
    near = difflib.get_close_matches(name, MODELS)
    nearest = f"the nearest are {', '.join(near)}" if near else "none has a name like it"
    return PlanError(
        f"{name} is not a known architecture; of {len(MODELS)} that are, {nearest}",
        "if it is one of them by another name, say which with --architecture; --architecture auto goes "
        "by names and shapes alone; or add an entry to openquant/registry (docs/adding-an-architecture.md)",
    )


def with_layer_counts(model: Architecture, checkpoint: Checkpoint) -> Architecture:
    """Return the entry with engine names that depend on config.json's layer count.

    Args:
        model: the registry's entry of the architecture.
        checkpoint: the opened source, whose config.json has num_hidden_layers.

    Returns:
        The entry with those names filled in; the same entry if it has none, or the count is nonsense.
    """
    layers = config_value(text_config(checkpoint, model), "num_hidden_layers") if model.beyond else 0
    return model.with_layer_count(layers) if isinstance(layers, int) and layers <= MOST_LAYERS else model


TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ParallelSize:
    """A tensor-parallel size, with the reason for which it cannot serve the output, "28 heads do not divide by 8".

    The problem is None if it can.
    """

    size: int
    problem: str | None


def text_config(checkpoint: Checkpoint, model: Architecture) -> dict[str, Any]:
    """Return the language model's part of config.json, with other spellings of its keys under their usual names too.

    Older files have all keys at the top level.

    Args:
        checkpoint: the opened source.
        model: the registry's entry of the architecture, which names that part ("text_config").

    Returns:
        Its keys and values: {"num_hidden_layers": 28, ...}.
    """
    inner = config_value(checkpoint.config, model.text_config)
    config = inner if isinstance(inner, dict) else checkpoint.config
    return {usual: config[key] for key, usual in _USUAL_KEYS.items() if key in config} | config


# Keys that transformers or engines read in place of the usual ones.
_USUAL_KEYS = {
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
}


def config_value(config: Mapping[str, Any], key: str | None) -> Any:
    """Return the value of a key of config.json.

    Args:
        config: the content of config.json, or a part of it.
        key: a key, or nested keys joined by dots: "text_config.hidden_size"; None for no key.

    Returns:
        The value; None if there is none.
    """
    inner: Any = config
    for part in key.split(".") if key else ():
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner if key else None


def fused_parts(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any]
) -> list[tuple[int, str | None]]:
    """Return the parts that a tensor holds one below the other, such as q, k and v in a fused qkv.

    Args:
        shape: shape of the tensor, [out, in].
        split: how tensor-parallel ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        For each part its row count, 0 if config.json does not say, and the config key that counts its heads, None if it
        has none: [(4096, "num_attention_heads"), (1024, "num_key_value_heads"), ...]. A tensor without parts is one.
    """
    if split is None or not split.parts:
        return [(shape[0], split.heads if split else None)]
    keys, counts = _part_proportions(split, config)
    whole = all(counts) and shape[0] % sum(counts) == 0
    return [(shape[0] // sum(counts) * count if whole else 0, key) for count, key in zip(counts, keys, strict=True)]


def _part_proportions(split: ParallelSplit, config: dict[str, Any]) -> tuple[tuple[str | None, ...], list[int]]:
    """The config keys of a tensor's parts, and the numbers their rows are proportional to; 0 for an unusable value."""
    keys = next((parts for key, parts in split.where if config.get(key) is True), split.parts)
    shares = [1 if key is None else config.get(key) for key in keys]
    return keys, [share if isinstance(share, int) and share > 0 else 0 for share in shares]


def why_not_reordered(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], form: Format
) -> str | None:
    """Say why a weight's scales cannot follow its rows when an engine sorts interleaved heads.

    Args:
        shape: shape of the weight, [out, in].
        split: how tensor-parallel ranks divide it, and whether its heads are interleaved; None if ranks copy it.
        config: the language model's part of config.json, as text_config returns it.
        form: the format that it would get.

    Returns:
        The reason; None if they can.
    """
    if split is None or not split.interleaved:
        return None

    if split.interleaved_rows:
        name = next((info.name.lstrip(".") for info in form.parts("", shape) if info.shape[:1] != shape[:1]), None)
        return f"{_SORTED}, and fails on its {name}, which has fewer rows" if name else None

    heads = sum(_part_proportions(split, config)[1])
    if not heads or shape[0] % heads:
        if form.height > 1 or split.interleaved_all:
            return "config.json does not say how many rows each of its parts has"
        return None

    rows = shape[0] // heads
    if rows % form.height:
        return f"{_SORTED}, and the {rows} rows of a head are not whole groups of {form.height}"

    if split.interleaved_all:
        for info in form.parts("", shape):
            if not info.shape or info.shape[0] % heads:
                return f"{_SORTED}, and fails on its {info.name.lstrip('.')}, which has no rows for each head"

    return None


_SORTED = "an engine sorts its rows by heads"


def check_parallel_sizes(
    checkpoint: Checkpoint, entry: ModuleRules, layers: Iterable[tuple[Weight, Format | None]], extra_size: int | None
) -> tuple[ParallelSize, ...]:
    """Check which tensor-parallel sizes divide all layers.

    Args:
        checkpoint: the opened source.
        entry: what the registry says of each module of the architecture.
        layers: the weights that may be quantized, each with its format; None if it is not quantized, and divides
            anywhere.
        extra_size: a size to check besides the usual ones; None for no other.

    Returns:
        The sizes in ascending order, each with why the first layer that does not divide does not; None if all divide.
    """
    config = text_config(checkpoint, entry.model)
    kinds: dict[tuple[str, tuple[int, int], Group], ParallelSplit | None] = {}

    for weight, form in layers:
        group = form.indivisible if form else (1, 1)
        key = (weight.name_template, weight.shape, group)
        if key not in kinds:
            kinds[key] = entry.rule(weight.module).split

    result = []

    for size in sorted({*TENSOR_PARALLEL_SIZES, *([extra_size] if extra_size else [])}):
        problem = None
        for (name, shape, group), split in kinds.items():
            problem = why_indivisible(shape, split, config, group, size)
            if problem:
                problem = f"{name}: {problem}"
                break
        result.append(ParallelSize(size, problem))

    return tuple(result)


def why_indivisible(
    shape: tuple[int, int], split: ParallelSplit | None, config: dict[str, Any], group: Group, size: int
) -> str | None:
    """Say why a weight cannot be divided among tensor-parallel ranks.

    Args:
        shape: shape of the weight, [out, in].
        split: how ranks divide it; None if they do not.
        config: the language model's part of config.json, as text_config returns it.
        group: rows and columns that ranks must not split (Format.indivisible); None for an axis that they may split
            anywhere.
        size: the number of ranks.

    Returns:
        The reason, "28 heads do not divide by 8"; None if it can.
    """
    if split is None:
        return None
    parts = fused_parts(shape, split, config) if split.axis == "out" else [(shape[1], split.heads)]
    multiple = group[0 if split.axis == "out" else 1] or 1
    problems = (_indivisible_length(length, heads, split, config, multiple, size) for length, heads in parts)
    return next((problem for problem in problems if problem), None)


def _indivisible_length(
    length: int, key: str | None, split: ParallelSplit, config: dict[str, Any], multiple: int, size: int
) -> str | None:
    parts = size
    heads = config.get(key) if key else None

    if isinstance(heads, int) and heads > 0:
        if split.replicated and size > heads:
            parts = heads
            if size % heads:
                return f"{short_repr(heads)} heads cannot be copied evenly to {size} ranks"
        elif heads % size:
            return f"{short_repr(heads)} heads do not divide by {size}"

    if length % parts:
        return f"{length} does not divide by {parts}"

    # A layer that is not divided needs no check: quantized here it fits, and otherwise it is as its maker stored it.
    if parts > 1 and length // parts % multiple:
        return f"{length} / {parts} = {length // parts} is not a multiple of {multiple}"

    return None
