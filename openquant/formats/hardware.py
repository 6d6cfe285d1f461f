"""On which GPUs and CPUs engines compute each scheme, and in which numbers they multiply there.

All of it is read from the source of the versions in `version.CITED`: which kernels an engine has and what each asks of
the device. None of these GPUs was at hand, so nothing here says how fast a kernel is. An architecture may still be
refused (plan/engines.py), and so may a layer whose shape no kernel takes.

    >>> kernel = find_kernel("vLLM", "channel", "Ampere")
    >>> kernel.arithmetic, kernel.in_hardware
    ('16 bits', False)

GPUs are found by name, each with its memory and generation. Memory is what CUDA reports (`torch.cuda.mem_get_info`),
which is what engines take their share of. It is 0.5 to 4 % less than the driver's own figure. That of H100 and H200 was
measured; the others are what users report, rounded down, with ECC on where the card is sold with it. Below 16 GB they
report 5.79 GiB (RTX 2060), 7.75 (4060), 7.78 (3070), 10.76 (2080 Ti) and 11.75 (3060); others there have the size of
NVIDIA's specifications less as much. A name of several sizes, such as RTX 3060, is that of the most common one.

    find_gpu("rtx-4090")        # GPU("RTX 4090", 24, 25232932864, "Ada")
    nearest_gpus("4091")        # ("RTX 4090", ...)

The names of schemes are here for the command line, which must not load numpy; the schemes themselves are in schemes.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

# NVIDIA's generations: the first compute capability of each, times ten. Blackwell is both 10.x (B200) and 12.x (RTX 50,
# RTX PRO). The kernels of one are often not those of the other, but for each of KERNELS both have some: at 12.x vLLM
# takes FlashInfer's CUTLASS for NVFP4 (kernels/linear/nvfp4/flashinfer.py:201-207), where 10.x can take CuTe DSL.
GENERATIONS = {"Turing": 75, "Ampere": 80, "Ada": 89, "Hopper": 90, "Blackwell": 100}
# AMD's. MI300 stands for gfx942 and gfx950, RDNA 3 for gfx110x and RDNA 4 for gfx120x, the Radeons that vLLM names.
AMD = ("MI300", "RDNA 4", "RDNA 3")
# CPU is x86 with AVX-512.
HARDWARE = (*GENERATIONS, *AMD, "CPU")
ENGINES = ("vLLM", "SGLang")
# What --for names.
ENGINES_FOR = {"vllm": ("vLLM",), "sglang": ("SGLang",), "both": ENGINES}

# "16 bits": codes are decoded and multiplied in bfloat16 or float16, and activations stay as they are. "emulated":
# activations are rounded as the scheme says, and products are in 16 bits all the same.
Arithmetic = Literal["FP8", "INT8", "FP4", "16 bits", "emulated"]


@dataclass(frozen=True)
class Kernel:
    """How an engine computes layers of some schemes on some hardware.

    Attributes:
        engine: one of ENGINES.
        schemes: names of schemes, as in SCHEMES.
        hardware: some of HARDWARE.
        arithmetic: the numbers that are multiplied.
        source: where the engine says so: a file below `vllm/` or `sglang/srt/`, and lines.
        layers: which layers it is for: "all", or "dense" or "experts" alone.
        needs: what must be installed, or the CPU have; None if nothing.
    """

    engine: str
    schemes: tuple[str, ...]
    hardware: tuple[str, ...]
    arithmetic: Arithmetic
    source: str
    layers: Literal["all", "dense", "experts"] = "all"
    needs: str | None = None

    @property
    def in_hardware(self) -> bool:
        """Whether the device multiplies the scheme's own numbers, and not the 16 bits that they are decoded to."""
        return self.arithmetic in ("FP8", "INT8", "FP4")


_NVIDIA = tuple(GENERATIONS)
_SINCE = {name: _NVIDIA[number:] for number, name in enumerate(_NVIDIA)}
_FP8 = ("tensor", "channel", "block")
_OTHER_WIDTHS = ("int7", "int6", "int5", "int3", "int2")
_LAYERS = "model_executor/layers"
_LINEAR = "model_executor/kernels/linear"
_EXPERTS = f"{_LAYERS}/fused_moe/experts"
_CT = f"{_LAYERS}/quantization/compressed_tensors"
_SGLANG_CT = "layers/quantization/compressed_tensors/schemes"

