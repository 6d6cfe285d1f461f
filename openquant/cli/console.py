"""The terminal: printing, progress and interrupts."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import OutputError
from ..report.cells import COMMAND, paragraphs, spoken, terminal
from ..result import Reporter

if TYPE_CHECKING:
    from ..files.destination import DiskSpace
    from ..hub.source import Source
    from ..plan.plan import Plan
    from ..result import Result
    from .commands import Call


class Interrupts:
    """Handles SIGINT and SIGTERM: the first raises KeyboardInterrupt, and at the second the kernel ends the process.

    Python drops exceptions that a handler raises at certain moments, such as in callbacks of the import lock. So
    `requested` remembers the signal, and `check` raises again.

    Attributes:
        requested: whether a signal came.
        result_printed: whether a result was printed as JSON, after which nothing else may be on stdout.
    """

    def __init__(self) -> None:
        self.requested = False
        self.result_printed = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell makes its background jobs ignore SIGINT, which must stay so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        # Handlers wait for the end of a matrix product or a read from a dead disk; the kernel does not.
        for number in self.previous:
            signal.signal(number, signal.SIG_DFL)
        self.requested = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self.requested:
            raise KeyboardInterrupt


def mend_streams() -> None:
    """Escape characters that a standard stream cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO, end: str = "\n", kept: str = "\n\t", coloured: bool = False) -> None:
    """Print text. What is printed to a stream after it failed once (`| head`, a full disk) goes to /dev/null.

    Args:
        text: the text. Text from others must be escaped line by line before (`cells.join_lines`).
        stream: stdout or stderr.
        end: what is printed after the text.
        kept: control characters that are not escaped here.
        coloured: whether errors, hints, notes and commands are coloured, if the stream shows colours.

    Raises:
        OutputError: stdout cannot be written, as on a full disk.
    """
    try:
        text = terminal(text, kept)
        if coloured and _shows_colours(stream):
            text = _colour(text)
        # In one piece, because the process may end between two.
        print(text + end, end="", file=stream, flush=True)
    except OSError as error:
        # The buffered text would fail again at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        # It is no error that nobody reads it (`| head`, `>&-`).
        if stream is sys.stdout and error.errno not in (errno.EPIPE, errno.EBADF):
            raise OutputError(
                f"stdout cannot be written: {error.strerror}",
                "run the same command again where it can; what is converted is not converted twice",
            ) from None


_COMMAND_LINE = "  (?:openquant|pip|python|vllm) .*"
# What is coloured, and the code of its colour: commands to copy bold, then red, cyan, yellow and green.
_COLOURS = {
    rf"{COMMAND.pattern}|(?:(?<=\n\n)|(?<=:\n)){_COMMAND_LINE}(?:\n{_COMMAND_LINE})*": "1",
    r"^(?:error|problem):|^\d+ problems?:": "1;31",
    r"^hint:": "1;36",
    r"^(?:note|warning):": "33",
    r"^no problems:": "1;32",
}


def _colour(text: str) -> str:
    for pattern, code in _COLOURS.items():
        text = re.sub(f"(?m:{pattern})", f"\x1b[{code}m\\g<0>\x1b[0m", text)
    return text


