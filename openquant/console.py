"""The terminal: what is said on which stream, progress, interrupts. Nothing else prints."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from .errors import OutputError
from .interrupts import INTERRUPTED, leave
from .report.reporter import Reporter

if TYPE_CHECKING:
    from .hub.source import Source
    from .plan.plan import Plan
    from .report.result import Result


# Seconds that a process which is to end at once waits while its message is printed.
TIME_TO_PRINT = 0.5


class Interrupts:
    """SIGINT and SIGTERM. The first raises KeyboardInterrupt, the second ends the process at once.

    Before `catching` is set the first ends the process too. After `finish` a signal ends it with the command's own exit
    code.

    Python drops an exception that a handler raises at certain moments (in the import lock's own callbacks, for one),
    so the request is also remembered, for whoever asks.

    Python runs handlers in the main thread, between bytecodes; a matrix product or a read from a dead disk may keep it
    from there for minutes. So a thread counts signals too, and ends the process at the second.

    Attributes:
        requested: whether one came.
        catching: whether KeyboardInterrupt is caught by now.
        told: whether a result was printed, after which nothing else is on stdout.
        explain: prints that the command was interrupted.
    """

    def __init__(self, explain: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self.catching = False
        self.told = False
        self.explain = explain
        self.previous: dict[int, Any] = {}
        self._code: int | None = None
        self._explaining = threading.Lock()
        self._ends: tuple[int, int] | None = None
        self._wakeup = -1

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.getsignal(number)
            # A shell has its background jobs ignore SIGINT, and so it stays.
            if self.previous[number] is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._unraisable
        self._start_counting()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            # The thread reads the end of the pipe, and closes the other side.
            os.close(self._ends[1])
        for number, handler in self.previous.items():
            # Where the process ends now, `_handle` stays: Python may wait long for threads of libraries.
            if handler is not leave or self._code is None:
                signal.signal(number, handler)
        sys.unraisablehook = sys.__unraisablehook__

    def _handle(self, *_: object) -> None:
        if self._code is not None:
            os._exit(self._code)
        if not self.catching:
            leave()
        if self.requested:
            self.end()
        self.requested = True
        raise KeyboardInterrupt

    def _start_counting(self) -> None:
        try:
            read, write = self._ends = os.pipe()
        except OSError:
            return  # no more files may be open: the handler alone has to do
        os.set_blocking(write, False)
        thread = threading.Thread(target=self._count, args=(read,), name="openquant-signals", daemon=True)
        # Little is done there, and memory may be limited.
        size = threading.stack_size(1 << 18)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            os.close(read)
            os.close(write)
            self._ends = None
            return
        finally:
            threading.stack_size(size)
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def _count(self, read: int) -> None:
        count = 0
        while numbers := os.read(read, 64):
            if self._code is not None:
                os._exit(self._code)
            count += sum(number in self.previous for number in numbers)
            if count > 1:
                self.end()
        os.close(read)

    def end(self) -> NoReturn:
        """Say that the command was interrupted, unless that is said already, and end the process."""
        try:
            # It is never released: of main thread and counting thread the second gives the first time to print.
            if self._explaining.acquire(blocking=False):
                self.explain()
            else:
                self._explaining.acquire(timeout=TIME_TO_PRINT)
        finally:
            os._exit(INTERRUPTED)

    @staticmethod
    def _unraisable(what: sys.UnraisableHookArgs) -> None:
        # That it was dropped is remembered, and no news to the user.
        if what.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(what)

    def finish(self, code: int) -> None:
        """The command is done: from now on a signal ends the process with this exit code."""
        self._code = code

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was asked for."""
        if self.requested:
            raise KeyboardInterrupt


def mend_streams() -> None:
    """Open what Python was started without of its three streams; characters a stream cannot encode are escaped."""
    for name, way, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        # Python has None where the process was started with the stream closed; its number must not go to a file.
        if getattr(sys, name) is None:
            # What is printed on such a stdout fails as it does in other programs: it reaches nobody.
            setattr(sys, name, os.fdopen(os.open(os.devnull, way), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO, end: str = "\n") -> OSError | None:
    """Print, and return the error that prevented it, None if none did: the work goes on (`| head`, a full disk)."""
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError as error:
        # What the stream still holds would fail again at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def require_told(failure: OSError | None) -> None:
    """Refuse to call a run done of which text on stdout was lost; not where nobody wants it (`| head`, `>&-`).

    Raises:
        OutputError: it was lost.
    """
    if failure is not None and failure.errno not in (errno.EPIPE, errno.EBADF):
        raise _untold(failure)


def _untold(failure: OSError) -> OutputError:
    return OutputError(
        f"stdout cannot be written: {failure.strerror}",
        "run the same command again where it can; what is converted is not converted twice",
    )


def fail(message: str, hint: str, as_json: bool) -> None:
    """Print an error as its two lines on stderr, and as an object on stdout if a program asked for one."""
    if as_json:
        say(json.dumps({"error": message, "hint": hint}), sys.stdout)
    say(f"error: {_one_line(message)}\nhint: {_one_line(hint)}", sys.stderr)


def _one_line(text: str) -> str:
    """A message that a terminal shows and does not obey: it may quote what others wrote, a library's words too."""
    from .report.escape import terminal

    return terminal(" ".join(text.split("\n")))


def print_json(value: dict[str, Any], interrupts: Interrupts) -> None:
    """Print a result for a program, which must not take silence for one, nor read two.

    Raises:
        OutputError: it reached nobody.
    """
    interrupts.told = True
    failure = say(json.dumps(value), sys.stdout)
    if failure is not None:
        raise _untold(failure)


class Terminal(Reporter):
    """Plan and summary on stdout, progress on stderr.

    Args:
        interrupts: asked between pieces of work.
        quiet: no plan and no summary.
        silent: no progress either.
        verbose: more of the plan.
        lines: whether progress is lines of JSON.

    Attributes:
        untold: what first prevented something from being printed on stdout, None if nothing did.
    """

    def __init__(self, interrupts: Interrupts, quiet: bool, silent: bool, verbose: bool, lines: bool = False) -> None:
        self.interrupts = interrupts
        self.quiet = quiet
        self.silent = silent
        self.verbose = verbose
        self.lines = lines
        self.progress: Progress | None = None
        self.plan: Plan | None = None
        self.untold: OSError | None = None

    def _print(self, text: str) -> None:
        failure = say(text, sys.stdout)
        self.untold = self.untold or failure

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """Print the plan, or beside a program's result its notes."""
        self.close()
        self.plan = plan
        if self.quiet:
            for note in () if self.silent else (*plan.notes, *source.notes):
                say(f"note: {note}", sys.stderr)
            return
        from .report.text import details_text, plan_text
        from .run import expected_download

        name = f"{source.repo}@{source.revision}" if source.repo else str(source.root)
        self._print(plan_text(plan, name, output, expected_download(source, plan), source.notes))
        if self.verbose:
            self._print(details_text(plan))

    def calibrating(self, about: str) -> None:
        """Say on which texts, and where what they show is kept."""
        self.close()
        if not self.silent:
            say(about, sys.stderr)

    def calibrated(self, done: int, total: int) -> None:
        """Show progress, which is at an end once all is done; raise KeyboardInterrupt if one was asked for."""
        self.interrupts.check()
        if not self.silent:
            self.progress = self.progress or Progress(total, 0, sys.stderr, "calibrating", "calibrated", self.lines)
            self.progress.advance(done - self.progress.done)

    def started(self, total: int, done: int) -> None:
        """Begin to show progress."""
        self.close()
        if not self.silent:
            self.progress = Progress(total, done, sys.stderr, lines=self.lines)

    def advanced(self, nbytes: int) -> None:
        """Show progress; raise KeyboardInterrupt if one was asked for."""
        self.interrupts.check()
        if self.progress is not None:
            self.progress.advance(nbytes)

    def publishing(self, repo: str) -> None:
        """Say where the rest goes now."""
        self.close()
        if not self.silent:
            say(f"converted; uploading the rest to {repo}", sys.stderr)

    def finished(self, result: Result, already_complete: bool) -> None:
        """Print the summary."""
        self.close()
        if not self.quiet and self.plan is not None:
            from .report.text import summary_text

            self._print("\n" + summary_text(self.plan, result, already_complete))

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None


class Progress:
    """A bar over bytes on a terminal, a line now and then elsewhere: "42 % converted"; or for a program JSON, an object
    on each line: {"stage": "compressing", "done": 42, "total": 100, "unit": "bytes", "seconds": 1.5}.

    Args:
        total: bytes to do in all.
        done: those an earlier run did.
        stream: where to draw.
        doing: what stands before the bar.
        did: what stands in a line.
        lines: whether a program reads it.
    """

    SECONDS_BETWEEN_LINES = 10.0
    SECONDS_BETWEEN_OBJECTS = 1.0

    def __init__(
        self,
        total: int,
        done: int,
        stream: TextIO,
        doing: str = "compressing",
        did: str = "converted",
        lines: bool = False,
    ) -> None:
        self.total = total
        self.did = did
        self.done = done
        self.stream = stream
        self.bar: Any = None
        self.doing = doing
        self.lines = lines
        self.begun = time.monotonic()
        self.between = self.SECONDS_BETWEEN_OBJECTS if lines else self.SECONDS_BETWEEN_LINES
        self.next_line = self.begun + self.between
        if lines:
            self._object()
        elif stream.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=doing, file=stream, leave=False)
        elif done:
            say(f"continuing: {100 * done / total:.0f} % is already {did}", stream)

    def advance(self, nbytes: int) -> None:
        """Add to the bytes that are done, and draw that now and then."""
        self.done += nbytes
        if self.bar is not None:
            try:
                self.bar.update(nbytes)
            except OSError:
                self.bar = None  # nobody looks any more
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + self.between
            if self.lines:
                self._object()
            else:
                say(f"{100 * self.done / self.total:.0f} % {self.did}", self.stream)

    def _object(self) -> None:
        seconds = round(time.monotonic() - self.begun, 3)
        told = {"stage": self.doing, "done": self.done, "total": self.total, "unit": "bytes", "seconds": seconds}
        say(json.dumps(told), self.stream)

    def close(self) -> None:
        """Take the bar off the terminal, or say how far all came."""
        if self.lines:
            self._object()
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
