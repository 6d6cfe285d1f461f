"""Mutation testing by hand: `python tests/mutation/run.py formats/kernels --sample 60`; CONTRIBUTING.md tells more.

A mutant is a module with one fault: an operator of mutmut's (another comparison, number, string, argument, ...), a
negated condition, or a statement left out. It is killed by the first test that fails, of those that run the lines with
the fault. A test is told from others by coverage contexts, also where its subprocesses run the code.

Works in a copy of the tracked files. Every test run is a fork of this process, which has imported what is slow to
import, and nothing of openquant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import coverage
import coverage.exceptions
import libcst as cst
import pytest
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from support import starting  # noqa: E402

SKIPPED = ("tests/serve", "tests/fuzz", "tests/mutation")
CONTEXT = "OPENQUANT_TEST"
# What a test may take beyond this process, and a mutant that never ends before it counts as found.
MEMORY, PATIENCE = 16 << 30, 60.0
# What is slow to import and not ours; pytest would rather import a plugin itself.
IMPORTED = (
    *("huggingface_hub", "hypothesis.extra.numpy", "safetensors.torch", "torch", "yaml"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
)
OPTIONS = ("-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class Mutant:
    """A module with one fault: the first and last line it changes, and its text with it."""

    module: str
    first: int
    last: int
    code: str
    diff: str

    @property
    def key(self) -> str:
        """What tells it from others, whatever happens to other lines."""
        return hashlib.sha256(f"{self.module}\n{self.diff}".encode()).hexdigest()[:12]


# Mutants.


class _Finder(cst.CSTVisitor):
    """All pairs of a node and what it becomes, outside annotations and decorators."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.found: list[tuple[int, int, cst.CSTNode, cst.CSTNode]] = []
        # Lines of the statement that is walked: of one of several lines coverage may know the first alone.
        self._statement: CodeRange | None = None

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.SimpleStatementLine):
            self._statement = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine):
            self._statement = self.get_metadata(PositionProvider, node)
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
            return False
        # Types in quotes are no strings to anybody who runs them; TYPE_CHECKING is never true.
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        changed = [new for kind, operator in mutation_operators if isinstance(node, kind) for new in operator(node)]
        if isinstance(node, cst.BaseString):
            changed = changed[:1]
        if isinstance(node, (cst.If, cst.IfExp, cst.While)):
            negated = cst.UnaryOperation(
                cst.Not(), node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            )
            changed.append(node.with_changes(test=negated))
        if isinstance(node, cst.Raise) or (isinstance(node, cst.Expr) and isinstance(node.value, cst.Call)):
            changed.append(cst.Pass())
        place = self._statement or self.get_metadata(PositionProvider, node, None)
        if place is not None:
            self.found += [(place.start.line, place.end.line, node, new) for new in changed]
        return True


def mutants_of(module: str, code: str, chance: random.Random) -> Iterator[Mutant]:
    """Every mutant of a module in an order of chance, each text once."""
    wrapper = MetadataWrapper(cst.parse_module(code))
    finder = _Finder()
    wrapper.visit(finder)
    seen = {code}
    for first, last, node, new in chance.sample(finder.found, len(finder.found)):
        changed = wrapper.module.deep_replace(node, new)
        assert isinstance(changed, cst.Module)
        text = changed.code
        if text in seen or not _compiles(text):
            continue
        seen.add(text)
        lines = difflib.unified_diff(code.splitlines(), text.splitlines(), lineterm="", n=0)
        diff = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
        yield Mutant(module, first, min(last, first + 40), text, diff)


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# Tests.


def fork(
    tree: Path, log: Path, seconds: float, arguments: list[str], plugins: list[Any], caches: bool = False
) -> int | None:
    """pytest's exit code in a child; None if it did not end in time. Compiled modules are kept only if it `caches`."""
    child = os.fork()
    if child == 0:
        _pytest(tree, log, arguments, plugins, caches)
    ended = os.pidfd_open(child)
    in_time = bool(select.select([ended], [], [], seconds)[0])
    os.close(ended)
    with suppress(ProcessLookupError):
        # Whatever it has started, too.
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _pytest(tree: Path, log: Path, arguments: list[str], plugins: list[Any], caches: bool) -> NoReturn:
    code = 99
    try:
        os.setpgid(0, 0)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(tree)
        sys.path[:0] = [str(tree)]
        os.environ["PYTHONPATH"] = str(tree)
        sys.dont_write_bytecode = not caches
        code = pytest.main([*OPTIONS, *arguments], plugins if caches else [*plugins, Uncached()])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(int(code))