def _shows_colours(stream: TextIO) -> bool:
    """Return whether a stream shows colours: a terminal does. NO_COLOR and FORCE_COLOR decide first, as for uv."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "").lower() != "dumb"


def columns(stream: TextIO | None = None) -> int:
    """The most characters of a line: COLUMNS, those of the terminal of stdout or of a stream, and 80 without any."""
    width = 0
    if stream is not None:
        with suppress(OSError, ValueError):
            width = os.get_terminal_size(stream.fileno()).columns
    return shutil.get_terminal_size((width or 80, 24)).columns


def fail(message: str, hint: str, as_json: bool) -> None:
    """Print an error as two lines on stderr, and with --json as an object on stdout too.

    Args:
        message: what is wrong.
        hint: what the user can do about it.
        as_json: whether to print {"error": message, "hint": hint} on stdout too.
    """
    if as_json:
        # The error that is printed may be that stdout cannot be written.
        with suppress(OutputError):
            say(_json({"error": message, "hint": hint}), sys.stdout)
    say_lines([f"error: {message}", f"hint: {hint}"], sys.stderr)


def say_lines(lines: Iterable[str], stream: TextIO) -> None:
    """Print lines that may quote text from others. On a terminal they are wrapped.

    Args:
        lines: lines without newlines at their ends; those inside of a line are escaped.
        stream: stdout or stderr.

    Raises:
        OutputError: stdout cannot be written, as on a full disk.
    """
    width = None
    if stream.isatty():
        width = columns(stream)
    say("\n".join(paragraphs(lines, width)), stream, coloured=True)


def _json(value: object) -> str:
    # JSON leaves this control character unescaped.
    return json.dumps(value).replace("\x7f", "\\u007f")


def print_json(value: dict[str, Any], interrupts: Interrupts) -> None:
    """Print the result of a command with --json. A program must get exactly one.

    Args:
        value: the result, printed as one JSON object on stdout.
        interrupts: the handler of interrupts, which from now on prints no error as JSON.

    Raises:
        OutputError: stdout cannot be written, as on a full disk.
    """
    interrupts.result_printed = True
    say(_json(value), sys.stdout)


class Terminal(Reporter):
    """Prints plan and summary on stdout, and progress on stderr.

    Args:
        call: the call of a verb: its options say what is printed, and of several ranks only the first prints. Its
            interrupts are checked between pieces of work.
        stage: words for the progress before and behind the bar, unless --fit or --search measures.
    """

    def __init__(self, call: Call, stage: tuple[str, str] = ("calibrating", "calibrated")) -> None:
        command = call.command
        self.interrupts = call.interrupts
        self.first = call.ranks.first
        # Silent is without progress, quiet without plan and summary.
        self.silent = command.quiet or not self.first
        self.quiet = self.silent or command.json
        self.verbose = command.verbose and not command.json
        self.lines = command.progress == "json"
        self.progress: Progress | None = None

        self.own_stage = stage
        self.stage = stage

        self.plan: Plan | None = None
        self.printed_notes: set[str] = set()
        self.space: DiskSpace | None = None

    def _new_notes(self, notes: Iterable[str]) -> list[str]:
        """Return the lines of those notes that were not printed; if `quiet`, print them on stderr."""
        lines = [f"note: {note}" for note in dict.fromkeys(notes) if note not in self.printed_notes]
        self.printed_notes.update(notes)
        if lines and self.quiet and not self.silent:
            say_lines(lines, sys.stderr)
        return lines

    def on_disk_space(self, space: DiskSpace) -> None:
        """Keep the disk space for the plan."""
        self.space = space

    def on_plan(self, plan: Plan, source: Source, output: Path) -> None:
        """Print the plan on stdout, of a second plan only new notes; if `quiet`, only the notes, on stderr.

        What is wrong with the source is printed in any case.
        """
        self.close()
        is_first = self.plan is None
        self.plan = plan
        others = self.space.notes if self.space else ()
        new_notes = self._new_notes([*plan.notes, *others])
        if self.silent and self.first and is_first and plan.warnings:
            say_lines([f"note: {note}" for note in plan.warnings], sys.stderr)
        if self.quiet:
            return
        if not is_first:
            if new_notes:
                say("\n".join(paragraphs(new_notes, columns())), sys.stdout, coloured=True)
            return
        from ..job import expected_download
        from ..report.text import details_text, plan_text

        width = columns()
        text = plan_text(plan, source.place, output, expected_download(source, plan), self.space, width)
        if self.verbose:
            text += f"\n{details_text(plan, width)}"
        say(text, sys.stdout, coloured=True)

    def on_note(self, about: str) -> None:
        """Print the line that describes what begins, or what --fit and --search measure."""
        self.close()
        self.stage = self.own_stage
        if about.startswith("--"):
            self.stage = ("measuring", "measured")
        if not self.silent:
            say_lines([about], sys.stderr)

    def on_progress(self, done: int, total: int, unit: str = "tokens") -> None:
        """Show the progress of anything but a conversion.

        Raises:
            KeyboardInterrupt: a signal came.
        """
        self.interrupts.check()
        if not self.silent:
            self.progress = self.progress or Progress(total, 0, *self.stage, self.lines, unit)
            self.progress.advance(done - self.progress.done)

    def on_start(self, total: int, done: int) -> None:
        """Begin to show the progress of a conversion."""
        self.close()
        if not self.silent:
            self.progress = Progress(total, done, lines=self.lines)

    def on_advance(self, nbytes: int) -> None:
        """Show the progress of a conversion.

        Raises:
            KeyboardInterrupt: a signal came.
        """
        self.interrupts.check()
        if self.progress is not None:
            self.progress.advance(nbytes)

    def on_publishing(self, repo: str) -> None:
        """Print to which repository the remaining files are uploaded."""
        self.close()
        if not self.silent:
            say_lines([f"converted; uploading the rest to {repo}"], sys.stderr)

    def on_finish(self, result: Result, already_complete: bool) -> None:
        """Print notes that the plan did not have, and the summary."""
        self.close()
        notes = self._new_notes(result.notes)
        if self.plan is None:
            return
        from ..report.text import closing_notes, summary_text

        if self.silent and self.first and (lines := closing_notes(self.plan, result)):
            say_lines(lines, sys.stderr)
        if not self.quiet:
            width = columns()
            text = summary_text(self.plan, result, already_complete, width)
            say("\n".join(["", *map(terminal, paragraphs(notes, width)), text]), sys.stdout, coloured=True)

    def close(self) -> None:
        """Remove the progress bar."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None


