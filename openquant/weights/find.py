"""Find the weights that a checkpoint stores quantized, whoever wrote it, and see it as what they stand for.

`decoded_view` gives a checkpoint in which every quantized weight is one tensor of bfloat16 under the name it would
have unquantized, with its scales out of sight. The plan is made of that, and what reads a weight decodes it.

Layouts:
    FP8, int8  X.weight [out, in], X.weight_scale or X.weight_scale_inv (formats/ says which has what shape)
               stacks of experts X [experts, .., ..], X_scale_inv, X_scale or X_weight_scale, by expert or one for all
    int4, int8 X.weight_packed int32 [out, in / 8] or [out, in / 4], X.weight_scale, X.weight_shape: eight or four in a
           word, the first lowest, each 8 or 128 above its value (compressed-tensors,
           compressors/pack_quantized/helpers.py); asymmetric ones also X.weight_zero_point int32 [out / 8, groups]
    NVFP4      X.weight_packed uint8 [out, in / 2], X.weight_scale E4M3 [out, in / 16] and X.weight_global_scale, by
           which those are divided (compressed-tensors); or X.weight, X.weight_scale and X.weight_scale_2, by which they
           are multiplied (modelopt)
    DeepSeek V4  FP8 as above, its scales X.scale; experts in MXFP4 beside it, X.weight int8 [out, in / 2] of two codes
               each, the first lowest, and X.scale E8M0 [out, in / 32], which its config.json does not say
    MiMo V2.5  q, k and v in FP8 as one, in parts (per_rank.py)
    AWQ, GPTQ  X.qweight, X.qzeros, X.scales, X.g_idx (packed_columns.py)
    MXFP4      X.weight_packed uint8 [out, in / 2], X.weight_scale (compressed-tensors), or X_blocks uint8
           [experts, out, in / 32, 16] and X_scales: two in a byte, the first lowest; unquantized these stacks are
           [experts, in, out] (transformers, integrations/mxfp4.py)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PlanError, SourceError, UsageError
from ..files.checkpoint import Checkpoint, read_json
from ..files.tensors import TensorInfo
from ..formats.format import EXPONENTS, INPUT_SCALE, Format, grid_of
from ..formats.numbers import CODES, E2M1, E4M3
from ..formats.quantization import Quantization, quantization_places, read_quantization
from ..formats.schemes import MXFP4
from ..models import MODELS
from ..patterns import compile_any, template
from ..registry.architecture import absolute_patterns
from .packed_columns import packed_columns
from .per_rank import per_rank_projections
from .weight import Weight

# What modelopt wrote beside config.json before config.json held the same.
MODELOPT_FILE = "hf_quant_config.json"
# What tools wrote beside it of how they quantized, and which method that is where the file does not say: those of
# AutoGPTQ and AutoAWQ (vLLM, get_config_filenames in layers/quantization/auto_gptq.py and auto_awq.py).
OWN_FILES = {MODELOPT_FILE: "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
DECODED_DTYPE = "BF16"
# Scales of the KV cache and of attention (vLLM layers/quantization/base_config.py:217-247, fp8.py:211-222).
_CACHE_SCALE = re.compile(
    r".+\.([qkv]_scale|[qkv]_zero_point|kv_scale|[qkv]_proj\.output_scale|prob_output_scale|[kv]_cache\.scale|q\.scale)"
)
# What tools left beside codes in some versions, and no engine has a place for: AutoFP8's first name of input_scale,
# scales of a layer's output, and the zero points of symmetric numbers.
_LEFTOVERS = (".act_scale", ".output_scale", ".weight_zero_point", ".input_zero_point", ".output_zero_point")
# Mistral calls the scale of a whole tensor so, Qwen's and MiniMax's MXFP8 that of its groups.
_SCALES = ("_scale", "_scale_inv")
# modelopt's names of what lies beside a stack, whose own has no last part (vLLM models/llama4.py:650).
_OF_STACKS = ("_weight_scale", f"_{INPUT_SCALE}")
# Mistral's name for the first is the second.
_BESIDE = (INPUT_SCALE, "activation_scale", "input_global_scale", "weight_shape")
_DAMAGED = "the checkpoint is damaged or incomplete: download or save it again"
# What no tensor of an unquantized model is called.
_QUANTIZED = (
    ".weight_scale", ".weight_scale_inv", f".{INPUT_SCALE}", ".qweight", ".weight_packed", ".weight.absmax",
    ".weight_global_scale", ".weight_scale_2", ".input_global_scale",
)  # fmt: skip
_STRAYS = (
    ".weight_scale", ".weight_scale_inv", "_scales", f".{INPUT_SCALE}", ".weight_global_scale", ".weight_scale_2",
    ".input_global_scale", ".qzeros", ".g_idx",
)  # fmt: skip
_STRANGE = "download it again if it is damaged; if its maker lays it out so, start from the unquantized model"


class CodesAndScale(NamedTuple):
    """Codes and what lies beside them, told by names alone: of what shapes and dtypes, whoever asks has to look.

    Attributes:
        name: what the weight would be called unquantized, as which it is looked up in the config.
        codes: the tensor.
        form: how the config has its layer stored; None if no group targets that.
        scale: the tensor that the format names, or else one that some tool names so; None if there is none.
        global_scale: the scale of the scales, where the format has one; None if it is not there.
        zero_points: likewise the codes that stand for zero.
        beside: what else there is about it by names that codes have: the scale of its activations, its shape.
    """

    name: str
    codes: TensorInfo
    form: Format | None
    scale: TensorInfo | None
    global_scale: TensorInfo | None
    zero_points: TensorInfo | None
    beside: tuple[TensorInfo, ...]

    @property
    def module(self) -> str:
        """The module that owns the weight."""
        return self.name.removesuffix(".weight")

    @property
    def packed(self) -> bool:
        """Whether the codes' own name says that several share an element."""
        return self.codes.name != self.name


