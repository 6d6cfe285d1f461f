"""The word of the verdict, which the mean KL decides, and how figures are written.

Reports import this module, so it imports no torch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# The content of an eval.json: docs/figures.md explains its keys, docs/schema/eval.json has their types.
OutputEvaluation: TypeAlias = dict[str, Any]


def counted_questions(count: int) -> str:
    """Return a number of questions in words: "1 question", "1,319 questions"."""
    return "1 question" if count == 1 else f"{count:,} questions"


# "same": mean KL up to this many times the floor's, which another program's rounding could cause.
AT_FLOOR = 2.0
# "close", "similar" and "changed": mean KL up to these, in nats. On two models and in all schemes the share of tokens
# that differ was half the square root of the KL (docs/results.md): one token in 18, in 6 and in 3.
CLOSE, SIMILAR, CHANGED = 0.01, 0.1, 0.5
# The interval of fewer texts than this says next to nothing: there are too few to draw anew from.
ENOUGH_TEXTS = 8


def verdict_word(kl: float, floor: float) -> str:
    """Return the verdict on an output: "same", "close", "similar", "changed" or "broken".

    Args:
        kl: mean KL divergence of the output from the source, in nats.
        floor: mean KL divergence of the noise floor, the source with rounding noise, in nats.
    """
    if kl <= AT_FLOOR * floor:
        return "same"
    limits = {"close": CLOSE, "similar": SIMILAR, "changed": CHANGED}
    return next((word for word, limit in limits.items() if kl <= limit), "broken")
