"""The command line: arguments, progress and errors. The only module that prints."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from . import __version__
from .errors import OpenQuantError, UsageError

if TYPE_CHECKING:
    from .api import Result
    from .hub import Source
    from .plan import Plan

EXIT_USER = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse with our errors instead of its own."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


def _add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        help="a local directory, or a Hub repository: org/name or org/name@revision",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="directory to write (default: ./NAME-FP8, for blocks ./NAME-FP8-W128; run inside the source: beside it)",
    )
    parser.add_argument(
        "--scheme", choices=("tensor", "block"), help="tensor: one scale per tensor (default); block: per 128x128 block"
    )
    parser.add_argument("-w", "--block-size", type=int, metavar="128", help="short form of --scheme block")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave matching modules as they are: * is one part of a name, ** a subtree, {a,b} either; repeatable",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda[:N]", help="where to compute (default: auto)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in the output")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    volume.add_argument(
        "-v", "--verbose", action="store_true", help="also list every unquantized layer and copied file"
    )


_ABOUT = "Turn a Hugging Face checkpoint into an FP8 directory that vLLM and SGLang load."


def _compress_parser(prog: str) -> _Parser:
    parser = _Parser(prog=prog, description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"openquant {__version__}")
    _add_compress_arguments(parser)
    return parser


def _verb_parser() -> _Parser:
    parser = _Parser(prog="openquant", description="FP8 checkpoints for vLLM and SGLang.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"openquant {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    _add_compress_arguments(verbs.add_parser("compress", help=_ABOUT, description=_ABOUT, allow_abbrev=False))
    return parser


def compress_main(arguments: Sequence[str] | None = None) -> int:
    """`compress-fp8` and `python compress_fp8.py`. Returns the exit code."""
    prog = Path(sys.argv[0]).name or "compress-fp8"
    return _run(_compress_parser(prog), arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """`openquant VERB`. Returns the exit code."""
    return _run(_verb_parser(), arguments)


def _run(parser: _Parser, arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    interrupt = signal.getsignal(signal.SIGINT)
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if interrupt is signal.SIG_IGN:
        # A shell starts background jobs so; SIGTERM must stop them all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = parser.parse_args(words)
        return _compress(options)
    except OpenQuantError as error:
        if _speaks():
            _fail(error.message, error.hint, as_json)
        return EXIT_USER
    except KeyboardInterrupt:
        if _speaks():
            _fail("interrupted", "run the same command again to continue", as_json)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nothing is left to say, and nothing is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USER
    finally:
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, interrupt)


def _speaks() -> bool:
    """Whether this process talks to the user: of several ranks the first, which hears of the others' errors."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def _fail(message: str, hint: str, as_json: bool) -> None:
    if as_json:
        _print_json({"error": message, "hint": hint})
    print(f"error: {_one_line(message)}\nhint: {_one_line(hint)}", file=sys.stderr)


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))
    sys.stdout.flush()


def _scheme_of(options: argparse.Namespace) -> str:
    if options.block_size is None:
        return options.scheme or "tensor"
    if options.block_size != 128:
        raise UsageError(
            f"-w {options.block_size}: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor"
        )
    if options.scheme == "tensor":
        raise UsageError("-w 128 asks for blocks, --scheme tensor for one scale per tensor", "leave one of them out")
    return "block"


def _compress(options: argparse.Namespace) -> int:
    scheme = _scheme_of(options)
    from .api import compress
    from .ranks import Ranks

    ranks = Ranks.from_environment(os.environ)
    silent = options.quiet or not ranks.first
    reporter = _Terminal(quiet=silent or options.json, silent=silent, verbose=options.verbose and not options.json)
    try:
        result = compress(
            options.model,
            options.output,
            scheme,
            ignore=options.ignore,
            dry_run=options.dry_run,
            device=options.device,
            workers=options.workers,
            revision=options.revision,
            overwrite=options.overwrite,
            ranks=ranks,
            reporter=reporter,
        )
    finally:
        reporter.close()
    if options.json and ranks.first:
        _print_json(result.to_json())
    return 0


class _Terminal:
    """Plan and summary on stdout, progress on stderr.

    Args:
        quiet: no plan and no summary.
        silent: no progress either.
        verbose: more of the plan.
    """

    def __init__(self, quiet: bool, silent: bool, verbose: bool) -> None:
        self.quiet = quiet
        self.silent = silent
        self.verbose = verbose
        self.progress: _Progress | None = None
        self.plan: Plan | None = None

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        self.plan = plan
        if self.quiet:
            for note in () if self.silent else plan.notes:
                print(f"note: {note}", file=sys.stderr)
            return
        from .report import details_text, plan_text

        name = f"{source.repo}@{source.revision}" if source.repo else str(source.root)
        print(plan_text(plan, name, output))
        if self.verbose:
            print(details_text(plan))
        sys.stdout.flush()

    def started(self, total: int, done: int) -> None:
        if not self.silent:
            self.progress = _Progress(total, done, sys.stderr)

    def advanced(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.advance(nbytes)

    def finished(self, result: Result, already_complete: bool) -> None:
        self.close()
        if not self.quiet and self.plan is not None:
            from .report import summary_text

            print("\n" + summary_text(self.plan, result, already_complete))

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None


class _Progress:
    """A bar over bytes on a terminal, a line now and then elsewhere."""

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        self.total = total
        self.done = done
        self.stream = stream
        self.bar: Any = None
        self.next_line = time.monotonic() + self.SECONDS_BETWEEN_LINES
        if stream.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=total, initial=done, unit="B", unit_scale=True, desc="compressing", file=stream, leave=False
            )
        elif done:
            print(f"continuing: {100 * done / total:.0f} % is already converted", file=stream, flush=True)

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.bar is not None:
            self.bar.update(nbytes)
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + self.SECONDS_BETWEEN_LINES
            print(f"{100 * self.done / self.total:.0f} % converted", file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