_vllm = partial(Kernel, "vLLM")
_sglang = partial(Kernel, "SGLang")

# The first that fits counts.
KERNELS = (
    # vLLM. CUTLASS has one scale per tensor or row from Ada on. For blocks Marlin comes before Triton in the list
    # (kernels/linear/__init__.py:478-488), so that on Ada dense layers in blocks are decoded; experts are not.
    _vllm(("tensor", "channel"), _SINCE["Ada"], "FP8", f"{_CT}/schemes/compressed_tensors_w8a8_fp8.py:83-85"),
    _vllm(("block",), _SINCE["Hopper"], "FP8", f"{_LINEAR}/scaled_mm/deep_gemm.py:47-52"),
    _vllm(("block",), _SINCE["Ada"], "FP8", "platforms/cuda.py:585-586", layers="experts"),
    _vllm(_FP8, _NVIDIA, "16 bits", f"{_LAYERS}/quantization/utils/marlin_utils_fp8.py:30-31"),
    _vllm(_FP8, ("MI300", "RDNA 4"), "FP8", "platforms/rocm.py:1184-1185"),
    _vllm(("channel",), ("CPU",), "emulated", f"{_LINEAR}/scaled_mm/pytorch.py:38-39", layers="dense"),
    _vllm(("tensor",), ("CPU",), "16 bits", f"{_LINEAR}/scaled_mm/cpu.py:353-361", "dense", "AMX"),
    _vllm(("block",), ("CPU",), "16 bits", f"{_LINEAR}/scaled_mm/cpu.py:236-244", needs="AMX"),
    _vllm(("mxfp8",), ("Blackwell",), "FP8", f"{_LINEAR}/mxfp8/flashinfer.py:50-53"),
    _vllm(("mxfp8",), _NVIDIA, "16 bits", f"{_CT}/schemes/compressed_tensors_w8a8_mxfp8.py:37-38"),
    _vllm(("mxfp8",), AMD, "emulated", f"{_LINEAR}/mxfp8/emulation.py:22-25"),
    # CUTLASS claims Blackwell and fails there (kernels/linear/scaled_mm/cutlass.py:34-41); Triton's experts do not.
    _vllm(("int8",), _NVIDIA[:-1], "INT8", f"{_CT}/schemes/compressed_tensors_w8a8_int8.py:35-37", "dense"),
    _vllm(("int8",), _NVIDIA, "INT8", f"{_EXPERTS}/triton_moe.py:130-144", layers="experts"),
    _vllm(("int8",), AMD, "INT8", f"{_EXPERTS}/triton_moe.py:130-144"),
    _vllm(("int8",), ("CPU",), "INT8", f"{_LINEAR}/scaled_mm/cpu.py:33-40", layers="dense"),
    _vllm(("int8",), ("CPU",), "INT8", f"{_EXPERTS}/cpu_moe.py:999-1004", "experts", "AMX"),
    # Marlin, and Machete on Hopper. On AMD experts must have groups (compressed_tensors_moe_wna16.py:125-127).
    _vllm(("int8-weights", "int4"), _NVIDIA, "16 bits", f"{_LINEAR}/mixed_precision/marlin.py:32-33"),
    _vllm(
        ("int8-weights",), AMD, "16 bits", f"{_LINEAR}/mixed_precision/conch.py:14-48", "dense", "conch-triton-kernels"
    ),
    _vllm(("int4",), AMD, "16 bits", f"{_LINEAR}/mixed_precision/triton_w4a16.py:302-321"),
    _vllm(("int4",), ("CPU",), "16 bits", f"{_LINEAR}/mixed_precision/cpu.py:22-60", layers="dense"),
    _vllm(("int4",), ("CPU",), "16 bits", f"{_EXPERTS}/cpu_moe.py:840-846", "experts", "AMX"),
    _vllm(_OTHER_WIDTHS, _NVIDIA, "16 bits", f"{_LINEAR}/mixed_precision/humming.py:26-36", needs="humming-kernels"),
    _vllm(("nvfp4-w4a4",), ("Blackwell",), "FP4", f"{_LINEAR}/nvfp4/flashinfer.py:119-126"),
    _vllm(("nvfp4", "nvfp4-w4a4"), _NVIDIA, "16 bits", f"{_CT}/schemes/compressed_tensors_w4a4_nvfp4.py:35-36"),
    _vllm(("nvfp4", "nvfp4-w4a4"), AMD, "emulated", f"{_LINEAR}/nvfp4/emulation.py:18-26"),
    # Dense layers get MXFP4 activations there whatever the config says (compressed_tensors.py:811); experts get Marlin.
    _vllm(("mxfp4",), ("Blackwell",), "FP4", f"{_LINEAR}/mxfp4/flashinfer.py:25-30", layers="dense"),
    _vllm(("mxfp4",), _SINCE["Ampere"], "16 bits", f"{_CT}/schemes/compressed_tensors_w4a4_mxfp4.py:46-47", "dense"),
    _vllm(("mxfp4",), _NVIDIA, "16 bits", f"{_EXPERTS}/marlin_moe.py:587-589", layers="experts"),
    _vllm(("mxfp4",), AMD, "emulated", f"{_LINEAR}/mxfp4/emulation.py:57-74", "dense", "amd-quark"),
    # SGLang. Its list of experts on Ampere was not read: FP8 experts count from Ada on.
    _sglang(_FP8, _SINCE["Ada"], "FP8", f"{_SGLANG_CT}/compressed_tensors_w8a8_fp8.py:60-62"),
    _sglang(_FP8, ("Ampere",), "16 bits", "layers/quantization/fp8_utils.py:2794-2798", layers="dense"),
    _sglang(_FP8, ("MI300",), "FP8", "layers/quantization/fp8.py:817-824"),
    _sglang(("block",), ("CPU",), "16 bits", "layers/quantization/fp8.py:826-829", needs="AMX"),
    _sglang(("int8",), _NVIDIA[1:-1], "INT8", f"{_SGLANG_CT}/compressed_tensors_w8a8_int8.py:97-99", "dense"),
    _sglang(("int8-weights", "int4"), _SINCE["Ampere"], "16 bits", f"{_SGLANG_CT}/compressed_tensors_wNa16.py:94-96"),
    _sglang(("nvfp4-w4a4",), ("Blackwell",), "FP4", f"{_SGLANG_CT}/compressed_tensors_w4a4_nvfp4.py:37-38"),
    _sglang(
        ("nvfp4", "nvfp4-w4a4"), _SINCE["Ampere"], "16 bits", f"{_SGLANG_CT}/compressed_tensors_w4a16_nvfp4.py:135-137"
    ),
)


