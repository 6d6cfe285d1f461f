"""Schemes: each is a Format, the config that says it, and what engines do with it.

All schemes are here, as data. A new one is an entry, and a Number in numbers.py if its numeric format is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from ..errors import UsageError
from ..patterns import join_words
from ..version import CITED, VLLM
from .format import Format, GlobalScale, Scale
from .hardware import meaning_of
from .numbers import E2M1, E4M3, INT2, INT3, INT4, INT5, INT6, INT7, INT8, INT8_WORDS, Number, without_fp8_cache

# The format of a compressed-tensors config whose groups each name a format of their own.
MIXED_FORMAT = "mixed-precision"


@final
@dataclass(frozen=True)
class Scheme:
    """One way to store quantized layers.

    Attributes:
        name: name that the user types.
        format: how a layer is stored.
        suffix: ending of the default output directory, different for each scheme.
        settings: the `quantization_config` of config.json without its ignore list.
        ignored_keys: keys of the ignore list.
        engines: engines that serve the scheme.
        transformers: what transformers does wrong with it; None if it loads it.
        transformers_experts: what transformers does wrong with its experts; None if it loads them.
        expert_engines: engines that load routed experts in this scheme.
        head: whether engines load an output head in this scheme.
        embedding: whether vLLM loads an input embedding in this scheme. No other engine loads it in any.
        fallback: scheme for layers that engines cannot load in this one; None leaves them unquantized.
        follows_rows: whether an engine that reorders a layer's rows reorders the scales correctly too.
        max_weight: largest weight that engines can load; None if only the numeric format limits it.
        searches_scales: whether the scale of each group is searched for, by the least squared error (kernels.py); else
            it is made from the group's largest weight.
        clip_ratios: ratios of a group's largest weight from which a search makes candidate scales.
        weighs_by_size: whether the squared error of a weight counts in a search as much as the weight is large, where
            no calibration says how much inputs count. In few bits clipping then spares the weights that matter most.
        default_input_global_scale: the global scale of activations where neither a calibration nor the source has one;
            None for formats without it.
        group_size: number of inputs that share a scale, if the user may choose it: "128", or "channel" for all.
        tag: tag of the model card: "fp8-block".
        notes: what the plan tells of hardware and quality.
    """

    name: str
    format: Format
    suffix: str
    settings: dict[str, Any] = field(hash=False)
    ignored_keys: tuple[str, ...] = ("ignore",)
    engines: tuple[str, ...] = ("vLLM", "SGLang")
    transformers: str | None = None
    transformers_experts: str | None = None
    expert_engines: tuple[str, ...] = ("vLLM", "SGLang")
    head: bool = False
    embedding: bool = False
    fallback: Scheme | None = None
    follows_rows: bool = True
    max_weight: float | None = None
    searches_scales: bool = False
    clip_ratios: tuple[float, ...] = (1.0,)
    weighs_by_size: bool = False
    default_input_global_scale: float | None = None
    group_size: str | None = None
    tag: str = ""
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What shares a scale: "one scale per 128x128 block"."""
        return self.format.title

    @property
    def method(self) -> str:
        """The `quant_method` of config.json, which the user calls the format: "fp8" or "compressed-tensors"."""
        return str(self.settings["quant_method"])

    @property
    def activations(self) -> str:
        """What the model card says of activations: ", dynamic activations"; "" if the scheme's title says it."""
        if self.format.static:
            return ""
        if self.rounds_activations:
            return ", dynamic activations"
        return ", activations as they are"

    @property
    def rounds_activations(self) -> bool:
        """Whether engines round activations too, as the config says."""
        return bool(self.group.get("input_activations", True))

    def input_scale(self, absmax: float | None) -> float:
        """Return the activation scale that is stored for a layer.

        Args:
            absmax: largest absolute activation that a calibration met; None without one.
        """
        if absmax is not None:
            return self.format.scale_inputs(absmax)
        assert self.default_input_global_scale is not None
        return self.default_input_global_scale

    @property
    def scale_format(self) -> str:
        """The value of --scale-format: "float" or "ue8m0"."""
        if self.format.scale.power_of_two:
            return "ue8m0"
        return "float"

    @property
    def largest(self) -> float:
        """The largest absolute weight that engines can load."""
        if self.max_weight is None:
            return self.format.number.largest_weight
        return self.max_weight

    @property
    def asymmetric(self) -> bool:
        """Whether groups have zero points."""
        return self.format.zero_point is not None

    @property
    def unsearched(self) -> Scheme:
        """This scheme with scales made from each group's largest weight, without a search."""
        return replace(self, searches_scales=False, fallback=self.fallback and self.fallback.unsearched)

    def config(
        self, ignored: list[str] | None, targets: Mapping[Scheme, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """Return the `quantization_config` of config.json.

        Args:
            ignored: the ignore list; None to compare with configs whose list was replaced by None.
            targets: by scheme, the names of layers that a group must name: those of other schemes, and those of this
                one that its targets do not cover. None or empty without any; only for compressed-tensors.
        """
        config = {**self.settings, **dict.fromkeys(self.ignored_keys, ignored)}
        if targets:
            by_scheme = {self: [*self.group["targets"], *targets.get(self, ())]}
            by_scheme |= {scheme: list(names) for scheme, names in targets.items() if scheme != self}
            groups = [{**scheme.group, "targets": names} for scheme, names in by_scheme.items()]
            formats = [scheme.settings["format"] for scheme in by_scheme]
            if len({*formats}) > 1:
                groups = [{**group, "format": name} for group, name in zip(groups, formats, strict=True)]
                config["format"] = MIXED_FORMAT
            config["config_groups"] = {f"group_{number}": group for number, group in enumerate(groups)}
        return config

    @property
    def group(self) -> dict[str, Any]:
        """The config group of this scheme in the compressed-tensors format; empty for the "fp8" format."""
        return dict(self.settings.get("config_groups", {}).get("group_0", {}))


def _fp8(block: list[int] | None) -> dict[str, Any]:
    """Keys of vLLM, layers/quantization/fp8.py:106-168."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}


# As `scale_fmt`: transformers 5.10.1 and later check that key and show it in their error, where without it they compute
# with scales that nothing filled. vLLM and SGLang look for "ue8m0" there only.
TRANSFORMERS_REFUSAL = "one scale per tensor: transformers misreads this; use vLLM or SGLang"


# vLLM reads the first, transformers the second, SGLang either.
_FP8_IGNORED = ("ignored_layers", "modules_to_not_convert")


def _compressed_tensors(
    weights: dict[str, Any], activations: dict[str, Any] | None, format: str = "float-quantized", type: str = "float"
) -> dict[str, Any]:
    """Keys of vLLM, layers/quantization/compressed_tensors/compressed_tensors.py:309-372."""
    number = {"num_bits": 8, "type": type, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "dynamic": False, **weights},
        "input_activations": None if activations is None else {**number, "dynamic": True, **activations},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


TENSOR = Scheme(
    "tensor",
    # Tensor names of both fp8 schemes: vLLM, layers/quantization/fp8.py:282-346. It passes per-tensor weights
    # through float16 at load (layers/quantization/utils/w8a8_utils.py:44-106): below a scale of 2^-15 its subnormals
    # change small codes, above a weight of 65504 it overflows.
    Format(E4M3, (None, None), Scale("weight_scale", axes=0, floor=2.0**-15)),
    suffix="-FP8",
    settings={**_fp8(None), "scale_fmt": TRANSFORMERS_REFUSAL},
    ignored_keys=_FP8_IGNORED,
    transformers="refuses per-tensor `fp8` checkpoints, and before 5.10.1 misreads them without an error",
    max_weight=65504.0,
    tag="fp8-tensor",
)
CHANNEL = Scheme(
    "channel",
    # vLLM has a parameter of float32 [out, 1] (layers/quantization/utils/fp8_utils.py:1396-1437), loaded as it
    # is, neither rounded again nor through float16 (fp8_utils.py:1482-1497).
    Format(E4M3, (1, None), Scale("weight_scale")),
    suffix="-FP8-dynamic",
    settings=_compressed_tensors({"strategy": "channel"}, {"strategy": "token"}),
    head=True,
    tag="fp8-channel",
)
BLOCK = Scheme(
    "block",
    Format(E4M3, (128, 128), Scale("weight_scale_inv")),
    suffix="-FP8-W128",
    settings=_fp8([128, 128]),
    ignored_keys=_FP8_IGNORED,
    tag="fp8-block",
)

TENSOR_COMPRESSED = replace(
    TENSOR,
    # compressed-tensors initialises [1] (quantization/lifecycle/initialize.py); vLLM takes [] as well.
    format=replace(TENSOR.format, scale=replace(TENSOR.format.scale, axes=1)),
    suffix="-FP8-CT",
    settings=_compressed_tensors({"strategy": "tensor"}, {"strategy": "token"}),
    ignored_keys=("ignore",),
    transformers=None,
    # vLLM wants a static scale for the activations of such experts
    # (compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py:58-104).
    expert_engines=(),
    head=True,
    fallback=CHANNEL,
)
BLOCK_COMPRESSED = replace(
    BLOCK,
    format=replace(BLOCK.format, scale=Scale("weight_scale")),
    suffix="-FP8-W128-CT",
    settings=_compressed_tensors(
        {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
    ),
    ignored_keys=("ignore",),
    # transformers integrations/compressed_tensors.py: an expert's codes times its scales, which only rows fit.
    transformers_experts="does not multiply experts by the scales of blocks",
    # vLLM models/llama4.py:805-844 reorders a `weight_scale` as if each row of the weight had one there.
    follows_rows=False,
    # head: vLLM layers/vocab_parallel_embedding.py:467-501 asks for a scale of as many rows as the vocabulary.
    fallback=CHANNEL,
)
# vLLM rounds float32 block scales up to powers of two, and the codes once more, where DeepGEMM wants UE8M0
# (layers/quantization/utils/fp8_utils.py:1096-1214): with these scales that changes no value. On disk they are float32.
BLOCK_UE8M0 = replace(
    BLOCK,
    format=replace(BLOCK.format, scale=Scale("weight_scale_inv", power_of_two=True)),
    suffix="-FP8-W128-UE8M0",
    settings={**BLOCK.settings, "scale_fmt": "ue8m0"},
)
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MXFP8 = Scheme(
    "mxfp8",
    # vLLM compressed_tensors/schemes/compressed_tensors_w8a8_mxfp8.py:45-85: uint8 [out, in / 32]. The floor is
    # the smallest exponent field but one; the smallest of all is a subnormal float32.
    Format(E4M3, (1, 32), Scale("weight_scale", dtype="U8", power_of_two=True)),
    suffix="-MXFP8",
    settings=_compressed_tensors(_MX, _MX, "mxfp8-quantized"),
    engines=("vLLM",),
    expert_engines=("vLLM",),
    transformers_experts="does not multiply experts by the scales of blocks",
    head=True,
    tag="fp8-mxfp8",
)

INT8_W8A8 = Scheme(
    "int8",
    # vLLM compressed_tensors/schemes/compressed_tensors_w8a8_int8.py:40-90: int8 [out, in], float32 [out, 1].
    Format(INT8, (1, None), Scale("weight_scale")),
    suffix="-INT8",
    settings=_compressed_tensors({"strategy": "channel"}, {"strategy": "token"}, "int-quantized", "int"),
    # SGLang compressed_tensors.py:979-987 has them for NPUs only.
    expert_engines=("vLLM",),
    transformers_experts="does not read experts in INT8",
    head=True,
    tag="int8-w8a8",
    notes=(
        # vLLM kernels/linear/scaled_mm/cutlass.py:34-41 claims every GPU, and fails on sm100 and sm120.
        "INT8 activations are for NVIDIA GPUs from Turing to Hopper, in SGLang from Ampere on, and in vLLM for AMD's "
        "GPUs and for CPUs; "
        f"{VLLM} fails with them on Blackwell, where FP8 is as small",
        "where some channels of the activations are outliers, one INT8 scale for each token loses more than FP8 does: "
        "measure the result; --smooth 0.5 folds them into weights, --scheme int8-weights leaves activations alone",
    ),
)
INT8_W8A16 = Scheme(
    "int8-weights",
    # vLLM compressed_tensors/schemes/compressed_tensors_wNa16.py:160-237: words int32 [out, in / 4], and scales
    # in the model's dtype, which rounds those of float32. One for each row: Marlin, Machete and SGLang's Marlin take
    # that as well as one for 128 inputs, and ranks that share rows then need no whole groups.
    Format(INT8_WORDS, (1, None), Scale("weight_scale", dtype="BF16"), codes="weight_packed", shape=True),
    suffix="-INT8-W8A16",
    settings=_compressed_tensors({"strategy": "channel"}, None, "pack-quantized", "int"),
    transformers_experts="does not read experts in INT8",
    head=True,
    embedding=True,
    tag="int8-w8a16",
    notes=(
        "activations stay as they are, which keeps outlier channels and is the most exact of all schemes (KL 0.005 to "
        "the source on SmolLM2-135M, as --scheme int8 0.037); it saves memory, not arithmetic: for NVIDIA GPUs "
        "from Turing on, in SGLang from Ampere on, in vLLM for AMD's GPUs too, and not for CPUs",
    ),
)

MXFP4 = Scheme(
    "mxfp4",
    # vLLM compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py:50-95: uint8 [out, in / 2] and
    # [out, in / 32]. Scales as in compressed-tensors (quantization/utils/mxfp_utils.py:round_to_power_2), which
    # clamps up to 7 to 6; where nothing is clamped, or up to 8, the error is larger.
    Format(E2M1, (1, 32), Scale("weight_scale", dtype="U8", power_of_two=True, clip_limit=7), codes="weight_packed"),
    suffix="-MXFP4",
    settings=_compressed_tensors({"num_bits": 4, **_MX}, None, "mxfp4-pack-quantized"),
    engines=("vLLM",),
    expert_engines=("vLLM",),
    transformers_experts="does not read experts in FP4",
    head=True,
    tag="fp4-mxfp4",
    notes=(
        "four bits with power-of-two scales lose more than other schemes do (KL 0.46 to the source on SmolLM2-135M, "
        "where one FP8 scale per row has 0.03)",
        # It asks for a kernel with MXFP4 activations whatever the config says of them
        # (compressed_tensors/compressed_tensors.py:811): FlashInfer's on sm100 and later, Marlin's before.
        f"weights alone are stored in FP4, but on Blackwell {VLLM} rounds activations of dense layers to MXFP4 too; "
        "from Ampere to Hopper they stay as they are",
    ),
)

_NV: dict[str, Any] = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_NV |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn")
NVFP4 = Scheme(
    "nvfp4",
    # vLLM compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py:40-85: uint8 [out, in / 2], E4M3
    # [out, in / 16], float32 [1] for each fused layer, of which the largest is used for all (:101-112). The floor is
    # the smallest E4M3, under which a scale would be zero.
    Format(
        E2M1,
        (1, 16),
        Scale("weight_scale", dtype="F8_E4M3", floor=2.0**-9),
        codes="weight_packed",
        global_scale=GlobalScale("weight_global_scale"),
    ),
    suffix="-NVFP4",
    settings=_compressed_tensors(_NV, None, "nvfp4-pack-quantized"),
    transformers_experts="does not read experts in FP4",
    head=True,
    # The largest weight becomes 6 or 4, since the step between them is wide, or the scale is one step beside these.
    # Squared error in percent of that without a search: ratios 1 and 1.5 alone 91, these 86.1, 70 ratios 85.4. Scales
    # of at most 256 instead of 448, which leave room for ratio 1.5 in the group of the largest weight, change nothing.
    searches_scales=True,
    clip_ratios=(1.0, 0.92, 1.07, 1.43, 1.55),
    tag="fp4-nvfp4",
    notes=(
        "weights alone are stored in FP4 and activations stay as they are: it saves memory, not arithmetic (KL 0.18 "
        "to the source on SmolLM2-135M, with --gptq 0.07, where mxfp4 has 0.46 and one FP8 scale per row 0.03); "
        "for NVIDIA GPUs from Turing on, in SGLang from Ampere on",
    ),
)


# compressed-tensors, compressors/pack_quantized/base.py:24.
ZERO_POINT = "weight_zero_point"
# It builds the expected shapes on the meta device, where that package leaves zero points unpacked (base.py:83-91).
_NO_ZERO_POINTS = (
    f"cannot load zero points ({CITED['transformers']} with compressed-tensors {CITED['compressed-tensors']}; "
    "5.19 with 0.17 does)"
)


# The scales of 16 activations are multiplied by it before they are rounded to E4M3. With 1, groups with a largest value
# of 0.09 to 2688 lose nothing, and those below 0.006 become 0. On text with examples/tiny-qwen3, whose largest
# activation is 67, every value from 1/16 to 64 gives a KL of 0.022; 256 gives twice as much, and 1/256 fifty times.
_INPUT_GLOBAL_SCALE = 1.0
NVFP4_W4A4 = replace(
    NVFP4,
    name="nvfp4-w4a4",
    # vLLM compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py:85-90: float32 [1] for each fused layer,
    # of which the largest is used for all (:114-128).
    format=replace(NVFP4.format, input_global_scale=GlobalScale("input_global_scale")),
    suffix="-NVFP4-W4A4",
    settings=_compressed_tensors(_NV, {**_NV, "dynamic": "local"}, "nvfp4-pack-quantized"),
    default_input_global_scale=_INPUT_GLOBAL_SCALE,
    tag="fp4-nvfp4-w4a4",
    notes=(
        "activations are rounded to FP4 too, 16 of them under one scale: KL 0.37 to the source on SmolLM2-135M, "
        "as --scheme nvfp4 0.18; it computes in FP4 on Blackwell, on older GPUs engines leave "
        "activations as they are, which is --scheme nvfp4",
        f"without a calibration, and where the source has none, input_global_scale is {_INPUT_GLOBAL_SCALE:g}: "
        "activations beyond 2688 are clipped, groups of them below 0.006 become 0",
    ),
)


_COARSE = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
# With more codes, clipping gains less, and the place of the largest weights between two codes counts more.
_FINE = (1.05, 1.035, 1.02, 1.005, 0.99, 0.975, 0.96)
_LOSS = "KL {} to the source on SmolLM2-135M in groups of 64, where int8-weights has 0.005 and int4 0.32"
# Integers in words that share a scale by groups of inputs: the clip ratios, and what the plan tells of quality.
_WIDTHS = {
    INT7: (_FINE, _LOSS.format("0.007")),
    INT6: (_FINE, _LOSS.format("0.026")),
    INT5: ((1.03, 1.005, 0.98, 0.955, 0.93, 0.905, 0.88), _LOSS.format("0.10")),
    INT4: (
        _COARSE,
        "four bits lose more than eight: KL 0.33 to the source on SmolLM2-135M, with --awq --gptq 0.10, as "
        "--scheme channel 0.03; activations stay as they are: for NVIDIA GPUs from Turing on, in SGLang from "
        "Ampere on, and in vLLM for AMD's GPUs and for CPUs",
    ),
    INT3: (
        _COARSE,
        "three bits are for --gptq: KL 1.2 to the source on SmolLM2-135M in groups of 64, where int4 has 0.32",
    ),
    INT2: (
        (1.0, 0.9, 0.8, 0.7, 0.63, 0.57, 0.52),
        "two bits left nothing of SmolLM2-135M: KL 6.7 to the source in groups of 64, where int4 has 0.32",
    ),
}


def _notes(number: Number, quality: str, asymmetric: bool) -> tuple[str, ...]:
    """Return what the plan tells of quality and hardware."""
    notes = [quality]
    if number != INT4:
        notes.append(
            f"activations stay as they are; {VLLM} has one kernel for {number.bits} bits (Humming, for NVIDIA GPUs "
            "from Turing on), none for CPUs and AMD"
        )
    if 32 % number.bits:
        notes.append(f"transformers reads {number.bits} bits with compressed-tensors 0.18 or later")
    if asymmetric:
        notes.append(f"transformers {_NO_ZERO_POINTS}")
    return tuple(notes)


def _by_groups(number: Number, asymmetric: bool = False) -> tuple[Scheme, ...]:
    """Return the schemes of a width with groups of 128, of 64 and of 32 inputs, and with one scale for each row."""
    clip_ratios, quality = _WIDTHS[number]
    # Only of INT4 engines have several kernels.
    engines = ("vLLM", "SGLang") if number == INT4 else ("vLLM",)

    def scheme(size: int | None, suffix: str, fallback: Scheme | None = None) -> Scheme:
        weights: dict[str, Any] = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
        if asymmetric:
            weights["symmetric"] = False
        experts = engines if number == INT4 or size else ()

        return Scheme(
            number.name,
            Format(
                number,
                (1, size),
                Scale("weight_scale", dtype="BF16", of_zeros=2.0**-7),
                codes="weight_packed",
                shape=True,
                zero_point=ZERO_POINT if asymmetric else None,
            ),
            suffix=f"-{number.title}{'-asym' if asymmetric else ''}{suffix}",
            settings=_compressed_tensors({"num_bits": number.bits, **weights}, None, "pack-quantized", "int"),
            head=True,
            embedding=not asymmetric and 32 % number.bits == 0,
            fallback=fallback,
            searches_scales=True,
            clip_ratios=clip_ratios,
            weighs_by_size=number in (INT4, INT3),
            group_size="channel" if size is None else str(size),
            tag=f"{number.name}-w{number.bits}a16",
            notes=_notes(number, quality, asymmetric),
            transformers=_NO_ZERO_POINTS if asymmetric else None,
            engines=engines,
            expert_engines=tuple(engine for engine in experts if engine != "SGLang") if asymmetric else experts,
        )

    of_32 = scheme(32, "-G32")
    return scheme(128, "", of_32), scheme(64, "-G64", of_32), of_32, scheme(None, "-channel")


# By bits; the first has the default group.
INTEGER_GROUPS = {number.bits: _by_groups(number) for number in _WIDTHS}
INT4_W4A16, INT4_W4A16_64, INT4_W4A16_32, INT4_W4A16_CHANNEL = INTEGER_GROUPS[4]
# With zero points.
SHIFTED_GROUPS = {number.bits: _by_groups(number, asymmetric=True) for number in _WIDTHS}
INT4_SHIFTED, INT4_SHIFTED_64, INT4_SHIFTED_32, INT4_SHIFTED_CHANNEL = SHIFTED_GROUPS[4]
ASYMMETRIC = tuple(scheme for groups in SHIFTED_GROUPS.values() for scheme in groups)

# With static activation scales, from a calibration or from the source.
TENSOR_STATIC = replace(
    TENSOR,
    format=replace(TENSOR.format, static=True),
    suffix="-FP8-static",
    settings={**TENSOR.settings, "activation_scheme": "static"},
)
TENSOR_COMPRESSED_STATIC = replace(
    TENSOR_COMPRESSED,
    format=replace(TENSOR_COMPRESSED.format, static=True),
    suffix="-FP8-static-CT",
    settings=_compressed_tensors({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    expert_engines=("vLLM", "SGLang"),
    fallback=None,
)

# The default of each name.
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        *(TENSOR, CHANNEL, BLOCK, MXFP8, INT8_W8A8, INT8_W8A16),
        *(groups[0] for groups in INTEGER_GROUPS.values()),
        *(MXFP4, NVFP4, NVFP4_W4A4),
    )
}
VARIANTS = (
    *SCHEMES.values(),
    *(TENSOR_COMPRESSED, BLOCK_COMPRESSED, BLOCK_UE8M0),
    *(scheme for groups in INTEGER_GROUPS.values() for scheme in groups[1:]),
)
STATIC = (TENSOR_STATIC, TENSOR_COMPRESSED_STATIC)


def find_scheme(
    name: str,
    format: str | None = None,
    scale_format: str | None = None,
    activation_scheme: str = "dynamic",
    group_size: str | None = None,
    asymmetric: bool = False,
) -> Scheme:
    """Find the scheme that options ask for.

    Args:
        name: name of the scheme, as for `--scheme`: "tensor", "block", "nvfp4".
        format: "fp8" or "compressed-tensors"; the scheme's default if None.
        scale_format: "float" or "ue8m0" (powers of two); the scheme's default if None.
        activation_scheme: "dynamic" or "static": whether engines compute the scale of activations or it is stored.
        group_size: inputs that share a scale: "32", "64", "128" or "channel" for all; the scheme's default if None.
        asymmetric: whether groups have zero points.

    Returns:
        The scheme: the format of weights, and what config.json says of it.

    Raises:
        UsageError: no scheme has these options.
    """
    if name not in SCHEMES:
        raise UsageError(f"{name} is not a scheme", f"choose one of {', '.join(SCHEMES)}")

    format = format or SCHEMES[name].method

    of_name = [scheme for scheme in (ASYMMETRIC if asymmetric else VARIANTS) if scheme.name == name]
    if not of_name:
        raise UsageError(f"--scheme {name} has no zero points", "use --scheme int4, or leave --asymmetric out")

    of_format = [scheme for scheme in of_name if scheme.method == format]
    if not of_format:
        formats = " or ".join(dict.fromkeys(scheme.method for scheme in of_name))
        raise UsageError(f"the format {format} has no scheme {name}", f"use --format {formats}")

    matching = [scheme for scheme in of_format if scale_format in (None, scheme.scale_format)]
    if not matching:
        raise UsageError(
            f"--scheme {name} has no {scale_format} scales in the {format} format",
            "leave --scale-format out: block in the fp8 format has both kinds, mxfp8 and mxfp4 ue8m0, all else float",
        )

    sizes = [scheme.group_size for scheme in matching if scheme.group_size]
    matching = [scheme for scheme in matching if group_size in (None, scheme.group_size)]
    if not matching and sizes:
        raise UsageError(
            f"--scheme {name} has no groups of {group_size}", f"use --group-size {join_words(sizes, 'or')}"
        )
    if not matching:
        raise UsageError(
            f"--scheme {name} has no groups of a size to choose", "use --scheme int4, or leave --group-size out"
        )

    if activation_scheme == "dynamic":
        return matching[0]

    static = next((scheme for scheme in STATIC if (scheme.name, scheme.method) == (name, format)), None)
    if activation_scheme != "static" or static is None:
        raise UsageError(
            f"--scheme {name} has no {activation_scheme} activations",
            "use --scheme tensor for static ones, or leave --activation-scheme out",
        )

    return static


# Schemes that one config can mix. MXFP8 has a format of its own, and we have no engine that could test the mixture.
MIXED = (
    *(TENSOR_COMPRESSED, CHANNEL, BLOCK_COMPRESSED, INT8_W8A8, INT8_W8A16),
    *(scheme for groups in INTEGER_GROUPS.values() for scheme in groups),
    *(*ASYMMETRIC, MXFP4, NVFP4, NVFP4_W4A4),
)


# Schemes of what --scheme keep writes, which one config can mix. MXFP8 and static activations were not served in one.
KEPT_SCHEMES = (*MIXED, TENSOR_COMPRESSED_STATIC, MXFP8)


def find_others(
    scheme: Scheme, scheme_for: Mapping[str, str], group_size: str | None = None, asymmetric: bool = False
) -> tuple[tuple[str, Scheme], ...]:
    """Find the schemes of --scheme-for.

    Args:
        scheme: the scheme of all other layers.
        scheme_for: by pattern over full module names (openquant/patterns.py), the name of a scheme:
            {"model.layers.{0,3}.mlp.down_proj": "channel"}.
        group_size: "32", "64", "128" or "channel" for schemes whose group size can be chosen; their default if None.
        asymmetric: whether schemes that can have zero points have them.

    Returns:
        Pairs of a pattern and its scheme, in the order of `scheme_for`.

    Raises:
        UsageError: one config cannot mix the schemes, or no scheme to mix has that name and group size.
    """
    if scheme_for and scheme not in MIXED:
        raise UsageError(
            f"--scheme-for does not go with --scheme {scheme.name} in the {scheme.method} format: all layers are alike",
            "use --scheme channel, or --scheme tensor or block with --format compressed-tensors",
        )

    others = []

    for pattern, name in scheme_for.items():
        named = [other for other in MIXED if other.name == name]
        sized = [other for other in named if not group_size or other.group_size in (None, group_size)]
        match = next((other for other in sized if other.asymmetric == asymmetric), next(iter(sized), None))

        if match is None:
            known = ", ".join(dict.fromkeys(other.name for other in MIXED))
            hint = meaning_of(name) or f"choose one of {known}"
            raise UsageError(f"--scheme-for {pattern}={name}: {name} is not a scheme to mix", hint)
        others.append((pattern, match))

    return tuple(others)


def as_written(scheme: Scheme, settings: Mapping[str, Any]) -> bool:
    """Return whether a config is what openquant writes for a scheme, alone or mixed with others, with
    or without an FP8 KV cache.

    Args:
        scheme: the scheme of all layers that no group names.
        settings: a `quantization_config` with None in place of each ignore list.
    """
    stripped = without_fp8_cache(without_targets(settings))
    groups = stripped.get("config_groups")
    kinds = [
        next((kind for kind in (scheme, *KEPT_SCHEMES) if _is_group_of(group, kind)), None)
        for group in (groups.values() if isinstance(groups, dict) else ())
    ]
    written = without_targets(scheme.config(None, {kind: () for kind in kinds if kind is not None}))
    return None not in kinds and kinds[:1] in ([], [scheme]) and stripped == written


def _is_group_of(group: Any, scheme: Scheme) -> bool:
    """Return whether a config group without its targets is that of a scheme, alone or mixed with others."""
    written = {key: value for key, value in scheme.group.items() if key != "targets"}
    return group in (written, {**written, "format": scheme.settings.get("format")})


def without_targets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings`, the quantization_config of a config.json, without the targets of its groups."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict):
        return dict(settings)
    stripped = {
        name: {key: value for key, value in group.items() if key != "targets"} if isinstance(group, dict) else group
        for name, group in groups.items()
    }
    return {**settings, "config_groups": stripped}
