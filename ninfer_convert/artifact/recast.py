"""Bound values whose casts are carried out by the second implementation, `recompute`, in place of `value`'s own.

The moves (slices, concats, transposes, gathers) stay those of `arrangement`: they are proven against numpy on every
range, and move bytes without looking at them.

Source: recipe.md, duty 4; tensor-formats.md section 3.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.recompute import recompute_cast
from ninfer_convert.errors import EncodeError
from ninfer_convert.plan.arrangement import Gathered, Joined, Sliced, Transposed
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.value import PIECE_BYTES, Converted, Identical, Reshaped, Span, Value, where


def recast(value: Value) -> Value:
    """Returns the same value, every cast in it replaced.

    Reading it raises EncodeError where a finite value overflows BF16, or is no integer in I32's range.
    """
    match value:
        case Converted():
            return _Recast(recast(value.of), value.dtype)
        case Joined() | Identical():
            return dataclasses.replace(value, parts=tuple(recast(part) for part in value.parts))
        case Reshaped() | Sliced() | Transposed() | Gathered():
            return dataclasses.replace(value, of=recast(value.of))
        case _:
            return value


@dataclass(frozen=True, slots=True)
class _Recast:
    of: Value
    dtype: str

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.of,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, begin: int, end: int, out: NDArray[np.uint8]) -> None:
        source, item = self.of.dtype, WORD_BYTES[self.dtype]
        # integers and F64 as what they are, other floats as words
        kind = source[0].lower() if source[0] in "IU" else "f" if source == "F64" else "u"
        step = PIECE_BYTES // WORD_BYTES[source]
        scratch = np.empty(min(step, end - begin) * WORD_BYTES[source], np.uint8)
        for low in range(begin, end, step):
            high = min(end, low + step)
            piece = scratch[: (high - low) * WORD_BYTES[source]]
            self.of.read(low, high, piece)
            try:
                cast = recompute_cast(source, self.dtype, piece.view(f"<{kind}{WORD_BYTES[source]}"))
            except EncodeError as error:
                raise EncodeError(f"{error}, counted from {where(self.of, low)}") from error
            out[(low - begin) * item : (high - begin) * item] = cast.astype(cast.dtype.newbyteorder("<")).view(np.uint8)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.of.locate(element)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        return self.of.spans(begin, end)
