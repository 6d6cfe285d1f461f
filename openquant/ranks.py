"""Several processes at one job, on one machine or on several that share a file system.

`torchrun compress_fp8.py -m ...` and `accelerate launch compress_fp8.py -m ...` start them. Every rank makes the same
plan and takes its own shards of it; the first claims the output directory and writes index, card and config once all
are done. They tell each other of failures through torch.distributed (gloo), which nothing but this module imports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from .errors import OpenQuantError, OutputError, UsageError
from .plan import Shard

# Ranks wait for the slowest one; a rank that dies is noticed at once, since its connections close.
PATIENCE = timedelta(days=14)


def are_described(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or accelerate describes a job there."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job.

    Attributes:
        rank: its number, the first is 0.
        size: how many there are.
        local_rank: its number on this machine.
        local_size: how many are on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    # Whether the connections were made here: a caller's own stay.
    _connected: list[bool] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """As torchrun and accelerate describe it; a process on its own where they do not."""
        if not are_described(environment):
            return cls()
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank = int(environment.get("LOCAL_RANK", rank))
            return cls(rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size)))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE or their like: {error}", "start ranks with torchrun") from None

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def share(self, shards: Sequence[Shard]) -> list[Shard]:
        """This rank's shards: the largest first, each to the rank with the least so far."""
        loads = [0] * self.size
        mine = []
        for shard in sorted(shards, key=lambda shard: (-shard.nbytes, shard.name)):
            least = loads.index(min(loads))
            loads[least] += shard.nbytes
            if least == self.rank:
                mine.append(shard)
        return sorted(mine, key=lambda shard: shard.name)

    def agree(self, error: Exception | None, fact: Any = None) -> list[Any]:
        """Wait until every rank is here; every rank's fact, in order.

        Args:
            error: what stopped this rank, None if nothing did.
            fact: anything picklable the others should know.

        Raises:
            Exception: this rank's own error, or one that names the rank which failed or died.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [fact]
        import torch.distributed as distributed

        told: list[Any] = [None] * self.size
        try:
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", timeout=PATIENCE)
                self._connected.append(True)
            shown = (error.message, error.hint) if isinstance(error, OpenQuantError) else error and (repr(error), "")
            distributed.all_gather_object(told, (shown, fact))
        except RuntimeError as lost:
            if error is not None:
                raise error from None
            raise OutputError(
                f"another rank died while rank {self.rank} waited for it: {str(lost).splitlines()[0]}",
                "run the same command again: finished shards are kept",
            ) from None
        if error is not None:
            raise error
        for rank, (problem, _) in enumerate(told):
            if problem is not None:
                raise OutputError(f"rank {rank} failed: {problem[0]}", problem[1] or "see what that rank printed")
        return [fact for _, fact in told]

    def close(self) -> None:
        """Close the connections to the other ranks; a process that ends with open ones is aborted."""
        if self._connected:
            import torch.distributed as distributed

            self._connected.clear()
            distributed.destroy_process_group()
