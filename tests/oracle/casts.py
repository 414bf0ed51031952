"""Conversions between direct words that a recipe may ask for.

Source: tensor-formats.md section 3.1 (representation), recipe.md duty 4 (the rules).
"""

from fractions import Fraction

from .binary import BF16_INFINITY, F16_INFINITY, OracleError, decode_f16, decode_f32, is_finite, round_bf16, round_f32

F16_SIGN = 0x8000


def bf16_to_f32(word: int) -> int:
    """Exact: the BF16 word is the high half of the binary32 word."""
    return word << 16


def f16_to_f32(word: int) -> int:
    """Exact: every binary16 value is a binary32 value; a NaN keeps sign, quiet bit and payload, moved up."""
    value = decode_f16(word)
    if is_finite(value):
        return round_f32(value, negative_zero=word >= F16_SIGN)
    return (word & F16_SIGN) << 16 | 0x7F800000 | (word & 0x3FF) << 13


def widen(dtype: str, word: int) -> int:
    """Returns the binary32 word of a source word of safetensors dtype BF16, F16 or F32."""
    if dtype == "BF16":
        return bf16_to_f32(word)
    return f16_to_f32(word) if dtype == "F16" else word


def f32_to_bf16(word: int) -> int:
    """Nearest, ties to even. Infinity stays infinity; a NaN keeps its high half and is made quiet.

    Raises:
        OracleError: `overflow`, where a finite value would become infinite.
    """
    value = decode_f32(word)
    if is_finite(value):
        result = round_bf16(value, negative_zero=word >> 31 == 1)
        if result & 0x7FFF == BF16_INFINITY:
            raise OracleError("overflow")
        return result
    return word >> 16 if word & 0x7FFFFF == 0 else word >> 16 | 0x40


def f16_to_bf16(word: int) -> int:
    """Nearest, ties to even; no binary16 value overflows."""
    if word & 0x7FFF == F16_INFINITY:
        return (word & F16_SIGN) | BF16_INFINITY
    return f32_to_bf16(f16_to_f32(word))


def checked_i32(value: int | Fraction | float) -> int:
    """Returns the I32 word of an integral value.

    Raises:
        OracleError: `not an integer` (NaN and infinity too) or `out of range`.
    """
    if isinstance(value, float) or Fraction(value).denominator != 1:
        raise OracleError("not an integer")
    integer = int(value)
    if not -(2**31) <= integer < 2**31:
        raise OracleError("out of range")
    return integer % 2**32
