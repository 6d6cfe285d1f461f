"""The command line: what each verb does with its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OpenQuantError, UsageError
from ..files.destination import Destination, ProtectedPaths, require_all
from ..machine import reached_limit, require_room
from ..options import (
    Calibrate,
    CalibrationTexts,
    Check,
    Command,
    Diagnose,
    Evaluate,
    Explain,
    Push,
    Recipe,
    Run,
    Texts,
    files_read,
    flags_of,
    options_of,
    values_for,
)
from .arguments import Parser, compress_parser, recipe_parser, verb_parser
from .console import (
    Interrupts,
    Progress,
    Terminal,
    escaped_libraries,
    fail,
    mend_streams,
    print_json,
    require_told,
    say,
    say_lines,
)
from .interrupts import MESSAGE, hint

if TYPE_CHECKING:
    from ..distributed import Ranks
    from ..hub.source import Source
    from ..result import Result

EXIT_PROBLEMS = 1
EXIT_USER = 2

# What a verb is given: values of options by their names, and `ranks`.
Given = Mapping[str, Any]


def compress_main(arguments: Sequence[str] | None = None) -> int:
    """`compress-fp8` and `python compress_fp8.py`. Returns the exit code."""
    prog = Path(sys.argv[0]).name or "compress-fp8"
    return _run(compress_parser(prog), sys.argv[1:] if arguments is None else arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """`openquant VERB`. Returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return _run(verb_parser(), words or ["--help"])


def _run(parser: Parser, words: Sequence[str]) -> int:
    as_json = "--json" in words
    mend_streams()
    try:
        given = _parsed(parser, words)
    except OpenQuantError as error:
        if _find_ranks()[0].speaks:
            fail(error.message, error.hint, as_json)
        return EXIT_USER
    ranks, mistake = _find_ranks(given["verb"] in SHARED)

    def do() -> int:
        if mistake is not None:
            raise mistake
        require_room()
        return VERBS[given["verb"]]({**given, "ranks": ranks}, interrupts)

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
                fail(told.message, told.hint, as_json and not interrupts.told)
            return EXIT_USER

    def explain() -> None:
        if ranks.speaks:
            fail(MESSAGE, hint(given["verb"]), as_json and not interrupts.told)

    with escaped_libraries(), Interrupts(explain) as interrupts:
        try:
            interrupts.catching = True
            code = do_or_explain()
            interrupts.check()
            interrupts.finish(code)
            return code
        except KeyboardInterrupt:
            # All is let go of. Python would wait for what huggingface_hub's pools still do.
            interrupts.end()


