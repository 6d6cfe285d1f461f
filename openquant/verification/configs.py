"""Two config.json held against each other: where they differ, and whether that changes what is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..formats.settings import setting_repr

# What a key that is computed with has in its name, and what keys have that are not although they have that too.
_COMPUTED = re.compile(
    "size|dim|rank|head|layer|block|group|rope|rotary|theta|factor|norm|eps|act|vocab|token|embd|embed|dtype|bias|window|"
    "attn|attention|mlp|moe|expert|rout|top|gate|scal|multiplier|cap|clip|limit|position|tie|kv|qk|conv|ssm|mamba|state|"
    "kernel|step|stride|patch|image|channel|architectures|type|num|mask|alpha|beta|lambda|logit|^[nd]_"
)
_NOT_COMPUTED = re.compile(
    "dropout|drop$|init|cache|loss|coef|jitter|version|^_|revision|implementation|label|checkpoint|problem_type|"
    # Of generating: generation_config.json says it.
    "^(bos|eos|pad|sep|decoder_start|forced_bos|forced_eos)_token_id$|^num_(beam|return)|^top_[kp]$|^output_|penalty|"
    "^(encoder_)?no_repeat|suppress_tokens|^tokenizer_class$|^task_specific_params$|^chunk_size_feed_forward$"
)


class MissingValue:
    """What a config has at a place where it has nothing."""


class Difference(NamedTuple):
    """A place where two configs differ.

    Attributes:
        path: the keys that lead there.
        found: what one has there; Missing if nothing.
        wanted: what the other has there; Missing if nothing.
    """

    path: tuple[str, ...]
    found: Any
    wanted: Any

    def text(self, other: str) -> str:
        """The difference for a message: "hidden_size is 257, the source has 256", if `other` is "the source has"."""
        path = ".".join(self.path)
        if self.found is MissingValue:
            return f"{path} is missing, {other} {setting_repr(self.wanted)}"
        wanted = "none" if self.wanted is MissingValue else setting_repr(self.wanted)
        return f"{path} is {setting_repr(self.found)}, {other} {wanted}"


def config_differences(found: Any, wanted: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Where two values from JSON differ, by key."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in dict.fromkeys([*wanted, *found]):
            one, other = found.get(key, MissingValue), wanted.get(key, MissingValue)
            if MissingValue in (one, other):
                yield Difference((*path, key), one, other)
            else:
                yield from config_differences(one, other, (*path, key))
    # As text, since NaN is not equal to itself, and 1 is to True.
    elif json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True):
        yield Difference(path, found, wanted)


def judge_config(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[Difference, bool]]:
    """Where two configs differ, and whether a model with the one computes something else, as far as keys tell."""
    ours, theirs = _normalized(found), _normalized(wanted)
    for difference in config_differences(ours, theirs):
        beside, before = ours, theirs
        for key in difference.path[:-1]:
            beside, before = beside[key], before[key]
        yield difference, _changes_computing(difference, beside, before)


def _changes_computing(difference: Difference, beside: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether one difference makes a model compute something else.

    What a tool adds is what engines take for granted, which most tools write out, but for RoPE and the sizes of heads.

    Args:
        difference: of two configs with what has two spellings in one.
        beside: what the config with `found` has beside it.
        before: what the config with `wanted` has beside that.
    """
    key, value = difference.path[-1], difference.found
    rope = "rope_parameters" in difference.path
    if not rope and (_NOT_COMPUTED.search(key) or not _COMPUTED.search(key)):
        return False
    if value is MissingValue:
        # It may be there under another name; and whether there is an output head, the tensors tell.
        added = [held for name, held in beside.items() if name not in before]
        return difference.wanted is not None and difference.wanted not in added and key != _TIED
    if difference.wanted is not MissingValue:
        return True
    heads, size = beside.get("num_attention_heads"), beside.get("hidden_size")
    if key == "head_dim":
        return value is not None and not (isinstance(heads, int) and heads and size == value * heads)
    if key == "num_key_value_heads":
        return value is not None and value != heads
    return rope and value not in _PLAIN_ROPE and "vision_config" not in difference.path


_TIED = "tie_word_embeddings"
# What RoPE is where nothing is said.
_PLAIN_ROPE = (None, "default", 1.0, {"rope_type": "default"})


def _normalized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what has two spellings in one: transformers 5 writes dtype and rope_parameters."""
    found: dict[str, Any] = {
        key: _normalized(value) if isinstance(value, dict) and "rope" not in key else value
        for key, value in config.items()
    }
    if "torch_dtype" in found:
        found.setdefault("dtype", found.pop("torch_dtype"))
    parts: list[Any] = [found.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    moved: dict[str, Any] = {key: found[key] for key in ("rope_theta", "partial_rotary_factor") if key in found}
    if not all(isinstance(part, dict) for part in parts) or not (moved or any(parts)):
        return found
    scaling, parameters = parts
    for key in ("rope_scaling", *moved):
        found.pop(key, None)
    if not parameters or not all(isinstance(value, dict) for value in parameters.values()):
        parameters = _rope({**moved, **scaling, **parameters})
        if isinstance(found.get("rope_local_base_freq"), (int, float)):
            local = _rope({"rope_theta": found.pop("rope_local_base_freq")})
            parameters = {"full_attention": parameters, "sliding_attention": local}
    kinds = list(parameters.values())
    # One for each kind of layer, and all alike.
    alike = isinstance(kinds[0], dict) and all(kind == kinds[0] for kind in kinds)
    found["rope_parameters"] = kinds[0] if alike else parameters
    return found


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters of RoPE by their newer names."""
    kind = parameters.pop("type", None)
    return {"rope_type": kind or "default", **parameters}


def unsaid_keys(config: Mapping[str, Any], written: Mapping[str, str]) -> list[str]:
    """What a config must say of how its weights are quantized beside its quantization_config, and does not."""
    return [
        f"config.json: {key} is {setting_repr(config[key]) if key in config else 'missing'}, "
        f"but must be {setting_repr(value)}: engines read it"
        for key, value in written.items()
        if config.get(key) != value
    ]


def without_quantization(config: dict[str, Any], written: Iterable[str] = ()) -> dict[str, Any]:
    """A config without its quantization_config and what is written beside it, which are looked at by themselves."""
    hidden = ("quantization_config", "compression_config", *written)
    found = {key: value for key, value in config.items() if key not in hidden}
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = {key: value for key, value in found["text_config"].items() if key not in hidden}
    return found
