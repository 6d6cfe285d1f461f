"""Work on several threads: all of it is done, and what one raises is raised."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT, tree
from openquant import compress
from openquant.threads import Helpers, in_threads


@pytest.mark.parametrize(("stack", "threads"), [(1 << 29, {"openquant-0"}), (1 << 30, {"MainThread"})])
def test_fewer_threads_do_the_work_where_no_more_can_be_started(tmp_path, source, stack, threads):
    code = (
        "import resource, sys, threading\n"
        "from openquant import compress\n"
        "from openquant.result import Reporter\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (900 << 20),) * 2)\n"
        f"threading.stack_size({stack})\n"
        "class Seen(Reporter):\n"
        "    seen = set()\n"
        "    def on_advance(self, nbytes):\n"
        "        self.seen.add(threading.current_thread().name)\n"
        "compress(sys.argv[1], sys.argv[2], workers=4, reporter=Seen())\n"
        "print(sorted(Seen.seen))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{sorted(threads)}\n", "")
    compress(source, tmp_path / "same")
    assert tree(tmp_path / "out") == tree(tmp_path / "same")


def test_what_a_thread_raises_is_raised() -> None:
    stopped = threading.Event()

    def work() -> None:
        if threading.current_thread().name == "openquant-1":
            raise MemoryError
        stopped.wait(60)

    with pytest.raises(MemoryError):
        in_threads(work, 3, stopped)


def test_an_interrupt_out_of_the_call_that_starts_a_thread_waits_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped, ended, start = threading.Event(), threading.Event(), threading.Event(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(60)
        raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        stopped.wait(60)
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_threads(work, 2, stopped)
    assert ended.is_set()


def test_helpers_do_all_they_were_given() -> None:
    done: list[str] = []
    with Helpers(3, "helper") as helpers:
        given = [helpers.submit(lambda: done.append(threading.current_thread().name)) for _ in range(100)]
        given[50].result(60)
    assert all(each.done() for each in given)
    assert len(done) == 100
    assert set(done) <= {"helper_0", "helper_1", "helper_2"}
