"""One function for each verb of the command line, and what they share: errors, ranks, interrupts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import fields, options
from ..distributed import Ranks
from ..errors import OpenQuantError, UsageError
from ..machine import without_memory
from . import console
from .arguments import Command, Parser, WebPage, compress_parser, verb_parser

if TYPE_CHECKING:
    from ..evaluation.results import Evaluation
    from ..files.destination import Destination, FileKind
    from ..result import Result

EXIT_PROBLEMS = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130
_NO_MEMORY = "raise the limit of memory (ulimit -v, or the container's), or use fewer --workers"
# Verbs that keep nothing of what they have computed; but `fit --search` keeps scores.
_FROM_THE_BEGINNING = ("diagnose", "explain", "fit", "verify")


class Call:
    """A call of a verb.

    Attributes:
        given: values of the options that the user gave, by name.
        command: options that the command line handles itself.
        ranks: the processes that share the job of the verb.
        interrupts: is checked between pieces of work.
    """

    def __init__(self, given: Mapping[str, Any], ranks: Ranks, interrupts: console.Interrupts) -> None:
        self.given = given
        self.command = Command(**fields.values_for(Command, given))
        self.ranks = ranks
        self.interrupts = interrupts

        ranks.patience = self.command.rendezvous_timeout
        if ranks.size > 1:
            # torch's store logs pages about a lost connection; our message is one line.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            if not self.command.quiet:
                ranks.say = partial(console.say, stream=sys.stderr)

    def values(self, *kinds: type) -> dict[str, Any]:
        """Return the given values of the options of some classes, by name."""
        return {name: value for kind in kinds for name, value in fields.values_for(kind, self.given).items()}

    def show(self, result: Any, text: Callable[..., str], *more: Any, coloured: bool = True) -> int:
        """Print the result: with --json an object, else its text.

        Args:
            result: a dictionary, or what has `to_json()`.
            text: makes the text of the result, of `more`, and of the number of characters in a line.
            more: what the text needs besides.
            coloured: whether the text may be coloured.

        Returns:
            The exit code, 0.
        """
        self.interrupts.check()
        if self.command.json:
            console.print_json(result if isinstance(result, dict) else result.to_json(), self.interrupts)
        else:
            console.say(text(result, *more, console.columns()), sys.stdout, coloured=coloured)
        return 0

    def show_lines(self, value: dict[str, Any], lines: Iterable[str]) -> int:
        """Print a result of a few lines, which may quote others: with --json the object."""
        from ..report.cells import join_lines

        return self.show(value, lambda *_: join_lines(lines))

    def say_written(self, *files: Path | Destination | None) -> None:
        """Say which files were written, after the result; with --json or --quiet nothing is said."""
        lines = [f"wrote {getattr(file, 'path', file)}" for file in files if file is not None]
        if lines and not self.command.json and not self.command.quiet:
            console.say_lines(lines, sys.stdout)


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
    console.mend_streams()

    ranks = Ranks()
    try:
        given = vars(parser.parse_args(words))
    except OpenQuantError as error:
        with suppress(UsageError):
            ranks = Ranks.from_environment(os.environ)
        if ranks.first:
            console.fail(error.message, error.hint, as_json)
        return EXIT_USER

    if given.get("max_memory") is not None:
        # Xet buffers 1.6 GB, and more for each file (hf_xet 1.8, XetConfig), which no limit of ours counts.
        os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

    def run_verb() -> int:
        nonlocal ranks
        try:
            # Ranks share the job of these verbs; for others each process works alone.
            if given["verb"] in SHARED:
                ranks = Ranks.from_environment(os.environ)
            return VERBS[given["verb"]](Call(given, ranks, interrupts))
        except Exception as error:
            # After an interrupt, other errors follow from it.
            interrupts.check()

            cause = error
            if without_memory(error):
                cause = OpenQuantError("memory ran out", _NO_MEMORY)
            if not isinstance(cause, OpenQuantError):
                raise

            if ranks.speaks:
                console.fail(cause.message, cause.hint, as_json and not interrupts.result_printed)
            return EXIT_USER

    with console.Interrupts() as interrupts:
        try:
            code = run_verb()
            interrupts.check()
            return code
        except KeyboardInterrupt:
            try:
                if ranks.speaks:
                    continues = given["verb"] not in _FROM_THE_BEGINNING or given.get("search")
                    effect = " to continue" if continues else ": it starts from the beginning"
                    hint = f"run the same command again{effect}"
                    console.fail("interrupted", hint, as_json and not interrupts.result_printed)
            finally:
                # Nothing is left to clean up, and Python would wait for the thread pools of huggingface_hub.
                os._exit(EXIT_INTERRUPTED)


def _scheme(call: Call) -> dict[str, str]:
    """Return the scheme of -w or --scheme as a keyword; empty if neither is given."""
    size = call.command.block_size
    scheme = call.given.get("scheme")
    if size is None:
        return {"scheme": scheme} if scheme else {}

    if size != 128:
        raise UsageError(f"-w {size}: engines serve blocks of 128 x 128 only", "use -w 128, or --scheme tensor")
    if scheme not in (None, "block"):
        raise UsageError(f"-w 128 asks for blocks, --scheme {scheme} for something else", "leave one of them out")
    return {"scheme": "block"}


def _find_push(call: Call) -> options.Push | None:
    """Return the options of publishing; None without --push-to-hub.

    Raises:
        UsageError: an option needs --push-to-hub, or two options exclude each other.
    """
    values = call.values(options.Push)
    if "name" not in values:
        for name in values:
            flag = fields.flags_of(name, fields.options_of(options.Push)[name])[0]
            raise UsageError(f"{flag} goes with --push-to-hub", "say where to push")
        return None

    return options.Push(**values)


def _push(call: Call) -> int:
    from ..api import preview_push, push, push_notes
    from ..report.text import preview_text

    directory = call.given["directory"]
    target = _find_push(call)
    assert target is not None
    if call.command.dry_run:
        return call.show(preview_push(directory, target), preview_text)

    address = push(directory, target)
    call.interrupts.check()
    notes = [f"note: {note}" for note in push_notes(directory)]
    if notes:
        console.say_lines(notes, sys.stderr)
    return call.show_lines({"output": directory, "pushed_to": address}, [f"pushed to {address}"])


def _recipe(call: Call) -> dict[str, Any]:
    """Return the options of the output: those of --recipe, replaced by those that are given."""
    chosen = {**call.values(options.Recipe), **_scheme(call), **call.values(options.CalibrationTexts)}
    file = call.given.get("recipe")
    if file is None:
        return chosen

    from ..recipes import read_recipe

    from_recipe = read_recipe(Path(file))
    for names in (("calibration", "calibrate"), ("text", "dataset")):
        # Of two options that exclude each other, a given one replaces the recipe's.
        if any(name in chosen for name in names):
            from_recipe = {name: value for name, value in from_recipe.items() if name not in names}
    return {**from_recipe, **chosen}


def _compress(call: Call) -> int:
    chosen = {**_recipe(call), **call.values(options.FitOptions)}

    from ..api import compress

    return _convert(call, partial(compress, **chosen))


def _dequantize(call: Call) -> int:
    from ..api import dequantize

    return _convert(call, dequantize)


def _convert(call: Call, work: Callable[..., Result]) -> int:
    """Call compress() or dequantize() with the options of a Run; plan, progress and result are printed meanwhile."""
    command = call.command
    if command.quiet:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")

    with closing(console.Terminal(call)) as reporter:
        result = work(**call.values(options.Run), push=_find_push(call), ranks=call.ranks, reporter=reporter)
    if command.json and call.ranks.first:
        console.print_json(result.to_json(), call.interrupts)
    return 0


def _diagnose(call: Call) -> int:
    from ..api import diagnose
    from ..report.text import diagnosis_text

    with closing(console.Terminal(call, ("diagnosing", "diagnosed"))) as reporter:
        diagnosis = diagnose(**call.values(options.Diagnose), reporter=reporter)
    return call.show(diagnosis, diagnosis_text, call.command.verbose)


def _explain(call: Call) -> int:
    chosen = {**_recipe(call), **call.values(options.ModelSource, options.Explain)}

    from ..api import explain
    from ..report.text import explanation_text

    return call.show(explain(**chosen), explanation_text)


def _fit(call: Call) -> int:
    if call.given.get("search"):
        return _search(call)

    for name, option in fields.options_of(options.Search).items():
        if name in call.given and name not in fields.options_of(options.CompareSchemes):
            flag = fields.flags_of(name, option)[-1]
            raise UsageError(f"{flag} is for --search", "give --search too, or leave it out")
    if call.command.report is not None:
        raise UsageError("--report is for --search", "give --search too, or leave it out")

    from ..fit.table import fit_table
    from ..report.fit import fit_text

    return call.show(fit_table(**call.values(options.CompareSchemes)), fit_text)


def _search(call: Call) -> int:
    from ..fit.run import search_mixtures
    from ..report.fit import frontier_text
    from ..report.html import PAGE, render_frontier

    command = call.command
    page = _destination("--report", command.report, PAGE)
    with closing(console.Terminal(call)) as reporter:
        found = search_mixtures(**call.values(options.Search), reporter=reporter)
    if page is not None:
        page.write(render_frontier(found).encode())
    if command.json or not command.quiet:
        call.show(found, frontier_text)
    call.say_written(page)
    return 0


def _calibrate(call: Call) -> int:
    from ..calibration.run import calibrate

    ranks = call.ranks
    chosen = call.values(options.Calibrate, options.CalibrationTexts)
    with closing(console.Terminal(call)) as reporter:
        written = calibrate(**chosen, ranks=ranks, reporter=reporter)
    if not ranks.first:
        return 0
    return call.show_lines({"calibration": str(written)}, [f"wrote {written}"])


def _eval(call: Call) -> int:
    from ..evaluation.run import evaluate
    from ..report.html import PAGE, PICTURE, write_evaluated
    from ..report.text import evaluation_text

    chosen = options.Evaluate(**call.values(options.Evaluate))
    page = _destination("--report", call.command.report, PAGE)
    figure = _destination("--figure", call.command.figure, PICTURE)
    files = [Path(name).resolve() for name in (call.command.report, call.command.figure, chosen.out) if name]
    if len(files) > len(set(files)):
        raise UsageError("two of --report, --figure and --out are the same file", "name each another file")

    with closing(console.Terminal(call, ("evaluating", "evaluated"))) as reporter:
        evaluation = evaluate(**call.values(options.Evaluate, options.Texts), ranks=call.ranks, reporter=reporter)
    if call.ranks.first:
        if call.command.json:
            console.say_lines([f"note: {note}" for note in evaluation.notes], sys.stderr)
        call.show(evaluation.to_json(), evaluation_text, evaluation.notes)

        write_evaluated(evaluation.outputs, page, figure)
        call.say_written(*evaluation.written, page, figure)
    return _judge(call, evaluation, chosen.fail_above)


def _judge(call: Call, evaluation: Evaluation, limit: float | None) -> int:
    """Name the outputs above --fail-above; return the exit code."""
    if limit is None:
        return 0

    # So a limit of NaN lets nothing through.
    above = [
        f"{output['output']['name']}: mean KL {output['kl']['mean']:.3g} nats, above --fail-above {limit!r}"
        for output in evaluation.outputs
        if not output["kl"]["mean"] <= limit
    ]
    if above and call.ranks.first:
        console.say_lines(above, sys.stderr)
    return EXIT_PROBLEMS if above else 0


def _destination(option: str, name: str | None, kind: FileKind) -> Destination | None:
    """Return where a page or a figure goes, after checking that it can be written; None if it is not asked for."""
    from ..files.destination import Destination
    from ..report.html import require_tools

    if name is None:
        return None
    require_tools(option)
    file = Destination(Path(name), option, kind)
    file.require()
    return file


def _verify(call: Call) -> int:
    from ..report.text import verification_text
    from ..verification.verify import verify

    with closing(console.Terminal(call, ("verifying", "verified"))) as reporter:
        report = verify(**call.values(options.Check), reporter=reporter)

    if report.quantized and not report.problems and not call.given.get("full"):
        option = "--full"
        if report.source is None:
            option = "--source MODEL --full"
        report = replace(report, notes=(*report.notes, f"codes and scales were not compared: {option} does that"))
    call.show(report, verification_text)
    return EXIT_PROBLEMS if report.problems else 0


def _web(call: Call) -> int:
    from ..web.server import find_roots, require_gradio, serve_page

    require_gradio()
    chosen = WebPage(**call.values(WebPage))
    if not 0 <= chosen.port < 1 << 16:
        raise UsageError(f"{chosen.port} is no port", "give --port from 0 to 65,535")
    roots = find_roots(tuple(chosen.root))

    def ready(address: str) -> None:
        lines = [f"open {address}", *(f"it may read and write {path}" for path in roots.paths), "Ctrl-C ends it"]
        call.show_lines({"address": address, "roots": list(map(str, roots.paths))}, lines)

    serve_page(roots, chosen.port, ready)
    return 0


def _completion(call: Call) -> int:
    import shtab

    shell = call.given["shell"]
    script = "\n".join(shtab.complete(parser, shell) for parser in (verb_parser(), compress_parser("compress-fp8")))
    return call.show({"shell": shell, "script": script}, lambda *_: script, coloured=False)


def _env(call: Call) -> int:
    from ..convert.conversion import loops
    from ..formats import kernels
    from ..machine import describe_environment
    from ..report.text import environment_text

    name = "numpy" if loops(True) is kernels else "numba"
    return call.show(describe_environment(name), environment_text)


VERBS: Mapping[str, Callable[[Call], int]] = {
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
