"""An entry of the registry compared with what vLLM says of the same model, and a draft of one made from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openquant.patterns import template
from openquant.registry.architecture import (
    EMBEDDING,
    HEAD,
    ROUTER,
    Architecture,
    FusedLayers,
    Keep,
    ModuleRules,
    ParallelSplit,
    is_head,
)
from openquant.registry.parts import HEADS, LayerPart, attention, gated_mlp, model, plain
from vllm_probe.client import EngineAnswer
from vllm_probe.modules import (
    EMBEDDING_LAYER,
    HEAD_LAYER,
    UNKNOWN,
    EngineModule,
    Linear,
    call_text,
    decoder_layer_pattern,
    engine_modules,
    is_head_or_embedding,
    is_tower,
    last_parts,
    parent_of,
    routed_parts,
    take,
    tensor_of,
)


def differences(entry: Architecture, told: Mapping[str, EngineModule]) -> dict[str, list[str]]:
    """What an entry says otherwise than an engine: the modules, named by templates, of each difference."""
    asked = ModuleRules(entry)
    sets = {module: members for module, members in asked.fused_groups(told).items() if len(members) > 1}
    found: dict[str, dict[str, None]] = {}
    for module, one in told.items():
        rule, layer = asked.rule(module), one.layer
        quantized = rule.compress or rule.stack is not None
        wrong = []
        if one.read and rule.patterns != 1:
            wrong.append("no pattern matches" if not rule.patterns else "more than one pattern matches")
        if quantized and one.read and (layer is None or not layer.asked):
            wrong.append("quantized, and the engine builds it without a quantization")
        if layer is not None and quantized:
            if layer.experts and not (rule.expert_depth or rule.stack):
                wrong.append("experts to the engine, and not to the entry")
            if not layer.experts and (rule.expert_depth or rule.stack):
                wrong.append("experts to the entry, and not to the engine")
            if not layer.experts and layer.asked:
                if {*sets.get(module, ())} != {*one.fused}:
                    wrong.append(
                        f"the engine joins {_last(one.fused) or 'it with nothing'}, not {_last(sets.get(module, ()))}"
                    )
                if layer.axis != (rule.split.axis if rule.split else None):
                    wrong.append(
                        f"the engine splits it along {layer.axis}, not {rule.split.axis if rule.split else None}"
                    )
                if one.merged and one.merged not in rule.fused_names:
                    wrong.append(
                        f"the engine does not derive {one.merged} from its members, and listed_as does not say it"
                    )
            if one.reordered and not rule.reordered and not (rule.split and rule.split.parts):
                wrong.append("the engine puts its rows in another order")
        if layer is not None and not quantized and layer.linear and layer.skipped is not True:
            wrong.append(f"kept, and not listed under the engine's name {template(layer.prefix)}")
        for text in wrong:
            found.setdefault(text, {})[template(module)] = None
    return {text: list(modules) for text, modules in found.items()}


def _last(modules: Sequence[str]) -> str:
    return ", ".join(last_parts(modules))


@dataclass(frozen=True)
class Draft:
    """An entry made from what an engine says.

    Attributes:
        entry: it.
        pieces: what it is put together from, as Python says it.
        keep: what it keeps beside what pieces bring.
        questions: what the engine does not say, or says in a way that needs a look.
    """

    entry: Architecture
    pieces: tuple[str, ...]
    keep: tuple[Keep, ...]
    questions: tuple[str, ...]


class _Kinds(NamedTuple):
    """Modules of a decoder layer by what an engine does with them; names are templates that begin with a dot."""

    linear: dict[str, tuple[str, EngineModule]]
    others: dict[str, tuple[str, EngineModule]]


def draft(name: str, asked: EngineAnswer, shapes: Mapping[str, Sequence[int]], hidden: int = 0) -> Draft:
    """An entry for an architecture that has none.

    Args:
        name: its class.
        asked: what an engine says.
        shapes: of the checkpoint that it was asked about.
        hidden: hidden_size, which tells the axes of stacked experts apart.
    """
    told = engine_modules(asked, shapes)
    layers = decoder_layer_pattern(told)
    pieces: dict[str, LayerPart] = {}
    keep: dict[str, Keep] = {}
    questions: dict[str, None] = {}
    kinds = _Kinds({}, {})
    for module, one in told.items():
        if not one.read and is_head(module):
            # Tied to the embedding.
            continue
        if not one.read:
            # The name up to its first number, and that.
            place = re.sub(r"^(.*?\.\d+)\..*", r"\1", module)
            questions[f"not all is loaded (draft_layers, or Keep?): {place}"] = None
            continue
        if not template(module).startswith(f"{layers}."):
            _outside(module, one, keep)
            continue
        below = template(module).removeprefix(layers)
        shape = shapes[tensor_of(module, shapes)]
        routers = one.layer is not None and len(shape) == 2 and shape[0] in asked.expert_counts
        if one.layer is not None and one.layer.linear and not routers:
            kinds.linear.setdefault(below, (module, one))
        else:
            kinds.others.setdefault(below, (module, one))
            keep[below] = Keep(below, ROUTER if routers else UNKNOWN)
    left = dict(kinds.linear)
    experts = routed_parts(left, shapes, hidden)
    for found in (_attention(left), _gated(left), _rest(left), experts):
        pieces |= found
    # The router comes with the experts, where it has the usual name.
    brought = {one.pattern for part in pieces.values() for one in part.keep}
    keep = {below: one for below, one in keep.items() if below not in brought}
    for below, (_, one) in kinds.linear.items():
        if one.reordered:
            questions[f"comes in another order, reordered or Split.parts?: {below}"] = None
    for below, kept in keep.items():
        if kept.why != ROUTER and below in kinds.others and (layer := kinds.others[below][1].layer):
            questions[f"built without a quantization: {below} ({layer.kinds[0]})"] = None
    for old, new in sorted(_renamed(asked, told)):
        questions[f"looked up by another name, renames or spellings?: {old} -> {new}"] = None
    entry = model(name, *pieces.values(), layers=layers, keep=tuple(keep.values()))
    return Draft(entry, tuple(pieces), tuple(keep.values()), tuple(questions))


def _outside(module: str, one: EngineModule, keep: dict[str, Keep]) -> None:
    if is_head_or_embedding(module):
        return
    if one.layer is not None and HEAD_LAYER in one.layer.kinds:
        keep[module] = Keep(module, HEAD.why, divided=True)
    elif one.layer is not None and EMBEDDING_LAYER in one.layer.kinds:
        keep[module] = Keep(module, EMBEDDING.why, divided=True)
    else:
        parts = template(module).split(".")
        top = ".".join(parts[: 2 if parts[0] in ("model", "thinker") else 1])
        keep[f"{top}.**"] = Keep(f"{top}.**", "vision or audio" if is_tower(module) else UNKNOWN)


def _renamed(asked: EngineAnswer, told: Mapping[str, EngineModule]) -> set[tuple[str, str]]:
    """Parents of modules, as the engine's own mapper has them, and what the engine asks by instead."""
    found = set()
    for module, one in told.items():
        if one.layer is None or not one.layer.linear or one.layer.experts:
            continue
        mapped = asked.renamed.get(module, module)
        last = one.layer.prefix.rpartition(".")[2]
        ours, theirs = (mapped or "").rpartition(".")[0], one.layer.prefix.rpartition(".")[0]
        if ours != theirs or (not one.fused and (mapped or "").rpartition(".")[2] != last):
            found.add((template(mapped or module), template(one.layer.prefix)))
    return found


