"""Casts against the oracle, ml_dtypes and known words."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import casts

from ninfer_convert.plan.casts import cast_words


def words(*numbers: int, dtype: str) -> Any:
    return np.array(numbers, dtype).view(np.uint8)


def test_every_bf16_word_widens_to_itself_above_sixteen_zeros() -> None:
    every = np.arange(2**16, dtype="<u2")
    widened, bad = cast_words(every.view(np.uint8), "BF16", "F32")
    assert bad is None
    assert np.array_equal(widened, every.astype(np.uint32) << 16)


def test_every_f16_word_widens_exactly_nan_payloads_included() -> None:
    every = np.arange(2**16, dtype="<u2")
    widened, bad = cast_words(every.view(np.uint8), "F16", "F32")
    assert bad is None
    finite = (every & 0x7C00) != 0x7C00
    assert np.array_equal(widened[finite].view("<f4"), every[finite].view("<f2").astype(np.float32))
    special = every[~finite].astype(np.uint32)
    expected = ((special & 0x8000) << 16) | 0x7F800000 | ((special & 0x3FF) << 13)
    assert np.array_equal(widened[~finite], expected)


def test_rounding_to_bf16_agrees_with_ml_dtypes() -> None:
    rng = np.random.default_rng(3)
    some = rng.integers(0, 2**32, 200_000, np.uint32)
    ties = (rng.integers(0, 2**16, 50_000, np.uint32) << 16) | 0x8000
    numbers = np.concatenate([some, ties, ties - 1, ties + 1])
    magnitude = numbers & 0x7FFFFFFF
    numbers = numbers[(magnitude < 0x7F7F8000) | (magnitude == 0x7F800000)]
    rounded, bad = cast_words(numbers.astype("<u4").view(np.uint8), "F32", "BF16")
    assert bad is None
    expected = numbers.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(rounded, expected)


@pytest.mark.parametrize(("word", "rounded"), [(0xBDFCD6E9, 0xBDFD), (0x7FC12345, 0x7FC1), (0xFF800001, 0xFFC0)])
def test_rounding_to_bf16_of_known_words(word: int, rounded: int) -> None:
    result, bad = cast_words(words(word, dtype="<u4"), "F32", "BF16")
    assert bad is None
    assert result.tolist() == [rounded]


def test_rounding_to_bf16_refuses_a_finite_value_that_would_become_infinite() -> None:
    _, bad = cast_words(words(0x3F800000, 0x7F7FFFFF, dtype="<u4"), "F32", "BF16")
    assert bad is not None
    assert bad[0] == 1
    assert "rounds to infinity in BF16" in bad[1]


def test_the_integer_cast_keeps_the_extremes_and_names_what_it_cannot_keep() -> None:
    kept, bad = cast_words(words(2147483647, -2147483648, 0, dtype="<i8"), "I64", "I32")
    assert bad is None
    assert kept.tolist() == [2147483647, -2147483648, 0]
    _, bad = cast_words(words(5, -1, 4294967301, dtype="<i8"), "I64", "I32")
    assert bad == (2, "value 4294967301 lies outside [-2147483648, 2147483647], which I32 requires")
    _, bad = cast_words(words(2**63 + 1, dtype="<u8"), "U64", "I32")
    assert bad is not None
    for number, reason in ((2.5, "2.5 is not an integer"), (float("nan"), "nan is not an integer"), (3e9, "outside")):
        data = np.frombuffer(struct.pack("<f", number), np.uint8)
        _, bad = cast_words(data, "F32", "I32")
        assert bad is not None
        assert reason in bad[1]
    kept, bad = cast_words(np.array([-7.0, 16777216.0], "<f4").view(np.uint8), "F32", "I32")
    assert bad is None
    assert kept.tolist() == [-7, 16777216]


def test_every_binary16_word_rounds_to_bf16_as_the_oracle_rounds() -> None:
    every = np.arange(2**16, dtype="<u2")
    rounded, bad = cast_words(every.view(np.uint8), "F16", "BF16")
    assert bad is None
    assert rounded.tolist() == [casts.f16_to_bf16(word) for word in range(2**16)]


def test_binary32_words_around_every_seventh_bf16_word_round_as_the_oracle_rounds() -> None:
    upper = np.arange(0, 2**16, 7, dtype=np.uint32) << np.uint32(16)
    numbers = (upper[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)
    magnitude = numbers & 0x7FFFFFFF
    numbers = numbers[(magnitude < 0x7F7F8000) | (magnitude >= 0x7F800000)].astype("<u4")
    rounded, bad = cast_words(numbers.view(np.uint8), "F32", "BF16")
    assert bad is None
    assert rounded.tolist() == [casts.f32_to_bf16(word) for word in numbers.tolist()]