def find_kernel(engine: str, scheme: str, hardware: str | None, experts: bool = False) -> Kernel | None:
    """Find how an engine computes layers of a scheme.

    Args:
        engine: one of ENGINES.
        scheme: name of the scheme.
        hardware: one of HARDWARE; None for hardware that is older.
        experts: whether the layers are routed experts.

    Returns:
        The kernel; None if the engine has none for it.
    """
    layers = ("all", "experts" if experts else "dense")
    return next(
        (
            kernel
            for kernel in KERNELS
            if kernel.engine == engine
            and scheme in kernel.schemes
            and hardware in kernel.hardware
            and kernel.layers in layers
        ),
        None,
    )


def arithmetic_on(engine: str, layers: Iterable[tuple[str, bool]]) -> dict[str, list[str]]:
    """Say in which numbers an engine multiplies layers, and on which hardware.

    Args:
        engine: one of ENGINES.
        layers: the scheme of layers by name, and whether they are routed experts.

    Returns:
        Hardware on which the engine has kernels for all of them, by what they are multiplied in: {"FP8": ["Ada",
        "Hopper", "Blackwell", "MI300"], "16 bits": ["Turing", "Ampere"], "emulated": ["CPU"]}. What is multiplied in
        the scheme's own numbers comes first. Keys may have more, such as "16 bits with AMX".
    """
    wanted = list(layers)
    places: dict[str, list[str]] = {}
    in_hardware: set[str] = set()

    for hardware in HARDWARE:
        kernels = [find_kernel(engine, scheme, hardware, experts) for scheme, experts in wanted]
        present = [kernel for kernel in kernels if kernel is not None]
        if not present or len(present) < len(kernels):
            continue

        numbers = " and ".join(dict.fromkeys(kernel.arithmetic for kernel in present))
        needs = " and ".join(dict.fromkeys(kernel.needs for kernel in present if kernel.needs))
        if needs:
            numbers += f" with {needs}"
        places.setdefault(numbers, []).append(hardware)

        if any(kernel.in_hardware for kernel in present):
            in_hardware.add(numbers)

    return {key: places[key] for key in sorted(places, key=lambda key: key not in in_hardware)}


