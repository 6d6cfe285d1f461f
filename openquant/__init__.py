"""openquant: turn a Hugging Face checkpoint into an FP8, INT8, INT4 or FP4 directory that vLLM and SGLang load.

    result = openquant.compress("Qwen/Qwen3-8B", "out", "int4", group_size=64, max_memory="2GB")
    openquant.verify("out", "Qwen/Qwen3-8B").problems       # ()

What a caller can mend is an `OpenQuantError`, which has a `hint`.
"""

from __future__ import annotations

from .version import __version__

# Of typing's own name for it a type checker needs only the letters; a command starts here, and imports cost time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .api import compress, dequantize, diagnose, explain, push
    from .calibration.run import calibrate
    from .diagnosis.result import Diagnosis
    from .distributed import Ranks
    from .errors import OpenQuantError, OutputError, PlanError, SourceError, UsageError
    from .evaluation.results import Evaluation
    from .evaluation.run import evaluate
    from .evaluation.types import OutputEvaluation
    from .files.destination import DiskSpace
    from .fit.search import search_mixtures
    from .fit.table import FitTable, SearchResult, fit_table
    from .formats.names import ActivationScheme, CacheScheme, FormatName, GroupSize, ScaleFormat, SchemeName
    from .hub.error_mapping import NotFound, PushError, Unreachable
    from .hub.source import Source
    from .options import Push
    from .packed import PackedLinear
    from .plan.plan import Plan
    from .plan.summary import Explanation
    from .result import Reporter, Result
    from .verification.headers import Report
    from .verification.verify import verify

__all__ = [
    "ActivationScheme",
    "CacheScheme",
    "Diagnosis",
    "DiskSpace",
    "Evaluation",
    "Explanation",
    "FitTable",
    "FormatName",
    "GroupSize",
    "NotFound",
    "OpenQuantError",
    "OutputError",
    "OutputEvaluation",
    "PackedLinear",
    "Plan",
    "PlanError",
    "Push",
    "PushError",
    "Ranks",
    "Report",
    "Reporter",
    "Result",
    "ScaleFormat",
    "SchemeName",
    "SearchResult",
    "Source",
    "SourceError",
    "Unreachable",
    "UsageError",
    "__version__",
    "calibrate",
    "compress",
    "dequantize",
    "diagnose",
    "evaluate",
    "explain",
    "fit_table",
    "push",
    "search_mixtures",
    "verify",
]

# Imported when first used: torch alone takes longer to load than the command takes to start.
_HOMES = {
    **dict.fromkeys(("compress", "dequantize", "diagnose", "explain", "push"), "api"),
    **dict.fromkeys(("OpenQuantError", "OutputError", "PlanError", "SourceError", "UsageError"), "errors"),
    **dict.fromkeys(
        ("ActivationScheme", "CacheScheme", "FormatName", "GroupSize", "ScaleFormat", "SchemeName"), "formats.names"
    ),
    **dict.fromkeys(("NotFound", "PushError", "Unreachable"), "hub.error_mapping"),
    "Diagnosis": "diagnosis.result",
    "DiskSpace": "files.destination",
    "Evaluation": "evaluation.results",
    "Explanation": "plan.summary",
    "FitTable": "fit.table",
    "OutputEvaluation": "evaluation.types",
    "PackedLinear": "packed",
    "Plan": "plan.plan",
    "Push": "options",
    "Ranks": "distributed",
    "Report": "verification.headers",
    "Reporter": "result",
    "Result": "result",
    "SearchResult": "fit.table",
    "Source": "hub.source",
    "calibrate": "calibration.run",
    "evaluate": "evaluation.run",
    "fit_table": "fit.table",
    "search_mixtures": "fit.search",
    "verify": "verification.verify",
}


def __dir__() -> list[str]:
    return sorted(__all__)


# Hidden from type checkers, which else take a misspelled name for an object.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            from importlib import import_module

            exported: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
            globals()[name] = exported
            return exported
        raise AttributeError(f"module 'openquant' has no attribute {name!r}")
