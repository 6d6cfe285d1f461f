"""Finds the quantized weights of a checkpoint, whichever tool wrote it, and shows the checkpoint as if unquantized.

`decoded_view` gives a checkpoint in which every quantized weight is one BF16 tensor under the name it would have
unquantized, without its scales. The plan is made from that view; a Reader decodes the weights.

Layouts:
    FP8, int8  X.weight [out, in], X.weight_scale or X.weight_scale_inv (formats/ says which has what shape)
               stacks of experts X [experts, .., ..], X_scale_inv, X_scale or X_weight_scale, by expert or one for all
    int4, int8 X.weight_packed int32 [out, in / 8] or [out, in / 4], X.weight_scale, X.weight_shape: eight or four codes
               in a word, the first lowest, each 8 or 128 above its value (compressed-tensors,
               compressors/pack_quantized/helpers.py); asymmetric ones also X.weight_zero_point int32 [out / 8, groups]
    NVFP4      X.weight_packed uint8 [out, in / 2], X.weight_scale E4M3 [out, in / 16], divided by X.weight_global_scale
               (compressed-tensors); or X.weight and X.weight_scale, multiplied by X.weight_scale_2 (modelopt)
    DeepSeek V4  FP8 as above with scales X.scale; experts in MXFP4, which its config.json does not say: X.weight int8
               [out, in / 2], two codes in a byte, the first lowest, and X.scale E8M0 [out, in / 32]
    MiMo V2.5  q, k and v in FP8 as one tensor, stored per tensor-parallel rank (weight.py)
    AWQ, GPTQ, auto-round  X.qweight, X.qzeros, X.scales, X.g_idx (weight.py)
    torchao    FP8 as X._weight_qdata and X._weight_scale
    bitsandbytes  int8 X.weight with X.SCB, 127 times the scales of rows; 4 bits (weight.py)
    Quark      FP8, int8, MXFP4 and NVFP4 as above with the codes X.weight; int4 as AWQ (weight.py)
    MXFP4      X.weight_packed uint8 [out, in / 2], X.weight_scale (compressed-tensors), or X_blocks uint8
               [experts, out, in / 32, 16] and X_scales: two codes in a byte, the first lowest; unquantized these stacks
               are [experts, in, out] (transformers, integrations/mxfp4.py)

Every tensor of a GgufCheckpoint is a weight that a Reader decodes from blocks, vectors too. So it is read as any other
quantized checkpoint is, and `decoded_view` has nothing to find. The room gguf makes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PlanError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, read_json
from ..files.shardfile import TensorInfo
from ..formats.format import EXPONENTS, FLOATS, INPUT_SCALE, Format, grid_of
from ..formats.numbers import BITSANDBYTES, CODES, E2M1, E4M3
from ..formats.quantization import QDATA, UNQUANTIZED, Quantization, quantization_places, read_quantization
from ..formats.schemes import MXFP4
from ..models import find_entry
from ..patterns import template
from .weight import DAMAGED, Weight, find_part, four_bits, name_and_type, packed_columns, per_rank_projections

# modelopt's file beside config.json, from before config.json held the same (vLLM transformers_utils/config.py:888-899).
MODELOPT_FILE = "hf_quant_config.json"
# Files beside config.json in which tools say how they quantized, and the method where the file does not say it:
# modelopt, AutoGPTQ, AutoAWQ, auto-round (vLLM, get_config_filenames in layers/quantization/auto_gptq.py, auto_awq.py
# and inc/inc.py).
TOOL_CONFIG_FILES = {
    MODELOPT_FILE: "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
}
DECODED_DTYPE = "BF16"
# Of weights that no tool quantized, and of buffers beside them.
_UNQUANTIZED = (*FLOATS, "F64", "I64", "BOOL")
# Scales of the KV cache and of attention (vLLM layers/quantization/base_config.py:217-247, fp8.py:211-222).
_CACHE_SCALE = re.compile(
    r".+\.([qkv]_scale|[qkv]_zero_point|kv_scale|[qkv]_proj\.output_scale|prob_output_scale|[kv]_cache\.scale|q\.scale)"
)
# Tensors that some versions of tools left beside codes and no engine loads: AutoFP8's first name of input_scale, scales
# of a layer's output, and the zero points of symmetric formats.
_LEFTOVERS = (".act_scale", ".output_scale", ".weight_zero_point", ".input_zero_point", ".output_zero_point")
# Suffixes of scales: Mistral uses the first for a whole tensor, Qwen and MiniMax for the groups of MXFP8.
_SCALE_SUFFIXES = ("_scale", "_scale_inv")
# modelopt's suffixes for a stack of experts, whose own name does not end in `.weight` (vLLM models/llama4.py:650).
_STACK_SUFFIXES = ("_weight_scale", f"_{INPUT_SCALE}")
# What codes in words have beside them, and bitsandbytes' int8 codes.
_LAYOUT = ("weight_shape", "weight_format")
# Other tensors of a quantized layer. Mistral calls the first one by the second name.
_COMPANIONS = (INPUT_SCALE, "activation_scale", "input_global_scale", "input_scale_2", *_LAYOUT)
# Endings of names that only quantized checkpoints have: of scales, and of scales or codes.
_SCALES = (
    ".weight_scale", ".weight_scale_inv", f".{INPUT_SCALE}", ".weight_global_scale", ".weight_scale_2",
    ".input_global_scale", ".SCB",
)  # fmt: skip
_QUANTIZED = (*_SCALES, ".qweight", ".weight_packed", ".weight.absmax")
_STRAY_SCALES = (*_SCALES, "_scales", ".qzeros", ".g_idx", ".absmax", "._weight_scale")
# Transforms of a layer's inputs by Quark and torchao, which its weight has the inverse of (QParamsLinearWithRotation).
_INPUT_TRANSFORMS = (".input_rotation", ".input_prescale", "._weight_act_pre_scale")
# An int3 row of 96 columns was 10 words of 10 codes then, and is 9 now (compressors/pack_quantized/helpers.py).
_OTHER_WORDS = (
    "compressed-tensors packs so since 0.18; if an older version wrote it, quantize the unquantized model again, else "
    "download it again"
)
_UNKNOWN_LAYOUT = "download it again if it is damaged; if its maker lays it out so, start from the unquantized model"


class CodesAndScale(NamedTuple):
    """The tensors of one quantized layer, matched by name only; shapes and dtypes are not checked.

    Attributes:
        name: name of the weight as if unquantized, by which the config is asked for its format.
        codes: the tensor of codes.
        fmt: the format that the config gives the layer; None if no config group targets it.
        scale: the tensor of scales, under the format's name or another tool's; None if it is missing.
        global_scale: the global scale; None if the format has none or it is missing.
        zero_points: the zero points; None if the format has none or they are missing.
        companions: other tensors of the layer: the static activation scale, `weight_shape`.
    """

    name: str
    codes: TensorInfo
    fmt: Format | None
    scale: TensorInfo | None
    global_scale: TensorInfo | None
    zero_points: TensorInfo | None
    companions: tuple[TensorInfo, ...]

    @property
    def module(self) -> str:
        """The module that owns the weight."""
        return self.name.removesuffix(".weight")

    @property
    def packed(self) -> bool:
        """Whether the name of the codes differs from the weight's, as that of packed codes does."""
        return self.codes.name != self.name


