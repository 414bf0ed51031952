"""The values that a planned tensor stands for: those of its source, before any encoder and any rounding cast.

Owns the way from bound values and words to numbers. Refuses to know artifacts.

Source: tensor-formats.md sections 3 and 7; recipe.md, duty 4.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.decode import E4M3FN_VALUES, bf16_values, block_scaled_values, f16_values
from ninfer_convert.artifact.decode import codes as codes_of
from ninfer_convert.formats import NVFP4
from ninfer_convert.plan.arrangement import Gathered, Joined, Sliced, Transposed
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import FLOAT_DTYPES, PlannedTensor
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import Converted, Identical, Reshaped, Value

Numbers = NDArray[np.float32] | NDArray[np.int32]


class SourceValues:
    """The numbers of one planned tensor, in any range of its elements. Usable from several threads."""

    def __init__(self, item: PlannedTensor) -> None:
        self.encoded = item.encoder is not None
        """Whether codes were chosen for these values, not copied with them."""
        value = item.value
        self._k = item.shape[-1] if item.shape else 1
        self._source = value if isinstance(value, Words) else _before_rounding(value)

    def read(self, begin: int, end: int) -> Numbers:
        """Returns elements `[begin, end)` in C order: binary32, or int32 for I32; whole rows of a word copy.

        Raises:
            SourceError: a read failed, or values that must be identical differ.
        """
        if isinstance(self._source, Words):
            return self._copied(self._source, begin // self._k, end // self._k)
        words = _read(self._source, begin, end)
        if self._source.dtype == "I32":
            return words.view("<i4").astype(np.int32, copy=False)
        if self._source.dtype == "F32":
            return words.view("<f4").astype(np.float32, copy=False)
        halves = words.view("<u2").astype(np.uint16, copy=False)
        return bf16_values(halves) if self._source.dtype == "BF16" else f16_values(halves)

    def _copied(self, words: Words, begin: int, end: int) -> NDArray[np.float32]:
        width, groups = words.codes.shape[1], words.scales.shape[1]
        codes = _read(words.codes, begin * width, end * width).reshape(-1, width)
        scales = _read(words.scales, begin * groups, end * groups)
        if words.divisor is None:
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                multipliers = bf16_values(scales.view("<u2").astype(np.uint16, copy=False))
                rows: NDArray[np.float32] = E4M3FN_VALUES[codes] * multipliers[:, None]
            return rows.reshape(-1)
        natural = codes_of(NVFP4, self._k, {"code": codes}).view(np.uint8)
        return block_scaled_values(scales.reshape(-1, groups), natural, words.divisor).reshape(-1)


def _read(value: Value, begin: int, end: int) -> NDArray[np.uint8]:
    out = np.empty((end - begin) * WORD_BYTES[value.dtype], np.uint8)
    value.read(begin, end, out)
    return out


def _before_rounding(value: Value) -> Value:
    """Returns a value without its rounding casts, in F32 where it has any; without any, the value itself."""
    return _exact(value) if _is_rounded(value) else value


def _is_rounded(value: Value) -> bool:
    match value:
        case Converted():
            return value.rule == "nearest-even" or _is_rounded(value.of)
        case Joined() | Identical():
            return any(map(_is_rounded, value.parts))
        case Reshaped() | Sliced() | Transposed() | Gathered():
            return _is_rounded(value.of)
        case _:
            return False


def _exact(value: Value) -> Value:
    match value:
        case Converted() if value.dtype in FLOAT_DTYPES:
            return _exact(value.of)
        case Identical():
            # what is the same after rounding need not be so before
            return _exact(value.parts[0])
        case Joined():
            return dataclasses.replace(value, parts=tuple(map(_exact, value.parts)))
        case Reshaped() | Sliced() | Transposed() | Gathered():
            return dataclasses.replace(value, of=_exact(value.of))
        case _ if value.dtype in ("BF16", "F16"):
            return Converted(value, "F32", "exact")
        case _:
            return value
