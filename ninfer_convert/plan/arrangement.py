"""Values whose elements stand at other places than in their operands: joined, sliced, transposed, gathered.

Owns how these moves are carried out on bytes, in bounded memory. Refuses to know what they demand of their operands
(`moves`).

Source: recipe.md, duty 4.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.value import PIECE_BYTES, Buffer, Span, Value, elements, load

TRANSPOSE_BYTES = 16 << 20
"""Scratch of a transpose, unless one row of its result is longer."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts side by side: every outer index holds `widths[i]` elements of each part i in turn.

    A concat along axis a has one outer index per coordinate of the axes before a.
    """

    parts: tuple[Value, ...]
    shape: tuple[int, ...]
    outer: int
    widths: tuple[int, ...] = field(init=False)
    starts: tuple[int, ...] = field(init=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        widths = tuple(elements(part.shape) // self.outer for part in self.parts)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "starts", tuple(sum(widths[:i]) for i in range(len(widths))))
        object.__setattr__(self, "total", sum(widths))

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.parts

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def _part_at(self, column: int) -> int:
        return bisect.bisect_right(self.starts, column) - 1

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields (part, begin, end) for `[begin, end)` in order, in the part's own elements."""
        while begin < end:
            row, column = divmod(begin, self.total)
            part = self._part_at(column)
            inside = column - self.starts[part]
            count = min(self.widths[part] - inside, end - begin)
            first = row * self.widths[part] + inside
            yield part, first, first + count
            begin += count

    def read(self, begin: int, end: int, out: Buffer) -> None:
        item = WORD_BYTES[self.dtype]
        head_end = min(end, -(-begin // self.total) * self.total)
        tail_begin = max(head_end, end // self.total * self.total)
        if self.outer == 1:
            head_end = tail_begin = end
        self._read_runs(begin, head_end, out[: (head_end - begin) * item])
        step = max(1, PIECE_BYTES // (self.total * item)) * self.total
        for first in range(head_end, tail_begin, step):
            last = min(tail_begin, first + step)
            target = out[(first - begin) * item : (last - begin) * item]
            self._read_whole_rows(first // self.total, last // self.total, target)
        self._read_runs(tail_begin, end, out[(tail_begin - begin) * item :])

    def _read_runs(self, begin: int, end: int, out: Buffer) -> None:
        item, position = WORD_BYTES[self.dtype], 0
        for part, first, last in self._runs(begin, end):
            nbytes = (last - first) * item
            self.parts[part].read(first, last, out[position : position + nbytes])
            position += nbytes

    def _read_whole_rows(self, begin: int, end: int, out: Buffer) -> None:
        item, rows = WORD_BYTES[self.dtype], end - begin
        target = out.reshape(rows, self.total * item)
        for part, width, start in zip(self.parts, self.widths, self.starts, strict=True):
            scratch = np.empty(rows * width * item, np.uint8)
            part.read(begin * width, end * width, scratch)
            target[:, start * item : (start + width) * item] = scratch.reshape(rows, -1)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        part, first, _ = next(self._runs(element, element + 1))
        return self.parts[part].locate(first)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        if self.outer == 1:
            for index, first, last in self._runs(begin, end):
                yield from self.parts[index].spans(first, last)
        else:
            rows = begin // self.total, -(-end // self.total)
            for part, width in zip(self.parts, self.widths, strict=True):
                yield from part.spans(rows[0] * width, rows[1] * width)


@dataclass(frozen=True, slots=True)
class Sliced:
    """Elements `[start, start + width)` of every outer run of `stride` elements."""

    of: Value
    shape: tuple[int, ...]
    start: int
    width: int
    stride: int

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.of,)

    @property
    def dtype(self) -> str:
        return self.of.dtype

    def _source(self, element: int) -> int:
        row, column = divmod(element, self.width)
        return row * self.stride + self.start + column

    def read(self, begin: int, end: int, out: Buffer) -> None:
        item = WORD_BYTES[self.dtype]
        if self.width * item >= PIECE_BYTES // 16 or self.stride > 64 * self.width:
            self._read_runs(begin, end, out)
            return
        rows_per_piece = max(1, PIECE_BYTES // (self.stride * item))
        rows = begin // self.width, -(-end // self.width)
        for row in range(*rows, rows_per_piece):
            last = min(rows[1], row + rows_per_piece)
            scratch = np.empty((last - row) * self.stride * item, np.uint8)
            self.of.read(row * self.stride, last * self.stride, scratch)
            columns = scratch.reshape(last - row, -1)[:, self.start * item : (self.start + self.width) * item]
            low, high = max(begin, row * self.width), min(end, last * self.width)
            flat = np.ascontiguousarray(columns).reshape(-1)
            offset = row * self.width
            out[(low - begin) * item : (high - begin) * item] = flat[(low - offset) * item : (high - offset) * item]

    def _read_runs(self, begin: int, end: int, out: Buffer) -> None:
        item, position = WORD_BYTES[self.dtype], begin
        while position < end:
            count = min(self.width - position % self.width, end - position)
            source = self._source(position)
            self.of.read(source, source + count, out[(position - begin) * item : (position - begin + count) * item])
            position += count

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.of.locate(self._source(element))

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        if begin < end:
            yield from self.of.spans(self._source(begin), self._source(end - 1) + 1)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Axes permuted; read in runs of rows of the result, each gathered from one slice of the operand."""

    of: Value
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.of,)

    @property
    def dtype(self) -> str:
        return self.of.dtype

    def read(self, begin: int, end: int, out: Buffer) -> None:
        item, row_elements = WORD_BYTES[self.dtype], elements(self.shape[1:])
        axis = self.axes[0]
        inner = elements(self.of.shape[axis + 1 :])
        rows_per_piece = max(1, TRANSPOSE_BYTES // (row_elements * item))
        for row in range(begin // row_elements, -(-end // row_elements), rows_per_piece):
            last = min(-(-end // row_elements), row + rows_per_piece)
            sliced_shape = (*self.of.shape[:axis], last - row, *self.of.shape[axis + 1 :])
            part = Sliced(self.of, sliced_shape, row * inner, (last - row) * inner, self.of.shape[axis] * inner)
            words = load(part).reshape(*sliced_shape, item)
            turned = np.ascontiguousarray(words.transpose(*self.axes, len(self.axes))).reshape(-1)
            low, high = max(begin, row * row_elements), min(end, last * row_elements)
            offset = row * row_elements
            out[(low - begin) * item : (high - begin) * item] = turned[(low - offset) * item : (high - offset) * item]

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        position = np.unravel_index(element, self.shape)
        source = [0] * len(self.axes)
        for i, axis in enumerate(self.axes):
            source[axis] = int(position[i])
        return self.of.locate(int(np.ravel_multi_index(source, self.of.shape)))

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        # Every block needs a little of the whole operand: fetched or dropped for one, it would be again for the next.
        return iter(())


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows chosen by number, in order; neighbouring rows are read together."""

    of: Value
    ids: npt.NDArray[np.int64]
    shape: tuple[int, ...]
    ids_of: Value
    """The value that the numbers are the elements of."""

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.of, self.ids_of)

    @property
    def dtype(self) -> str:
        return self.of.dtype

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields element ranges of the operand that together are elements `[begin, end)`."""
        width = elements(self.shape[1:])
        first_row, last_row = begin // width, -(-end // width)
        ids = self.ids[first_row:last_row]
        breaks = np.flatnonzero(np.diff(ids) != 1) + 1
        for chosen in np.split(ids, breaks):
            low, high = int(chosen[0]) * width, (int(chosen[-1]) + 1) * width
            position = first_row * width
            yield low + max(0, begin - position), high - max(0, position + (high - low) - end)
            first_row += len(chosen)

    def read(self, begin: int, end: int, out: Buffer) -> None:
        item, position = WORD_BYTES[self.dtype], 0
        for low, high in self._runs(begin, end):
            self.of.read(low, high, out[position : position + (high - low) * item])
            position += (high - low) * item

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.of.locate(next(self._runs(element, element + 1))[0])

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        return iter(())
