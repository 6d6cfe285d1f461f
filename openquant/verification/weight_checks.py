"""Finds the quantized weights of a directory, and checks names, dtypes and shapes of codes, scales and zero points.

`find_weights` checks them as engines load them, `find_decodable_weights` as openquant decodes them.

    codes, stored, scales = find_weights(checkpoint, quantization, pairs, findings)
    codes["model.layers.0.mlp.up_proj.weight"].scale

Static scales are those of activations (`input_scale`, `input_global_scale`) and of the KV cache. Nothing in the weights
says what they must be. The journal of an output has the values that its plan chose; layers that engines fuse read the
same input; and no model has activations beyond some range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..errors import PlanError, SourceError, UsageError
from ..files.checkpoint import Checkpoint
from ..files.shardfile import TensorInfo
from ..formats.format import FLOATS, Format
from ..formats.numbers import SCALES, cache_scales, says_fp8_cache
from ..formats.quantization import Quantization
from ..formats.schemes import CHANNEL
from ..patterns import collapse, join_words
from ..plan.architecture import text_config
from ..plan.serving import find_cached_attentions, scale_sharing_keys
from ..version import VLLM
from ..weights.find import CodesAndScale, checked_weights, stored_twice, unread_tensors
from ..weights.weight import Weight, packed_columns
from .headers import COLUMN_PARTS, Findings, Headers, describe

# The quantized weights by the name of the unquantized tensor; the same by the name of the tensor that holds the codes;
# and the names of all tensors that belong to codes: scales, zero points, shapes.
StoredWeights: TypeAlias = tuple[dict[str, Weight], dict[str, Weight], set[str]]


def find_weights(
    checkpoint: Checkpoint, quantization: Quantization, pairs: Sequence[CodesAndScale], findings: Findings
) -> StoredWeights:
    """Find the quantized weights and their scales, and check names, dtypes and shapes.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        pairs: the tensors of codes that the directory has, each with its scale, global scale and zero points.
        findings: problems and notes, one line each, are added to it.

    Returns:
        All weights that have codes, by unquantized tensor name ("..up_proj.weight") and by the name of the tensor that
        holds the codes; and the names of all their scales, zero points and shapes. If a scale is missing or has a wrong
        dtype or shape, the weight has no scale; likewise a global scale, zero points and a scale of activations. If no
        config group targets it, it has no format. Codes of a wrong name, dtype or shape are left out.
    """
    return _Finder(checkpoint, quantization, findings).find(pairs)


def find_decodable_weights(
    checkpoint: Checkpoint, quantization: Quantization, pairs: Sequence[CodesAndScale], findings: Findings
) -> StoredWeights:
    """Find the quantized weights as `dequantize` finds them, whatever tool wrote them.

    Args:
        checkpoint: the opened directory.
        quantization: its quantization_config.
        pairs: the tensors of codes that the directory has, each with its scale, global scale and zero points.
        findings: a problem for each weight whose tensors are missing or have a wrong dtype or shape is added to it,
            and a note for each format with the layers that are stored in it.

    Returns:
        All weights without such a problem, by unquantized tensor name and by the name of the tensor that holds the
        codes; and the names of the tensors that belong to codes.

    Raises:
        UsageError: a weight is laid out in a way that openquant does not read.
    """
    codes: dict[str, Weight] = {}
    stored: dict[str, Weight] = {}
    others: set[str] = set()
    modules: dict[str, list[str]] = {}

    for pair in pairs:
        others.update(info.name for info in (pair.scale, pair.global_scale, pair.zero_points, *pair.companions) if info)
        try:
            for weight, _ in checked_weights(checkpoint, [pair]):
                others.update(part.name for part in weight.parts[1:])
                if (fmt := weight.format) is not None:
                    modules.setdefault(f"{fmt.number.title}, {fmt.label}", []).append(weight.module)
                if (scale := weight.input_scale) is not None and scale.dtype not in FLOATS:
                    findings.problems.append(
                        f"{checkpoint.where[scale.name].shard}: {scale.name} is {describe(scale)}, not a scale"
                    )
                    weight = weight._replace(input_scale=None)
                codes[weight.source.name] = stored[pair.codes.name] = weight
        except SourceError as error:
            findings.problems.append(f"{checkpoint.where[pair.codes.name].shard}: {error.message}")
        except PlanError as error:
            raise UsageError(error.message.removeprefix("the source is already quantized: "), error.hint) from None

    others.update(unread_tensors(checkpoint.tensors, codes.values()))

    for targets, fmt in quantization.groups:
        for name in (f"{target}.weight" for target in targets):
            if name in checkpoint.tensors and name not in stored:
                dtype = checkpoint.tensors[name].dtype
                shard = checkpoint.where[name].shard
                findings.problems.append(f"{shard}: {name} is {dtype}, but the config has it in {fmt.number.title}")

    for title, names in modules.items():
        layers = f"{len(names)} layers"
        if len(names) == 1:
            layers = "1 layer"
        findings.notes.append(f"{layers} in {title}: {', '.join(sorted(collapse(names)))}")

    if not codes and not findings.problems:
        findings.notes.append("nothing is quantized")
    return codes, stored, others


class _Finder:
    """One call of `find_weights`."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, findings: Findings) -> None:
        self.checkpoint = checkpoint
        self._place = checkpoint.place
        self.quantization = quantization
        self.findings = findings
        self.codes: dict[str, Weight] = {}
        self.stored: dict[str, Weight] = {}
        self.scales: set[str] = set()

    def find(self, pairs: Sequence[CodesAndScale]) -> StoredWeights:
        """Find all weights, and report problems with their codes, scales and zero points."""
        per_tensor_scale_inv = 0
        for pair in pairs:
            info = pair.codes
            fmt = pair.fmt
            scale = pair.scale

            if fmt is not None and fmt.columns is not None:
                self._add_columns(pair, fmt)
                continue

            first = self.quantization.groups[0][1] if self.quantization.groups else None
            number = (fmt or first or CHANNEL.format).number
            # Engines know packed codes by their name.
            is_misnamed = pair.packed != number.packed or info.name.endswith(".qweight")
            if info.dtype != number.dtype or len(info.shape) < 2 or is_misnamed:
                name = f"{pair.name}_packed" if number.packed else pair.name
                self.findings.problems.append(
                    f"{self._place(info.name)} is {describe(info)}, not a matrix of {number.dtype} called {name}"
                )
                continue

            if fmt is None:
                self.findings.problems.append(
                    f"{self._place(info.name)} is {number.dtype}, but no config group targets it"
                )
                weight = Weight(pair.module, "", info, (info.shape[-2], info.shape[-1]), parts=(info,))
                self.codes[pair.name] = self.stored[info.name] = weight
                continue

            if (problem := number.row_error(info.shape[-1])) is not None:
                self.findings.problems.append(f"{self._place(info.name)} is {describe(info)}: {problem}")
                continue

            # Engines read a scale by no other name, but for weight_scale_inv of a per-tensor scale.
            if scale is not None and scale.name != fmt.scale_of(pair.name):
                scale = scale if fmt.shared and scale.name.endswith("_scale_inv") else None
                per_tensor_scale_inv += scale is not None
            self._add_rows(pair, fmt, scale)

        twice = stored_twice(self.checkpoint.tensors, pairs)
        self.findings.problems += [
            f"{self._place(info.name)}: {message}" for info, message in twice if info.name in self.stored
        ]

        if per_tensor_scale_inv:
            self.findings.notes.append(
                f"{per_tensor_scale_inv} scales are called weight_scale_inv although they are one per tensor; "
                f"{VLLM} reads that for Mistral 3 models only"
            )

        if not self.codes and self.quantization.groups:
            self.findings.notes.append("nothing is quantized")
        return self.codes, self.stored, self.scales

    def _add_columns(self, pair: CodesAndScale, fmt: Format) -> None:
        """Add a weight in AWQ's or GPTQ's layout, whose codes are packed along columns."""
        info = pair.codes
        self.scales.update(f"{pair.module}.{last}" for last in COLUMN_PARTS)
        try:
            shape, parts = packed_columns(pair.module, info, fmt, self.checkpoint.tensors)
        except SourceError as error:
            self.findings.problems.append(f"{self.checkpoint.where[info.name].shard}: {error.message}")
            return
        source = TensorInfo(pair.name, info.dtype, shape)
        self.codes[pair.name] = self.stored[info.name] = Weight(pair.module, "", source, shape, format=fmt, parts=parts)

    def _add_rows(self, pair: CodesAndScale, fmt: Format, scale: TensorInfo | None) -> None:
        """Add a weight whose codes lie in rows, and check the other tensors of its format."""
        info = pair.codes
        module = pair.module
        shape = (*info.shape[:-1], fmt.number.count(info.shape[-1]))
        matrix = (shape[-2], shape[-1])

        missing = f"scale: {fmt.scale_of(pair.name)} is missing"
        scale = self._check_part(info, scale, missing, fmt.scale_dtypes, fmt.scale_shapes(shape))

        parts = [scale]
        if fmt.global_scale is not None:
            missing = f"global scale: {fmt.shared_scale_name(module)} is missing"
            parts.append(self._check_part(info, pair.global_scale, missing, ("F32",), ((1,), ())))
        if (zeros := fmt.zero_points(module, matrix)) is not None:
            missing = f"zero points: {zeros.name} is missing"
            parts.append(self._check_part(info, pair.zero_points, missing, (zeros.dtype,), (zeros.shape,)))

        self.scales.update(other.name for other in pair.companions if other.name.endswith(".input_global_scale"))

        input_scale = None
        if fmt.input_scale is not None:
            name = f"{module}.{fmt.input_scale}"
            missing = f"{name}, but its activations are scaled under it"
            if fmt.static:
                missing = f"{name}, but its activations are static"
            input_scale = self._check_part(info, self.checkpoint.tensors.get(name), missing, FLOATS, ((), (1,)))

        for expected, _ in fmt.constant_tensors(module, matrix):
            tensor = self.checkpoint.tensors.get(expected.name)
            self._check_part(info, tensor, f"shape: {expected.name} is missing", (expected.dtype,), (expected.shape,))

        if scale is None:
            parts = []
        self.codes[pair.name] = self.stored[info.name] = Weight(
            module,
            "",
            TensorInfo(pair.name, info.dtype, shape),
            matrix,
            format=fmt,
            parts=(info, *filter(None, parts)),
            input_scale=input_scale,
        )

    def _check_part(
        self,
        info: TensorInfo,
        tensor: TensorInfo | None,
        missing: str,
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> TensorInfo | None:
        """Return a scale, zero points or a shape if its dtype and shape are right; else add a problem."""
        if tensor is None:
            self.findings.problems.append(f"{self._place(info.name)} has no {missing}")
            return None

        self.scales.add(tensor.name)
        if self.findings.ours:
            # openquant leaves scales in float16 if the source has them so.
            allowed = {"BF16": ("BF16", "F16")}
            dtypes = allowed.get(dtypes[0], dtypes[:1])

        if tensor.dtype in dtypes and tensor.shape in shapes:
            return tensor

        expected = f"{join_words(dtypes, 'or')} {join_words([str(list(shape)) for shape in shapes], 'or')}"
        self.findings.problems.append(
            f"{self._place(tensor.name)} is {describe(tensor)}, for {describe(info)} it must be {expected}"
        )
        return None


def check_strays(headers: Headers, findings: Findings) -> None:
    """Check that every scale belongs to a quantized weight, and that there are no tensors which engines refuse.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems and notes, one line each, are added to it.
    """
    refused = unread_tensors(headers.checkpoint.tensors, headers.codes.values())

    for info in headers.checkpoint.tensors.values():
        owner = headers.owner(info.name)
        if owner is None or info.name in headers.scales or info.name in refused:
            continue

        weight = headers.checkpoint.tensors.get(owner)
        if weight is None and owner not in headers.codes:
            findings.problems.append(f"{headers.place(info.name)} has no weight: {owner} is missing")
        elif weight is not None and owner not in headers.codes:
            findings.problems.append(f"{headers.place(info.name)} is the scale of {owner}, which is {weight.dtype}")
        elif (fmt := headers.codes[owner].format) and not info.name.endswith(".input_scale"):
            findings.problems.append(
                f"{headers.place(info.name)} is not the scale of {owner}: the config asks for {fmt.scale_of(owner)}"
            )

    for name in refused:
        findings.problems.append(f"{headers.place(name)} is a tensor that engines refuse to load")


# Values of float16, in which engines run models too, are 2^-24 to 2^16 in size. FP8 codes reach 2^9, so its scales are
# 2^-33 to 2^7; bfloat16 has larger values. A stored global scale is the reciprocal, so the range is symmetric.
SMALLEST = 2.0**-33
LARGEST = 2.0**33
# How many times larger one scale of fused layers may be if another tool chose it, which may have seen other tokens for
# each layer. openquant leaves as much room for activations that no text showed (Format.scale_inputs).
ROOM = 2.0


def check_static_scales(
    headers: Headers, values: Mapping[str, float], cache: Iterable[str], chosen: Mapping[str, float]
) -> list[str]:
    """Find static scales that are not those that were chosen, differ in fused layers, or fit no activations.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        values: the value of each sound scale that is one number, by tensor name.
        cache: names of the scales of the KV cache.
        chosen: the values that the run chose, by the name of the first tensor of layers that share one; empty if
            another tool made the directory.

    Returns:
        One line for each problem.
    """
    modules = {
        weight.module: weight.input_scale.name
        for weight in headers.codes.values()
        if weight.input_scale is not None and weight.input_scale.name in values
    }
    names = [*modules.values(), *(name for name in cache if name in values)]
    chosen = {**chosen, **_shared_with(headers, modules, chosen)}

    changed = [
        f"{headers.place(name)} is {values[name]:g}, the run that made it chose {chosen[name]:g}"
        for name in names
        if name in chosen and values[name] != chosen[name]
    ]

    others = {module: name for module, name in modules.items() if name not in chosen}
    differing = _differing_in_fused(headers, values, others)

    impossible = [
        f"{headers.place(name)} is {values[name]:g}, and activations need {SMALLEST:.1g} to {LARGEST:.1g}"
        for name in names
        if name not in chosen and not SMALLEST <= values[name] <= LARGEST
    ]
    return [*changed, *differing, *impossible]


def _shared_with(headers: Headers, modules: Mapping[str, str], chosen: Mapping[str, float]) -> dict[str, float]:
    """Return the values of all layers that share a chosen one, by tensor name."""
    entry = headers.entry
    if entry is None or not chosen:
        return {}
    keys = scale_sharing_keys(entry, modules, entry.fused_groups(headers.layers(entry)))
    value_of = {keys[module]: chosen[name] for module, name in modules.items() if name in chosen}
    return {modules[module]: value_of[key] for module, key in keys.items() if key in value_of}


def _differing_in_fused(headers: Headers, values: Mapping[str, float], modules: Mapping[str, str]) -> list[str]:
    """Report fused layers whose scales differ by more than ROOM."""
    entry = headers.entry

    if entry is None:
        return []

    problems = []
    for members in sorted(set(entry.fused_groups(headers.layers(entry)).values())):
        names = [modules[module] for module in members if module in modules]
        if not names:
            continue

        low = min(names, key=values.__getitem__)
        high = max(names, key=values.__getitem__)
        if values[high] > ROOM * values[low]:
            problems.append(
                f"{headers.place(low)} is {values[low]:g} and {high} is {values[high]:g}, but their layers read the "
                "same input"
            )

    return problems


# The values of "dynamic" and "strategy" in a kv_cache_scheme whose scales are stored and checked here.
_STATIC_PER_TENSOR = (False, "tensor")


def cached_in_fp8(headers: Headers) -> bool:
    """Return whether the config says that the KV cache is FP8. A kv_cache_scheme with invalid settings gives False.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
    """
    try:
        return says_fp8_cache(headers.quantization.settings)
    except UsageError:
        return False


def cache_tensors(headers: Headers) -> list[TensorInfo]:
    """Return all KV-cache scales of a directory, whether its config has a kv_cache_scheme or not.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.

    Returns:
        Name, dtype and shape of each tensor; the values are not read.
    """
    tensors = headers.checkpoint.tensors
    return [tensors[name] for name in _names(cache_scales(tensors))]


def check_cache(headers: Headers, findings: Findings) -> None:
    """Check, if the KV cache is FP8, that every layer with a KV cache of its own has valid scales.

    Args:
        headers: the quantized directory, as its config and the headers of its shards describe it.
        findings: problems and notes, one line each, are added to it.
    """
    try:
        fp8_cache = says_fp8_cache(headers.quantization.settings)
    except UsageError as error:
        # Of other methods than those that openquant writes, engines may read what openquant does not.
        if headers.quantization.checked_as_engines_load:
            findings.problems.append(error.message)
        else:
            findings.notes.append(error.message)
        return

    if not fp8_cache:
        return

    scheme = headers.quantization.settings.get("kv_cache_scheme")
    if (
        not findings.ours
        and isinstance(scheme, dict)
        and (scheme.get("dynamic"), scheme.get("strategy", "tensor")) != _STATIC_PER_TENSOR
    ):
        findings.notes.append("KV-cache scales are dynamic or per head: they are not checked")
        return

    for info in cache_tensors(headers):
        if info.dtype not in FLOATS or info.shape not in ((), (1,)):
            findings.problems.append(f"{headers.place(info.name)} is {describe(info)}, a KV-cache scale is one number")

    try:
        layers = _cache_layers(headers)
    except PlanError as error:
        findings.notes.append(f"KV-cache scales are not checked: {error.message}")
        return

    names_by_layer = cache_scales(headers.checkpoint.tensors)
    for number, path in layers.items():
        for last, stored_name in zip(SCALES, names_by_layer.pop(number, (None, None)), strict=True):
            name = f"{path}.{last}"
            if stored_name is None:
                findings.problems.append(
                    f"{name} is missing: config.json says that the KV cache is FP8. Without the scale engines use 1, "
                    "and transformers an arbitrary value"
                )
            elif stored_name != name and findings.ours:
                findings.problems.append(f"{headers.place(stored_name)} must be called {name}")

    for name in _names(names_by_layer):
        findings.problems.append(f"{headers.place(name)} is a scale of a layer that has no KV cache of its own")


def _cache_layers(headers: Headers) -> dict[int, str]:
    """The attention module of each layer that has a KV cache of its own, by layer number."""
    tensors = map(headers.as_unquantized, headers.checkpoint.tensors.values())
    modules = [tensor.name.removesuffix(".weight") for tensor in tensors]
    if headers.entry is None:
        raise PlanError(f"{headers.checkpoint.architecture} is not a known architecture", "")
    return find_cached_attentions(modules, headers.entry, text_config(headers.checkpoint, headers.entry.model))


def _names(scales: Mapping[int, tuple[str | None, str | None]]) -> list[str]:
    """The tensor names of KV-cache scales by layer, each once; keys and values may share a scale."""
    return list(dict.fromkeys(name for pair in scales.values() for name in pair if name))
