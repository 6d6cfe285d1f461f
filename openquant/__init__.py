"""openquant: turn a Hugging Face checkpoint into an FP8, INT8, INT4 or FP4 directory that vLLM and SGLang load.

    result = openquant.compress("Qwen/Qwen3-8B", "out", "int4", group_size=64, max_memory="2GB")
    openquant.verify("out", "Qwen/Qwen3-8B").problems       # ()

What a caller can mend is an `OpenQuantError`, which has a `hint`.
"""

from __future__ import annotations

from .version import __version__  # noqa: F401

# What is exported, by the module that has it. Type checkers read `__init__.pyi`, which tools/stub.py writes.
_EXPORTED = {
    "api": ("compress", "dequantize", "diagnose", "explain", "push"),
    "calibration.run": ("calibrate",),
    "diagnosis.result": ("Diagnosis",),
    "distributed": ("Ranks",),
    "errors": ("OpenQuantError", "OutputError", "PlanError", "SourceError", "UsageError"),
    "evaluation.results": ("Evaluation",),
    "evaluation.run": ("evaluate",),
    "evaluation.verdict": ("OutputEvaluation",),
    "files.destination": ("DiskSpace",),
    "fit.run": ("search_mixtures",),
    "fit.table": ("FitTable", "SearchResult", "fit_table"),
    "formats.hardware": ("ActivationScheme", "CacheScheme", "FormatName", "GroupSize", "ScaleFormat", "SchemeName"),
    "hub.error_mapping": ("NotFound", "PushError", "Unreachable"),
    "hub.source": ("Source",),
    "options": ("Push",),
    "packed": ("PackedLinear",),
    "plan.plan": ("Plan",),
    "plan.summary": ("Explanation",),
    "result": ("Reporter", "Result"),
    "verification.headers": ("Report",),
    "verification.verify": ("verify",),
}
_HOMES = {name: home for home, names in _EXPORTED.items() for name in names}

__all__ = sorted([*_HOMES, "__version__"])


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    # Imported when first used: torch alone takes longer to load than the command takes to start.
    if name not in _HOMES:
        raise AttributeError(f"module 'openquant' has no attribute {name!r}")
    from importlib import import_module

    exported: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = exported
    return exported
