"""Writes openquant/__init__.pyi, by which type checkers and editors know the verbs' parameters, made of options.py.

python tools/stub.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

import openquant
from openquant import _EXPORTED  # type: ignore[attr-defined]

STUB = Path(__file__).parent.parent / "openquant" / "__init__.pyi"
HEAD = '"""Written by tools/stub.py."""'


def make_stub() -> str:
    """Return the text of the stub."""
    verbs = {
        name: getattr(openquant, name) for name in openquant.__all__ if hasattr(getattr(openquant, name), "__wrapped__")
    }
    lines = [HEAD, "", "import os", "from collections.abc import Mapping, Sequence", "from pathlib import Path", ""]
    for home, names in _EXPORTED.items():
        imported = [name for name in names if name not in verbs]
        if imported:
            lines.append(f"from .{home} import {', '.join(imported)}")
    lines += ["from .version import __version__", "", f"__all__ = {openquant.__all__}", ""]

    for name, function in verbs.items():
        signature = inspect.signature(function)
        parameters = _parameters(signature)
        lines.append(f"def {name}({', '.join(parameters)}) -> {signature.return_annotation}: ...")
    return "\n".join(lines) + "\n"


def _parameters(signature: inspect.Signature) -> list[str]:
    """Return the parameters as they are written, with the star before those that are given by name."""
    written = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        written.append(f"{parameter.name}: {parameter.annotation}{default}")
    return written


if __name__ == "__main__":
    STUB.write_text(make_stub(), encoding="utf-8")