def pairs(tensors: Mapping[str, TensorInfo], quantization: Quantization) -> Iterator[CodesAndScale]:
    """Yield all codes of a checkpoint with their scales. Only this function decides which tensor is what.

    Args:
        tensors: name, dtype and shape of all tensors of the checkpoint, by tensor name.
        quantization: its quantization_config, which gives the format of each layer.

    Yields:
        For each tensor of codes: the weight's unquantized name, and name, dtype and shape of its codes, scales, zero
        points and other tensors.
    """
    for info in tensors.values():
        name = _unquantized_name(info)
        if name is None:
            continue

        module = name.removesuffix(".weight")
        fmt = quantization.format_of(module)
        names = [name + suffix for suffix in (*_SCALE_SUFFIXES, _STACK_SUFFIXES[0])]
        if fmt:
            names.insert(0, fmt.scale_of(name))

        # DeepSeek V4's name. Engines find scales under it only where they are exponents.
        exponents = tensors.get(f"{module}.scale")
        if exponents and exponents.dtype in EXPONENTS:
            names.append(exponents.name)

        scales = _present(tensors, names)
        global_scale = None
        if fmt and fmt.global_scale:
            global_scale = tensors.get(f"{module}.{fmt.global_scale.name}")
        zeros = None
        if fmt and fmt.zero_point:
            zeros = tensors.get(f"{module}.{fmt.zero_point}")
        companions = _present(tensors, [*(f"{module}.{suffix}" for suffix in _COMPANIONS), name + _STACK_SUFFIXES[1]])

        yield CodesAndScale(name, info, fmt, next(iter(scales), None), global_scale, zeros, tuple(companions))


