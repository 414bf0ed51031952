"""A format for every object that may have another one: the artifact fits a size with the least squared error.

Owns which objects are tuned, which formats they may have, and the exact size. Refuses to know how the sum is
made small (`fill`), how a proposal is written down (`text`) and what a format costs (`error_model`).

Source: cli.md, `recipe tune`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_convert.errors import PlanError, UsageError, printable
from ninfer_convert.formats import FORMATS, I32, BlockScaledFormat, DirectFormat, GroupedFormat, NumericFormat
from ninfer_convert.layout import TENSOR_ALIGNMENT, align_up, geometry
from ninfer_convert.plan.measured import Measurements
from ninfer_convert.plan.planner import FLOAT_DTYPES, Plan, PlannedTensor
from ninfer_convert.plan.transform import Words
from ninfer_convert.plan.what_if import (
    Expected,
    Stored,
    error_in,
    expected_errors,
    file_bytes,
    matching,
    misfit,
    require_format,
    stored_objects,
)
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.expression import Cast, Expression, operands
from ninfer_convert.recipe.globs import Globs
from ninfer_convert.recipe.model import Recipe, ResourceSpec, TensorSpec
from ninfer_convert.tune.fill import Choices, Filling, fill

GROUPED = tuple(name for name, numeric in FORMATS.items() if isinstance(numeric, GroupedFormat))
MAX_ATTEMPTS = 8
"""How often the budget is corrected for what the directory takes; a page of it is 4096 bytes."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for: objects may have one of `formats`; `objects` empty means all that can be tuned."""

    target_bytes: int
    formats: tuple[str, ...] = GROUPED
    objects: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    by_elements: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """The objects that will be stored, in stored order, and the dtypes of values where they are known."""

    recipe: Recipe
    objects: Sequence[Stored]
    dtypes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """One tuned object: its format in the recipe and the one proposed; sizes in bytes."""

    expected: Expected
    nbytes_before: int
    nbytes_after: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A format for every tuned object.

    `least` is a relative error of the tuned objects together that nobody can be below within the size; `slope` is
    the part of their squared error that one more MiB would save.
    """

    wish: Wish
    tuned: tuple[Change, ...]
    unmeasured: tuple[str, ...]
    """Objects of a grouped format that stay as they are, since the report does not tell of them."""
    nbytes_before: int
    nbytes_after: int
    least: float
    slope: float

    @property
    def changes(self) -> list[Change]:
        """The objects that get another format."""
        return [change for change in self.tuned if change.expected.present != change.expected.wanted]


def planned_inventory(plan: Plan) -> Inventory:
    """Returns what a plan stores."""
    dtypes = {
        item.name: item.value.dtype
        for item in plan.objects
        if isinstance(item, PlannedTensor) and not isinstance(item.value, Words)
    }
    return Inventory(plan.recipe, stored_objects(plan), dtypes)


def reported_inventory(recipe: Recipe, measurements: Measurements) -> Inventory:
    """Returns what a recipe stores by itself; a report tells the sizes of resources and what is absent.

    Raises:
        PlanError: a resource is not in the report.
    """
    absent = {
        component
        for component in recipe.optional_components
        if not any(spec.component == component and spec.name in measurements.sizes for spec in recipe.objects)
    }
    objects, dtypes, missing = [], {}, []
    for spec in recipe.objects:
        if spec.component in absent:
            continue
        if isinstance(spec, ResourceSpec):
            if spec.name not in measurements.sizes:
                missing.append(spec.name)
            objects.append(Stored(spec.name, measurements.sizes.get(spec.name, 0)))
            continue
        objects.append(Stored(spec.name, geometry(FORMATS[spec.format], spec.shape).nbytes, spec.shape, spec.format))
        measured = measurements.of(spec)
        if measured is not None and (dtype := _dtype(spec.value, measured.dtypes)) is not None:
            dtypes[spec.name] = dtype
    if missing:
        names = ", ".join(map(printable, missing[:4])) + (", ..." if len(missing) > 4 else "")
        raise PlanError(
            f"report {measurements.where} does not tell the size of {counted(len(missing), 'resource')} "
            f"of {recipe.path} ({names}); give --source too"
        )
    return Inventory(recipe, objects, dtypes)


def _dtype(expression: Expression, dtypes: frozenset[str]) -> str | None:
    """Returns the dtype of a value made of tensors of these dtypes; None where that takes more than a glance."""
    if isinstance(expression, Cast):
        return {"FP32": "F32"}.get(expression.to, expression.to)
    below = operands(expression)
    if len(dtypes) != 1 or any(_has_cast(operand) for operand in below):
        return None
    return next(iter(dtypes))


def _has_cast(expression: Expression) -> bool:
    return isinstance(expression, Cast) or any(map(_has_cast, operands(expression)))


def propose(inventory: Inventory, measurements: Measurements, wish: Wish) -> Proposal:
    """Returns the formats with the least sum of squared errors of an artifact of at most the wished size.

    The sum is over the tuned objects: relative error squared times the squared norm of the values, or times the
    number of elements. Deterministic.

    Raises:
        UsageError: a glob matches nothing, a format can be nobody's, or no choice is small enough.
        PlanError: nothing can be tuned, or the report lacks what the weights need.
    """
    recipe = inventory.recipe
    specs, unmeasured = _tunable(inventory, measurements, wish)
    stored = {item.name: item for item in inventory.objects}
    options = [_options(spec, wish.formats, inventory.dtypes.get(spec.name)) for spec in specs]
    specs = [spec for spec, names in zip(specs, options, strict=True) if names]
    options = [names for names in options if names]
    if not specs:
        raise PlanError(
            f"{printable(recipe.path)}: no object can be tuned: none that report {measurements.where} measured may "
            f"have one of {', '.join(wish.formats)}"
        )
    expected = expected_errors(specs, measurements, {}, by_elements=wish.by_elements)
    aligned = _before_tensors(inventory.objects)
    items = []
    for entry, names in zip(expected, options, strict=True):
        sizes = [_nbytes(stored[entry.name], name) for name in names]
        costs = [align_up(size, TENSOR_ALIGNMENT) if entry.name in aligned else size for size in sizes]
        errors = [error_in(entry.measured, name) ** 2 * entry.weight for name in names]
        items.append(list(zip(costs, errors, strict=True)))

    def formats(filling: Filling) -> dict[str, str]:
        return {spec.name: names[i] for spec, names, i in zip(specs, options, filling.chosen, strict=True)}

    def size(filling: Filling) -> int:
        return file_bytes(recipe, inventory.objects, formats(filling))

    filling = _fitting(items, wish.target_bytes, size)
    wanted = formats(filling)
    tuned = tuple(
        Change(entry, stored[entry.name].nbytes, _nbytes(stored[entry.name], entry.wanted))
        for entry in expected_errors(specs, measurements, wanted, by_elements=wish.by_elements)
    )
    weight = math.fsum(entry.weight for entry in expected) or 1.0
    return Proposal(
        wish,
        tuned,
        tuple(unmeasured),
        file_bytes(recipe, inventory.objects),
        size(filling),
        math.sqrt(filling.least / weight),
        filling.slope * 2**20 / filling.error if filling.error else 0.0,
    )


def _tunable(
    inventory: Inventory, measurements: Measurements, wish: Wish
) -> tuple[list[TensorSpec], list[str]]:
    """Returns the objects that may get another format, and the names of those that nobody measured."""
    for name in wish.formats:
        require_format(name, f"--formats {printable(name)}")
        if isinstance(FORMATS[name], BlockScaledFormat):
            raise UsageError(f"--formats {name}: it is copied from a source module and no encoder makes it")
    globs = Globs()
    present = {item.name for item in inventory.objects}
    tensors = [spec for spec in inventory.recipe.objects if isinstance(spec, TensorSpec) and spec.name in present]
    named, kept = (
        {name for glob in chosen for name in matching(glob, tensors, f"{option} {printable(glob)}", globs)}
        for option, chosen in (("--objects", wish.objects), ("--keep", wish.keep))
    )
    meant = [
        spec
        for spec in tensors
        if spec.name not in kept
        and (spec.name in named if wish.objects else isinstance(FORMATS[spec.format], GroupedFormat))
        and not spec.words
        and len(spec.shape) == 2
        and spec.format != I32.name
    ]
    measured = [spec for spec in meant if measurements.of(spec) is not None]
    unmeasured = [spec for spec in meant if measurements.of(spec) is None]
    if wish.objects and unmeasured:
        raise PlanError(*(_unmeasured(spec, measurements) for spec in unmeasured))
    if not wish.by_elements:
        lacking = [spec for spec in measured if (found := measurements.of(spec)) is not None and found.rms is None]
        if lacking:
            raise PlanError(
                f"report {measurements.where} has no `rms` of {counted(len(lacking), 'object')}, "
                f"{printable(lacking[0].name)} first, as of an older converter: convert again, "
                "or weigh by elements (--weight elements)"
            )
    return measured, [spec.name for spec in unmeasured]


def _unmeasured(spec: TensorSpec, measurements: Measurements) -> str:
    label = f"{spec.mark}: object {printable(spec.name)}"
    found = measurements.tensors.get(spec.name)
    if found is None:
        return f"{label}: report {measurements.where} has no `stats` of it; convert it once in an encoded format"
    is_other = f"is of shape {list(found.shape)}" if found.shape != spec.shape else "is made of another value"
    return f"{label}: in report {measurements.where} it {is_other}; the report is of another recipe"


def _options(spec: TensorSpec, formats: Sequence[str], dtype: str | None) -> list[str]:
    """Returns the formats that an object may have."""
    return [name for name in formats if misfit(spec, name) is None and _takes(FORMATS[name], dtype)]


def _takes(numeric: NumericFormat, dtype: str | None) -> bool:
    if isinstance(numeric, DirectFormat):
        return dtype == numeric.source_dtype
    return dtype is None or dtype in FLOAT_DTYPES


def _nbytes(item: Stored, name: str) -> int:
    assert item.shape is not None
    return geometry(FORMATS[name], item.shape).nbytes


def _before_tensors(objects: Sequence[Stored]) -> set[str]:
    """Returns the objects behind which the next one, a tensor, begins at an aligned place."""
    return {item.name for item, following in itertools.pairwise(objects) if following.shape is not None}


def _fitting(items: Sequence[Choices], target: int, size: Callable[[Filling], int]) -> Filling:
    """Returns the best filling found whose artifact is not larger than the target.

    Args:
        size: tells the exact bytes of the artifact, which are those of the choices and a rest that hardly varies.
    """
    smallest = fill(items, sum(min(choices)[0] for choices in items))
    assert smallest is not None
    rest = size(smallest) - smallest.nbytes
    best, tried = None, set[int]()
    budget = target - rest
    for _ in range(MAX_ATTEMPTS):
        tried.add(budget)
        found = fill(items, budget)
        if found is None:
            break
        excess = size(found) - target
        if excess <= 0 and (best is None or found.error < best.error):
            best = found
        budget = budget - excess if excess > 0 else target - (size(found) - found.nbytes)
        if budget in tried:
            break
    if best is None and size(smallest) <= target:
        best = smallest
    if best is None:
        raise UsageError(
            f"--target-size {target}: the smallest artifact that these formats give has {size(smallest)} bytes; "
            "raise the size, allow smaller formats (--formats), or keep fewer objects"
        )
    return best