def _parsed(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    try:
        return vars(parser.parse_args(words))
    except SystemExit:
        # --help or --version, which argparse prints itself; it is still in the stream's buffer.
        require_told(say("", sys.stdout, end=""))
        raise


def _find_ranks(shared: bool = True) -> tuple[Ranks, UsageError | None]:
    """This process among several, of which only the first talks to the user; and what keeps that from being known.

    Args:
        shared: whether they have a job in common; else each is on its own.
    """
    from ..distributed import Ranks

    try:
        return (Ranks.from_environment(os.environ) if shared else Ranks()), None
    except UsageError as error:
        return Ranks(), error


def _command(given: Given) -> Command:
    return Command(**values_for(Command, given))


def _page(
    given: Given, models: Sequence[str | os.PathLike[str] | None], outputs: Sequence[Path] = ()
) -> Destination | None:
    """The page of `--report`, which may be written; None for none.

    Args:
        given: what is given.
        models: those that the run reads; None for none.
        outputs: what it writes besides.

    Raises:
        UsageError: it must not, or cannot, be written.
    """
    name = _command(given).report
    if name is None:
        return None
    from ..hub.source import model_folder
    from ..report.html import PAGE, require_tools

    require_tools("--report")
    folders = [model_folder(model) for model in models if model is not None]
    page = Destination(Path(name), "--report", PAGE, ProtectedPaths(folders, files_read(given), outputs))
    page.require()
    return page


def _scheme(given: Given) -> dict[str, str]:
    """The scheme, as -w or --scheme says it; empty where neither does."""
    size, scheme = _command(given).block_size, given.get("scheme")
    if size is None:
        return {"scheme": scheme} if scheme else {}
    if size != 128:
        raise UsageError(f"-w {size}: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor")
    if scheme not in (None, "block"):
        raise UsageError(f"-w 128 asks for blocks, --scheme {scheme} for something else", "leave one of them out")
    return {"scheme": "block"}


def _find_push(given: Given) -> Push | None:
    """Where to push, None for nowhere.

    Raises:
        UsageError: it is said how, but not where; or in two ways.
    """
    values = values_for(Push, given)
    if "name" not in values:
        for name in values:
            flag = flags_of(name, options_of(Push)[name])[0]
            raise UsageError(f"{flag} goes with --push-to-hub", "say where to push")
        return None
    push = Push(**values)
    if push.create_pr and push.replace_weights:
        raise UsageError("--create-pr replaces nothing, --replace-weights does", "give one of them")
    return push


def _push(given: Given, interrupts: Interrupts) -> int:
    from ..api import push

    target = _find_push(given)
    assert target is not None
    address = push(given["directory"], target)
    interrupts.check()
    if _command(given).json:
        print_json({"output": given["directory"], "pushed_to": address}, interrupts)
    else:
        require_told(say_lines([f"pushed to {address}"], sys.stdout))
    return 0


def _recipe(given: Given) -> dict[str, Any]:
    """What is to be made: as a recipe has it, but for what else is given."""
    said = {**values_for(Recipe, given), **_scheme(given), **values_for(CalibrationTexts, given)}
    repeated: dict[str, Any] = {}
    if given.get("recipe") is not None:
        from ..recipes import read_recipe

        repeated = vars(recipe_parser().parse_args(read_recipe(Path(given["recipe"]))))
        for names in (("calibration", "calibrate"), ("text", "dataset")):
            # Of two that exclude each other, the one that is given.
            if any(name in said for name in names):
                repeated = {name: value for name, value in repeated.items() if name not in names}
    return {**repeated, **said}


def _compress(given: Given, interrupts: Interrupts) -> int:
    recipe = _recipe(given)
    from ..api import compress

    return _run_and_report(partial(compress, **recipe), {**given, **recipe}, interrupts)


def _dequantize(given: Given, interrupts: Interrupts) -> int:
    from ..api import dequantize

    return _run_and_report(dequantize, given, interrupts)


def _ranks(given: Given, command: Command) -> Ranks:
    """This process among several that share a job, as it is to wait for the others."""
    ranks: Ranks = given["ranks"]
    ranks.patience = command.rendezvous_timeout
    if ranks.size > 1:
        # What torch's store has to say of a lost connection is pages long, and ours in one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if not command.quiet:
            ranks.say = partial(say, stream=sys.stderr)
    return ranks


def _run_and_report(work: Callable[..., Result], given: Given, interrupts: Interrupts) -> int:
    """Call `work` with what is given of a Run, and show what it does."""
    command = _command(given)
    if command.quiet:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    ranks = _ranks(given, command)
    silent = command.quiet or not ranks.first
    if command.report is not None:
        from ..report.html import require_tools

        require_tools("--report")
    report: Destination | None = None

    def opened(source: Source, output: Path) -> None:
        nonlocal report
        if ranks.first:
            from ..calibration.gptq_run import rounded_layers_path
            from ..calibration.prepare import calibration_path

            report = _page(
                given, [given["model"]], [output, rounded_layers_path(output), calibration_path(source, output)]
            )

    lines, verbose = command.progress == "json", command.verbose and not command.json
    reporter = Terminal(interrupts, silent or command.json, silent, verbose, lines, opened)
    try:
        result = work(**values_for(Run, given), push=_find_push(given), ranks=ranks, reporter=reporter)
    finally:
        reporter.close()
    require_told(reporter.untold)
    if report is not None:
        from ..report.html import render_page
        from ..report.pages import planned_page

        assert reporter.plan is not None
        report.write(render_page(planned_page(reporter.plan, result)).encode())
    if command.json and ranks.first:
        print_json(result.to_json(), interrupts)
    return 0


def _diagnose(given: Given, interrupts: Interrupts) -> int:
    from ..api import diagnose

    command = _command(given)
    page = _page(given, [given["model"]])
    with _bar(interrupts, command, "diagnosing", "diagnosed") as bar:
        found = diagnose(**values_for(Diagnose, given), progress=bar.advanced)
    if page is not None:
        from ..report.html import render_page
        from ..report.pages import diagnosed_page

        page.write(render_page(diagnosed_page(found.to_json())).encode())
    if command.json:
        print_json(found.to_json(), interrupts)
    else:
        from ..report.diagnosis import diagnosis_text

        require_told(say(diagnosis_text(found, command.verbose), sys.stdout))
    return 0


def _explain(given: Given, interrupts: Interrupts) -> int:
    from ..api import explain

    found = explain(**_recipe(given), **values_for(Run, given), **values_for(Explain, given))
    if _command(given).json:
        print_json(found.to_json(), interrupts)
    else:
        from ..report.explained import explanation_text

        require_told(say(explanation_text(found), sys.stdout))
    return 0


def _calibrate(given: Given, interrupts: Interrupts) -> int:
    from ..calibration.run import calibrate

    command, ranks = _command(given), _ranks(given, _command(given))
    silent = command.json or not ranks.first

    def begun(about: str) -> None:
        if not silent:
            say_lines([about], sys.stderr)

    with _bar(interrupts, command, "calibrating", "calibrated", ranks.first, "tokens") as bar:
        values = {**values_for(Calibrate, given), **values_for(CalibrationTexts, given)}
        written = calibrate(**values, begun=begun, progress=bar.advanced, remaining=bar.remaining, ranks=ranks)
    if ranks.first and command.json:
        print_json({"calibration": str(written)}, interrupts)
    elif ranks.first:
        require_told(say_lines([f"wrote {written}"], sys.stdout))
    return 0


def _eval(given: Given, interrupts: Interrupts) -> int:
    from ..evaluation.run import evaluate

    command, asked = _command(given), Evaluate(**values_for(Evaluate, given))
    ranks = _ranks(given, command)
    silent = command.json or not ranks.first
    page, figure = _find_shown(given, asked)

    def begun(about: str) -> None:
        if not silent:
            say_lines([about], sys.stderr)

    with _bar(interrupts, command, "evaluating", "evaluated", ranks.first, "tokens") as bar:
        values = {**values_for(Evaluate, given), **values_for(Texts, given)}
        found = evaluate(**values, begun=begun, progress=bar.advanced, remaining=bar.remaining, ranks=ranks)
    limit = asked.fail_above
    code = EXIT_PROBLEMS if limit is not None and any(each["kl"]["mean"] > limit for each in found.outputs) else 0
    if not ranks.first:
        return code
    if command.json:
        print_json(found.to_json(), interrupts)
    else:
        from ..report.evaluation import evaluation_text

        require_told(say(evaluation_text(found.to_json(), found.notes), sys.stdout))
    # Last, so that what hours have found is told even where a disk is full.
    if page is not None or figure is not None:
        from ..report.pages import write_evaluated

        write_evaluated(found.outputs, (asked.source, *asked.outputs), page, figure)
    return code


def _find_shown(given: Given, asked: Evaluate) -> tuple[Destination | None, Destination | None]:
    """The page and the picture that eval is to write; None for none.

    Raises:
        UsageError: one must not, or cannot, be written.
    """
    command = _command(given)
    if command.report is None and command.figure is None:
        return None, None
    from ..evaluation.run import local_output, protected_by
    from ..files.evaluation import EVALUATION
    from ..report.html import PAGE, PICTURE, require_tools

    protected, beside = protected_by(asked, Texts(**values_for(Texts, given))), local_output(asked)
    kinds = {"--out": EVALUATION, "--report": PAGE, "--figure": PICTURE}
    names = zip(kinds, (asked.out, command.report, command.figure), strict=True)
    found = {
        option: Destination(Path(name), option, kinds[option], protected, beside)
        for option, name in names
        if name is not None
    }
    for option in ("--report", "--figure"):
        if option in found:
            require_tools(option)
    require_all(list(found.values()))
    return found.get("--report"), found.get("--figure")


class _Bar:
    """Shows how far a verb is, and how long the rest takes.

    Args:
        interrupts: asked between pieces of work.
        make: makes what is drawn, given the total; None where nobody looks at this process.
    """

    def __init__(self, interrupts: Interrupts, make: Callable[[int], Progress] | None) -> None:
        self._interrupts, self._make = interrupts, make
        self._progress: Progress | None = None

    def advanced(self, done: int, total: int) -> None:
        """So much is done, of so much in all; raise KeyboardInterrupt if one was asked for."""
        self._interrupts.check()
        if self._make is not None:
            self._progress = self._progress or self._make(total)
            self._progress.advance(done - self._progress.done)

    def remaining(self, seconds: float) -> None:
        """About so many seconds are left."""
        if self._progress is not None:
            self._progress.expect(seconds)

    def close(self) -> None:
        """Take it off the terminal."""
        if self._progress is not None:
            self._progress.close()


@contextmanager
def _bar(
    interrupts: Interrupts, command: Command, doing: str, did: str, first: bool = True, unit: str = "bytes"
) -> Iterator[_Bar]:
    """A bar over bytes or tokens, or lines for a program; nothing where nobody looks at this process."""
    lines = command.progress == "json"

    def make(total: int) -> Progress:
        return Progress(total, 0, sys.stderr, doing, did, lines, unit)

    bar = _Bar(interrupts, None if not first or (command.json and not lines) else make)
    try:
        yield bar
    finally:
        bar.close()


def _verify(given: Given, interrupts: Interrupts) -> int:
    from ..verification.verify import verify

    command = _command(given)
    page = _page(given, [given["directory"], given.get("source")])
    with _bar(interrupts, command, "verifying", "verified") as bar:
        report = verify(**values_for(Check, given), progress=bar.advanced)
    if page is not None:
        from ..report.html import render_page
        from ..report.pages import verified_page

        page.write(render_page(verified_page(report, Path(given["directory"]))).encode())
    if command.json:
        print_json(report.to_json(), interrupts)
    else:
        from ..report.text import verification_text

        require_told(say(verification_text(report), sys.stdout))
    return EXIT_PROBLEMS if report.problems else 0


def _completion(given: Given, interrupts: Interrupts) -> int:
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab, which is not installed", "pip install shtab") from None
    scripts = [shtab.complete(parser, given["shell"]) for parser in (verb_parser(), compress_parser("compress-fp8"))]
    interrupts.check()
    if _command(given).json:
        print_json({"shell": given["shell"], "script": "\n".join(scripts)}, interrupts)
    else:
        require_told(say("\n".join(scripts), sys.stdout))
    return 0


VERBS: Mapping[str, Callable[[Given, Interrupts], int]] = {
    "compress": _compress,
    "dequantize": _dequantize,
    "push": _push,
    "diagnose": _diagnose,
    "explain": _explain,
    "calibrate": _calibrate,
    "eval": _eval,
    "verify": _verify,
    "completion": _completion,
}
# Jobs that several processes share.
SHARED = ("compress", "dequantize", "calibrate", "eval")
