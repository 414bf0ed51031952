"""What a recipe would give with other formats: the altered recipe, its exact size, its expected errors.

Owns settings (`GLOB=FORMAT`), which do what a `change` at the end of the recipe does, and the sums over objects.
Refuses to know how formats are chosen (`tune`).

Source: cli.md, `plan --set`; container.md, "Geometry".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ninfer_convert.artifact import container
from ninfer_convert.errors import PlanError, UsageError, printable
from ninfer_convert.formats import FORMATS, BlockScaledFormat
from ninfer_convert.layout import LAYOUT_OF_FORMAT, LayoutError, geometry
from ninfer_convert.plan.error_model import assumes_normal, expected_error
from ninfer_convert.plan.measured import Measured, Measurements
from ninfer_convert.plan.planner import Plan, PlannedTensor
from ninfer_convert.recipe.globs import Globs, too_many
from ninfer_convert.recipe.model import Recipe, TensorSpec
from ninfer_convert.recipe.problems import quoted, suggestion


@dataclass(frozen=True, slots=True)
class Setting:
    """Objects that a glob matches, and the format they are to have."""

    glob: str
    format: str

    def __str__(self) -> str:
        return f"{self.glob}={self.format}"


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored object without its place; a resource has neither shape nor format."""

    name: str
    nbytes: int
    shape: tuple[int, ...] | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """The relative L2 error of one object, in the format of the recipe and in the one that is asked for.

    `weight` is the squared norm of its values, or the number of its elements where `by_elements`.
    """

    name: str
    present: str
    wanted: str
    measured: Measured
    before: float
    after: float
    weight: float


def parse_setting(text: str) -> Setting:
    """Returns a setting from `GLOB=FORMAT`.

    Raises:
        UsageError: it is none, or no such format exists.
    """
    glob, equals, name = text.rpartition("=")
    if not (equals and glob and name):
        raise UsageError(f"--set {printable(text)}: write GLOB=FORMAT, such as 'text/layers/*/mlp/down=Q6G64_F16S'")
    require_format(name, f"--set {printable(text)}")
    return Setting(glob, name)


def require_format(name: str, about: str) -> None:
    """Raises a usage error that begins with `about` unless a format has this name."""
    if name not in FORMATS:
        raise UsageError(f"{about}: no format is named {quoted(name)}{suggestion(name, FORMATS)}")


def matching(glob: str, specs: Sequence[TensorSpec], about: str, globs: Globs) -> set[str]:
    """Returns the names of the tensors that a glob matches, as in `change`; `about` begins the messages.

    Raises:
        UsageError: it matches none.
    """
    names = [spec.name for spec in specs]
    found = globs.matching(glob, names)
    if found is None:
        raise UsageError(f"{about}: {too_many()}")
    if not found:
        raise UsageError(f"{about}: {quoted(glob)} matches no tensor of the recipe{suggestion(glob, names, listed=0)}")
    return set(found)


def with_settings(recipe: Recipe, settings: Sequence[Setting]) -> Recipe:
    """Returns the recipe as if each setting were a change at its end, in order.

    The encoder is the format's own. Shapes are checked here, dtypes by the planner.

    Raises:
        UsageError: a glob matches no tensor.
        PlanError: an object cannot have the format; one message for each.
    """
    globs, wanted = Globs(), dict[str, str]()
    tensors = [spec for spec in recipe.objects if isinstance(spec, TensorSpec)]
    for setting in settings:
        found = matching(setting.glob, tensors, f"--set {printable(str(setting))}", globs)
        wanted |= dict.fromkeys(found, setting.format)
    problems = [
        f"{spec.mark}: object {printable(spec.name)}: {reason}"
        for spec in tensors
        if spec.name in wanted and (reason := misfit(spec, wanted[spec.name])) is not None
    ]
    if problems:
        raise PlanError(*problems)
    return with_formats(recipe, wanted)


def with_formats(recipe: Recipe, wanted: Mapping[str, str]) -> Recipe:
    """Returns the recipe with other formats of some objects, which can have them."""
    objects = [
        _altered(spec, wanted[spec.name]) if isinstance(spec, TensorSpec) and spec.name in wanted else spec
        for spec in recipe.objects
    ]
    return dataclasses.replace(recipe, objects=tuple(objects))


