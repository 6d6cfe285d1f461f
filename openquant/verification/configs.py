"""Checks config.json, the index and the list of files, and compares two config.json: what a difference changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..files.checkpoint import Checkpoint, read_json
from ..files.model_files import INDEX_FILE
from ..formats.numbers import DENSE, with_fp8_cache, without_fp8_cache
from ..formats.quantization import Quantization, check_config_values, quantization_places, setting_repr
from ..formats.schemes import KEPT_SCHEMES, Scheme, as_written, without_targets
from .headers import Findings

# A key changes what the model computes if its name matches _COMPUTED and not _NOT_COMPUTED.
_COMPUTED = re.compile(
    "size|dim|rank|head|layer|block|group|rope|rotary|theta|factor|norm|eps|act|vocab|token|embd|embed|dtype|bias|window|"
    "attn|attention|mlp|moe|expert|rout|top|gate|scal|multiplier|cap|clip|limit|position|tie|kv|qk|conv|ssm|mamba|state|"
    "kernel|step|stride|patch|image|channel|architectures|type|num|mask|alpha|beta|lambda|logit|^[nd]_"
)
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
    """Find where two configs differ, and judge by the keys whether the model computes something else.

    Args:
        actual: config.json of the output, parsed.
        expected: config.json of the source, parsed.

    Yields:
        A difference (the path of keys, the output's value, the source's value), and whether it changes what the model
        computes.
    """
    actual = _normalize(actual)
    expected = _normalize(expected)
    for difference in config_differences(actual, expected):
        actual_section = actual
        expected_section = expected
        for key in difference.path[:-1]:
            actual_section = actual_section[key]
            expected_section = expected_section[key]
        yield difference, _changes_model(difference, actual_section, expected_section)


def _changes_model(
    difference: Difference, actual_section: Mapping[str, Any], expected_section: Mapping[str, Any]
) -> bool:
    """Whether a difference of two normalized configs, in these sections, makes the model compute something else."""
    key = difference.path[-1]
    value = difference.actual

    rope = "rope_parameters" in difference.path
    if not rope and (_NOT_COMPUTED.search(key) or not _COMPUTED.search(key)):
        return False

    if value is MissingValue:
        # A tool may have renamed the key. Whether the head is tied shows in the tensors.
        added = [other for name, other in actual_section.items() if name not in expected_section]
        return difference.expected is not None and difference.expected not in added and key != _TIED

    if difference.expected is not MissingValue:
        return True

    # The output alone has the key: tools write out defaults, so only RoPE and sizes of heads count.
    heads = actual_section.get("num_attention_heads")
    size = actual_section.get("hidden_size")
    if key == "head_dim":
        return value is not None and not (isinstance(heads, int) and heads and size == value * heads)
    if key == "num_key_value_heads":
        return value is not None and value != heads

    return rope and value not in _PLAIN_ROPE and "vision_config" not in difference.path


_TIED = "tie_word_embeddings"
# Values of rope_parameters that mean ordinary RoPE.
_PLAIN_ROPE = (None, "default", 1.0, {"rope_type": "default"})


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the spelling of transformers 5, which has dtype and rope_parameters."""
    normalized = dict(config)
    for key, value in config.items():
        if isinstance(value, dict) and "rope" not in key:
            normalized[key] = _normalize(value)

    if "torch_dtype" in normalized:
        normalized.setdefault("dtype", normalized.pop("torch_dtype"))

    sections: list[Any] = [normalized.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    top_level: dict[str, Any] = {
        key: normalized[key] for key in ("rope_theta", "partial_rotary_factor") if key in normalized
    }

    if not all(isinstance(section, dict) for section in sections) or not (top_level or any(sections)):
        return normalized

    scaling, parameters = sections
    for key in ("rope_scaling", *top_level):
        normalized.pop(key, None)

    if not parameters or not all(isinstance(value, dict) for value in parameters.values()):
        parameters = _rope({**top_level, **scaling, **parameters})
        if isinstance(normalized.get("rope_local_base_freq"), (int, float)):
            sliding = _rope({"rope_theta": normalized.pop("rope_local_base_freq")})
            parameters = {"full_attention": parameters, "sliding_attention": sliding}

    by_layer_type = list(parameters.values())
    # Parameters for each type of layer that are all equal are the same as parameters for the model.
    if isinstance(by_layer_type[0], dict) and all(value == by_layer_type[0] for value in by_layer_type):
        parameters = by_layer_type[0]
    normalized["rope_parameters"] = parameters

    return normalized


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters in the spelling of transformers 5."""
    rope_type = parameters.pop("type", None)
    return {"rope_type": rope_type or "default", **parameters}


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


def without_quantization(config: dict[str, Any], keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return a config without its quantization_config and compression_config, which have checks of their own.

    Args:
        config: config.json, parsed; it is not changed.
        keys: other keys to leave out, at the top and in text_config.

    Returns:
        A new dictionary.
    """
    left_out = ("quantization_config", "compression_config", *keys)
    remaining = {key: value for key, value in config.items() if key not in left_out}
    if isinstance(remaining.get("text_config"), dict):
        remaining["text_config"] = {
            key: value for key, value in remaining["text_config"].items() if key not in left_out
        }
    return remaining


def check_settings(checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> Scheme | None:
    """Check the quantization_config.

    In an output of openquant it must be what openquant writes. In others, all settings must be ones that engines read.

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
        problems, unknown = check_config_values(settings)
        findings.problems += [f"config.json: quantization_config.{problem}" for problem in problems]
        if unknown:
            findings.notes.append(f"config.json: no engine is known to read quantization_config.{', '.join(unknown)}")
        return None

    if scheme is None:
        findings.problems.append("config.json: openquant does not write such a quantization_config")
    else:
        actual = without_fp8_cache(without_targets(settings))
        groups = scheme.group and actual.get("config_groups")
        if not isinstance(groups, dict):
            groups = {}
        # Each config group is compared with that of the scheme it is most like.
        nearest = [
            min((scheme, *KEPT_SCHEMES), key=lambda candidate: len(list(config_differences(group, candidate.group))))
            for group in groups.values()
        ]
        expected = without_targets(scheme.config(None, dict.fromkeys(nearest, ())))
        for difference in config_differences(actual, expected, ("quantization_config",)):
            findings.problems.append(f"config.json: {difference.text('openquant writes')}")
    return scheme


def check_index(checkpoint: Checkpoint, findings: Findings) -> None:
    """Check that the total_size in model.safetensors.index.json is the size of all tensors in bytes.

    Args:
        checkpoint: the opened directory.
        findings: a difference is added to its problems if openquant made the directory, else to its notes.

    Raises:
        SourceError: the index cannot be read.
    """
    if not checkpoint.indexed:
        return
    metadata = read_json(checkpoint.root / INDEX_FILE, INDEX_FILE).get("metadata")
    if not isinstance(metadata, dict):
        return
    stated = metadata.get("total_size")
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    if stated is not None and stated != total:
        findings.add_difference(f"{INDEX_FILE}: total_size is {stated}, the tensors take {total} bytes")


def check_files(checkpoint: Checkpoint, files: Iterable[str], findings: Findings) -> None:
    """Check that all files that the run wrote are there.

    Args:
        checkpoint: the opened directory.
        files: paths of the files, relative to the directory; empty if not known.
        findings: a line for each missing file is added to its problems.
    """
    for name in sorted(files):
        if not (checkpoint.root / name).is_file():
            findings.problems.append(f"{name} is missing: the run that made this directory wrote it")