# Whoever sets one of these has a log and no eyes on the terminal.
_NO_BAR = ("CI", "NO_COLOR")


def _draws(stream: TextIO) -> bool:
    """Return whether a bar may be drawn: on a terminal, unless CI or NO_COLOR is set or TERM is dumb."""
    return _is_terminal(stream) and not any(map(os.environ.get, _NO_BAR))


@dataclass(eq=False)
class Progress:
    """Progress on stderr: a bar on a terminal (see `_draws`), elsewhere a line now and then ("42 % converted").

    On request it is lines of JSON:
    {"stage": "compressing", "done": 42, "total": 100, "unit": "bytes", "seconds": 1.5, "seconds_left": 2.1}.

    Args:
        total: number of units to do in all.
        done: number of units that an earlier run did.
        doing: text before the bar: "compressing".
        did: word in a line: "converted".
        lines: whether to print JSON.
        unit: "bytes", "tokens" or "layers".
    """

    SECONDS_BETWEEN_LINES = 10.0
    SECONDS_BETWEEN_OBJECTS = 1.0

    total: int
    done: int
    doing: str = "compressing"
    did: str = "converted"
    lines: bool = False
    unit: str = "bytes"

    def __post_init__(self) -> None:
        self.before = self.done
        self.stream = sys.stderr
        self.bar: Any = None
        self.start = time.monotonic()
        self.between = self.SECONDS_BETWEEN_OBJECTS if self.lines else self.SECONDS_BETWEEN_LINES
        self.next_line = self.start + self.between
        if self.lines:
            self._print_object()
        elif _draws(self.stream):
            from tqdm import tqdm

            settings: dict[str, Any] = {"unit": f" {self.unit}"}
            if self.unit == "bytes":
                settings = {"unit": "B", "unit_scale": True}
            settings |= {"total": self.total, "initial": self.done, "desc": self.doing}
            self.bar = tqdm(file=self.stream, leave=False, **settings)
        elif self.done:
            say(f"continuing: {100 * self.done / self.total:.0f} % is already {self.did}", self.stream)

    def advance(self, count: int) -> None:
        """Add to the units that are done, and draw or print now and then."""
        self.done += count
        if self.bar is not None:
            try:
                self.bar.update(count)
            except OSError:
                self.bar = None  # the terminal is gone
            return

        if time.monotonic() < self.next_line:
            return
        self.next_line = time.monotonic() + self.between
        if self.lines:
            self._print_object()
            return

        line = f"{100 * self.done / self.total:.0f} % {self.did}"
        left = self._seconds_left()
        if left is not None:
            line += f", about {spoken(left)} left"
        say(line, self.stream)

    def _seconds_left(self) -> float | None:
        """Estimate the time that is left from the speed so far; None until a hundredth is done."""
        done = self.done - self.before
        if done <= 0 or done < self.total / 100:
            return None
        return (time.monotonic() - self.start) / done * max(0, self.total - self.done)

    def _print_object(self) -> None:
        left = self._seconds_left()
        progress = {
            "stage": self.doing,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "seconds": round(time.monotonic() - self.start, 3),
            "seconds_left": left and round(left, 3),
        }
        say(json.dumps(progress), self.stream)

    def close(self) -> None:
        """Remove the bar, or print the last line of JSON."""
        if self.lines:
            self._print_object()
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
