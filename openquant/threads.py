"""Work done on several threads while the main thread waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from .machine import memory_used_again

Item = TypeVar("Item")
Made = TypeVar("Made")


class FirstFailure:
    """What first went wrong in one of several threads, to be raised in the one that waits for them.

        failure = FirstFailure(stopped.set)
        with failure.kept():        # in each thread
            work()
        failure.check()             # in the one that waits

    Args:
        tell: called, in the thread that failed, each time something is kept.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Remember an error, unless there was one before."""
        with self._lock:
            self._error = self._error or error
        self._tell()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep whatever is raised inside."""
        try:
            yield
        except BaseException as error:
            self.keep(error)

    def check(self) -> None:
        """Raise what was kept, if anything was.

        Raises:
            BaseException: the first.
        """
        if self._error is not None:
            raise self._error


def in_threads(work: Callable[[], None], count: int, stopped: threading.Event) -> None:
    """Call `work` on so many threads at once and wait until all have returned; on fewer where no more can be started.

    Args:
        work: it returns soon once `stopped` is set.
        count: number of threads.
        stopped: set when the wait is over, also when an interrupt or an error ends it.

    Raises:
        BaseException: the first that `work` raised.
    """
    failure = FirstFailure(stopped.set)
    changed = threading.Condition()
    working = 0

    def run() -> None:
        nonlocal working
        with changed:
            if stopped.is_set():
                return
            working += 1
        with failure.kept():
            work()
        with changed:
            working -= 1
            changed.notify_all()

    threads: list[threading.Thread] = []
    try:
        with memory_used_again():
            while len(threads) < count:
                thread = threading.Thread(target=run, name=f"openquant-{len(threads)}", daemon=True)
                if not _started(thread):
                    break
                threads.append(thread)
            if not threads:
                run()
            for thread in threads:
                while thread.is_alive():
                    # With a timeout, so that the main thread gets to see signals.
                    thread.join(0.2)
    finally:
        stopped.set()
        # One may be at work that is not listed: an interrupt can come out of the call that starts it.
        with changed:
            while working:
                changed.wait()
        for thread in threads:
            thread.join()
    failure.check()


def in_parallel(make: Callable[[Item], Made], items: Sequence[Item], count: int) -> Generator[Made, None, None]:
    """What `make` returns for each item, in their order, made on `count` threads, ahead of the caller.

    The first failure is raised at once. Neither it nor an interrupt waits for what the other threads are doing, which
    may be a request that nobody answers.
    """
    made: dict[int, Made] = {}
    changed = threading.Condition()

    def wake() -> None:
        with changed:
            changed.notify_all()

    failure = FirstFailure(wake)
    begun = given = 0
    closed = False

    def work() -> None:
        nonlocal begun
        while True:
            with changed:
                while not closed and not failure and begun == min(given + 2 * count, len(items)):
                    changed.wait()
                if closed or failure:
                    return
                number, begun = begun, begun + 1
            with failure.kept():
                made[number] = make(items[number])
            wake()

    for number in range(min(count, len(items))):
        if not _started(threading.Thread(target=work, name=f"openquant-{number}", daemon=True)):
            if number == 0:
                yield from map(make, items)
                return
            break
    try:
        for number in range(len(items)):
            with changed:
                while number not in made:
                    failure.check()
                    changed.wait(0.2)
                given += 1
                changed.notify_all()
            yield made.pop(number)
    finally:
        with changed:
            closed = True
            changed.notify_all()


def _started(thread: threading.Thread) -> bool:
    """Whether a thread could be started: the system may have no more of them, or no memory for its stack."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return False
    return True


class Helpers:
    """Threads that do what they are given, each started when all others are busy; a context manager.

    Leaving it waits for all that was given. Where no thread can be started, the caller does the work.

    Args:
        count: how many threads at most.
        name: what they are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._given: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, do: Callable[[], None]) -> Future[None]:
        """Have something done that handles its own errors; what comes back is done when it is."""
        done: Future[None] = Future()
        with self._lock:
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                if _started(thread):
                    self._threads.append(thread)
                else:
                    self._count = len(self._threads)
            helped = bool(self._threads)
            if helped:
                self._given.put((do, done))
        if not helped:
            do()
            done.set_result(None)
        return done

    def _run(self) -> None:
        while (task := self._given.get()) is not None:
            do, done = task
            do()
            done.set_result(None)
            self._idle.release()
