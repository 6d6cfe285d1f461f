"""Notes about what a source seems to lack: an embedding, decoder layers, members of fused layers, experts."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..files.small_files import short_repr
from ..files.tensors import TensorInfo
from ..patterns import collapse, compile_any, compile_pattern, template
from ..registry.architecture import EMBEDDING, HEAD, Architecture, absolute_patterns
from ..registry.rules import ModuleRules, is_embedding, is_head
from ..weights.weight import Weight
from .config_sizes import size_differences
from .decisions import PassthroughTensor

_NORM = re.compile(r"norm|^ln")


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
    would have all that several others have with one module more. A module beside it with a name like it, which no
    other layer has, is taken for the missing one under a wrong name.

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
        if kinds[frozenset(names)] > 1:
            continue
        for missing, surplus in ((kind - names, names - kind) for kind, count in kinds.items() if count > 1):
            name = next(iter(missing)) if len(missing) == 1 else None
            if name and (not surplus or _renamed(name, surplus)):
                absent.append(name.replace("*", number, 1))
    return absent


def _renamed(missing: str, surplus: Collection[str]) -> bool:
    """Whether the surplus is one module beside the missing one, with a name like its own."""
    parent, _, last = missing.rpartition(".")
    siblings = [name.removeprefix(f"{parent}.") for name in surplus]
    return len(siblings) == 1 and "." not in siblings[0] and bool(difflib.get_close_matches(last, siblings))


def absent_parts(entry: ModuleRules, tensors: Iterable[TensorInfo], configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Find what a language model has outside its decoder layers, and that is missing.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        configs: config.json, and the language model's part of it.

    Returns:
        One text for each: "the input embedding". Empty for an entry that is not the registry's own, and for a
        checkpoint without a decoder layer.
    """
    in_layer = compile_pattern(f"{entry.model.layers}.**")
    kinds: set[str] = set()
    for info in tensors:
        module, matrix = info.module, len(info.shape) > 1
        is_norm = not matrix and "norm" in template(module)
        if in_layer.fullmatch(module):
            kinds |= {"layer", "norms"} if is_norm else {"layer"}
        elif matrix:
            kinds |= {text for text, has in ((EMBEDDING.why, is_embedding), (HEAD.why, is_head)) if has(module)}
            kinds.add(entry.rule(module).keep or "")
        elif _NORM.search(module.rpartition(".")[2]):
            kinds.add("final norm")
    if entry.model.decided is not None or "layer" not in kinds:
        return []
    tied = {config.get("tie_word_embeddings") for config in configs}
    wanted = {EMBEDDING.why: "the input embedding"}
    # Either every decoder layer has norms, or none has.
    wanted |= {"final norm": "the final norm"} if "norms" in kinds else {}
    wanted |= {HEAD.why: "the output head (tie_word_embeddings is false)"} if False in tied and True not in tied else {}
    return [text for kind, text in wanted.items() if kind not in kinds]


def missing_notes(
    entry: ModuleRules,
    tensors: Collection[TensorInfo],
    layers: dict[str, Weight],
    passthrough: Iterable[PassthroughTensor],
    fused: dict[str, tuple[str, ...]],
    configs: tuple[dict[str, Any], dict[str, Any]],
) -> list[str]:
    """Return notes about what the source seems to lack: vLLM loads an incomplete quantized model and computes noise.

    Args:
        entry: what the registry says of each module of the architecture.
        tensors: all tensors, with quantized weights as those that they decode to.
        layers: the weights that may be quantized, by full module name: "model.layers.0.mlp.up_proj".
        passthrough: the tensors that are not quantized.
        fused: for each module that engines fuse with others, the full names of all existing members, itself included.
        configs: config.json, and the language model's part of it, as text_config returns it.

    Returns:
        One sentence for each kind of missing tensors; empty if none are missing.
    """
    passthrough, model, config = list(passthrough), entry.model, configs[1]
    # Either every decoder layer has norms, or none has.
    notes = [
        f"the source lacks {text}"
        for text in absent_layers(model, (kept.tensor.module for kept in passthrough if kept.small), config)
    ]
    notes += [f"the source lacks {text}" for text in absent_parts(entry, tensors, configs)]
    notes += [
        f"config.json does not fit the tensors: {difference}" for difference in size_differences(entry, tensors, config)
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
