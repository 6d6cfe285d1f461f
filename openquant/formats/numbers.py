"""Numeric formats: the values of codes, the nearest code to a value, and how codes are packed in a tensor.

A numeric format has at most 256 codes, each a byte while we compute. Stored codes follow one another without gaps,
the first in the lowest bits: two of 4 bits share a byte, and 32 of 5 bits fill five words of 32 bits. Scales are not
known here: a weight is the value of its code times the scale of its group.

    E4M3.decode(np.uint8([0x7E, 0x38]))   # [448.0, 1.0]
    E4M3.encode(np.float32([500, 1.03]))  # [0x7e, 0x38]: clamped to 448, rounded to the nearest, to even of two as near

Further below, NaN and infinities are counted in bytes of any float; and the KV cache in FP8: how configs ask for it,
and the names of its scales. A stored code times its scale is a value, or a key as it is cached: after its norm and
rotary embedding.

    count_non_finite(data, "BF16")                          # NonFinite(nan=3, infinite=0)
    cache_scales(["model.layers.0.self_attn.k_scale"])      # {0: ("model.layers.0.self_attn.k_scale", None)}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..files.shardfile import DTYPE_BITS

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
_LARGEST_BFLOAT16 = (2 - 2.0**-7) * 2.0**127


@dataclass(frozen=True)
class Number:
    """A numeric format.

    Attributes:
        title: its name in plans and cards: "FP8".
        name: its name as a dtype: "float8_e4m3fn".
        dtype: safetensors dtype of the code tensor.
        bits: bits of a stored code.
        largest: largest magnitude of a code's value.
        normal: smallest normal value; 0 for integers, which have no subnormal values.
    """

    # Whether the first of two codes in a byte has the high bits.
    high_first: ClassVar[bool] = False
    # Whether the values are integers.
    integer: ClassVar[bool] = False

    title: str
    name: str
    dtype: str
    bits: int
    largest: float
    normal: float

    @property
    def item_bits(self) -> int:
        """Bits of an element of the code tensor."""
        return DTYPE_BITS[self.dtype]

    @property
    def run(self) -> int:
        """The smallest number of codes that fill whole elements: 1 of FP8, 8 of INT4, 32 of INT5."""
        return math.lcm(self.bits, self.item_bits) // self.bits

    @property
    def packed(self) -> bool:
        """Whether several codes share an element."""
        return self.bits < self.item_bits

    def items(self, codes: int) -> int:
        """Return how many elements a number of codes takes; the last is padded if they do not fill it."""
        return -(-codes * self.bits // self.item_bits)

    def count(self, items: int) -> int:
        """Return how many codes a number of elements can have."""
        return items * self.item_bits // self.bits

    def nbytes(self, codes: int) -> int:
        """Return how many bytes a number of codes takes as whole elements."""
        return self.items(codes) * self.item_bits // 8

    def row_error(self, items: int) -> str | None:
        """Return why rows of some elements are not read; None if they are whole runs, such as 5 words with 32 codes."""
        words = self.items(self.run)
        if items % words == 0:
            return None
        return f"its rows are not whole sets of {words} words with {self.run} codes"

    def encode(self, quotients: Floats) -> Codes:
        """Round values to the nearest codes, ties to even; values out of range are clamped.

        Args:
            quotients: finite float32 of any shape.

        Returns:
            Codes, uint8 of the same shape, one per byte.
        """
        raise NotImplementedError

    @property
    def zero_byte(self) -> int | None:
        """The byte that packed codes of zero repeat: 0x88 for int4; None if their pattern is longer than a byte."""
        if 8 % self.bits:
            return None
        code = int(self.encode(np.zeros(1, np.float32))[0])
        return code * (0xFF // ((1 << self.bits) - 1))

    def decode(self, codes: Codes) -> Floats:
        """Return the values of codes: uint8 of any shape, one per byte, to float32 of the same shape."""
        return np.take(self.values(), codes, mode="clip")

    def values(self) -> Floats:
        """Return the value of every code, float32 [2^bits]; NaN for codes that are no number."""
        raise NotImplementedError

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        """Return how far a weight may be from its dequantized code.

        Args:
            weights: float32 of any shape.
            scale: float32, the scale of each weight, of a shape that broadcasts over `weights`.
            slack: relative error that the scale itself may have.

        Returns:
            The largest absolute error, float32 of the shape of `weights`.
        """
        raise NotImplementedError

    @cached_property
    def smallest(self) -> float:
        """The smallest positive value."""
        values = self.values()
        return float(values[values > 0].min())

    @property
    def span(self) -> float:
        """The divisor that makes a scale from a group's largest absolute weight."""
        return self.largest

    @property
    def largest_weight(self) -> float:
        """The largest weight that can be encoded so that no code decodes beyond bfloat16: 448 * 2^119 for E4M3."""
        exponent = int(np.floor(np.log2(_LARGEST_BFLOAT16 / self.largest)))
        return self.span * 2.0**exponent

    def nearest(self, quotients: Floats) -> Floats:
        """Round finite float32 values of any shape to values of codes, ties to even; float32 of the same shape."""
        return self.decode(self.encode(quotients))


