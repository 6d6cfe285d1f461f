"""Read a quantization_config: how it says that weights and activations are stored, whichever tool wrote it.

It is read as engines read it:

    fp8                 vLLM layers/quantization/fp8.py:106-176, SGLang layers/quantization/fp8.py:340-380,
                        transformers FineGrainedFP8Config
    compressed-tensors  vLLM layers/quantization/compressed_tensors/compressed_tensors.py:581-616 and 783-950, and the
                        package's own quantization/quant_args.py and quant_config.py
    modelopt            vLLM layers/quantization/modelopt.py:319-430
    mxfp4               transformers integrations/mxfp4.py
    bitsandbytes        the layouts of 4 or 8 bits
    torchao             names the class of its own config; X._weight_qdata and X._weight_scale stand for X.weight
                        (torchao/prototype/safetensors/, Float8Tensor)

    read_bitsandbytes({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}).number.title   # "NF4"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

from ..errors import UsageError
from ..patterns import MEND, Expressions, Ignored, IgnoredParts, join_words, language_model_names
from .awq_gptq import Groups, read_auto_round_groups, read_awq, read_gptq_groups, read_quark
from .format import INPUT_SCALE, ActivationQuantization, Format, GlobalScale, Group, Scale, read_activation_quantization
from .numbers import BITSANDBYTES, INT8
from .schemes import (
    ASYMMETRIC,
    BLOCK,
    BLOCK_COMPRESSED,
    CHANNEL,
    INT8_W8A8,
    INT8_W8A16,
    INTEGER_GROUPS,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_W4A4,
    STATIC,
    TENSOR,
    TENSOR_COMPRESSED,
    VARIANTS,
    ZERO_POINT,
    Scheme,
)

# What shares a scale in the MX formats (OCP Microscaling Formats 1.0, 5.2).
MX_GROUP = 32
# The largest side of a block that is read; common layers have no more rows or columns.
MAX_SIDE = 1 << 16
# Keys of FP8 activations in compressed-tensors.
_FP8 = {"type": "float", "num_bits": 8}
# Methods whose codes are stored transposed.
IN_COLUMNS = ("awq", "gptq", "auto-round")
UNQUANTIZED = "start from the unquantized model"
# The format of a group of layers, and its `input_activations`.
_Group = tuple[Format | None, Mapping[str, Any] | None]
_NO_GROUP: _Group = (None, None)
IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore")


@dataclass(frozen=True)
class Quantization:
    """A quantization_config that was read.

    Attributes:
        method: the quant_method.
        groups: targets and format of each group of layers; empty if the config only asks for an FP8 KV cache.
        inputs: for each group, how activations are quantized, as `input_activations` of compressed-tensors; None if
            they are not.
        expressions: the regular expressions among the targets.
        ignored: the ignore list; empty for methods of which the tensors show what is quantized.
        settings: the whole config, with None in place of each ignore list.
        by_parent: whether a target also names all modules below it, unless a longer target does.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Format], ...]
    inputs: tuple[Mapping[str, Any] | None, ...]
    expressions: Expressions
    ignored: Ignored
    settings: dict[str, Any]
    by_parent: bool = False

    @property
    def title(self) -> str:
        """What shares a scale in each group: "one scale per channel and one scale per 128x128 block"."""
        return " and ".join(dict.fromkeys(fmt.label for _, fmt in self.groups)) or "weights as they are"

    @property
    def description(self) -> str:
        """Numbers, what shares a scale, and the name of our scheme: "FP8 with one scale per tensor (tensor)"."""
        kinds = dict.fromkeys(f"{fmt.number.title} with {fmt.label}" for _, fmt in self.groups)
        text = " and ".join(kinds) or self.title
        if len(kinds) == 1 and self.scheme is not None:
            text += f" ({self.scheme.name})"
        return text

    @property
    def checked_as_engines_load(self) -> bool:
        """Whether `verify` checks names, dtypes, settings and ignore list as engines load them; else only whether the
        weights can be decoded.
        """
        return self.method in ("fp8", "compressed-tensors", *IN_COLUMNS)

    @property
    def scheme(self) -> Scheme | None:
        """Our scheme that equals the first group, which has all layers that others do not name; None without one."""
        fmt = self.groups[0][1] if self.groups else None
        return next(
            (
                scheme
                for scheme in (*VARIANTS, *ASYMMETRIC, *STATIC)
                if (scheme.method, scheme.format) == (self.method, fmt)
            ),
            None,
        )

    def format_of(self, module: str) -> Format | None:
        """Return the format of a quantized module; None if it is no group's target, whatever the ignore list says."""
        return self._group_of(module)[0]

    def inputs_of(self, module: str) -> ActivationQuantization | None:
        """Return how the activations of a quantized module are quantized; None if they are not."""
        return read_activation_quantization(self._group_of(module)[1])

    def names(self, module: str) -> Format | None:
        """Return the format of the group that names a module; None if groups only name its class, or nothing of it."""
        return (self._naming_group(module) or _NO_GROUP)[0]

    def _group_of(self, module: str) -> _Group:
        """Return a module's format and activations, by the group that names the module or its class."""
        return self._naming_group(module) or self._group_by_target.get("Linear", _NO_GROUP)

    def _naming_group(self, module: str) -> _Group | None:
        group = self._group_by_target.get(module)
        while group is None and self.by_parent and module:
            module = module.rpartition(".")[0]
            group = self._group_by_target.get(module)
        return group or self._group_by_target.get(self.expressions.find(module) or "")

    @cached_property
    def _group_by_target(self) -> dict[str, _Group]:
        # If several groups have a target, the first one counts.
        groups = reversed([*zip(self.groups, self.inputs, strict=True)])
        return {target: (fmt, inputs) for (targets, fmt), inputs in groups for target in targets}


