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
    magnitude = min(_round_magnitude(abs(value), 3, -6), E4M3FN_NAN)
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
    magnitude = min(_round_magnitude(abs(value), fraction_bits, 1 - bias), infinity)
    return _with_sign(value, magnitude, exponent_bits + fraction_bits, negative_zero)


def _with_sign(value: Fraction, magnitude: int, sign_bit: int, negative_zero: bool) -> int:
    negative = value < 0 or (value == 0 and negative_zero)
    return magnitude | (1 << sign_bit if negative else 0)


def _round_magnitude(value: Fraction, fraction_bits: int, least_exponent: int) -> int:
    """Returns the word of the value nearest to `value` >= 0 in a format without an upper end.

    Consecutive words are consecutive values, so a quotient that rounds up to the next power of two carries
    into the exponent field by itself.
    """
    numerator, denominator = value.numerator, value.denominator
    if numerator == 0:
        return 0
    exponent = numerator.bit_length() - denominator.bit_length()
    if (numerator << max(-exponent, 0)) < (denominator << max(exponent, 0)):
        exponent -= 1
    # Now 2**exponent <= value < 2**(exponent + 1); below least_exponent the spacing no longer shrinks.
    exponent = max(exponent, least_exponent)
    spacing = exponent - fraction_bits
    quotient, rest = divmod(numerator << max(-spacing, 0), denominator << max(spacing, 0))
    twice, whole = 2 * rest, denominator << max(spacing, 0)
    if twice > whole or (twice == whole and quotient % 2 == 1):
        quotient += 1
    return ((exponent - least_exponent) << fraction_bits) + quotient
