"""What a streamed pass through a model needs: its tokenizer, room for hidden states, and its shards in time.

transformers is imported when it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed import Ranks, attempt
from ..errors import SourceError
from ..files.checkpoint import Checkpoint
from ..files.fingerprint import Fingerprint
from ..hub.fetch import ShardSupply
from ..hub.source import Source

if TYPE_CHECKING:
    from ..data.tokenizer import Tokenizer
    from .offload import OffloadFile

# Bytes of hidden states that wait in memory, and of Gram matrices, if nobody says how much of it there is.
BUDGET = 4 << 30


def find_tokenizer(source: Source, checkpoint: Checkpoint) -> Tokenizer:
    """A checkpoint's tokenizer.

    Raises:
        SourceError: there is none, or it is damaged.
    """
    from ..data.tokenizer import FILES, TEMPLATES, load_tokenizer

    wanted = {*FILES, *TEMPLATES, "generation_config.json"}
    source.fetch_files([name for name in checkpoint.files if name in wanted])
    return load_tokenizer(source.root, source.repo or source.name)


def vocabulary_of(checkpoint: Checkpoint) -> int | None:
    """Tokens that a model has, as config.json says."""
    inner = checkpoint.config.get("text_config")
    places = (checkpoint.config, inner if isinstance(inner, dict) else {})
    return next((size for place in places if isinstance(size := place.get("vocab_size"), int)), None)


def hidden_bytes(checkpoint: Checkpoint, tokens: int) -> int:
    """Bytes that so many tokens take between layers, in bfloat16, with embeddings that wait beside what became of them;
    0 where config.json does not tell."""
    inner = checkpoint.config.get("text_config")
    size = next((each.get("hidden_size") for each in (checkpoint.config, inner) if isinstance(each, dict)), 0)
    return 2 * tokens * (size if isinstance(size, int) else 0) * 2


def scratch_for(hidden: int, place: Path, budget: int, asked: bool) -> OffloadFile | None:
    """A file for so many bytes of hidden states, where they may be more than memory has room for.

    Args:
        hidden: bytes.
        place: the directory it would lie in.
        budget: bytes of them that memory has room for.
        asked: whether the user named the directory.

    Raises:
        OutputError: no file can be made there.
    """
    from .offload import OffloadFile

    return None if hidden <= budget else OffloadFile(place, budget, asked)


class ArrivingShards:
    """How the shards of a model come, unit by unit; those of units that no text goes through are passed over.

    Args:
        supply: brings them.
        needs: the shards of each unit.
        name: the model's, for messages.
        fingerprint: refuses shards that changed since it was made.
        ranks: this process among several, of which each streams for itself.
        hashes: whether each shard is added to the fingerprint when it is here.
    """

    def __init__(
        self,
        supply: ShardSupply,
        needs: Mapping[str, Sequence[str]],
        name: str,
        fingerprint: Fingerprint,
        ranks: Ranks,
        *,
        hashes: bool = True,
    ) -> None:
        self.supply, self.needs, self.name, self.ranks = supply, needs, name, ranks
        self.fingerprint, self.hashes = fingerprint, hashes
        self.path = supply.path
        self._left = dict.fromkeys(supply.needs)

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until a unit's shards are here.

        Raises:
            SourceError: they cannot be had, or are gone already.
        """
        if what in self._left:
            # The last first: while an earlier one is given up, none of these begins to come in its place.
            for unit in reversed(list(itertools.takewhile(lambda unit: unit != what, self._left))):
                self.finished(unit)
        elif self.supply.scratch is not None and what in self.supply.needs:
            raise SourceError(
                f"{self.name} computes {what} again, or later than expected: its shards are gone",
                "leave --stream out",
            )
        self.supply.wait_for(what, lambda: stopped() or attempt(self.ranks.check)[1] is not None)
        self.ranks.check()
        shards = self.needs.get(what, ())
        self.fingerprint.require_unchanged(shards)
        for shard in shards if self.hashes else ():
            self.fingerprint.add(shard, self.path(shard))

    def finished(self, what: str) -> None:
        """Nothing more is read for this unit."""
        if what in self._left:
            del self._left[what]
            self.supply.finished(what)