class _Float(Number):
    """A floating-point format, whose highest bit is the sign."""

    def encode(self, quotients: Floats) -> Codes:
        # Rounding to odd first leaves 16 bits from which a table gives the code, as if there had been no first
        # rounding: the last bit says whether any bit below it was set.
        bits = quotients.view(np.uint32)
        odd = bits & 0xFFFF
        odd += np.uint32(0xFFFF)
        odd |= bits
        odd >>= 16
        return np.take(_nearest_of_bfloat16(self), odd.astype(np.intp), mode="clip")

    def nearest(self, quotients: Floats) -> Floats:
        # Zeros lose their sign. Adding a large number leaves only whole steps of the quotient, a fixed part of its
        # binade; subtracting it again gives the rounded value. A search rounds often, and looking codes up in a table
        # takes longer.
        near = np.clip(quotients, np.float32(-self.largest), np.float32(self.largest))
        binade = np.maximum(near.view(np.uint32) & np.uint32(0x7F800000), np.float32(self.normal).view(np.uint32))
        beside = binade.view(np.float32) * np.float32(1.5 * 2**23 * self.smallest / self.normal)
        near += beside
        near -= beside
        return near


@dataclass(frozen=True)
class _E4M3(_Float):
    """Four bits of exponent, three of mantissa: from 2^-9 to 448, no infinity, and NaN is 0x7f or 0xff."""

    def values(self) -> Floats:
        return _e4m3_values()

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        # Codes from 2^-6 on are an eighth of their binade apart, those below 2^-9.
        bound = np.abs(weights)
        bound *= np.float32(1 / 16 + slack)
        np.maximum(bound, scale * np.float32(1 / 1024 + slack / 64), out=bound)
        return bound


@dataclass(frozen=True)
class _Integer(Number):
    """Integers from -largest to `highest`, stored as value + `excess`, modulo 256 if they are bytes.

    Codes below -largest, such as -128 of INT8, are decoded too, since other tools write them.
    """

    integer: ClassVar[bool] = True

    highest: int = 127
    excess: int = 0

    @property
    def span(self) -> float:
        """Half of the range, 7.5 for -8 to 7, as compressed-tensors has it (quantization/utils/helpers.py:98)."""
        return (self.largest + self.highest) / 2

    def encode(self, quotients: Floats) -> Codes:
        return (self.nearest(quotients).astype(np.int16) + np.int16(self.excess)).astype(np.uint8)

    def nearest(self, quotients: Floats) -> Floats:
        whole = np.rint(quotients)
        return np.clip(whole, np.float32(-self.largest), np.float32(self.highest), out=whole)

    def values(self) -> Floats:
        count = 1 << self.bits
        whole = np.arange(count) - self.excess
        return np.where(whole < count // 2, whole, whole - count).astype(np.float32)

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        size = np.abs(weights)
        bound = size * np.float32(slack)
        bound += scale * np.float32(0.5 * (1 + slack))
        if self.highest < self.largest:
            # A search clips the largest weights on purpose, at most to half.
            beyond = size - scale * np.float32(self.highest)
            bound = np.where(size <= scale * np.float32(2 * self.span), np.maximum(bound, beyond), bound)
        return bound


@dataclass(frozen=True)
class _E2M1(_Float):
    """0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign (OCP Microscaling Formats 1.0, 5.3.3)."""

    def values(self) -> Floats:
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        return np.concatenate([magnitudes, -magnitudes])

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        # Codes from 1 on are half of their binade apart, those below by a half. Up to 10, which is what the least
        # scales of NVFP4 leave where they are searched for and rounded down, becomes 6.
        bound = np.abs(weights)
        bound *= np.float32(2 / 5 + slack)
        np.maximum(bound, scale * np.float32(1 / 4 + slack), out=bound)
        return bound


@dataclass(frozen=True)
class _Table(Number):
    """Any values, as bitsandbytes has them.

    Attributes:
        by_code: the value of each code.
    """

    high_first: ClassVar[bool] = True

    by_code: tuple[float, ...] = ()

    def encode(self, quotients: Floats) -> Codes:
        values = self.values()
        order = np.argsort(values)
        ascending = values[order].astype(np.float64)
        return order[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, quotients)].astype(np.uint8)

    def values(self) -> Floats:
        return np.array(self.by_code, np.float32)

    def bound(self, weights: Floats, scale: Floats, slack: float) -> Floats:
        half_step = float(np.diff(np.sort(self.values())).max()) / 2
        return np.abs(weights) * np.float32(slack) + scale * np.float32(half_step)


