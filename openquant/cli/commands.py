"""One function for each verb of the command line, and what they share: errors, ranks, interrupts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OpenQuantError, UsageError
from ..machine import reached_limit, require_room
from ..options import (
    Calibrate,
    CalibrationTexts,
    Check,
    Command,
    CompareSchemes,
    Diagnose,
    Evaluate,
    Explain,
    FitOptions,
    Push,
    Recipe,
    Run,
    Search,
    Texts,
    WebPage,
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
    columns,
    escaped_libraries,
    fail,
    mend_streams,
    print_json,
    require_printed,
    say,
    say_lines,
)
from .start import INTERRUPTED, MESSAGE, hint

if TYPE_CHECKING:
    from ..distributed import Ranks
    from ..evaluation.results import Evaluation
    from ..files.destination import Destination
    from ..result import Preview, Result

EXIT_PROBLEMS = 1
EXIT_USER = 2

# Values of the options that the user gave, by option name, and `ranks`.
Given = Mapping[str, Any]


def compress_main(arguments: Sequence[str] | None = None) -> int:
    """Run `compress-fp8` or `python compress_fp8.py`.

    Args:
        arguments: words of the command line after the command's name; those of this process if None.

    Returns:
        The exit code: 0, or 2 for an error that the user can fix. An interrupt does not return: it ends the process
        with 130.

    Raises:
        SystemExit: --help or --version was printed; the code is 0.
    """
    prog = Path(sys.argv[0]).name or "compress-fp8"
    words = sys.argv[1:] if arguments is None else arguments
    return _run(compress_parser(prog, words), words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `openquant VERB`.

    Args:
        arguments: words of the command line after `openquant`; those of this process if None. Without any, --help is
            printed.

    Returns:
        The exit code: 0; 1 for problems that verify found, or an output of eval above --fail-above; 2 for an error that
        the user can fix. An interrupt does not return: it ends the process with 130.

    Raises:
        SystemExit: --help or --version was printed; the code is 0.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return _run(verb_parser(words), words or ["--help"])


def _run(parser: Parser, words: Sequence[str]) -> int:
    as_json = "--json" in words
    mend_streams()
    try:
        given = vars(parser.parse_args(words))
    except OpenQuantError as error:
        if _find_ranks()[0].speaks:
            fail(error.message, error.hint, as_json)
        return EXIT_USER
    ranks, mistake = _find_ranks(given["verb"] in SHARED)

    def run_verb() -> int:
        try:
            if mistake is not None:
                raise mistake
            require_room()
            return VERBS[given["verb"]]({**given, "ranks": ranks}, interrupts)
        except Exception as error:
            # After an interrupt, other errors follow from it.
            interrupts.check()
            cause = reached_limit(error) or error
            if not isinstance(cause, OpenQuantError):
                raise
            if ranks.speaks:
                fail(cause.message, cause.hint, as_json and not interrupts.result_printed)
            return EXIT_USER

    with escaped_libraries(), Interrupts() as interrupts:
        try:
            interrupts.catching = True
            code = run_verb()
            interrupts.check()
            interrupts.finish(code)
            return code
        except KeyboardInterrupt:
            try:
                if ranks.speaks:
                    hint_text = hint(given["verb"], given.get("search", False))
                    fail(MESSAGE, hint_text, as_json and not interrupts.result_printed)
            finally:
                # Nothing is left to clean up, and Python would wait for the thread pools of huggingface_hub.
                os._exit(INTERRUPTED)


def _find_ranks(shared: bool = True) -> tuple[Ranks, UsageError | None]:
    """Return the ranks of this process, and the error if their environment variables are wrong.

    Args:
        shared: whether the ranks share the job of the verb; otherwise each process works alone.
    """
    from ..distributed import Ranks

    try:
        return (Ranks.from_environment(os.environ) if shared else Ranks()), None
    except UsageError as error:
        return Ranks(), error


def _command(given: Given) -> Command:
    return Command(**values_for(Command, given))


def _page(given: Given) -> Destination | None:
    """Return the page of `fit --search --report` after checking that it can be written; None without --report.

    Raises:
        UsageError: the page cannot be written, or would overwrite something.
    """
    name = _command(given).report
    if name is None:
        return None
    from ..files.destination import Destination, taken_by
    from ..hub.source import model_folder
    from ..report.html import PAGE, require_tools

    require_tools("--report")
    taken = taken_by([model_folder(given["model"])], files_read(given))
    page = Destination(Path(name), "--report", PAGE, taken)
    page.require()
    return page


def _say_written(given: Given, *files: Path | Destination | None) -> None:
    """Say which files were written, after the result; with --json or --quiet nothing is said."""
    command = _command(given)
    lines = [f"wrote {getattr(file, 'path', file)}" for file in files if file is not None]
    if lines and not command.json and not command.quiet:
        require_printed(say_lines(lines, sys.stdout))


def _scheme(given: Given) -> dict[str, str]:
    """Return the scheme of -w or --scheme as a keyword; empty if neither is given."""
    size, scheme = _command(given).block_size, given.get("scheme")
    if size is None:
        return {"scheme": scheme} if scheme else {}
    if size != 128:
        raise UsageError(f"-w {size}: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor")
    if scheme not in (None, "block"):
        raise UsageError(f"-w 128 asks for blocks, --scheme {scheme} for something else", "leave one of them out")
    return {"scheme": "block"}


def _find_push(given: Given) -> Push | None:
    """Return the options of publishing; None without --push-to-hub.

    Raises:
        UsageError: an option needs --push-to-hub, or two options exclude each other.
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
    from ..api import preview_push, push, push_notes

    target = _find_push(given)
    assert target is not None
    if _command(given).dry_run:
        return _print_preview(preview_push(given["directory"], target), given, interrupts)
    address = push(given["directory"], target)
    interrupts.check()
    if notes := [f"note: {note}" for note in push_notes(given["directory"])]:
        say_lines(notes, sys.stderr)
    if _command(given).json:
        print_json({"output": given["directory"], "pushed_to": address}, interrupts)
    else:
        require_printed(say_lines([f"pushed to {address}"], sys.stdout))
    return 0


