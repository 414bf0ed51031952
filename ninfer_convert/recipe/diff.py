"""What two recipes do differently: identity, sources, inputs, conditions, objects; equal changes of layers as one.

Owns the comparison and its text. Evidence, comments and how a recipe is written are no difference: they change no byte.

Source: recipe.md, duties 1 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_convert.errors import printable
from ninfer_convert.formats import FORMATS
from ninfer_convert.layout import geometry
from ninfer_convert.recipe.counting import plural
from ninfer_convert.recipe.folding import folded, pattern, placed
from ninfer_convert.recipe.model import (
    InputSpec,
    ObjectSpec,
    Recipe,
    Requirement,
    ResourceOrigin,
    SourceSpec,
    TensorSpec,
)

Json = dict[str, Any]

_WHOLE = ("identity", "sources", "ignored", "inputs", "conditions")
_OBJECTS = ("only_first", "only_second", "changed", "reordered")
"""The members of a difference that are empty where there is none."""

_MADE_OF = ("value", "words")


def difference(here: Recipe, there: Recipe, names: Collection[str] | None = None) -> Json:
    """Returns what two recipes do differently, as a JSON value; `[a, b]` is what the first and what the second says.

    Args:
        names: the only objects to compare, and nothing but objects; all and everything by default.
    """
    found: Json = {"equal": True, "recipes": [_recipe_json(here), _recipe_json(there)]}
    if names is None:
        found["identity"] = _fields(_identity(here), _identity(there))
        found["sources"] = _named(here.sources, there.sources, _source_fields)
        ignored = {name: _ignored(here, there, name) for name in here.sources if name in there.sources}
        found["ignored"] = {name: sides for name, sides in ignored.items() if sides}
        found["inputs"] = _named(here.inputs, there.inputs, _input_fields)
        found["conditions"] = _only(_conditions(here), _conditions(there))
    mine, theirs = _objects(here, names), _objects(there, names)
    found["compared"] = len({**mine, **theirs})
    found["only_first"] = _groups(
        _Finding(name, _kind(spec), _nbytes(spec), 0) for name, spec in mine.items() if name not in theirs
    )
    found["only_second"] = _groups(
        _Finding(name, _kind(spec), 0, _nbytes(spec)) for name, spec in theirs.items() if name not in mine
    )
    common = [(spec, theirs[spec.name]) for spec in mine.values() if spec.name in theirs]
    changes = [(a, b, _fields(_object_fields(a, here), _object_fields(b, there))) for a, b in common]
    found["changed"] = _groups(
        _Finding(a.name, {"changed": said}, _nbytes(a), _nbytes(b)) for a, b, said in changes if said
    )
    found["reordered"] = _first_out_of_place([a.name for a, _ in common], [name for name in theirs if name in mine])
    found["tensor_bytes"] = [sum(map(_nbytes, mine.values())), sum(map(_nbytes, theirs.values()))]
    found["equal"] = not any(found.get(part) for part in (*_WHOLE, *_OBJECTS))
    return found


def difference_text(found: Json) -> str:
    """Returns a difference as text; what stands left of an arrow is the first recipe's."""
    first, second = (recipe["file"] for recipe in found["recipes"])
    before, after = found["tensor_bytes"]
    if found["equal"]:
        count = found["compared"]
        return f"the recipes do the same: {count:,} {plural(count, 'object')}, {before:,} bytes of tensors"
    lines = [f"{printable(first)} -> {printable(second)}"]
    for part in ("identity", "sources", "inputs"):
        lines += _section(part, _field_lines(found.get(part, {})))
    for name, sides in found.get("ignored", {}).items():
        lines += _section(f"ignored tensors of {name}", _side_lines(sides))
    lines += _section("conditions", _side_lines(found.get("conditions") or [[], []]))
    lines += _section("objects only in the first", map(_present_line, found["only_first"]))
    lines += _section("objects only in the second", map(_present_line, found["only_second"]))
    lines += _section("objects that differ", map(_changed_line, found["changed"]))
    if found["reordered"]:
        a, b = map(printable, found["reordered"])
        lines += _section("order", [f"  where the first stores {a}, the second stores {b}"])
    growth = f" ({(after - before) / before:+.1%})" if before and before != after else ""
    lines.append(f"bytes of tensors: {_arrow(f'{before:,}', f'{after:,}')}{growth}")
    return "\n".join(lines)