def read_quantization(config: dict[str, Any]) -> Quantization:
    """Read the quantization_config of a config.json.

    Args:
        config: the parsed config.json.

    Returns:
        Targets and format of each group of layers, the ignore list, all other settings, and problems with them.

    Raises:
        UsageError: it has none, or one that openquant does not know or that is malformed.
    """
    settings = find_quantization(config)
    if settings is None and quantization_places(config):
        raise UsageError("config.json has a quantization_config that is no JSON object", MEND)
    if settings is None:
        raise UsageError("config.json has no quantization_config", "give a directory of quantized weights")

    method = str(settings.get("quant_method"))
    if method not in _READERS:
        raise UsageError(
            f"config.json has the quant_method {json.dumps(settings.get('quant_method'))}",
            f"known are {join_words(list(_READERS), 'and')}",
        )

    return _READERS[method](method, settings)


def find_quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return a copy of the quantization_config of a config.json, under any key where engines find it.

    Args:
        config: the parsed config.json.

    Returns:
        The first that is a JSON object; None if there is none.
    """
    for place, key in quantization_places(config):
        if isinstance(place[key], dict):
            return dict(place[key])
    return None


def quantization_places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Find where a config.json has a quantization_config.

    Args:
        config: the parsed config.json.

    Returns:
        Pairs of a dictionary, `config` itself or its "text_config", and the key in it under which the settings lie:
        "quantization_config" or "compression_config". The value there is not null, but need not be an object.
    """
    return [
        (place, key)
        for place in (config, _inner(config, "text_config"))
        for key in ("quantization_config", "compression_config")
        if place.get(key) is not None
    ]


def _read_fp8(method: str, settings: dict[str, Any]) -> Quantization:
    fmt = TENSOR.format
    inputs: dict[str, Any] = {**_FP8, "strategy": "tensor"}
    size = settings.get("weight_block_size")
    if size is not None:
        if not _is_block(size):
            raise UsageError(
                f"config.json has the weight_block_size {json.dumps(size)}",
                f"it must be two numbers from 1 to {MAX_SIDE}",
            )
        # vLLM takes groups as wide as a block has rows, and with CUTLASS one scale for each token instead of one for
        # all (layers/quantization/fp8.py:262-282), which is the finer.
        fmt = replace(BLOCK.format, group=(size[0], size[1]))
        inputs = {**_FP8, "strategy": "group", "group_size": size[0]}

    scale = replace(fmt.scale, power_of_two=settings.get("scale_fmt") == "ue8m0")
    fmt = replace(fmt, scale=scale, static=settings.get("activation_scheme") == "static")

    lists = {key: _names(settings, key) for key in IGNORE_KEYS[:2]}
    # vLLM falls back to the second where the first is missing or empty.
    key = next((key for key in lists if lists[key]), IGNORE_KEYS[0])

    ignored = Ignored(key, lists[key], by_experts=True)

    inputs |= {"dynamic": not fmt.static, "ue8m0": scale.power_of_two}

    return replace(_alone(method, settings, fmt, inputs), ignored=ignored)


