"""Compiled loops against those in numpy, bit by bit; test_kernels.py has both beside torch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openquant.formats import compiled, kernels
from openquant.formats.format import Format, Scale, grid_of
from openquant.formats.kernels import ColumnRounding
from openquant.formats.numbers import E4M3, INT4
from openquant.formats.schemes import VARIANTS

NUMBERS = tuple(dict.fromkeys(scheme.format.number for scheme in VARIANTS))
GROUPS = ((None, None), (1, None), (128, 128), (1, 32), (1, 16), (1, 40))


def test_every_bfloat16_has_the_same_code_under_any_scale() -> None:
    exponents = np.array([1, 127, 252], np.uint32)
    finite = np.arange(65536, dtype=np.uint16)
    bits = np.tile(finite[(finite & 0x7FFF) < 0x7F80].reshape(-1, 128), (len(exponents), 1))
    mantissas = np.random.default_rng(0).integers(0, 1 << 23, (len(bits), 1), np.uint32)
    scale = (mantissas | np.repeat(exponents, len(bits) // len(exponents))[:, None] << 23).view(np.float32)
    for number in NUMBERS:
        form = Format(number, (1, None), Scale("scale"))
        made = [np.empty((len(bits), number.nbytes(128)), np.uint8) for _ in range(2)]
        with np.errstate(over="ignore"):
            kernels.encode_stored(bits, "BF16", scale, form, made[0])
        compiled.encode_stored(bits, "BF16", scale, form, made[1])
        np.testing.assert_array_equal(made[1], made[0], f"{number.name} {number.dtype}")


def test_codes_stand_for_the_same_weights() -> None:
    """All bytes, NaN too, whole groups or not, with zero points or none, and scales that take them beyond float32."""
    rows, cols = 150, 352
    # Rows of blocks begin within one.
    for (number, group), low in zip(itertools.product(NUMBERS, GROUPS), itertools.cycle((100, 0)), strict=False):
        generator = np.random.default_rng(low)
        codes = generator.integers(0, 256, (rows, number.nbytes(cols)), np.uint8)
        height = group[0] or low + rows
        grid = (low + rows - 1) // height + 1 - low // height, grid_of(group, (1, cols))[1]
        scale = np.exp2(generator.uniform(-140, 128, grid)).astype(np.float32)
        for zero in (None, generator.integers(-8, 8, grid).astype(np.float32)):
            found = [np.zeros((rows, cols), np.float32) for _ in range(2)]
            for loops, out in zip((kernels, compiled), found, strict=True):
                loops.decode_rows(codes, number, scale, group, low, out, zero)
            told = f"{number.name} {number.dtype} {group} {low} {zero is not None}"
            np.testing.assert_array_equal(found[1], found[0], told)
            assert (np.signbit(found[1]) == np.signbit(found[0])).all(), told


def test_the_first_code_that_holds_no_value_is_found() -> None:
    for number in NUMBERS:
        codes = np.random.default_rng(0).integers(0, 0x7F, (3, 1000), np.uint8)
        assert kernels.first_unsound(codes, number) is None
        codes[1, 7] = codes[2, 5] = 0xFF
        assert (kernels.first_unsound(codes, number) == 1007) == (number == E4M3), number
        codes[1, 7] = 0x7F
        assert (kernels.first_unsound(codes, number) == 1007) == (number == E4M3), number
        assert kernels.first_unsound(codes[:0], number) is None


def test_values_are_rounded_to_the_same_bfloat16() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (64, 4096), np.uint32)
    bits[0] = np.arange(4096, dtype=np.uint32) << 12 | 0x3F800000
    bits[(bits & 0x7F800000) == 0x7F800000] = 0x80000000
    found = [np.zeros(bits.shape, np.uint16) for _ in range(2)]
    for loops, out in zip((kernels, compiled), found, strict=True):
        loops.to_bfloat16(bits.view(np.float32), out)
    np.testing.assert_array_equal(found[1], found[0])


def test_the_same_scales_are_made_of_the_largest_weights(subtests: pytest.Subtests) -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F000000, (64, 1024), np.uint32)
    bits[0], bits[1, 0] = bits[0] >> 8, 0
    largest = bits.view(np.float32)
    for scheme in VARIANTS:
        form, divisors = scheme.format, [None]
        if form.global_scale is not None:
            divisors += [form.choose_global_scale(np.full((1, 1), fused, np.float32)) for fused in (1.0, 3.7, 2.0**60)]
        for divisor in divisors:
            with subtests.test(scheme=scheme.suffix, divisor=divisor):
                with np.errstate(over="ignore"):
                    scale = kernels.scales(form, largest, divisor)
                np.testing.assert_array_equal(compiled.scales(form, largest, divisor), scale)


def test_columns_have_the_same_errors() -> None:
    generator = np.random.default_rng(0)
    size, rows = 16, 300
    weights = generator.standard_normal((size, rows), np.float32)
    coefficients = np.triu(generator.standard_normal((size, size), np.float32), 1) / np.float32(4)
    groups = generator.integers(0, 3, size)
    for number, shifted in itertools.product(NUMBERS, (False, True)):
        scale = generator.uniform(0.5, 2, (3, rows)).astype(np.float32) / np.float32(number.span)
        zero_points = generator.integers(-4, 4, scale.shape).astype(np.float32) if shifted else None
        rounded = []
        for loops in (kernels, compiled):
            columns = ColumnRounding(weights.copy(), weights.copy(), coefficients, groups, scale, zero_points)
            loops.round_panel(columns, number, 2, size)
            rounded.append(columns)
        np.testing.assert_array_equal(rounded[1].columns, rounded[0].columns, number.name)
        np.testing.assert_array_equal(rounded[1].errors, rounded[0].errors, number.name)
        assert (rounded[1].errors[2:] != weights[2:]).mean() > 0.5
        np.testing.assert_array_equal(rounded[1].columns[:2], weights[:2])


def test_products_of_errors_are_rounded_before_they_are_added() -> None:
    """Sums are 0.5, which rounds to 0; with one rounding for product and sum, many would be a little more."""
    coefficient = np.float32(7.3)
    error = np.random.default_rng(0).uniform(-0.5, 0.5, 1000).astype(np.float32)
    product = coefficient * error
    weight = np.float32(0.5) - product
    error, weight = (values[weight + product == 0.5] for values in (error, weight))
    once = (weight.astype(np.float64) + np.float64(coefficient) * error).astype(np.float32)
    assert (once > 0.5).mean() > 0.1
    for loops in (kernels, compiled):
        columns = ColumnRounding(
            np.stack([error, weight]),
            np.stack([error, weight]),
            np.array([[1, coefficient], [0, 1]], np.float32),
            np.zeros(2, np.int64),
            np.ones((1, len(error)), np.float32),
            None,
        )
        loops.round_panel(columns, INT4, 0, 2)
        assert not columns.columns.any()


ALONE = """
import numpy as np
from openquant.convert.conversion import loops
from openquant.formats import kernels
found = loops(True)
bits = np.full((2, 4), 0x3F80, np.uint16)
assert found.absmax(bits, "BF16", (1, None)).tolist() == [[1], [1]]
print("numpy" if found is kernels else "compiled")
"""


def ran(code: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    return done.stdout, done.stderr


def test_without_a_cache_loops_are_compiled_again() -> None:
    """Nowhere to keep what is compiled: the package's directory counts as one without this."""
    nowhere = {
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator",
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "/dev/null",
    }
    assert ran(ALONE, **nowhere) == ("compiled\n", "")


def test_without_a_compiler_loops_are_numpy_s(tmp_path: Path) -> None:
    assert ran(ALONE, NUMBA_DISABLE_JIT="1") == ("numpy\n", "")
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text('raise ImportError("Numba needs NumPy 2.2 or less")\n')
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))])
    assert ran(ALONE, PYTHONPATH=path) == ("numpy\n", "")
