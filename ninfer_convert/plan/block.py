"""How an object is cut into blocks: runs of rows that one worker reads, encodes and writes in one go.

Owns the cut and what a block reads and needs. Refuses to know how its bytes are made (`block_maker`). Where
the cuts lie does not change a byte of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ninfer_convert.formats import DirectFormat
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import PlannedTensor
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import Span, elements

BLOCK_BYTES = 2 << 20
"""Source bytes of one block: small enough for a core's cache, large enough that calls cost nothing."""

@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[begin, end)` of a matrix, or elements `[begin, end)` of a direct tensor."""

    begin: int
    end: int


def is_encoded(item: PlannedTensor) -> bool:
    """Tells whether an encoder makes the words of a tensor; they are those of the source otherwise, or cast."""
    return not isinstance(item.numeric, DirectFormat) and not isinstance(item.value, Words)


def blocks(item: PlannedTensor, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yields the blocks of a tensor in order; where they are cut does not change a byte of the result."""
    total, unit_bytes, quantum = _extent(item)
    if any(requirement.rule == "unique" for requirement in item.spec.requirements):
        step = total
    else:
        step = max(quantum, block_bytes // unit_bytes // quantum * quantum)
    for begin in range(0, total, step):
        yield Block(begin, min(total, begin + step))


def block_memory(item: PlannedTensor, block_bytes: int = BLOCK_BYTES) -> int:
    """Returns the buffer bytes one thread needs for the blocks of a tensor: source and planes."""
    first = next(blocks(item, block_bytes))
    rows = first.end - first.begin
    if isinstance(item.numeric, DirectFormat):
        return rows * item.numeric.word_bytes
    return rows * (_row_source_bytes(item) + sum(plane.row_bytes for plane in item.geometry.planes))


def _extent(item: PlannedTensor) -> tuple[int, int, int]:
    """Returns how many units (rows or elements) a tensor has, the source bytes of one, and the quantum."""
    if isinstance(item.numeric, DirectFormat):
        return elements(item.shape), item.numeric.word_bytes, 1
    return item.shape[0], _row_source_bytes(item), item.geometry.row_quantum


def _row_source_bytes(item: PlannedTensor) -> int:
    if isinstance(item.value, Words):
        return sum(value.shape[1] * WORD_BYTES[value.dtype] for value in (item.value.codes, item.value.scales))
    return item.shape[1] * WORD_BYTES[item.value.dtype]


def stored_ranges(item: PlannedTensor, block: Block) -> Iterator[tuple[int, int]]:
    """Yields the bytes `[begin, end)` that a block fills, counted from the object's first byte."""
    if isinstance(item.numeric, DirectFormat):
        yield block.begin * item.numeric.word_bytes, block.end * item.numeric.word_bytes
        return
    for plane in item.geometry.planes:
        if plane.row_bytes:
            yield plane.offset + block.begin * plane.row_bytes, plane.offset + block.end * plane.row_bytes
        elif block.begin == 0:
            yield plane.offset, plane.offset + plane.nbytes


def whole(item: PlannedTensor) -> Block:
    """Returns the block that is all of a tensor."""
    return Block(0, _extent(item)[0])


def work_bytes(item: PlannedTensor) -> int:
    """Returns the bytes that are read and written for a tensor, by which the work of making it is measured."""
    total, unit_bytes, _ = _extent(item)
    return total * unit_bytes + item.nbytes


def block_spans(item: PlannedTensor, block: Block) -> Iterator[Span]:
    """Yields about which source bytes a block will read."""
    values = (item.value.codes, item.value.scales) if isinstance(item.value, Words) else (item.value,)
    for value in values:
        width = 1 if isinstance(item.numeric, DirectFormat) else elements(value.shape[1:])
        yield from value.spans(block.begin * width, block.end * width)