def _read_compressed_tensors(method: str, settings: dict[str, Any]) -> Quantization:
    rotated = settings.get("transform_config")
    sparse = settings.get("sparsity_config")

    if rotated and (not isinstance(rotated, dict) or rotated.get("config_groups")):
        raise UsageError("config.json has a transform_config: the weights are stored rotated", _KNOWN_GROUPS)
    if sparse and (not isinstance(sparse, dict) or sparse.get("format") not in (None, "dense")):
        raise UsageError("config.json has a sparsity_config: zeros are not stored", _KNOWN_GROUPS)

    groups = []
    inputs = []

    for name, group in _inner(settings, "config_groups").items():
        parts = []
        if isinstance(group, dict):
            parts = [group.get(key) or {} for key in ("weights", "input_activations")]
        if not parts or not all(isinstance(part, dict) for part in parts):
            raise UsageError(f"config.json: {name} is not a config group", MEND)
        weights, activations = parts

        stored = group.get("format") or settings.get("format")
        groups.append((tuple(_names(group, "targets")), _read_group(name, weights, stored, activations)))
        inputs.append(activations or None)

    if not groups and (settings.get("config_groups") or not settings.get("kv_cache_scheme")):
        raise UsageError("config.json has no config_groups", _KNOWN_GROUPS)

    ignored = Ignored("ignore", _names(settings, "ignore"), by_experts=False)
    return replace(_make_mixed(method, settings, groups, inputs), ignored=ignored)


_KNOWN_GROUPS = (
    "known are FP8 weights by tensor, channel or block, MXFP8, MXFP4, NVFP4, symmetric integers of 2 to 8 bits by "
    "tensor, channel or group, and asymmetric ones in words by channel or group"
)
# Formats of integers by type, bits and the config's format (None for any other); the group is replaced later.
_INTEGERS: tuple[tuple[tuple[object, ...], Format], ...] = (
    *((("int", bits, None), groups[0].format) for bits, groups in INTEGER_GROUPS.items()),
    (("int", 8, INT8_W8A16.settings["format"]), INT8_W8A16.format),
    (("int", 8, None), INT8_W8A8.format),
)


def _read_group(name: str, weights: dict[str, Any], stored: object, activations: dict[str, Any]) -> Format:
    """Return the format of a config group's weights; `stored` is its format in the config, such as "int-quantized"."""
    static = bool(activations) and not activations.get("dynamic")
    strategy = weights.get("strategy")
    kind = (weights.get("type"), weights.get("num_bits"))
    size = weights.get("group_size")
    in_bytes = str(weights.get("scale_dtype")).endswith("uint8")

    asymmetric = not weights.get("symmetric", True)

    if kind == ("float", 8) and strategy == "tensor" and not asymmetric:
        return replace(TENSOR_COMPRESSED.format, static=static)
    if kind == ("float", 8) and strategy == "channel" and not asymmetric:
        return replace(CHANNEL.format, static=static)

    if kind == ("float", 8) and strategy == "block" and not asymmetric:
        block = weights.get("block_structure")
        if not _is_block(block):
            raise UsageError(f"config.json: {name} has no block_structure of two numbers from 1 to {MAX_SIDE}", MEND)
        return replace(BLOCK_COMPRESSED.format, group=(block[0], block[1]), static=static)

    in_mx_groups = strategy == "group" and size == MX_GROUP and in_bytes
    if in_mx_groups and kind == ("float", 8):
        return replace(MXFP8.format, static=static)
    if in_mx_groups and kind == ("float", 4):
        return replace(MXFP4.format, static=static)
    if strategy == "tensor_group" and size == NVFP4.format.group[1] and kind == ("float", 4):
        if activations.get("dynamic") == "local":
            return NVFP4_W4A4.format
        return NVFP4.format

    forms = [fmt for key, fmt in _INTEGERS if key in ((*kind, stored), (*kind, None))]

    # Only packed formats have zero points.
    if forms and (not asymmetric or (forms[0].number.packed and strategy != "tensor")):
        # Groups must fill their words, since the packed tensor tells the length of rows.
        is_whole = isinstance(size, int) and 0 < size <= MAX_SIDE and size % forms[0].number.run == 0
        groups: dict[str, Group] = {"channel": (1, None), "tensor": (None, None)}
        if is_whole:
            groups["group"] = (1, size)
        if group := groups.get(str(strategy)):
            zero_point = ZERO_POINT if asymmetric else None
            return replace(forms[0], group=group, static=static, zero_point=zero_point)

    weights_kind = f"{kind[0]}{kind[1]} weights"
    if asymmetric:
        weights_kind = f"asymmetric {weights_kind}"
    raise UsageError(f"config.json: {name} stores {weights_kind} by {strategy}", _KNOWN_GROUPS)


