"""Turn an engine's answer, which is by layer, into one by modules of the checkpoint, as the registry names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from openquant.patterns import compile_pattern, template
from openquant.registry.architecture import EMBEDDING, HEAD, ExpertLayout, StackedExperts
from openquant.registry.parts import LayerPart, routed_experts

from .client import EngineAnswer, EngineLayer

HEAD_LAYER, EMBEDDING_LAYER = "ParallelLMHead", "VocabParallelEmbedding"
UNKNOWN = "the engine builds no quantized layer of it"


class EngineModule(NamedTuple):
    """What an engine makes of one module of a checkpoint.

    Attributes:
        layer: layer into which it is loaded; None if that layer cannot be quantized.
        fused: all modules that are loaded into the same layer, this one included, in the engine's order; empty if the
            module has the layer to itself.
        reordered: whether the engine loads its rows in another order.
        read: whether it is loaded at all. MTP layers are not: they have a class of their own.
        merged: the engine's name of the fused layer, as FusedLayers.listed_as; None where the engine derives it.
    """

    layer: EngineLayer | None
    fused: tuple[str, ...]
    reordered: bool
    read: bool
    merged: str | None


def engine_modules(answer: EngineAnswer, shapes: Mapping[str, Sequence[int]]) -> dict[str, EngineModule]:
    """Return what an engine makes of each module that has a weight of two or more axes.

    Args:
        answer: how vLLM builds the model: its layers, and the tensors of the checkpoint that each holds.
        shapes: shape of each tensor of the checkpoint, by tensor name.

    Returns:
        By the checkpoint's module name: the engine's layer that holds it, the modules fused there, and whether its rows
        are reordered or not loaded at all.
    """
    by_module = answer.by_module()
    unread = {name.removesuffix(".weight") for name in answer.unread}
    modules = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        module = name.removesuffix(".weight")
        layer = by_module.get(module)
        fused: tuple[str, ...] = ()
        starts: list[int] = []
        if layer is not None:
            starts = [row for tensor, row, _ in layer.holds if tensor == name]
            if not layer.experts and len(layer.modules) > 1:
                fused = layer.modules
        reordered = layer is not None and not layer.experts and (len(starts) > 1 or starts[:1] != [0])
        merged = _merged(layer, fused, answer) if layer is not None and fused else None
        modules[module] = EngineModule(layer, fused, reordered, module not in unread, merged)
    return modules


def tensor_of(module: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return the tensor name of a module's weight, for stacked experts the module's own; `shapes` is by tensor name."""
    return module if module in shapes else f"{module}.weight"


def decoder_layer_pattern(modules: Mapping[str, EngineModule]) -> str:
    """Return the pattern of a decoder layer: the most common beginning of quantizable modules, up to their number.

    Args:
        modules: the result of `engine_modules`.

    Returns:
        The pattern, such as "model.layers.*", which is also that without any such module.
    """
    prefixes = Counter(
        template(module).partition(".*")[0]
        for module, engine in modules.items()
        if engine.layer is not None and engine.layer.linear and ".*" in template(module) and not is_tower(module)
    )
    return f"{prefixes.most_common(1)[0][0]}.*" if prefixes else "model.layers.*"


def is_head_or_embedding(module: str) -> bool:
    """Return whether a module has a name under which most models have their output head or embedding table."""
    return any(compile_pattern(keep.pattern).fullmatch(module) for keep in (EMBEDDING, HEAD))


def is_tower(module: str) -> bool:
    """Return whether a module's name says that it belongs to a vision or audio tower."""
    return any(word in module for word in ("vision", "visual", "audio", "image", "speech"))


def _merged(layer: EngineLayer, fused: Sequence[str], answer: EngineAnswer) -> str | None:
    """Return FusedLayers.listed_as: None if packed_modules_mapping has the members under the engine's names."""
    name = layer.prefix.rpartition(".")[2]
    members = {(answer.renamed.get(module) or module).rpartition(".")[2] for module in fused}
    return None if {*answer.packed.get(name, ())} == members else name


Linear = dict[str, tuple[str, EngineModule]]


