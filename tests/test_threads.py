"""Work on several threads: all of it is done, and what one raises is raised."""

from __future__ import annotations

import threading

import pytest

from openquant.threads import in_threads


def test_what_a_thread_raises_is_raised() -> None:
    stopped = threading.Event()

    def work() -> None:
        if threading.current_thread().name == "openquant-1":
            raise MemoryError
        stopped.wait(60)

    with pytest.raises(MemoryError):
        in_threads(work, 3, stopped)
