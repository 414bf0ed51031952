"""Two artifacts side by side: identity, inventory, formats, bytes, and how far differing values lie apart.

Owns what makes two artifacts equal: identity, and the same objects in the same order with the same bytes. The
spelling of the directory and the width of gaps have no meaning.

Source: cli.md, `compare`; container.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_convert.artifact.compare import (
    Comparison,
    ObjectLoss,
    Progress,
    measure,
    require_unchanged,
)
from ninfer_convert.artifact.container import ObjectRecord, TensorRecord
from ninfer_convert.artifact.pieces import Piece, piece_values, pieces, read_piece
from ninfer_convert.artifact.reader import READ_BYTES, Artifact
from ninfer_convert.artifact.stats import Loss, loss
from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import geometry
from ninfer_convert.workers import for_each

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two artifacts differ: of an object, or of the artifacts as a whole (object is None)."""

    object: str | None
    what: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """What two artifacts have in common and what not."""

    equal: int
    """Objects whose bytes are equal."""
    nbytes: int
    """Bytes of those objects."""
    differences: tuple[Difference, ...]
    """Whole artifact first, then in the first artifact's order, then what only the second holds."""
    values: Comparison
    """How far the second artifact's values lie from the first's, for tensors of one shape whose bytes differ."""

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def as_json(self) -> Json:
        """Returns everything as JSON values."""
        return {
            "equal": self.is_equal,
            "equal_objects": self.equal,
            "equal_bytes": self.nbytes,
            "differences": [
                {"object": found.object, "what": found.what, "first": found.first, "second": found.second}
                for found in self.differences
            ],
            **self.values.as_json(),
        }


def compare_artifacts(
    first: Artifact, second: Artifact, progress: Progress | None = None, *, threads: int = 2
) -> Contrast:
    """Compares two artifacts; every byte of every object is read.

    The loss of a tensor whose bytes differ is that of the second artifact's values, measured against the first's.

    Raises:
        ArtifactError: a file was cut or changed.
        OutputError: a read fails.

    Source: cli.md, `compare`.
    """
    differences = list(_identity_differences(first, second))
    common = [(record, second.objects[name]) for name, record in first.objects.items() if name in second.objects]
    if (order := _order_difference(first, second)) is not None:
        differences.append(order)
    alike = [pair for pair in common if _form(pair[0]) == _form(pair[1]) and pair[0].nbytes == pair[1].nbytes]
    unequal = _unequal_bytes(first, second, alike, threads)
    comparable = [
        (mine, other)
        for mine, other in common
        if isinstance(mine, TensorRecord) and isinstance(other, TensorRecord) and mine.shape == other.shape
        if mine.format != other.format or mine.name in unequal
    ]
    values = _measured(first, second, comparable, progress, threads)
    for name, record in first.objects.items():
        if name not in second.objects:
            differences.append(Difference(name, "inventory", _described(record), None))
        else:
            differences += _record_differences(record, second.objects[name])
            if name in unequal:
                differences.append(Difference(name, "sha256", first.digest(name), second.digest(name)))
    differences += [
        Difference(name, "inventory", None, _described(record))
        for name, record in second.objects.items()
        if name not in first.objects
    ]
    for artifact in (first, second):
        require_unchanged(artifact)
    equal = [mine for mine, _ in alike if mine.name not in unequal]
    notes = _notes(first, second)
    return Contrast(
        len(equal), sum(record.nbytes for record in equal), tuple(differences), Comparison(values, tuple(notes))
    )


def _identity_differences(first: Artifact, second: Artifact) -> Iterator[Difference]:
    for member in ("model_id", "weights_id"):
        mine, other = getattr(first.identity, member), getattr(second.identity, member)
        if mine != other:
            yield Difference(None, member, mine, other)


def _order_difference(first: Artifact, second: Artifact) -> Difference | None:
    mine = [name for name in first.objects if name in second.objects]
    others = [name for name in second.objects if name in first.objects]
    return next((Difference(None, "order", a, b) for a, b in zip(mine, others, strict=True) if a != b), None)


def _form(record: ObjectRecord) -> tuple[object, ...]:
    if isinstance(record, TensorRecord):
        return record.kind, record.shape, record.format, record.layout
    return (record.kind,)


def _described(record: ObjectRecord) -> str:
    if isinstance(record, TensorRecord):
        return f"{record.format} {list(record.shape)}"
    return f"resource of {record.nbytes} bytes"


def _record_differences(mine: ObjectRecord, other: ObjectRecord) -> Iterator[Difference]:
    if mine.kind != other.kind:
        yield Difference(mine.name, "kind", mine.kind, other.kind)
    elif isinstance(mine, TensorRecord) and isinstance(other, TensorRecord):
        if mine.shape != other.shape:
            yield Difference(mine.name, "shape", str(list(mine.shape)), str(list(other.shape)))
        if mine.format != other.format:
            yield Difference(mine.name, "format", mine.format, other.format)
    elif mine.nbytes != other.nbytes:
        yield Difference(mine.name, "bytes", str(mine.nbytes), str(other.nbytes))


def _unequal_bytes(
    first: Artifact, second: Artifact, alike: list[tuple[ObjectRecord, ObjectRecord]], threads: int
) -> set[str]:
    """Returns the names of the objects, of one form and size, whose bytes differ anywhere."""
    unequal: set[str] = set()
    spans = (
        (mine, other, begin, min(begin + READ_BYTES, mine.nbytes))
        for mine, other in alike
        for begin in range(0, mine.nbytes, READ_BYTES)
    )

    def make_worker() -> Any:
        buffers = np.empty((2, READ_BYTES), np.uint8)

        def differ(span: tuple[ObjectRecord, ObjectRecord, int, int]) -> bool:
            *records, begin, end = span
            if records[0].name in unequal:
                return True
            for artifact, record, buffer in zip((first, second), records, buffers, strict=True):
                what = f"object '{printable(record.name)}'"
                start = artifact.payload_offset + record.offset + begin
                artifact.read_into(start, buffer[: end - begin], what)
            return not np.array_equal(buffers[0, : end - begin], buffers[1, : end - begin])

        return differ

    def take(span: tuple[ObjectRecord, ObjectRecord, int, int], is_different: bool) -> None:
        if is_different:
            unequal.add(span[0].name)

    for_each(spans, make_worker, take, threads=threads)
    return unequal


def _measured(
    first: Artifact,
    second: Artifact,
    comparable: list[tuple[TensorRecord, TensorRecord]],
    progress: Progress | None,
    threads: int,
) -> tuple[ObjectLoss, ...]:
    others = {mine.name: other for mine, other in comparable}

    def compare(piece: Piece) -> Loss:
        twin = Piece(others[piece.record.name], piece.begin, piece.end)
        values = [
            piece_values(part, read_piece(artifact, part)) for artifact, part in ((first, piece), (second, twin))
        ]
        return loss(values[0], values[1], piece.begin)

    every = [
        piece
        for mine, other in comparable
        for piece in pieces(mine, _rows_together(other))
    ]
    return measure([other for _, other in comparable], every, compare, progress, threads)


def _rows_together(record: TensorRecord) -> int:
    numeric = FORMATS[record.format]
    return 0 if numeric.kind == "direct" else geometry(numeric, record.shape).row_quantum


def _notes(first: Artifact, second: Artifact) -> Iterator[str]:
    for artifact in (first, second):
        for note in artifact.head.notes():
            yield f"{artifact.path}: {note}"
