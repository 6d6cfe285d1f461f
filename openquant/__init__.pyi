"""Written by tools/stub.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .api import push
from .diagnosis.result import Diagnosis
from .distributed import Ranks
from .errors import OpenQuantError, OutputError, PlanError, SourceError, UsageError
from .evaluation.results import Evaluation
from .evaluation.types import OutputEvaluation
from .files.destination import DiskSpace
from .fit.table import FitTable, SearchResult
from .formats.hardware import ActivationScheme, CacheScheme, FormatName, GroupSize, ScaleFormat, SchemeName
from .hub.error_mapping import NotFound, PushError, Unreachable
from .hub.source import Source
from .options import Push
from .packed import PackedLinear
from .plan.plan import Plan
from .plan.summary import Explanation
from .result import Reporter, Result
from .verification.headers import Report
from .version import __version__

__all__ = ['ActivationScheme', 'CacheScheme', 'Diagnosis', 'DiskSpace', 'Evaluation', 'Explanation', 'FitTable', 'FormatName', 'GroupSize', 'NotFound', 'OpenQuantError', 'OutputError', 'OutputEvaluation', 'PackedLinear', 'Plan', 'PlanError', 'Push', 'PushError', 'Ranks', 'Report', 'Reporter', 'Result', 'ScaleFormat', 'SchemeName', 'SearchResult', 'Source', 'SourceError', 'Unreachable', 'UsageError', '__version__', 'calibrate', 'compress', 'dequantize', 'diagnose', 'evaluate', 'explain', 'fit_table', 'push', 'search_mixtures', 'verify']

def calibrate(model: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, revision: str | None = None, stream: bool = False, device: str = 'cpu', max_memory: int | str | None = None, scratch: str | os.PathLike[str] | None = None, overwrite: bool = False, text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), dataset: str | None = None, samples: int = 128, length: int = 512, ranks: Ranks | None = None, reporter: Reporter | None = None) -> Path: ...
def compress(model: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, scheme: SchemeName = 'tensor', *, revision: str | None = None, stream: bool = False, device: str = 'cpu', workers: int | None = None, max_memory: int | str | None = None, dry_run: bool = False, overwrite: bool = False, copy: str | Sequence[str] = (), push: Push | str | None = None, format: FormatName | None = None, scale_format: ScaleFormat | None = None, activation_scheme: ActivationScheme = 'dynamic', calibration: str | os.PathLike[str] | None = None, calibrate: bool = False, smooth: float | None = None, awq: bool = False, gptq: bool = False, tune: bool = False, kv_cache: CacheScheme = 'auto', group_size: GroupSize | None = None, asymmetric: bool = False, no_search: bool = False, ignore: str | Sequence[str] = (), scheme_for: Mapping[str, SchemeName] | Sequence[tuple[str, SchemeName]] | None = None, tp: int | None = None, quantize_lm_head: bool = False, quantize_embeddings: bool = False, architecture: str | None = None, text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), dataset: str | None = None, samples: int = 128, length: int = 512, fit: str | None = None, context: int | str = 8192, engines: str = 'both', candidates: str | Sequence[str] = (), ranks: Ranks | None = None, reporter: Reporter | None = None) -> Result: ...
def dequantize(model: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, revision: str | None = None, stream: bool = False, workers: int | None = None, max_memory: int | str | None = None, dry_run: bool = False, overwrite: bool = False, copy: str | Sequence[str] = (), push: Push | str | None = None, ranks: Ranks | None = None, reporter: Reporter | None = None) -> Result: ...
def diagnose(model: str | os.PathLike[str], scheme: SchemeName = 'tensor', *, revision: str | None = None, stream: bool = False, workers: int | None = None, scratch: str | os.PathLike[str] | None = None, ignore: str | Sequence[str] = (), full: bool = False, architecture: str | None = None, reporter: Reporter | None = None) -> Diagnosis: ...
def evaluate(outputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], source: str | os.PathLike[str], *, stream: bool = False, device: str = 'cpu', max_memory: int | str | None = None, scratch: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None, prompts: str | os.PathLike[str] | None = None, no_prompts: bool = False, kv_cache: CacheScheme = 'auto', tasks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), limit: int | None = None, seed: int = 0, fail_above: float | None = None, text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), dataset: str | None = None, samples: int = 16, length: int = 512, ranks: Ranks | None = None, reporter: Reporter | None = None) -> Evaluation: ...
def explain(model: str | os.PathLike[str], layer: str, scheme: SchemeName = 'tensor', *, revision: str | None = None, format: FormatName | None = None, scale_format: ScaleFormat | None = None, activation_scheme: ActivationScheme = 'dynamic', calibration: str | os.PathLike[str] | None = None, calibrate: bool = False, smooth: float | None = None, awq: bool = False, gptq: bool = False, tune: bool = False, kv_cache: CacheScheme = 'auto', group_size: GroupSize | None = None, asymmetric: bool = False, no_search: bool = False, ignore: str | Sequence[str] = (), scheme_for: Mapping[str, SchemeName] | Sequence[tuple[str, SchemeName]] | None = None, tp: int | None = None, quantize_lm_head: bool = False, quantize_embeddings: bool = False, architecture: str | None = None, text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), dataset: str | None = None, samples: int = 128, length: int = 512) -> Explanation: ...
def fit_table(model: str | os.PathLike[str], gpu: str | None = None, *, revision: str | None = None, context: int | str = 8192, engines: str | None = None, kv_cache: CacheScheme = 'auto', ignore: str | Sequence[str] = (), quantize_lm_head: bool = False, quantize_embeddings: bool = False, architecture: str | None = None) -> FitTable: ...
def search_mixtures(model: str | os.PathLike[str], gpu: str | None = None, *, revision: str | None = None, context: int | str = 8192, engines: str | None = None, kv_cache: CacheScheme = 'auto', ignore: str | Sequence[str] = (), quantize_lm_head: bool = False, quantize_embeddings: bool = False, architecture: str | None = None, stream: bool = False, device: str = 'cpu', max_memory: int | str | None = None, candidates: str | Sequence[str] = (), text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (), dataset: str | None = None, reporter: Reporter | None = None) -> SearchResult: ...
def verify(directory: str | os.PathLike[str], source: str | os.PathLike[str] | None = None, full: bool = False, *, workers: int | None = None, architecture: str | None = None, reporter: Reporter | None = None) -> Report: ...
