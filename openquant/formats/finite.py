"""Count NaN and infinities in a tensor's bytes, for every float and complex dtype of safetensors.

count_non_finite(data, "BF16")      # NonFinite(nan=3, infinite=0)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


_FLOAT32 = _Layout(4, 0x7F7F_FFFF)
# F4, F6 and integers have neither NaN nor infinity.
_LAYOUTS = {
    "BF16": _Layout(2, 0x7F7F),
    "F16": _Layout(2, 0x7BFF),
    "F32": _FLOAT32,
    # Real and imaginary parts.
    "C64": _FLOAT32,
    "F64": _Layout(8, 0x7FEF_FFFF_FFFF_FFFF),
    "F8_E5M2": _Layout(1, 0x7B),
    "F8_E4M3": _Layout(1, 0x7E, has_infinity=False),
    "F8_E8M0": _Layout(1, 0xFE, has_infinity=False, has_sign=False),
}
# Their only NaN is the pattern of minus zero.
_FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")


def can_be_non_finite(dtype: str) -> bool:
    """Return whether a dtype, named as in safetensors ("BF16"), has NaN or infinity at all."""
    return dtype in _LAYOUTS or dtype in _FNUZ


def count_non_finite(data: npt.NDArray[np.uint8], dtype: str) -> NonFinite:
    """Count the values that are NaN or infinite.

    Args:
        data: uint8 [nbytes], the bytes of whole elements, in little-endian order as in safetensors.
        dtype: dtype of the elements, named as in safetensors.

    Returns:
        Number of values that are NaN, and of those that are infinite; both 0 for dtypes without either. An element is
        one value, but one of C64 is two: its real and its imaginary part.
    """
    if dtype in _FNUZ:
        return NonFinite(nan=int(np.count_nonzero(data == 0x80)))
    layout = _LAYOUTS.get(dtype)
    if layout is None or not data.size:
        return NonFinite()
    unsigned, sign = np.dtype(f"u{layout.nbytes}"), 1 << (8 * layout.nbytes - 1)
    mask = unsigned.type(sign - 1 if layout.has_sign else 2 * sign - 1)
    count = NonFinite()
    for low in range(0, data.size, PIECE * layout.nbytes):
        part = data[low : low + PIECE * layout.nbytes]
        elements = part.view(unsigned)
        # Compare the largest of both signs first, which are nearly always finite: twice as fast as clearing the signs.
        positive = layout.has_sign and int(part.view(f"i{layout.nbytes}").max()) > layout.largest
        if positive or int(elements.max()) > (layout.largest | sign if layout.has_sign else layout.largest):
            above = (elements & mask)[(elements & mask) > layout.largest]
            infinite = int(np.count_nonzero(above == layout.largest + 1)) if layout.has_infinity else 0
            count += NonFinite(len(above) - infinite, infinite)
    return count
