"""The terminal: what is said on which stream, progress, interrupts. Nothing else prints."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ..errors import OutputError
from ..reporter import Reporter
from ..streaming.forecast import spoken
from .interrupts import INTERRUPTED, leave

if TYPE_CHECKING:
    from ..hub.source import Source
    from ..plan.plan import Plan
    from ..result import Result


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


@contextmanager
def escaped_libraries() -> Iterator[None]:
    """What libraries warn of and log, which may quote a model's files, is escaped as what is said here is."""
    from ..report.escape import terminal

    make_record = logging.getLogRecordFactory()

    def make(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*arguments, **options)
        # What cannot be formatted is reported by whoever prints it.
        with suppress(TypeError, ValueError, KeyError):
            record.msg, record.args = terminal(record.getMessage(), kept="\n\t"), ()
        return record

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        say(warnings.formatwarning(message, category, filename, lineno, line), file or sys.stderr, end="")

    with warnings.catch_warnings():
        warnings.showwarning = show
        logging.setLogRecordFactory(make)
        try:
            yield
        finally:
            logging.setLogRecordFactory(make_record)


def say(text: str, stream: TextIO, end: str = "\n") -> OSError | None:
    """Print, and return the error that prevented it, None if none did: the work goes on (`| head`, a full disk).

    Control characters are escaped, but for tabs and the newlines of a layout. What others wrote is escaped line by line
    before it comes here (`escape.joined`).
    """
    from ..report.escape import terminal

    try:
        print(terminal(text, kept="\n\t"), end=end, file=stream, flush=True)
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
        say(_json({"error": message, "hint": hint}), sys.stdout)
    say_lines([f"error: {message}", f"hint: {hint}"], sys.stderr)


def say_lines(lines: Iterable[str], stream: TextIO) -> OSError | None:
    """Print lines that may quote what others wrote, a library's words too: newlines in them are escaped."""
    from ..report.escape import join_lines

    return say(join_lines(lines), stream)


def _json(value: object) -> str:
    # The one control character that JSON leaves as it is.
    return json.dumps(value).replace("\x7f", "\\u007f")


def print_json(value: dict[str, Any], interrupts: Interrupts) -> None:
    """Print a result for a program, which must not take silence for one, nor read two.

    Raises:
        OutputError: it reached nobody.
    """
    interrupts.told = True
    failure = say(_json(value), sys.stdout)
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
        opened: called with the source and the output once these are known, before any work.

    Attributes:
        untold: what first prevented something from being printed on stdout, None if nothing did.
    """

    def __init__(
        self,
        interrupts: Interrupts,
        quiet: bool,
        silent: bool,
        verbose: bool,
        lines: bool = False,
        opened: Callable[[Source, Path], None] = lambda *_: None,
    ) -> None:
        self.interrupts = interrupts
        self.quiet = quiet
        self.silent = silent
        self.verbose = verbose
        self.lines = lines
        self._opened = opened
        self.progress: Progress | None = None
        self.plan: Plan | None = None
        self.planned_lines: frozenset[str] = frozenset()
        self.untold: OSError | None = None

    def _print(self, text: str) -> None:
        failure = say(text, sys.stdout)
        self.untold = self.untold or failure

    def opened(self, source: Source, output: Path) -> None:
        """Call what the command is to do before any work."""
        self._opened(source, output)

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        """Print the plan, or beside a program's result its notes; of a plan that has changed, the lines that have."""
        self.close()
        before, self.plan = self.plan, plan
        if self.quiet:
            known = () if before is None else before.notes
            notes = plan.notes if before is not None else (*plan.notes, *source.notes)
            for note in () if self.silent else notes:
                if note not in known:
                    say_lines([f"note: {note}"], sys.stderr)
            return
        from ..job import expected_download
        from ..report.text import details_text, plan_text

        known_lines = self.planned_lines
        name = f"{source.repo}@{source.revision}" if source.repo else str(source.root)
        text = plan_text(plan, name, output, expected_download(source, plan), source.notes)
        if self.verbose:
            text += f"\n{details_text(plan)}"
        lines, self.planned_lines = text.split("\n"), frozenset(text.split("\n"))
        new = [line for line in lines if line not in known_lines]
        if new:
            self._print("\n".join(new if known_lines else lines))

    def calibrating(self, about: str) -> None:
        """Say on which texts, and where what they show is kept."""
        self.close()
        if not self.silent:
            say_lines([about], sys.stderr)

    def calibrated(self, done: int, total: int, unit: str = "tokens") -> None:
        """Show progress, which is at an end once all is done; raise KeyboardInterrupt if one was asked for."""
        self.interrupts.check()
        if not self.silent:
            self.progress = self.progress or Progress(
                total, 0, sys.stderr, "calibrating", "calibrated", self.lines, unit=unit
            )
            self.progress.advance(done - self.progress.done)

    def remaining(self, seconds: float) -> None:
        """Say once how long the pass takes, and show it beside the progress."""
        if self.progress is not None:
            self.progress.expect(seconds)

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
            say_lines([f"converted; uploading the rest to {repo}"], sys.stderr)

    def finished(self, result: Result, already_complete: bool) -> None:
        """Print the summary."""
        self.close()
        if not self.quiet and self.plan is not None:
            from ..report.text import summary_text

            self._print("\n" + summary_text(self.plan, result, already_complete))

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None


