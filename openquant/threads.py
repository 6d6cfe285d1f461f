"""Work on several threads while the main thread waits and can handle signals.

Futures are those of concurrent.futures, without its thread pool: Python does not exit before the threads of a pool have
ended, and a request to the Hub may never end.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from .machine import memory_used_again

Item = TypeVar("Item")
Output = TypeVar("Output")


class FirstFailure:
    """Keeps the first error of several threads, and raises it in the thread that waits for them.

        failure = FirstFailure(changed)
        with failure.catch():        # in each thread
            work()
        failure.check()             # in the thread that waits

    Args:
        changed: notified of each error, in the thread that failed.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an error, unless there was one before, and wake the threads that wait."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Keep any exception that is raised inside the context, where it ends."""
        try:
            yield
        except BaseException as error:
            self.keep(error)

    def check(self) -> None:
        """Raise the kept error, if there is one.

        Raises:
            BaseException: the first error.
        """
        if self._error is not None:
            raise self._error


def in_threads(work: Callable[[], None], count: int, stopped: threading.Event) -> None:
    """Call `work` on several threads at once and wait until all calls have returned.

    Args:
        work: function that returns soon once `stopped` is set.
        count: number of threads.
        stopped: is set when the wait is over, also if an interrupt or an error ends it.

    Raises:
        BaseException: the first error that `work` raised.
    """
    futures: list[Future[None]] = []
    try:
        with memory_used_again():
            for number in range(count):
                futures.append(in_thread(work, f"openquant-{number}"))

            running = set(futures)
            while running:
                # The timeout lets the main thread handle signals.
                done, running = wait(running, 0.2, FIRST_COMPLETED)
                # If several failed, the error of the thread that was started first is raised.
                for future in futures:
                    if future in done:
                        future.result()
    finally:
        stopped.set()
        wait(futures)


def in_parallel(make: Callable[[Item], Output], items: Sequence[Item], count: int) -> Generator[Output, None, None]:
    """Yield `make(item)` for each item in order, computed on up to `count` threads ahead of the caller.

    The first error is raised at once. Neither it nor an interrupt waits for the other threads, which may be waiting for
    an answer that never comes.

    Args:
        make: function of an item, called on any thread.
        items: the items.
        count: largest number of calls at a time.

    Yields:
        What `make` returned, in the order of the items.
    """
    waiting = deque(items)
    futures: deque[Future[Output]] = deque()
    while waiting or futures:
        running = [future for future in futures if not future.done()]
        if waiting and len(running) < count and len(futures) < 2 * count:
            futures.append(in_thread(partial(make, waiting.popleft())))
            continue

        for future in futures:
            if future.done():
                future.result()
        if futures[0].done():
            yield futures.popleft().result()
        else:
            wait(running, 0.2, FIRST_COMPLETED)


def in_thread(do: Callable[[], Output], name: str = "openquant") -> Future[Output]:
    """Call a function on a thread for which Python's exit does not wait.

    Args:
        do: the function, without arguments.
        name: name of the thread.

    Returns:
        The future of its result.

    Raises:
        RuntimeError: the system allows no more threads.
    """
    future: Future[Output] = Future()

    def call() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    # Python in a browser, as in the static Space, has no threads.
    if sys.platform == "emscripten":
        call()
    else:
        threading.Thread(target=call, name=name, daemon=True).start()
    return future