class QuantizedWeight(NamedTuple):
    """A weight that the source stores quantized, and the names of all tensors that it takes the place of."""

    weight: Weight
    hidden: tuple[str, ...]


def pairs(tensors: Mapping[str, TensorInfo], quantization: Quantization) -> Iterator[CodesAndScale]:
    """All codes of a checkpoint, each with its scale: here alone is decided which tensor is what.

    Args:
        tensors: of the checkpoint, by name.
        quantization: what its config says.
    """
    for info in tensors.values():
        name = _unquantized(info)
        if name is None:
            continue
        module = name.removesuffix(".weight")
        form = quantization.format_of(module)
        named = [*([form.scale_of(name)] if form else []), *(name + last for last in (*_SCALES, _OF_STACKS[0]))]
        # DeepSeek V4's name, and exponents as there: scales of another kind by that name are found by no engine.
        own = tensors.get(f"{module}.scale")
        scales = _present(tensors, [*named, *([own.name] if own and own.dtype in EXPONENTS else [])])
        above = tensors.get(f"{module}.{form.global_scale.name}") if form and form.global_scale else None
        zeros = tensors.get(f"{module}.{form.zero_point}") if form and form.zero_point else None
        beside = _present(tensors, [*(f"{module}.{last}" for last in _BESIDE), name + _OF_STACKS[1]])
        yield CodesAndScale(name, info, form, scales[0] if scales else None, above, zeros, tuple(beside))


def stored_twice(
    tensors: Mapping[str, TensorInfo], all_pairs: Iterable[CodesAndScale]
) -> Iterator[tuple[TensorInfo, str]]:
    """Codes of weights that are there in another form too, unquantized or as other codes, each with a message.

    Args:
        tensors: of the checkpoint, by name.
        all_pairs: its codes.
    """
    forms: dict[str, str] = {}
    for pair in all_pairs:
        if not pair.packed:
            continue
        other = pair.name if pair.name in tensors else forms.get(pair.name)
        if other is not None:
            yield pair.codes, f"{other} is there twice, as {pair.codes.name} too"
        forms[pair.name] = pair.codes.name


