"""All checks that read no tensor: those of headers in order, those of files, and those at the end of a run.

headers, findings = check_headers(checkpoint, quantization, MODELS["Qwen3ForCausalLM"], files, ours=True)
findings.problems                            # [] if nothing is wrong
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import OutputError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, open_checkpoint, readable
from ..files.model_files import EVALUATION_FILES, INDEX_FILE, JOURNAL_FILE, SINGLE_FILE, is_shard
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..models import GENERIC
from ..plan.architecture import known_architecture, with_layer_counts
from ..plan.plan import Plan, output_config
from ..registry.architecture import Architecture, ModuleRules, is_embedding, is_head
from ..weights.find import pairs
from .configs import check_files, check_index, check_settings, config_differences
from .headers import Findings, Headers, check_fused, check_head, check_listed, check_unlisted
from .weight_checks import check_cache, check_strays, find_decodable_weights, find_weights


def check_headers(
    checkpoint: Checkpoint, quantization: Quantization, model: Architecture | None, files: Iterable[str], ours: bool
) -> tuple[Headers, Findings]:
    """Check the config and the headers of a quantized directory against each other and against the registry.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        model: the registry's entry for its architecture; None if it has none.
        files: paths, relative to the directory, of the files that the run wrote; empty if not known.
        ours: whether openquant made the directory, so that everything must be as openquant writes it.

    Returns:
        The directory as its headers describe it, with its quantized weights; and the problems and notes, one line each.

    Raises:
        SourceError: the index cannot be read.
        UsageError: matching names with regular expressions of the config takes too long.
    """
    findings = Findings(ours, list(quantization.problems))
    scheme = check_settings(checkpoint, quantization, findings)
    codes_and_scales = list(pairs(checkpoint.tensors, quantization))

    # With any method but fp8, a quantized head or embedding is one more quantized layer.
    head = quantization.method != "fp8" and any(is_head(pair.module) for pair in codes_and_scales)
    embedding = quantization.method != "fp8" and any(is_embedding(pair.module) for pair in codes_and_scales)
    if model and head and model.head_refused is None:
        model = model.with_head()
    if model and embedding and model.embedding is not None:
        model = model.with_embedding()

    entry = ModuleRules(with_layer_counts(model, checkpoint)) if model else None

    as_loaded = quantization.checked_as_engines_load
    find = find_weights if as_loaded else find_decodable_weights
    weights = find(checkpoint, quantization, codes_and_scales, findings)
    headers = Headers(checkpoint, quantization, scheme, entry, head, embedding, *weights)

    if as_loaded:
        check_strays(headers, findings)
        check_listed(headers, findings)
    check_cache(headers, findings)

    if entry is None:
        of_list = "which unquantized layers must be in the ignore list, and " if as_loaded else ""
        findings.notes.append(
            f"{checkpoint.architecture} is not a known architecture: it was not checked {of_list}which layers are fused"
        )
    else:
        if as_loaded:
            check_unlisted(headers, entry, findings)
        # A weight that cannot be decoded would count as unquantized.
        if as_loaded or not findings.problems:
            check_fused(headers, entry, findings)

    if as_loaded:
        check_head(headers, findings)

    check_index(checkpoint, findings)
    check_files(checkpoint, files, findings)

    return headers, findings


def check_finished(root: Path, plan: Plan) -> None:
    """Reopen the output of a plan, and check headers, index and config. This is the last step of a run.

    Scales and codes were checked as each shard was finished (convert/conversion.py).

    Args:
        root: the output directory.
        plan: the plan that was carried out.

    Raises:
        RuntimeError: the output is not what was planned, or engines would refuse it. That is a bug of openquant.
        SourceError: the output cannot be opened.
    """
    checkpoint = open_checkpoint(root)
    problems = []
    planned_count = 0

    for shard in plan.layout.shards:
        for info in plan.layout.outputs(shard.name):
            planned_count += 1
            if checkpoint.tensors.get(info.name) != info or checkpoint.where[info.name].shard != shard.name:
                problems.append(f"{info.name} is not what was planned")

    if len(checkpoint.tensors) != planned_count:
        problems.append(f"it holds {len(checkpoint.tensors)} tensors, {planned_count} were planned")

    for difference in config_differences(checkpoint.config, output_config(plan)):
        problems.append(f"config.json: {difference.text('the plan has')}")

    if plan.quantization_config and not problems:
        # The generic entry says nothing of engines.
        model = None if plan.model.name == GENERIC.name else plan.model
        _, findings = check_headers(checkpoint, read_quantization(checkpoint.config), model, plan.files, ours=True)
        problems = findings.problems

    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise RuntimeError(f"{root} was written wrongly: {'; '.join(problems[:3])}{more}")


def require_sound(root: Path, files: Set[str]) -> None:
    """Check a finished directory without its plan: headers, sizes, index and config.

    Args:
        root: the directory, quantized or not.
        files: paths, relative to the directory, of all files that the run wrote. The shards among them must be those
            that the directory has, by its index. In a quantized directory all of them must exist.

    Raises:
        OutputError: the directory is damaged, or cannot be read.
    """
    try:
        with readable():
            problems = _find_damage(open_checkpoint(root), files)
    except (SourceError, UsageError) as error:
        problems = [error.message]
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise OutputError(
            f"{root} is damaged: {problems[0]}{more}",
            "run the command that made it again with --overwrite, or copy it again from where it is whole",
        )


def _find_damage(checkpoint: Checkpoint, files: Set[str]) -> list[str]:
    """One line for each problem that shows without reading tensors."""
    if quantization_places(checkpoint.config):
        model = known_architecture(checkpoint)
        _, findings = check_headers(checkpoint, read_quantization(checkpoint.config), model, files, ours=True)
        problems = findings.problems

    else:
        problems = [
            f"{checkpoint.where[info.name].shard}: {info.name} is {info.dtype}, but config.json has no "
            "quantization_config"
            for info in checkpoint.tensors.values()
            if info.dtype.startswith("F8_")
        ]

    shards = {name for name in files if is_shard(name)}
    problems += [f"{name} holds tensors, and no run wrote it" for name in sorted(checkpoint.shards.keys() - shards)]
    problems += [
        f"{INDEX_FILE} does not name {name}" for name in sorted(shards - {*checkpoint.shards} | {*checkpoint.unindexed})
    ]

    return problems


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
            yield f"{checkpoint.with_cost(name)} holds weights that {INDEX_FILE} does not name"


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