def _lasts(one: EngineModule) -> list[str]:
    return [module.rpartition(".")[2] for module in one.fused]


def _row_parallel(left: Linear, parent: str) -> list[str]:
    return [
        name for name, (_, one) in left.items() if parent_of(name) == parent and one.layer and one.layer.axis == "in"
    ]


def _attention(left: Linear) -> dict[str, LayerPart]:
    found: dict[str, LayerPart] = {}
    for name in [name for name, (_, one) in left.items() if _lasts(one) == ["q_proj", "k_proj", "v_proj"]]:
        parent, out = parent_of(name), _row_parallel(left, parent_of(name))
        if name not in left or parent != ".self_attn" or len(out) != 1:
            continue
        last, merged = out[0].rpartition(".")[2], left[name][1].merged
        text = call_text("attention", *(() if last == "o_proj" else (last,)), listed_as=merged)
        found["ATTENTION" if text == "attention()" else text] = attention(last, merged)
        take(left, *(f"{parent}.{part}_proj" for part in "qkv"), out[0])
    return found


def _gated(left: Linear) -> dict[str, LayerPart]:
    found: dict[str, LayerPart] = {}
    for name in list(left):
        if name not in left:
            continue
        one, parent = left[name][1], parent_of(name)
        down, lasts = _row_parallel(left, parent), _lasts(one)
        if one.layer is None or one.layer.axis != "out":
            continue
        if len(lasts) == 2 and len(down) == 1:
            gate, up, last, merged = *lasts, down[0].rpartition(".")[2], one.merged
            usual = (gate, up, last) == ("gate_proj", "up_proj", "down_proj")
            text = call_text("gated_mlp", parent, *(() if usual else (gate, up, last)), listed_as=merged)
            found["MLP" if text == 'gated_mlp(".mlp")' else text] = gated_mlp(parent, gate, up, last, listed_as=merged)
            take(left, *(f"{parent}.{name}" for name in (gate, up, last)))
        elif not lasts and len(down) == 1 and not one.reordered:
            beside = [other for other in left if parent_of(other) == parent]
            if len(beside) == 2 and one.layer.kinds[0] == "ColumnParallelLinear":
                both = name.rpartition(".")[2], down[0].rpartition(".")[2]
                usual = both == ("up_proj", "down_proj")
                found[call_text("plain", parent, *(() if usual else both))] = plain(parent, *both)
                take(left, name, down[0])
    return found