def parent_of(name: str) -> str:
    """Return a name without its last part."""
    return name.rpartition(".")[0]


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the last part of each name, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def call_text(function: str, *arguments: str, **named: str | None) -> str:
    """Return a function call as Python source: `routed_experts(".mlp.experts", listed_as="experts")`.

    Args:
        function: name of the function.
        arguments: its positional arguments, all strings.
        named: its keyword arguments; those that are None are left out.
    """
    keywords = [f'{key}="{value}"' for key, value in named.items() if value is not None]
    positional = [f'"{text}"' for text in arguments]
    return f"{function}({', '.join([*positional, *keywords])})"


def take(left: Linear, *names: str) -> None:
    """Remove those of the named layers that `left` has."""
    for name in names:
        left.pop(name, None)


def routed_parts(left: Linear, shapes: Mapping[str, Sequence[int]], hidden: int) -> dict[str, LayerPart]:
    """Take the routed experts out of linear layers.

    Args:
        left: by name template, one of its modules and what the engine makes of it. Experts are removed.
        shapes: shape of each tensor of the checkpoint, by name.
        hidden: hidden_size, which tells the axes of stacks apart; 0 if not known. Stacks whose axes it does not tell
            are removed too, and have no part.

    Returns:
        The registry's part for each kind of experts, by the Python source that makes it.
    """
    parts_by_source: dict[str, LayerPart] = {}
    experts = {
        name: (module, engine) for name, (module, engine) in left.items() if engine.layer and engine.layer.experts
    }
    paths: dict[str, list[str]] = {}
    for name, (module, _) in experts.items():
        stacked = len(shapes[tensor_of(module, shapes)]) > 2
        paths.setdefault(parent_of(name) if stacked else parent_of(parent_of(name)), []).append(name)
    for path, names in list(paths.items()):
        take(left, *names)
        module, engine = experts[names[0]]
        assert engine.layer is not None
        order = last_parts(engine.layer.modules)
        if len(shapes[tensor_of(module, shapes)]) > 2:
            stacks, texts = [], []
            layouts = {
                shape[1 if name.rpartition(".")[2] != order[-1] else 2] == hidden
                for name in names
                if (shape := shapes[tensor_of(experts[name][0], shapes)])[1:].count(hidden) == 1
            }
            if len(layouts) != 1:
                continue
            (transposed,) = layouts
            for name in sorted(names, key=lambda name: order.index(name.rpartition(".")[2])):
                last = name.rpartition(".")[2]
                first = last != order[-1]
                parts: tuple[str, ...] = ("gate_proj", "up_proj") if first else ("down_proj",)
                if len(order) == 3:
                    # Gate and up have separate stacks.
                    parts = (("gate_proj", "up_proj", "down_proj")[order.index(last)],)
                stacks.append(StackedExperts(last, parts, transposed))
                texts.append(f'StackedExperts("{last}", {parts}{", transposed=True" if transposed else ""})')
            # If the engine's name for the experts is no parent of the tensors, the stacks are siblings of the experts.
            last = engine.layer.prefix.rpartition(".")[2]
            beside = last != path.rpartition(".")[2]
            path = f"{path}.{last}" if beside else path
            more = ", beside=True" if beside else ""
            text = f'routed_experts("{path}", experts=ExpertLayout("{path}", stacked=({", ".join(texts)},){more}))'
            layout = ExpertLayout(path, stacked=tuple(stacks), beside=beside)
            parts_by_source[text] = routed_experts(path, experts=layout)
        elif len(order) == 3:
            down = order[-1]
            gate, up = order[:2]
            usual = (gate, up, down) == ("gate_proj", "up_proj", "down_proj")
            text = call_text("routed_experts", path, *(() if usual else (gate, up, down)))
            parts_by_source[text] = routed_experts(path, gate, up, down)
        else:
            compress = (f"{path}.*.{{{','.join(order)}}}",)
            text = f'LayerPart({compress!r}, experts=(ExpertLayout("{path}"),))'
            parts_by_source[text] = LayerPart(compress, experts=(ExpertLayout(path),))
    return parts_by_source
