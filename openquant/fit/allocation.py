"""The best choice for each size: every mixture that no other beats in both size and predicted KL divergence.

frontier = find_frontier([[(995_328, 0.004), (1_769_472, 0.0001)], ...])
frontier.within(70_000_000)          # index of the best mixture of at most so many bytes
frontier.choices(index)              # [0, 1, 1, ...]: the choice of each unit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Mixtures that are kept after each unit. With more, of those whose sizes are closest only the best is kept.
MOST = 1 << 16


@dataclass(frozen=True, eq=False)
class Frontier:
    """Mixtures, smallest first: each one has a smaller KL divergence than all smaller ones.

    Attributes:
        nbytes: size of each mixture, int64 [n], ascending.
        kl: predicted KL divergence of each, in nats, float64 [n], descending.
    """

    nbytes: npt.NDArray[np.int64]
    kl: npt.NDArray[np.float64]
    _steps: tuple[tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]], ...]

    def within(self, nbytes: int) -> int | None:
        """Return the index of the mixture with the smallest KL divergence of at most so many bytes; None if all are
        larger."""
        index = int(np.searchsorted(self.nbytes, nbytes, "right")) - 1
        return index if index >= 0 else None

    def at_most(self, kl: float) -> int | None:
        """Return the index of the smallest mixture with at most so large a KL divergence; None if there is none."""
        index = int(np.searchsorted(-self.kl, -kl))
        return index if index < len(self.kl) else None

    def choices(self, index: int) -> list[int]:
        """Return the index of each unit's choice in a mixture."""
        chosen: list[int] = []
        for choice, parent in reversed(self._steps):
            chosen.append(int(choice[index]))
            index = int(parent[index])
        return chosen[::-1]


def find_frontier(units: Sequence[Sequence[tuple[int, float]]], most: int = MOST) -> Frontier:
    """Find the best mixtures of all sizes by dynamic programming over units.

    Args:
        units: for each unit its choices: size in bytes and KL divergence.
        most: the number of mixtures that are kept after each unit. Below it the result is exact.

    Returns:
        The mixtures that no other beats in size and KL divergence.
    """
    nbytes, kl = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    for choices in units:
        sizes, costs = np.array([size for size, _ in choices]), np.array([cost for _, cost in choices])
        all_bytes = (nbytes[:, None] + sizes).reshape(-1)
        all_kl = (kl[:, None] + costs).reshape(-1)
        order = np.lexsort((all_kl, all_bytes))
        running = np.minimum.accumulate(all_kl[order])
        best = np.r_[True, running[1:] < running[:-1]]
        kept = order[best]
        if len(kept) > most:
            # The last of each bin of sizes has the least KL divergence of it.
            bins = (all_bytes[kept] - all_bytes[kept[0]]) * most // (all_bytes[kept[-1]] - all_bytes[kept[0]] + 1)
            kept = kept[np.r_[bins[1:] != bins[:-1], True] | np.r_[True, np.zeros(len(kept) - 1, bool)]]
        nbytes, kl = all_bytes[kept], all_kl[kept]
        parent, choice = np.divmod(kept, len(choices))
        steps.append((choice.astype(np.int8), parent.astype(np.int32)))
    return Frontier(nbytes, kl, tuple(steps))
