"""The encoders, step by step as the specification orders them.

Source: tensor-formats.md section 7; targets/qwen3.8-27b-nvfp4.md, "Encoder"; layouts.md, "Sources of already
selected words" (the reciprocal).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .binary import (
    BF16_INFINITY,
    F16_INFINITY,
    F32_INFINITY,
    OracleError,
    decode_bf16,
    decode_f16,
    decode_f32,
    is_finite,
    round_bf16,
    round_e4m3fn,
    round_f16,
    round_f32,
)

F32_SIGN = 0x80000000
E4M3FN_LARGEST = Fraction(448)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Width, group length and code interval of one grouped format."""

    bits: int
    group: int
    qmin: int
    qmax: int


GROUPED = {
    "Q4G64_F16S": Grouped(4, 64, -8, 7),
    "Q5G64_F16S": Grouped(5, 64, -16, 15),
    "Q6G64_F16S": Grouped(6, 64, -32, 31),
    "W8G32_F16S": Grouped(8, 32, -127, 127),
}


def encode_group(name: str, words: Sequence[int]) -> tuple[int, list[int]]:
    """Encodes one logical group of binary32 words: (binary16 scale word, signed codes).

    Raises:
        OracleError: `nonfinite` or `scale overflow`.
    """
    values = _finite(words)
    amax = max(abs(value) for value in values)
    scale = grouped_scale(name, amax)
    if scale == 0:
        return 0, [0] * len(values)
    inverse = grouped_inverse(scale)
    return scale, [grouped_code(name, value, inverse) for value in values]


def grouped_scale(name: str, amax: Fraction) -> int:
    """Returns the binary16 scale word of a group whose largest magnitude is amax; 0 for amax 0."""
    if amax == 0:
        return 0
    raw_scale = decode_f32(round_f32(amax / GROUPED[name].qmax))
    scale = round_f16(raw_scale)
    if scale == 0:
        scale = 0x0001
    if scale == F16_INFINITY:
        raise OracleError("scale overflow")
    return scale


def grouped_inverse(scale: int) -> Fraction:
    """Returns inv32 of a nonzero scale word."""
    return decode_f32(round_f32(1 / decode_f16(scale)))


def grouped_code(name: str, value: Fraction, inverse: Fraction) -> int:
    """Returns the signed code of one value."""
    return integral_code(name, decode_f32(round_f32(value * inverse)))


def integral_code(name: str, normalized: Fraction) -> int:
    """Returns the nearest integer, ties to even (what round() does to a Fraction), clamped afterwards."""
    return min(max(round(normalized), GROUPED[name].qmin), GROUPED[name].qmax)


def encode_fp8_row(words: Sequence[int]) -> tuple[int, list[int]]:
    """Encodes one row of binary32 words: (BF16 scale word, E4M3FN code words).

    Raises:
        OracleError: `nonfinite`, `scale overflow` or `reciprocal overflow`.
    """
    values = _finite(words)
    amax = max(abs(value) for value in values)
    if amax == 0:
        return 0, [0x00] * len(values)
    scale = fp8_scale(amax)
    inverse = fp8_inverse(scale)
    codes = [
        fp8_code(value, inverse, negative=word >= F32_SIGN) for word, value in zip(words, values, strict=True)
    ]
    return scale, codes


def fp8_scale(amax: Fraction) -> int:
    """Returns the BF16 scale word of a row whose largest magnitude is amax > 0."""
    scale = round_bf16(decode_f32(round_f32(amax / E4M3FN_LARGEST)))
    if scale == 0:
        scale = 0x0001
    if scale == BF16_INFINITY:
        raise OracleError("scale overflow")
    return scale


def fp8_inverse(scale: int) -> Fraction:
    """Returns inv of a nonzero row scale word."""
    inverse = decode_f32(round_f32(1 / decode_bf16(scale)))
    if not is_finite(inverse):
        raise OracleError("reciprocal overflow")
    return inverse


def fp8_code(value: Fraction, inverse: Fraction, *, negative: bool) -> int:
    """Returns the E4M3FN word of one value; a zero result has the sign `negative` of the source word."""
    return e4m3fn_code(decode_f32(round_f32(value * inverse)), negative=negative)


def e4m3fn_code(normalized: Fraction | float, *, negative: bool) -> int:
    """Returns the nearest E4M3FN word, ties to even, clamped to 448 beforehand."""
    clamped = min(max(normalized, -E4M3FN_LARGEST), E4M3FN_LARGEST)
    return round_e4m3fn(Fraction(clamped), negative_zero=negative)


def reciprocal(word: int) -> int:
    """Returns round_f32(1 / x) of a positive finite binary32 word.

    Raises:
        OracleError: `not positive and finite`, or `reciprocal overflow`.
    """
    if not 0 < word < F32_INFINITY:
        raise OracleError("not positive and finite")
    result = round_f32(1 / decode_f32(word))
    if result == F32_INFINITY:
        raise OracleError("reciprocal overflow")
    return result


def _finite(words: Sequence[int]) -> list[Fraction]:
    values = [decode_f32(word) for word in words]
    if not all(is_finite(value) for value in values):
        raise OracleError("nonfinite")
    return values