# Its weight_scale_2 is the reciprocal of other tools' weight_global_scale (vLLM layers/quantization/modelopt.py).
_MODELOPT_FP4 = replace(NVFP4.format, codes="weight", global_scale=GlobalScale("weight_scale_2", 0, divides=False))
# Format of weights and quantization of activations by quant_algo (vLLM layers/quantization/modelopt.py).
_MODELOPT: dict[str, tuple[Format, Mapping[str, Any] | None]] = {
    "FP8": (replace(TENSOR.format, static=True), {**_FP8, "strategy": "tensor", "dynamic": False}),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL.format, CHANNEL.group["input_activations"]),
    "FP8_PB_WO": (BLOCK_COMPRESSED.format, BLOCK_COMPRESSED.group["input_activations"]),
    "MXFP8": (MXFP8.format, MXFP8.group["input_activations"]),
    "NVFP4": (
        replace(_MODELOPT_FP4, input_global_scale=GlobalScale(INPUT_SCALE, 0, divides=False)),
        NVFP4_W4A4.group["input_activations"],
    ),
    "W4A16_NVFP4": (_MODELOPT_FP4, None),
}
# Another name of FP8_PB_WO.
_BLOCK_SCALES = "FP8_BLOCK_SCALES"


_MIXED_PRECISION = "MIXED_PRECISION"


def _read_modelopt(method: str, settings: dict[str, Any]) -> Quantization:
    # hf_quant_config.json has one level more.
    if isinstance(settings.get("quantization"), dict):
        settings = settings["quantization"]
    if str(settings.get("quant_algo")).upper() == _MIXED_PRECISION:
        return _read_mixed_precision(method, settings)
    fmt, inputs = _modelopt_format(settings, "config.json has")
    return _alone(method, settings, fmt, inputs)


def _read_mixed_precision(method: str, settings: dict[str, Any]) -> Quantization:
    """Read a config that names the quant_algo of each layer, or of all below a module such as "..mlp.experts" (vLLM
    layers/quantization/modelopt.py:1543-1800).
    """
    layers = settings.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise UsageError(f"config.json has {_MIXED_PRECISION} and no quantized_layers", MEND)

    names: dict[Format, list[str]] = {}
    inputs: dict[Format, Mapping[str, Any] | None] = {}

    for name, layer in layers.items():
        if not isinstance(layer, dict):
            raise UsageError(f"config.json: quantized_layers.{name} is not a JSON object", MEND)
        fmt, activations = _modelopt_format(layer, f"config.json: quantized_layers.{name} has")
        inputs.setdefault(fmt, activations)

        # vLLM tries both names of a module.
        others = [other for other in language_model_names(name) if other not in layers]
        names.setdefault(fmt, []).extend([name, *others])

    groups = tuple((tuple(targets), fmt) for fmt, targets in names.items())
    mixed = _alone(method, settings, groups[0][1], None)
    return replace(mixed, groups=groups, inputs=tuple(inputs.values()), by_parent=True)


