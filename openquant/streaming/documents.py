"""Divides documents among ranks."""

from __future__ import annotations

from typing import Any, Protocol


class DocumentRanks(Protocol):
    """What is needed of ranks to share documents; distributed.Ranks has it.

    Attributes:
        rank: number of this process, from 0.
        size: the number of processes.
    """

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Gather bytes in rank 0, which gets those of the other ranks in their order; others get an empty list.

        Raises:
            OutputError: another rank has failed.
        """

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """All-gather a small value.

        Args:
            error: what stopped this rank, or None.
            value: anything that JSON can hold.

        Returns:
            The value of each rank, in order of the ranks.

        Raises:
            Exception: `error`, if this rank has one.
            OutputError: another rank has failed.
        """


def documents_of_rank(documents: int, ranks: DocumentRanks | None) -> range:
    """Return the numbers of this rank's documents, every `size`-th of them.

    Args:
        documents: the number of documents.
        ranks: the processes that share them; None for a single process, which has all documents.
    """
    return range(documents) if ranks is None else range(ranks.rank, documents, ranks.size)
