"""The command line: arguments, progress and errors. The only module that prints."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from .convert.ranks import PATIENCE, Ranks
from .errors import OpenQuantError, OutputError, UsageError
from .interrupts import HINT, INTERRUPTED, MESSAGE, leave
from .machine import reached_limit, require_room
from .version import __version__

if TYPE_CHECKING:
    from .hub.publish import Push
    from .hub.source import Source
    from .plan.plan import Plan
    from .report.result import Result

EXIT_PROBLEMS = 1
EXIT_USER = 2


class _Parser(argparse.ArgumentParser):
    """argparse with our errors instead of its own."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


def _size(text: str) -> int:
    """Bytes: 1500000000, 500MB, 1.5GB, 2GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?)B?|B)?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** (" KMGT".index(found[2].upper()) if found[2] else 0))


def _seconds(text: str) -> float:
    """A time above zero."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return float(text)


def _text(text: str) -> str:
    """Any text but the empty one, which a script's unset variable leaves behind."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _scheme_for(text: str) -> tuple[str, str]:
    """A pattern and a scheme."""
    pattern, equals, scheme = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not PATTERN=SCHEME, such as **.self_attn.*=channel")
    return pattern, scheme


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
        help="directory to write (default: ./NAME-FP8, for channel ./NAME-FP8-dynamic, for block ./NAME-FP8-W128, for "
        "mxfp8 ./NAME-MXFP8; -CT is added for tensor and block in the compressed-tensors format, -UE8M0 for block with "
        "such scales, -static for static activations; run inside the source: beside it)",
    )
    parser.add_argument(
        "--scheme",
        choices=("tensor", "channel", "block", "mxfp8"),
        help="tensor: one scale per tensor (default); channel: per output row; block: per 128x128 block; "
        "mxfp8: per 32 inputs of a row",
    )
    parser.add_argument(
        "--format",
        choices=("fp8", "compressed-tensors"),
        help="how it is serialized (default: fp8 for tensor and block; channel and mxfp8 have only compressed-tensors)",
    )
    parser.add_argument(
        "--scale-format",
        choices=("float", "ue8m0"),
        help="ue8m0: scales that are powers of two, for --scheme block in the fp8 format (default: float; mxfp8 has "
        "only ue8m0)",
    )
    parser.add_argument(
        "--activation-scheme",
        choices=("dynamic", "static"),
        default="dynamic",
        help="static: keep the input_scale tensors of a quantized source, for --scheme tensor (default: dynamic)",
    )
    parser.add_argument("-w", "--block-size", type=int, metavar="128", help="short form of --scheme block")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave matching modules as they are: * is one part of a name, ** a subtree, {a,b} either; repeatable",
    )
    parser.add_argument(
        "--scheme-for",
        action="append",
        default=[],
        type=_scheme_for,
        metavar="PATTERN=SCHEME",
        help="store matching modules as tensor, channel or block instead, in the compressed-tensors format; of several "
        "the first that matches counts; repeatable",
    )
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="the tensor-parallel size that must be able to serve it: what does not divide into blocks then is stored "
        "as channel, in the fp8 format it stays as it is",
    )
    parser.add_argument(
        "--quantize-lm-head",
        action="store_true",
        help="quantize the output head too, in the compressed-tensors format and if it is not the embedding",
    )
    parser.add_argument(
        "--architecture",
        type=_text,
        metavar="NAME",
        help="plan as for this class, whatever config.json names; generic: by names and shapes alone",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="auto|cpu|cuda[:N]",
        help="where to compute codes; auto: on a GPU if there is one (default: cpu)",
    )
    _add_run_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What has to do with the run rather than with its result."""
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use, at most 16)")
    parser.add_argument(
        "--max-memory", type=_size, metavar="SIZE", help="use fewer threads if more memory were needed: 500MB, 2GB"
    )
    parser.add_argument("--revision", type=_text, metavar="REV", help="branch, tag or commit of a Hub repository")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in the output")
    parser.add_argument(
        "--stream", action="store_true", help="keep only a few of a repository's shards on disk at a time"
    )
    parser.add_argument(
        "--rendezvous-timeout",
        type=_seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help=f"how long ranks that torchrun starts wait for each other at the start (default: {PATIENCE:g})",
    )
    _add_push_arguments(parser, "--push-to-hub")
    parser.add_argument("--push-only", action="store_true", help="delete each shard of the output once it is uploaded")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    volume.add_argument(
        "-v", "--verbose", action="store_true", help="also list every unquantized layer and copied file"
    )


