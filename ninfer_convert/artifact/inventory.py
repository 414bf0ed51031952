"""An artifact's directory against what a plan, or a recipe alone, says it must be.

Owns names, order, shapes, formats, layouts, offsets, sizes and identity. Refuses to read tensor bytes
(`recheck`).

Source: container.md, "Directory" and "Geometry"; recipe.md, duties 1, 3 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ninfer_convert.artifact.container import Identity, ObjectRecord, ResourceRecord, TensorRecord, next_offset
from ninfer_convert.artifact.reader import Artifact
from ninfer_convert.artifact.verify import Problem
from ninfer_convert.errors import printable
from ninfer_convert.plan.planner import Plan, PlannedTensor
from ninfer_convert.recipe.counting import counted
from ninfer_convert.recipe.model import ObjectSpec, Recipe, TensorSpec

INVENTORY = "inventory"
ORDER = "order"
IDENTITY = "identity"
PINNED = "digest"


@dataclass(frozen=True, slots=True)
class _Expected:
    """What one object must be; a resource has no shape, format and layout, a recipe alone tells no size."""

    name: str
    kind: str
    shape: tuple[int, ...] | None = None
    format: str | None = None
    layout: str | None = None
    nbytes: int | None = None


def check_plan(artifact: Artifact, plan: Plan) -> tuple[Problem, ...]:
    """Compares names, order, kinds, shapes, formats, layouts, sizes, offsets and identity with a plan.

    The offsets of a plan are the first permitted ones. An object of another size moves all behind it, which is
    no problem of theirs, so an offset is judged by where the object before it ends.

    Source: container.md, "Directory" and "Geometry".
    """
    expected = []
    for item in plan.objects:
        if isinstance(item, PlannedTensor):
            what = item.shape, item.numeric.name, item.geometry.layout, item.nbytes
            expected.append(_Expected(item.name, TensorRecord.kind, *what))
        else:
            expected.append(_Expected(item.name, ResourceRecord.kind, nbytes=item.nbytes))
    problems = _compared(artifact, _identity(plan.recipe), expected)
    return (*problems, *_offset_problems(artifact))


def check_recipe(artifact: Artifact, recipe: Recipe, *, unpinned: bool = False) -> tuple[Problem, ...]:
    """Compares names, order, kinds, shapes, formats, layouts and identity with a recipe, without its sources.

    An optional component may be absent, whole. Resources are hashed where the recipe pins their SHA-256.

    Args:
        unpinned: leaves the digests of resources out.

    Source: recipe.md, duties 1, 3 and 6.
    """
    absent = {
        component
        for component in recipe.optional_components
        if not any(spec.component == component and spec.name in artifact.objects for spec in recipe.objects)
    }
    specs = [spec for spec in recipe.objects if spec.component not in absent]
    problems = _compared(artifact, _identity(recipe), [_expected(spec) for spec in specs])
    return problems if unpinned else (*problems, *_digests(artifact, specs))


def other_recipe(problems: Sequence[Problem]) -> str | None:
    """Returns what shows that an artifact is of another recipe: its identity, else names of objects; else None."""
    identity = [problem.detail for problem in problems if problem.check == IDENTITY]
    names = [problem for problem in problems if problem.check == INVENTORY]
    if identity:
        return "; ".join(identity)
    if names:
        return f"{counted(len(names), 'object')} in one of them alone, {printable(names[0].object or '')} first"
    return None


def _identity(recipe: Recipe) -> Identity:
    return Identity(recipe.model_id, recipe.weights_id)


def _expected(spec: ObjectSpec) -> _Expected:
    if isinstance(spec, TensorSpec):
        return _Expected(spec.name, TensorRecord.kind, spec.shape, spec.format, spec.layout)
    return _Expected(spec.name, ResourceRecord.kind)


def _digests(artifact: Artifact, specs: Sequence[ObjectSpec]) -> Iterator[Problem]:
    for spec in specs:
        if isinstance(spec, TensorSpec) or spec.sha256 is None:
            continue
        if not isinstance(artifact.objects.get(spec.name), ResourceRecord):
            continue
        found = artifact.digest(spec.name)
        if found != spec.sha256:
            yield Problem(spec.name, PINNED, f"SHA-256 is {found}; the recipe requires {spec.sha256}")


def _compared(artifact: Artifact, identity: Identity, expected: Sequence[_Expected]) -> tuple[Problem, ...]:
    problems = list(_identity_problems(artifact.identity, identity))
    named = {item.name: item for item in expected}
    for name, record in artifact.objects.items():
        if name in named:
            problems += _record_problems(record, named[name])
        else:
            problems.append(Problem(name, INVENTORY, "the recipe does not name this object"))
    problems += [
        Problem(item.name, INVENTORY, "the recipe names this object; the artifact does not hold it")
        for item in expected
        if item.name not in artifact.objects
    ]
    found_order = [name for name in artifact.objects if name in named]
    wanted_order = [item.name for item in expected if item.name in artifact.objects]
    for index, (found, wanted) in enumerate(zip(found_order, wanted_order, strict=True)):
        if found != wanted:
            detail = f"stands where the recipe has '{printable(wanted)}', {index} objects of both before it"
            problems.append(Problem(found, ORDER, detail))
            break
    return tuple(problems)


def _offset_problems(artifact: Artifact) -> Iterator[Problem]:
    cursor = 0
    for record in artifact.objects.values():
        first = next_offset(cursor, record.kind)
        if record.offset != first:
            yield Problem(record.name, "offset", f"{record.offset}; a plan takes the first permitted one, {first}")
        cursor = record.end


def _identity_problems(found: Identity, required: Identity) -> Iterator[Problem]:
    for member in ("model_id", "weights_id"):
        is_id, wanted = getattr(found, member), getattr(required, member)
        if is_id != wanted:
            detail = f"{member} is '{printable(is_id)}'; the recipe states '{printable(wanted)}'"
            yield Problem(None, IDENTITY, detail)


def _record_problems(record: ObjectRecord, expected: _Expected) -> Iterator[Problem]:
    if record.kind != expected.kind:
        yield Problem(record.name, "kind", f"a {record.kind}; the recipe states a {expected.kind}")
        return
    for member in ("shape", "format", "layout", "nbytes") if isinstance(record, TensorRecord) else ("nbytes",):
        found, wanted = getattr(record, member), getattr(expected, member)
        if wanted is not None and found != wanted:
            shown = [list(value) if isinstance(value, tuple) else value for value in (found, wanted)]
            yield Problem(record.name, member.removeprefix("n"), f"{shown[0]}; the recipe states {shown[1]}")