class Uncached:
    """Has subprocesses keep no compiled modules: a mutant may have the module's size, and be written within the same
    second.
    """

    def pytest_sessionstart(self) -> None:
        # Not before: tests/conftest.py takes it away.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


class Recorder:
    """Tells coverage which test runs, here and in its subprocesses, and remembers how long it took."""

    def __init__(self, settings: Path, result: Path) -> None:
        self.result = result
        self.coverage = coverage.Coverage(config_file=str(settings), data_suffix=True)
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        os.environ[CONTEXT] = item.nodeid
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - begin
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.result.write_text(json.dumps({"seconds": self.seconds, "failed": self.failed}))


SETTINGS = """[run]
source = {tree}/openquant
data_file = {data}/.coverage
parallel = true
concurrency = thread,greenlet
context = ${{OPENQUANT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


def cover(tree: Path, where: Path, files: list[str]) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """By module and line the tests that run it ("" among them: it runs when imported), and the seconds of each test.

    What is known of a test file from earlier is used again while it and the package stay the same.
    """
    package = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(tree.glob("openquant/**/*.py")))).hexdigest()
    lines: dict[str, dict[int, list[str]]] = {}
    seconds: dict[str, float] = {}
    for name in files:
        digest = hashlib.sha256((tree / name).read_bytes()).hexdigest()
        known = where / "covered" / f"{Path(name).stem}-{digest[:12]}-{package[:12]}.json"
        if not known.exists():
            known.parent.mkdir(exist_ok=True)
            known.write_text(json.dumps(_cover_one(tree, where, name)))
        found = json.loads(known.read_text())
        seconds |= found["seconds"]
        for module, covered in found["lines"].items():
            for line, tests in covered.items():
                lines.setdefault(module, {}).setdefault(int(line), []).extend(tests)
    return lines, seconds


def _cover_one(tree: Path, where: Path, name: str) -> dict[str, Any]:
    data = where / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    settings, result, log = where / "coveragerc", where / "result.json", where / f"cover-{Path(name).stem}.log"
    result.unlink(missing_ok=True)
    settings.write_text(SETTINGS.format(tree=tree, data=data))
    os.environ["COVERAGE_PROCESS_START"] = str(settings)
    begin = time.monotonic()
    # Without -x: what fails here is told, and used no further.
    code = fork(tree, log, 3600, [name, "--maxfail=1000"], [Recorder(settings, result)])
    del os.environ["COVERAGE_PROCESS_START"]
    found = json.loads(result.read_text())
    if found["failed"]:
        print(f"{name}: without any fault these fail (see {log}): {', '.join(found['failed'])}")
    print(f"{name}: {len(found['seconds'])} tests in {time.monotonic() - begin:.0f} s, exit code {code}", flush=True)
    combined = coverage.CoverageData(str(data / "combined"))
    for part in data.glob(".coverage*"):
        piece = coverage.CoverageData(str(part))
        # A process that a test kills leaves half a file.
        with suppress(coverage.exceptions.DataError):
            piece.read()
            combined.update(piece)
    lines = {}
    for path in combined.measured_files():
        if Path(path).is_relative_to(tree / "openquant"):
            by_line = combined.contexts_by_lineno(path)
            lines[Path(path).relative_to(tree / "openquant").with_suffix("").as_posix()] = {
                line: [test for test in tests if test not in found["failed"]] for line, tests in by_line.items()
            }
    return {"seconds": found["seconds"], "lines": lines}


def tests_of(
    mutant: Mutant, lines: dict[str, dict[int, list[str]]], seconds: dict[str, float], budget: float
) -> list[str]:
    """The tests that run a mutant's lines, or what runs when imported, its module; as many as the budget of seconds allows.

    One set of parameters of each test goes before another set of any, and the quicker before the slower.
    """
    covered = lines.get(mutant.module, {})
    found = {test for line in range(mutant.first, mutant.last + 1) for test in covered.get(line, ())}
    # What is imported is run by no test here, and again by each that starts a process.
    if "" in found:
        found = {test for tests in covered.values() for test in tests}
    turns: Counter[str] = Counter()
    ranked = []
    for test in sorted((test for test in found if test in seconds), key=seconds.__getitem__):
        function = test.partition("[")[0]
        ranked.append((turns[function], seconds[test], test))
        turns[function] += 1
    chosen: list[str] = []
    for _, needed, test in sorted(ranked):
        budget -= needed
        if budget < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="such as formats/kernels")
    parser.add_argument("--sample", type=int, default=60, help="mutants of each module, chosen at random")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--where", type=Path, default=Path(tempfile.gettempdir(), "openquant-mutation"), help="what to work in"
    )
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="test files; all but those that serve and fuzz")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant, at most")
    parser.add_argument("--again", action="store_true", help="try what was killed before, too")
    options = parser.parse_args()
    where = options.where.resolve()
    where.mkdir(parents=True, exist_ok=True)
    tree = where / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    files = options.tests or sorted(
        name for name in tracked.split("\0") if Path(name).match("test_*.py") and not name.startswith(SKIPPED)
    )
    # All tests start their commands in forks of one process.
    starting.address(starting.IMPORTED)
    for module in IMPORTED:
        importlib.import_module(module)
    fork(tree, where / "collect.log", 600, ["--collect-only", *files], [], caches=True)
    lines, seconds = cover(tree, where, files)
    results = where / "results.jsonl"
    killed = set()
    if results.exists() and not options.again:
        told = [json.loads(line) for line in results.read_text().splitlines()]
        killed = {entry["key"] for entry in told if entry["how"] in ("killed", "never ends")}
    score: dict[str, Counter[str]] = {}
    for module in options.modules:
        path = tree / "openquant" / f"{module}.py"
        code = path.read_text()
        mutants = mutants_of(module, code, random.Random(f"{options.seed} {module}"))
        counts = score.setdefault(module, Counter())
        for mutant in itertools.islice(mutants, options.sample):
            how = "killed" if mutant.key in killed else ""
            if not how:
                tests = tests_of(mutant, lines, seconds, options.seconds)
                path.write_text(mutant.code)
                how = _try(tree, where, tests, seconds)
                path.write_text(code)
                with results.open("a") as file:
                    print(
                        json.dumps({"key": mutant.key, "module": module, "line": mutant.first, "how": how}), file=file
                    )
                if how in ("survived", "no test"):
                    print(
                        f"\n{how}: {mutant.key} openquant/{module}.py:{mutant.first}, {len(tests)} tests\n{mutant.diff}",
                        flush=True,
                    )
            counts[how] += 1
        print(f"\n{module}: {dict(counts)}", flush=True)
    print(f"\n{'module':<12}{'mutants':>8}{'killed':>8}{'score':>8}")
    for module, counts in score.items():
        good = counts["killed"] + counts["never ends"]
        print(f"{module:<12}{counts.total():>8}{good:>8}{100 * good / max(1, counts.total()):>7.1f}%")
    return 0


def _try(tree: Path, where: Path, tests: list[str], seconds: dict[str, float]) -> str:
    """What becomes of the mutant in the tree: killed, survived, without an end, or run by no test."""
    if not tests:
        return "no test"
    scratch = where / "scratch"
    # Most die at once, of tests that take no time.
    for part in filter(None, (tests[:40], tests[40:])):
        limit = PATIENCE + 5 * sum(seconds[test] for test in part)
        code = fork(tree, where / "last.log", limit, [f"--basetemp={scratch}", *part], [])
        shutil.rmtree(scratch, ignore_errors=True)
        if code is None:
            return "never ends"
        if code != 0:
            return "killed"
    return "survived"


if __name__ == "__main__":
    sys.exit(main())