def _add_push_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        name, type=_text, metavar="NAME", help="publish the output on the Hub as org/name, made if need be"
    )
    parser.add_argument("--private", action="store_true", help="make that repository private if it is made now")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing to main")
    parser.add_argument(
        "--replace-weights",
        action="store_true",
        help="commit to main although the model is made from what lies there, or its weights are not quantized",
    )
    parser.add_argument("--commit-message", type=_text, metavar="TEXT", help="message of the commit or pull request")


_ABOUT = "Turn a Hugging Face checkpoint into an FP8 directory that vLLM and SGLang load."


def _compress_parser(prog: str) -> _Parser:
    parser = _Parser(prog=prog, description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"openquant {__version__}")
    _add_compress_arguments(parser)
    parser.set_defaults(work=_compress)
    return parser


def _verb_parser() -> _Parser:
    parser = _Parser(prog="openquant", description="FP8 checkpoints for vLLM and SGLang.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"openquant {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    compress = verbs.add_parser("compress", help=_ABOUT, description=_ABOUT, allow_abbrev=False)
    _add_compress_arguments(compress)
    compress.set_defaults(work=_compress)
    about = "Turn a quantized checkpoint back into bfloat16 weights."
    dequantize = verbs.add_parser("dequantize", help=about, description=about, allow_abbrev=False)
    dequantize.add_argument("model", metavar="MODEL", help="a local directory, or a Hub repository")
    dequantize.add_argument("-o", "--output", metavar="DIR", help="directory to write (default: ./NAME-BF16)")
    _add_run_arguments(dequantize)
    dequantize.set_defaults(work=_dequantize)
    about = "Publish a directory that openquant made on the Hub."
    push = verbs.add_parser("push", help=about, description=about, allow_abbrev=False)
    push.add_argument("directory", type=_text, metavar="DIR", help="what compress wrote")
    _add_push_arguments(push, "name")
    push.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    push.set_defaults(work=_push)
    about = "Check an FP8 directory, whichever tool made it."
    verify = verbs.add_parser("verify", help=about, description=about, allow_abbrev=False)
    verify.add_argument("directory", type=_text, metavar="DIR", help="the directory to check")
    verify.add_argument("--source", type=_text, metavar="DIR", help="the checkpoint it was made from, to compare with")
    verify.add_argument("--full", action="store_true", help="also decode every quantized layer and measure its error")
    verify.add_argument("--workers", type=int, metavar="N", help="threads (default: the CPUs it may use)")
    verify.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    verify.set_defaults(work=_verify)
    return parser


def compress_main(arguments: Sequence[str] | None = None) -> int:
    """`compress-fp8` and `python compress_fp8.py`. Returns the exit code."""
    prog = Path(sys.argv[0]).name or "compress-fp8"
    return _run(_compress_parser(prog), arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """`openquant VERB`. Returns the exit code."""
    return _run(_verb_parser(), arguments)


class _Interrupts:
    """SIGINT and SIGTERM as KeyboardInterrupt, once, from when `catching` is set; before that they end the process.

    Python drops an exception that a handler raises at certain moments (in the import lock's own callbacks, for one),
    so the request is also remembered, for whoever asks.

    Attributes:
        requested: whether one came.
        catching: whether KeyboardInterrupt is caught by now.
        told: whether a result was printed, after which nothing else is on stdout.
    """

    def __init__(self) -> None:
        self.requested = False
        self.catching = False
        self.told = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.getsignal(number)
            # A shell has its background jobs ignore SIGINT, and so it stays.
            if self.previous[number] is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            # Where the process ends now, its exit code is settled.
            signal.signal(number, signal.SIG_IGN if handler is leave else handler)
        sys.unraisablehook = sys.__unraisablehook__

    def _handle(self, *_: object) -> None:
        if not self.catching:
            leave()
        self.requested = True
        self.ignore()
        raise KeyboardInterrupt

    @staticmethod
    def _unraisable(what: sys.UnraisableHookArgs) -> None:
        # That it was dropped is remembered, and no news to the user.
        if what.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(what)

    def ignore(self) -> None:
        """A second signal changes nothing: leaving is under way, and quick."""
        for number, handler in self.previous.items():
            # Not SIG_IGN: Python complains of a signal that came just before that.
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was asked for."""
        if self.requested:
            raise KeyboardInterrupt


def _run(parser: _Parser, arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    _mend_streams()
    ranks, mistake = _find_ranks()

    def do() -> int:
        nonlocal ranks
        options = _parsed(parser, words)
        if "rendezvous_timeout" not in options:
            ranks = Ranks()  # the other verbs are no job to share
        elif mistake is not None:
            raise mistake
        options.ranks = ranks
        require_room()
        code: int = options.work(options, interrupts)
        return code

    def do_or_explain() -> int:
        try:
            return do()
        except Exception as error:
            # What an interrupt broke is no news.
            interrupts.check()
            told = reached_limit(error) or error
            if not isinstance(told, OpenQuantError):
                raise
            if ranks.speaks:
                _fail(told.message, told.hint, as_json and not interrupts.told)
            return EXIT_USER

    with _Interrupts() as interrupts:
        try:
            interrupts.catching = True
            code = do_or_explain()
            interrupts.check()
            interrupts.ignore()
            return code
        except KeyboardInterrupt:
            if ranks.speaks:
                _fail(MESSAGE, HINT, as_json and not interrupts.told)
            # All is let go of. Python would wait for what huggingface_hub's pools still do, and die of another signal.
            os._exit(INTERRUPTED)


def _parsed(parser: _Parser, words: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except SystemExit:
        # --help or --version, which argparse prints itself; it is still in the stream's buffer.
        _require_told(_say("", sys.stdout, end=""))
        raise


def _mend_streams() -> None:
    """Streams where there were none, which take nothing; and no character is too much for one's encoding."""
    for name, way, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        # Python has None where the process was started with the stream closed; its number must not go to a file.
        if getattr(sys, name) is None:
            # What is printed on such a stdout fails as it does in other programs: it reaches nobody.
            setattr(sys, name, os.fdopen(os.open(os.devnull, way), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str, stream: TextIO, end: str = "\n") -> OSError | None:
    """Print; what prevented it, which must not stop the work (`| head`, a full disk)."""
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError as error:
        # What the stream still holds would fail again at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _require_told(failure: OSError | None) -> None:
    """Refuse to call a run done of which text on stdout was lost; not where nobody wants it (`| head`, `>&-`).

    Raises:
        OutputError: it was lost.
    """
    if failure is not None and failure.errno not in (errno.EPIPE, errno.EBADF):
        raise _untold(failure)


def _untold(failure: OSError) -> OutputError:
    return OutputError(
        f"stdout cannot be written: {failure.strerror}",
        "run the same command again where it can: what is done is not done twice",
    )


def _find_ranks() -> tuple[Ranks, UsageError | None]:
    """This process among several, of which only the first talks to the user; and what keeps that from being known."""
    try:
        return Ranks.from_environment(os.environ), None
    except UsageError as error:
        return Ranks(), error


def _fail(message: str, hint: str, as_json: bool) -> None:
    if as_json:
        _say(json.dumps({"error": message, "hint": hint}), sys.stdout)
    _say(f"error: {_one_line(message)}\nhint: {_one_line(hint)}", sys.stderr)


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def _print_json(value: dict[str, Any], interrupts: _Interrupts) -> None:
    """Print a result for a program, which must not take silence for one, nor read two.

    Raises:
        OutputError: it reached nobody.
    """
    interrupts.told = True
    failure = _say(json.dumps(value), sys.stdout)
    if failure is not None:
        raise _untold(failure)


def _scheme_of(options: argparse.Namespace) -> str:
    if options.block_size is None:
        return options.scheme or "tensor"
    if options.block_size != 128:
        raise UsageError(
            f"-w {options.block_size}: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor"
        )
    if options.scheme not in (None, "block"):
        raise UsageError(
            f"-w 128 asks for blocks, --scheme {options.scheme} for something else", "leave one of them out"
        )
    return "block"


def _mapping(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Patterns with their schemes; of equal patterns the first counts, as of any that match."""
    found: dict[str, str] = {}
    for pattern, scheme in pairs:
        found.setdefault(pattern, scheme)
    return found


def _push_of(options: argparse.Namespace) -> Push | None:
    if options.push_to_hub is None:
        for option in ("private", "create_pr", "replace_weights", "commit_message", "push_only"):
            if getattr(options, option):
                raise UsageError(f"--{option.replace('_', '-')} goes with --push-to-hub", "say where to push")
        return None
    return _push_to(options.push_to_hub, options, only=options.push_only)


def _push_to(name: str, options: argparse.Namespace, only: bool = False) -> Push:
    from .hub.publish import Push

    if options.create_pr and options.replace_weights:
        raise UsageError("--create-pr replaces nothing, --replace-weights does", "give one of them")
    return Push(name, options.private, options.create_pr, options.commit_message, only, options.replace_weights)


def _push(options: argparse.Namespace, interrupts: _Interrupts) -> int:
    from .api import push

    address = push(options.directory, _push_to(options.name, options))
    interrupts.check()
    if options.json:
        _print_json({"output": options.directory, "pushed_to": address}, interrupts)
    else:
        _require_told(_say(f"pushed to {address}", sys.stdout))
    return 0


def _compress(options: argparse.Namespace, interrupts: _Interrupts) -> int:
    scheme = _scheme_of(options)
    from .api import compress

    def work(**run: Any) -> Result:
        return compress(
            options.model,
            options.output,
            scheme,
            format=options.format,
            scale_format=options.scale_format,
            activation_scheme=options.activation_scheme,
            ignore=options.ignore,
            scheme_for=_mapping(options.scheme_for),
            tp=options.tp,
            quantize_lm_head=options.quantize_lm_head,
            architecture=options.architecture,
            device=options.device,
            **run,
        )

    return _run_and_report(work, options, interrupts)


def _dequantize(options: argparse.Namespace, interrupts: _Interrupts) -> int:
    from .api import dequantize

    return _run_and_report(lambda **run: dequantize(options.model, options.output, **run), options, interrupts)


def _run_and_report(work: Callable[..., Result], options: argparse.Namespace, interrupts: _Interrupts) -> int:
    """Call `work` with the options of _add_run_arguments, and show what it does."""
    if options.quiet:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    ranks: Ranks = options.ranks
    ranks.patience = options.rendezvous_timeout
    if ranks.size > 1:
        # What torch's store has to say of a lost connection is pages long, and ours in one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if not options.quiet:
            ranks.say = partial(_say, stream=sys.stderr)
    silent = options.quiet or not ranks.first
    reporter = _Terminal(interrupts, silent or options.json, silent, options.verbose and not options.json)
    try:
        result = work(
            dry_run=options.dry_run,
            workers=options.workers,
            max_memory=options.max_memory,
            revision=options.revision,
            overwrite=options.overwrite,
            stream=options.stream,
            push=_push_of(options),
            ranks=ranks,
            reporter=reporter,
        )
    finally:
        reporter.close()
    _require_told(reporter.untold)
    if options.json and ranks.first:
        _print_json(result.to_json(), interrupts)
    return 0


def _verify(options: argparse.Namespace, interrupts: _Interrupts) -> int:
    from .verification.verify import verify

    bar: _Progress | None = None

    def advanced(done: int, total: int) -> None:
        nonlocal bar
        interrupts.check()
        if not options.json:
            bar = bar or _Progress(total, 0, sys.stderr, "verifying", "verified")
            bar.advance(done - bar.done)

    try:
        report = verify(options.directory, options.source, options.full, workers=options.workers, progress=advanced)
    finally:
        if bar is not None:
            bar.close()
    if options.json:
        _print_json(report.to_json(), interrupts)
    else:
        from .report.text import verification_text

        _require_told(_say(verification_text(report), sys.stdout))
    return EXIT_PROBLEMS if report.problems else 0


class _Terminal:
    """Plan and summary on stdout, progress on stderr.

    Args:
        interrupts: asked between pieces of work.
        quiet: no plan and no summary.
        silent: no progress either.
        verbose: more of the plan.

    Attributes:
        untold: what first prevented something from being printed on stdout, None if nothing did.
    """

    def __init__(self, interrupts: _Interrupts, quiet: bool, silent: bool, verbose: bool) -> None:
        self.interrupts = interrupts
        self.quiet = quiet
        self.silent = silent
        self.verbose = verbose
        self.progress: _Progress | None = None
        self.plan: Plan | None = None
        self.untold: OSError | None = None

    def _print(self, text: str) -> None:
        failure = _say(text, sys.stdout)
        self.untold = self.untold or failure

    def planned(self, plan: Plan, source: Source, output: Path) -> None:
        self.plan = plan
        if self.quiet:
            for note in () if self.silent else (*plan.notes, *source.notes):
                _say(f"note: {note}", sys.stderr)
            return
        from .report.text import details_text, plan_text
        from .run import expected_download

        name = f"{source.repo}@{source.revision}" if source.repo else str(source.root)
        self._print(plan_text(plan, name, output, expected_download(source, plan), source.notes))
        if self.verbose:
            self._print(details_text(plan))

    def started(self, total: int, done: int) -> None:
        if not self.silent:
            self.progress = _Progress(total, done, sys.stderr)

    def advanced(self, nbytes: int) -> None:
        self.interrupts.check()
        if self.progress is not None:
            self.progress.advance(nbytes)

    def publishing(self, repo: str) -> None:
        self.close()
        if not self.silent:
            _say(f"converted; uploading the rest to {repo}", sys.stderr)

    def finished(self, result: Result, already_complete: bool) -> None:
        self.close()
        if not self.quiet and self.plan is not None:
            from .report.text import summary_text

            self._print("\n" + summary_text(self.plan, result, already_complete))

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
            self.progress = None


class _Progress:
    """A bar over bytes on a terminal, a line now and then elsewhere."""

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(
        self, total: int, done: int, stream: TextIO, doing: str = "compressing", did: str = "converted"
    ) -> None:
        self.total = total
        self.did = did
        self.done = done
        self.stream = stream
        self.bar: Any = None
        self.next_line = time.monotonic() + self.SECONDS_BETWEEN_LINES
        if stream.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=doing, file=stream, leave=False)
        elif done:
            _say(f"continuing: {100 * done / total:.0f} % is already {did}", stream)

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.bar is not None:
            try:
                self.bar.update(nbytes)
            except OSError:
                self.bar = None  # nobody looks any more
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + self.SECONDS_BETWEEN_LINES
            _say(f"{100 * self.done / self.total:.0f} % {self.did}", self.stream)

    def close(self) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