def lanes(width: int, lane: int) -> int:
    """Return the mask of the low `width` bits in each lane of a word of 64 bits.

    Args:
        width: number of bits that are set.
        lane: number of bits of a lane, which divides 64.
    """
    return sum(((1 << width) - 1) << start for start in range(0, 64, lane))


def nearest_bfloat16(values: Floats) -> npt.NDArray[np.uint32]:
    """Round finite values to bfloat16, ties to even.

    Args:
        values: float32 of any shape.

    Returns:
        The 16 bits of each in the low half of a uint32, of the same shape.
    """
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = bits >> np.uint32(16)
    rounded &= 1
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= 16
    return rounded


def _middles(magnitudes: Floats) -> npt.NDArray[np.float64]:
    """Return for neighbours of ascending values the largest input that rounds to the lower one, ties to even."""
    exact = magnitudes.astype(np.float64)
    middle = (exact[1:] + exact[:-1]) / 2
    middle[1::2] = np.nextafter(middle[1::2], 0)
    return middle


@cache
def _e4m3_values() -> Floats:
    code = np.arange(127)
    values = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    magnitudes = np.append(values, np.nan)
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


@cache
def _nearest_of_bfloat16(number: _Float) -> Codes:
    """Return the nearest code of every bfloat16, uint8 [65536]; infinity and NaN get the largest."""
    sign = len(number.values()) // 2
    finite = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    values = number.values()[:sign]
    values = values[np.isfinite(values)]
    magnitudes = np.full(32768, len(values) - 1, np.uint8)
    magnitudes[: finite.size] = np.searchsorted(_middles(values), finite)
    return np.concatenate([magnitudes, magnitudes | sign])


def _integer_in_words(bits: int) -> Number:
    """Return the integers of some bits that fill words of 32 bits, from -2^(bits - 1) to 2^(bits - 1) - 1."""
    half = 1 << (bits - 1)
    return _Integer(f"INT{bits}", f"int{bits}", "I32", bits=bits, largest=half, normal=0, highest=half - 1, excess=half)


E4M3 = _E4M3("FP8", "float8_e4m3fn", "F8_E4M3", bits=8, largest=448, normal=2.0**-6)
E2M1 = _E2M1("FP4", "float4_e2m1", "U8", bits=4, largest=6, normal=1)
INT8 = _Integer("INT8", "int8", "I8", bits=8, largest=127, normal=0)
# In words of 32 bits without gaps, the first code lowest (compressed-tensors since 0.18,
# compressors/pack_quantized/helpers.py; before, widths that do not divide 32 left bits of each word unused).
INT2, INT3, INT4, INT5, INT6, INT7 = (_integer_in_words(bits) for bits in range(2, 8))
INT8_WORDS = _Integer("INT8", "int8", "I32", bits=8, largest=127, normal=0, excess=128)

