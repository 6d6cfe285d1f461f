"""All checks that read no tensor: headers in order, config.json and the index, files, and those at the end of a run.

headers, findings = check_headers(checkpoint, quantization, MODELS["Qwen3ForCausalLM"], files, ours=True)
findings.problems                            # [] if nothing is wrong
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OutputError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, open_checkpoint, readable
from ..files.model_files import EVALUATION_FILES, INDEX_FILE, JOURNAL_FILE, SINGLE_FILE, is_shard
from ..formats.numbers import DENSE, with_fp8_cache, without_fp8_cache
from ..formats.quantization import Quantization, quantization_places, read_quantization, setting_repr
from ..formats.schemes import Scheme, as_written, without_targets
from ..models import GENERIC
from ..patterns import list_first
from ..plan.architecture import known_architecture, with_layer_counts
from ..plan.plan import Plan, output_config
from ..registry.architecture import EMBEDDING, HEAD, Architecture, ModuleRules, is_embedding, is_head
from ..weights.find import MODELOPT_FILE, pairs
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
    """
    findings = Findings(ours)
    scheme = check_settings(checkpoint, quantization, findings)
    codes_and_scales = list(pairs(checkpoint.tensors, quantization))

    # With any method but fp8, a quantized head or embedding is one more quantized layer.
    head = quantization.method != "fp8" and any(is_head(pair.module) for pair in codes_and_scales)
    embedding = quantization.method != "fp8" and any(is_embedding(pair.module) for pair in codes_and_scales)
    if model and head and model.head_refused is None:
        model = model.with_quantized(HEAD)
    if model and embedding and model.embedding is not None:
        model = model.with_quantized(EMBEDDING)

    entry = None
    if model:
        entry = ModuleRules(with_layer_counts(model, checkpoint))

    as_loaded = quantization.checked_as_engines_load
    find = find_weights if as_loaded else find_decodable_weights
    weights = find(checkpoint, quantization, codes_and_scales, findings)
    headers = Headers(checkpoint, quantization, scheme, entry, head, embedding, *weights)

    if as_loaded:
        check_strays(headers, findings)
        check_listed(headers, findings)
    check_cache(headers, findings)

    if entry is None:
        of_list = ""
        if as_loaded:
            of_list = "which unquantized layers must be in the ignore list, "
        findings.notes.append(
            f"{checkpoint.architecture} is not a known architecture: it was not checked {of_list}which layers are "
            "fused, and whether any is missing"
        )
    else:
        if as_loaded:
            check_unlisted(headers, entry, findings)
        # A weight that cannot be decoded would count as unquantized.
        if as_loaded or not findings.problems:
            check_fused(headers, entry, findings)

    if as_loaded:
        check_head(headers, findings)

    for name in sorted(files):
        if not (checkpoint.root / name).is_file():
            findings.problems.append(f"{name} is missing: the run that made this directory wrote it")

    return headers, findings


def check_finished(root: Path, plan: Plan) -> None:
    """Reopen the output of a plan, and check headers and config. This is the last step of a run. No codes are read.

    Args:
        root: the output directory.
        plan: the plan that was carried out.

    Raises:
        OutputError: engines would refuse the output: a bug of openquant, or a resumed run's files were changed.
        SourceError: the output cannot be opened.
    """
    checkpoint = open_checkpoint(root)
    differences = config_differences(checkpoint.config, output_config(plan))
    problems = [f"config.json: {difference.text('the plan has')}" for difference in differences]

    if plan.quantization_config and not problems:
        # The generic entry says nothing of engines.
        model = None if plan.model.name == GENERIC.name else plan.model
        _, findings = check_headers(checkpoint, read_quantization(checkpoint.config), model, plan.files, ours=True)
        problems = findings.problems

    if problems:
        raise OutputError(
            f"{root} was written wrongly: {_join_first(problems, 3)}",
            "replace it with --overwrite; if that changes nothing, it is a bug of openquant",
        )


