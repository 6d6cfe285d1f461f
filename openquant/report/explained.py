"""What becomes of a layer, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from ..patterns import collapse
from ..plan.explain import Explanation, ModuleExplanation, RankSplit, Tensor
from .escape import join_lines

_AXES = {"out": "rows (column parallel)", "in": "columns (row parallel)"}


def explanation_text(found: Explanation) -> str:
    """A paragraph for all layers that are alike: a heading, and a line for each thing that is known."""
    return "\n\n".join(_paragraph(layer, found.architecture) for layer in found.layers)


def _paragraph(layer: ModuleExplanation, architecture: str) -> str:
    becomes = "stays as it is" if layer.scheme is None else f"quantized, --scheme {layer.scheme}"
    rule = "no rule: it has fewer than two axes, or --ignore names it"
    if layer.rule is not None:
        pattern = f": {layer.rule.pattern}" if layer.rule.pattern else ""
        rule = f"{layer.rule.field}{pattern} ({architecture})"
    rows = [
        ("becomes", f"{becomes}{f': {layer.why}' if layer.why else ''}"),
        ("rule", rule),
        ("source", f"{_tensors(layer.source) or 'nothing'}, in {layer.shard}"),
        ("output", _tensors(layer.output)),
        ("joined with", ", ".join(name for name in layer.joined if name != layer.module)),
        ("experts", layer.experts or ""),
        ("ranks", _divided(layer.ranks) if len(layer.shape) > 1 else ""),
        *[(engine, ", ".join(names)) for engine, names in layer.engines.items()],
        ("listed", f"as {layer.listed}, among what is not quantized" if layer.listed else "no"),
    ]
    heading = ", ".join(collapse(layer.modules))
    more = f" ({len(layer.modules)} alike; below {layer.module})" if len(layer.modules) > 1 else ""
    return join_lines([f"{heading}{more}", *(f"  {name:<12} {value}" for name, value in rows if value)])


def _tensors(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{each.name} {each.dtype} {list(each.shape)}" for each in tensors)


def _divided(ranks: RankSplit | None) -> str:
    if ranks is None:
        return "each has all of it"
    copied = ", copied where they are fewer" if ranks.replicated else ""
    heads = f", by heads ({ranks.heads}{copied})" if ranks.heads else ""
    sizes = ", ".join(map(str, ranks.sizes)) or "none"
    problem = next((f"; not {size}: {why}" for size, why in ranks.problems.items()), "")
    return f"each has some of its {_AXES[ranks.axis]}{heads}; sizes {sizes}{problem}"