def _modelopt_format(settings: dict[str, Any], subject: str) -> tuple[Format, Mapping[str, Any] | None]:
    """Return the format of weights, and how activations are quantized, of a `quant_algo`; `subject` begins errors."""
    algorithm = str(settings.get("quant_algo", "")).upper()
    if algorithm == _BLOCK_SCALES:
        algorithm = "FP8_PB_WO"

    if algorithm not in _MODELOPT:
        raise UsageError(
            f"{subject} the quant_algo {json.dumps(settings.get('quant_algo'))}",
            f"known are {', '.join(_MODELOPT)} and {_MIXED_PRECISION}",
        )

    fmt, inputs = _MODELOPT[algorithm]
    size = settings.get("group_size", fmt.group[1])
    if algorithm == "FP8_PB_WO" and _is_block([size, size]):
        return replace(fmt, group=(size, size)), inputs

    if (algorithm == "FP8_PB_WO" or fmt.global_scale is not None) and size != fmt.group[1]:
        kind = algorithm
        known = f"a number from 1 to {MAX_SIDE}"
        if fmt.global_scale:
            kind = "NVFP4"
            known = "16"
        raise UsageError(f"{subject} {kind} with the group_size {json.dumps(size)}", f"known is {known}")

    return fmt, inputs


def _read_mxfp4(method: str, settings: dict[str, Any]) -> Quantization:
    scale = replace(MXFP4.format.scale, name="weight_scales")
    return _alone(method, settings, replace(MXFP4.format, scale=scale, codes="weight"), None)


def _read_mxfp8(method: str, settings: dict[str, Any]) -> Quantization:
    # As MiniMax M3 has it (vLLM layers/quantization/modelopt.py:1215, models/minimax_m3/nvidia/model.py:975).
    scale = replace(MXFP8.format.scale, name="weight_scale_inv")
    return _alone(method, settings, replace(MXFP8.format, scale=scale), MXFP8.group["input_activations"])


def _read_awq(method: str, settings: dict[str, Any]) -> Quantization:
    key = IGNORE_KEYS[1]
    return replace(_alone(method, settings, read_awq(settings), None), ignored=IgnoredParts(key, _names(settings, key)))


def _make_mixed(
    method: str, settings: dict[str, Any], groups: Groups, inputs: Sequence[Mapping[str, Any] | None] | None = None
) -> Quantization:
    """Return a config with a format for each group of layers; activations stay as they are if `inputs` is None."""
    inputs = inputs or [None] * len(groups)
    expressions = Expressions(target for targets, _ in groups for target in targets)
    # The tensors, not an ignore list, show what is quantized.
    ignored = Ignored("ignore", (), by_experts=False)
    return Quantization(method, tuple(groups), tuple(inputs), expressions, ignored, _without_lists(settings))


def _alone(method: str, settings: dict[str, Any], fmt: Format, inputs: Mapping[str, Any] | None) -> Quantization:
    """Return a config with one format for all layers."""
    return _make_mixed(method, settings, [(("Linear",), fmt)], [inputs])