def _print_preview(preview: Preview, given: Given, interrupts: Interrupts) -> int:
    """Print what a verb would do."""
    interrupts.check()
    if _command(given).json:
        print_json(preview.to_json(), interrupts)
    else:
        from ..report.text import preview_text

        require_printed(say(preview_text(preview, columns()), sys.stdout))
    return 0


def _recipe(given: Given) -> dict[str, Any]:
    """Return the options of the output: those of --recipe, replaced by those that are given."""
    options = {**values_for(Recipe, given), **_scheme(given), **values_for(CalibrationTexts, given)}
    from_recipe: dict[str, Any] = {}
    if given.get("recipe") is not None:
        from ..recipes import read_recipe

        from_recipe = vars(recipe_parser().parse_args(read_recipe(Path(given["recipe"]))))
        for names in (("calibration", "calibrate"), ("text", "dataset")):
            # Of two options that exclude each other, a given one replaces the recipe's.
            if any(name in options for name in names):
                from_recipe = {name: value for name, value in from_recipe.items() if name not in names}
    return {**from_recipe, **options}


def _compress(given: Given, interrupts: Interrupts) -> int:
    recipe = _recipe(given)
    from ..api import compress

    return _run_and_report(
        partial(compress, **recipe, **values_for(FitOptions, given)), {**given, **recipe}, interrupts
    )


def _dequantize(given: Given, interrupts: Interrupts) -> int:
    from ..api import dequantize

    return _run_and_report(dequantize, given, interrupts)


def _ranks(given: Given, command: Command) -> Ranks:
    """Return the ranks with the options that say how they wait for each other."""
    ranks: Ranks = given["ranks"]
    ranks.patience = command.rendezvous_timeout
    if ranks.size > 1:
        # torch's store logs pages about a lost connection; our message is one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        if not command.quiet:
            ranks.say = partial(say, stream=sys.stderr)
    return ranks


