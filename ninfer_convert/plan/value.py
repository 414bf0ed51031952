"""Bound values: what an expression yields, readable in any range of its elements, in bounded memory.

Owns how moves and casts are carried out on bytes. Refuses to know recipes and formats; `transform` builds
these from expressions. Every value is a flat run of elements in C order under a shape; `read` fills a
caller's buffer with elements `[begin, end)` and may be called from any thread.

Source: recipe.md, duty 4.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ninfer_convert.errors import SourceError, printable
from ninfer_convert.plan.casts import WORD_BYTES, cast_words
from ninfer_convert.source.checkpoint import Checkpoint, TensorInfo

Buffer = npt.NDArray[np.uint8]

Span = tuple[Checkpoint, TensorInfo, int, int]
"""Bytes `[begin, end)` of one tensor of one checkpoint."""

PIECE_BYTES = 1 << 20
"""Scratch of a cast, a comparison or a column move, per thread and node."""

TRANSPOSE_BYTES = 16 << 20
"""Scratch of a transpose, unless one row of its result is longer."""


class Value(Protocol):
    """A shaped run of elements of one safetensors dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self, begin: int, end: int, out: Buffer) -> None:
        """Fills `out`, uint8 of exactly the right length, with elements `[begin, end)` in C order."""

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        """Returns the source tensor of one element, the element's index in it, and that tensor's shape."""

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Yields about which bytes of which tensors a read of `[begin, end)` will touch."""


def elements(shape: Sequence[int]) -> int:
    """Returns the number of elements of a shape."""
    return math.prod(shape)


def load(value: Value) -> Buffer:
    """Returns all bytes of a small value."""
    out = np.empty(elements(value.shape) * WORD_BYTES[value.dtype], np.uint8)
    value.read(0, elements(value.shape), out)
    return out


def where(value: Value, element: int) -> str:
    """Returns `tensor T, row R, column C` for one element of a value, in the coordinates of its source."""
    name, index, shape = value.locate(element)
    return f"tensor {printable(name)}, {coordinates(index, shape)}"


def coordinates(index: int, shape: tuple[int, ...]) -> str:
    """Returns `row R, column C` of a flat index; a vector has an index only, rank above 2 a coordinate list."""
    if len(shape) == 2:
        return f"row {index // shape[1]}, column {index % shape[1]}"
    if len(shape) < 2:
        return f"index {index}"
    return f"coordinate {[int(c) for c in np.unravel_index(index, shape)]}"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A whole tensor of a checkpoint."""

    source: str
    checkpoint: Checkpoint
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.dtype

    def read(self, begin: int, end: int, out: Buffer) -> None:
        self.checkpoint.read_into(self.info, begin * WORD_BYTES[self.dtype], out)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return f"{self.source}:{self.info.name}", element, self.shape

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        item = WORD_BYTES[self.dtype]
        yield self.checkpoint, self.info, begin * item, end * item


@dataclass(frozen=True, slots=True)
class Constant:
    """Words computed while planning: a shortlist, a reciprocal, a set of ids."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    words: npt.NDArray[Any]
    origins: tuple[SourceTensor, ...] = ()
    """The source tensors it was computed from."""

    def read(self, begin: int, end: int, out: Buffer) -> None:
        out[:] = self.words.reshape(-1)[begin:end].view(np.uint8)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.name, element, self.shape

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        return iter(())


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements under another shape."""

    of: Value
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.of.dtype

    def read(self, begin: int, end: int, out: Buffer) -> None:
        self.of.read(begin, end, out)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.of.locate(element)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        return self.of.spans(begin, end)


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


@dataclass(frozen=True, slots=True)
class Identical:
    """Operands that must be equal bit for bit; every read compares them all."""

    parts: tuple[Value, ...]
    demand: str
    """Who says that they must be equal: the end of the message when they are not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    def read(self, begin: int, end: int, out: Buffer) -> None:
        self.parts[0].read(begin, end, out)
        item = WORD_BYTES[self.dtype]
        step = PIECE_BYTES // item
        scratch = np.empty(min(step, end - begin) * item, np.uint8)
        for part in self.parts[1:]:
            for low in range(begin, end, step):
                high = min(end, low + step)
                other, mine = scratch[: (high - low) * item], out[(low - begin) * item : (high - begin) * item]
                part.read(low, high, other)
                if not np.array_equal(mine, other):
                    self._fail(part, low, mine.reshape(-1, item), other.reshape(-1, item))

    def _fail(self, part: Value, low: int, mine: Buffer, other: Buffer) -> None:
        index = int(np.flatnonzero((mine != other).any(axis=1))[0])
        found, required = (words[index, ::-1].tobytes().hex() for words in (other, mine))
        raise SourceError(
            f"{where(part, low + index)}: word 0x{found} differs from 0x{required} at "
            f"{where(self.parts[0], low + index)}; {self.demand}"
        )

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.parts[0].locate(element)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        for part in self.parts:
            yield from part.spans(begin, end)


@dataclass(frozen=True, slots=True)
class Converted:
    """Elements cast to another dtype under a named rule; see `cast_words`."""

    of: Value
    dtype: str
    rule: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, begin: int, end: int, out: Buffer) -> None:
        source_item, item = WORD_BYTES[self.of.dtype], WORD_BYTES[self.dtype]
        step = PIECE_BYTES // source_item
        scratch = np.empty(min(step, end - begin) * source_item, np.uint8)
        for low in range(begin, end, step):
            high = min(end, low + step)
            words = scratch[: (high - low) * source_item]
            self.of.read(low, high, words)
            converted, bad = cast_words(words, self.of.dtype, self.dtype)
            if bad is not None:
                index, reason = bad
                raise SourceError(f"{where(self.of, low + index)}: {reason}")
            out[(low - begin) * item : (high - begin) * item] = converted.view(np.uint8)

    def locate(self, element: int) -> tuple[str, int, tuple[int, ...]]:
        return self.of.locate(element)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        return self.of.spans(begin, end)


def source_tensors(value: Value) -> Iterator[SourceTensor]:
    """Yields the source tensors of a value, left to right, repeats included."""
    match value:
        case SourceTensor():
            yield value
        case Joined() | Identical():
            for part in value.parts:
                yield from source_tensors(part)
        case Constant():
            yield from value.origins
        case Gathered():
            yield from source_tensors(value.of)
            yield from source_tensors(value.ids_of)
        case Reshaped() | Sliced() | Transposed() | Converted():
            yield from source_tensors(value.of)


def constants(value: Value) -> Iterator[Constant]:
    """Yields what was computed while planning and is part of a value."""
    match value:
        case Constant():
            yield value
        case Joined() | Identical():
            for part in value.parts:
                yield from constants(part)
        case Gathered():
            yield from constants(value.of)
            yield from constants(value.ids_of)
        case Reshaped() | Sliced() | Transposed() | Converted():
            yield from constants(value.of)
