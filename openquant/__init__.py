"""openquant: turn a Hugging Face checkpoint into an FP8 directory that vLLM and SGLang load."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Result, compress, dequantize, push
    from .errors import OpenQuantError
    from .packed import PackedLinear
    from .publish import Push
    from .verification import Report, verify

__all__ = [
    "OpenQuantError",
    "PackedLinear",
    "Push",
    "Report",
    "Result",
    "__version__",
    "compress",
    "dequantize",
    "push",
    "verify",
]

# Imported when first used: torch alone takes longer to load than the command takes to start.
_HOMES = {
    "OpenQuantError": "errors",
    "PackedLinear": "packed",
    "Push": "publish",
    "Report": "verification",
    "Result": "api",
    "compress": "api",
    "dequantize": "api",
    "push": "api",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'openquant' has no attribute {name!r}")
