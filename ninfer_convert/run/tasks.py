"""What a worker does with one block, whoever schedules it: prefetch, making, errors that say where, release.

Owns the order of the blocks of an object. Refuses to know where the bytes go (`convert`, `shares`) and how they
are made (`block_maker`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ninfer_convert.allowance import available_memory
from ninfer_convert.encode.block_maker import BlockMaker, Piece
from ninfer_convert.encode.loss import Loss
from ninfer_convert.errors import EncodeError, SourceError, printable
from ninfer_convert.plan.block import Block, block_memory, block_spans, blocks, is_encoded
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import Plan, PlannedResource, PlannedTensor
from ninfer_convert.plan.value import Span, Value, elements

PREFETCH_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Task:
    """A block of an object (`index` of the plan), or of condition n (`index` -1 - n)."""

    index: int
    block: Block
    condition: Value | None = None


def is_loss_of(plan: Plan, index: int, loss: Loss) -> bool:
    """Tells whether a loss that a journal holds can be that of an object: of an encoded one, and of all of it."""
    item = plan.objects[index] if 0 <= index < len(plan.objects) else None
    return isinstance(item, PlannedTensor) and is_encoded(item) and loss.elements == elements(item.shape)


class Tasks:
    """The tasks of a plan, for any number of threads; with `stats`, what encoding costs is measured."""

    def __init__(self, plan: Plan, threads: int, block_bytes: int, *, stats: bool = False) -> None:
        self.plan, self.threads, self.block_bytes, self.stats = plan, threads, block_bytes, stats
        # Pages are dropped only when the source could not stay cached anyway; a second run may want them.
        memory = available_memory()
        self.release_behind = memory is not None and plan.source_bytes + plan.file_bytes > memory // 2

    def maker(self) -> BlockMaker:
        """Returns what one thread makes blocks with."""
        return BlockMaker(has_stats=self.stats)

    def is_measured(self, index: int) -> bool:
        """Tells whether an object has a loss that is measured."""
        item = self.plan.objects[index]
        return self.stats and isinstance(item, PlannedTensor) and is_encoded(item)

    def of_object(self, index: int) -> Iterator[Task]:
        """Yields the blocks of an object in order."""
        item = self.plan.objects[index]
        if isinstance(item, PlannedResource):
            yield Task(index, Block(0, item.nbytes))
        else:
            yield from (Task(index, block) for block in blocks(item, self.block_bytes))

    def of_condition(self, number: int) -> Iterator[Task]:
        """Yields the blocks of a condition in order."""
        value = self.plan.conditions[number]
        step = max(1, self.block_bytes // WORD_BYTES[value.dtype])
        for begin in range(0, elements(value.shape), step):
            yield Task(-1 - number, Block(begin, min(elements(value.shape), begin + step)), value)

    def prefetched(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yields tasks, asking the system to read what the few behind each of them need."""
        ahead: deque[Task] = deque()
        for task in tasks:
            for checkpoint, info, begin, end in self._spans(task):
                checkpoint.prefetch(info, begin, end)
            ahead.append(task)
            if len(ahead) > PREFETCH_BLOCKS:
                yield ahead.popleft()
        yield from ahead

    def make(self, maker: BlockMaker, task: Task) -> tuple[list[Piece], Loss | None]:
        """Returns the pieces of a task, none for a condition, which are valid until the maker's next call; and the
        loss of the block, if that is measured.

        Raises:
            EncodeError, SourceError: as `BlockMaker.make`; both name the object.
        """
        pieces: list[Piece] = []
        loss = None
        if task.condition is not None:
            maker.scan(task.condition, task.block.begin, task.block.end)
        elif isinstance(item := self.plan.objects[task.index], PlannedResource):
            pieces = [(0, np.frombuffer(item.content, np.uint8))]
        else:
            pieces, loss = self._make_block(maker, item, task.block), maker.loss
        if self.release_behind:
            for checkpoint, info, begin, end in self._spans(task):
                checkpoint.release(info, begin, end)
        return pieces, loss

    def _make_block(self, maker: BlockMaker, item: PlannedTensor, block: Block) -> list[Piece]:
        try:
            return maker.make(item, block)
        except SourceError as error:
            name = printable(item.name)
            raise SourceError(*(f"object {name}: {message}" for message in error.messages)) from error
        except MemoryError as error:
            need = block_memory(item, self.block_bytes)
            raise EncodeError(
                f"object {printable(item.name)}: out of memory: rows [{block.begin}, {block.end}) take {need} "
                f"bytes in each of {self.threads} threads; use fewer --threads or a smaller --max-memory"
            ) from error

    def _spans(self, task: Task) -> Iterator[Span]:
        if task.condition is not None:
            yield from task.condition.spans(task.block.begin, task.block.end)
            return
        item = self.plan.objects[task.index]
        if not isinstance(item, PlannedResource):
            yield from block_spans(item, task.block)
