"""The table of a plan's weights, as pages show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.kv_cache import CACHED
from ..plan.printed import PlanLine

# Most norms and biases that have lines of their own in a page's table of weights.
MOST_NORMS = 20


def weight_lines(lines: Sequence[PlanLine]) -> list[dict[str, Any]]:
    """Make the lines of a page's table of weights. Many norms and biases that stay as they are become one line.

    Args:
        lines: the lines of a plan.

    Returns:
        For each line the keys names, scheme, decoded, shape, bytes_before, bytes_after and why.
    """
    small = [line for line in lines if len(line.shape) < 2 and not line.quantized and not line.decoded]
    small = [line for line in small if line.why != CACHED]
    count = sum(len(line.names) for line in small)
    if count > MOST_NORMS:
        before, after = (sum(getattr(line, name) for line in small) for name in ("bytes_before", "bytes_after"))
        together = PlanLine((f"{count} norms and biases",), (), None, False, small[0].why, before, after)
        lines = [*(line for line in lines if line not in small), together]
    return [
        {
            "names": line.names,
            "scheme": line.scheme.name if line.scheme else None,
            "decoded": line.decoded,
            "shape": line.shape,
            "bytes_before": line.bytes_before,
            "bytes_after": line.bytes_after,
            "why": line.why,
        }
        for line in lines
    ]
