"""What a source seems to lack: decoder layers, members of joined sets, experts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..files.small_files import short_repr
from ..patterns import collapse, compile_any, compile_pattern
from ..registry.architecture import Architecture, absolute_patterns
from ..weights.weight import Weight
from .decisions import PassthroughTensor


def missing_notes(
    model: Architecture,
    layers: dict[str, Weight],
    kept: Iterable[PassthroughTensor],
    sets: dict[str, tuple[str, ...]],
    config: dict[str, Any],
) -> list[str]:
    """Notes of what the source seems to lack: vLLM loads a quantized model without it, and computes noise."""
    notes = []
    count, pattern = config.get("num_hidden_layers"), compile_pattern(f"{model.layers}.**")
    # Norms, of which every decoder layer has some, or none has.
    norms = (keep.tensor.module for keep in kept if keep.small)
    numbers = {found[1] for module in norms if (found := pattern.fullmatch(module))}
    # Nothing bounds what config.json counts.
    wanted = (str(number) for number in range(count if numbers and isinstance(count, int) else 0))
    absent = list(itertools.islice((number for number in wanted if number not in numbers), 9))
    if absent:
        names = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
        notes.append(
            f"the source lacks decoder layers that config.json counts (num_hidden_layers {short_repr(count)}): {names}"
        )
    counts = Counter(weight.alike for weight in layers.values())
    families: dict[str, list[str]] = {}
    for alike in counts:
        families.setdefault(alike.rpartition(".")[0], []).append(alike)
    uneven = {parent for parent, alikes in families.items() if len({counts[alike] for alike in alikes}) > 1}
    # Pairs, such as gate and up; in longer sets engines do without some members in some layers.
    pairs: dict[str, list[tuple[str, ...]]] = {}
    for module, members in sets.items() if uneven else ():
        if members[0] == module:
            pairs.setdefault(layers[module].alike.rpartition(".")[0], []).append(members)
    alone = [
        members[0] for found in pairs.values() if max(map(len, found)) == 2 for members in found if len(members) == 1
    ]
    if alone:
        notes.append(f"the source lacks what belongs to {', '.join(collapse(alone))} in other layers")
    experts: dict[str, int] = {}
    where = compile_any(absolute_patterns(model, (each.path for each in model.experts)))
    # Experts are many: where all have the same parts, one of these tells.
    watched = {
        alike
        for parent, alikes in families.items()
        if parent.endswith(".*")
        for alike in (alikes if parent in uneven else alikes[:1])
    }
    for weight in layers.values() if watched else ():
        if weight.alike in watched:
            path = weight.module.rsplit(".", 2)[0]
            experts[path] = experts.get(path, 0) + 1
    most = max(experts.values(), default=0)
    # Two attentions or MLPs under numbers are none.
    fewer = [path for path, found in experts.items() if found < most and where.fullmatch(path)]
    if fewer:
        notes.append(f"the source lacks experts in {', '.join(collapse(fewer))}, beside other layers")
    return notes