_READERS: dict[str, Callable[[str, dict[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "modelopt_mxfp8": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "mxfp4": _read_mxfp4,
    "mxfp8": _read_mxfp8,
    "awq": _read_awq,
    "gptq": lambda method, settings: _make_mixed(method, settings, read_gptq_groups(settings)),
    "auto-round": lambda method, settings: _make_mixed(method, settings, read_auto_round_groups(settings)),
    # As the first versions of auto-round wrote it.
    "intel/auto-round": lambda _, settings: _make_mixed("auto-round", settings, read_auto_round_groups(settings)),
    "quark": lambda method, settings: _make_mixed(method, settings, *read_quark(settings)),
    "torchao": lambda method, settings: _alone(method, settings, *read_torchao(settings)),
    "bitsandbytes": lambda method, settings: _alone(method, settings, read_bitsandbytes(settings), None),
    # vLLM layers/quantization/fbgemm_fp8.py: activations by token, clipped above `activation_scale_ub` times 448.
    "fbgemm_fp8": lambda method, settings: _alone(method, settings, CHANNEL.format, CHANNEL.group["input_activations"]),
}


def _is_block(size: object) -> TypeGuard[list[int]]:
    return (
        isinstance(size, list) and len(size) == 2 and all(type(side) is int and 0 < side <= MAX_SIDE for side in size)
    )


def _names(settings: dict[str, Any], key: str) -> list[str]:
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"config.json: {key} is not a list of names", MEND)
    return names


def _without_lists(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, **{key: None for key in IGNORE_KEYS if key in settings}}


# bitsandbytes nn/modules.py:593 (4 bits) and :1095 (8 bits). The number of weights that share an absmax is in each
# layer's quant_state; this is what transformers always takes.
_BLOCK = 64
_ABSMAX = Scale("weight.absmax", axes=1, of_zeros=0.0)
_FOUR_BITS = {number.name: Format(number, (1, _BLOCK), _ABSMAX) for number in BITSANDBYTES}
# bitsandbytes backends/default/ops.py, int8_vectorwise_dequant: 127 stands for the largest weight of a row, its SCB.
_INT8 = Format(INT8, (1, None), Scale("SCB", axes=1, unit=1 / 127, of_zeros=0.0))


def read_bitsandbytes(config: dict[str, Any]) -> Format:
    """Return the format of the layers from a quantization_config of the method "bitsandbytes".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, tensor names, and what usually shares a scale.

    Raises:
        UsageError: openquant does not know this layout.
    """
    if (config.get("load_in_8bit") or config.get("_load_in_8bit")) is True:
        return _INT8
    if (config.get("load_in_4bit") or config.get("_load_in_4bit")) is not True:
        raise UsageError("config.json has bitsandbytes with neither load_in_4bit nor load_in_8bit", "set one of them")
    kind = config.get("bnb_4bit_quant_type", "fp4")
    storage = config.get("bnb_4bit_quant_storage")
    if storage not in (None, "uint8"):
        raise UsageError(f"config.json has the bnb_4bit_quant_storage {json.dumps(storage)[:100]}", "known is uint8")
    fmt = _FOUR_BITS.get(str(kind))
    if fmt is None:
        raise UsageError(f"config.json has the bnb_4bit_quant_type {json.dumps(kind)[:100]}", "known are nf4 and fp4")
    return fmt


QDATA = "_weight_qdata"
_ROWS = replace(CHANNEL.format, scale=Scale("_weight_scale"), codes=QDATA)
# By granularity, the format of weights and the strategy of activations.
_FORMATS = {"PerRow": (_ROWS, "token"), "PerTensor": (replace(_ROWS, group=(None, None)), "tensor")}
# By class, whether activations are quantized.
_CLASSES = {"Float8WeightOnlyConfig": False, "Float8DynamicActivationFloat8WeightConfig": True}
_KNOWN = f"known are {' and '.join(_CLASSES)} with float8_e4m3fn, by row or tensor"


def read_torchao(config: dict[str, Any]) -> tuple[Format, Mapping[str, Any] | None]:
    """Return the format of the layers from a quantization_config of the method "torchao".

    Args:
        config: the quantization_config of config.json.

    Returns:
        Numeric format, group and tensor names; and how activations are quantized, as `input_activations` of
        compressed-tensors.

    Raises:
        UsageError: openquant does not know this layout.
    """
    default = _inner(config.get("quant_type"), "default")
    kind = str(default.get("_type"))
    data = _inner(default, "_data")

    granularity = data.get("granularity")
    # One for activations and one for weights.
    parts = granularity if isinstance(granularity, list) else [granularity]
    names = {str(part.get("_type")) if isinstance(part, dict) else "" for part in parts}
    found = _FORMATS.get(names.pop()) if len(names) == 1 else None

    if kind not in _CLASSES:
        raise UsageError(f"config.json has torchao's {kind[:100]}", _KNOWN)
    if found is None or _inner(data, "weight_dtype").get("_data") != "float8_e4m3fn":
        raise UsageError(f"config.json has torchao's {kind} with {json.dumps(data)[:200]}", _KNOWN)

    fmt, strategy = found
    if not _CLASSES[kind]:
        return fmt, None
    return fmt, {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": True}


def _inner(value: Any, key: str) -> dict[str, Any]:
    """Return the object under a key; {} if there is none."""
    if not isinstance(value, dict) or not isinstance(value.get(key), dict):
        return {}
    return dict(value[key])


def setting_repr(value: Any) -> str:
    """Return `value`, anything that config.json may hold, as JSON for a message, shortened if it is long."""
    text = json.dumps(value)
    if len(text) > 200:
        return f"{text[:200]}..."
    return text
