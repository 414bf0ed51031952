"""What relative error an object would have in another format, from the one that was measured: an estimate.

Owns the model of quantization noise. Refuses to know where a measured error comes from (`measured`).

A grouped format of b bits spreads 2q + 1 levels, q = 2^(b-1) - 1, over twice the largest magnitude A of a group
of g values, so that one step is A / q. Rounding is off by a uniform part of a step, except for the largest value,
which is met. With c(g) the mean of A^2 in units of the mean square (the squared crest factor):

    relative error^2 = c(g) / (12 q^2) * (1 - 1/g)

Among formats of one group length the error thus goes as 1/q. Longer groups have larger maxima: the more so, the
heavier the tails. `CREST_GROWTH` holds how much, c(64) = c(32) * (1 + 0.043 c(32)), never more than twice; it was
fitted to normal, uniform, Laplace and Student t values and to the matrices of all-MiniLM-L6-v2.

E4M3FN codes keep three bits of mantissa of whatever they stand for: their relative error is that of the code.
Direct formats keep the words. Neither tells how values are spread, so from them normal values are assumed.

Against the kernels the model is within `TOLERANCE` for values from uniform to Student t with 4 degrees of freedom
and for trained weights; for tails as heavy as 3 degrees of freedom it is up to 20 % too high at 4 bits.

Source: tensor-formats.md sections 3.3, 3.4 and 7.2.
"""

from __future__ import annotations

import math

from ninfer_convert.formats import GroupedFormat, NumericFormat, RowScaledFormat

TOLERANCE = 0.12
"""How far an estimate may lie from the measured error, as a part of it."""

FP8_ERROR = 0.026
"""Relative error of E4M3FN codes: 2^-3 of the power of two below a value is one step."""

NORMAL_CREST = 6.93
"""c(64) of normal values: the mean square of the largest of 64."""

CREST_GROWTH = 0.043


def expected_error(measured: float, present: NumericFormat, wanted: NumericFormat, k: int) -> float:
    """Returns the relative L2 error that values would have in a format.

    Args:
        measured: their relative L2 error in the present format; returned as it is when both are the same.
        k: the columns of the matrix.

    Source: the module's docstring.
    """
    if present == wanted:
        return measured
    if isinstance(wanted, RowScaledFormat):
        return FP8_ERROR
    if not isinstance(wanted, GroupedFormat):
        return 0.0
    if not isinstance(present, GroupedFormat):
        return math.sqrt(_crest(NORMAL_CREST, 64, wanted.group, k) * _noise(wanted, k))
    crest = measured**2 / _noise(present, k)
    return math.sqrt(_crest(crest, present.group, wanted.group, k) * _noise(wanted, k))


def assumes_normal(present: NumericFormat, wanted: NumericFormat) -> bool:
    """Tells whether `expected_error` has to assume how the values are spread."""
    return isinstance(wanted, GroupedFormat) and not isinstance(present, GroupedFormat)


def _noise(grouped: GroupedFormat, k: int) -> float:
    """Returns the squared relative error for each unit of the squared crest factor."""
    length = min(grouped.group, max(k, 2))
    return (1 - 1 / length) / (12 * grouped.code_max**2)


def _crest(crest: float, group: int, wanted: int, k: int) -> float:
    """Returns the squared crest factor of groups of another length, 32 or 64."""
    # Rows of no more than 32 columns are one group in every format.
    if group == wanted or k <= min(group, wanted):
        return crest
    if group < wanted:
        return crest * min(2.0, 1 + CREST_GROWTH * crest)
    return max(crest / 2, (math.sqrt(1 + 4 * CREST_GROWTH * crest) - 1) / (2 * CREST_GROWTH))