# bitsandbytes functional.py:788 and :823, get_4bit_type.
NF4 = _Table(
    "NF4", "nf4", "U8", bits=4, largest=1, normal=0,
    by_code=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
_FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3)
BNB_FP4 = _Table(
    "FP4 of bitsandbytes", "fp4", "U8", bits=4, largest=1, normal=0,
    by_code=tuple(sign * value / 12 for sign in (1, -1) for value in _FP4_TWELFTHS),
)  # fmt: skip
BITSANDBYTES = (NF4, BNB_FP4)

# Numeric formats with one code per element, by dtype.
CODES = {number.dtype: number for number in (E4M3, INT8)}


# Elements that are checked at a time.
PIECE = 1 << 19


class NonFinite(NamedTuple):
    """Counts of NaN and of infinite values in a tensor. False if both are zero."""

    nan: int = 0
    infinite: int = 0

    def __add__(self, other: object) -> NonFinite:
        assert isinstance(other, NonFinite)
        return NonFinite(self.nan + other.nan, self.infinite + other.infinite)

    def __bool__(self) -> bool:
        return any(self)

    @property
    def text(self) -> str:
        """The counts as text: "NaN (3 values)", "NaN (3 values) and infinity (1 value)"."""
        kinds = (("NaN", self.nan), ("infinity", self.infinite))
        return " and ".join(f"{kind} ({count} value{'s'[: count != 1]})" for kind, count in kinds if count)


class _Layout(NamedTuple):
    """Which bit patterns of a dtype are NaN or infinity.

    Attributes:
        nbytes: bytes of an element.
        largest: bits of the largest finite value. The next pattern is infinity, if there is one; all above are NaN.
        has_infinity: whether the dtype has infinity.
        has_sign: whether the highest bit is the sign.
    """

    nbytes: int
    largest: int
    has_infinity: bool = True
    has_sign: bool = True


# F4, F6 and integers have neither NaN nor infinity.
_LAYOUTS = {
    "BF16": _Layout(2, 0x7F7F),
    "F16": _Layout(2, 0x7BFF),
    "F32": _Layout(4, 0x7F7F_FFFF),
    "F64": _Layout(8, 0x7FEF_FFFF_FFFF_FFFF),
    "F8_E5M2": _Layout(1, 0x7B),
    "F8_E4M3": _Layout(1, 0x7E, has_infinity=False),
    "F8_E8M0": _Layout(1, 0xFE, has_infinity=False, has_sign=False),
}


def can_be_non_finite(dtype: str) -> bool:
    """Return whether a dtype, named as in safetensors ("BF16"), has NaN or infinity at all."""
    return dtype in _LAYOUTS


def count_non_finite(data: npt.NDArray[np.uint8], dtype: str) -> NonFinite:
    """Count the values that are NaN or infinite.

    Args:
        data: uint8 [nbytes], the bytes of whole elements, in little-endian order as in safetensors.
        dtype: dtype of the elements, named as in safetensors.

    Returns:
        Number of values that are NaN, and of those that are infinite; both 0 for dtypes without either, and for complex
        and FNUZ ones, which no checkpoint has.
    """
    layout = _LAYOUTS.get(dtype)
    if layout is None or not data.size:
        return NonFinite()

    unsigned = np.dtype(f"u{layout.nbytes}")
    sign = 1 << (8 * layout.nbytes - 1)
    mask = unsigned.type(2 * sign - 1)
    largest = layout.largest
    if layout.has_sign:
        mask = unsigned.type(sign - 1)
        largest |= sign

    count = NonFinite()
    for low in range(0, data.size, PIECE * layout.nbytes):
        part = data[low : low + PIECE * layout.nbytes]
        elements = part.view(unsigned)

        # Compare the largest of both signs first, which are nearly always finite: twice as fast as clearing the signs.
        positive = layout.has_sign and int(part.view(f"i{layout.nbytes}").max()) > layout.largest
        if positive or int(elements.max()) > largest:
            above = (elements & mask)[(elements & mask) > layout.largest]
            infinite = 0
            if layout.has_infinity:
                infinite = int(np.count_nonzero(above == layout.largest + 1))
            count += NonFinite(len(above) - infinite, infinite)

    return count