def schemes_on(engines: Iterable[str], hardware: str, experts: bool = False) -> tuple[str, ...]:
    """Return the schemes that engines have kernels for.

    Args:
        engines: some of ENGINES, all of which must have one.
        hardware: one of HARDWARE.
        experts: whether routed experts are quantized too, which need kernels of their own.

    Returns:
        Names of schemes, as in SCHEMES; none if one of the engines computes nothing there.
    """
    kinds = {False, experts}
    wanted = tuple(engines)
    return tuple(
        name
        for name in SCHEME_NAMES
        if all(find_kernel(engine, name, hardware, kind) for engine in wanted for kind in kinds)
    )


@dataclass(frozen=True)
class GPU:
    """A GPU that users name.

    Attributes:
        name: its name: "RTX 4090".
        gigabytes: memory as it is advertised; None for the CPU.
        memory: bytes that CUDA reports; None for the CPU, whose memory is the machine's.
        hardware: one of HARDWARE in hardware.py, which says what engines have kernels for.
    """

    name: str
    gigabytes: int | None
    memory: int | None
    hardware: str


def _gpus(gigabytes: int, gib: float, hardware: str, *names: str) -> list[GPU]:
    """Make GPUs that differ in name alone. `gib`: what CUDA reports, in units of 2^30 bytes."""
    return [GPU(name, gigabytes, int(gib * 2**30), hardware) for name in names]


GPUS = (
    *_gpus(16, 14.5, "Turing", "T4"),
    *_gpus(6, 5.7, "Turing", "RTX 2060"),
    *_gpus(8, 7.7, "Turing", "RTX 2060 Super", "RTX 2070", "RTX 2070 Super", "RTX 2080", "RTX 2080 Super"),
    *_gpus(11, 10.7, "Turing", "RTX 2080 Ti"),
    *_gpus(8, 7.7, "Ampere", "RTX 3050"),
    *_gpus(12, 11.7, "Ampere", "RTX 3060"),
    *_gpus(8, 7.7, "Ampere", "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti"),
    *_gpus(10, 9.7, "Ampere", "RTX 3080"),
    *_gpus(12, 11.7, "Ampere", "RTX 3080 Ti"),
    *_gpus(24, 23.5, "Ampere", "RTX 3090", "RTX 3090 Ti"),
    *_gpus(24, 21.9, "Ampere", "A10", "A10G"),
    *_gpus(48, 44.3, "Ampere", "A40"),
    *_gpus(48, 47.4, "Ampere", "A6000"),
    *_gpus(40, 39.3, "Ampere", "A100-40"),
    *_gpus(80, 79.1, "Ampere", "A100-80"),
    *_gpus(8, 7.6, "Ada", "RTX 4060", "RTX 4060 Ti 8GB"),
    *_gpus(16, 15.5, "Ada", "RTX 4060 Ti 16GB"),
    *_gpus(12, 11.6, "Ada", "RTX 4070", "RTX 4070 Super", "RTX 4070 Ti"),
    *_gpus(16, 15.6, "Ada", "RTX 4070 Ti Super", "RTX 4080", "RTX 4080 Super"),
    *_gpus(24, 23.5, "Ada", "RTX 4090"),
    *_gpus(24, 22.0, "Ada", "L4"),
    *_gpus(48, 44.3, "Ada", "L40S"),
    *_gpus(48, 44.4, "Ada", "RTX 6000 Ada"),
    *_gpus(80, 79.1, "Hopper", "H100"),
    *_gpus(141, 139.8, "Hopper", "H200"),
    *_gpus(8, 7.4, "Blackwell", "RTX 5060", "RTX 5060 Ti 8GB"),
    *_gpus(16, 15.4, "Blackwell", "RTX 5060 Ti 16GB"),
    *_gpus(12, 11.4, "Blackwell", "RTX 5070"),
    *_gpus(16, 15.4, "Blackwell", "RTX 5070 Ti", "RTX 5080"),
    *_gpus(32, 31.3, "Blackwell", "RTX 5090"),
    *_gpus(96, 94.9, "Blackwell", "RTX PRO 6000"),
    *_gpus(192, 178.3, "Blackwell", "B200"),
    *_gpus(192, 191.6, "MI300", "MI300X"),
    *_gpus(20, 19.9, "RDNA 3", "RX 7900 XT"),
    *_gpus(24, 23.9, "RDNA 3", "RX 7900 XTX"),
    *_gpus(16, 15.9, "RDNA 4", "RX 9060 XT 16GB", "RX 9070", "RX 9070 XT"),
    *_gpus(32, 31.8, "RDNA 4", "R9700"),
    GPU("CPU", None, None, "CPU"),
)

