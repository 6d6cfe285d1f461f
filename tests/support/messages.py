"""Finds all error messages in the code that raises them, by which pages that show one are checked.

A value that a message gets as it is raised stands as "...". A message is left out if it is hardly more than such values,
because its words come from elsewhere.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openquant.version import install_hint

PACKAGE = Path(__file__).resolve().parents[2] / "openquant"
ANY = "..."


class Message(NamedTuple):
    """An error: where it is raised, what it says, and what to do."""

    room: str
    text: str
    hint: str


class Module:
    """A parsed module, which finds the texts that its names stand for.

    Args:
        path: its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.constants = {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        self.imports = {
            alias.asname or alias.name: (self._file(node), alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
        }

    def _file(self, node: ast.ImportFrom) -> Path:
        return self.path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")

    def texts(self, node: ast.expr) -> list[str]:
        """All texts that an expression may be, with "..." for what is not known."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return ["".join(map(self._part, node.values))]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body), *self.texts(node.orelse)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [left + right for left in self.texts(node.left) for right in self.texts(node.right)]
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.texts(self.constants[node.id])
        if isinstance(node, ast.Name) and node.id in self.imports:
            path, name = self.imports[node.id]
            if path.is_file():
                return parsed(path).texts(ast.Name(name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.imports:
            # A name of a module that is imported as a whole.
            path, module = self.imports[node.value.id]
            file = path.with_suffix("") / f"{module}.py"
            if file.is_file():
                return parsed(file).texts(ast.Name(node.attr))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install_hint":
            return [install_hint(str(argument.value)) for argument in node.args if isinstance(argument, ast.Constant)]
        return [ANY]

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue):
            found = self.texts(node.value)
            return found[0] if len(found) == 1 else ANY
        return str(node.value) if isinstance(node, ast.Constant) else ANY


@functools.cache
def parsed(path: Path) -> Module:
    """A module, parsed once."""
    return Module(path)


def error_classes(modules: list[Module]) -> set[str]:
    """The names of OpenQuantError and of all classes that are made from it."""
    names = {"OpenQuantError"}
    classes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {node.name for node in classes if {ast.unparse(base) for base in node.bases} & names} - names
        if not more:
            return names
        names |= more


def messages(package: Path = PACKAGE) -> Iterator[Message]:
    """Every message in a package that has words of its own.

    Args:
        package: its directory.
    """
    modules = [parsed(path) for path in sorted(package.rglob("*.py"))]
    classes = error_classes(modules)
    for module in modules:
        room = module.path.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                if not arguments or isinstance(arguments[0], ast.Starred):
                    continue
                hints = module.texts(arguments[1]) if len(arguments) > 1 else [ANY]
                hint = ", or: ".join(dict.fromkeys(text for text in hints if re.search("[a-z]", text)))
                for text in module.texts(arguments[0]):
                    if len(re.findall(r"[\w-]{2,}", text)) > (0 if hint else 1):
                        yield Message(room, re.sub(r"(\.\.\.){2,}", ANY, text), hint)
