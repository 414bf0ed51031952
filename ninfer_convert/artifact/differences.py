"""Where two stored forms of the same rows of a tensor differ first, and in how many words.

Owns the way from a byte of a plane to the row, column or group that it belongs to. Refuses to know where the
bytes come from.

Source: layouts.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.decode import unswizzle_scales
from ninfer_convert.formats import BlockScaledFormat, DirectFormat, GroupedFormat, NumericFormat, RowScaledFormat
from ninfer_convert.plan.value import coordinates

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Difference:
    """Words of one plane that differ."""

    plane: str
    position: int
    """The first by the order of the rows and elements; only compared within one plane of one tensor."""
    detail: str
    """Where the first lies, what was found and what is required."""
    count: int
    """How many words of the plane differ; 0 where they were not counted."""


def differing_plane(numeric: NumericFormat, plane: str, begin: int, found: Bytes, wanted: Bytes) -> Difference | None:
    """Compares rows of one plane of a quantized tensor.

    Args:
        plane: a plane that has rows.
        begin: the first row.
        found, wanted: [rows, row_bytes].
    """
    if np.array_equal(found, wanted):
        return None
    stored, required = _natural(numeric, plane, found), _natural(numeric, plane, wanted)
    differs = stored != required
    width = differs.shape[1]
    row, index = divmod(int(np.argmax(differs)), width)
    pair = stored[row, index], required[row, index]
    place = f"plane {plane}, row {begin + row}{_place(numeric, plane, index, int(pair[0] ^ pair[1]))}"
    return Difference(plane, (begin + row) * width + index, _told(place, *pair), int(np.count_nonzero(differs)))


def differing_divisor(found: Bytes, wanted: Bytes) -> Difference | None:
    """Compares the words of the divisor plane, [4] bytes each."""
    if np.array_equal(found, wanted):
        return None
    return Difference("divisor", 0, _told("plane divisor", found.view("<u4")[0], wanted.view("<u4")[0]), 1)


def differing_words(
    direct: DirectFormat, shape: tuple[int, ...], begin: int, found: Bytes, wanted: Bytes
) -> Difference | None:
    """Compares words of a direct tensor, given as flat bytes, from element begin on."""
    if np.array_equal(found, wanted):
        return None
    stored, required = found.view(f"<u{direct.word_bytes}"), wanted.view(f"<u{direct.word_bytes}")
    differs = np.flatnonzero(stored != required)
    first = int(differs[0])
    place = coordinates(begin + first, shape) if shape else "the scalar"
    return Difference("words", begin + first, _told(place, stored[first], required[first]), len(differs))


def differing_bytes(begin: int, found: Bytes, wanted: Bytes) -> Difference | None:
    """Compares bytes of a resource from byte begin on."""
    if np.array_equal(found, wanted):
        return None
    differs = np.flatnonzero(found != wanted)
    first = int(differs[0])
    return Difference("bytes", begin + first, _told(f"byte {begin + first}", found[first], wanted[first]), len(differs))


def _told(place: str, found: Any, wanted: Any) -> str:
    digits = 2 * found.dtype.itemsize
    return f"{place}: 0x{int(found):0{digits}x} found, 0x{int(wanted):0{digits}x} required"


def _natural(numeric: NumericFormat, plane: str, words: Bytes) -> NDArray[Any]:
    """Returns a plane's words, [rows, words per row], in the order of the elements they belong to."""
    if plane != "scale":
        return words
    return unswizzle_scales(words) if isinstance(numeric, BlockScaledFormat) else words.view("<u2")


def _place(numeric: NumericFormat, plane: str, index: int, changed: int) -> str:
    """Returns where in its row a word lies: the group of a scale, the first column whose code a byte changes."""
    if plane == "scale":
        return "" if isinstance(numeric, RowScaledFormat) else f", group {index}"
    lowest = (changed & -changed).bit_length() - 1
    if isinstance(numeric, GroupedFormat) and plane == "high":
        return f", column {(8 * index + lowest) // (numeric.code_bits - 4)}"
    if isinstance(numeric, DirectFormat) or numeric.code_bits == 8:
        return f", column {index}"
    return f", column {2 * index + lowest // 4}"