# What drivers, shops and clouds add to a name.
_ADDED = re.compile(
    r"nvidia|geforce|tesla|rtx|amd|instinct|radeon([ -]ai[ -]pro)?|rx|generation|blackwell|workstation|server|edition"
    r"|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]"
)
_APPLE = re.compile(r"(apple|mac|m[1-9]\d?(pro|max|ultra)?$)")


def _key(name: str) -> str:
    return _ADDED.sub("", name.lower()).removesuffix("gb")


_BY_KEY = {
    key: gpu
    for gpu in GPUS
    # "H100 80GB" is the H100.
    for key in (_key(gpu.name), *([f"{_key(gpu.name)}{gpu.gigabytes}"] if gpu.gigabytes else []))
}


def find_gpu(name: str) -> GPU | None:
    """Find a GPU by its name.

    Args:
        name: such as "4090", "rtx-4090", "NVIDIA A100-SXM4-80GB" or "cpu". Case, spaces, dashes, makers and packages do
            not matter.

    Returns:
        The GPU; None if none has this name.
    """
    return _BY_KEY.get(_key(name))


def nearest_gpus(name: str) -> tuple[str, ...]:
    """Return the names of GPUs that have a name as a part, or else are most like it; none if all are far from it.

    Args:
        name: the name of no GPU.
    """
    key = _key(name)
    names = {_key(gpu.name): gpu.name for gpu in GPUS}
    keys = [known for known in names if len(key) > 2 and key in known]
    return tuple(names[known] for known in (keys or difflib.get_close_matches(key, names))[:3])


def is_apple(name: str) -> bool:
    """Whether a name is that of a chip or computer of Apple: "m3-max", "Apple M2", "macbook"."""
    return _APPLE.match(_key(name)) is not None


class SchemeInfo(NamedTuple):
    """What help texts and the command line need of a scheme.

    Attributes:
        stored: what is stored: "one scale per output row".
        suffix: ending of the default output directory.
        mixes: whether one config can hold it together with other schemes.
    """

    stored: str
    suffix: str
    mixes: bool = True


# For callers' type checkers; tests/test_options.py compares them with the choices of options.
SchemeName: TypeAlias = Literal[
    "tensor", "channel", "block", "mxfp8", "int8", "int8-weights", "int7", "int6", "int5", "int4", "int3", "int2",
    "mxfp4", "nvfp4", "nvfp4-w4a4", "none", "keep"
]  # fmt: skip
FormatName: TypeAlias = Literal["fp8", "compressed-tensors"]
ScaleFormat: TypeAlias = Literal["float", "ue8m0"]
ActivationScheme: TypeAlias = Literal["dynamic", "static"]
CacheScheme: TypeAlias = Literal["auto", "fp8"]
GroupSize: TypeAlias = Literal["32", "64", "128", "channel", 32, 64, 128]

