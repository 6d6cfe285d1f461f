"""What an engine says of a model by layer, told by the checkpoint's modules, as entries of the registry name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..patterns import template
from ..registry.architecture import ExpertLayout, StackedExperts
from ..registry.parts import LayerPart, routed
from .client import EngineAnswer, EngineLayer

HEAD_LAYER, EMBEDDING_LAYER = "ParallelLMHead", "VocabParallelEmbedding"
UNKNOWN = "the engine builds no quantized layer of it"


class EngineModule(NamedTuple):
    """What an engine says of one module of a checkpoint.

    Attributes:
        layer: what it is loaded into; None if that is no layer that could be quantized.
        fused: all modules that are loaded into the same, itself included, in the engine's order; empty if none.
        reordered: whether its rows come there in another order.
        read: whether it is loaded at all. Draft layers are not: they are a class of their own.
        merged: the engine's name for what it is joined into, as Joined.listed_as says; None where it derives that.
    """

    layer: EngineLayer | None
    fused: tuple[str, ...]
    reordered: bool
    read: bool
    merged: str | None


def engine_modules(asked: EngineAnswer, shapes: Mapping[str, Sequence[int]]) -> dict[str, EngineModule]:
    """What an engine says of each module with a weight of two or more axes."""
    by_module = asked.by_module()
    unread = {name.removesuffix(".weight") for name in asked.unread}
    found = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        module = name.removesuffix(".weight")
        layer = by_module.get(module)
        fused: tuple[str, ...] = ()
        starts: list[int] = []
        if layer is not None:
            starts = [row for tensor, row, _ in layer.holds if tensor == name]
            if not layer.experts:
                weights = dict.fromkeys(tensor.removesuffix(".weight") for tensor, _, _ in layer.holds)
                fused = tuple(weights) if len(weights) > 1 else ()
        reordered = layer is not None and not layer.experts and (len(starts) > 1 or starts[:1] != [0])
        merged = _merged(layer, fused, asked) if layer is not None and fused else None
        found[module] = EngineModule(layer, fused, reordered, module not in unread, merged)
    return found


def tensor_of(module: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """The name of a module's weight: that of the module itself for a stack of experts."""
    return module if module in shapes else f"{module}.weight"


def decoder_layer_pattern(told: Mapping[str, EngineModule]) -> str:
    """The pattern of a decoder layer: what most layers that may be quantized begin with, up to their first number."""
    found = Counter(
        template(module).partition(".*")[0]
        for module, one in told.items()
        if one.layer is not None and one.layer.linear and ".*" in template(module) and not is_tower(module)
    )
    return f"{found.most_common(1)[0][0]}.*" if found else "model.layers.*"


def is_tower(module: str) -> bool:
    """Whether a module's name says that it sees or hears."""
    return any(word in module for word in ("vision", "visual", "audio", "image", "speech"))


def _merged(layer: EngineLayer, fused: Sequence[str], asked: EngineAnswer) -> str | None:
    """What Joined.listed_as is: None where packed_modules_mapping has the members, as the engine names them."""
    name = layer.prefix.rpartition(".")[2]
    members = {(asked.renamed.get(module) or module).rpartition(".")[2] for module in fused}
    return None if {*asked.packed.get(name, ())} == members else name


Linear = dict[str, tuple[str, EngineModule]]


def parent_of(name: str) -> str:
    """The name without its last part."""
    return name.rpartition(".")[0]


def call_text(function: str, *arguments: str, **named: str | None) -> str:
    """A function call as Python source: `routed(".mlp.experts", listed_as="experts")`."""
    more = [f'{key}="{value}"' for key, value in named.items() if value is not None]
    given = [f'"{text}"' for text in arguments]
    return f"{function}({', '.join([*given, *more])})"


def take(left: Linear, *names: str) -> None:
    """Remove the layers of these names."""
    for name in names:
        left.pop(name, None)


def routed_parts(left: Linear, shapes: Mapping[str, Sequence[int]], hidden: int) -> dict[str, LayerPart]:
    """The routed experts among linear layers, which are taken out, by what Python says of them.

    Args:
        left: by template, each with one of its modules and what is said of that.
        shapes: of the checkpoint.
        hidden: hidden_size, which tells the axes of stacks apart. Stacks of which none tells them are left out.
    """
    found: dict[str, LayerPart] = {}
    experts = {name: (module, one) for name, (module, one) in left.items() if one.layer and one.layer.experts}
    paths: dict[str, list[str]] = {}
    for name, (module, _) in experts.items():
        stacked = len(shapes[tensor_of(module, shapes)]) > 2
        paths.setdefault(parent_of(name) if stacked else parent_of(parent_of(name)), []).append(name)
    for path, names in list(paths.items()):
        take(left, *names)
        module, one = experts[names[0]]
        assert one.layer is not None
        order = list(
            dict.fromkeys(tensor.removesuffix(".weight").rpartition(".")[2] for tensor, _, _ in one.layer.holds)
        )
        if len(shapes[tensor_of(module, shapes)]) > 2:
            stacks, texts = [], []
            told = {
                shape[1 if name.rpartition(".")[2] != order[-1] else 2] == hidden
                for name in names
                if (shape := shapes[tensor_of(experts[name][0], shapes)])[1:].count(hidden) == 1
            }
            if len(told) != 1:
                continue
            (transposed,) = told
            for name in sorted(names, key=lambda name: order.index(name.rpartition(".")[2])):
                last = name.rpartition(".")[2]
                first = last != order[-1]
                parts: tuple[str, ...] = ("gate_proj", "up_proj") if first else ("down_proj",)
                if len(order) == 3:
                    # Gate and up are stacks of their own.
                    parts = (("gate_proj", "up_proj", "down_proj")[order.index(last)],)
                stacks.append(StackedExperts(last, parts, transposed))
                texts.append(f'StackedExperts("{last}", {parts}{", transposed=True" if transposed else ""})')
            # Where the engine's name for the experts is none of the tensors' parents, these lie beside it.
            last = one.layer.prefix.rpartition(".")[2]
            beside = last != path.rpartition(".")[2]
            path = f"{path}.{last}" if beside else path
            more = ", beside=True" if beside else ""
            text = f'routed("{path}", experts=ExpertLayout("{path}", stacked=({", ".join(texts)},){more}))'
            found[text] = routed(path, experts=ExpertLayout(path, stacked=tuple(stacks), beside=beside))
        elif len(order) == 3:
            down = order[-1]
            gate, up = order[:2]
            usual = (gate, up, down) == ("gate_proj", "up_proj", "down_proj")
            found[call_text("routed", path, *(() if usual else (gate, up, down)))] = routed(path, gate, up, down)
        else:
            compress = (f"{path}.*.{{{','.join(order)}}}",)
            found[f'LayerPart({compress!r}, experts=(ExpertLayout("{path}"),))'] = LayerPart(
                compress, experts=(ExpertLayout(path),)
            )
    return found
