"""Finds unexpected files in a quantized directory, and says whether they change what engines serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from fnmatch import fnmatchcase

from ..files.checkpoint import Checkpoint
from ..files.model_files import EVALUATION_FILES, INDEX_FILE, JOURNAL_FILE, SINGLE_FILE

# Files that other verbs of openquant write into a directory.
_OURS = (JOURNAL_FILE, INDEX_FILE, *EVALUATION_FILES)

# Files that engines read beside config.json and the weights.
_SERVED = (
    "chat_template*", "additional_chat_templates/*", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "*.model", "*.tiktoken", "tekken.json", "generation_config.json",
    "*processor_config.json", "params.json", "adapter_*", "hf_quant_config.json", "modules.json", "*.py",
)  # fmt: skip
# transformers loads it with the model (models/auto/auto_factory.py:290-320).
_ADAPTER = "adapter_config.json"
# modelopt's quantization config (vLLM transformers_utils/config.py:888-899).
_MODELOPT_CONFIG = "hf_quant_config.json"


def extra_weights(checkpoint: Checkpoint) -> Iterator[str]:
    """Find weight files that are no shards of the checkpoint, but that engines load or may load.

    Args:
        checkpoint: the opened directory.

    Yields:
        One line for each file, for `verify` to report.
    """
    for name in checkpoint.unindexed:
        yield f"{name} holds weights that {INDEX_FILE} does not name"
    for name in checkpoint.left_out:
        if "/" in name or not name.endswith(".safetensors"):
            continue
        if name.startswith("consolidated"):
            # vLLM model_executor/model_loader/default_loader.py:168-184.
            yield f"{name} is there too: vLLM loads it instead of {min(checkpoint.shards)}"
        elif not checkpoint.indexed:
            yield f"{name} lies beside {SINGLE_FILE}, and there is no index: engines load both"
        else:
            yield f"{name} holds weights that {INDEX_FILE} does not name"


def extra_files(
    checkpoint: Checkpoint, expected: Set[str] | None, where: str, strict: bool
) -> tuple[list[str], list[str]]:
    """Find unexpected files other than weights.

    Args:
        checkpoint: the opened directory.
        expected: paths, relative to the directory, of the files that may be there; None if not known, and then only an
            adapter and a second quantization config are unexpected.
        where: why other files are unexpected, such as "not in the source".
        strict: whether every file that engines read is a problem; if not, only an adapter is.

    Returns:
        Problems, one line for each file that changes what is served. Notes, one line for all other files, or none.
    """
    others_left_out = (
        name for name in checkpoint.left_out if not name.startswith(".") and not name.endswith(".safetensors")
    )
    # The Hub puts .gitattributes into every repository.
    files = (name for name in checkpoint.files if name != ".gitattributes")
    names = [*files, *(name for name in others_left_out if name not in _OURS)]
    allowed = {*names} - {_ADAPTER, _MODELOPT_CONFIG} if expected is None else expected
    problems: list[str] = []
    others: list[str] = []
    for name in names:
        if name in allowed:
            continue
        if name == _ADAPTER:
            problems.append(f"{name} is there: transformers loads the adapter with the model")
        elif strict and _matches(name, _SERVED):
            problems.append(f"{name} changes what is served, and is {where}")
        elif name == _MODELOPT_CONFIG:
            others.append(f"{name} (engines read it only where config.json says nothing of quantization)")
        else:
            others.append(name)
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return problems, [f"{where}: {', '.join(others[:5])}{more}"] if others else []


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
