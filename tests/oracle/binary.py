"""Binary words and their exact values.

A finite value is a `Fraction`; infinities and NaN are the floats `inf`, `-inf` and `nan`. A `Fraction` has
no signed zero, so every rounding function takes the sign of a zero result as an argument.

Source: tensor-formats.md sections 3.1, 3.3 and 7.
"""

from fractions import Fraction

INFINITY = float("inf")
NAN = float("nan")

F32_INFINITY = 0x7F800000
F16_INFINITY = 0x7C00
BF16_INFINITY = 0x7F80
E4M3FN_NAN = 0x7F

E2M1_MAGNITUDES = (
    Fraction(0),
    Fraction(1, 2),
    Fraction(1),
    Fraction(3, 2),
    Fraction(2),
    Fraction(3),
    Fraction(4),
    Fraction(6),
)


class OracleError(Exception):
    """What the specification calls an error; the text is the reason alone."""


def power_of_two(exponent: int) -> Fraction:
    """Returns 2**exponent exactly."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def is_finite(value: Fraction | float) -> bool:
    """Whether a decoded value is a number."""
    return isinstance(value, Fraction)


def decode_f32(word: int) -> Fraction | float:
    """Returns the value of a binary32 word."""
    return _decode_ieee(word, 8, 23)


def decode_f16(word: int) -> Fraction | float:
    """Returns the value of a binary16 word."""
    return _decode_ieee(word, 5, 10)


def decode_bf16(word: int) -> Fraction | float:
    """Returns the value of a BF16 word."""
    return _decode_ieee(word, 8, 7)


def decode_e4m3fn(word: int) -> Fraction | float:
    """Returns the value of an E4M3FN word; 0x7f and 0xff are NaN, there is no infinity."""
    sign = -1 if word >> 7 else 1
    exponent = word >> 3 & 15
    fraction = word & 7
    if exponent == 0:
        return sign * fraction * power_of_two(-9)
    if exponent == 15 and fraction == 7:
        return NAN
    return sign * (1 + Fraction(fraction, 8)) * power_of_two(exponent - 7)


def decode_e2m1(word: int) -> Fraction:
    """Returns the value of an E2M1 word; all 16 are finite."""
    magnitude = E2M1_MAGNITUDES[word & 7]
    return -magnitude if word >> 3 else magnitude


def round_f32(value: Fraction, *, negative_zero: bool = False) -> int:
    """Returns the binary32 word nearest to value, ties to even, subnormals kept; infinity past the range."""
    return _round_ieee(value, 8, 23, negative_zero)


def round_f16(value: Fraction, *, negative_zero: bool = False) -> int:
    """Returns the binary16 word nearest to value, ties to even, subnormals kept; infinity past the range."""
    return _round_ieee(value, 5, 10, negative_zero)


def round_bf16(value: Fraction, *, negative_zero: bool = False) -> int:
    """Returns the BF16 word nearest to value, ties to even, subnormals kept; infinity past the range."""
    return _round_ieee(value, 8, 7, negative_zero)


def round_e4m3fn(value: Fraction, *, negative_zero: bool = False) -> int:
    """Returns the E4M3FN word nearest to value, ties to even, subnormals kept; NaN past the range."""
    magnitude = min(nearest_word(abs(value.numerator), value.denominator, 3, -6), E4M3FN_NAN)
    return _with_sign(value, magnitude, 7, negative_zero)


def _decode_ieee(word: int, exponent_bits: int, fraction_bits: int) -> Fraction | float:
    sign = -1 if word >> (exponent_bits + fraction_bits) else 1
    exponent = word >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = word & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return NAN if fraction else sign * INFINITY
    if exponent == 0:
        return sign * fraction * power_of_two(1 - bias - fraction_bits)
    return sign * ((1 << fraction_bits) + fraction) * power_of_two(exponent - bias - fraction_bits)


def _round_ieee(value: Fraction, exponent_bits: int, fraction_bits: int, negative_zero: bool) -> int:
    bias = (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    magnitude = min(nearest_word(abs(value.numerator), value.denominator, fraction_bits, 1 - bias), infinity)
    return _with_sign(value, magnitude, exponent_bits + fraction_bits, negative_zero)


def _with_sign(value: Fraction, magnitude: int, sign_bit: int, negative_zero: bool) -> int:
    negative = value < 0 or (value == 0 and negative_zero)
    return magnitude | (1 << sign_bit if negative else 0)


def nearest_word(numerator: int, denominator: int, fraction_bits: int, least_exponent: int) -> int:
    """Returns the word nearest to numerator / denominator >= 0, ties to even, in a format without an upper end."""
    word, rest, step = _floor_word(numerator, denominator, fraction_bits, least_exponent)
    return word + (2 * rest > step or (2 * rest == step and word % 2 == 1))


def least_f32_word(numerator: int, denominator: int, *, inclusive: bool) -> int:
    """Returns the least binary32 magnitude word above numerator / denominator > 0, or at it where inclusive."""
    word, rest, _ = _floor_word(numerator, denominator, 23, -126)
    return word + (rest > 0 or not inclusive)


def f32_ratio(word: int) -> tuple[int, int]:
    """Returns (numerator, denominator) of a finite binary32 magnitude word, not reduced."""
    exponent, fraction = word >> 23, word & 0x7FFFFF
    significand, power = (fraction | 0x800000, exponent - 150) if exponent else (fraction, -149)
    return significand << max(power, 0), 1 << max(-power, 0)


def _floor_word(numerator: int, denominator: int, fraction_bits: int, least_exponent: int) -> tuple[int, int, int]:
    """Returns (word, rest, step): numerator / denominator lies rest / step of the way from word to word + 1.

    Consecutive words are consecutive values, so adding one to a word carries into the exponent field by itself;
    the format has no upper end here.
    """
    if numerator == 0:
        return 0, 0, 1
    exponent = numerator.bit_length() - denominator.bit_length()
    if (numerator << max(-exponent, 0)) < (denominator << max(exponent, 0)):
        exponent -= 1
    # Now 2**exponent <= value < 2**(exponent + 1); below least_exponent the distance no longer shrinks.
    exponent = max(exponent, least_exponent)
    shift = fraction_bits - exponent
    step = denominator << max(-shift, 0)
    quotient, rest = divmod(numerator << max(shift, 0), step)
    return ((exponent - least_exponent) << fraction_bits) + quotient, rest, step
