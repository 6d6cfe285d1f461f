"""Mutation testing by hand: `python tests/mutation/run.py plan/plan --tests tests/plan --sample 20`.

A mutant is a module with one fault: an operator of mutmut's (another comparison, number, string, argument, ...) or a
negated condition. It is killed by the first test that fails. Mutants are written into a copy of the tracked files.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent.parent
# Seconds after which tests of a mutant that never ends have found it.
PATIENCE = 900


class Finder(cst.CSTVisitor):
    """All pairs of a node and what it becomes, outside annotations, decorators and imports."""

    def __init__(self) -> None:
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)):
            return False
        changed = [new for kind, operator in mutation_operators if isinstance(node, kind) for new in operator(node)]
        if isinstance(node, cst.BaseString):
            changed = changed[:1]
        if isinstance(node, (cst.If, cst.IfExp, cst.While)):
            test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            changed.append(node.with_changes(test=cst.UnaryOperation(cst.Not(), test)))
        self.found += [(node, new) for new in changed]
        return True


def mutants_of(code: str, chance: random.Random) -> Iterator[str]:
    """The text of every mutant of a module in an order of chance, each once."""
    wrapper = MetadataWrapper(cst.parse_module(code))
    finder = Finder()
    wrapper.module.visit(finder)
    seen = {code}
    for node, new in chance.sample(finder.found, len(finder.found)):
        changed = wrapper.module.deep_replace(node, new)
        assert isinstance(changed, cst.Module)
        if changed.code not in seen and compiles(changed.code):
            seen.add(changed.code)
            yield changed.code


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def copy_tracked(tree: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def is_found(tree: Path, tests: list[str]) -> bool:
    """Whether a test fails in the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # A mutant may have the module's size, and be written within the same second.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="such as formats/kernels")
    parser.add_argument("--tests", nargs="+", required=True, metavar="PATH", help="the tests that are to find them")
    parser.add_argument("--sample", type=int, default=20, help="mutants, chosen at random")
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="openquant-mutation-") as name:
        tree = Path(name)
        copy_tracked(tree)
        if is_found(tree, options.tests):
            parser.error("these tests fail without any fault")

        path = tree / "openquant" / f"{options.module}.py"
        code = path.read_text()
        tried = found = 0
        for mutant in mutants_of(code, random.Random(options.seed)):
            if tried == options.sample:
                break
            tried += 1
            path.write_text(mutant)
            if is_found(tree, options.tests):
                found += 1
                continue
            lines = difflib.unified_diff(code.splitlines(), mutant.splitlines(), "code", "mutant", lineterm="", n=0)
            print("survived:", *lines, sep="\n", flush=True)
        print(f"{options.module}: {found} of {tried} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
