"""The board on which ranks tell one another how far they are: torch's TCPStore, which nothing else imports.

Each rank has a page there that only it writes: a beat that shows it lives, what it told at each agreement, why it
failed. A thread reads all pages and writes this rank's, since a call into the store hears no signal; the main thread
only ever looks at what that thread has found.

    board = Board(Meeting("localhost", 29500), rank=0, size=2, again="run the same command again")
    board.agree("ready")        # ["ready", "ready"], once the other has told something too
    board.leave(None)
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import import_module
from typing import Any

from ..errors import OpenQuantError, OutputError
from ..options import PATIENCE

# Seconds between beats, and how many of its own a rank counts without one of another before it takes that for dead.
# Counted rather than timed: ranks that were stopped together (Ctrl-Z, a laptop's lid) have missed nothing.
BEAT, SILENCE = 1.0, 30
# Seconds between looks while somebody waits for one.
LOOK = 0.02
# Seconds after which the main thread looks up from a wait.
NAP = 0.2
# Seconds before a wait is worth a line: for ranks that have not come, and for slower ones.
SOON, LATER = 2.0, 10.0
# Seconds for which a rank that failed waits until the first has heard of it, and one that was interrupted.
PARTING, HASTE = 30.0, 5.0
# Bytes that go through the store at a time, between two beats; it takes no more than 8 MiB.
PIECE = 1 << 20


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet.

    Attributes:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        launched: whether the launcher keeps the store there; else the first rank does.
        attempt: how often the launcher has started the ranks, which tells their pages from those of earlier ones.
    """

    host: str
    port: int
    launched: bool = False
    attempt: str = "0"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Elsewhere(OutputError):
    """What ended this rank is the end of another, which the others see for themselves: they are not told again."""


@dataclass(frozen=True)
class Page:
    """What a rank has written.

    Attributes:
        beat: grows while it lives.
        facts: what it told, one for each agreement so far.
        failure: message and hint of what ended it.
        left: whether it is gone.
    """

    beat: int = 0
    facts: tuple[Any, ...] = ()
    failure: tuple[str, str] | None = None
    left: bool = False

    @classmethod
    def from_bytes(cls, data: bytes) -> Page:
        """The page that a rank has written as JSON."""
        page = json.loads(data)
        if page["failure"] is not None:
            message, hint = page["failure"]
            page["failure"] = str(message), str(hint)
        return cls(page["beat"], tuple(page["facts"]), page["failure"], page["left"])