# -- what is compared -----------------------------------------------------------------------------------------


def _recipe_json(recipe: Recipe) -> Json:
    return {"file": printable(recipe.path), "id": recipe.id, "sha256": recipe.sha256}


def _identity(recipe: Recipe) -> Json:
    return {"id": recipe.id, "model_id": recipe.model_id, "weights_id": recipe.weights_id}


def _source_fields(source: SourceSpec) -> Json:
    fields = _said(repo=source.repo, revision=source.revision, dtype=list(source.dtypes))
    fields |= _members("config", source.config)
    fields |= _members("prefix", source.prefixes)
    return fields


def _members(path: str, value: Any) -> Json:
    """Returns the members of nested mappings by their paths."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {key: leaf for name, member in value.items() for key, leaf in _members(f"{path}.{name}", member).items()}


def _ignored(here: Recipe, there: Recipe, name: str) -> list[list[str]]:
    sides = _only(*([glob for glob, _ in recipe.sources[name].ignore] for recipe in (here, there)))
    return [_folded_names(side) for side in sides]


def _folded_names(names: Sequence[str]) -> list[str]:
    forms: dict[str, list[tuple[int, ...]]] = {}
    for form, numbers in map(pattern, names):
        forms.setdefault(form, []).append(numbers)
    return [name for form, numbers in forms.items() for name in folded(form, numbers)]


def _input_fields(item: InputSpec) -> Json:
    return _said(sha256=item.sha256)


def _conditions(recipe: Recipe) -> list[str]:
    return [str(condition.value) for condition in recipe.conditions]


def _objects(recipe: Recipe, names: Collection[str] | None) -> dict[str, ObjectSpec]:
    return {spec.name: spec for spec in recipe.objects if names is None or spec.name in names}


def _kind(spec: ObjectSpec) -> Json:
    if isinstance(spec, TensorSpec):
        return {"kind": "tensor", "shape": list(spec.shape), "format": spec.format}
    return {"kind": "resource"}


def _object_fields(spec: ObjectSpec, recipe: Recipe) -> Json:
    optional = ", optional" if spec.component in recipe.optional_components else ""
    component = None if spec.component is None else spec.component + optional
    if isinstance(spec, TensorSpec):
        return {
            **_said(kind="tensor", shape=list(spec.shape), format=spec.format, encoder=spec.encoder),
            "words" if spec.words else "value": str(spec.value),
            **_said(require=sorted(map(_rule_text, spec.requirements)), component=component),
        }
    places = {"from": [_origin_text(origin) for origin in spec.origins]}
    return {"kind": "resource", **places, **_said(sha256=spec.sha256, component=component)}


def _rule_text(requirement: Requirement) -> str:
    bounds = "" if requirement.low is None else f" [{requirement.low!r}, {requirement.high!r}]"
    return f"{requirement.rule}{bounds}"


def _origin_text(origin: ResourceOrigin) -> str:
    place = f"input {origin.input}" if origin.input else f"{origin.source}:{origin.file}"
    return f"{place}, member {origin.member}" if origin.member else place


def _nbytes(spec: ObjectSpec) -> int:
    return geometry(FORMATS[spec.format], spec.shape).nbytes if isinstance(spec, TensorSpec) else 0


def _said(**members: Any) -> Json:
    """Returns the members that have a value."""
    return {name: value for name, value in members.items() if value is not None}


def _fields(a: Json, b: Json) -> Json:
    """Returns the members that differ, as pairs: None where a side does not have one, "null" where it says null.

    1, 1.0 and true are equal in Python and not in a recipe.
    """
    keys = [key for key in {**a, **b} if (key in a, repr(a.get(key))) != (key in b, repr(b.get(key)))]
    return {key: [None if key not in c else "null" if c[key] is None else c[key] for c in (a, b)] for key in keys}


def _named(a: Mapping[str, Any], b: Mapping[str, Any], fields: Callable[[Any], Json]) -> Json:
    found: Json = {}
    for name in {**a, **b}:
        sides = [fields(side[name]) if name in side else None for side in (a, b)]
        if sides[0] is None or sides[1] is None:
            found[name] = [sides[0] is not None, sides[1] is not None]
        elif members := _fields(sides[0], sides[1]):
            found |= {f"{name}.{key}": pair for key, pair in members.items()}
    return found


def _only(a: Sequence[str], b: Sequence[str]) -> list[list[str]]:
    sides = [[text for text in a if text not in set(b)], [text for text in b if text not in set(a)]]
    return sides if any(sides) else []


def _first_out_of_place(a: Sequence[str], b: Sequence[str]) -> list[str]:
    return next(([mine, theirs] for mine, theirs in zip(a, b, strict=True) if mine != theirs), [])


# -- folding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Finding:
    """One object that differs: what is said of it, and its bytes here and there."""

    name: str
    said: Json
    before: int
    after: int


def _groups(findings: Iterable[_Finding]) -> list[Json]:
    """Returns objects of which the same is said as one entry, in the order of their first.

    Expressions are the same if they differ in the numbers of the objects' names only; those are then `<n>`.
    """
    groups: dict[tuple[str, str], list[tuple[tuple[int, ...], Json, _Finding]]] = {}
    for finding in findings:
        form, numbers = pattern(finding.name)
        said = _placed(finding.said, numbers)
        groups.setdefault((form, repr(said)), []).append((numbers, said, finding))
    found: list[Json] = []
    for (form, _), members in groups.items():
        said = members[0][1] if len(members) > 1 else members[0][2].said
        found.append(
            {
                "objects": folded(form, [numbers for numbers, _, _ in members]),
                "names": [finding.name for _, _, finding in members],
                **said,
                "bytes": [sum(sizes) for sizes in zip(*((f.before, f.after) for _, _, f in members), strict=True)],
            }
        )
    return found


def _placed(said: Json, numbers: tuple[int, ...]) -> Json:
    """Returns what is said of an object with the numbers of its name taken out of expressions."""
    if "changed" not in said:
        return said
    changed = {
        key: [text if text is None else placed(text, numbers) for text in pair] if key in _MADE_OF else pair
        for key, pair in said["changed"].items()
    }
    return {"changed": changed}


# -- text -----------------------------------------------------------------------------------------------------


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [title, *found] if found else []


def _field_lines(fields: Json) -> list[str]:
    return [f"  {printable(key)}: {_arrow(*map(_shown, pair))}" for key, pair in fields.items()]


def _side_lines(sides: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {sign} {printable(text)}" for sign, texts in zip("-+", sides, strict=True) for text in texts]


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return printable(str(value))


def _about(group: Json) -> str:
    """Returns the objects of a group, how many they are, and their bytes where some are declared."""
    before, after = group["bytes"]
    count = len(group["names"])
    size = f"{_arrow(f'{before:,}', f'{after:,}')} bytes" if before and after else f"{before or after:,} bytes"
    counted = [f"{count} objects"] if count > 1 else []
    counted += [size] if before or after else []
    return f"  ({', '.join(counted)})" if counted else ""


def _present_line(group: Json) -> str:
    names = ", ".join(map(printable, group["objects"]))
    what = f"{group['format']} {group['shape']}" if group["kind"] == "tensor" else group["kind"]
    return f"  {names}: {what}{_about(group)}"


def _changed_line(group: Json) -> str:
    names, changed = ", ".join(map(printable, group["objects"])), group["changed"]
    # A format brings its one encoder along.
    told = {key: pair for key, pair in changed.items() if key != "encoder" or "format" not in changed}
    if all(key in told for key in _MADE_OF):
        sides = zip(told.pop("value"), told.pop("words"), strict=True)
        told["made of"] = [f"words {words}" if value is None else f"value {value}" for value, words in sides]
    texts = [("" if key == "format" else f"{key} ") + _arrow(*map(_shown, pair)) for key, pair in told.items()]
    if sum(map(len, texts)) <= 100:
        return f"  {names}: {', '.join(texts)}{_about(group)}"
    return "\n".join([f"  {names}:{_about(group)}", *(f"    {text}" for text in texts)])