def misfit(spec: TensorSpec, name: str) -> str | None:
    """Tells why an object cannot have a format, whatever its dtype; None if it can."""
    if name == spec.format:
        return None
    if spec.words:
        return f"its {spec.format} words are copied from the source; it cannot be {name}"
    if isinstance(FORMATS[name], BlockScaledFormat):
        return f"{name} is copied from a source module and no encoder makes it; it stays {spec.format}"
    try:
        geometry(FORMATS[name], spec.shape)
    except LayoutError as error:
        return str(error)
    return None


def _altered(spec: TensorSpec, name: str) -> TensorSpec:
    if name == spec.format:
        return spec
    encoder = next(iter(FORMATS[name].encoders), None)
    return dataclasses.replace(
        spec, format=name, layout=LAYOUT_OF_FORMAT[name], encoder=encoder, format_change=None
    )


def stored_objects(plan: Plan) -> list[Stored]:
    """Returns the objects of a plan in stored order."""
    return [
        Stored(item.name, item.nbytes, item.shape, item.numeric.name)
        if isinstance(item, PlannedTensor)
        else Stored(item.name, item.nbytes)
        for item in plan.objects
    ]


def file_bytes(recipe: Recipe, objects: Iterable[Stored], formats: Mapping[str, str] | None = None) -> int:
    """Returns the exact size of the artifact that holds these objects, alignment and directory included.

    Args:
        recipe: tells the artifact's identity.
        objects: in stored order.
        formats: the formats that some of them have instead.

    Raises:
        ArtifactError: the container cannot hold them.

    Source: container.md, "Framing" and "Geometry".
    """
    records = list(_records(objects, formats or {}))
    head = container.encode_head(container.Identity(recipe.model_id, recipe.weights_id), records)
    return len(head) + records[-1].end


def _records(objects: Iterable[Stored], formats: Mapping[str, str]) -> Iterator[container.ObjectRecord]:
    cursor = 0
    for item in objects:
        if item.shape is None or item.format is None:
            record: container.ObjectRecord = container.ResourceRecord(
                item.name, container.next_offset(cursor, container.ResourceRecord.kind), item.nbytes
            )
        else:
            name = formats.get(item.name, item.format)
            placed = geometry(FORMATS[name], item.shape)
            offset = container.next_offset(cursor, container.TensorRecord.kind)
            record = container.TensorRecord(item.name, item.shape, name, placed.layout, offset, placed.nbytes)
        yield record
        cursor = record.end


def expected_errors(
    specs: Iterable[TensorSpec], measurements: Measurements, wanted: Mapping[str, str], *, by_elements: bool
) -> list[Expected]:
    """Returns the errors of all objects that were measured and are not copied word for word, in their order.

    Args:
        specs: the objects as the recipe has them.
        wanted: the formats that some of them are to have instead.
        by_elements: weigh each object by its elements; else by its squared norm, which every one must have.
    """
    found = []
    for spec in specs:
        measured = measurements.of(spec)
        if measured is not None and not spec.words:
            name = wanted.get(spec.name, spec.format)
            before, after = (error_in(measured, numeric) for numeric in (spec.format, name))
            weight = math.prod(spec.shape) if by_elements else measured.signal
            found.append(Expected(spec.name, spec.format, name, measured, before, after, float(weight or 0)))
    return found


def error_in(measured: Measured, name: str) -> float:
    """Returns the relative L2 error that a measured object has in a format, or would have."""
    columns = measured.shape[-1] if measured.shape else 1
    return expected_error(measured.relative_error, measured.numeric, FORMATS[name], columns)


def is_guess(measured: Measured, name: str) -> bool:
    """Tells whether the error in a format rests on the assumption of normal values."""
    return assumes_normal(measured.numeric, FORMATS[name])


def total_error(errors: Iterable[tuple[float, float]]) -> float:
    """Returns the relative error of several objects together, from the error and the weight of each."""
    pairs = list(errors)
    weight = math.fsum(weight for _, weight in pairs)
    noise = math.fsum(error**2 * weight for error, weight in pairs)
    return math.sqrt(noise / weight) if weight else 0.0
