"""Notes about what a source seems to lack: decoder layers, members of fused layers, experts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..files.small_files import short_repr
from ..patterns import collapse, compile_any, compile_pattern, template
from ..registry.architecture import Architecture, absolute_patterns
from ..weights.weight import Weight
from .decisions import PassthroughTensor


def absent_layers(model: Architecture, modules: Iterable[str], config: dict[str, Any]) -> list[str]:
    """Find decoder layers that config.json counts and that have no tensors.

    Args:
        model: the registry's entry of the architecture.
        modules: full names of modules, of each layer at least one that all layers have.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        One text that names them; empty if none is missing, or if no layer has any of the modules.
    """
    count, pattern = config.get("num_hidden_layers"), compile_pattern(f"{model.layers}.**")
    numbers = {match[1] for module in modules if (match := pattern.fullmatch(module))}
    # config.json may say any number, so the range is lazy.
    expected = (str(number) for number in range(count if numbers and isinstance(count, int) else 0))
    absent = list(itertools.islice((number for number in expected if number not in numbers), 9))
    if not absent:
        return []
    names = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
    return [f"decoder layers that config.json counts (num_hidden_layers {short_repr(count)}): {names}"]


def absent_modules(model: Architecture, modules: Iterable[str]) -> list[str]:
    """Find modules, such as a norm, that one decoder layer lacks and that all other layers like it have.

    Architectures may have several kinds of layers, so a layer is judged only if it is alone in what it has, and if it
    would have all that several others have with one module more.

    Args:
        model: the registry's entry of the architecture.
        modules: full names of all modules.

    Returns:
        Full names of the missing modules, by the number of their layers.
    """
    pattern = compile_pattern(f"{model.layers}.**")
    layers: dict[str, set[str]] = {}
    for module in modules:
        if match := pattern.fullmatch(module):
            # The rest of the name, with its layer's number left in place of the first "*".
            layers.setdefault(match[1], set()).add(f"{module[: match.start(1)]}*{template(module[match.end(1) :])}")
    kinds = Counter(frozenset(names) for names in layers.values())
    absent = []
    for number, names in layers.items():
        lacking = [kind - names for kind, count in kinds.items() if count > 1 and kind > names]
        absent += [
            name.replace("*", number, 1)
            for missing in lacking
            if kinds[frozenset(names)] == 1 and len(missing) == 1
            for name in missing
        ]
    return absent


def missing_notes(
    model: Architecture,
    layers: dict[str, Weight],
    passthrough: Iterable[PassthroughTensor],
    fused: dict[str, tuple[str, ...]],
    config: dict[str, Any],
) -> list[str]:
    """Return notes about what the source seems to lack: vLLM loads an incomplete quantized model and computes noise.

    Args:
        model: the registry's entry of the architecture.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        passthrough: the tensors that are not quantized.
        fused: for each module that engines fuse with others, the full names of all existing members, itself included.
        config: the language model's part of config.json, as text_config returns it.

    Returns:
        One sentence for each kind of missing tensors; empty if none are missing.
    """
    passthrough = list(passthrough)
    # Either every decoder layer has norms, or none has.
    notes = [
        f"the source lacks {text}"
        for text in absent_layers(model, (kept.tensor.module for kept in passthrough if kept.small), config)
    ]
    alone_in = absent_modules(model, [*layers, *(kept.tensor.module for kept in passthrough)])
    notes += [f"the source lacks {module}, which other layers have" for module in alone_in]
    counts = Counter(weight.name_template for weight in layers.values())
    families: dict[str, list[str]] = {}
    for name_template in counts:
        families.setdefault(name_template.rpartition(".")[0], []).append(name_template)
    uneven = {parent for parent, names in families.items() if len({counts[name] for name in names}) > 1}
    # Only pairs are checked, such as gate and up: larger groups may lack members in some layers by design.
    pairs: dict[str, list[tuple[str, ...]]] = {}
    for module, members in fused.items() if uneven else ():
        if members[0] == module:
            pairs.setdefault(layers[module].name_template.rpartition(".")[0], []).append(members)
    alone = [
        members[0] for groups in pairs.values() if max(map(len, groups)) == 2 for members in groups if len(members) == 1
    ]
    if alone:
        notes.append(f"the source lacks layers that engines fuse with {', '.join(collapse(alone))}")
    experts: dict[str, int] = {}
    expert_paths = compile_any(absolute_patterns(model, (layout.path for layout in model.experts)))
    # Experts are many: if all have the same projections, one projection of each is counted.
    watched = {
        name
        for parent, names in families.items()
        if parent.endswith(".*")
        for name in (names if parent in uneven else names[:1])
    }
    for weight in layers.values() if watched else ():
        if weight.name_template in watched:
            path = weight.module.rsplit(".", 2)[0]
            experts[path] = experts.get(path, 0) + 1
    most = max(experts.values(), default=0)
    # Other modules have numbers too, such as two attentions in a layer.
    fewer = [path for path, number in experts.items() if number < most and expert_paths.fullmatch(path)]
    if fewer:
        notes.append(f"the source lacks experts in {', '.join(collapse(fewer))}: other layers have more")
    return notes
