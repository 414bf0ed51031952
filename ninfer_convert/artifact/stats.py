"""How far represented values lie from those they stand for: relative error, SQNR, largest error, groups.

Owns the arithmetic. Everything is binary64, added up piece by piece in the order of the elements, so that a
figure does not depend on threads. Refuses to know where values come from (`compare`).

With w the values that are stood for and w' the represented ones:

    relative error = |w - w'|_2 / |w|_2           none where |w|_2 is 0
    SQNR           = 20 log10(|w|_2 / |w - w'|_2) dB, none where either is 0

An element whose value is not finite counts as exact when w' is the same infinity, or NaN like w; it is left
out of both sums. Otherwise the error is infinite.

A group is *zero* when its scale is. A group of a grouped format is *clipped* when the clamp of the encoder
moved a code: rint(x * inv) of some element lies outside of the code interval, with inv the binary32 reciprocal
of the stored scale. An FP8 row is clipped when |x * inv| of some element is above 464, from where E4M3FN, if it
went on, would round to more than its largest value 448.

Source: tensor-formats.md sections 3.3, 3.4 and 7.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.decode import bf16_values, f16_values
from ninfer_convert.formats import DirectFormat, GroupedFormat, NumericFormat, RowScaledFormat

Numbers = NDArray[np.float32] | NDArray[np.int32]
Sums = NDArray[np.float64]

CHUNK = 2**15
"""Elements that are widened to binary64 at a time: three arrays of that size stay in a core's cache."""
FP8_CLIPPED_ABOVE = np.float32(464)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest absolute error, and the first element that has it."""

    error: float
    index: int
    """In C order."""
    value: float
    represented: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a run of elements, of a tensor, or of several tensors."""

    elements: int
    signal: float
    """Sum of w^2."""
    noise: float
    """Sum of (w - w')^2."""
    differing: int
    """Elements with w' not equal to w."""
    largest: Largest | None
    """None where w' equals w everywhere."""
    groups: int = 0
    zero_groups: int = 0
    clipped_groups: int | None = None
    """None where nothing was encoded from w: direct words, and words that were copied."""

    @property
    def relative_error(self) -> float | None:
        return math.sqrt(self.noise) / math.sqrt(self.signal) if self.signal else None

    @property
    def sqnr_db(self) -> float | None:
        if not self.signal or not self.noise:
            return None
        # two logarithms: the quotient could overflow
        return 10 * (math.log10(self.signal) - math.log10(self.noise)) if math.isfinite(self.noise) else -math.inf

    def exceeds(self, relative: float) -> bool:
        """Tells whether the relative error is above a limit; any error at all is, where |w| is 0."""
        error = self.relative_error
        return self.noise > 0 if error is None else error > relative


def loss(values: Numbers, represented: Numbers, begin: int = 0) -> Loss:
    """Returns the loss of a run of elements.

    Args:
        values: [count], what is stood for.
        represented: [count], what stands for it.
        begin: index of the first of them in the tensor.
    """
    # infinities and NaN are looked at apart
    with np.errstate(invalid="ignore"):
        return _loss(values, represented, begin)


def _loss(values: Numbers, represented: Numbers, begin: int) -> Loss:
    signal: list[float] = []
    noise: list[float] = []
    differing, largest = 0, None
    for low in range(0, len(values), CHUNK):
        part, stored = values[low : low + CHUNK], represented[low : low + CHUNK]
        wide = part.astype(np.float64)
        error = stored - wide
        count = int(np.count_nonzero(error))
        square = np.square(wide, out=wide)
        signal.append(float(square.sum()))
        if not count and math.isfinite(signal[-1]):
            continue
        if not math.isfinite(signal[-1]) or not np.isfinite(error).all():
            square, error = _finite_parts(part, stored)
            signal[-1], count = float(square.sum()), int(np.count_nonzero(error))
        differing += count
        magnitude = np.abs(error, out=error)
        index = int(np.argmax(magnitude))
        if magnitude[index] > (largest.error if largest else 0):
            largest = Largest(
                float(magnitude[index]), begin + low + index, float(part[index]), float(stored[index])
            )
        noise.append(float(np.square(magnitude, out=magnitude).sum()))
    return Loss(len(values), math.fsum(signal), math.fsum(noise), differing, largest)


def _finite_parts(values: Numbers, represented: Numbers) -> tuple[Sums, Sums]:
    """Returns w^2 of the finite values, 0 for others, and the errors, infinite where only one is finite."""
    wide, stored = values.astype(np.float64), represented.astype(np.float64)
    same = (wide == stored) | (np.isnan(wide) & np.isnan(stored))
    finite = np.isfinite(wide)
    error = np.where(same, 0.0, np.where(finite & np.isfinite(stored), stored - wide, np.inf))
    return np.square(np.where(finite, wide, 0.0)), error


def group_counts(numeric: NumericFormat, scales: NDArray[Any], values: Numbers | None) -> tuple[int, int, int | None]:
    """Returns how many groups there are, how many of them are zero, and how many were clipped.

    Args:
        scales: [rows, groups] scale words of the logical groups.
        values: [rows, K], what the rows were encoded from; None where nothing was encoded.
    """
    if isinstance(numeric, DirectFormat):
        return 0, 0, None
    zero = int(scales.size - np.count_nonzero(scales))
    if values is None or not isinstance(numeric, (GroupedFormat, RowScaledFormat)):
        return scales.size, zero, None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        if isinstance(numeric, RowScaledFormat):
            inverse = np.float32(1) / bf16_values(scales.astype(np.uint16, copy=False))
            largest = np.abs(values).max(axis=1, keepdims=True)
            return scales.size, zero, int(np.count_nonzero(largest * inverse > FP8_CLIPPED_ABOVE))
        inverse = np.float32(1) / f16_values(scales.astype(np.uint16, copy=False))
        starts = np.arange(0, values.shape[1], numeric.group)
        above = np.rint(np.maximum.reduceat(values, starts, axis=1) * inverse) > numeric.code_max
        below = np.rint(np.minimum.reduceat(values, starts, axis=1) * inverse) < numeric.code_min
    return scales.size, zero, int(np.count_nonzero(above | below))


def total(parts: Iterable[Loss]) -> Loss:
    """Returns the loss of a tensor from those of its pieces, or of several tensors, given in their order.

    The place of the largest error is only meaningful for pieces of one tensor.
    """
    every = list(parts)
    clipped = [part.clipped_groups for part in every if part.clipped_groups is not None]
    return Loss(
        sum(part.elements for part in every),
        math.fsum(part.signal for part in every),
        math.fsum(part.noise for part in every),
        sum(part.differing for part in every),
        _largest([part.largest for part in every if part.largest is not None]),
        sum(part.groups for part in every),
        sum(part.zero_groups for part in every),
        sum(clipped) if clipped else None,
    )


def _largest(found: Sequence[Largest]) -> Largest | None:
    # max keeps the first of equals
    return max(found, key=lambda largest: largest.error, default=None)
