"""Compares the sizes that config.json gives with the shapes of the tensors.

Engines build the model from config.json. If it is that of another model, they refuse the tensors or leave some out.
Keys mean other things in some architectures, so only projections with usual names are compared, and a size is wrong
only if no layer has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import SourceError
from ..files.small_files import short_repr
from ..files.tensors import TensorInfo
from ..patterns import compile_pattern
from ..registry.architecture import NOT_LINEAR
from ..registry.rules import ModuleRules, is_table
from .sort import mtp_layer_finder

_LAYERS, _HIDDEN, _VOCABULARY, _HEAD_DIM = "num_hidden_layers", "hidden_size", "vocab_size", "head_dim"
# Projections that read or write the hidden state, with the axis of their weights [out, in] that has its size.
_HIDDEN_AXES = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1, "o_proj": 0, "down_proj": 0}
# Projections with the axis that has the values of all heads. Queries may come with a gate for each.
_HEAD_AXES = {"k_proj": 0, "o_proj": 1}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class _Size(NamedTuple):
    """One axis of a tensor, and the sizes of it that agree with config.json; `text` says what config.json gives."""

    kind: str
    text: str
    axis: int
    allowed: frozenset[int]


def check_layer_count(config: Mapping[str, Any]) -> None:
    """Refuse a number of decoder layers that is none.

    Args:
        config: the language model's part of config.json, as text_config returns it.

    Raises:
        SourceError: num_hidden_layers is not a whole number.
    """
    count = config.get(_LAYERS)
    if count is not None and _number(count) is None:
        raise SourceError(
            f"config.json gives {_LAYERS} {short_repr(count)}, which is no number of layers",
            "correct it, or download config.json again",
        )


def size_differences(entry: ModuleRules, tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> list[str]:
    """Find sizes of config.json that no tensor has.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        A text for each: "hidden_size is 512, and model.embed_tokens.weight is [512, 256]". Empty for an entry that is
        not the registry's own, as its names may mean other things.
    """
    model = entry.model
    if model.decided is not None:
        return []
    in_layer, is_mtp_layer = compile_pattern(f"{model.layers}.**"), mtp_layer_finder(model, dict(config))
    count = _number(config.get(_LAYERS))
    beyond: set[int] = set()
    # By name template and kind of size: the text about the first tensor, None once a tensor agrees.
    found: dict[tuple[str, str], str | None] = {}
    experts: dict[str, int] = {}
    for info in tensors:
        module, match = info.module, in_layer.fullmatch(info.module)
        if match and is_mtp_layer(module):
            continue
        rule = entry.rule(module)
        if match and count is not None and match[1].isdecimal() and len(match[1]) < 10 and int(match[1]) >= count:
            beyond.add(int(match[1]))
        if match and (path := entry.experts(module)) and rule.stack is None:
            number = module[len(path) + 1 :].partition(".")[0]
            experts[path] = max(experts.get(path, 0), int(number) + 1 if number.isdecimal() and len(number) < 10 else 0)
            continue
        if match and rule.stack is not None and len(info.shape) == 3:
            experts[module] = info.shape[0]
        if len(info.shape) != 2 or info.name != f"{module}.weight":
            continue
        sizes = _layer_sizes(entry, module, config) if match else _table_sizes(rule.keep, module, config)
        for size in sizes:
            key = (rule.name_template if match else "", size.kind)
            if info.shape[size.axis] in size.allowed:
                found[key] = None
            else:
                found.setdefault(key, f"{size.text}, and {info.name} is {list(info.shape)}")
    # One text of each kind: a wrong size of the hidden state shows in all projections.
    texts: dict[str, str] = {}
    for (_, kind), text in found.items():
        if text is not None:
            texts.setdefault(kind, text)
    if _HIDDEN in texts and not any(key.endswith(_HEAD_DIM) for key in config):
        texts = {kind: text for kind, text in texts.items() if kind not in _HEAD_AXES}
    differences = list(texts.values())
    counts = {key: expected for key in _EXPERT_COUNTS if (expected := _number(config.get(key)))}
    if experts and counts and not set(counts.values()) & set(experts.values()):
        path, stored = next(iter(experts.items()))
        differences.append(f"{_said(counts)}, and {path} has {stored}")
    if beyond and count is not None:
        differences.append(f"{_said({_LAYERS: count})}, and the tensors have layer {max(beyond)}")
    return differences


def _table_sizes(keep: str | None, module: str, config: Mapping[str, Any]) -> list[_Size]:
    """What config.json says of an embedding or an output head."""
    hidden, vocabulary = _number(config.get(_HIDDEN)), _number(config.get(_VOCABULARY))
    # OPT's embeddings may be narrower than its layers.
    hidden = _number(config.get("word_embed_proj_dim")) or hidden
    sizes = []
    if hidden and (keep in NOT_LINEAR or is_table(module)):
        sizes.append(_Size(_HIDDEN, _said({_HIDDEN: hidden}), 1, frozenset({hidden})))
    if vocabulary and is_table(module):
        sizes.append(_Size(_VOCABULARY, _said({_VOCABULARY: vocabulary}), 0, frozenset({vocabulary})))
    return sizes


def _layer_sizes(entry: ModuleRules, module: str, config: Mapping[str, Any]) -> list[_Size]:
    """What config.json says of a projection in a decoder layer."""
    parent, _, last = module.rpartition(".")
    hidden, sizes = _number(config.get(_HIDDEN)), []
    if hidden and last in _HIDDEN_AXES:
        sizes.append(_Size(_HIDDEN, _said({_HIDDEN: hidden}), _HIDDEN_AXES[last], frozenset({hidden})))
    widths = {key: number for key in config if "intermediate_size" in key and (number := _number(config[key]))}
    if widths.get("intermediate_size") and last in ("gate_proj", "up_proj") and parent.endswith(".mlp"):
        sizes.append(_Size("intermediate_size", _said(widths), 0, frozenset(widths.values())))
    split = entry.rule(module).split
    heads_key = split.heads if split else None
    heads = _number(config.get(heads_key)) if heads_key else None
    if heads_key and heads and last in _HEAD_AXES:
        own = {key: number for key in config if key.endswith(_HEAD_DIM) and (number := _number(config[key]))}
        all_heads = _number(config.get("num_attention_heads"))
        derived = {hidden // all_heads} if hidden and all_heads and not own else set()
        said = _said({heads_key: heads, **(own or {_HIDDEN: hidden or 0})})
        if dims := {*own.values(), *derived}:
            sizes.append(_Size(last, said, _HEAD_AXES[last], frozenset(heads * dim for dim in dims)))
    return sizes


def _said(numbers: Mapping[str, int]) -> str:
    return " and ".join(f"{key} is {short_repr(number)}" for key, number in numbers.items())


def _number(value: object) -> int | None:
    """A whole number of config.json that is not below zero; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
