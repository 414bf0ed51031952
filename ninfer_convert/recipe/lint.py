"""What is right and yet hardly meant: definitions that nothing uses, changes and conditions without effect.

Owns the warnings about one recipe file; what it extends is warned of when that is looked at. A warning is told only
where leaving the thing out would change no artifact. Refuses to know what is wrong (`recipe_loader`).

Source: recipe.md, duties 3, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ninfer_convert.recipe.change_log import Step
from ninfer_convert.recipe.expression import Mark, Module, Shortlist, Tensor, leaves
from ninfer_convert.recipe.globs import covers
from ninfer_convert.recipe.loader import Reading
from ninfer_convert.recipe.model import Recipe, ResourceSpec, SourceSpec, TensorSpec
from ninfer_convert.recipe.problems import quoted
from ninfer_convert.recipe.scope import placeholders
from ninfer_convert.recipe.yaml_nodes import ListNode, MapNode, Node, ScalarNode

MAX_PAIRS = 100_000
"""Pairs of globs that are compared; a recipe that has more of them gets no warning about its globs."""

Warned = tuple[Mark, str]


def warnings(reading: Reading, changes: Sequence[Step] = ()) -> list[Warned]:
    """Returns what is to be said about a recipe that is right, in the order of the places.

    Args:
        reading: the recipe.
        changes: what became of its changes, where a `ChangeLog` looked on.
    """
    file = reading.chain[-1].mark.file
    found = [
        *_unused_names(reading),
        *_unused_sets(reading),
        *_unused_values(reading),
        *_unused_files(reading),
        *_idle_changes(changes),
        *((mark, "'when' always holds: every round of the loops around it is in its sets")
          for mark in reading.always_true),
        *_covered_globs(reading.recipe),
    ]
    return sorted({(mark, text) for mark, text in found if mark.file == file})


def _sections(reading: Reading, *, without: str) -> Iterator[Node]:
    """Yields every section of all files but those of one name."""
    for document in reading.chain:
        yield from (node for section, node in document.sections.items() if section != without)


def _definitions(reading: Reading, section: str) -> dict[str, tuple[ScalarNode, Node]]:
    """Returns the name and value nodes of a section of named things; the last file that defines one counts."""
    found: dict[str, tuple[ScalarNode, Node]] = {}
    for document in reading.chain:
        table = document.sections.get(section)
        if isinstance(table, MapNode):
            found |= {name: (table.keys[name], node) for name, node in table.members.items()}
    return found


def _scalars(node: Node) -> Iterator[ScalarNode]:
    """Yields every key and every scalar below a node."""
    if isinstance(node, ScalarNode):
        yield node
    elif isinstance(node, ListNode):
        for item in node.items:
            yield from _scalars(item)
    else:
        yield from node.keys.values()
        for member in node.members.values():
            yield from _scalars(member)


def _reached(begin: Iterable[str], used_by: Mapping[str, Iterable[str]]) -> set[str]:
    """Returns the names that are used, be it by other names that are."""
    found: set[str] = set()
    pending = list(begin)
    while pending:
        name = pending.pop()
        if name in used_by and name not in found:
            found.add(name)
            pending += used_by[name]
    return found


# -- definitions ------------------------------------------------------------------------------------------------


def _unused_names(reading: Reading) -> Iterator[Warned]:
    names = _definitions(reading, "names")
    used_by = {name: list(_used_names(node)) for name, (_, node) in names.items()}
    used = _reached((name for node in _sections(reading, without="names") for name in _used_names(node)), used_by)
    yield from ((key.mark, f"name {quoted(name)} is not used") for name, (key, _) in names.items() if name not in used)


def _used_names(node: Node) -> Iterator[str]:
    for scalar in _scalars(node):
        yield from placeholders(scalar.text)


def _unused_sets(reading: Reading) -> Iterator[Warned]:
    sets = _definitions(reading, "sets")
    used_by = {name: [scalar.text for scalar in _scalars(node)] for name, (_, node) in sets.items()}
    used = _reached((name for node in _sections(reading, without="sets") for name in _picked(node)), used_by)
    yield from ((key.mark, f"set {quoted(name)} is not used") for name, (key, _) in sets.items() if name not in used)


def _picked(node: Node) -> Iterator[str]:
    """Yields the texts below every `for` and `when`, among them the names of sets."""
    if isinstance(node, ListNode):
        for item in node.items:
            yield from _picked(item)
    elif isinstance(node, MapNode):
        for key, member in node.members.items():
            if key in ("for", "when"):
                yield from (scalar.text for scalar in _scalars(member))
            else:
                yield from _picked(member)


@dataclass(slots=True, eq=False)
class _Value:
    """A named value, with the values that are visible where it is defined."""

    key: ScalarNode
    node: Node
    visible: Mapping[str, _Value]
    is_used: bool = False


def _unused_values(reading: Reading) -> Iterator[Warned]:
    values: list[_Value] = []
    outermost = _visible(_definitions(reading, "values"), {}, values)
    for document in reading.chain:
        for section in ("objects", "conditions", "change"):
            if section in document.sections:
                _use(document.sections[section], outermost, values)
    unused = [value.key for value in values if not value.is_used]
    yield from ((key.mark, f"value {quoted(key.text)} is not used") for key in unused)


def _visible(
    definitions: Mapping[str, tuple[ScalarNode, Node]], around: Mapping[str, _Value], values: list[_Value]
) -> Mapping[str, _Value]:
    visible = dict(around)
    for name, (key, node) in definitions.items():
        visible[name] = _Value(key, node, visible)
        values.append(visible[name])
    return visible


def _use(node: Node, visible: Mapping[str, _Value], values: list[_Value]) -> None:
    """Marks the values that a node uses; those of blocks below it are added to `values`."""
    if isinstance(node, ScalarNode):
        value = visible.get(node.text[1:]) if node.text.startswith("$") else None
        if value is not None and not value.is_used:
            value.is_used = True
            _use(value.node, value.visible, values)
    elif isinstance(node, ListNode):
        for item in node.items:
            _use(item, visible, values)
    else:
        own = node.members.get("values")
        if isinstance(own, MapNode):
            definitions = {name: (own.keys[name], member) for name, member in own.members.items()}
            visible = _visible(definitions, visible, values)
        for key, member in node.members.items():
            if key != "values":
                _use(member, visible, values)


def _unused_files(reading: Reading) -> Iterator[Warned]:
    recipe = reading.recipe
    sources, inputs = _read_from(recipe)
    for section, what, used in (("sources", "source", sources), ("inputs", "input", inputs)):
        for name, (key, _) in _definitions(reading, section).items():
            if name not in used:
                yield key.mark, f"{what} {quoted(name)} is not used by any object or condition"


def _read_from(recipe: Recipe) -> tuple[set[str], set[str]]:
    """Returns the sources and inputs that objects and conditions read."""
    sources: set[str] = set()
    inputs: set[str] = set()
    values = [spec.value for spec in recipe.objects if isinstance(spec, TensorSpec)]
    for leaf in (leaf for value in [*values, *(spec.value for spec in recipe.conditions)] for leaf in leaves(value)):
        if isinstance(leaf, Tensor | Module | Shortlist):
            sources.add(leaf.source)
        if isinstance(leaf, Shortlist):
            inputs.add(leaf.counts)
    for spec in recipe.objects:
        for origin in spec.origins if isinstance(spec, ResourceSpec) else ():
            if origin.input is None:
                sources.add(origin.source)
            else:
                inputs.add(origin.input)
    return sources, inputs


# -- changes and globs ------------------------------------------------------------------------------------------


def _idle_changes(steps: Sequence[Step]) -> Iterator[Warned]:
    for step in steps:
        if not step.has_effect:
            yield step.mark, "this change changes nothing: the objects are like that already"
        elif not step.standing and step.last_overwritten is not None:
            place = f"line {step.last_overwritten.line}"
            yield step.mark, f"this change has no effect: all of it is changed again further down, last on {place}"


def _covered_globs(recipe: Recipe) -> Iterator[Warned]:
    for source in recipe.sources.values():
        by_place: dict[Mark, list[str]] = {}
        for glob, mark in source.ignore:
            by_place.setdefault(mark, []).append(glob)
        if len(source.ignore) ** 2 <= MAX_PAIRS:
            yield from _covered(source, by_place)


def _covered(source: SourceSpec, by_place: Mapping[Mark, list[str]]) -> Iterator[Warned]:
    """Yields the places whose globs match nothing that one other place does not match; the first of equals stays."""
    idle: set[Mark] = set()
    for mark, globs in reversed(list(by_place.items())):
        for other, wider in by_place.items():
            if other == mark or other in idle or not all(any(covers(wide, glob) for wide in wider) for glob in globs):
                continue
            idle.add(mark)
            place = other if other.file != mark.file else f"line {other.line}"
            name = quoted(wider[0]) if len(wider) == 1 else "the entry"
            yield mark, f"{quoted(globs[0])} is ignored already in source {source.name}, by {name} on {place}"
            break