def _rest(left: Linear) -> dict[str, LayerPart]:
    """What is no usual piece: by the module that it lies in."""
    found: dict[str, LayerPart] = {}
    for parent in dict.fromkeys(map(parent_of, left)):
        names = {name: one for name, (_, one) in left.items() if parent_of(name) == parent}
        fused: dict[tuple[str, ...], str | None] = {
            tuple(_lasts(one)): one.merged for one in names.values() if one.fused
        }
        axes: dict[tuple[str, str | None], list[str]] = {}
        for name, one in names.items():
            axis = one.layer.axis if one.layer else None
            if axis:
                heads = None if "mlp" in parent or "feed_forward" in parent else HEADS
                axes.setdefault((axis, heads), []).append(name.rpartition(".")[2])
        part = LayerPart(
            (f"{parent}.{_either([name.rpartition('.')[2] for name in names])}",),
            tuple(FusedLayers(f"{parent}.{_either(lasts)}", merged) for lasts, merged in fused.items()),
            tuple(ParallelSplit(f"{parent}.{_either(lasts)}", axis, heads) for (axis, heads), lasts in axes.items()),
        )
        sets = ", ".join(
            f'FusedLayers("{one.pattern}"' + (f', "{one.listed_as}")' if one.listed_as else ")") for one in part.fused
        )
        splits = ", ".join(
            f'ParallelSplit("{one.pattern}", "{one.axis}"' + (", HEADS)" if one.heads else ")") for one in part.splits
        )
        text = f'LayerPart(("{part.compress[0]}",)'
        text += f", fused=({sets},)" if sets else ""
        text += f", splits=({splits},)" if splits else ""
        found[text + ")"] = part
    return found


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