def _join_first(problems: Sequence[str], most: int) -> str:
    """Join the first problems, and say how many more there are."""
    joined = "; ".join(problems[:most])
    if len(problems) > most:
        joined += f"; and {len(problems) - most} more"
    return joined


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
        raise OutputError(
            f"{root} is damaged: {_join_first(problems, 1)}",
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

# transformers loads it with the model (models/auto/auto_factory.py:290-320).
_ADAPTER = "adapter_config.json"


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


def extra_files(checkpoint: Checkpoint, expected: Set[str] | None, where: str) -> tuple[list[str], list[str]]:
    """Find unexpected files other than weights.

    Args:
        checkpoint: the opened directory.
        expected: paths, relative to the directory, of the files that may be there; None if not known, and then only an
            adapter and a second quantization config are unexpected.
        where: why other files are unexpected, such as "not in the source".

    Returns:
        Problems, one line for an adapter. Notes, one line for all other files, or none.
    """
    others_left_out = (
        name for name in checkpoint.left_out if not name.startswith(".") and not name.endswith(".safetensors")
    )

    # The Hub puts .gitattributes into every repository.
    files = (name for name in checkpoint.files if name != ".gitattributes")
    names = [*files, *(name for name in others_left_out if name not in _OURS)]
    allowed = expected
    if allowed is None:
        allowed = {*names} - {_ADAPTER, MODELOPT_FILE}

    problems: list[str] = []
    others: list[str] = []

    for name in names:
        if name in allowed:
            continue
        if name == _ADAPTER:
            problems.append(f"{name} is there: transformers loads the adapter with the model")
        elif name == MODELOPT_FILE:
            others.append(f"{name} (engines read it only where config.json says nothing of quantization)")
        else:
            others.append(name)

    if not others:
        return problems, []
    return problems, [f"{where}: {list_first(others, 5)}"]


# Keys of a config that say nothing of what the model computes.
_NOT_COMPUTED = re.compile(
    "dropout|drop$|init|cache|loss|coef|jitter|version|^_|revision|implementation|label|checkpoint|problem_type|"
    # Settings of generation, which generation_config.json also has.
    "^(bos|eos|pad|sep|decoder_start|forced_bos|forced_eos)_token_id$|^num_(beam|return)|^top_[kp]$|^output_|penalty|"
    "^(encoder_)?no_repeat|suppress_tokens|^tokenizer_class$|^task_specific_params$|^chunk_size_feed_forward$"
)


class MissingValue:
    """Marks a key that one of two configs lacks. Used as the class itself."""


class Difference(NamedTuple):
    """A key whose value differs between two configs.

    Attributes:
        path: the keys that lead to it, from the top of config.json.
        actual: the value in the first config; MissingValue if it has none.
        expected: the value in the second config; MissingValue if it has none.
    """

    path: tuple[str, ...]
    actual: Any
    expected: Any

    def text(self, other: str) -> str:
        """Format for a message: "hidden_size is 257, the source has 256" if `other` is "the source has"."""
        path = ".".join(self.path)
        if self.actual is MissingValue:
            return f"{path} is missing, {other} {setting_repr(self.expected)}"
        expected = "none"
        if self.expected is not MissingValue:
            expected = setting_repr(self.expected)
        return f"{path} is {setting_repr(self.actual)}, {other} {expected}"


def config_differences(actual: Any, expected: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Find where two JSON values differ.

    Args:
        actual: the first value.
        expected: the second value.
        path: the keys that lead to both from the top of the file.

    Yields:
        A path of keys with both values there, for each key whose values differ; MissingValue stands for a missing key.
        Objects are compared key by key, lists as a whole.
    """
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*expected, *actual]):
            left = actual.get(key, MissingValue)
            right = expected.get(key, MissingValue)
            if MissingValue in (left, right):
                yield Difference((*path, key), left, right)
            else:
                yield from config_differences(left, right, (*path, key))
    # Compared as text, because NaN != NaN, and 1 == True.
    elif json.dumps(actual, sort_keys=True) != json.dumps(expected, sort_keys=True):
        yield Difference(path, actual, expected)


def judge_config(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[Difference, bool]]:
    """Find where two configs differ as transformers reads them, and whether the model computes something else.

    Args:
        actual: config.json of the output, parsed.
        expected: config.json of the source, parsed.

    Yields:
        A difference (the path of keys, the output's value, the source's value), and whether it changes what the model
        computes. A key that only one of them has is none that the class of transformers knows.
    """
    actual_read = _as_read(actual)
    expected_read = _as_read(expected)
    if actual_read is None or expected_read is None:
        actual_read = dict(actual)
        expected_read = dict(expected)
    for difference in config_differences(actual_read, expected_read):
        is_in_both = MissingValue not in (difference.actual, difference.expected)
        yield difference, is_in_both and not _NOT_COMPUTED.search(difference.path[-1])


def _as_read(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config with all defaults, and in the spelling of the installed transformers; None for other architectures."""
    from transformers import CONFIG_MAPPING

    try:
        read: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    except Exception:
        return None
    return read


def missing_keys(config: Mapping[str, Any], required: Mapping[str, str]) -> list[str]:
    """Find keys that engines need beside the quantization_config, and that a config lacks or has wrong.

    Args:
        config: config.json, parsed.
        required: the values that config.json must have, by key at its top.

    Returns:
        One line for each missing or wrong key, for `verify` to report.
    """
    return [
        f"config.json: {key} is {setting_repr(config[key]) if key in config else 'missing'}, "
        f"but must be {setting_repr(value)}: engines read it"
        for key, value in required.items()
        if config.get(key) != value
    ]


def check_settings(checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> Scheme | None:
    """Check the quantization_config.

    In an output of openquant it must be what openquant writes.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        findings: says whether openquant made the directory; problems and notes, one line each, are added to it.

    Returns:
        The openquant scheme that the directory is stored in. If the settings are not what openquant writes for it: the
        nearest scheme for an output of openquant, None for others. None if there is none.
    """
    scheme = quantization.scheme
    places = quantization_places(checkpoint.config)
    if any(place[key] != places[0][0][places[0][1]] for place, key in places[1:]):
        findings.problems.append("config.json has several quantization configs, which differ")

    settings = quantization.settings
    if scheme is not None and as_written(scheme, settings):
        return scheme
    if scheme is None and {**settings, "ignore": []} == with_fp8_cache(DENSE):
        return scheme

    if not findings.ours:
        return None

    if scheme is None:
        findings.problems.append("config.json: openquant does not write such a quantization_config")
        return None

    actual = without_fp8_cache(without_targets(settings))
    expected = without_targets(scheme.config(None, {}))
    for difference in config_differences(actual, expected, ("quantization_config",)):
        findings.problems.append(f"config.json: {difference.text('openquant writes')}")
    return scheme