def _run_and_report(work: Callable[..., Result], given: Given, interrupts: Interrupts) -> int:
    """Call compress() or dequantize() with the options of a Run, and print plan, progress and result."""
    command = _command(given)
    if command.quiet:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    ranks = _ranks(given, command)
    silent = command.quiet or not ranks.first
    lines, verbose = command.progress == "json", command.verbose and not command.json
    reporter = Terminal(interrupts, silent or command.json, silent, verbose, lines)
    try:
        result = work(**values_for(Run, given), push=_find_push(given), ranks=ranks, reporter=reporter)
    finally:
        reporter.close()
    require_printed(reporter.failure)
    if command.json and ranks.first:
        print_json(result.to_json(), interrupts)
    return 0


def _diagnose(given: Given, interrupts: Interrupts) -> int:
    from ..api import diagnose

    command = _command(given)
    with closing(_Bar(interrupts, command, "diagnosing", "diagnosed")) as bar:
        diagnosis = diagnose(**values_for(Diagnose, given), progress=bar.advanced)
    if command.json:
        print_json(diagnosis.to_json(), interrupts)
    else:
        from ..report.text import diagnosis_text

        require_printed(say(diagnosis_text(diagnosis, command.verbose, columns()), sys.stdout))
    return 0


def _explain(given: Given, interrupts: Interrupts) -> int:
    from ..api import explain

    explanation = explain(**_recipe(given), **values_for(Run, given), **values_for(Explain, given))
    if _command(given).json:
        print_json(explanation.to_json(), interrupts)
    else:
        from ..report.text import explanation_text

        require_printed(say(explanation_text(explanation, columns()), sys.stdout))
    return 0


def _fit(given: Given, interrupts: Interrupts) -> int:
    from ..fit.table import fit_table

    if given.get("search"):
        return _search(given, interrupts)
    for name, option in options_of(Search).items():
        if name in given and name not in options_of(CompareSchemes):
            raise UsageError(f"{flags_of(name, option)[-1]} is for --search", "give --search too, or leave it out")
    if _command(given).report is not None:
        raise UsageError("--report is for --search", "give --search too, or leave it out")
    found = fit_table(**values_for(CompareSchemes, given))
    if _command(given).json:
        print_json(found.to_json(), interrupts)
    else:
        from ..report.fit import fit_text

        require_printed(say(fit_text(found, columns()), sys.stdout))
    return 0


def _search(given: Given, interrupts: Interrupts) -> int:
    from ..fit.search import search_mixtures

    command = _command(given)
    page = _page(given)
    silent, lines = command.quiet, command.progress == "json"
    reporter = Terminal(interrupts, True, silent, False, lines)
    try:
        found = search_mixtures(**values_for(Search, given), reporter=reporter)
    finally:
        reporter.close()
    require_printed(reporter.failure)
    if page is not None:
        from ..report.html import render_page, searched_page

        page.write(render_page(searched_page(found)).encode())
    if command.json:
        print_json(found.to_json(), interrupts)
    elif not command.quiet:
        from ..report.fit import frontier_text

        require_printed(say(frontier_text(found, columns()), sys.stdout))
    _say_written(given, page)
    return 0


def _calibrate(given: Given, interrupts: Interrupts) -> int:
    from ..calibration.run import calibrate, preview_calibration

    command = _command(given)
    ranks = _ranks(given, command)
    options, texts = values_for(Calibrate, given), values_for(CalibrationTexts, given)
    if command.dry_run:
        preview = preview_calibration(Calibrate(**options), CalibrationTexts(**texts))
        return _print_preview(preview, given, interrupts) if ranks.first else 0
    with closing(_Bar(interrupts, command, "calibrating", "calibrated", ranks.first, "tokens")) as bar:
        values = {**options, **texts}
        written = calibrate(**values, begun=bar.begun, progress=bar.advanced, ranks=ranks)
    if ranks.first and command.json:
        print_json({"calibration": str(written)}, interrupts)
    elif ranks.first:
        _say_written(given, written)
    return 0


