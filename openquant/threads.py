"""Work done on several threads while the main thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def in_threads(work: Callable[[], None], count: int, stopped: threading.Event) -> None:
    """Call `work` on so many threads at once and wait until all have returned.

    Args:
        work: it handles its own errors, and returns soon once `stopped` is set.
        count: number of threads.
        stopped: set when the wait is over, also when an interrupt ends it.
    """
    threads = [threading.Thread(target=work, name=f"openquant-{number}", daemon=True) for number in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                # With a timeout, so that the main thread gets to see signals.
                thread.join(0.2)
    finally:
        stopped.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def in_parallel(make: Callable[[Item], Made], items: Sequence[Item], count: int) -> Generator[Made, None, None]:
    """What `make` makes of each item, in their order, on so many threads at once and as many ahead of who asks.

    The first failure is raised at once. Neither it nor an interrupt waits for what the other threads are doing, which
    may be a request that nobody answers.
    """
    made: dict[int, Made] = {}
    failed: list[BaseException] = []
    changed = threading.Condition()
    begun = given = 0
    closed = False

    def work() -> None:
        nonlocal begun
        while True:
            with changed:
                while not closed and not failed and begun == min(given + 2 * count, len(items)):
                    changed.wait()
                if closed or failed:
                    return
                number, begun = begun, begun + 1
            try:
                result = make(items[number])
            except BaseException as error:
                failed.append(error)
            else:
                made[number] = result
            with changed:
                changed.notify_all()

    for number in range(min(count, len(items))):
        threading.Thread(target=work, name=f"openquant-{number}", daemon=True).start()
    try:
        for number in range(len(items)):
            with changed:
                while number not in made:
                    if failed:
                        raise failed[0]
                    changed.wait(0.2)
                given += 1
                changed.notify_all()
            yield made.pop(number)
    finally:
        with changed:
            closed = True
            changed.notify_all()
