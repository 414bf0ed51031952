"""How an artifact is cut into shares: contiguous ranges of its file, each made by a process of its own.

Owns where the cuts lie. They are a function of the plan and the number of shares alone, so every process finds
the same ones. Refuses to know who makes a share, and how.

Source: cli.md, `run --shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ninfer_convert.formats import DirectFormat
from ninfer_convert.plan.block import stored_ranges as block_ranges
from ninfer_convert.plan.block import whole, work_bytes
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import Plan, PlannedObject, PlannedResource
from ninfer_convert.plan.value import elements

ALIGNMENT = 4096
"""Cuts lie at multiples of it: a network file system may write a page back whole, whoever wrote its other half."""

ATOM_BYTES = 32 << 20
"""A direct tensor may be cut at multiples of it."""


@dataclass(frozen=True, slots=True)
class Share:
    """File bytes `[begin, end)`, and the conditions (indices of the plan's) that are checked with them."""

    index: int
    count: int
    begin: int
    end: int
    conditions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.index}/{self.count}"


def cut(plan: Plan, count: int) -> tuple[Share, ...]:
    """Returns the shares, which cover the payload without overlap; those behind the last object are empty.

    A quantized object is cut only where one begins. Its planes follow each other, so that whoever makes the second
    half of its bytes makes all of its rows, and a cut in its middle would ease nobody's work. Rounded down to
    the alignment, a cut leaves less than a page of an object to the share behind it. Of all such cuts these make
    the largest share as small as it can be, measured by the bytes that are read and written.
    """
    atoms = _merged(plan)
    starts = partition([work for _, work in atoms], count)
    loads = [sum(work for _, work in atoms[begin:end]) for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    edges = [atoms[start][0] if start < len(atoms) else plan.file_bytes for start in starts]
    conditions = _dealt(plan, loads)
    return tuple(
        Share(index, count, begin, end, conditions[index])
        for index, (begin, end) in enumerate(zip(edges, [*edges[1:], plan.file_bytes], strict=True))
    )


def stored_ranges(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Yields (begin, end, object index) of all bytes of the file that hold data, in order; the rest is zero."""
    for index, item in enumerate(plan.objects):
        start = plan.payload_offset + item.offset
        for begin, end in sorted(_ranges(item)):
            yield start + begin, start + end, index


def _ranges(item: PlannedObject) -> Iterator[tuple[int, int]]:
    if isinstance(item, PlannedResource):
        yield 0, item.nbytes
    else:
        yield from block_ranges(item, whole(item))


def partition(loads: Sequence[int], count: int) -> list[int]:
    """Returns where each of `count` runs of loads begins, so that the largest sum of a run is the least possible.

    No run is empty while there are loads for it; those that are begin behind the last load.
    """
    low, high = max([-(-sum(loads) // count), *loads]), sum(loads)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _runs(loads, middle) <= count else (middle + 1, high)
    starts, load = [0], 0
    for position, own in enumerate(loads):
        unstarted = count - len(starts)
        if position and unstarted and (load + own > high or len(loads) - position <= unstarted):
            starts.append(position)
            load = 0
        load += own
    return starts + [len(loads)] * (count - len(starts))


def _runs(loads: Sequence[int], most: int) -> int:
    """Returns how many runs are needed when none may be larger than `most`."""
    runs, load = 1, 0
    for own in loads:
        if load + own > most:
            runs, load = runs + 1, 0
        load += own
    return runs


def _merged(plan: Plan) -> list[tuple[int, int]]:
    """Returns the places where the file may be cut, each with the work up to the next."""
    atoms: list[tuple[int, int]] = []
    for begin, work in _atoms(plan):
        place = max(plan.payload_offset, begin // ALIGNMENT * ALIGNMENT)
        if atoms and atoms[-1][0] == place:
            atoms[-1] = place, atoms[-1][1] + work
        else:
            atoms.append((place, work))
    return atoms


def _atoms(plan: Plan) -> Iterator[tuple[int, int]]:
    for item in plan.objects:
        begin = plan.payload_offset + item.offset
        if isinstance(item, PlannedResource):
            yield begin, item.nbytes
        elif isinstance(item.numeric, DirectFormat) and item.nbytes > ATOM_BYTES:
            for offset in range(0, item.nbytes, ATOM_BYTES):
                yield begin + offset, 2 * min(ATOM_BYTES, item.nbytes - offset)
        else:
            yield begin, work_bytes(item)


def _dealt(plan: Plan, loads: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the conditions of each share: the largest first, each to the share that has least to do."""
    total, dealt = list(loads), [[] for _ in loads]  # type: tuple[list[int], list[list[int]]]
    sizes = [elements(value.shape) * WORD_BYTES[value.dtype] for value in plan.conditions]
    for condition in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        share = min(range(len(total)), key=lambda index: (total[index], index))
        dealt[share].append(condition)
        total[share] += sizes[condition]
    return [tuple(own) for own in dealt]
