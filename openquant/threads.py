"""Work done on several threads while the main thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
