"""Provides source shards to code that reads them, which waits for shards it needs and says when it is done with them.

provider.wait_for("model.layers.3", stopped)
provider.path("model-00002-of-00005.safetensors")
provider.finished("model.layers.3")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class ShardProvider(Protocol):
    """Provides source shards, on disk or as they are downloaded. Methods may be called from any thread."""

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until all shards that `what` needs are on disk, or `stopped()`.

        Args:
            what: name of what reads the shards, such as a unit or an output shard.
            stopped: returns whether to give up waiting; called from time to time.

        Raises:
            SourceError: a shard cannot be downloaded.
            OutputError: it cannot be written.
        """

    def path(self, name: str) -> Path:
        """Return the path of a source shard that is on disk, by its file name."""

    def finished(self, what: str) -> None:
        """Note that `what` does not need its shards any more, so that they may be deleted."""


@dataclass(frozen=True)
class LocalShards:
    """Shards that are all in one directory, and stay there.

    Attributes:
        root: the directory.
    """

    root: Path

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Return at once, since all shards are on disk; `what` and `stopped` are ignored."""

    def path(self, name: str) -> Path:
        """Return the path of a shard, by its file name; whether it exists is not checked."""
        return self.root / name

    def finished(self, what: str) -> None:
        """Do nothing, since the shards stay."""
