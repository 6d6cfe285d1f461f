"""Several processes at one job, on one machine or on several that share a file system.

`torchrun compress_fp8.py -m ...` and `accelerate launch --multi_gpu ...` start them. Every rank makes the same
plan and takes its own shards of it; the first claims the output directory and writes index, card and config once all
are done. Of an evaluation each runs its share of the texts, and the first is given what all have found.

They tell one another how far they are at the board of board.py, and none outlives another's failure or death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import OutputError, UsageError
from ..options import PATIENCE
from .board import Board, Meeting

if TYPE_CHECKING:
    from ..plan.layout import Shard

T = TypeVar("T")

MOST_RANKS = 1 << 16
# What people are told to do where a rank was ended by another: whatever the job, and if it leaves whole shards.
AGAIN = "run the same command again"
CONTINUES = f"{AGAIN}: finished shards are kept"


@dataclass
class Ranks:
    """This process among those of the job; a context manager, which leaves the others.

    Attributes:
        rank: its number, the first is 0.
        size: how many there are.
        local_rank: its number on this machine.
        local_size: how many are on this machine.
        meeting: where they meet; None only for a process on its own.
        patience: seconds until all must have come.
        say: is told what this rank waits for, if that takes a while.
        again: what people are told to do where another rank ended this one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: Meeting | None = None
    patience: float = field(default=PATIENCE, compare=False)
    say: Callable[[str], object] | None = field(default=None, compare=False, repr=False)
    again: str = field(default=AGAIN, compare=False, repr=False)
    _board: Board | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """This process, as torchrun and accelerate describe it in RANK, WORLD_SIZE and so on; on its own without these.

        Raises:
            UsageError: what is set does not make sense.
        """
        if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
            return cls()
        size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS)
        rank = _number(environment, "RANK", 0, size - 1, f": WORLD_SIZE is {size}")
        if size == 1:
            return cls()
        local_size = _number({"LOCAL_WORLD_SIZE": str(size), **environment}, "LOCAL_WORLD_SIZE", 1, size)
        among = f": LOCAL_WORLD_SIZE is {local_size}"
        local_rank = _number(
            {"LOCAL_RANK": str(rank % local_size), **environment}, "LOCAL_RANK", 0, local_size - 1, among
        )
        if not environment.get("MASTER_ADDR"):
            raise UsageError(f"RANK={rank} and WORLD_SIZE={size} are set, MASTER_ADDR is not", _HINT)
        meeting = Meeting(
            environment["MASTER_ADDR"],
            _number({"MASTER_PORT": "", **environment}, "MASTER_PORT", 1, 65535),
            # As torch.distributed.rendezvous understands them.
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        return cls(rank, size, local_rank, local_size, meeting)

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank must say itself what ended it: the first one, and any that the first has not heard."""
        return self.first or (self._board is not None and not self._board.heard)

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
            fact: anything that JSON can hold and the others should know.

        Raises:
            Exception: this rank's own error, or one that names the rank which failed, died or did not come.
        """
        if error is not None:
            if self._board is not None:
                self._board.fail(error)
            raise error
        return [fact] if self.size == 1 else self._together(lambda board: board.agree(fact))

    def gather(self, data: bytes) -> list[bytes]:
        """Wait until every rank is here and has given bytes to the first, which gets those of all others, in order.

        Args:
            data: more than `agree` is made for; those of the first go nowhere.

        Returns:
            In the first rank what each of the others gave, in these nothing.

        Raises:
            Exception: one that names the rank which failed, died or did not come.
        """
        return [] if self.size == 1 else self._together(lambda board: board.gather(data))

    def _together(self, do: Callable[[Board], T]) -> T:
        if self._board is None:
            if self.meeting is None:
                raise UsageError(f"{self.size} ranks have no place to meet", "use Ranks.from_environment(os.environ)")
            self._board = Board(self.meeting, self.rank, self.size, self.again, self.patience, self.say)
        try:
            return do(self._board)
        except OutputError as trouble:
            self._board.fail(trouble)
            raise

    def check(self) -> None:
        """Look, without waiting, whether another rank has failed or died. May be called from any thread.

        Raises:
            OutputError: one has.
        """
        if self._board is not None and self._board.trouble is not None:
            raise self._board.trouble

    def __enter__(self) -> Ranks:
        self._board = None
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # The next job may be of another kind.
        self.again = AGAIN
        if self._board is not None:
            self._board.leave(error)


def attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `do` returns, and None; or None, and what it raises: the other ranks hear of it before it is raised."""
    try:
        return do(), None
    except Exception as error:
        return None, error


_HINT = "start ranks with torchrun; to run as one process, unset RANK and WORLD_SIZE"


def _number(environment: Mapping[str, str], name: str, low: int, high: int, because: str = "") -> int:
    text = environment[name]
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise UsageError(f"{name}={text} is no number from {low} to {high}{because}", _HINT)
