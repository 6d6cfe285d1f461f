"""NaN and infinity counted by their bits, held against numpy's and torch's own answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openquant.files.shardfile import DTYPE_BITS
from openquant.formats import numbers
from openquant.formats.numbers import NonFinite, can_be_non_finite, count_non_finite

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def expected(data: np.ndarray, dtype: str) -> NonFinite:
    values = torch.from_numpy(data.copy()).view(TORCH[dtype]).double()
    return NonFinite(int(values.isnan().sum()), int(values.isinf().sum()))


def test_every_byte_or_pair_of_bytes_is_judged_as_torch_does() -> None:
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    for dtype in TORCH:
        size, data = DTYPE_BITS[dtype] // 8, pairs
        if size > 2:
            # The upper half decides, but for the mantissa's last bit, which alone tells NaN from infinity.
            wide = np.zeros((2, 1 << 16, size), np.uint8)
            wide[:, :, -2:] = pairs.reshape(-1, 2)
            wide[1, :, 0] = 1
            data = wide.reshape(-1)
        found = count_non_finite(data, dtype)
        assert found == expected(data, dtype), dtype
        assert found and can_be_non_finite(dtype), dtype


def test_integers_and_small_floats_hold_none() -> None:
    for dtype in DTYPE_BITS.keys() - TORCH.keys():
        assert not can_be_non_finite(dtype), dtype
        assert not count_non_finite(np.full(64, 0xFF, np.uint8), dtype), dtype


def test_pieces_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "PIECE", 3)
    values = np.ones(10, np.float32)
    values[[0, 4, 9]] = np.nan
    values[[3, 5]] = [np.inf, -np.inf]
    assert count_non_finite(values.view(np.uint8), "F32") == NonFinite(3, 2)
    assert count_non_finite(np.empty(0, np.uint8), "F32") == NonFinite()
