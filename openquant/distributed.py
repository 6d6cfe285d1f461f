"""Ranks: several processes that share one job, on one machine or on several that share a file system.

`torchrun compress_fp8.py -m ...` and `accelerate launch --multi_gpu ...` start them. Every rank makes the same plan
and converts its own shards of it. Rank 0 claims the output directory, and writes index, card and config once all ranks
are done. In an evaluation each rank runs its share of the texts, and rank 0 gathers the results.

Ranks exchange values and errors through torch's TCPStore, which torchrun keeps; without torchrun rank 0 keeps it. A
rank that waits asks the store again and again and sleeps between, because a call into the store does not hear signals.
A launcher notices that a rank was killed, and ends the others. Without one the first rank waits, and says for whom.

    with Ranks.from_environment(os.environ) as ranks:
        ranks.agree(None, "ready")      # ["ready", "ready"], once both ranks are here
        ranks.check()                   # raises an error if another rank has failed or died

Nothing here imports torch unless there are several ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .errors import OpenQuantError, OutputError, SourceError, UsageError
from .options import PATIENCE

if TYPE_CHECKING:
    from .plan.layout import Shard

T = TypeVar("T")

# Seconds between two looks at the store: while a rank waits, at first and later; and while it works.
POLL = 0.02
WAKE = 0.2
LOOK = 0.5
# Seconds until a rank says that it waits for ranks that have not come, or that are slower.
SAY_MISSING = 2.0
SAY_SLOW = 10.0
# Seconds that a rank which failed, or was interrupted, waits for the others to hear of it.
GRACE = 30.0
GRACE_INTERRUPTED = 5.0
# Bytes that are sent through the store at a time. The store's limit is 8 MiB.
CHUNK = 1 << 20

# Hint for a rank that another rank ended.
_RERUN = "run the same command again: it continues"


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks find the store.

    Attributes:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        agent_store: whether the launcher keeps the store; otherwise rank 0 does.
        restarts: how often the launcher has restarted the ranks. It separates their keys from those of earlier starts.
    """

    host: str
    port: int
    agent_store: bool = False
    restarts: str = "0"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class Ranks:
    """This process among the ranks of a job. A context manager: at its end this rank leaves the others.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks (the world size).
        local_rank: number of this rank on its machine.
        local_size: number of ranks on this machine.
        rendezvous: where the ranks find the store; None only for a single process.
        patience: seconds until all ranks must have come.
        say: is called with a line that says what this rank waits for, if that takes a while.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: Rendezvous | None = None
    patience: float = field(default=PATIENCE, compare=False)
    say: Callable[[str], object] | None = field(default=None, compare=False, repr=False)
    _exchange: _Exchange | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """Read RANK, WORLD_SIZE and so on, as torchrun and accelerate set them; without these, a single process.

        Raises:
            UsageError: the variables contradict one another, or one is missing or no number.
        """
        if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
            return cls()

        try:
            rank = int(environment["RANK"])
            size = int(environment["WORLD_SIZE"])
            if (rank, size) == (0, 1):
                return cls()

            local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
            local_rank = int(environment.get("LOCAL_RANK", rank % max(1, local_size)))
            if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
                raise ValueError(f"RANK is {rank} of {size}, LOCAL_RANK {local_rank} of {local_size}")

            rendezvous = Rendezvous(
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
                # As torch.distributed.rendezvous reads them.
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(f"the environment of ranks makes no sense: {error}", _HINT) from None

        return cls(rank, size, local_rank, local_size, rendezvous)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank must print its own error: rank 0 does, and any rank that rank 0 has not heard of."""
        return self.first or (self._exchange is not None and not self._exchange.first_reports)

    def share(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return those of `shards` that this rank converts, by name. All ranks must give the same shards.

        Largest first, each goes to the rank with the fewest bytes so far.
        """
        loads = [0] * self.size
        mine = []
        for shard in sorted(shards, key=lambda shard: (-shard.nbytes, shard.name)):
            least = loads.index(min(loads))
            loads[least] += shard.nbytes
            if least == self.rank:
                mine.append(shard)
        return sorted(mine, key=lambda shard: shard.name)

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """All-gather a small value: wait until every rank has given one. All ranks must make the same calls, in order.

        Args:
            error: what stopped this rank, or None. It is reported to the other ranks and raised.
            value: anything that JSON can hold.

        Returns:
            The value of each rank, in order of the ranks.

        Raises:
            Exception: `error`.
            OutputError: another rank failed, died or did not come, or the store is lost.
            UsageError: there are several ranks and no `rendezvous`.
        """
        if error is not None:
            if self._exchange is not None:
                self._exchange.report(error)
            raise error
        if self.size == 1:
            return [value]
        return self._collective(lambda exchange: exchange.all_gather(value))

    def first_does(self, do: Callable[[], T]) -> T:
        """Call a function in rank 0 alone.

        Args:
            do: the function, without arguments. It returns what JSON can hold.

        Returns:
            In all ranks what the function returned.

        Raises:
            Exception: what the function raised, in rank 0.
            OutputError: rank 0 failed or died.
        """
        value, error = attempt(do) if self.first else (None, None)
        result: T = self.agree(error, value)[0]
        return result

    def all_do(self, do: Callable[[], T]) -> T:
        """Call a function in all ranks and wait until all have returned; if one fails, all end.

        Args:
            do: the function, without arguments; each rank gives its own.

        Returns:
            What the function returned in this rank.

        Raises:
            Exception: what the function raised in this rank.
            OutputError: another rank failed or died.
        """
        result, error = attempt(do)
        self.agree(error)
        return cast(T, result)

    def require_same(self, value: Any, what: str) -> None:
        """Require that all ranks see the same. All of them call this together.

        Args:
            value: what this rank sees, as JSON: digests of texts, names and sizes of shards.
            what: what messages call it: "sources".

        Raises:
            SourceError: another rank sees something else.
            OutputError: another rank failed or died.
        """
        values = self.agree(None, value)
        if any(other != values[0] for other in values):
            raise SourceError(f"ranks see different {what}", "let all of them read the same files")

    def gather(self, data: bytes) -> list[bytes]:
        """Gather bytes of any length in rank 0. Waits until every rank has given some.

        Args:
            data: what this rank sends. What rank 0 gives is not used.

        Returns:
            In rank 0 the bytes of ranks 1, 2, ...; in the others an empty list.

        Raises:
            OutputError: another rank failed, died or did not come, or the store is lost.
            UsageError: there are several ranks and no `rendezvous`.
        """
        if self.size == 1:
            return []
        return self._collective(lambda exchange: exchange.gather(data))

    def _collective(self, do: Callable[[_Exchange], T]) -> T:
        if self._exchange is None:
            if self.rendezvous is None:
                raise UsageError(f"{self.size} ranks have no place to meet", "use Ranks.from_environment(os.environ)")
            self._exchange = _Exchange(self, self.rendezvous)
        try:
            return do(self._exchange)
        except OutputError as error:
            self._exchange.report(error)
            raise

    def check(self) -> None:
        """Raise an error if this rank cannot go on. Does not wait; may be called from any thread.

        Raises:
            OutputError: another rank has failed or died, or the store is lost.
        """
        if self._exchange is not None:
            self._exchange.check()

    def __enter__(self) -> Ranks:
        self._exchange = None
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._exchange is not None:
            self._exchange.close(error)


def attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a function and return what it raises instead of raising it, for `Ranks.agree`.

    Args:
        do: the function, without arguments.

    Returns:
        Its result and None, or None and the exception.
    """
    try:
        return do(), None
    except Exception as error:
        return None, error


_HINT = "start ranks with torchrun; to run as one process, unset RANK and WORLD_SIZE"


class _PeerError(OutputError):
    """Another rank's failure, which ended this rank too. The other ranks see it themselves."""


class _Exchange:
    """What this rank tells the others through torch's TCPStore, and hears of them.

    Keys are "2/1" for what rank 1 gave to the second all-gather; "failure" for what ended the job first; "ended/1" once
    rank 1 does not work any more; and "left/1" once it needs the store no more.

    Args:
        ranks: this process among the ranks.
        rendezvous: where the store is.

    Attributes:
        first_reports: whether rank 0 has ended by itself, and so prints what ended the job.
    """

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.rendezvous = rendezvous
        self.first_reports = False

        self._others = [other for other in range(ranks.size) if other != ranks.rank]
        self._store: Any = None
        # Number of all-gathers so far.
        self._calls = 0
        # When the current wait began, and what was said of it.
        self._begin = 0.0
        self._said = ""

        # Why this rank cannot go on, and when to look for that again. Any thread may look.
        self._error: _PeerError | None = None
        self._next_look = 0.0
        self._lock = threading.Lock()

    def all_gather(self, value: Any) -> list[Any]:
        """Wait until every rank has given a value. Returns all values, in order of the ranks."""
        self._begin = time.monotonic()
        self._said = ""
        if self._store is None:
            self._store = self._connect()

        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.ranks.size)]
        with self._lost_store():
            self._store.set(keys[self.rank], json.dumps(value))
            self._wait_for(keys)
            return [json.loads(text) for text in self._store.multi_get(keys)]

    def gather(self, data: bytes) -> list[bytes]:
        """Send bytes to rank 0. Returns in rank 0 the bytes of ranks 1, 2, ...; in the others an empty list."""
        chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        counts = self.all_gather(len(chunks))

        with self._lost_store():
            if self.rank == 0:
                return [self._receive(rank, counts[rank]) for rank in self._others]
            for number, chunk in enumerate(chunks):
                self._store.set(f"{self._calls}/{self.rank}/{number}", chunk)
        return []

    def _receive(self, rank: int, count: int) -> bytes:
        """Take the chunks of another rank out of the store."""
        chunks = []
        for number in range(count):
            key = f"{self._calls}/{rank}/{number}"
            self._wait_for([key])
            chunks.append(self._store.get(key))
            self._store.delete_key(key)
        return b"".join(chunks)

    def check(self) -> None:
        """Raise an error if this rank cannot go on. The store is asked now and then only."""
        with self._lock:
            if self._error is None and self._store is not None and time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK
                self._error = self._find_error()
            if self._error is not None:
                raise self._error

    def _find_error(self) -> _PeerError | None:
        """What ended another rank, or the loss of the store, as an error of this one."""
        try:
            if not self._store.check(["failure"]):
                return None
            rank, message, hint = json.loads(self._store.get("failure"))
        except RuntimeError as error:
            return self._lost(_one_line(error))
        self.first_reports = rank == 0
        return _PeerError(message, hint)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks of an error, and wait until none works on: what they share may then be let go."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            self._tell(error)
            here = [rank for rank in self._others if self._store.check([f"1/{rank}"])]
            self._wait_until([f"ended/{rank}" for rank in here], GRACE)

    def close(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one has left, and why; wait for those that still need it."""
        if self._store is None:
            return
        grace = GRACE
        if isinstance(error, KeyboardInterrupt):
            grace = GRACE_INTERRUPTED

        with suppress(RuntimeError):
            self._tell(error)
            # A launcher ends all ranks as soon as one has failed, so that one waits until rank 0 has printed why.
            if error is not None and self.rank:
                self._wait_until(["ended/0"], grace)
                self.first_reports = self.first_reports or self._store.check(["ended/0"])
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0 and not self.rendezvous.agent_store:
                here = [rank for rank in self._others if self._store.check([f"1/{rank}"])]
                self._wait_until([f"left/{rank}" for rank in here], grace)

    def _tell(self, error: BaseException | None) -> None:
        """Write that this rank has ended, and why if it is the first that failed."""
        if error is not None:
            self._store.compare_set("failure", "", json.dumps([self.rank, *self._failure(error)]))
        self._store.set(f"ended/{self.rank}", "")

    def _failure(self, error: BaseException) -> tuple[str, str]:
        """Message and hint for the other ranks."""
        if isinstance(error, _PeerError):
            return error.message, error.hint
        if isinstance(error, KeyboardInterrupt):
            return f"rank {self.rank} was interrupted", _RERUN
        failed = f"rank {self.rank} failed"
        if isinstance(error, OpenQuantError):
            return f"{failed}: {error.message}", error.hint
        return f"{failed}: {error!r}", "see what that rank printed"

    def _wait_for(self, keys: Sequence[str]) -> None:
        """Wait until all keys are there. A key has the number of its rank behind its first slash."""
        pause = POLL
        while not self._store.check(keys):
            self.check()
            if time.monotonic() - self._begin > SAY_MISSING:
                late = [key.split("/")[1] for key in keys if not self._store.check([key])]
                names = ", ".join(late[:8]) + (f" and {len(late) - 8} others" if len(late) > 8 else "")
                self._say(f"rank{'s' * (len(late) > 1)} {names} at {self.rendezvous}")
            time.sleep(pause)
            pause = min(WAKE, pause * 1.5)

    def _wait_until(self, keys: Sequence[str], grace: float) -> None:
        """Wait until all keys are there, for `grace` seconds at most."""
        end = time.monotonic() + grace
        while keys and not self._store.check(keys) and time.monotonic() < end:
            time.sleep(POLL)

    def _say(self, what: str) -> None:
        """Say what this rank waits for, once that takes a while; give up on ranks that do not come."""
        text = f"rank {self.rank} waits for {what}"
        waited = time.monotonic() - self._begin
        arrives = self._calls <= 1
        if arrives and waited > self.ranks.patience:
            raise OutputError(
                f"{text}, for {self.ranks.patience:g} seconds now",
                "start all ranks, with one MASTER_ADDR and MASTER_PORT; --rendezvous-timeout gives them longer",
            )

        is_worth_saying = waited > SAY_MISSING if arrives else waited > SAY_SLOW and self.rank == 0
        if is_worth_saying and self.ranks.say and text != self._said:
            self.ranks.say(text)
            self._said = text

    @contextmanager
    def _lost_store(self) -> Iterator[None]:
        """Turn errors of the store into one that says that it is lost."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(_one_line(error)) from None

    def _lost(self, reason: str) -> _PeerError:
        """The error of a rank that has lost the store."""
        return _PeerError(f"rank {self.rank} lost {self.rendezvous}: {reason}", _RERUN)

    def _connect(self) -> Any:
        """Open the store, or serve it, once it can be reached."""
        while True:
            try:
                return self._open()
            except (OSError, RuntimeError, ValueError) as error:
                reason = _one_line(error)
                # Another program has the port.
                if "EADDRINUSE" in reason:
                    raise self._lost(reason) from None
            self._say(f"{self.rendezvous} ({reason})")
            time.sleep(WAKE)

    def _open(self) -> Any:
        """Open or serve the store, and return the part of it that belongs to this call of the job."""
        import socket

        host = self.rendezvous.host
        port = self.rendezvous.port
        serves = self.rank == 0 and not self.rendezvous.agent_store
        # Both are tried first because torch would retry for ever without a word.
        socket.getaddrinfo(host, port)
        if not serves:
            socket.create_connection((host, port), 5).close()

        # torch's type hints lack names that its documentation has.
        torch_distributed: Any = import_module("torch.distributed")
        store = torch_distributed.TCPStore(
            host, port, None, serves, timedelta(seconds=GRACE), wait_for_workers=False, multi_tenant=True
        )
        store = torch_distributed.PrefixStore(f"openquant/{self.rendezvous.restarts}", store)
        # A script may call compress() several times: the n-th calls of all ranks belong together.
        return torch_distributed.PrefixStore(str(store.add(f"calls/{self.rank}", 1)), store)


def _one_line(error: Exception) -> str:
    """What went wrong, in one line: 'Connection refused'."""
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
