"""What an artifact's values lose against its source, per object and per format.

Owns the pass over artifact and source. Refuses to know the arithmetic (`stats`) and tables (`compare_text`).

Source: cli.md, `compare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_convert.artifact.container import TensorRecord
from ninfer_convert.artifact.decode import scale_words
from ninfer_convert.artifact.pieces import Piece, piece_values, pieces, read_piece
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.source_values import SourceValues
from ninfer_convert.artifact.stats import Loss, group_counts, loss, total
from ninfer_convert.errors import ArtifactError, printable
from ninfer_convert.formats import FORMATS, DirectFormat
from ninfer_convert.plan.planner import Plan, PlannedTensor
from ninfer_convert.plan.transform import Words
from ninfer_convert.workers import for_each

Json = dict[str, Any]
Progress = Callable[[int, int], object]
"""Called with the stored bytes compared so far and their total, by one thread at a time."""


@dataclass(frozen=True, slots=True)
class ObjectLoss:
    """The loss of one tensor."""

    name: str
    shape: tuple[int, ...]
    format: str
    """Of the artifact's tensor."""
    loss: Loss

    @property
    def largest_at(self) -> list[int] | None:
        """Coordinates of the largest error."""
        if self.loss.largest is None:
            return None
        return [int(index) for index in np.unravel_index(self.loss.largest.index, self.shape)]


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """The loss of all tensors of one format; `members` are in payload order."""

    format: str
    members: tuple[ObjectLoss, ...]
    loss: Loss

    @property
    def largest_in(self) -> str | None:
        """Name of the tensor that has the largest error."""
        largest = self.loss.largest
        return next((item.name for item in self.members if largest and item.loss.largest is largest), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The losses of all tensors, in payload order, and what was not compared."""

    objects: tuple[ObjectLoss, ...]
    notes: tuple[str, ...]

    def worst_first(self) -> list[ObjectLoss]:
        """Returns the tensors by falling relative error; those without one stand last, equals by payload order."""
        return sorted(self.objects, key=lambda item: _rank(item.loss))

    def formats(self) -> list[FormatLoss]:
        """Returns the loss of the tensors of each format together, worst first."""
        members: dict[str, list[ObjectLoss]] = {}
        for item in self.objects:
            members.setdefault(item.format, []).append(item)
        totals = [FormatLoss(name, tuple(found), total(item.loss for item in found)) for name, found in members.items()]
        return sorted(totals, key=lambda found: _rank(found.loss))

    def as_json(self) -> Json:
        """Returns objects and formats, worst first, as JSON values."""
        return {
            "objects": [_object_json(item) for item in self.worst_first()],
            "formats": [_format_json(found) for found in self.formats()],
            "notes": list(self.notes),
        }


def compare_with_source(
    artifact: Artifact, plan: Plan, progress: Progress | None = None, *, threads: int = 2
) -> Comparison:
    """Compares the represented values of every tensor with the values it stands for.

    Those are the values of the recipe's expression before it was encoded, and before a rounding cast; for words
    that were copied, the values that the source's words represent. Tensors that only the recipe or only the
    artifact has are notes. Memory is bounded by a few pieces per thread.

    Raises:
        ArtifactError: a tensor has another shape than the recipe says, or no tensor is in both.
        SourceError: a source cannot be read, or values that must be identical differ.
        OutputError: a read fails.

    Source: cli.md, `compare`; tensor-formats.md sections 3, 6.2 and 7.
    """
    planned = {item.name: item for item in plan.objects if isinstance(item, PlannedTensor)}
    stored = {name: record for name, record in artifact.objects.items() if isinstance(record, TensorRecord)}
    both = [record for name, record in stored.items() if name in planned]
    _require_shapes(artifact, both, planned)
    sources = {record.name: SourceValues(planned[record.name]) for record in both}

    def compare(piece: Piece) -> Loss:
        source, numeric, planes = sources[piece.record.name], FORMATS[piece.record.format], read_piece(artifact, piece)
        values = source.read(piece.begin, piece.end)
        found = loss(values, piece_values(piece, planes), piece.begin)
        if isinstance(numeric, DirectFormat):
            return found
        k = piece.record.shape[1]
        encoded = values.reshape(-1, k) if source.encoded else None
        groups, zero, clipped = group_counts(numeric, scale_words(numeric, k, planes), encoded)
        return Loss(
            found.elements, found.signal, found.noise, found.differing, found.largest, groups, zero, clipped
        )

    # words that were copied are read by rows, also where the artifact's are not
    every = [
        piece for record in both for piece in pieces(record, isinstance(planned[record.name].value, Words))
    ]
    objects = measure(both, every, compare, progress, threads)
    for checkpoint in plan.sources.values():
        checkpoint.verify_unchanged()
    require_unchanged(artifact)
    notes = [
        *_missing([name for name in planned if name not in stored], "the recipe", "the artifact"),
        *_missing([name for name in stored if name not in planned], "the artifact", "the recipe"),
    ]
    return Comparison(objects, tuple(notes))


def measure(
    records: Sequence[TensorRecord],
    every: Sequence[Piece],
    compare: Callable[[Piece], Loss],
    progress: Progress | None,
    threads: int,
) -> tuple[ObjectLoss, ...]:
    """Returns the losses of tensors from those of their pieces, put together in order whatever the threads did."""
    found: dict[str, dict[int, Loss]] = {record.name: {} for record in records}
    done, nbytes = 0, sum(piece.nbytes for piece in every)

    def take(piece: Piece, part: Loss) -> None:
        nonlocal done
        found[piece.record.name][piece.begin] = part
        done += piece.nbytes
        if progress is not None:
            progress(done, nbytes)

    for_each(every, lambda: compare, take, threads=threads)
    return tuple(
        ObjectLoss(record.name, record.shape, record.format, total(parts[begin] for begin in sorted(parts)))
        for record in records
        for parts in [found[record.name]]
    )


def require_unchanged(artifact: Artifact) -> None:
    """Raises ArtifactError when the file was changed since it was opened."""
    if not artifact.is_unchanged():
        raise ArtifactError(f"{artifact.path}: the file was changed while it was read")


def number(value: float | None) -> float | str | None:
    """Returns a JSON number; a text where JSON has none."""
    return value if value is None or math.isfinite(value) else str(value)


def _require_shapes(
    artifact: Artifact, records: Sequence[TensorRecord], planned: Mapping[str, PlannedTensor]
) -> None:
    if not records:
        raise ArtifactError(f"{artifact.path}: no tensor of the recipe is in the artifact")
    problems = [
        f"{artifact.path}: object '{printable(record.name)}' has shape {list(record.shape)}; "
        f"the recipe makes {list(planned[record.name].shape)}"
        for record in records
        if record.shape != planned[record.name].shape
    ]
    if problems:
        raise ArtifactError(*problems)


def _missing(names: Sequence[str], holder: str, other: str) -> Iterable[str]:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"only {holder} has tensor '{printable(names[0])}'{more}; {other} does not, so nothing was compared"


def _rank(found: Loss) -> tuple[int, float]:
    error = found.relative_error
    if error is None:
        # any error at all is worse than every relative one where there is nothing to relate it to
        return (0, 0.0) if found.noise else (2, 0.0)
    return 1, -error


def _loss_json(found: Loss) -> Json:
    return {
        "elements": found.elements,
        "relative_error": number(found.relative_error),
        "sqnr_db": number(found.sqnr_db),
        "largest_error": number(found.largest.error if found.largest else 0.0),
        "differing": found.differing,
        "groups": found.groups,
        "zero_groups": found.zero_groups,
        "clipped_groups": found.clipped_groups,
    }


def _format_json(found: FormatLoss) -> Json:
    return {
        "format": found.format,
        "objects": len(found.members),
        **_loss_json(found.loss),
        "largest_in": found.largest_in,
    }


def _object_json(item: ObjectLoss) -> Json:
    largest = item.loss.largest
    return {
        "name": item.name,
        "format": item.format,
        "shape": list(item.shape),
        **_loss_json(item.loss),
        "largest_at": item.largest_at,
        "largest_value": number(largest.value) if largest else None,
        "largest_represented": number(largest.represented) if largest else None,
    }
