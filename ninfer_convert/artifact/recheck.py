"""Every object of a plan made again from its source, by other means, and compared with the artifact's bytes.

Owns the pass over artifact and source. The second implementation is `recompute` (encoders and word copies) and
`recast` (casts), plain numpy both. Refuses to judge the directory (`inventory`) and the rules of words (`rules`).

Source: tensor-formats.md sections 8.3 and 12; recipe.md, duties 4 and 5.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.differences import (
    Difference,
    differing_bytes,
    differing_divisor,
    differing_plane,
    differing_words,
)
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.recast import recast
from ninfer_convert.artifact.recompute import copy_fp8_rows, copy_nvfp4_rows, recompute_rows
from ninfer_convert.artifact.verify import CHANGED, Problem
from ninfer_convert.errors import ArtifactError, EncodeError, SourceError, printable
from ninfer_convert.formats import BlockScaledFormat, DirectFormat, GroupedFormat
from ninfer_convert.plan.block import Block, blocks
from ninfer_convert.plan.casts import WORD_BYTES
from ninfer_convert.plan.planner import Plan, PlannedObject, PlannedResource, PlannedTensor
from ninfer_convert.plan.requirements import require
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.value import Value, elements, where
from ninfer_convert.row_error import RowError
from ninfer_convert.workers import for_each

Bytes = NDArray[np.uint8]
Progress = Callable[[int, int], object]
"""Called with the bytes compared so far and their total, by one thread at a time."""

BLOCK_BYTES = 1 << 20
"""Source bytes of one block: the arrays that are made of it, four times as large, stay in a core's cache."""

KEPT_BYTES = 31 << 20
"""glibc returns freed memory to the system unless it is less than twice the largest piece freed so far (of up to
32 MiB). Every block would fault its arrays in anew, at half the speed; freeing one large piece avoids that."""

RECOMPUTED = "recomputed"
SOURCE = "source"


@dataclass(frozen=True, slots=True)
class Recheck:
    """What a recomputation found. Problems are in the order of the plan's objects."""

    objects: int
    """Objects that were compared."""
    nbytes: int
    """Bytes that were compared, of `total_bytes` in planes and resources of these objects."""
    total_bytes: int
    problems: tuple[Problem, ...]


def recheck_artifact(
    artifact: Artifact,
    plan: Plan,
    progress: Progress | None = None,
    *,
    threads: int = 2,
    sample: int | None = None,
    seed: int = 0,
) -> Recheck:
    """Recomputes every object of a plan from its source and compares it with the artifact's, plane by plane.

    Objects that the artifact lacks or holds in another shape or format are left out: `inventory` tells them.
    Value rules and conditions of the recipe are checked on the way. Memory is bounded by a few blocks per
    thread, whatever the tensors are.

    Args:
        plan: of the same recipe and sources; these are open.
        threads: how many threads read, recompute and compare.
        sample: row blocks per object, the first and the last always among them; None compares all bytes.
        seed: chooses the other blocks of a sample.

    Raises:
        OutputError: the artifact or a source cannot be read.

    Source: tensor-formats.md sections 8.3 and 12.
    """
    items = [item for item in plan.objects if _is_comparable(artifact, item)]
    starts = {name: artifact.payload_offset + record.offset for name, record in artifact.objects.items()}
    every = [task for item in items for task in _tasks(item, starts[item.name])]
    every += [task for value in plan.conditions for task in _condition_tasks(value)]
    tasks = every if sample is None else _sampled(every, sample, seed)
    total, done, tally = sum(task.nbytes for task in tasks), 0, _Tally()

    def take(task: _Task, found: Sequence[Difference]) -> None:
        nonlocal done
        done += task.nbytes
        tally.add(task.name, found)
        if progress is not None:
            progress(done, total)

    problems: list[Problem] = []
    np.empty(KEPT_BYTES, np.uint8)
    try:
        for_each(tasks, lambda: _Worker(artifact).compare, take, threads=threads)
        for checkpoint in plan.sources.values():
            checkpoint.verify_unchanged()
        if not artifact.is_unchanged():
            raise ArtifactError(f"{artifact.path}: the file was changed while it was read")
    except (ArtifactError, SourceError) as error:
        check = SOURCE if isinstance(error, SourceError) else CHANGED
        problems += [Problem(None, check, message) for message in error.messages]
    problems += tally.problems([None, *(item.name for item in plan.objects)])
    return Recheck(len(items), done, sum(task.nbytes for task in every), tuple(problems))