def _eval(given: Given, interrupts: Interrupts) -> int:
    from ..evaluation.run import evaluate, preview_evaluation
    from ..evaluation.types import rounded
    from ..result import Place

    command, options = _command(given), Evaluate(**values_for(Evaluate, given))
    ranks = _ranks(given, command)
    page, figure = _find_page_and_figure(given, options)
    if command.dry_run:
        preview = preview_evaluation(options, Texts(**values_for(Texts, given)))
        files = tuple(Place(str(file.path.absolute()), file.kind.title) for file in (page, figure) if file is not None)
        return _print_preview(replace(preview, writes=preview.writes + files), given, interrupts) if ranks.first else 0
    unprinted: OpenQuantError | None = None

    def measured(evaluation: Evaluation) -> None:
        nonlocal unprinted
        bar.close()
        try:
            if command.json:
                say_lines([f"note: {note}" for note in evaluation.notes], sys.stderr)
                print_json(evaluation.to_json(), interrupts)
            else:
                from ..report.text import evaluation_text

                require_printed(say(evaluation_text(evaluation.to_json(), evaluation.notes, columns()), sys.stdout))
        except OpenQuantError as error:
            unprinted = error  # The files are still written.

    # The files come last, so that hours of work are printed even if a disk is full.
    with closing(_Bar(interrupts, command, "evaluating", "evaluated", ranks.first, "tokens")) as bar:
        values = {**values_for(Evaluate, given), **values_for(Texts, given)}
        evaluation = evaluate(**values, begun=bar.begun, progress=bar.advanced, measured=measured, ranks=ranks)
    if unprinted is not None:
        raise unprinted
    limit = math.inf if options.fail_above is None else options.fail_above
    above = [output for output in evaluation.outputs if output["kl"]["mean"] > limit]
    code = EXIT_PROBLEMS if above else 0
    if not ranks.first:
        return code
    if page is not None or figure is not None:
        from ..report.html import write_evaluated

        write_evaluated(evaluation.outputs, (options.source, *options.outputs), page, figure)
    _say_written(given, *evaluation.written, page, figure)
    for output in above:
        mean = rounded(output["kl"]["mean"], lambda kl: kl > limit)
        say_lines([f"{output['output']['name']}: mean KL {mean} nats, above --fail-above {limit!r}"], sys.stderr)
    return code


def _find_page_and_figure(given: Given, options: Evaluate) -> tuple[Destination | None, Destination | None]:
    """Return the page and the figure of eval after checking that they can be written; None if not asked for.

    Raises:
        UsageError: one cannot be written, or would overwrite something.
    """
    command = _command(given)
    if command.report is None and command.figure is None:
        return None, None
    from ..evaluation.run import local_output, taken_by_evaluation
    from ..files.destination import Destination, require_all
    from ..files.evaluation import EVALUATION
    from ..report.html import PAGE, PICTURE, require_tools

    taken, beside = taken_by_evaluation(options, Texts(**values_for(Texts, given))), local_output(options)
    kinds = {"--out": EVALUATION, "--report": PAGE, "--figure": PICTURE}
    names = zip(kinds, (options.out, command.report, command.figure), strict=True)
    destinations = {
        option: Destination(Path(name), option, kinds[option], taken, beside)
        for option, name in names
        if name is not None
    }
    for option in ("--report", "--figure"):
        if option in destinations:
            require_tools(option)
    require_all(list(destinations.values()))
    return destinations.get("--report"), destinations.get("--figure")


