"""How shards come: who computes waits for what is computed next, and says what it has done with.

traffic.wait_for("model.layers.3", stopped)
traffic.path("model-00002-of-00005.safetensors")
traffic.finished("model.layers.3")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class ShardProvider(Protocol):
    """How source shards come. Calls may come from any thread."""

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """Wait until all shards that something needs are here, or `stopped()` is true."""

    def path(self, name: str) -> Path:
        """Where a source shard lies that is here."""

    def finished(self, what: str) -> None:
        """Is told that nothing of this needs its shards any more."""


@dataclass(frozen=True)
class LocalShards:
    """Shards that lie in a directory.

    Attributes:
        root: the directory.
    """

    root: Path

    def wait_for(self, what: str, stopped: Callable[[], bool]) -> None:
        """They are all here."""

    def path(self, name: str) -> Path:
        """Where one lies."""
        return self.root / name

    def finished(self, what: str) -> None:
        """They stay."""
