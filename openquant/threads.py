"""Work on several threads while the main thread waits and hears signals.

Futures are those of concurrent.futures. Its pool of threads is used by `Helpers` alone: Python does not exit before the
threads of a pool have ended, and a request to the Hub may never end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
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
    """Call `work` on several threads at once and wait until all calls have returned.

    Args:
        work: returns soon once `stopped` is set.
        count: number of threads; fewer where the system starts no more, and the caller's own where it starts none.
        stopped: set when the wait is over, also when an interrupt or an error ends it.

    Raises:
        BaseException: the first that `work` raised.
    """
    futures: list[Future[None]] = [Future() for _ in range(count)]
    running: set[Future[None]] = set()
    try:
        with memory_used_again():
            for future in futures:
                if not _started(_call_once(work, future), f"openquant-{len(running)}"):
                    break
                running.add(future)
            if not running:
                work()
            while running:
                # With a timeout, so that the main thread gets to see signals.
                done, running = wait(running, 0.2, FIRST_COMPLETED)
                for future in done:
                    future.result()
    finally:
        stopped.set()
        # Also for a thread that was started by a call that an interrupt came out of.
        wait([future for future in futures if not future.cancel()])


def in_parallel(make: Callable[[Item], Made], items: Sequence[Item], count: int) -> Generator[Made, None, None]:
    """Yield `make(item)` for each item, in their order, made on up to `count` threads ahead of the caller.

    The first failure is raised at once. Neither it nor an interrupt waits for what the other threads are doing, which
    may be a request that nobody answers.
    """
    left = deque(items)
    coming: deque[Future[Made]] = deque()
    while left or coming:
        running = [future for future in coming if not future.done()]
        if left and len(running) < count and len(coming) < 2 * count:
            coming.append(in_thread(partial(make, left.popleft())))
            continue
        for future in coming:
            if future.done():
                future.result()
        if coming[0].done():
            yield coming.popleft().result()
        else:
            wait(running, 0.2, FIRST_COMPLETED)


def in_thread(do: Callable[[], Made]) -> Future[Made]:
    """Call `do` on a thread that Python's exit does not wait for; right here where no thread can be started."""
    future: Future[Made] = Future()
    call = _call_once(do, future)
    if not _started(call, "openquant"):
        call()
    return future


class Helpers:
    """A pool of threads whose callers do the work themselves where no thread can be started; a context manager.

    Leaving it waits for all calls that were submitted.

    Args:
        count: number of threads at most.
        name: the beginning of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def submit(self, do: Callable[[], None]) -> Future[None]:
        """Have `do` called."""
        future: Future[None] = Future()
        call = _call_once(do, future)
        try:
            self._pool.submit(call)
        except (RuntimeError, MemoryError):
            # No further thread could be started. Those of the pool may still make the call.
            call()
        return future


def _call_once(do: Callable[[], Made], future: Future[Made]) -> Callable[[], None]:
    """A function that calls `do` when it is first called, unless the future is cancelled, and puts the result there."""
    first = threading.Lock()

    def call() -> None:
        if first.acquire(blocking=False) and future.set_running_or_notify_cancel():
            try:
                made = do()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(made)

    return call


def _started(do: Callable[[], None], name: str) -> bool:
    """Start a thread; False where the system has no more of them, or no memory for its stack."""
    try:
        threading.Thread(target=do, name=name, daemon=True).start()
    except (RuntimeError, MemoryError):
        return False
    return True