def stored_twice(
    tensors: Mapping[str, TensorInfo], all_pairs: Iterable[CodesAndScale]
) -> Iterator[tuple[TensorInfo, str]]:
    """Yield packed codes of weights that the checkpoint also has unquantized or as other codes, each with a message.

    Args:
        tensors: name, dtype and shape of all tensors of the checkpoint, by tensor name.
        all_pairs: its codes with their scales, from `pairs`.

    Yields:
        Name, dtype and shape of the tensor of codes, and a message that names it and the other tensor.
    """
    codes_names: dict[str, str] = {}
    for pair in all_pairs:
        if not pair.packed:
            continue
        other = pair.name if pair.name in tensors else codes_names.get(pair.name)
        if other is not None:
            yield pair.codes, f"{other} is there twice, as {pair.codes.name} too"
        codes_names[pair.name] = pair.codes.name


def _unquantized_name(info: TensorInfo) -> str | None:
    """Return the unquantized name of a weight whose codes a tensor holds; None if it holds no codes."""
    if info.name.endswith(".weight_packed"):
        return info.name.removesuffix("_packed")
    if info.name.endswith(".qweight"):
        return info.name.removesuffix("qweight") + "weight"
    if info.name.endswith(f".{QDATA}"):
        return info.name.removesuffix(QDATA) + "weight"
    if info.name.endswith("_blocks") and info.dtype == "U8":
        return info.name.removesuffix("_blocks")

    if info.dtype.startswith(("F8_E4M3", "F8_E5M2", "F4", "F6_")):
        # Scales may be FP8, too.
        is_codes = not info.name.endswith(_SCALE_SUFFIXES)
    else:
        is_codes = info.name.endswith(".weight") and info.dtype in (*CODES, "U8", "I32")
    return info.name if is_codes else None


