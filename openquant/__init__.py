"""openquant: turn a Hugging Face checkpoint into an FP8, INT8, INT4 or FP4 directory that vLLM and SGLang load."""

from __future__ import annotations

from .version import __version__

# Of typing's own name for it a type checker needs only the letters; a command starts here, and imports cost time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .api import compress, dequantize, diagnose, push
    from .calibration import calibrate
    from .errors import OpenQuantError
    from .evaluation import evaluate
    from .explanation import explain
    from .measure.diagnosis import Diagnosis
    from .measure.results import Evaluation
    from .options import Push
    from .packed import PackedLinear
    from .report.reporter import Reporter
    from .report.result import Result
    from .verification.outcome import Report
    from .verification.verify import verify

__all__ = [
    "Diagnosis",
    "Evaluation",
    "OpenQuantError",
    "PackedLinear",
    "Push",
    "Report",
    "Reporter",
    "Result",
    "__version__",
    "calibrate",
    "compress",
    "dequantize",
    "diagnose",
    "evaluate",
    "explain",
    "push",
    "verify",
]

# Imported when first used: torch alone takes longer to load than the command takes to start.
_HOMES = {
    "Diagnosis": "measure.diagnosis",
    "Evaluation": "measure.results",
    "OpenQuantError": "errors",
    "PackedLinear": "packed",
    "Push": "options",
    "Report": "verification.verify",
    "Reporter": "report.reporter",
    "Result": "report.result",
    "calibrate": "calibration",
    "compress": "api",
    "dequantize": "api",
    "diagnose": "api",
    "evaluate": "evaluation",
    "explain": "explanation",
    "push": "api",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        found: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
    raise AttributeError(f"module 'openquant' has no attribute {name!r}")
