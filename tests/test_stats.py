"""The figures of a loss, held to extended precision, and what they are where there is nothing to divide by."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracle import binary

from ninfer_convert.artifact.stats import CHUNK, Largest, Loss, group_counts, loss, total
from ninfer_convert.formats import FORMATS, GroupedFormat

INF, NAN = math.inf, math.nan
GROUPED = [name for name, numeric in FORMATS.items() if isinstance(numeric, GroupedFormat)]
Array = np.ndarray[Any, Any]


def floats(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


def independent(values: Array, represented: Array) -> tuple[float, float]:
    """Returns relative error and SQNR in extended precision, over whole arrays."""
    wide, error = values.astype(np.longdouble), represented.astype(np.longdouble) - values.astype(np.longdouble)
    relative = np.sqrt(np.sum(error * error)) / np.sqrt(np.sum(wide * wide))
    return float(relative), float(-20 * np.log10(relative))


@pytest.mark.parametrize("count", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_error_and_sqnr_equal_extended_precision(count: int, scale: float) -> None:
    draw = np.random.default_rng(count)
    values = (draw.standard_normal(count) * scale * np.exp2(draw.integers(-9, 9, count))).astype(np.float32)
    represented = (values * (1 + draw.standard_normal(count) / 50)).astype(np.float32)
    found = loss(values, represented)
    relative, ratio = independent(values, represented)
    assert found.relative_error == pytest.approx(relative, rel=1e-12)
    assert found.sqnr_db == pytest.approx(ratio, abs=1e-9)
    error = np.abs(represented.astype(np.float64) - values.astype(np.float64))
    at = int(np.argmax(error))
    assert found.largest == Largest(float(error[at]), at, float(values[at]), float(represented[at]))
    assert (found.elements, found.differing) == (count, int(np.count_nonzero(error)))


@given(
    arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)),
    st.integers(0, 2**32 - 1),
)
def test_error_equals_extended_precision_on_any_values(values: Array, seed: int) -> None:
    represented = np.random.default_rng(seed).permutation(values)
    found = loss(values, represented)
    if not values.any():
        assert (found.relative_error, found.sqnr_db) == (None, None)
        return
    relative = independent(values, represented)[0] if (values != represented).any() else 0.0
    assert found.relative_error == pytest.approx(relative, rel=1e-12)


@pytest.mark.parametrize("cut", [1, 1000, CHUNK, 3 * CHUNK])
def test_pieces_add_up_to_the_whole(cut: int) -> None:
    draw = np.random.default_rng(cut)
    values = draw.standard_normal(4 * CHUNK + 77).astype(np.float32)
    represented = values + draw.standard_normal(len(values)).astype(np.float32) / 8
    whole = loss(values, represented)
    parts = [loss(values[low : low + cut], represented[low : low + cut], low) for low in range(0, len(values), cut)]
    found = total(parts)
    assert found.relative_error == pytest.approx(whole.relative_error, rel=1e-14)
    assert (found.elements, found.differing, found.largest) == (whole.elements, whole.differing, whole.largest)
    if cut % CHUNK == 0:
        assert found == whole


def test_exact_values_have_no_error_and_no_ratio() -> None:
    found = loss(floats(1, -0.0, 2), floats(1, 0.0, 2))
    assert found == Loss(3, 5.0, 0.0, 0, None)
    assert (found.relative_error, found.sqnr_db) == (0.0, None)
    assert not found.exceeds(0)


def test_there_is_no_relative_error_of_zeros() -> None:
    silent = loss(floats(0, -0.0), floats(0, 0))
    assert (silent.relative_error, silent.sqnr_db, silent.exceeds(0)) == (None, None, False)
    noisy = loss(floats(0, 0), floats(0, 1e-45))
    assert (noisy.relative_error, noisy.sqnr_db) == (None, None)
    assert noisy.exceeds(1e9)
    assert noisy.largest == Largest(2.0**-149, 1, 0.0, 2.0**-149)


@pytest.mark.parametrize(
    ("value", "represented", "is_exact"),
    [
        (INF, INF, True),
        (-INF, -INF, True),
        (NAN, NAN, True),
        (INF, -INF, False),
        (INF, NAN, False),
        (NAN, INF, False),
        (1.0, INF, False),
        (1.0, NAN, False),
        (INF, 1.0, False),
        (NAN, 1.0, False),
        (0.0, NAN, False),
    ],
)
@pytest.mark.parametrize("place", [0, CHUNK + 3])
def test_what_is_not_finite_is_exact_or_infinitely_wrong(
    value: float, represented: float, is_exact: bool, place: int
) -> None:
    values = np.full(CHUNK + 9, 2, np.float32)
    stored = values.copy()
    stored[5] = 2.5
    values[place], stored[place] = value, represented
    found = loss(values, stored)
    assert found.signal == 4.0 * (len(values) - 1) + (value**2 if math.isfinite(value) else 0)
    if is_exact:
        assert (found.noise, found.differing) == (0.25, 1)
        assert found.largest == Largest(0.5, 5, 2.0, 2.5)
    else:
        assert (found.noise, found.differing) == (INF, 2)
        assert (found.relative_error, found.sqnr_db) == (INF, -INF)
        assert found.largest is not None
        assert (found.largest.error, found.largest.index) == (INF, place)
        assert found.exceeds(1e300)


def test_the_largest_values_do_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    found = loss(np.full(1000, largest, np.float32), np.full(1000, -largest, np.float32))
    assert found.relative_error == 2.0
    assert found.sqnr_db == pytest.approx(-20 * math.log10(2), abs=1e-12)


def test_the_first_of_the_largest_errors_is_told() -> None:
    values = np.zeros(3 * CHUNK, np.float32)
    represented = values.copy()
    represented[[CHUNK + 1, CHUNK + 5, 2 * CHUNK]] = 1, -1, 1
    found = loss(values, represented, 1000)
    assert found.largest == Largest(1.0, 1000 + CHUNK + 1, 0.0, 1.0)
    parts = [loss(values[:CHUNK], represented[:CHUNK]), loss(values[CHUNK:], represented[CHUNK:], CHUNK)]
    assert total(parts).largest == Largest(1.0, CHUNK + 1, 0.0, 1.0)


def test_integers_are_compared_exactly() -> None:
    least, most = -(2**31), 2**31 - 1
    found = loss(np.array([least, most], np.int32), np.array([least, most - 1], np.int32))
    assert (found.noise, found.differing) == (1.0, 1)
    assert found.largest == Largest(1.0, 1, float(most), float(most - 1))
    turned = loss(np.array([least], np.int32), np.array([most], np.int32))
    assert turned.largest is not None
    assert turned.largest.error == 2.0**32 - 1


def test_groups_of_several_tensors_are_added() -> None:
    parts = [Loss(2, 1.0, 0.5, 1, None, 3, 1, None), Loss(2, 1.0, 0.5, 2, None, 4, 0, 2), Loss(1, 0, 0, 0, None)]
    assert total(parts) == Loss(5, 2.0, 1.0, 3, None, 7, 1, 2)
    assert total([parts[0]]).clipped_groups is None
    assert total([]) == Loss(0, 0.0, 0.0, 0, None)


# Groups


def scales(*values: float) -> Array:
    return np.array(values, np.float16).view(np.uint16).reshape(1, -1)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_clipped_when_a_code_beyond_the_interval_was_asked_for(name: str) -> None:
    numeric = FORMATS[name]
    assert isinstance(numeric, GroupedFormat)
    edges = [
        (numeric.code_max, False),
        (numeric.code_max + 0.5, numeric.code_max % 2 == 1),
        (np.nextafter(np.float32(numeric.code_max + 0.5), np.float32(0)), False),
        (numeric.code_max + 1, True),
        (numeric.code_min, False),
        (numeric.code_min - 0.5, numeric.code_min % 2 == 1),
        (numeric.code_min - 1, True),
    ]
    for value, is_clipped in edges:
        values = np.zeros((1, 3 * numeric.group - 5), np.float32)
        values[0, 2 * numeric.group + 3] = value
        assert group_counts(numeric, scales(1, 1, 1), values) == (3, 0, int(is_clipped)), value


@pytest.mark.parametrize("name", GROUPED)
def test_a_scale_that_was_rounded_to_a_subnormal_clips(name: str) -> None:
    """The scale for the largest value is 1.4 x 2^-24, stored as 2^-24: the code asked for is 1.4 times too large."""
    numeric = FORMATS[name]
    assert isinstance(numeric, GroupedFormat)
    largest = np.float32(numeric.code_max * 1.4 * 2.0**-24)
    word = binary.round_f16(binary.decode_f32(int((largest / np.float32(numeric.code_max)).view(np.uint32))))
    assert word == 1
    values = np.zeros((2, numeric.group), np.float32)
    values[1, 7] = largest
    words = np.array([[0], [word]], np.uint16)
    assert group_counts(numeric, words, values) == (2, 1, 1)
    assert group_counts(numeric, words, None) == (2, 1, None)


def test_a_zero_scale_clips_whatever_is_not_zero() -> None:
    numeric = FORMATS["Q4G64_F16S"]
    values = np.zeros((1, 192), np.float32)
    values[0, 64], values[0, 130] = 1e-30, -1e-30
    assert group_counts(numeric, scales(0, 0, 0), values) == (3, 3, 2)


@pytest.mark.parametrize(
    ("value", "is_clipped"),
    [(448, 0), (464, 0), (-464, 0), (float(np.nextafter(np.float32(464), np.float32(465))), 1), (-465, 1)],
)
def test_an_fp8_row_is_clipped_beyond_what_rounds_to_its_largest_value(value: float, is_clipped: int) -> None:
    values = np.zeros((2, 5), np.float32)
    values[1, 3] = value * 2
    words = np.array([[0x3F80], [0x4000]], np.uint16)
    assert group_counts(FORMATS["FP8_E4M3FN_ROW_BF16S"], words, values) == (2, 0, is_clipped)


def test_blocks_are_counted_and_direct_words_have_no_groups() -> None:
    words = np.array([[0, 5], [1, 0]], np.uint8)
    assert group_counts(FORMATS["NVFP4"], words, np.ones((2, 32), np.float32)) == (4, 2, None)
    assert group_counts(FORMATS["BF16"], words, None) == (0, 0, None)
