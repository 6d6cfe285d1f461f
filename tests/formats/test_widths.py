"""Integers of 2 to 8 bits in words: packed as compressed-tensors packs them, by every kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from openquant.formats import compiled, kernels, reference
from openquant.formats.format import Format, Scale
from openquant.formats.numbers import INT2, INT3, INT4, INT5, INT6, INT7, INT8_WORDS, Number
from openquant.formats.schemes import ASYMMETRIC, INT8_W8A16, INTEGER_GROUPS

BY_ROW = (*(groups[3] for groups in INTEGER_GROUPS.values()), INT8_W8A16)
WIDTHS = (INT2, INT3, INT4, INT5, INT6, INT7, INT8_WORDS)


def words_of(codes: np.ndarray, number: Number, axis: int) -> np.ndarray:
    """Words that compressed-tensors makes of codes [rows, cols], packed along an axis."""
    values = torch.from_numpy(codes.astype(np.int16) - 2 ** (number.bits - 1)).to(torch.int8)
    return pack_to_int32(values, number.bits, packed_dim=axis).numpy().view(np.uint32)


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_words_are_those_of_compressed_tensors(axis: str, subtests: pytest.Subtests) -> None:
    for number in WIDTHS:
        with subtests.test(number=number.name):
            (check_rows if axis == "rows" else check_columns)(number)


def check_rows(number: Number) -> None:
    @settings(max_examples=12)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        shape = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 5)))
        codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**number.bits - 1)))
        words = kernels.pack_words(codes, number)
        assert words.shape == (number.items(len(codes)), codes.shape[1])
        assert np.array_equal(words, words_of(codes, number, 0))
        back = kernels.unpack_words(words, number)
        assert np.array_equal(back[: len(codes)], codes)
        assert not back[len(codes) :].any()
        theirs = unpack_from_int32(torch.from_numpy(words.view(np.int32)), number.bits, torch.Size(shape), packed_dim=0)
        assert np.array_equal(theirs.numpy(), codes.astype(np.int16) - 2 ** (number.bits - 1))

    check()


def check_columns(number: Number) -> None:
    """By every kernel."""

    @settings(max_examples=12)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        rows, runs = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5)))
        codes = data.draw(hnp.arrays(np.uint8, (rows, runs * number.run), elements=st.integers(0, 2**number.bits - 1)))
        expected = words_of(codes, number, 1)
        packed = np.empty((rows, number.nbytes(codes.shape[1])), np.uint8)
        kernels.pack(codes, packed, number)
        assert np.array_equal(packed.view(np.uint32), expected)
        assert np.array_equal(kernels.unpack(packed, number), codes)
        # Codes are the nearest to their own values under a scale of 1.
        weights, one = number.decode(codes), np.ones((1, 1), np.float32)
        if number == INT8_WORDS:
            weights, expected = np.maximum(weights, -127), words_of(np.maximum(codes, 1), number, 1)
        for loops in (kernels, compiled):
            out = np.empty_like(packed)
            loops.encode_stored(weights.view(np.uint32), "F32", one, Format(number, (None, None), Scale("scale")), out)
            assert np.array_equal(out.view(np.uint32), expected)
            decoded = np.empty_like(weights)
            loops.decode_rows(out, number, one, (None, None), 0, decoded)
            assert np.array_equal(decoded, weights)
        fmt, ones = next(scheme.format for scheme in BY_ROW if scheme.format.number == number), torch.ones(rows, 1)
        words = reference.encode(torch.from_numpy(weights), ones, fmt)
        assert np.array_equal(words.numpy().view(np.uint32), expected)
        assert np.array_equal(reference.decode(words, ones, fmt).numpy(), weights)

    check()


# Words of the codes 0, 1, 2 and so on, modulo 2^bits, until words are full.
GOLDEN = {
    INT2: [0xE4E4E4E4],
    INT3: [0x88FAC688, 0xC688FAC6, 0xFAC688FA],
    INT4: [0x76543210],
    INT5: [0x8A418820, 0xC5A92839, 0xCA307B9A, 0x38BDAB49, 0xFFBBCDEB],
    INT6: [0x440C2040, 0xA2481C61, 0x3CE34C2C],
    INT7: [0x40608080, 0x880E1828, 0x68C16284, 0x88901E38, 0x58A94264, 0x668C982E, 0x3E78E9C3],
    INT8_WORDS: [0x03020100],
}


def test_golden_words() -> None:
    for number in WIDTHS:
        codes = (np.arange(number.run) % 2**number.bits).astype(np.uint8)[None]
        packed = np.empty((1, number.nbytes(number.run)), np.uint8)
        kernels.pack(codes, packed, number)
        assert packed.view(np.uint32).tolist() == [GOLDEN[number]], number.name


def test_what_does_not_fill_words_has_no_place() -> None:
    five, two = INTEGER_GROUPS[5][3].format, INTEGER_GROUPS[2][3].format
    assert five.shape_error((3, 64)) is None
    assert five.shape_error((64, 48)) == "rows of 48 do not divide into 5 words with 32 codes"
    assert two.shape_error((64, 24)) == "rows of 24 do not divide into words of 16 codes"
    shifted = next(scheme.format for scheme in ASYMMETRIC if scheme.name == "int5")
    assert shifted.shape_error((48, 128)) == "48 rows do not divide into 5 words with 32 zero points"
    assert (shifted.height, shifted.indivisible, five.indivisible) == (32, (32, 128), (1, 32))
    assert INT5.row_error(10) is None
    assert INT5.row_error(11) == "its rows are not whole sets of 5 words with 32 codes"