def _present(tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> list[TensorInfo]:
    return [tensors[name] for name in names if name in tensors]


def unread_tensors(tensors: Mapping[str, TensorInfo], weights: Iterable[Weight]) -> list[str]:
    """Return the names of tensors beside quantized weights that engines refuse to load.

    Args:
        tensors: name, dtype and shape of all tensors of a checkpoint, by tensor name.
        weights: its quantized weights.

    Returns:
        Full tensor names, in the order of `tensors`.
    """
    leftovers = [name for name in tensors if name.endswith(_LEFTOVERS) and not _CACHE_SCALE.fullmatch(name)]
    if not leftovers:
        return []

    # Zero points that the format of the weight has are read; others beside codes are not.
    modules = set()
    zero_points = set()
    for weight in weights:
        module = weight.codes.name.rpartition(".")[0]
        modules.add(module)
        if weight.format and weight.format.zero_point:
            zero_points.add(f"{module}.{weight.format.zero_point}")
    return [name for name in leftovers if name.rpartition(".")[0] in modules and name not in zero_points]


def tool_config_file(config: dict[str, Any], root: Path) -> str | None:
    """Return the name of the tool's file that says how weights are quantized; None if config.json says it, or no file.

    Args:
        config: the parsed config.json.
        root: the checkpoint's directory.
    """
    if quantization_places(config):
        return None
    return next((name for name in TOOL_CONFIG_FILES if (root / name).exists()), None)


def with_tool_config(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return config.json with a quantization_config, taken from a tool's file if config.json has none.

    Args:
        config: the parsed config.json.
        root: the checkpoint's directory.

    Returns:
        A copy with the tool's settings; `config` itself if it has some, or there is no tool's file.

    Raises:
        SourceError: the tool's file cannot be read.
    """
    name = tool_config_file(config, root)
    if name is None:
        return config
    settings = read_json(root / name, name)
    if not isinstance(settings, dict):
        raise SourceError(f"{root / name} is not a JSON object", "download or copy it again")
    # AutoAWQ's file first had the name of AutoGPTQ's.
    method = TOOL_CONFIG_FILES[name]
    if "w_bit" in settings:
        method = "awq"
    return {**config, "quantization_config": {"quant_method": method, **settings}}


def decoded_view(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Weight]]:
    """Show a checkpoint as if it were unquantized. Only headers are changed; nothing is decoded.

    Args:
        checkpoint: config.json, file sizes and safetensors headers.

    Returns:
        The checkpoint with one BF16 tensor for each quantized weight, and without quantization_config, files of tools,
        scales of weights and activations, and tensors that engines refuse; and the quantized weights, by the full name
        of that tensor, with the tensors that they are stored in. An unquantized checkpoint is returned as it is, with
        {}. Of GGUF files, all tensors are quantized weights, vectors too.

    Raises:
        PlanError: its quantization is not supported, or config.json does not describe it.
        SourceError: a scale is missing, belongs to no weight, or has another shape or dtype than config.json promises;
            a weight is stored twice; or a tool's file cannot be read.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        sources = {name: weight.source for name, weight in checkpoint.weights.items()}
        return replace(checkpoint, tensors=sources), dict(checkpoint.weights)

    quantization = _read(checkpoint)
    if quantization is None:
        _refuse_unexplained(checkpoint)
        return checkpoint, {}

    all_pairs = list(pairs(checkpoint.tensors, quantization))
    for _, message in stored_twice(checkpoint.tensors, all_pairs):
        raise SourceError(message, DAMAGED)

    # A tensor that is stored per rank holds several weights.
    by_codes: dict[str, list[Weight]] = {}
    hidden: set[str] = set()
    for weight, pair in checked_weights(checkpoint, all_pairs):
        by_codes.setdefault(weight.codes.name, []).append(weight)
        hidden.update(part.name for part in (*weight.parts, *pair.companions))

    hidden.update(unread_tensors(checkpoint.tensors, chain.from_iterable(by_codes.values())))

    tensors: dict[str, TensorInfo] = {}
    where = dict(checkpoint.where)
    weights: dict[str, Weight] = {}

    for info in checkpoint.tensors.values():
        for weight in by_codes.get(info.name, ()):
            source = weight.source
            if source.name != info.name and source.name in checkpoint.tensors:
                raise SourceError(f"{source.name} is there twice, as {info.name} too", DAMAGED)
            tensors[source.name] = source
            where[source.name] = checkpoint.where[info.name]
            weights[source.name] = weight

        if info.name not in by_codes and info.name not in hidden:
            tensors[info.name] = info

    _refuse_stray_scales(tensors, weights)

    config = without_quantization(checkpoint.config)

    files = {name: size for name, size in checkpoint.files.items() if name not in TOOL_CONFIG_FILES}
    left_out = (*checkpoint.left_out, *(name for name in checkpoint.files if name not in files))
    return replace(checkpoint, config=config, tensors=tensors, where=where, files=files, left_out=left_out), weights


def without_cache_scales(checkpoint: Checkpoint) -> Checkpoint:
    """Remove the scales of the KV cache and of attention, which engines load only into quantized models.

    Args:
        checkpoint: config.json, file sizes and safetensors headers.

    Returns:
        A copy whose headers lack these tensors.
    """
    tensors = {
        name: info
        for name, info in checkpoint.tensors.items()
        if len(info.shape) > 1 or not _CACHE_SCALE.fullmatch(name)
    }
    return replace(checkpoint, tensors=tensors)


def without_quantization(config: dict[str, Any], keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return a config without its quantization_config and compression_config, at the top and in all parts.

    Args:
        config: config.json, parsed; it is not changed.
        keys: other keys to leave out in the same places.

    Returns:
        A new dictionary.
    """
    left_out = ("quantization_config", "compression_config", *keys)
    return {
        key: without_quantization(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in left_out
    }


def _read(checkpoint: Checkpoint) -> Quantization | None:
    """Read how the checkpoint is quantized, from config.json or a tool's file; None if neither says anything."""
    config = with_tool_config(checkpoint.config, checkpoint.root)
    if not quantization_places(config):
        return None

    try:
        return read_quantization(config)
    except UsageError as error:
        # Some tools decode weights and leave the config.
        if all(info.dtype in _UNQUANTIZED and "scale" not in info.name for info in checkpoint.tensors.values()):
            return None

        file = tool_config_file(checkpoint.config, checkpoint.root) or "config.json"
        message = error.message.replace("config.json", file, 1)
        hint = str(error.hint)
        if UNQUANTIZED not in hint:
            hint += f"; or {UNQUANTIZED}"
        raise PlanError(f"the source is already quantized: {message}", hint) from None


def checked_weights(
    checkpoint: Checkpoint, all_pairs: Iterable[CodesAndScale]
) -> Iterator[tuple[Weight, CodesAndScale]]:
    """Yield the weights of codes, after checking that names, dtypes and shapes are those of their formats.

    Args:
        checkpoint: config.json, file sizes and safetensors headers.
        all_pairs: tensors of codes with their scales, from `pairs`.

    Yields:
        Each weight, with the tensors that it is made from.

    Raises:
        PlanError: a layout is not supported.
        SourceError: a tensor is missing, or has another shape or dtype than config.json promises.
    """
    modules = [info.module for info in checkpoint.tensors.values()]
    model = find_entry(checkpoint.architecture, checkpoint.config, modules)
    ranked = model.per_rank if model else None
    per_rank = model.compile(ranked.pattern) if model and ranked else None

    for pair in all_pairs:
        info = pair.codes
        if per_rank and ranked and info.dtype == E4M3.dtype and per_rank.fullmatch(pair.module):
            fmt = _required_format(pair)
            weights = per_rank_projections(pair.module, info, _any_scale(pair, fmt), fmt, ranked, checkpoint.config)
        elif pair.fmt is not None and pair.fmt.columns is not None:
            weights = [_columns(checkpoint, pair, pair.fmt)]
        elif pair.fmt is not None and pair.fmt.number in BITSANDBYTES:
            weights = [_four_bits(checkpoint, pair, pair.fmt)]
        elif info.name.endswith(".qweight"):
            raise SourceError(
                f"{name_and_type(info)}, but config.json has its layer in none of AWQ, GPTQ and auto-round", DAMAGED
            )
        elif info.name.endswith(f".{QDATA}"):
            weights = [_check_unpacked(pair)]
        elif (pair.packed or info.dtype == "U8") and info.name.endswith("_blocks"):
            weights = [_blocks(pair)]
        elif pair.packed or info.dtype == "U8":
            weights = [_check_packed(checkpoint, pair)]
        elif _is_deepseek_mxfp4(pair):
            weights = [_deepseek_mxfp4(pair)]
        elif info.dtype in CODES and (info.name.endswith(".weight") or len(info.shape) == 3):
            weights = [_check_unpacked(pair)]
        else:
            raise PlanError(f"{name_and_type(info)}, which is not supported", "start from the unquantized model")

        for weight in weights:
            yield weight, pair


def _check_unpacked(pair: CodesAndScale) -> Weight:
    """Check a weight with one code in each element."""
    info = pair.codes
    fmt = _required_format(pair)
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        raise SourceError(f"{name_and_type(info)}, neither a matrix nor a stack of them", DAMAGED)
    if fmt.number.dtype != info.dtype:
        raise SourceError(f"{info.name} is {info.dtype}, but config.json has its layer as {fmt.number.title}", DAMAGED)
    shape = info.shape[-2], info.shape[-1]
    if len(info.shape) == 3:
        return _stack(pair, shape, fmt)
    weight = _weight(pair, shape, fmt, _scale(pair, fmt, shape))
    parts = (*weight.parts, *(info for info in pair.companions if info.name.endswith(".weight_format")))
    return weight._replace(parts=parts, input_scale=_input_scale(pair))


def _stack(pair: CodesAndScale, shape: tuple[int, int], fmt: Format) -> Weight:
    """Check a stack of experts with scales for each expert, or one scale for all."""
    scale = _any_scale(pair, fmt)

    experts = pair.codes.shape[0]
    (rows, cols) = shape

    if fmt.shared:
        groups = dict.fromkeys(((), (1,), (experts,), (experts, 1), (experts, 1, 1)), fmt.group)
    elif fmt.group == (1, None):
        # One scale for each output, which is a row of some layouts and a column of others.
        groups = {(experts, rows, 1): (1, None), (experts, 1, cols): (None, 1)}
        if rows != cols:
            groups |= {(experts, rows): (1, None), (experts, cols): (None, 1)}
    else:
        groups = {(experts, *grid_of(fmt.group, shape)): fmt.group}

    if scale.shape not in groups:
        shapes = " or ".join(str(list(sizes)) for sizes in groups if len(sizes) == 3)
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {list(pair.codes.shape)} with {fmt.label} it must be {shapes}",
            _UNKNOWN_LAYOUT,
        )

    input_scale = _input_scale(pair)
    if input_scale is not None and math.prod(input_scale.shape) != 1:
        input_scale = None
    return _weight(pair, shape, replace(fmt, group=groups[scale.shape]), scale)._replace(
        source=TensorInfo(pair.name, DECODED_DTYPE, pair.codes.shape), input_scale=input_scale
    )


def _input_scale(pair: CodesAndScale) -> TensorInfo | None:
    """Return the static activation scale, under any of its names."""
    return next((info for info in pair.companions if not info.name.endswith(_LAYOUT)), None)


def _columns(checkpoint: Checkpoint, pair: CodesAndScale, fmt: Format) -> Weight:
    """Check a weight that is stored transposed (AutoAWQ, GPTQ)."""
    if not pair.codes.name.endswith(f".{fmt.codes}"):
        raise SourceError(f"{name_and_type(pair.codes)}, but config.json has its layer as {fmt.codes}", DAMAGED)
    shape, parts = packed_columns(pair.module, pair.codes, fmt, checkpoint.tensors)
    return _weight(pair, shape, fmt, parts[1])._replace(parts=parts)


def _four_bits(checkpoint: Checkpoint, pair: CodesAndScale, fmt: Format) -> Weight:
    """Check a weight of bitsandbytes in 4 bits."""
    shape, size, parts = four_bits(pair.codes, fmt, checkpoint.tensors, checkpoint.quant_states)
    return _weight(pair, shape, replace(fmt, group=(1, size)), parts[1])._replace(parts=parts)


def _check_packed(checkpoint: Checkpoint, pair: CodesAndScale) -> Weight:
    """Check a weight with several codes in each element."""
    fmt = _required_format(pair)
    info = pair.codes

    if not fmt.number.packed or info.dtype != fmt.number.dtype or len(info.shape) != 2:
        raise PlanError(
            f"{name_and_type(info)}, which is not how {fmt.label} of {fmt.number.title} is packed",
            "start from the unquantized model",
        )
    if (problem := fmt.number.row_error(info.shape[1])) is not None:
        raise SourceError(f"{name_and_type(info)}: {problem}", _OTHER_WORDS)

    global_scale = _global_scale(pair, fmt)
    shape = info.shape[0], fmt.number.count(info.shape[1])
    zeros = _zero_points(checkpoint.tensors, pair, fmt, shape)

    is_read = {
        "weight_zero_point": bool(zeros),
        "weight_g_idx": False,
        "weight_global_scale": bool(global_scale),
        # modelopt's AWQ: factors of the inputs.
        "pre_quant_scale": False,
    }
    for suffix, read in is_read.items():
        if not read and f"{pair.module}.{suffix}" in checkpoint.tensors:
            raise PlanError(
                f"the source is already quantized: {pair.module}.{suffix} is not supported",
                "start from the unquantized model",
            )

    shape_tensors = tuple(info for info in pair.companions if info.name.endswith(".weight_shape"))
    for info in shape_tensors:
        if info.shape != (2,) or info.dtype not in ("I32", "I64"):
            raise SourceError(f"{name_and_type(info)}, not two integers", DAMAGED)

    weight = _weight(pair, shape, fmt, _scale(pair, fmt, shape))
    input_scale = _input_scale(pair) if fmt.input_global_scale else None
    if input_scale is not None:
        _require_single(input_scale)

    return weight._replace(parts=(*weight.parts, *global_scale, *zeros, *shape_tensors), input_scale=input_scale)


def _global_scale(pair: CodesAndScale, fmt: Format) -> tuple[TensorInfo, ...]:
    """Return the global scale as a tuple of one; empty if the format has none."""
    if fmt.global_scale is None:
        return ()
    info = pair.global_scale
    if info is None:
        raise SourceError(
            f"{pair.codes.name} has no global scale: {fmt.shared_scale_name(pair.module)} is missing", DAMAGED
        )
    _require_single(info)
    return (info,)


def _require_single(info: TensorInfo) -> None:
    if info.dtype != "F32" or math.prod(info.shape) != 1:
        raise SourceError(f"{name_and_type(info)}, not a single F32", DAMAGED)


def _zero_points(
    tensors: Mapping[str, TensorInfo], pair: CodesAndScale, fmt: Format, shape: tuple[int, int]
) -> tuple[TensorInfo, ...]:
    """Return the zero points as a tuple of one; empty for symmetric formats."""
    expected = fmt.zero_points(pair.module, shape)
    if expected is None:
        return ()
    return (find_part(tensors, pair.codes, expected.name, (expected.dtype,), expected.shape),)


def _blocks(pair: CodesAndScale) -> Weight:
    """Check a stack of experts in MXFP4 blocks, as gpt-oss has them."""
    fmt = _required_format(pair)
    info = pair.codes
    scale = pair.scale
    if fmt.number != E2M1 or len(info.shape) != 4 or info.shape[3] != 16:
        raise SourceError(f"{name_and_type(info)}, not MXFP4 blocks of 16 bytes", DAMAGED)
    experts, rows, groups, _ = info.shape
    if scale is None:
        raise SourceError(f"{info.name} has no scale: {fmt.scale_of(pair.name)} is missing", DAMAGED)
    if (scale.dtype, scale.shape) != ("U8", info.shape[:3]):
        raise SourceError(f"{name_and_type(scale)}, for {info.name} it must be U8 {list(info.shape[:3])}", DAMAGED)
    source = TensorInfo(pair.name, DECODED_DTYPE, (experts, groups * 32, rows))
    return _weight(pair, (rows, groups * 32), fmt, scale)._replace(source=source, decodes_transposed=True)


def _is_deepseek_mxfp4(pair: CodesAndScale) -> bool:
    """Return whether it is an MXFP4 expert of DeepSeek V4: in FP8 models only these have int8 codes, E8M0 scales."""
    codes = pair.codes
    scale = pair.scale
    fmt = pair.fmt
    exponents = fmt is not None and fmt.number == E4M3 and scale is not None and scale.dtype in EXPONENTS
    return exponents and codes.dtype == "I8" and len(codes.shape) == 2


def _deepseek_mxfp4(pair: CodesAndScale) -> Weight:
    fmt = MXFP4.format
    shape = (pair.codes.shape[0], pair.codes.shape[1] * 2)
    return _weight(pair, shape, fmt, _scale(pair, fmt, shape))


def _weight(pair: CodesAndScale, shape: tuple[int, int], fmt: Format, scale: TensorInfo) -> Weight:
    source = TensorInfo(pair.name, DECODED_DTYPE, shape)
    return Weight(pair.module, template(pair.module), source, shape, format=fmt, parts=(pair.codes, scale))


def _required_format(pair: CodesAndScale) -> Format:
    if pair.fmt is None:
        info = pair.codes
        raise SourceError(f"{info.name} is {info.dtype}, but no config group of config.json targets it", DAMAGED)
    return pair.fmt


def _scale(pair: CodesAndScale, fmt: Format, shape: tuple[int, int]) -> TensorInfo:
    """Return the scales of a weight [out, in], checked to have one value for each group."""
    scale = _any_scale(pair, fmt)
    grid = grid_of(fmt.group, shape)
    # Scales of rows may have one axis, and those of modelopt's blocks four (vLLM layers/quantization/modelopt.py:2246).
    if tuple(size for size in scale.shape if size != 1) != tuple(size for size in grid if size != 1):
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {list(shape)} with {fmt.label} it must be {list(grid)}",
            _UNKNOWN_LAYOUT,
        )
    return scale


def _any_scale(pair: CodesAndScale, fmt: Format) -> TensorInfo:
    """Return the scales of a weight, checked to be there and of a dtype that scales have."""
    scale = pair.scale
    if scale is None:
        raise SourceError(f"{pair.codes.name} has no scale: {fmt.scale_of(pair.name)} is missing", _UNKNOWN_LAYOUT)
    if scale.dtype not in fmt.scale_dtypes and scale.dtype not in ("F32", "F8_E8M0"):
        raise SourceError(f"{scale.name} is {scale.dtype}, not {' or '.join(fmt.scale_dtypes)}", DAMAGED)
    return scale


def _refuse_stray_scales(tensors: dict[str, TensorInfo], weights: Mapping[str, Weight]) -> None:
    """Refuse scales of no quantized weight, which would be copied without a meaning."""
    for name in tensors:
        if name.endswith(_INPUT_TRANSFORMS):
            raise PlanError(
                f"{name}: the inputs of its layer are rotated or scaled as the model runs, which is not supported",
                "start from the unquantized model",
            )
        if name.endswith(_STRAY_SCALES) and name not in weights:
            raise SourceError(f"{name} is the scale of no quantized weight", DAMAGED)


def _refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Refuse quantized tensors in a checkpoint whose config.json has no quantization_config."""
    for info in checkpoint.tensors.values():
        if info.name.endswith(_QUANTIZED):
            problem = f"it holds {info.name}"
        elif info.dtype.startswith(("F8_", "F4", "F6_")):
            problem = f"{info.name} is {info.dtype}"
        else:
            continue
        raise PlanError(
            f"the source is already quantized: {problem}, and config.json has no quantization_config",
            "start from the unquantized model, or put back the config.json that belongs to these weights",
        )


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """An opened GGUF file, or several that are one model.

    `shards` are output shards to be; each is a link to the GGUF file that has its tensors, with the size of that file.
    `tensors` are blocks as bytes, U8 [out, bytes of a row], and `where` has their offsets.

    Attributes:
        weights: the stored weight of each tensor, by tensor name.
        file: the GGUF file, of several the first.
    """

    weights: Mapping[str, Weight] = field(default_factory=dict)
    file: Path = Path()