def _unquantized(info: TensorInfo) -> str | None:
    """What a tensor of codes would be called unquantized; None if it holds none."""
    if info.name.endswith(".weight_packed"):
        return info.name.removesuffix("_packed")
    if info.name.endswith(".qweight"):
        return info.name.removesuffix("qweight") + "weight"
    if info.name.endswith("_blocks") and info.dtype == "U8":
        return info.name.removesuffix("_blocks")
    if info.dtype.startswith(("F8_E4M3", "F8_E5M2", "F4", "F6_")):
        # Scales may be FP8 themselves.
        return None if info.name.endswith(_SCALES) else info.name
    return info.name if info.name.endswith(".weight") and info.dtype in (*CODES, "U8") else None


def _present(tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> list[TensorInfo]:
    return [tensors[name] for name in names if name in tensors]


def unread_tensors(tensors: Mapping[str, TensorInfo], weights: Iterable[Weight]) -> list[str]:
    """The tensors beside quantized weights that engines refuse to load.

    Args:
        tensors: of a checkpoint, by name.
        weights: the quantized ones.
    """
    beside = [name for name in tensors if name.endswith(_LEFTOVERS) and not _CACHE_SCALE.fullmatch(name)]
    # The zero points of each, where it has some.
    zeros = {
        module: f"{module}.{weight.format.zero_point}" if weight.format and weight.format.zero_point else None
        for weight in (weights if beside else ())
        for module in (weight.codes.name.rpartition(".")[0],)
    }
    return [name for name in beside if zeros.get(name.rpartition(".")[0], name) != name]


def own_file(config: dict[str, Any], root: Path) -> str | None:
    """The name of the file that says how weights are quantized, where config.json does not and one of a tool does."""
    return None if quantization_places(config) else next((name for name in OWN_FILES if (root / name).exists()), None)


def with_own_file(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """A config.json that says how weights are quantized, be it that a tool's own file beside it says so.

    Raises:
        SourceError: that file is there, needed and cannot be read.
    """
    name = own_file(config, root)
    if name is None:
        return config
    found = read_json(root / name, name)
    if not isinstance(found, dict):
        raise SourceError(f"{name} is not a JSON object", "download or copy it again")
    # AutoAWQ's first name for its own was that of AutoGPTQ's.
    method = "awq" if "w_bit" in found else OWN_FILES[name]
    return {**config, "quantization_config": {"quant_method": method, **found}}


def decoded_view(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Weight]]:
    """The checkpoint with quantized weights as the tensors they stand for, and these weights, by the tensor's name.

    Raises:
        PlanError: it is quantized in a way that is not known here, or quantized without saying how.
        SourceError: a scale is missing, or has another shape or dtype than config.json promises.
    """
    quantization = _read(checkpoint)
    if quantization is None:
        _refuse_unexplained(checkpoint)
        return checkpoint, {}
    all_pairs = list(pairs(checkpoint.tensors, quantization))
    for _, message in stored_twice(checkpoint.tensors, all_pairs):
        raise SourceError(message, _DAMAGED)
    # Of one tensor mostly one.
    found: dict[str, list[Weight]] = {}
    hidden: set[str] = set()
    for entry in _find(checkpoint, all_pairs):
        found.setdefault(entry.weight.parts[0].name, []).append(entry.weight)
        hidden.update(entry.hidden)
    hidden.update(unread_tensors(checkpoint.tensors, (weight for held in found.values() for weight in held)))
    tensors: dict[str, TensorInfo] = {}
    where = dict(checkpoint.where)
    weights: dict[str, Weight] = {}
    for info in checkpoint.tensors.values():
        for weight in found.get(info.name, ()):
            source = weight.source
            if source.name != info.name and source.name in checkpoint.tensors:
                raise SourceError(f"{source.name} is there twice, as {info.name} too", _DAMAGED)
            tensors[source.name] = source
            where[source.name] = checkpoint.where[info.name]
            weights[source.name] = weight
        if info.name not in found and info.name not in hidden:
            tensors[info.name] = info
    _refuse_strays(tensors, weights)
    config = {key: value for key, value in checkpoint.config.items() if not _tells_quantization(key)}
    for key, value in config.items():
        if isinstance(value, dict):
            config[key] = {inner: held for inner, held in value.items() if not _tells_quantization(inner)}
    files = {name: size for name, size in checkpoint.files.items() if name not in OWN_FILES}
    left_out = (*checkpoint.left_out, *(name for name in checkpoint.files if name not in files))
    seen = replace(checkpoint, config=config, tensors=tensors, where=where, files=files, left_out=left_out)
    return seen, weights


def without_cache_scales(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without scales of the KV cache, which engines load into quantized models only."""
    tensors = {
        name: info
        for name, info in checkpoint.tensors.items()
        if len(info.shape) > 1 or not _CACHE_SCALE.fullmatch(name)
    }
    return replace(checkpoint, tensors=tensors)


def _tells_quantization(key: str) -> bool:
    return key in ("quantization_config", "compression_config")


def _read(checkpoint: Checkpoint) -> Quantization | None:
    """What config.json says, or modelopt's own file where it says nothing."""
    config = with_own_file(checkpoint.config, checkpoint.root)
    if not quantization_places(config):
        return None
    try:
        return read_quantization(config)
    except UsageError as error:
        message = error.message.replace("config.json", own_file(checkpoint.config, checkpoint.root) or "config.json", 1)
        raise PlanError(
            f"the source is already quantized: {message}", f"{error.hint}; or start from the unquantized model"
        ) from None


def _find(checkpoint: Checkpoint, all_pairs: Iterable[CodesAndScale]) -> Iterator[QuantizedWeight]:
    model = MODELS.get(checkpoint.architecture)
    ranked = model.per_rank if model else None
    in_parts = compile_any(absolute_patterns(model, [ranked.pattern])) if model and ranked else None
    for pair in all_pairs:
        info = pair.codes
        if in_parts and ranked and info.dtype == E4M3.dtype and in_parts.fullmatch(pair.module):
            form = _form(pair)
            for weight in per_rank_projections(
                pair.module, info, _found_scale(pair, form), form, ranked, checkpoint.config
            ):
                yield QuantizedWeight(weight, tuple(part.name for part in (*weight.parts, *pair.beside)))
            continue
        if pair.form is not None and pair.form.columns is not None:
            weight = _columns(checkpoint, pair, pair.form)
        elif info.name.endswith(".qweight"):
            raise SourceError(
                f"{_described(info)}, but config.json has its layer in no format of AWQ or GPTQ", _DAMAGED
            )
        elif pair.packed or info.dtype == "U8":
            weight = _blocks(pair) if info.name.endswith("_blocks") else _packed(checkpoint, pair)
        elif _is_nibbles(pair):
            weight = _nibbles(pair)
        elif info.dtype in CODES and (info.name.endswith(".weight") or len(info.shape) == 3):
            weight = _whole(pair)
        else:
            raise PlanError(f"{_described(info)}, which is not read here", "start from the unquantized model")
        yield QuantizedWeight(weight, tuple(part.name for part in (*weight.parts, *pair.beside)))


def _whole(pair: CodesAndScale) -> Weight:
    """A weight whose codes have an element each."""
    info, form = pair.codes, _form(pair)
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        raise SourceError(f"{_described(info)}, neither a matrix nor a stack of them", _DAMAGED)
    if form.number.dtype != info.dtype:
        raise SourceError(
            f"{info.name} is {info.dtype}, but config.json has its layer as {form.number.title}", _DAMAGED
        )
    shape = info.shape[-2], info.shape[-1]
    if len(info.shape) == 3:
        return _stack(pair, shape, form)
    return _weight(pair, shape, form, _scale(pair, form, shape))._replace(input_scale=_input_scale(pair))


def _stack(pair: CodesAndScale, shape: tuple[int, int], form: Format) -> Weight:
    """A stack of experts, each of which has scales of its own, unless there is one for all."""
    scale = _found_scale(pair, form)
    experts, (rows, cols) = pair.codes.shape[0], shape
    if form.shared:
        known = dict.fromkeys(((), (1,), (experts,), (experts, 1), (experts, 1, 1)), form.group)
    elif form.group == (1, None):
        # Those of outputs, which are the rows of one layout and the columns of another.
        known = {(experts, rows, 1): (1, None), (experts, 1, cols): (None, 1)}
        known |= {(experts, rows): (1, None), (experts, cols): (None, 1)} if rows != cols else {}
    else:
        known = {(experts, *grid_of(form.group, shape)): form.group}
    if scale.shape not in known:
        wanted = " or ".join(str(list(each)) for each in known if len(each) == 3)
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {list(pair.codes.shape)} with {form.label} it must be {wanted}",
            _STRANGE,
        )
    inputs = _input_scale(pair)
    return _weight(pair, shape, replace(form, group=known[scale.shape]), scale)._replace(
        source=TensorInfo(pair.name, DECODED_DTYPE, pair.codes.shape),
        input_scale=inputs if inputs is not None and math.prod(inputs.shape) == 1 else None,
    )


def _input_scale(pair: CodesAndScale) -> TensorInfo | None:
    """The scale of its activations, whatever it is called."""
    return next((beside for beside in pair.beside if not beside.name.endswith(".weight_shape")), None)


def _columns(checkpoint: Checkpoint, pair: CodesAndScale, form: Format) -> Weight:
    """A weight whose codes lie in columns."""
    if not pair.codes.name.endswith(f".{form.codes}"):
        raise SourceError(f"{_described(pair.codes)}, but config.json has its layer as {form.codes}", _DAMAGED)
    shape, parts = packed_columns(pair.module, pair.codes, form, checkpoint.tensors.get)
    return _weight(pair, shape, form, parts[1])._replace(parts=parts)


def _packed(checkpoint: Checkpoint, pair: CodesAndScale) -> Weight:
    form, info = _form(pair), pair.codes
    if form.number.per_item == 1 or info.dtype != form.number.dtype or len(info.shape) != 2:
        raise PlanError(
            f"{_described(info)}, which is not how {form.label} of {form.number.title} is packed",
            "start from the unquantized model",
        )
    above = _global_scale(pair, form)
    shape = info.shape[0], info.shape[1] * form.number.per_item
    zeros = _zero_points(pair, form, shape)
    without = () if zeros else ("weight_zero_point",)
    for other in (*without, "weight_g_idx", *(() if above else ("weight_global_scale",))):
        if f"{pair.module}.{other}" in checkpoint.tensors:
            raise PlanError(
                f"the source is already quantized: {pair.module}.{other} is not read here",
                "start from the unquantized model",
            )
    told = tuple(beside for beside in pair.beside if beside.name.endswith(".weight_shape"))
    for beside in told:
        if beside.shape != (2,) or beside.dtype not in ("I32", "I64"):
            raise SourceError(f"{_described(beside)}, not two integers", _DAMAGED)
    weight = _weight(pair, shape, form, _scale(pair, form, shape))
    inputs = _input_scale(pair) if form.input_global_scale else None
    if inputs is not None:
        _require_number(inputs)
    return weight._replace(parts=(*weight.parts, *above, *zeros, *told), input_scale=inputs)


def _global_scale(pair: CodesAndScale, form: Format) -> tuple[TensorInfo, ...]:
    """The scale of the scales, where a format has one."""
    if form.global_scale is None:
        return ()
    info = pair.global_scale
    if info is None:
        raise SourceError(
            f"{pair.codes.name} has no global scale: {form.shared_scale_name(pair.module)} is missing", _DAMAGED
        )
    _require_number(info)
    return (info,)


def _require_number(info: TensorInfo) -> None:
    if info.dtype != "F32" or math.prod(info.shape) != 1:
        raise SourceError(f"{_described(info)}, not a single F32", _DAMAGED)


def _zero_points(pair: CodesAndScale, form: Format, shape: tuple[int, int]) -> tuple[TensorInfo, ...]:
    """The codes that stand for zero, where a format has them."""
    wanted, info = form.zero_points(pair.module, shape), pair.zero_points
    if wanted is None:
        return ()
    if info is None:
        raise SourceError(f"{pair.codes.name} has no zero points: {wanted.name} is missing", _DAMAGED)
    if info != wanted:
        raise SourceError(
            f"{_described(info)}, for {list(shape)} with {form.label} it must be {wanted.dtype} {list(wanted.shape)}",
            _DAMAGED,
        )
    return (info,)


def _blocks(pair: CodesAndScale) -> Weight:
    form, info, scale = _form(pair), pair.codes, pair.scale
    if form.number != E2M1 or len(info.shape) != 4 or info.shape[3] != 16:
        raise SourceError(f"{_described(info)}, not MXFP4 blocks of 16 bytes", _DAMAGED)
    experts, rows, groups, _ = info.shape
    if scale is None:
        raise SourceError(f"{info.name} has no scale: {form.scale_of(pair.name)} is missing", _DAMAGED)
    if (scale.dtype, scale.shape) != ("U8", info.shape[:3]):
        raise SourceError(f"{_described(scale)}, for {info.name} it must be U8 {list(info.shape[:3])}", _DAMAGED)
    source = TensorInfo(pair.name, DECODED_DTYPE, (experts, groups * 32, rows))
    return _weight(pair, (rows, groups * 32), form, scale)._replace(source=source, turned=True)


def _is_nibbles(pair: CodesAndScale) -> bool:
    """Whether it is MXFP4 as DeepSeek V4 has its experts: no other layer in FP8 has bytes, or exponents, so."""
    codes, scale, form = pair.codes, pair.scale, pair.form
    beside = form is not None and form.number == E4M3 and scale is not None and scale.dtype in EXPONENTS
    return beside and codes.dtype == "I8" and len(codes.shape) == 2


def _nibbles(pair: CodesAndScale) -> Weight:
    form, shape = MXFP4.format, (pair.codes.shape[0], pair.codes.shape[1] * 2)
    return _weight(pair, shape, form, _scale(pair, form, shape))


def _weight(pair: CodesAndScale, shape: tuple[int, int], form: Format, scale: TensorInfo) -> Weight:
    source = TensorInfo(pair.name, DECODED_DTYPE, shape)
    return Weight(pair.module, template(pair.module), source, shape, format=form, parts=(pair.codes, scale))


def _form(pair: CodesAndScale) -> Format:
    if pair.form is None:
        info = pair.codes
        raise SourceError(f"{info.name} is {info.dtype}, but no config group of config.json targets it", _DAMAGED)
    return pair.form


def _scale(pair: CodesAndScale, form: Format, shape: tuple[int, int]) -> TensorInfo:
    """The scale of a weight [out, in], which must have as many values as its grid."""
    scale = _found_scale(pair, form)
    wanted = grid_of(form.group, shape)
    # Those of rows may have one axis; of modelopt's blocks, four (vLLM layers/quantization/modelopt.py:2246).
    if tuple(size for size in scale.shape if size != 1) != tuple(size for size in wanted if size != 1):
        raise SourceError(
            f"{scale.name} is {list(scale.shape)}, for {list(shape)} with {form.label} it must be {list(wanted)}",
            _STRANGE,
        )
    return scale


def _found_scale(pair: CodesAndScale, form: Format) -> TensorInfo:
    """The scale of a weight, of whatever shape."""
    scale = pair.scale
    if scale is None:
        raise SourceError(f"{pair.codes.name} has no scale: {form.scale_of(pair.name)} is missing", _STRANGE)
    if scale.dtype not in form.scale_dtypes and scale.dtype not in ("F32", "F8_E8M0"):
        raise SourceError(f"{scale.name} is {scale.dtype}, not {' or '.join(form.scale_dtypes)}", _DAMAGED)
    return scale


def _described(info: TensorInfo) -> str:
    return f"{info.name} is {info.dtype} {list(info.shape)}"


def _refuse_strays(tensors: dict[str, TensorInfo], weights: Mapping[str, Weight]) -> None:
    """Scales without a quantized weight, which would be copied and mean nothing."""
    for name in tensors:
        if name.endswith(_STRAYS) and name not in weights:
            raise SourceError(f"{name} is the scale of no quantized weight", _DAMAGED)


def _refuse_unexplained(checkpoint: Checkpoint) -> None:
    """Quantized tensors of which config.json says nothing."""
    for info in checkpoint.tensors.values():
        if info.name.endswith(_QUANTIZED):
            what = f"it holds {info.name}"
        elif info.dtype.startswith(("F8_", "F4", "F6_")):
            what = f"{info.name} is {info.dtype}"
        else:
            continue
        raise PlanError(
            f"the source is already quantized: {what}, and config.json has no quantization_config",
            "start from the unquantized model, or put back the config.json that belongs to these weights",
        )
