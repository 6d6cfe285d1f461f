"""Ranks: several processes that share one job, on one machine or on several that share a file system.

`torchrun compress_fp8.py -m ...` and `accelerate launch --multi_gpu ...` start them. Every rank makes the same plan
and converts its own shards of it. Rank 0 claims the output directory, and writes index, card and config once all ranks
are done. In an evaluation each rank runs its share of the texts, and rank 0 gathers the results.

Ranks exchange their status through torch's TCPStore, which torchrun keeps; without torchrun rank 0 keeps it. Each rank
has one key there that only it writes. Its value has a heartbeat, the values for each all-gather so far, and the error
that ended the rank. A thread writes this rank's status and reads those of the others. The main thread waits for that
thread and never for the store itself, because a call into the store does not hear signals.

    with Ranks.from_environment(os.environ) as ranks:
        ranks.agree(None, "ready")      # ["ready", "ready"], once both ranks are here
        ranks.check()                   # raises an error if another rank has failed or died

Nothing here imports torch unless there are several ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import OpenQuantError, OutputError, UsageError
from .options import PATIENCE

if TYPE_CHECKING:
    from .plan.layout import Shard

T = TypeVar("T")

MAX_WORLD_SIZE = 1 << 16
# Seconds between heartbeats.
HEARTBEAT = 1.0
# A rank is dead if its heartbeat has not changed for so many heartbeats of the rank that looks. They are counted and
# not timed: ranks that were stopped together (Ctrl-Z, a closed laptop) have missed none.
MISSED = 30
# Shortest time in seconds between two exchanges with the store, while a rank waits for others.
POLL = 0.02
# Seconds after which the main thread wakes up from a wait, to hear signals.
WAKE = 0.2
# Seconds until a rank says that it waits for ranks that have not come, or that are slower.
SAY_MISSING = 2.0
SAY_SLOW = 10.0
# Seconds that a rank which failed, or was interrupted, waits for the others to hear of it.
GRACE = 30.0
GRACE_INTERRUPTED = 5.0
# Bytes that are sent through the store at a time, between two heartbeats. The store's limit is 8 MiB.
CHUNK = 1 << 20

# Hints for a rank that another rank ended: for any job, and for one that keeps finished shards.
RERUN = "run the same command again"
RERUN_CONTINUES = f"{RERUN}: finished shards are kept"


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
        rerun_hint: the hint of an error where another rank ended this one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    rendezvous: Rendezvous | None = None
    patience: float = field(default=PATIENCE, compare=False)
    say: Callable[[str], object] | None = field(default=None, compare=False, repr=False)
    rerun_hint: str = field(default=RERUN, compare=False, repr=False)
    _exchange: _StatusExchange | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """Read RANK, WORLD_SIZE and so on, as torchrun and accelerate set them; without these, a single process.

        Raises:
            UsageError: the variables contradict one another, or one is missing or no number.
        """
        if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
            return cls()
        size = _number(environment, "WORLD_SIZE", 1, MAX_WORLD_SIZE)
        rank = _number(environment, "RANK", 0, size - 1, f": WORLD_SIZE is {size}")
        if size == 1:
            return cls()

        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, default=str(size))
        because = f": LOCAL_WORLD_SIZE is {local_size}"
        local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, because, default=str(rank % local_size))
        if not environment.get("MASTER_ADDR"):
            raise UsageError(f"RANK={rank} and WORLD_SIZE={size} are set, MASTER_ADDR is not", _HINT)

        rendezvous = Rendezvous(
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT", 1, 65535),
            # As torch.distributed.rendezvous reads them.
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
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
        return [value] if self.size == 1 else self._collective(lambda exchange: exchange.all_gather(value))

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
        return [] if self.size == 1 else self._collective(lambda exchange: exchange.gather(data))

    def _collective(self, do: Callable[[_StatusExchange], T]) -> T:
        if self._exchange is None:
            if self.rendezvous is None:
                raise UsageError(f"{self.size} ranks have no place to meet", "use Ranks.from_environment(os.environ)")
            self._exchange = _StatusExchange(self, self.rendezvous)
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
        if self._exchange is not None and self._exchange.error is not None:
            raise self._exchange.error

    def __enter__(self) -> Ranks:
        self._exchange = None
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._exchange is not None:
            self._exchange.close(error)
        # The next job may be of another kind.
        self.rerun_hint = RERUN


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


def _number(
    environment: Mapping[str, str], name: str, low: int, high: int, because: str = "", default: str = ""
) -> int:
    text = environment.get(name, default)
    if text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    raise UsageError(f"{name}={text} is no number from {low} to {high}{because}", _HINT)


class _PeerError(OutputError):
    """Another rank's failure, which ended this rank too. The other ranks see it themselves."""


