"""The value rules of every format, checked over a run of stored bytes at a time.

Owns which words are legal and where an illegal one lies. Refuses to know files and threads (`verify`), and
what legal words mean (`decode`).

A tensor is checked in runs of units: groups (grouped formats and NVFP4, there in stored order), codes (FP8
rows) or bytes (direct formats, which have no illegal words). A run lies inside one row or covers whole rows.
The common case, nothing wrong, costs about one integer reduction per plane.

Source: tensor-formats.md sections 3.3, 3.4, 5 and 6.1; layouts.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.formats import (
    BlockScaledFormat,
    DirectFormat,
    GroupedFormat,
    NumericFormat,
    RowScaledFormat,
)
from ninfer_convert.layout import BASE_GROUP_BYTES, SWIZZLE_ROWS, high_group_bytes, padded_k

Bytes = NDArray[np.uint8]
Planes = Mapping[str, Bytes]
Spans = Mapping[str, tuple[int, int]]

LARGEST_F16 = 0x7BFF
LARGEST_BF16 = 0x7F7F
LARGEST_E4M3FN = 0x7E
LARGEST_F32 = 0x7F7FFFFF
"""The word of the largest finite value; every unsigned word above it is negative, infinite or NaN."""

SCALE_WORD = "scale-word"
ZERO_SCALE = "zero-scale"
CODE_WORD = "code-word"
PADDING = "padding"
DIVISOR = "divisor"


@dataclass(frozen=True, slots=True)
class Finding:
    """Violations of one rule in one run: the first by position, and how many."""

    check: str
    position: int
    """The first violation in the order of the tensor's elements; only compared within one check."""
    detail: str
    """Where the first lies, what was found there and what is required."""
    count: int


class Rules(Protocol):
    """The rules of one tensor."""

    rows: int
    row_units: int

    def units_within(self, nbytes: int) -> int:
        """Returns how many units occupy about nbytes bytes, all planes together; may be 0."""

    def spans(self, begin: int, end: int) -> Spans:
        """Returns what a check of units `[begin, end)` reads: plane -> span of the plane's bytes."""

    def check(self, begin: int, end: int, planes: Planes) -> list[Finding]:
        """Returns what is wrong with units `[begin, end)`, whose bytes are given, plane by plane."""


def rules_of(numeric: NumericFormat, shape: tuple[int, ...]) -> Rules:
    """Returns the rules of a tensor of a shape that the format's layout stores."""
    if isinstance(numeric, GroupedFormat):
        return _Grouped(numeric, *shape)
    if isinstance(numeric, BlockScaledFormat):
        return _BlockScaled(numeric, *shape)
    if isinstance(numeric, RowScaledFormat):
        return _RowScaled(*shape)
    return _Direct(numeric, shape)


