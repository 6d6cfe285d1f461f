"""Stands for numpy in the browser, where plans are made and nothing is computed. Import it before openquant.

Modules of openquant name numpy's types in annotations. Whatever else they use of it is an AttributeError.
"""

from __future__ import annotations

import sys
from types import ModuleType


class _Type(type):
    """A type of numpy: it can be subscripted and joined with | in annotations."""

    def __getitem__(cls, _: object) -> type:
        return cls

    def __or__(cls, _: object) -> type:  # type: ignore[override]
        return cls

    def __call__(cls, *_: object) -> object:
        return cls


_TYPES = ("NDArray", "dtype", "float32", "generic", "uint8", "uint16", "uint32", "unsignedinteger")


def _stand_in() -> None:
    """Let modules import numpy, which then has nothing but names of types."""

    def missing(name: str) -> object:
        raise AttributeError(f"numpy.{name} is not in the browser, where plans are made and nothing is computed")

    numpy, typing = ModuleType("numpy"), ModuleType("numpy.typing")
    for name in _TYPES:
        kind = _Type(name, (), {})
        setattr(numpy, name, kind)
        setattr(typing, name, kind)
    numpy.typing = typing  # type: ignore[attr-defined]
    numpy.__getattr__ = missing  # type: ignore[method-assign]
    sys.modules |= {"numpy": numpy, "numpy.typing": typing}


_stand_in()
