"""Bound values: what an expression yields, readable in any range of its elements, in bounded memory.

Owns what every value can do, and the values that keep the order of their elements: tensors, constants, reshapes,
comparisons, casts. Those that change it are in `arrangement`. Refuses to know recipes and formats; `transform` builds
these from expressions. Every value is a flat run of elements in C order under a shape; `read` fills a
caller's buffer with elements `[begin, end)` and may be called from any thread.

Source: recipe.md, duty 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

class Value(Protocol):
    """A shaped run of elements of one safetensors dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values it is made of, left to right."""

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
    def operands(self) -> tuple[Value, ...]:
        return ()

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

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.origins

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
    def operands(self) -> tuple[Value, ...]:
        return (self.of,)

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
class Identical:
    """Operands that must be equal bit for bit; every read compares them all."""

    parts: tuple[Value, ...]
    demand: str
    """Who says that they must be equal: the end of the message when they are not."""

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.parts

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
    def operands(self) -> tuple[Value, ...]:
        return (self.of,)

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
    if isinstance(value, SourceTensor):
        yield value
    for operand in value.operands:
        yield from source_tensors(operand)


def constants(value: Value) -> Iterator[Constant]:
    """Yields what was computed while planning and is part of a value."""
    if isinstance(value, Constant):
        yield value
    for operand in value.operands:
        yield from constants(operand)
