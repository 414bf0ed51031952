"""How the scales of a quantized tensor are spread: counts of their words in bins of equal width.

Owns the one pass over scale planes. Nonnegative floating-point words order as their values, so a bin is a run
of words that share their upper bits: every power of two falls into the same number of bins, each of which is
exact. Refuses to know files of other tools and pictures (`page`).

Source: tensor-formats.md sections 3.3, 3.4 and 6.1; layouts.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.rules import LARGEST_BF16, LARGEST_E4M3FN, LARGEST_F16
from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS, DirectFormat, GroupedFormat, NumericFormat, RowScaledFormat
from ninfer_convert.layout import Plane, geometry

MAX_BINS = 64
WORDS = 2**16


@dataclass(frozen=True, slots=True)
class Histogram:
    """The scales of the logical groups of one tensor, or of the rows of an FP8 tensor.

    Bin i holds the words `[(first + i) << shift, (first + i + 1) << shift)`, zero words apart.
    """

    word: str
    """What a scale word is: F16, BF16 or E4M3FN."""
    groups: int
    zero: int
    invalid: int
    """Words that no scale may have: negative, infinite or NaN."""
    shift: int
    first: int
    counts: tuple[int, ...]
    """Of positive legal words; empty when there are none, else the first and the last are not 0."""
    least: int | None
    median: int | None
    largest: int | None
    """Of the positive legal words; the median is the lower one."""


def scale_plane(record: TensorRecord) -> Plane | None:
    """Returns the plane that holds a tensor's scales; None for a direct format."""
    numeric = FORMATS[record.format]
    if isinstance(numeric, DirectFormat):
        return None
    return next(plane for plane in geometry(numeric, record.shape).planes if plane.name == "scale")


def scale_histogram(
    artifact: Artifact, record: TensorRecord, advance: Callable[[int], object] | None = None
) -> Histogram | None:
    """Returns the spread of a tensor's scales; None for a direct format. Reads its scale plane once, in blocks.

    Args:
        advance: called with the bytes read since its last call.

    Raises:
        ArtifactError: the file was cut.
        OutputError: a read fails.
    """
    plane = scale_plane(record)
    if plane is None:
        return None
    numeric = FORMATS[record.format]
    counts = _word_counts(artifact, record, numeric, plane, advance)
    word, largest = _scale_words(numeric)
    groups, zero, invalid = int(counts.sum()), int(counts[0]), int(counts[largest + 1 :].sum())
    positive = counts[1 : largest + 1]
    used = np.flatnonzero(positive)
    ends = (int(used[0]) + 1, int(used[-1]) + 1) if used.size else (None, None)
    return Histogram(word, groups, zero, invalid, *binned(positive, 1), ends[0], _median(positive, 1), ends[1])


def binned(counts: NDArray[np.int64], begin: int) -> tuple[int, int, tuple[int, ...]]:
    """Returns shift, number of the first bin, and bins: the narrowest of a power of two that are `MAX_BINS` at most.

    Args:
        counts: [words], how often each word from `begin` on occurs.
    """
    used = np.flatnonzero(counts)
    if not used.size:
        return 0, 0, ()
    low, high = int(used[0]) + begin, int(used[-1]) + begin
    shift = 0
    while (high >> shift) - (low >> shift) >= MAX_BINS:
        shift += 1
    first = low >> shift
    bins = np.zeros((high >> shift) - first + 1, np.int64)
    np.add.at(bins, ((used + begin) >> shift) - first, counts[used])
    return shift, first, tuple(bins.tolist())


def _median(counts: NDArray[np.int64], begin: int) -> int | None:
    sums = np.cumsum(counts)
    total = int(sums[-1])
    return int(np.searchsorted(sums, (total + 1) // 2)) + begin if total else None


def _word_counts(
    artifact: Artifact,
    record: TensorRecord,
    numeric: NumericFormat,
    plane: Plane,
    advance: Callable[[int], object] | None,
) -> NDArray[np.int64]:
    """Returns how often each scale word occurs, [WORDS]; groups wholly beyond K are left out."""
    dtype = "<u2" if isinstance(numeric, (GroupedFormat, RowScaledFormat)) else "u1"
    row_words = plane.row_bytes // np.dtype(dtype).itemsize
    used = -(-record.shape[1] // numeric.group) if isinstance(numeric, GroupedFormat) else row_words
    begin = artifact.payload_offset + record.offset + plane.offset
    counts, seen = np.zeros(WORDS, np.int64), 0
    for block in artifact.blocks(begin, begin + plane.nbytes, f"object '{printable(record.name)}'"):
        words = block.view(dtype)
        seen += len(words)
        if used < row_words:
            words = words[(seen - len(words) + np.arange(len(words))) % row_words < used]
        counts += np.bincount(words, minlength=WORDS)
        if advance is not None:
            advance(len(block))
    return counts


def _scale_words(numeric: NumericFormat) -> tuple[str, int]:
    """Returns what a scale word is, and the largest legal one."""
    if isinstance(numeric, GroupedFormat):
        return "F16", LARGEST_F16
    return ("BF16", LARGEST_BF16) if isinstance(numeric, RowScaledFormat) else ("E4M3FN", LARGEST_E4M3FN)