@dataclass(frozen=True)
class _Status:
    """What a rank has written under its key.

    Attributes:
        heartbeat: a counter that grows while the rank is alive.
        values: what the rank gave to each all-gather so far.
        failure: message and hint of the error that ended it.
        left: whether the rank has left the job.
    """

    heartbeat: int = 0
    values: Sequence[Any] = ()
    failure: Sequence[str] | None = None
    left: bool = False


class _StatusExchange:
    """Writes this rank's status to the store and reads the others', in a thread.

    The main thread calls `all_gather`, `gather`, `report` and `close`. The thread runs `_run`. `_lock` guards all
    fields that both use.

    Args:
        ranks: this process among the ranks.
        rendezvous: where the store is.

    Attributes:
        error: why this rank cannot go on: another rank failed or died, or the store is lost. None while all is well.
    """

    def __init__(self, ranks: Ranks, rendezvous: Rendezvous) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.rendezvous = rendezvous
        self.error: _PeerError | None = None

        self._others = [other for other in range(ranks.size) if other != ranks.rank]
        # This rank's status as the main thread set it, and the last one that is in the store.
        self._status = _Status()
        self._written: _Status | None = None
        # The statuses of the other ranks that have come.
        self._statuses: dict[int, _Status] = {}

        # The last heartbeats of the others, and for how many heartbeats of this rank they have not changed.
        self._heartbeats: dict[int, int] = {}
        self._missed: Counter[int] = Counter()
        self._heartbeat = 0
        self._next_heartbeat = 0.0

        # Why the store cannot be reached, as far as that is known.
        self._unreachable: str | None = None
        # Number of exchanges with the store since it was reached.
        self._exchanges = 0
        # How many exchanges the main thread had seen when it last woke up.
        self._seen = 0
        # How often in a row there was no new one.
        self._stalls = 0

        # The chunks that this rank is to send and to receive, by their keys; those that were received.
        self._sending: deque[tuple[str, bytes]] = deque()
        self._receiving: deque[str] = deque()
        self._received: dict[str, bytes] = {}

        # Seconds until the thread's next exchange, unless it is woken.
        self._pause = HEARTBEAT
        self._closed = False
        self._lock = threading.Lock()
        # By which the thread notifies the main thread of an exchange.
        self._exchanged = threading.Condition(self._lock)
        # By which the main thread wakes the thread up.
        self._wanted = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="openquant-ranks", daemon=True)
        self._thread.start()

    # What the main thread calls.

    @property
    def first_reports(self) -> bool:
        """Whether rank 0 has failed or left by itself, and so prints what ended the job."""
        first = self._statuses.get(0, _Status())
        return first.left or first.failure is not None

    def all_gather(self, value: Any) -> list[Any]:
        """Wait until every rank has given a value. Returns all values, in order of the ranks."""
        begin = time.monotonic()
        # As the other ranks read it, so that all get the same.
        value = json.loads(json.dumps(value))
        printed = ""
        with self._lock:
            self._status = replace(self._status, values=[*self._status.values, value])
            self._wake_thread(0.0)

            while late := self._late():
                if self.error is not None:
                    raise self.error
                waited = time.monotonic() - begin
                text = f"rank {self.rank} waits for {self._describe(late)}"
                if self._some_missing and waited > self.ranks.patience:
                    raise OutputError(
                        f"{text}, for {self.ranks.patience:g} seconds now",
                        "start all ranks, with one MASTER_ADDR and MASTER_PORT; --rendezvous-timeout gives them longer",
                    )

                if self._is_worth_saying(waited) and self.ranks.say and text != printed:
                    self.ranks.say(text)
                    printed = text
                self._wait_for_exchange(waited)

            self._pause = HEARTBEAT
            number = len(self._status.values) - 1
            statuses = {**self._statuses, self.rank: self._status}
            return [statuses[rank].values[number] for rank in range(self.ranks.size)]

    def _is_worth_saying(self, waited: float) -> bool:
        """Return whether a wait is so long that this rank says what it waits for."""
        if self._some_missing and (self._exchanges > 0 or self._unreachable is not None):
            return waited > SAY_MISSING
        return self.rank == 0 and waited > SAY_SLOW

    def gather(self, data: bytes) -> list[bytes]:
        """Send bytes to rank 0. Returns in rank 0 the bytes of ranks 1, 2, ...; in the others an empty list."""
        # The number of all-gathers so far makes the keys of this call unlike those of all others.
        number = len(self._status.values)
        first = self.rank == 0
        chunks = [] if first else [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        counts = self.all_gather(len(chunks))
        keys = [[f"{rank}/{number}/{chunk}" for chunk in range(count)] for rank, count in enumerate(counts)]

        with self._lock:
            self._sending.extend(zip(keys[self.rank], chunks, strict=True))
            self._receiving.extend(key for of_rank in keys if first for key in of_rank)
            while self._sending or self._receiving:
                if self.error is not None:
                    raise self.error
                self._wait_for_exchange(0.0)
            self._pause = HEARTBEAT
            return [b"".join(map(self._received.pop, of_rank)) for of_rank in keys[1:] if first]

    def report(self, error: BaseException) -> None:
        """Tell the other ranks of an error, and wait until none works on: what they share may then be let go."""
        with self._lock:
            self._status = replace(self._status, failure=self._failure(error))
            self._wait_until(lambda: all(status.failure or status.left for status in self._alive(self._others)), GRACE)

    def close(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one has left, and why; wait for those that still need it."""
        with self._lock:
            failure = self._failure(error) if error is not None else None
            self._status = replace(self._status, failure=self._status.failure or failure, left=True)

            # If rank 0 keeps the store, the others need it to the end. A launcher ends all ranks as soon as one has
            # failed, so a rank that failed waits until rank 0 has printed why.
            keeps_store = self.rank == 0 and not self.rendezvous.agent_store
            awaited: list[int] = []
            if keeps_store:
                awaited = self._others
            elif error is not None and self.rank:
                awaited = [0]

            grace = GRACE_INTERRUPTED if isinstance(error, KeyboardInterrupt) else GRACE
            self._wait_until(lambda: all(status.left for status in self._alive(awaited)), grace)
            self._closed = True
            self._wanted.notify_all()
        self._thread.join(GRACE_INTERRUPTED)

    def _wait_for_exchange(self, waited: float) -> None:
        """Wait until the thread has exchanged statuses once more, or for WAKE seconds."""
        # Counted and not timed, as heartbeats are.
        self._stalls = 0 if self._some_missing or self._seen != self._exchanges else self._stalls + 1
        self._seen = self._exchanges
        if self._stalls * WAKE > MISSED * HEARTBEAT:
            raise self._lost("it does not answer any more")
        self._wake_thread(waited)
        self._exchanged.wait(WAKE)

    def _wait_until(self, done: Callable[[], bool], grace: float) -> None:
        """Wait until this rank's status is in the store and `done` is true. Does not wait where there is no store."""
        begin = time.monotonic()
        self._wake_thread(0.0)
        while self._exchanges and self._thread.is_alive() and (waited := time.monotonic() - begin) < grace:
            if self._written is self._status and done():
                return
            self._wake_thread(waited)
            self._exchanged.wait(WAKE)

    def _wake_thread(self, waited: float) -> None:
        """Make the thread exchange statuses often at first, and less often the longer this rank has waited."""
        self._pause = min(HEARTBEAT / 2, max(POLL, waited / 10))
        if not waited:
            self._wanted.notify_all()

    @property
    def _some_missing(self) -> bool:
        """Whether some ranks have not come yet."""
        return len(self._statuses) < len(self._others)

    def _late(self) -> list[int]:
        """The ranks that have given fewer values than this one: those it waits for."""
        count = len(self._status.values)
        return [rank for rank in self._others if len(self._statuses.get(rank, _Status()).values) < count]

    def _alive(self, ranks: list[int]) -> list[_Status]:
        """The statuses of those of these ranks that have come and not died."""
        return [self._statuses[rank] for rank in ranks if rank in self._statuses and self._missed[rank] < MISSED]

    def _describe(self, late: list[int]) -> str:
        """What this rank waits for, in words."""
        if not self._exchanges:
            return f"{self.rendezvous}" + (f" ({self._unreachable})" if self._unreachable else "")
        names = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} others" if len(late) > 8 else "")
        return f"rank{'s' * (len(late) > 1)} {names} at {self.rendezvous}"

    def _failure(self, error: BaseException) -> tuple[str, str]:
        """Message and hint for the other ranks."""
        if isinstance(error, _PeerError):
            return error.message, error.hint
        if isinstance(error, KeyboardInterrupt):
            return f"rank {self.rank} was interrupted", self.ranks.rerun_hint
        failed = f"rank {self.rank} failed"
        if isinstance(error, OpenQuantError):
            return f"{failed}: {error.message}", error.hint
        return f"{failed}: {error!r}", "see what that rank printed"

    def _lost(self, reason: str) -> _PeerError:
        """The error of a rank that has lost the store."""
        return _PeerError(f"rank {self.rank} lost {self.rendezvous}: {reason}", self.ranks.rerun_hint)

    # What the thread runs.

    def _run(self) -> None:
        while not self._closed:
            try:
                store = self._connect()
                while not self._closed:
                    self._exchange_once(store)
                    with self._lock:
                        self._wanted.wait(self._pause)
            except Exception as error:
                reason = _one_line(error)
                with self._lock:
                    if self.error is not None:
                        return
                    # Trying again cannot help if another program has the port, or if the launcher's store is gone.
                    final = "EADDRINUSE" in reason or (self.rendezvous.agent_store and self._exchanges > 0)
                    if final or not self._some_missing:
                        self.error = self._lost(reason)
                        self._exchanged.notify_all()
                        return

                    self._statuses.clear()
                    self._exchanges = 0
                    self._written = None
                    self._unreachable = reason
                    self._wanted.wait(HEARTBEAT / 2)

    def _connect(self) -> Any:
        """Open the store, or serve it, and return the part of it that belongs to this call of the job."""
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
            host,
            port,
            None,
            serves,
            timedelta(seconds=MISSED),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store = torch_distributed.PrefixStore(f"openquant/{self.rendezvous.restarts}", store)
        # A script may call compress() several times: the n-th calls of all ranks belong together.
        return torch_distributed.PrefixStore(str(store.add(f"calls/{self.rank}", 1)), store)

    def _exchange_once(self, store: Any) -> None:
        """Write this rank's status if it changed or its heartbeat is due; read the others'; move at most one chunk."""
        with self._lock:
            sending = next(iter(self._sending), None)
            receiving = next(iter(self._receiving), None)
            status = self._status
            due = time.monotonic() >= self._next_heartbeat
            self._heartbeat += due
            come = set(self._statuses)

        # Write.
        if due or self._written is not status:
            store.set(str(self.rank), json.dumps(asdict(replace(status, heartbeat=self._heartbeat))))
        if sending is not None:
            store.set(*sending)

        # Read.
        received = None
        if receiving is not None and store.check([receiving]):
            received = store.get(receiving)
            store.delete_key(receiving)
        present = [rank for rank in self._others if rank in come or store.check([str(rank)])]
        data = store.multi_get([str(rank) for rank in present]) if present else []
        statuses = {rank: _Status(**json.loads(text)) for rank, text in zip(present, data, strict=True)}

        with self._lock:
            if due:
                self._next_heartbeat = time.monotonic() + HEARTBEAT
                self._count_missed(statuses)
            self._statuses = statuses
            self._written = status
            if sending is not None:
                self._sending.popleft()
            if received is not None:
                self._received[self._receiving.popleft()] = received

            self._exchanges += 1
            self.error = self.error or self._peer_error()
            self._exchanged.notify_all()

    def _count_missed(self, statuses: Mapping[int, _Status]) -> None:
        """Count for how many heartbeats of this rank those of the others have not changed."""
        for rank, status in statuses.items():
            if status.heartbeat == self._heartbeats.get(rank):
                self._missed[rank] += 1
            else:
                self._missed[rank] = 0
            self._heartbeats[rank] = status.heartbeat

    def _peer_error(self) -> _PeerError | None:
        """The failure or death of another rank, as an error of this one."""
        for status in self._statuses.values():
            if status.failure is not None:
                return _PeerError(*status.failure)
        for rank in self._statuses:
            if self._missed[rank] >= MISSED:
                silence = f"nothing was heard of it for {MISSED * HEARTBEAT:g} seconds"
                return _PeerError(f"rank {rank} died: {silence}", self.ranks.rerun_hint)
        return None


def _one_line(error: Exception) -> str:
    """What went wrong, in one line: 'Connection refused'."""
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
