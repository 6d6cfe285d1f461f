"""Documents shared out among several processes."""

from __future__ import annotations

from typing import Any, Protocol


class DocumentRanks(Protocol):
    """This process among those that share an evaluation, such as distributed.Ranks.

    Attributes:
        rank: its number, the first is 0.
        size: how many there are.
    """

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Give bytes to the first, which gets those of all others in their order; the others get none."""

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        """Tell all what JSON can hold; what each told, in their order."""


def documents_of_rank(documents: int, team: DocumentRanks | None) -> range:
    """Numbers of the documents that are this process's; the first has the first one."""
    return range(documents) if team is None else range(team.rank, documents, team.size)
