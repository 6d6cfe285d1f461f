"""The result of explain, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from ..patterns import collapse
from ..plan.explain import Explanation, ModuleExplanation, RankSplit, Tensor
from .cells import paragraphs, table
from .escape import join_lines

_AXES = {"out": "rows (column parallel)", "in": "columns (row parallel)"}


def explanation_text(explanation: Explanation, width: int | None = None) -> str:
    """Format an explanation for a terminal.

    Args:
        explanation: the result of explain.
        width: the most characters of a line; None for any number.

    Returns:
        The text: for each group of layers that are alike a heading and a line for each fact.
    """
    return "\n\n".join(_paragraph(layer, explanation.architecture, width) for layer in explanation.layers)


def _paragraph(layer: ModuleExplanation, architecture: str, width: int | None) -> str:
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
        ("fused with", ", ".join(name for name in layer.joined if name != layer.module)),
        ("experts", layer.experts or ""),
        ("ranks", _rank_text(layer.ranks) if len(layer.shape) > 1 else ""),
        *[(engine, ", ".join(names)) for engine, names in layer.engines.items()],
        ("ignore list", f"as {layer.listed}" if layer.listed else "not in it"),
    ]
    heading = ", ".join(collapse(layer.modules))
    more = f" ({len(layer.modules)} alike; below {layer.module})" if len(layer.modules) > 1 else ""
    lines = table([row for row in rows if row[1]], (0, 1), None if width is None else width - 2)
    return join_lines([*paragraphs([f"{heading}{more}"], width), *(f"  {line}".rstrip() for line in lines)])


def _tensors(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def _rank_text(ranks: RankSplit | None) -> str:
    if ranks is None:
        return "each has all of it"
    copied = ", replicated if there are fewer heads than ranks" if ranks.replicated else ""
    heads = f", by heads ({ranks.heads}{copied})" if ranks.heads else ""
    sizes = ", ".join(map(str, ranks.sizes)) or "none"
    problem = next((f"; not {size}: {why}" for size, why in ranks.problems.items()), "")
    return f"each has a part of its {_AXES[ranks.axis]}{heads}; sizes {sizes}{problem}"