class Progress:
    """A bar on a terminal, a line now and then elsewhere: "42 % converted"; or for a program an object on each line:
    {"stage": "compressing", "done": 42, "total": 100, "unit": "bytes", "seconds": 1.5, "seconds_left": 2.1}.

    Args:
        total: what there is to do in all.
        done: what an earlier run did.
        stream: where to draw.
        doing: what stands before the bar.
        did: what stands in a line.
        lines: whether a program reads it.
        unit: what is counted: "bytes", "tokens" or "layers".
        clock: seconds.
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
        unit: str = "bytes",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.did = did
        self.done = done
        self.before = done
        self.stream = stream
        self.bar: Any = None
        self.doing = doing
        self.lines = lines
        self.unit = unit
        self.clock = clock
        # When the work is expected to end, where somebody estimates it.
        self.end: float | None = None
        self.begun = clock()
        self.between = self.SECONDS_BETWEEN_OBJECTS if lines else self.SECONDS_BETWEEN_LINES
        self.next_line = self.begun + self.between
        if lines:
            self._object()
        elif stream.isatty():
            from tqdm import tqdm

            counted: dict[str, Any] = {"unit": "B", "unit_scale": True}
            if unit != "bytes":
                # Not the time that tqdm expects: it takes all that is counted to be equally long.
                form = "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"
                counted = {"unit": unit, "bar_format": form}
            self.bar = tqdm(total=total, initial=done, desc=doing, file=stream, leave=False, **counted)
        elif done:
            say(f"continuing: {100 * done / total:.0f} % is already {did}", stream)

    def expect(self, seconds: float) -> None:
        """About so many seconds are left, which is said the first time and then shown."""
        if self.end is None and not self.lines:
            text = f"{self.doing}: about {spoken(seconds)} left"
            if self.bar is not None:
                with suppress(OSError):
                    self.bar.write(text, file=self.stream)
            else:
                say(text, self.stream)
        self.end = self.clock() + seconds
        if self.bar is not None:
            self.bar.set_postfix_str(f"about {spoken(seconds)} left", refresh=False)

    def advance(self, count: int) -> None:
        """Add to what is done, and draw that now and then."""
        self.done += count
        if self.bar is not None:
            try:
                self.bar.update(count)
            except OSError:
                self.bar = None  # nobody looks any more
        elif self.clock() >= self.next_line:
            self.next_line = self.clock() + self.between
            if self.lines:
                self._object()
            else:
                left = "" if self.end is None else f", about {spoken(max(0.0, self.end - self.clock()))} left"
                say(f"{100 * self.done / self.total:.0f} % {self.did}{left}", self.stream)

    def _seconds_left(self) -> float | None:
        """As somebody estimates it; of bytes, which take equally long, by those that are done."""
        if self.end is not None:
            return max(0.0, self.end - self.clock())
        done = self.done - self.before
        if self.unit != "bytes" or not done:
            return None
        return (self.clock() - self.begun) / done * max(0, self.total - self.done)

    def _object(self) -> None:
        left = self._seconds_left()
        told = {
            "stage": self.doing,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "seconds": round(self.clock() - self.begun, 3),
            "seconds_left": None if left is None else round(left, 3),
        }
        say(json.dumps(told), self.stream)

    def close(self) -> None:
        """Take the bar off the terminal, or say how far all came."""
        if self.lines:
            self._object()
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