@dataclass(frozen=True, slots=True)
class _Task:
    """A block of an object; or, without a name, of a condition between sources."""

    name: str | None
    block: Block
    nbytes: int
    """Bytes of the artifact that are compared; none for a condition."""
    subject: PlannedObject | Value
    start: int = 0
    """Where in the file the object begins."""


@dataclass(slots=True)
class _Tally:
    """Differences of all blocks, put together per object and plane; SOURCE stands for a plane, too."""

    first: dict[tuple[str | None, str], Difference] = field(default_factory=dict)
    count: dict[tuple[str | None, str], int] = field(default_factory=dict)

    def add(self, name: str | None, found: Sequence[Difference]) -> None:
        for difference in found:
            key = name, difference.plane
            if key not in self.first or difference.position < self.first[key].position:
                self.first[key] = difference
            self.count[key] = self.count.get(key, 0) + difference.count

    def problems(self, names: Sequence[str | None]) -> Iterator[Problem]:
        order = {name: index for index, name in enumerate(names)}
        for name, plane in sorted(self.first, key=lambda key: (order[key[0]], key[1])):
            total = f" (the first of {self.count[name, plane]})" if self.count[name, plane] > 1 else ""
            check = SOURCE if plane == SOURCE else RECOMPUTED
            yield Problem(name, check, self.first[name, plane].detail + total)


def _is_comparable(artifact: Artifact, item: PlannedObject) -> bool:
    record = artifact.objects.get(item.name)
    if isinstance(item, PlannedTensor):
        return isinstance(record, TensorRecord) and (record.shape, record.format) == (item.shape, item.numeric.name)
    return record is not None and record.kind == "resource" and record.nbytes == item.nbytes


def _tasks(item: PlannedObject, start: int) -> Iterator[_Task]:
    if isinstance(item, PlannedResource):
        for begin in range(0, item.nbytes, BLOCK_BYTES):
            block = Block(begin, min(begin + BLOCK_BYTES, item.nbytes))
            yield _Task(item.name, block, block.end - block.begin, item, start)
        return
    if isinstance(item.value, Words):
        value: Value | Words = dataclasses.replace(
            item.value, codes=recast(item.value.codes), scales=recast(item.value.scales)
        )
    else:
        value = recast(item.value)
    independent = dataclasses.replace(item, value=value)
    unit_bytes = sum(plane.row_bytes for plane in item.geometry.planes)
    if isinstance(item.numeric, DirectFormat):
        unit_bytes = item.numeric.word_bytes
    whole_bytes = sum(plane.nbytes for plane in item.geometry.planes if not plane.row_bytes)
    for block in blocks(item, BLOCK_BYTES):
        nbytes = (block.end - block.begin) * unit_bytes + (whole_bytes if block.begin == 0 else 0)
        yield _Task(item.name, block, nbytes, independent, start)


def _condition_tasks(value: Value) -> Iterator[_Task]:
    count, step = elements(value.shape), BLOCK_BYTES // WORD_BYTES[value.dtype]
    for begin in range(0, count, step):
        yield _Task(None, Block(begin, min(count, begin + step)), 0, value)


def _sampled(tasks: Sequence[_Task], sample: int, seed: int) -> list[_Task]:
    """Returns that many blocks per subject: the first, the last, and others by a draw that can be repeated."""
    chosen: list[_Task] = []
    begin = 0
    for end in range(1, len(tasks) + 1):
        if end < len(tasks) and tasks[end].subject is tasks[begin].subject:
            continue
        cuts = list(tasks[begin:end])
        if len(cuts) > max(2, sample):
            draw = random.Random(f"{seed} {cuts[0].name}")
            inner = draw.sample(range(1, len(cuts) - 1), max(0, sample - 2))
            cuts = [cuts[index] for index in (0, *sorted(inner), len(cuts) - 1)]
        chosen += cuts
        begin = end
    return chosen