# Chosen in place of a scheme, it leaves all weights as they are.
UNCHANGED = "none"
# Chosen in place of a scheme, it keeps the codes and scales of a quantized source.
KEPT = "keep"
KEPT_SUFFIX = "-CT"
SCHEME_NAMES: dict[str, SchemeInfo] = {
    "tensor": SchemeInfo("one scale per tensor", "-FP8"),
    "channel": SchemeInfo("one per output row", "-FP8-dynamic"),
    "block": SchemeInfo("one per 128x128 block", "-FP8-W128"),
    "mxfp8": SchemeInfo("one per 32 inputs of a row", "-MXFP8", mixes=False),
    "int8": SchemeInfo("INT8 weights and activations, one scale per output row", "-INT8"),
    "int8-weights": SchemeInfo("INT8 weights alone, one scale per output row", "-INT8-W8A16"),
    "int7": SchemeInfo("integers of 7 bits, scales as in int4", "-INT7"),
    "int6": SchemeInfo("integers of 6 bits, scales as in int4", "-INT6"),
    "int5": SchemeInfo("integers of 5 bits, scales as in int4", "-INT5"),
    "int4": SchemeInfo("INT4 weights alone, one scale per 128 inputs of a row", "-INT4"),
    "int3": SchemeInfo("integers of 3 bits, scales as in int4", "-INT3"),
    "int2": SchemeInfo("integers of 2 bits, scales as in int4", "-INT2"),
    "mxfp4": SchemeInfo("FP4 weights alone, one power-of-two scale per 32 inputs of a row", "-MXFP4"),
    "nvfp4": SchemeInfo("FP4 weights alone, one scale per 16 inputs of a row and a global scale", "-NVFP4"),
    "nvfp4-w4a4": SchemeInfo("FP4 weights and activations, scales as in nvfp4", "-NVFP4-W4A4"),
}

GGUF = (
    "openquant writes directories for vLLM and SGLang; GGUF and its types are llama.cpp's, for Ollama and LM Studio "
    "too: its convert_hf_to_gguf.py and llama-quantize make it"
)
# Words that people bring from other tools, and what they are here.
_MEANINGS = {
    **dict.fromkeys(("quantize", "quantise", "convert"), "openquant compress MODEL does that"),
    "fp8": "fp8 is --scheme tensor, the default, or channel",
    "fp8_dynamic": "fp8_dynamic is --scheme channel",
    "w8a8": "w8a8 is --scheme channel in FP8, or int8",
    "w8a16": "w8a16 is --scheme int8-weights",
    "w4a16": "w4a16 is --scheme int4, best with --gptq",
    "fp4": "fp4 is --scheme nvfp4, best with --gptq",
    "awq": "awq is a method: --scheme int4 --awq",
    "gptq": "gptq is a method: --scheme int4 --gptq, or nvfp4 --gptq",
    **dict.fromkeys(("bnb", "nf4", "4bit"), "four bits are --scheme int4 or nvfp4 here, best with --gptq"),
    **dict.fromkeys(("f16", "fp16", "bf16", "bfloat16"), "16 bits are the model as it is; dequantize makes bfloat16"),
    **dict.fromkeys(("gguf", "ollama", "llama.cpp", "llama_quantize", "llama_server", "imatrix"), GGUF),
    # Options that a verb does not have: `meaning_of` looks words up with underscores for dashes.
    **dict.fromkeys(("__quantize", "__quantization", "__quant", "__q4", "__q8"), "--scheme names the format"),
    "__gpu": "--fit GPU chooses schemes for a GPU; openquant fit MODEL --gpu GPU shows what fits it",
    **dict.fromkeys(("q4", "int4_awq", "int4_gptq"), "four bits are --scheme int4 or nvfp4 here, best with --gptq"),
    "q8": "eight bits are --scheme tensor, channel or int8-weights here",
    "mlx": "MLX is Apple's: convert with mlx_lm.convert of mlx-lm",
}


def meaning_of(word: str) -> str | None:
    """Say what a word of another tool is here: "w4a16 is --scheme int4, best with --gptq"; None if it is none."""
    name = word.lower().replace("-", "_")
    if re.match(r"i?q\d_", name) or name.endswith(".gguf"):
        return GGUF
    return _MEANINGS.get(name)
