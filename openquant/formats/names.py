"""Names of schemes and what each stores, for the command line, which must not load numpy.

The schemes themselves are in schemes.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias


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