# Last parts of the scales' names, below a layer's attention module. vLLM layers/quantization/base_config.py:244 and
# SGLang model_loader/weight_utils.py:1812 put `.attn` before them.
SCALES = ("k_scale", "v_scale")
# The option for vLLM where it does not read the setting from the config.
FLAG = "--kv-cache-dtype fp8"
# By quant_method, the key and value that ask for an FP8 cache. The first: vLLM layers/attention/attention.py:287 and
# SGLang compressed_tensors.py:143; only SGLang reads the second (layers/quantization/fp8.py:366).
_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "compressed-tensors": (
        "kv_cache_scheme",
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
    ),
    "fp8": ("kv_cache_quant_algo", "FP8"),
}
# The config of a checkpoint that has KV-cache scales and no quantized layer: for vLLM compressed_tensors.py:1018 and
# SGLang compressed_tensors.py:1171 it needs no ignore list.
DENSE: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "config_groups": {},
    "ignore": [],
}
# Names of scales of keys, of values or of both, as vLLM renames them (layers/quantization/base_config.py:217-247).
_SCALE = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks)\.(\d{1,9})\..*?(?:([kv])_scale|([kv])_proj\.output_scale|([kv])_cache\.scale|kv_scale)"
)


def with_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings`, a quantization_config, that also asks for a KV cache in FP8.

    Args:
        settings: the quantization_config of a config.json, of the method "compressed-tensors" or "fp8".
    """
    key, value = _SETTINGS[settings["quant_method"]]
    return {**settings, key: value}


def without_fp8_cache(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `settings`, a quantization_config, without what `with_fp8_cache` adds.

    Args:
        settings: the quantization_config of a config.json, of any method. What other tools say of the KV cache stays.
    """
    key, value = _SETTINGS.get(str(settings.get("quant_method")), ("", None))
    return {name: setting for name, setting in settings.items() if name != key or setting != value}


def says_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` asks for a KV cache in FP8, in either way of saying so.

    Not every engine reads every way: with the method "fp8" vLLM also needs FLAG.

    Args:
        config: the quantization_config of a config.json, or what modelopt's hf_quant_config.json holds.

    Raises:
        UsageError: it asks for another numeric format.
    """
    inner = config.get("quantization")

    for place in (config, inner) if isinstance(inner, dict) else (config,):
        scheme = place.get("kv_cache_scheme")
        algorithm = place.get("kv_cache_quant_algo")

        if isinstance(scheme, dict):
            if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
                raise UsageError(
                    f"config.json has a kv_cache_scheme of {scheme.get('num_bits')} bits, type {scheme.get('type')}",
                    "known is FP8",
                )
            return True
        if algorithm is not None:
            if algorithm != "FP8":
                raise UsageError(f"config.json has the kv_cache_quant_algo {algorithm}", "known is FP8")
            return True
    return False


def cache_scales(names: Iterable[str]) -> dict[int, tuple[str | None, str | None]]:
    """Find the tensors with the scales of the KV cache.

    Args:
        names: names of all tensors of a checkpoint.

    Returns:
        By number of the decoder layer, the names of the tensors with the scale of keys and of values; the same name
        twice if they share a scale, None where there is none. Layers without either are missing.
    """
    scales: dict[int, list[str | None]] = {}
    for name in sorted(names):
        match = _SCALE.fullmatch(name)
        if match is None:
            continue
        which = match[2] or match[3] or match[4]
        of_layer = scales.setdefault(int(match[1]), [None, None])
        for position, letter in enumerate("kv"):
            if which in (None, letter):
                of_layer[position] = name
    return {layer: (key, value) for layer, (key, value) in scales.items()}


def scale_for(largest: float) -> float:
    """Return the scale for keys or values: the smallest power of two that is at least largest / 448 and 2^-64.

    Other scales are no more exact, and in vLLM's CPU kernel a little less.

    Args:
        largest: largest absolute key or value; the scale is 1 if it is 0.
    """
    if largest <= 0:
        return 1.0
    return 2.0 ** math.ceil(math.log2(max(2.0**-64, largest / E4M3.largest)))
