"""Files beside the weights of a directory that nobody expects there, and what they do to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from fnmatch import fnmatchcase

from ..files.checkpoint import Checkpoint
from ..files.names import EVALUATION_FILES, INDEX_FILE, JOURNAL_FILE, SINGLE_FILE

# What others of our verbs put there.
_OURS = (JOURNAL_FILE, INDEX_FILE, *EVALUATION_FILES)

# What engines read beside config.json and the weights, whatever wrote it.
_SERVED = (
    "chat_template*", "additional_chat_templates/*", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "*.model", "*.tiktoken", "tekken.json", "generation_config.json",
    "*processor_config.json", "params.json", "adapter_*", "hf_quant_config.json", "modules.json", "*.py",
)  # fmt: skip
# transformers loads it with the model (models/auto/auto_factory.py:290-320).
_ADAPTER = "adapter_config.json"
# vLLM transformers_utils/config.py:888-899.
_DESCRIPTION = "hf_quant_config.json"


def extra_weights(checkpoint: Checkpoint) -> Iterator[str]:
    """A line for each file of weights that engines load, or could take, beside those of the checkpoint."""
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
    """Problems, a line for each unexpected file that changes what is served; and notes, one line for all others.

    Args:
        checkpoint: the opened directory.
        expected: the names that may be there; None if that is not known.
        where: why others are not expected, such as "not in the source".
        strict: whether whatever engines read changes what is served, or only what they load with the weights.
    """
    hidden = (name for name in checkpoint.left_out if not name.startswith(".") and not name.endswith(".safetensors"))
    found = [*checkpoint.files, *(name for name in hidden if name not in _OURS)]
    known = {*found} - {_ADAPTER, _DESCRIPTION} if expected is None else expected
    problems: list[str] = []
    others: list[str] = []
    for name in found:
        if name in known:
            continue
        if name == _ADAPTER:
            problems.append(f"{name} is there: transformers loads the adapter with the model")
        elif strict and _matches(name, _SERVED):
            problems.append(f"{name} changes what is served, and is {where}")
        elif name == _DESCRIPTION:
            others.append(f"{name} (engines read it only where config.json says nothing of quantization)")
        else:
            others.append(name)
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return problems, [f"{where}: {', '.join(others[:5])}{more}"] if others else []


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