def runs(rules: Rules, run_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields units `[begin, end)` that cover a tensor in order, each run about run_bytes bytes."""
    limit = max(1, rules.units_within(run_bytes))
    width, total = rules.row_units, rules.rows * rules.row_units
    if width <= limit:
        step = limit // width * width
        for begin in range(0, total, step):
            yield begin, min(begin + step, total)
        return
    for row in range(0, total, width):
        for begin in range(row, row + width, limit):
            yield begin, min(begin + limit, row + width)


class _Direct:
    """Every word of a direct format is legal."""

    rows = 1

    def __init__(self, direct: DirectFormat, shape: tuple[int, ...]) -> None:
        self.row_units = math.prod(shape) * direct.word_bytes

    def units_within(self, nbytes: int) -> int:
        return nbytes

    def spans(self, begin: int, end: int) -> Spans:
        return {"words": (begin, end)}

    def check(self, begin: int, end: int, planes: Planes) -> list[Finding]:
        return []


class _Grouped:
    def __init__(self, grouped: GroupedFormat, n: int, k: int) -> None:
        self.grouped, self.k = grouped, k
        self.rows, self.row_units = n, padded_k(k) // grouped.group
        self.used_groups = -(-k // grouped.group)
        self.high_bytes = high_group_bytes(grouped)
        self.tail_base, self.tail_high = _tail_masks(grouped, k % grouped.group)

    def units_within(self, nbytes: int) -> int:
        return nbytes // (BASE_GROUP_BYTES + self.high_bytes + 2)

    def spans(self, begin: int, end: int) -> Spans:
        spans = {"base": (begin * BASE_GROUP_BYTES, end * BASE_GROUP_BYTES), "scale": (begin * 2, end * 2)}
        if self.high_bytes:
            spans["high"] = (begin * self.high_bytes, end * self.high_bytes)
        return spans

    def check(self, begin: int, end: int, planes: Planes) -> list[Finding]:
        scale = planes["scale"].view("<u2")
        found: list[Finding] = []
        if scale.max() > LARGEST_F16:
            found.append(self._scale_word(begin, scale))
        if scale.min() == 0:
            found += self._zero_scale(begin, scale, planes)
        if self.grouped.code_bits == 8 and planes["base"].view(np.int8).min() < self.grouped.code_min:
            found.append(self._code_word(begin, planes["base"]))
        if self.k % 128:
            found += self._padding(begin, end, scale, planes)
        return found

    def _scale_word(self, begin: int, scale: NDArray[Any]) -> Finding:
        bad = np.flatnonzero(scale > LARGEST_F16)
        found = f"scale word 0x{int(scale[bad[0]]):04x}; a finite, non-negative binary16 word is required"
        return self._finding(SCALE_WORD, begin + bad, found)

    def _zero_scale(self, begin: int, scale: NDArray[Any], planes: Planes) -> list[Finding]:
        zero = np.flatnonzero(scale == 0)
        if self.used_groups < self.row_units:
            zero = zero[(begin + zero) % self.row_units < self.used_groups]
        bad = _not_zero(planes["base"], BASE_GROUP_BYTES, zero)
        if self.high_bytes:
            bad = np.union1d(bad, _not_zero(planes["high"], self.high_bytes, zero))
        if not bad.size:
            return []
        found = "the scale is zero and a code is not; zero codes are required"
        return [self._finding(ZERO_SCALE, begin + bad, found)]

    def _code_word(self, begin: int, base: Bytes) -> Finding:
        # only W8, one byte per lane, has an illegal code word
        bad = np.flatnonzero(base == 0x80)
        group, lane = divmod(int(bad[0]), BASE_GROUP_BYTES)
        row, group = divmod(begin + group, self.row_units)
        column = group * self.grouped.group + lane
        detail = f"row {row}, group {group}, column {column}: code -128; -127 to 127 is required"
        return Finding(CODE_WORD, begin * BASE_GROUP_BYTES + int(bad[0]), detail, len(bad))

    def _padding(self, begin: int, end: int, scale: NDArray[Any], planes: Planes) -> list[Finding]:
        first = begin % self.row_units
        width = min(self.row_units - first, end - begin)
        found: list[Finding] = []
        if self.tail_base.any() and first < self.used_groups <= first + width:
            tail = self.used_groups - 1 - first
            dirty = (planes["base"].reshape(-1, width, BASE_GROUP_BYTES)[:, tail] & self.tail_base).any(axis=1)
            if self.high_bytes:
                high = planes["high"].reshape(-1, width, self.high_bytes)[:, tail]
                dirty |= (high & self.tail_high).any(axis=1)
            if dirty.any():
                detail = f"a lane at column {self.k} or beyond holds a code; code 0 is required"
                found.append(self._finding(PADDING, begin + tail + np.flatnonzero(dirty) * width, detail))
        beyond = max(0, self.used_groups - first)
        if beyond < width:
            dirty_groups = scale.reshape(-1, width)[:, beyond:] != 0
            for name in ("base", "high") if self.high_bytes else ("base",):
                dirty_groups |= planes[name].reshape(-1, width, len(planes[name]) // len(scale))[:, beyond:].any(axis=2)
            if dirty_groups.any():
                row, group = np.nonzero(dirty_groups)
                detail = f"a group wholly beyond column {self.k} is not zero; zero codes and scale 0x0000 are required"
                found.append(self._finding(PADDING, begin + row * width + beyond + group, detail))
        return found

    def _finding(self, check: str, groups: NDArray[Any], found: str) -> Finding:
        row, group = divmod(int(groups[0]), self.row_units)
        return Finding(check, int(groups[0]), f"row {row}, group {group}: {found}", len(groups))


class _BlockScaled:
    """Units are groups in the order in which the scale plane stores them."""

    rows = 1

    def __init__(self, block_scaled: BlockScaledFormat, n: int, k: int) -> None:
        self.groups = k // block_scaled.group
        self.code_bytes = block_scaled.group * block_scaled.code_bits // 8
        self.row_units = n * self.groups

    def units_within(self, nbytes: int) -> int:
        return nbytes // (self.code_bytes + 1)

    def spans(self, begin: int, end: int) -> Spans:
        spans = {"code": (begin * self.code_bytes, end * self.code_bytes), "scale": (begin, end)}
        if begin == 0:
            spans["divisor"] = (0, 4)
        return spans

    def check(self, begin: int, end: int, planes: Planes) -> list[Finding]:
        found: list[Finding] = []
        if planes["scale"].max() > LARGEST_E4M3FN:
            found.append(self._scale_word(begin, planes["scale"]))
        if "divisor" in planes:
            word = int(planes["divisor"].view("<u4")[0])
            if not 0 < word <= LARGEST_F32:
                detail = f"divisor word 0x{word:08x}; a finite, positive binary32 word is required"
                found.append(Finding(DIVISOR, 0, detail, 1))
        return found

    def _scale_word(self, begin: int, scale: Bytes) -> Finding:
        bad = np.flatnonzero(scale > LARGEST_E4M3FN)
        stored = begin + bad
        block, offset = np.divmod(stored, SWIZZLE_ROWS * self.groups)
        tile, place = np.divmod(offset, 512)
        row = block * SWIZZLE_ROWS + place % 16 // 4 * 32 + place // 16
        position = row * self.groups + tile * 4 + place % 4
        first = int(np.argmin(position))
        word = int(scale[bad[first]])
        where = f"row {int(row[first])}, group {int(position[first]) % self.groups}"
        detail = f"{where}: scale word 0x{word:02x}; a finite, non-negative E4M3FN word is required"
        return Finding(SCALE_WORD, int(position[first]), detail, len(bad))


class _RowScaled:
    def __init__(self, n: int, k: int) -> None:
        self.rows, self.row_units = n, k

    def units_within(self, nbytes: int) -> int:
        return nbytes * self.row_units // (self.row_units + 2)

    def spans(self, begin: int, end: int) -> Spans:
        first, last = begin // self.row_units, (end - 1) // self.row_units
        return {"code": (begin, end), "scale": (2 * first, 2 * last + 2)}

    def check(self, begin: int, end: int, planes: Planes) -> list[Finding]:
        code, scale = planes["code"], planes["scale"].view("<u2")
        first_row, first_column = divmod(begin, self.row_units)
        found: list[Finding] = []
        if first_column == 0 and scale.max() > LARGEST_BF16:
            bad = np.flatnonzero(scale > LARGEST_BF16)
            row, word = first_row + int(bad[0]), int(scale[bad[0]])
            detail = f"row {row}: scale word 0x{word:04x}; a finite, non-negative BF16 word is required"
            found.append(Finding(SCALE_WORD, row, detail, len(bad)))
        if _has_nan(code):
            bad = np.flatnonzero(code & 0x7F == 0x7F)
            row, column = divmod(begin + int(bad[0]), self.row_units)
            detail = f"row {row}, column {column}: code word 0x{int(code[bad[0]]):02x} (NaN); a finite one is required"
            found.append(Finding(CODE_WORD, begin + int(bad[0]), detail, len(bad)))
        if scale.min() == 0:
            found += self._zero_scale(begin, code.reshape(len(scale), -1), np.flatnonzero(scale == 0))
        return found

    def _zero_scale(self, begin: int, code: Bytes, zero: NDArray[Any]) -> list[Finding]:
        magnitude = code[zero] & 0x7F
        if magnitude.max() == 0:
            return []
        bad_row, bad_column = np.nonzero(magnitude)
        position = begin + int(zero[bad_row[0]]) * code.shape[1] + int(bad_column[0])
        row, column = divmod(position, self.row_units)
        found = f"code word 0x{int(code[zero[bad_row[0]], bad_column[0]]):02x} under a zero scale"
        detail = f"row {row}, column {column}: {found}; 0x00 or 0x80 is required"
        return [Finding(ZERO_SCALE, position, detail, len(bad_row))]


def _tail_masks(grouped: GroupedFormat, lanes: int) -> tuple[Bytes, Bytes]:
    """Returns the bits of a group's base and high bytes that belong to lanes from `lanes` on; none for 0."""
    is_padding = np.arange(grouped.group) >= (lanes or grouped.group)
    bits = min(grouped.code_bits, 4) if grouped.code_bits < 8 else 8
    base = np.packbits(np.repeat(is_padding, bits), bitorder="little")
    high = np.packbits(np.repeat(is_padding, grouped.code_bits - bits), bitorder="little")
    return base, high


def _not_zero(plane: Bytes, group_bytes: int, groups: NDArray[Any]) -> NDArray[Any]:
    """Returns those of the chosen groups that have a byte that is not zero."""
    if not groups.size:
        return groups
    # gathered as opaque items, and reduced as a whole, which is much quicker than group by group
    chosen: Bytes = plane.view(f"V{group_bytes}")[groups].view(np.uint8)
    if chosen.max() == 0:
        return groups[:0]
    bad: NDArray[Any] = groups[chosen.reshape(len(groups), -1).any(axis=1)]
    return bad


def _has_nan(code: Bytes) -> bool:
    """Tells whether an E4M3FN word is 0x7f, the largest int8, or 0xff, the largest uint8."""
    return bool(code.max() == 0xFF or code.view(np.int8).max() == 0x7F)