class Board:
    """All ranks' pages, read and written by a thread.

    Args:
        meeting: where the store is.
        rank: this rank's number.
        size: how many there are.
        again: what people are told to do where another rank ended this one.
        patience: seconds until all must have come.
        say: is told what this rank waits for, if that takes a while.

    Attributes:
        trouble: why this rank cannot go on: another one's failure or death, or the loss of the store.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        again: str,
        patience: float = PATIENCE,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.meeting, self.rank, self.size = meeting, rank, size
        self.again, self.patience, self.say = again, patience, say
        self.trouble: Elsewhere | None = None
        self._others = [other for other in range(size) if other != rank]
        self._mine = Page()
        self._written: Page | None = None
        self._pages: dict[int, Page] = {}
        # The last beats of the others, and for how many of this rank's they have not changed.
        self._heard: dict[int, int] = {}
        self._silent: Counter[int] = Counter()
        self._beat = 0
        self._next_beat = 0.0
        # Why the store cannot be reached, as far as that is known.
        self._obstacle: str | None = None
        self._looks = 0
        # For how many naps in a row there was no look, and how many there had been before the last.
        self._stalled, self._seen = 0, 0
        # What goes to the store and what comes from it, by names that no page has.
        self._given: deque[tuple[str, bytes]] = deque()
        self._wanted: deque[str] = deque()
        self._got: dict[str, bytes] = {}
        self._pause = BEAT
        self._closed = False
        self._lock = threading.Lock()
        # What the main thread waits for, and what the other does.
        self._news, self._wish = threading.Condition(self._lock), threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="openquant-ranks", daemon=True)
        self._thread.start()

    @property
    def first(self) -> bool:
        """Whether this rank is the first, which speaks for all and keeps the store."""
        return self.rank == 0

    @property
    def heard(self) -> bool:
        """Whether the first rank has ended by itself, and so says why."""
        first = self._page(0)
        return first.left or first.failure is not None

    @property
    def _arriving(self) -> bool:
        return len(self._pages) < len(self._others)

    def agree(self, fact: Any) -> list[Any]:
        """Wait until every rank has told a fact; all of them, in order of the ranks."""
        begun = time.monotonic()
        # As the others read it, so that all get the same.
        fact = json.loads(json.dumps(fact))
        said = ""
        with self._lock:
            self._mine = replace(self._mine, facts=(*self._mine.facts, fact))
            self._hurry(0.0)
            while late := self._late():
                if self.trouble is not None:
                    raise self.trouble
                waited = time.monotonic() - begun
                arriving = self._arriving
                text = f"rank {self.rank} waits for {self._awaited(late)}"
                if arriving and waited > self.patience:
                    raise OutputError(
                        f"{text}, for {self.patience:g} seconds now",
                        "start all ranks, with one MASTER_ADDR and MASTER_PORT; --rendezvous-timeout gives them longer",
                    )
                known = arriving and (self._looks > 0 or self._obstacle is not None)
                if self.say and text != said and (waited > SOON if known else self.first and waited > LATER):
                    self.say(text)
                    said = text
                self._nap(waited)
            self._pause = BEAT
            pages = {**self._pages, self.rank: self._mine}
            return [pages[rank].facts[len(self._mine.facts) - 1] for rank in range(self.size)]

    def gather(self, data: bytes) -> list[bytes]:
        """Give bytes to the first rank; in that one, those of all others in order of the ranks."""
        # Told apart from those of other times by what was agreed on before.
        at, first = len(self._mine.facts), self.first
        pieces = [] if first else [data[low : low + PIECE] for low in range(0, len(data), PIECE)]
        counts = self.agree(len(pieces))
        names = [[f"{rank}/{at}/{number}" for number in range(count)] for rank, count in enumerate(counts)]
        with self._lock:
            self._given.extend(zip(names[self.rank], pieces, strict=True))
            self._wanted.extend(name for of_rank in names if first for name in of_rank)
            while self._given or self._wanted:
                if self.trouble is not None:
                    raise self.trouble
                self._nap(0.0)
            self._pause = BEAT
            return [b"".join(map(self._got.pop, of_rank)) for of_rank in names[1:] if first]

    def _nap(self, waited: float) -> None:
        """Wait for the other thread's next look, or for a moment."""
        # Counted, as beats are.
        self._stalled = 0 if self._arriving or self._seen != self._looks else self._stalled + 1
        self._seen = self._looks
        if self._stalled * NAP > SILENCE * BEAT:
            raise Elsewhere(f"rank {self.rank} lost {self.meeting}: it does not answer any more", self.again)
        self._hurry(waited)
        self._news.wait(NAP)

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, and wait until none works any more: what they share may then be let go."""
        with self._lock:
            self._mine = replace(self._mine, failure=self._failure(error))
            self._wait_until(lambda: all(page.failure or page.left for page in self._living(self._others)), PARTING)

    def leave(self, error: BaseException | None) -> None:
        """Tell the others that this rank is gone, and why; wait for those that need it."""
        with self._lock:
            failure = self._failure(error) if error is not None else None
            self._mine = replace(self._mine, failure=self._mine.failure or failure, left=True)
            # The store goes with its host. A launcher ends all ranks with the first that fails, and that one speaks.
            host = self.first and not self.meeting.launched
            wanted = self._others if host else [0] if error is not None and not self.first else []
            patience = HASTE if isinstance(error, KeyboardInterrupt) else PARTING
            self._wait_until(lambda: all(page.left for page in self._living(wanted)), patience)
            self._closed = True
            self._wish.notify_all()
        self._thread.join(HASTE)

    def _living(self, ranks: list[int]) -> list[Page]:
        """The pages of those of these ranks that have come and not died."""
        return [self._pages[rank] for rank in ranks if rank in self._pages and self._silent[rank] < SILENCE]

    def _wait_until(self, done: Callable[[], bool], patience: float) -> None:
        """Wait until this rank's page is written and something holds; not where there is no store to be read."""
        begun = time.monotonic()
        self._hurry(0.0)
        while self._looks and self._thread.is_alive() and (waited := time.monotonic() - begun) < patience:
            if self._written is self._mine and done():
                return
            self._hurry(waited)
            self._news.wait(NAP)

    def _failure(self, error: BaseException) -> tuple[str, str]:
        """Message and hint that the others are to be told of an error."""
        if isinstance(error, Elsewhere):
            return error.message, error.hint
        named = f"rank {self.rank} failed"
        if isinstance(error, OpenQuantError):
            return f"{named}: {error.message}", error.hint
        if isinstance(error, KeyboardInterrupt):
            return f"rank {self.rank} was interrupted", self.again
        return f"{named}: {error!r}", "see what that rank printed"

    def _page(self, rank: int) -> Page:
        return self._pages.get(rank, Page())

    def _late(self) -> list[int]:
        """Numbers of the ranks that have told fewer facts than this one: those it waits for."""
        count = len(self._mine.facts)
        return [rank for rank in self._others if len(self._page(rank).facts) < count]

    def _awaited(self, late: list[int]) -> str:
        if not self._looks:
            return f"{self.meeting}" + (f" ({self._obstacle})" if self._obstacle else "")
        names = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} others" if len(late) > 8 else "")
        return f"rank{'s' * (len(late) > 1)} {names} at {self.meeting}"

    def _hurry(self, waited: float) -> None:
        """Have the other thread look the oftener the less has been waited so far."""
        self._pause = min(BEAT / 2, max(LOOK, waited / 10))
        if not waited:
            self._wish.notify_all()

    def _run(self) -> None:
        while not self._closed:
            try:
                store = self._join()
                while not self._closed:
                    self._look(store)
                    with self._lock:
                        self._wish.wait(self._pause)
            except Exception as error:
                reason = _reason(error)
                with self._lock:
                    if self.trouble is not None:
                        return
                    # Another program has the port; or the launcher's store is lost, where this rank has been counted.
                    final = "EADDRINUSE" in reason or (self.meeting.launched and self._looks > 0)
                    if final or not self._arriving:
                        self.trouble = Elsewhere(f"rank {self.rank} lost {self.meeting}: {reason}", self.again)
                        self._news.notify_all()
                        return
                    self._pages.clear()
                    self._looks, self._written, self._obstacle = 0, None, reason
                    self._wish.wait(BEAT / 2)

    def _join(self) -> Any:
        """The store at which the ranks of this run meet."""
        import socket

        host, port = self.meeting.host, self.meeting.port
        serves = self.first and not self.meeting.launched
        # Both asked first, since torch would try for ever, and quietly.
        socket.getaddrinfo(host, port)
        # Its types do not export what its documentation does.
        distributed: Any = import_module("torch.distributed")
        if not serves:
            socket.create_connection((host, port), 5).close()
        whole = distributed.TCPStore(
            host, port, None, serves, timedelta(seconds=SILENCE), wait_for_workers=False, multi_tenant=True
        )
        begun = distributed.PrefixStore(f"openquant/{self.meeting.attempt}", whole)
        # A job may call compress() several times: all ranks' n-th calls belong together.
        return distributed.PrefixStore(str(begun.add(f"calls/{self.rank}", 1)), begun)

    def _look(self, store: Any) -> None:
        """Write this rank's page, if it is time or there is news, and read those of the others that have come.

        Of what is larger, a piece goes or comes each time.
        """
        with self._lock:
            given, wanted = next(iter(self._given), None), next(iter(self._wanted), None)
            mine, due = self._mine, time.monotonic() >= self._next_beat
            self._beat += due
            known = set(self._pages)
        if due or self._written is not mine:
            store.set(str(self.rank), json.dumps(asdict(replace(mine, beat=self._beat))))
        if given is not None:
            store.set(*given)
        came = None
        if wanted is not None and store.check([wanted]):
            came = store.get(wanted)
            store.delete_key(wanted)
        present = [rank for rank in self._others if rank in known or store.check([str(rank)])]
        data = store.multi_get([str(rank) for rank in present]) if present else []
        pages = {rank: Page.from_bytes(page) for rank, page in zip(present, data, strict=True)}
        with self._lock:
            if due:
                self._next_beat = time.monotonic() + BEAT
                for rank, page in pages.items():
                    self._silent[rank] = self._silent[rank] + 1 if page.beat == self._heard.get(rank) else 0
                    self._heard[rank] = page.beat
            self._pages, self._written = pages, mine
            if given is not None:
                self._given.popleft()
            if came is not None:
                self._got[self._wanted.popleft()] = came
            self._looks += 1
            self.trouble = self.trouble or self._found()
            self._news.notify_all()

    def _found(self) -> Elsewhere | None:
        """What ended another rank, as an error for this one; None if all go on."""
        for page in self._pages.values():
            if page.failure is not None:
                return Elsewhere(*page.failure)
        for rank in self._pages:
            if self._silent[rank] >= SILENCE:
                return Elsewhere(
                    f"rank {rank} died: nothing was heard of it for {SILENCE * BEAT:g} seconds", self.again
                )
        return None


def _reason(error: Exception) -> str:
    """What went wrong, in one line: 'Connection refused'."""
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