class _Worker:
    """Compares blocks, one at a time, in buffers it reuses."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._buffers: dict[str, Bytes] = {}

    def compare(self, task: _Task) -> list[Difference]:
        try:
            return [difference for difference in self._compared(task) if difference is not None]
        except (EncodeError, SourceError) as error:
            return [Difference(SOURCE, task.block.begin, error.messages[0], 0)]

    def _compared(self, task: _Task) -> list[Difference | None]:
        subject, block = task.subject, task.block
        if isinstance(subject, PlannedTensor):
            return self._tensor(subject, task.start, block)
        if isinstance(subject, PlannedResource):
            found = self._stored(subject, "bytes", task.start + block.begin, block.end - block.begin)
            wanted = np.frombuffer(subject.content, np.uint8)[block.begin : block.end]
            return [differing_bytes(block.begin, found, wanted)]
        # reading a condition compares its operands
        self._read("source", subject, block.begin, block.end)
        return []

    def _buffer(self, name: str, nbytes: int) -> Bytes:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def _read(self, name: str, value: Value, begin: int, end: int) -> Bytes:
        out = self._buffer(name, (end - begin) * WORD_BYTES[value.dtype])
        value.read(begin, end, out)
        return out

    def _stored(self, item: PlannedObject, plane: str, begin: int, nbytes: int) -> Bytes:
        out = self._buffer(f"stored {plane}", nbytes)
        self._artifact.read_into(begin, out, f"object '{printable(item.name)}'")
        return out

    def _tensor(self, item: PlannedTensor, start: int, block: Block) -> list[Difference | None]:
        numeric, value = item.numeric, item.value
        if isinstance(numeric, DirectFormat):
            if isinstance(value, Words):
                raise TypeError(f"{numeric.name} has no word copies")
            wanted = self._direct(item, value, block)
            found = self._stored(item, "words", start + block.begin * numeric.word_bytes, len(wanted))
            return [differing_words(numeric, item.shape, block.begin, found, wanted)]
        planes = self._copied(value, block) if isinstance(value, Words) else self._encoded(item, value, block)
        differences: list[Difference | None] = []
        for plane in item.geometry.planes:
            wanted, begin = planes[plane.name], start + plane.offset
            if plane.row_bytes:
                found = self._stored(item, plane.name, begin + block.begin * plane.row_bytes, wanted.size)
                found = found.reshape(wanted.shape)
                differences.append(differing_plane(numeric, plane.name, block.begin, found, wanted))
            elif block.begin == 0:
                found = self._stored(item, plane.name, begin, plane.nbytes)
                differences.append(differing_divisor(found, wanted))
        return differences

    def _direct(self, item: PlannedTensor, value: Value, block: Block) -> Bytes:
        words = self._read("source", value, block.begin, block.end)
        label = f"object {printable(item.name)}"
        require(
            item.spec.requirements,
            item.numeric.name,
            words,
            lambda index: f"{label}: {where(value, block.begin + index)}",
        )
        return words

    def _encoded(self, item: PlannedTensor, value: Value, block: Block) -> Mapping[str, Bytes]:
        numeric, k = item.numeric, item.shape[1]
        if isinstance(numeric, (DirectFormat, BlockScaledFormat)):
            raise TypeError(f"{numeric.name} has no encoder")
        words = self._read("source", value, block.begin * k, block.end * k)
        matrix = words.view(f"<u{WORD_BYTES[value.dtype]}").reshape(-1, k)
        try:
            return recompute_rows(numeric, value.dtype, matrix)
        except RowError as error:
            group = numeric.group if isinstance(numeric, GroupedFormat) else k
            column = (error.group or 0) * group if error.column is None else error.column
            place = where(value, (block.begin + error.row) * k + column)
            raise EncodeError(f"{place}: {error.reason}; {numeric.name} cannot store it") from error

    def _copied(self, words: Words, block: Block) -> Mapping[str, Bytes]:
        rows, width, groups = block.end - block.begin, words.codes.shape[1], words.scales.shape[1]
        codes = self._read("source", words.codes, block.begin * width, block.end * width).reshape(rows, width)
        scales = self._read("scales", words.scales, block.begin * groups, block.end * groups)
        if words.divisor is None:
            return copy_fp8_rows(codes, scales.view("<u2"))
        divisor = np.array([words.divisor], "<u4").view(np.uint8)
        return {**copy_nvfp4_rows(codes, scales.reshape(rows, groups)), "divisor": divisor}
