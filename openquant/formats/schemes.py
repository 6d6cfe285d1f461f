"""Number formats: what a quantized layer is stored as, and how its scales follow from its largest weights.

A weight is stored as float8_e4m3fn codes and float32 scales with `weight = code * scale`. e4m3fn has 4
exponent and 3 mantissa bits: 448 is its largest value, 2^-9 its smallest, and it has no infinity.
What shares a scale is a rectangle of the matrix, so the scales of a layer form a grid. All arithmetic here and in the
kernels has that grid; only what is stored may have fewer axes.
Nothing here knows of files, models or devices; numpy is all it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..files.tensors import TensorInfo

CODE_DTYPE = "F8_E4M3"
# vLLM 0.32.0, layers/quantization/fp8.py:331-346.
INPUT_SCALE = "input_scale"
CODE_MAX = np.float32(448)
# What 448 stands for under the largest power of two by which no code is beyond bfloat16.
LARGEST_WEIGHT = 448 * 2.0**119

Floats = npt.NDArray[np.float32]
# Rows and columns that share a scale; None is the whole axis.
Group = tuple[int | None, int | None]


@dataclass(frozen=True)
class Scheme:
    """One way to store quantized layers.

    Attributes:
        name: what the user types.
        group: rows and columns that share a scale; all of both is one scale per joined set.
        scale_name: last part of the scale's tensor name.
        scale_axes: axes of the stored scale: 2 for the grid, 1 or 0 for a single one.
        scale_dtype: what it is stored as: "F32", or "U8" for the exponent field of a power of two (E8M0).
        scale_floor: the smallest scale of anything that is not all zero.
        suffix: ending of the default output directory.
        title: how the plan and the model card call it.
        settings: the `quantization_config` of config.json, but for the layers that stay as they are.
        ignored_keys: where it lists those.
        engines: who serves it.
        transformers: what transformers does wrong with it; None if it reads it.
        package: what transformers needs to read it; None for nothing else.
        transformers_experts: what it does wrong with experts; None if it reads them.
        experts: whether engines load routed experts that are stored so.
        head: whether they load an output head that is.
        fallback: what layers are stored as that engines cannot load in this one; None to leave them unquantized.
        follows_rows: whether an engine that reorders a layer's rows gets its scales right.
        power_of_two: whether scales are rounded up to a power of two.
        static: whether each layer also has an input_scale, by which engines quantize its activations.
        largest: the largest weight that engines can load.
    """

    name: str
    group: Group
    scale_name: str
    scale_axes: int
    scale_floor: float
    suffix: str
    title: str
    settings: dict[str, Any] = field(hash=False)
    ignored_keys: tuple[str, ...]
    engines: tuple[str, ...]
    transformers: str | None = None
    package: str | None = None
    transformers_experts: str | None = None
    experts: bool = True
    head: bool = False
    fallback: Scheme | None = None
    follows_rows: bool = True
    power_of_two: bool = False
    scale_dtype: str = "F32"
    static: bool = False
    largest: float = LARGEST_WEIGHT

    @property
    def format(self) -> str:
        """What the user calls the serialization: the `quant_method` of config.json."""
        return str(self.settings["quant_method"])

    @property
    def scale_format(self) -> str:
        """What the user calls the numbers that scales are."""
        return "ue8m0" if self.power_of_two else "float"

    @property
    def shared(self) -> bool:
        """Whether joined layers have one scale."""
        return self.group == (None, None)

    def outputs(self, module: str, shape: tuple[int, int]) -> tuple[TensorInfo, ...]:
        """The code tensor [out, in] and the scale tensor of one layer, and that of its activations if it has one."""
        codes = TensorInfo(f"{module}.weight", CODE_DTYPE, shape)
        scale = TensorInfo(f"{module}.{self.scale_name}", self.scale_dtype, self.scale_shape(shape))
        static = (scale._replace(name=f"{module}.{INPUT_SCALE}"),) if self.static else ()
        return codes, scale, *static

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the stored scale of a weight [out, in]."""
        grid = grid_of(self.group, shape)
        assert all(size == 1 for size in grid[self.scale_axes :])
        return grid[: self.scale_axes]

    def misfit(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot be stored; None if it can."""
        height, width = (size or 1 for size in self.group)
        if shape[0] % height == 0 and shape[1] % width == 0:
            return None
        return f"{shape[0]} x {shape[1]} does not divide into {height} x {width} blocks"

    def scale(self, absmax: Floats) -> Floats:
        """float32 scale of each group, given its largest absolute weight; always finite and above zero.

        Up to `largest`, it makes no code overflow bfloat16.
        """
        scale = np.maximum(absmax / CODE_MAX, np.float32(self.scale_floor))
        if self.power_of_two:
            # Carries into the exponent unless the mantissa is zero. The division before is exact enough: the quotient
            # exceeds a power of two just where absmax exceeds 448 times that.
            scale = ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)
        return np.where(absmax == 0, np.float32(1), scale).astype(np.float32)

    def stored(self, scale: Floats) -> npt.NDArray[Any]:
        """Scales as they are written."""
        return (scale.view(np.uint32) >> 23).astype(np.uint8) if self.scale_dtype == "U8" else scale

    def config(self, ignored: list[str], targets: Mapping[Scheme, Sequence[str]] | None = None) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            ignored: what it lists as unquantized.
            targets: names of layers that are stored in other schemes, or that no group covers unless it names them.
        """
        config = {**self.settings, **dict.fromkeys(self.ignored_keys, ignored)}
        if targets:
            others = [scheme for scheme in targets if scheme != self]
            groups = [{**self._group, "targets": [*self._group["targets"], *targets.get(self, ())]}]
            groups += [{**scheme._group, "targets": list(targets[scheme])} for scheme in others]
            config["config_groups"] = {f"group_{number}": group for number, group in enumerate(groups)}
        return config

    @property
    def _group(self) -> dict[str, Any]:
        return dict(self.settings["config_groups"]["group_0"])


def grid_of(group: Group, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many groups a matrix [out, in] has along each axis; those at its edges may be smaller."""
    (rows, cols), (height, width) = shape, group
    return -(-rows // (height or rows)), -(-cols // (width or cols))


def _fp8(block: list[int] | None) -> dict[str, Any]:
    """Keys of vLLM 0.32.0, layers/quantization/fp8.py:106-168."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}


# As `scale_fmt`: transformers 5.10.1 and later check that key and show it in their error, where without it they compute
# with scales that nothing filled. vLLM 0.32.0 and SGLang 0.5.23 look for "ue8m0" there only.
TRANSFORMERS_REFUSAL = "one scale per tensor: transformers misreads this; use vLLM or SGLang"


# vLLM reads the first, transformers the second, SGLang either.
_FP8_IGNORED = ("ignored_layers", "modules_to_not_convert")


def _compressed_tensors(
    weights: dict[str, Any], activations: dict[str, Any], format: str = "float-quantized"
) -> dict[str, Any]:
    """Keys of vLLM 0.32.0, layers/quantization/compressed_tensors/compressed_tensors.py:309-372."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "dynamic": False, **weights},
        "input_activations": {**number, "dynamic": True, **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


# A float32 scale below 2^-126 would be subnormal, and zero where those are flushed.
_SMALLEST = 2.0**-126

TENSOR = Scheme(
    "tensor",
    (None, None),
    # Tensor names of both fp8 schemes: vLLM 0.32.0, layers/quantization/fp8.py:282-346.
    "weight_scale",
    scale_axes=0,
    # vLLM 0.32.0 passes per-tensor weights through float16 at load (layers/quantization/utils/w8a8_utils.py:44-106):
    # below a scale of 2^-15 its subnormals change small codes, above a weight of 65504 it overflows.
    scale_floor=2.0**-15,
    largest=65504.0,
    suffix="-FP8",
    title="one scale per tensor",
    settings={**_fp8(None), "scale_fmt": TRANSFORMERS_REFUSAL},
    ignored_keys=_FP8_IGNORED,
    engines=("vLLM", "SGLang"),
    transformers="refuses per-tensor `fp8` checkpoints, and before 5.10.1 misreads them without an error",
)
CHANNEL = Scheme(
    "channel",
    (1, None),
    # vLLM 0.32.0 has a parameter of float32 [out, 1] (layers/quantization/utils/fp8_utils.py:1396-1437).
    "weight_scale",
    scale_axes=2,
    # Loaded as it is, neither rounded again nor through float16 (fp8_utils.py:1482-1497).
    scale_floor=_SMALLEST,
    suffix="-FP8-dynamic",
    title="one scale per output row",
    settings=_compressed_tensors({"strategy": "channel"}, {"strategy": "token"}),
    ignored_keys=("ignore",),
    engines=("vLLM", "SGLang"),
    package="compressed-tensors",
    head=True,
)
BLOCK = Scheme(
    "block",
    (128, 128),
    "weight_scale_inv",
    scale_axes=2,
    scale_floor=_SMALLEST,
    suffix="-FP8-W128",
    title="one scale per 128x128 block",
    settings=_fp8([128, 128]),
    ignored_keys=_FP8_IGNORED,
    engines=("vLLM", "SGLang"),
)

TENSOR_COMPRESSED = replace(
    TENSOR,
    # compressed-tensors initialises [1] (quantization/lifecycle/initialize.py, version 0.20); vLLM takes [] as well.
    scale_axes=1,
    suffix="-FP8-CT",
    settings=_compressed_tensors({"strategy": "tensor"}, {"strategy": "token"}),
    ignored_keys=("ignore",),
    engines=("vLLM", "SGLang"),
    transformers=None,
    package="compressed-tensors",
    # vLLM 0.32.0 wants a static scale for the activations of such experts
    # (compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py:58-104).
    experts=False,
    head=True,
)
BLOCK_COMPRESSED = replace(
    BLOCK,
    scale_name="weight_scale",
    suffix="-FP8-W128-CT",
    settings=_compressed_tensors(
        {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
    ),
    ignored_keys=("ignore",),
    engines=("vLLM", "SGLang"),
    package="compressed-tensors",
    # transformers 5.23 integrations/compressed_tensors.py: an expert's codes times its scales, which only rows fit.
    transformers_experts="does not multiply experts by the scales of blocks",
    # vLLM 0.32.0 models/llama4.py:805-844 reorders a `weight_scale` as if each row of the weight had one there.
    follows_rows=False,
    # head: vLLM 0.32.0 layers/vocab_parallel_embedding.py:467-501 asks for a scale of as many rows as the vocabulary.
    fallback=CHANNEL,
)
# vLLM 0.32.0 rounds float32 block scales up to powers of two, and the codes once more, where DeepGEMM wants UE8M0
# (layers/quantization/utils/fp8_utils.py:1096-1214): with these scales that changes no value. On disk they are float32.
BLOCK_UE8M0 = replace(
    BLOCK,
    suffix="-FP8-W128-UE8M0",
    title="one power-of-two scale per 128x128 block",
    settings={**BLOCK.settings, "scale_fmt": "ue8m0"},
    power_of_two=True,
)
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MXFP8 = Scheme(
    "mxfp8",
    (1, 32),
    # vLLM 0.32.0 compressed_tensors/schemes/compressed_tensors_w8a8_mxfp8.py:45-85: uint8 [out, in / 32].
    "weight_scale",
    scale_axes=2,
    scale_dtype="U8",
    # The smallest exponent field but one; the smallest of all is a subnormal float32.
    scale_floor=_SMALLEST,
    suffix="-MXFP8",
    title="one power-of-two scale per 32 inputs of a row",
    settings=_compressed_tensors(_MX, _MX, "mxfp8-quantized"),
    ignored_keys=("ignore",),
    engines=("vLLM",),
    package="compressed-tensors",
    transformers_experts="does not multiply experts by the scales of blocks",
    head=True,
    power_of_two=True,
)

# With the scales of activations that calibration found: nothing here calibrates, but a source may have them.
TENSOR_STATIC = replace(
    TENSOR,
    suffix="-FP8-static",
    title="one scale per tensor, static activations",
    settings={**TENSOR.settings, "activation_scheme": "static"},
    static=True,
)
TENSOR_COMPRESSED_STATIC = replace(
    TENSOR_COMPRESSED,
    suffix="-FP8-static-CT",
    title="one scale per tensor, static activations",
    settings=_compressed_tensors({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    experts=True,
    static=True,
)

# No scheme, but what a directory of plain weights is: nothing is quantized.
PLAIN = Scheme(
    "bf16",
    (1, None),
    "",
    scale_axes=0,
    scale_floor=0.0,
    suffix="-BF16",
    title="bfloat16 weights",
    settings={},
    ignored_keys=(),
    engines=("vLLM", "SGLang"),
)

# The default of each name.
SCHEMES = {scheme.name: scheme for scheme in (TENSOR, CHANNEL, BLOCK, MXFP8)}
VARIANTS = (*SCHEMES.values(), TENSOR_COMPRESSED, BLOCK_COMPRESSED, BLOCK_UE8M0)
STATIC = (TENSOR_STATIC, TENSOR_COMPRESSED_STATIC)


def find_scheme(
    name: str, format: str | None = None, scale_format: str | None = None, activation_scheme: str = "dynamic"
) -> Scheme:
    """The scheme of a name, stored in a format with scales of a kind; None is the default of either.

    Args:
        name: a key of SCHEMES.
        format: "fp8" or "compressed-tensors".
        scale_format: "float" or "ue8m0".
        activation_scheme: "dynamic" or "static".

    Raises:
        UsageError: there is none.
    """
    if name not in SCHEMES:
        raise UsageError(f"{name} is not a scheme", f"choose one of {', '.join(SCHEMES)}")
    format = format or SCHEMES[name].format
    of_name = [scheme for scheme in VARIANTS if scheme.name == name]
    of_format = [scheme for scheme in of_name if scheme.format == format]
    if not of_format:
        known = " or ".join(scheme.format for scheme in of_name)
        raise UsageError(f"the format {format} has no scheme {name}", f"use --format {known}")
    found = [scheme for scheme in of_format if scale_format in (None, scheme.scale_format)]
    if not found:
        raise UsageError(
            f"--scheme {name} has no {scale_format} scales in the {format} format",
            "leave --scale-format out: block in the fp8 format has float and ue8m0 scales, mxfp8 ue8m0, all else float",
        )
    if activation_scheme == "dynamic":
        return found[0]
    static = next((scheme for scheme in STATIC if (scheme.name, scheme.format) == (name, format)), None)
    if activation_scheme != "static" or static is None:
        raise UsageError(
            f"--scheme {name} has no {activation_scheme} activations",
            "use --scheme tensor for static ones, or leave --activation-scheme out",
        )
    return static


# What one config can hold together: MXFP8 has a format of its own, and nothing here could run the mixture.
MIXED = (TENSOR_COMPRESSED, CHANNEL, BLOCK_COMPRESSED)


def find_others(scheme: Scheme, scheme_for: Mapping[str, str]) -> tuple[tuple[str, Scheme], ...]:
    """The scheme of each pattern over module names, beside that of all other layers.

    Raises:
        UsageError: a name without a scheme, or schemes that no config holds together.
    """
    if scheme_for and scheme not in MIXED:
        raise UsageError(
            f"--scheme-for does not go with --scheme {scheme.name} in the {scheme.format} format: all layers are alike",
            "use --scheme channel, or --scheme tensor or block with --format compressed-tensors",
        )
    others = []
    for pattern, name in scheme_for.items():
        found = next((other for other in MIXED if other.name == name), None)
        if found is None:
            known = ", ".join(other.name for other in MIXED)
            raise UsageError(f"--scheme-for {pattern}={name}: {name} is not a scheme to mix", f"choose one of {known}")
        others.append((pattern, found))
    return tuple(others)


def recognise(settings: Mapping[str, Any]) -> Scheme | None:
    """The scheme of which this is the config, whatever some layers have instead; None if it is none of ours.

    Args:
        settings: a `quantization_config`, None in place of each list of unquantized modules.
    """
    found = _told_apart(settings)
    for scheme in (*VARIANTS, *STATIC):
        told, groups = _told_apart({**scheme.settings, **dict.fromkeys(scheme.ignored_keys)})
        known = [*groups, *(group for other in MIXED for group in _told_apart(other.settings)[1])]
        # Older outputs of ours have no sentence for transformers.
        older = {key: value for key, value in told.items() if value != TRANSFORMERS_REFUSAL}
        if found[0] in (told, older) and found[1][:1] == groups and all(group in known for group in found[1]):
            return scheme
    return None


def _told_apart(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """A config without its groups, and its groups without their targets."""
    groups = settings.get("config_groups")
    return (
        {key: value for key, value in settings.items() if key != "config_groups"},
        [
            {key: value for key, value in group.items() if key != "targets"} if isinstance(group, dict) else None
            for group in (groups.values() if isinstance(groups, dict) else ())
        ],
    )