class _Bar:
    """Prints what a verb begins with, and shows its progress as a bar, or with --progress json as lines.

    Ranks other than the first print nothing.

    Args:
        interrupts: is checked between pieces of work.
        command: the options that say what is printed.
        doing: text before the bar: "verifying".
        did: word in a line: "verified".
        first: whether this is the first rank.
        unit: "bytes" or "tokens".
    """

    def __init__(
        self, interrupts: Interrupts, command: Command, doing: str, did: str, first: bool = True, unit: str = "bytes"
    ) -> None:
        self._interrupts, self._doing, self._did, self._unit = interrupts, doing, did, unit
        self._lines, self._first = command.progress == "json", first
        self._progress: Progress | None = None

    def begun(self, about: str) -> None:
        """Print a line that says what begins."""
        if self._first:
            say_lines([about], sys.stderr)

    def advanced(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done.

        Raises:
            KeyboardInterrupt: a signal came.
        """
        self._interrupts.check()
        if self._first:
            if self._progress is None:
                self._progress = Progress(total, 0, self._doing, self._did, self._lines, self._unit)
            self._progress.advance(done - self._progress.done)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None


def _verify(given: Given, interrupts: Interrupts) -> int:
    from ..verification.verify import verify

    command = _command(given)
    with closing(_Bar(interrupts, command, "verifying", "verified")) as bar:
        report = verify(**values_for(Check, given), progress=bar.advanced, begun=bar.begun)
    if report.quantized and not report.problems and not given.get("full"):
        option = "--source MODEL --full" if report.source is None else "--full"
        report = replace(report, notes=(*report.notes, f"codes were not compared: {option} does that"))
    if command.json:
        print_json(report.to_json(), interrupts)
    else:
        from ..report.text import verification_text

        require_printed(say(verification_text(report, columns()), sys.stdout))
    return EXIT_PROBLEMS if report.problems else 0


def _web(given: Given, interrupts: Interrupts) -> int:
    from ..web.server import find_roots, require_gradio, serve_page

    require_gradio()
    options = WebPage(**values_for(WebPage, given))
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"{options.port} is no port", "give --port from 0 to 65,535")
    roots = find_roots(tuple(options.root))

    def ready(address: str) -> None:
        if _command(given).json:
            print_json({"address": address, "roots": list(map(str, roots.paths))}, interrupts)
        else:
            lines = [f"open {address}", *(f"it may read and write {path}" for path in roots.paths), "Ctrl-C ends it"]
            require_printed(say_lines(lines, sys.stdout))

    serve_page(roots, options.port, ready)
    return 0


def _completion(given: Given, interrupts: Interrupts) -> int:
    from ..result import Place, Preview
    from .completion import completion_script, install_completion

    installed: list[Path] | None = None
    shell = given["shell"]
    if shell == "install":
        shell, installed = install_completion(os.environ, _command(given).dry_run)
    elif _command(given).dry_run:
        raise UsageError("--dry-run is for install: a script is only printed", "leave --dry-run out")
    interrupts.check()
    if installed is not None and _command(given).dry_run:
        writes = tuple(Place(str(path), "a script" if path is installed[0] else "a start file") for path in installed)
        return _print_preview(Preview((), (f"{shell} is to complete openquant",), writes), given, interrupts)
    if _command(given).json:
        printed = {"script": completion_script(shell)} if installed is None else {"installed": str(installed[0])}
        print_json({"shell": shell, **printed}, interrupts)
    elif installed is None:
        require_printed(say(completion_script(shell), sys.stdout))
    else:
        lines = [*(f"wrote {path}" for path in installed), f"a new {shell} completes openquant"]
        require_printed(say_lines(lines, sys.stdout))
    return 0


def _env(given: Given, interrupts: Interrupts) -> int:
    from ..environment import describe_environment

    found = describe_environment()
    if _command(given).json:
        print_json(found, interrupts)
    else:
        from ..report.text import environment_text

        require_printed(say(environment_text(found, columns()), sys.stdout))
    return 0


VERBS: Mapping[str, Callable[[Given, Interrupts], int]] = {
    "compress": _compress,
    "fit": _fit,
    "dequantize": _dequantize,
    "push": _push,
    "diagnose": _diagnose,
    "explain": _explain,
    "calibrate": _calibrate,
    "eval": _eval,
    "verify": _verify,
    "web": _web,
    "env": _env,
    "completion": _completion,
}
# Verbs whose job several ranks share.
SHARED = ("compress", "dequantize", "calibrate", "eval")
